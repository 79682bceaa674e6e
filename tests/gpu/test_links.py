"""Links between GPUs: the contract of stage links, with streams in place of waits on the host.

Runs what the machine has: `ipc` on one GPU always, `ipc` and `nccl` on two GPUs where there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import link_programs as programs
import pytest
import torch
from stage_processes import DEADLINE_S, LinkedStage, Pipeline, StageProcess, StageProcesses, open_links

from raypp.errors import ConfigError
from raypp.transport.rendezvous import RendezvousServer

FORWARD_BYTES, FEEDBACK_BYTES = 1 << 18, 1 << 14

SETUPS = {
    "ipc-one-gpu": ("ipc", ["cuda:0", "cuda:0"]),
    "ipc-two-gpus": ("ipc", ["cuda:0", "cuda:1"]),
    "nccl-two-gpus": ("nccl", ["cuda:0", "cuda:1"]),
}
RINGS = {
    "ipc-three-stages-one-gpu": ("ipc", ["cuda:0"] * 3),
    "ipc-three-stages-two-gpus": ("ipc", ["cuda:0", "cuda:1", "cuda:0"]),
    "auto-three-stages": ("auto", ["cuda:0", "cuda:0", "cuda:1"]),
}
Setup = tuple[str, list[str]]


@pytest.fixture(scope="module")
def processes() -> Iterator[StageProcesses]:
    processes = StageProcesses()
    yield processes
    processes.close()


@pytest.fixture(params=SETUPS.values(), ids=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return _possible(request.param)


def _possible(setup: Setup) -> Setup:
    if max(int(device.split(":")[1]) for device in setup[1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    if setup[0] == "nccl":
        pytest.importorskip("nccl.bindings")
    return setup


@contextmanager
def opened(processes: StageProcesses, setup: Setup, **sizes: int) -> Iterator[Pipeline]:
    pipeline = processes.open(*setup, **sizes)
    try:
        yield pipeline
        pipeline.close()
    except BaseException:
        processes.close()  # the next test gets new ones: these may hang
        raise


@contextmanager
def fresh(environment: dict[str, str] | None = None) -> Iterator[StageProcesses]:
    """Processes for a test that leaves them unusable."""
    processes = StageProcesses(environment)
    try:
        yield processes
    finally:
        processes.close()


def test_slices_of_messages_are_gathered_by_the_stream() -> None:
    _possible(SETUPS["nccl-two-gpus"])
    members, server = [StageProcess({}) for _ in range(2)], RendezvousServer()
    try:
        calls = [
            member.call(programs.run_slices, server.address, torch.device("cuda", rank), rank, 500, FORWARD_BYTES)
            for rank, member in enumerate(members)
        ]
        assert Pipeline.results(calls) == [0, 0]
    finally:
        server.close()
        for member in members:
            member.close()


def test_thousands_of_messages_of_all_sizes_arrive_whole(processes: StageProcesses, setup: Setup) -> None:
    with opened(processes, setup) as pipeline:
        assert pipeline.run(programs.run_ring, 2000, FORWARD_BYTES, FEEDBACK_BYTES) == [0] * len(setup[1])


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
def test_rings_of_three(processes: StageProcesses, ring: Setup) -> None:
    with opened(processes, _possible(ring)) as pipeline:
        print(pipeline.kinds)
        assert pipeline.run(programs.run_ring, 1000, FORWARD_BYTES, FEEDBACK_BYTES) == [0, 0, 0]


@pytest.mark.parametrize("slow", [0, 1], ids=["slow-sender", "slow-receiver"])
def test_ends_of_unequal_speed(processes: StageProcesses, setup: Setup, slow: int) -> None:
    with opened(processes, setup) as pipeline:
        assert pipeline.run(programs.run_ring, 200, FORWARD_BYTES, FEEDBACK_BYTES, {slow: 2.0}) == [0, 0]


def test_feedback_taken_a_second_late_while_the_reverse_edge_is_full(
    processes: StageProcesses, setup: Setup, tmp_path: Path
) -> None:
    with opened(processes, setup) as pipeline:
        late = (200, FORWARD_BYTES, FEEDBACK_BYTES, None, 1.0, str(tmp_path / "full"))
        assert pipeline.run(programs.run_ring, *late) == [0, 0]


def test_large_messages(processes: StageProcesses, setup: Setup) -> None:
    with opened(processes, setup, forward_bytes=1 << 24) as pipeline:
        assert pipeline.run(programs.run_ring, 100, 1 << 24, FEEDBACK_BYTES) == [0, 0]


def test_links_around_graph_replays(processes: StageProcesses, setup: Setup) -> None:
    with opened(processes, setup) as pipeline:
        args = (300, FORWARD_BYTES, FEEDBACK_BYTES, None, 0.0, None, True)
        assert pipeline.run(programs.run_ring, *args) == [0, 0]


def test_host_links_under_gpu_tensors(processes: StageProcesses) -> None:
    with opened(processes, ("gloo", ["cuda:0", "cuda:0"])) as pipeline:
        assert pipeline.kinds == [
            ["RingSender", "RingReceiver"],
            ["RingReceiver", "RingSender"],
        ]
        assert pipeline.run(programs.run_ring, 200, FORWARD_BYTES, FEEDBACK_BYTES) == [0, 0]


def test_opening_again_and_again_keeps_no_memory(processes: StageProcesses, setup: Setup) -> None:
    """Needs the GPU for itself: memory that a neighbour still has mapped is seen only in the device's total."""
    used = []
    for _ in range(4):
        with opened(processes, setup, forward_bytes=1 << 24) as pipeline:
            assert pipeline.run(programs.run_ring, 10, 1 << 24, FEEDBACK_BYTES) == [0, 0]
        used.append(pipeline.run(programs.gpu_bytes_in_use)[0] >> 20)
    print(f"MiB in use after each round: {used}")
    slots_mib = 3 * 16
    assert used[-1] - used[1] < slots_mib / 2, "the slots of closed links are still there"


def test_auto_takes_ipc_where_it_can(processes: StageProcesses) -> None:
    with opened(processes, ("auto", ["cuda:0", "cuda:0"])) as pipeline:
        assert pipeline.kinds == [["IpcSender", "IpcReceiver"], ["IpcReceiver", "IpcSender"]]


def test_auto_on_two_gpus(processes: StageProcesses) -> None:
    with opened(processes, _possible(("auto", ["cuda:0", "cuda:1"]))) as pipeline:
        peers = torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)
        expected = "Ipc" if peers else "Nccl"
        assert all(name.startswith(expected) for names in pipeline.kinds for name in names), pipeline.kinds


def test_nccl_on_one_gpu_is_refused(processes: StageProcesses) -> None:
    with pytest.raises(ConfigError, match="two ranks on one GPU"):
        processes.open("nccl", ["cuda:0", "cuda:0"])


def open_both_ends_here(stage: LinkedStage) -> str:
    """Try to open two stages in one process; return what is said about it."""
    from concurrent.futures import ThreadPoolExecutor

    server = RendezvousServer()
    stages = [LinkedStage(), LinkedStage()]
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(open_links, each, "ipc", index, 2, "cuda:0", server.address, 1024, 1024)
            for index, each in enumerate(stages)
        ]
        errors = [call.exception() for call in calls]
    server.close()
    return " / ".join(str(error) for error in errors)


def test_ipc_inside_one_process_is_refused() -> None:
    with fresh() as processes:
        pipeline = processes.open("gloo", ["cpu", "cpu"])
        said = pipeline.stages[0].call(open_both_ends_here).result(DEADLINE_S)
        assert said.count("one process") == 2


MAX_CONNECTIONS = {"default": {}, "one-connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}


def test_everything_over_one_hardware_queue(setup: Setup, tmp_path: Path) -> None:
    with fresh(MAX_CONNECTIONS["one-connection"]) as processes, opened(processes, setup) as pipeline:
        late = (500, FORWARD_BYTES, FEEDBACK_BYTES, {1: 0.5}, 1.0, str(tmp_path / "full"))
        assert pipeline.run(programs.run_ring, *late) == [0, 0]


def test_abort_with_work_in_flight(setup: Setup) -> None:
    with fresh() as processes:
        pipeline = processes.open(*setup)
        # Over NCCL each end has to abort for itself; over ipc one end lets go of both.
        aborting = [0] if setup[0] == "ipc" else [0, 1]
        said = pipeline.run(programs.hang_and_abort, aborting)
        print(said)
        assert all(stage["hung"] for stage in said), "nothing was in flight"


@pytest.mark.parametrize(
    ("killed", "environment"),
    [(0, MAX_CONNECTIONS["default"]), (1, MAX_CONNECTIONS["default"]), (1, MAX_CONNECTIONS["one-connection"])],
    ids=["first", "last", "last-one-connection"],
)
def test_a_survivor_of_a_killed_peer_gets_away(
    setup: Setup, killed: int, environment: dict[str, str], tmp_path: Path
) -> None:
    with fresh(environment) as processes:
        pipeline = processes.open(*setup)
        result = tmp_path / "result"
        survivor = pipeline.stages[1 - killed]
        waiting = survivor.call(programs.wait_for_a_dead_peer, str(result))
        programs._await_file(f"{result}.waiting")
        pipeline.stages[killed].kill()
        pipeline.stages[killed].exit_code(DEADLINE_S)
        Path(f"{result}.killed").touch()
        code = survivor.exit_code(DEADLINE_S / 2)
        said = result.read_text() if result.exists() else "nothing"
        print(SimpleNamespace(code=code, said=said))
        assert code == 7, "the survivor did not get away"
        if not environment or setup[0] != "ipc":  # one queue for all streams: what would let go waits behind the wait
            assert said.startswith("drained True")
        assert waiting.exception(DEADLINE_S) is not None
