"""Whose Ray it is: one that raypp started, one that is shared, one that was there; and stages on several nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from engine_listener import EngineListener
from leftovers import wait_until_gone
from ray.cluster_utils import Cluster as RayCluster

from raypp import LLM, EngineDeadError, ResourceError, SamplingParams, StageDiedError
from raypp.actors import engine_actors
from raypp.actors.cluster import Cluster
from raypp.actors.deadline import Deadline
from raypp.actors.engine_actors import hardware_of_stages, launch_engine
from raypp.actors.placement import alive_nodes
from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Gpu, Hardware, Machine
from raypp.testing import FakeStage

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_ray")]

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPTS = ["def main(", "import "]
WAIT_S = 60.0


def _fake(**settings) -> LLM:
    return LLM("tiny", stage_factory=FakeStage(step_ms=2), skip_tokenizer_init=True, **settings)


def _has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch: a second, and memory, that a driver has no use for."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def _tokens(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.full
def test_engines_share_the_ray_that_the_first_one_started(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    prompt = [{"prompt_token_ids": [1]}]
    first, second = _fake(), _fake()
    processes = first.processes()
    actors = (processes["driver"], *processes["stages"])
    assert [_has_torch(pid) for pid in actors] == [False, True]
    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in actors] == [own_priority, own_priority]
    first.close()
    assert ray.is_initialized()
    assert _tokens(second, prompt) == [list(range(2, 26))]
    first.close()
    assert _tokens(second, prompt) == [list(range(2, 26))]
    second.close()
    assert not ray.is_initialized(), "the last user ends it"


DRIVER_LIBRARY = """
from pathlib import Path
from types import SimpleNamespace
NVMLError, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = RuntimeError, 2, 0
SIZES_GB = list(map(int, Path(__file__).with_name("sizes").read_text().split()))
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: len(SIZES_GB)
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetMemoryInfo = lambda index: SimpleNamespace(total=SIZES_GB[index] * 10**9)
nvmlDeviceGetName = lambda index: f"card of {SIZES_GB[index]}"
nvmlDeviceGetCudaComputeCapability = lambda index: (9, 0)
nvmlDeviceGetP2PStatus = lambda *pair_and_link: 0
"""
"""pynvml of a node whose GPUs have the sizes that a file beside it says."""


@pytest.fixture(scope="module")
def gpus_there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the sizes of the second node's GPUs, in GB; there are none."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "pynvml.py").write_text(DRIVER_LIBRARY)
    (folder / "sizes").write_text("")
    return folder / "sizes"


@pytest.fixture(scope="module")
def cluster(gpus_there: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(initialize_head=True, head_node_args={**NODE, **HEAD})
    paths = f"{gpus_there.parent}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    cluster.add_node(**NODE, num_gpus=1, env_vars={"PYTHONPATH": paths})
    yield cluster
    if ray.is_initialized():
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def at_address(cluster, monkeypatch) -> RayCluster:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return cluster


def _node_of(pid: int) -> str:
    """Return the node on which an actor runs, by the arguments that its raylet gave to its process."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return next(v.decode() for v in file.read().split(b"\0") if v.startswith(b"RAY_RAYLET_PID="))


def test_a_cluster_that_was_there_is_used_and_left_alone(at_address):
    with LLM("tiny", num_stages=2) as llm:
        assert ray.get_runtime_context().gcs_address == at_address.address
        on_one_node = _tokens(llm)
        assert len({_node_of(pid) for pid in llm.processes()["stages"]}) == 1, "stages are packed where there is room"
    assert not ray.is_initialized()
    with LLM("tiny", num_stages=2, placement="strict_spread") as llm:
        assert len({_node_of(pid) for pid in llm.processes()["stages"]}) == 2
        assert _tokens(llm) == on_one_node
        pids = llm.processes()
    assert not wait_until_gone([pids["driver"], *pids["stages"]], 0.0), "ended, on both nodes"


def test_gpus_of_other_machines_count_as_what_they_are(at_address, gpus_there, monkeypatch):
    """Also where the engine starts on a machine with GPUs of its own."""
    large = Hardware(
        2, num_gpus=1, gpu_memory_bytes=48 * 10**9, gpu_name="large", machines=(Machine((Gpu(48 * 10**9),)),)
    )
    gpus_there.write_text("16")
    here = Cluster.connect()
    try:
        nodes = alive_nodes()
        own_id = ray.get_runtime_context().get_node_id()
        [other_id] = {node.node_id for node in nodes} - {own_id}
        [there] = hardware_of_stages(large, Deadline(WAIT_S)).machines  # Ray may not use the GPU here
        assert (there.node_id, [gpu.memory_bytes for gpu in there.gpus]) == (other_id, [16 * 10**9])
        with_gpu = [replace(node, resources={**node.resources, "GPU": 1.0}) for node in nodes]
        monkeypatch.setattr(engine_actors, "alive_nodes", lambda: with_gpu)
        both = hardware_of_stages(large, Deadline(WAIT_S))
        plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2, device="cuda", load_format="dummy"), both)
    finally:
        here.disconnect()
        gpus_there.write_text("")
    assert both.gpu_memory_bytes == 16 * 10**9
    assert [gpus.node_id for gpus in plan.gpus] == [own_id, other_id]
    assert [gpus.weakest.memory_bytes for gpus in plan.gpus] == [48 * 10**9, 16 * 10**9]


def _environment(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(variable.partition("=")[::2] for variable in variables)


@pytest.mark.full
def test_a_clusters_processes_take_variables_from_who_starts_the_engine(at_address, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("RAYPP_LOG_LEVEL", "INFO")
    with _fake(num_stages=2, placement="strict_spread") as llm:
        processes = llm.processes()
        for pid in (processes["driver"], *processes["stages"]):
            found = _environment(pid)
            assert (found.get("NCCL_SOCKET_IFNAME"), found.get("RAYPP_LOG_LEVEL")) == ("eth7", "INFO")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_stages": 3, "placement": "strict_spread"}, "no room"),
        ({"num_stages": 2, "stage_num_cpus": 1.5, "placement": "strict_pack"}, "no room"),
        ({"num_stages": 2, "stage_num_cpus": 1000.0}, "lacks resources"),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused_at_once(at_address, settings, words):
    started = time.monotonic()
    with pytest.raises(ResourceError, match=words) as caught:
        _fake(**settings)
    print(f"\n{caught.value}")
    assert time.monotonic() - started < WAIT_S / 2, "it was waited for"
    assert caught.value.expected is not None
    assert caught.value.got is not None


@pytest.mark.full
def test_what_others_hold_is_waited_for_and_a_connection_of_the_user_is_left_alone(at_address):
    ray.init(address=at_address.address, log_to_driver=False)
    with _fake(num_stages=2, stage_num_cpus=2.0) as holder:
        with pytest.raises(ResourceError, match="did not free") as caught:
            _fake(stage_num_cpus=2.0, start_timeout_s=2.0)
        assert "'CPU'" in str(caught.value)
        assert len(_tokens(holder, [{"prompt_token_ids": [1]}])[0]) == 24
    assert ray.is_initialized()
    ray.shutdown()


@pytest.mark.full
def test_a_node_that_is_lost_ends_in_the_named_error_and_a_new_engine_works(cluster, at_address):
    endless = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
    settings = {"num_stages": 2, "placement": "strict_spread", "close_timeout_s": 3.0, "max_engine_restarts": 0}
    with _fake(**settings) as llm, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(llm.generate, [{"prompt_token_ids": [1]}], endless)
        ends = time.monotonic() + WAIT_S
        while llm.stats()["num_generated_tokens"] < 5:
            assert time.monotonic() < ends
            time.sleep(0.01)
        [worker] = [node for node in cluster.list_all_nodes() if not node.is_head()]
        lost = time.monotonic()
        cluster.remove_node(worker, allow_graceful=False)
        error = pending.exception(WAIT_S)
        print(f"\nnode lost: {type(error).__name__} after {time.monotonic() - lost:.2f} s: {error}")
        assert isinstance(error, StageDiedError)
        assert error.stage_index == 1, "the first stage is on the driver's node"
    with _fake(num_stages=2) as llm:
        assert len(_tokens(llm, [{"prompt_token_ids": [1]}])[0]) == 24
    with pytest.raises(ResourceError, match="no room"):
        _fake(**settings)


@pytest.mark.skipif("FAULT_NODES" not in os.environ, reason="half a minute: Ray takes as long to notice a lost node")
@pytest.mark.parametrize(
    ("placement", "wait_s", "words"), [("spread", 60.0, ["lost", "back"]), ("strict_spread", 1.0, ["lost", "dead"])]
)
def test_an_engine_goes_on_where_there_is_room_when_a_node_is_lost(cluster, at_address, placement, wait_s, words):
    workers = [node for node in cluster.list_all_nodes() if not node.is_head()]
    worker, listener = workers[0] if workers else cluster.add_node(**NODE), EngineListener()
    config = EngineConfig.from_flat(
        "tiny", num_stages=2, placement=placement, close_timeout_s=3.0, max_engine_restarts=3, restart_wait_s=wait_s
    )
    engine = launch_engine(config, stage_factory=FakeStage(step_ms=2))
    try:
        engine.watch(listener)
        old = engine.processes()
        assert len({_node_of(pid) for pid in old["stages"]}) == 2
        listener.hears(*words, after=lambda: cluster.remove_node(worker, allow_graceful=False))
        print(f"\n{words}: {engine.recoveries()} {listener.errors[-1]}")
        assert not wait_until_gone([old["driver"], *old["stages"]], 0.0)
        if placement == "spread":
            processes = engine.processes()
            assert len({_node_of(pid) for pid in [processes["driver"], *processes["stages"]]}) == 1
        else:
            assert isinstance(listener.errors[-1], EngineDeadError)
            for words_of_it in (
                "cannot be started again",
                "room for 2 times {'CPU': 0.01}",
                "its end: stage 1",
            ):
                assert words_of_it in str(listener.errors[-1])
    finally:
        engine.close()


def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch):
    if ray.is_initialized():  # by a test before that failed
        ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ResourceError, match="cannot be reached"):
        _fake()
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ResourceError, match="Ray Client"):
        _fake()
    assert not ray.is_initialized()
    assert "RAY_ADDRESS" in os.environ
