"""Stages on several nodes, joined by a wire with a rate and a delay: texts, losses, firewalls, nodes that differ.

The nodes are those of `tools/node_bed.py`, on this machine; where it can hold none, these tests say so and are skipped.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_bed import OPEN_TO_RAY, NodeBed, address_of, obstacle
from node_links import measure_links
from node_program import PROMPTS
from program_on_bed import ROOT, WAIT_S, Program, namespace, pids_of, processes_of, stages_on, start_requests
from transformers import AutoTokenizer

from raypp.config.engine_config import EngineConfig
from raypp.models.registry import resolve_model_path
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.sampling_params import SamplingParams
from raypp.testing import LocalEngine

WHY_NOT = obstacle()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(WHY_NOT is not None, reason=f"no nodes on this machine: {WHY_NOT}")]

ENGINE = {"num_stages": 2, "placement": "strict_spread", "close_timeout_s": 3.0, "stage_num_threads": 1}
NUM_TOKENS = 24
HIDDEN_BYTES = 256 * 4  # of a token of tiny, in float32


def _texts_on_one_node() -> list[list[int]]:
    """Return the tokens of the program's prompts, computed by stages in this process."""
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2, stage_num_threads=1), Hardware(1))
    tokenizer = AutoTokenizer.from_pretrained(plan.stage_specs()[0].model_path)
    engine = LocalEngine(plan)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [engine.generate([tokenizer(prompt)["input_ids"]], params)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def other_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the second node finds packages in, before all others; it is empty."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def bed(other_packages: Path) -> Iterator[NodeBed]:
    """Make two nodes; afterwards nothing of them may be left."""
    mounts = Path("/proc/self/mounts").read_text()
    paths = {index: {"PYTHONPATH": f"{folder}:{ROOT}"} for index, folder in enumerate([ROOT, other_packages])}
    with NodeBed(2, gbits=10, delay_ms=0.5, environments=paths) as bed:
        namespaces = [namespace(bed, index) for index in range(2)]
        yield bed
    assert not [line for namespace in namespaces for line in processes_of(namespace)]
    assert Path("/proc/self/mounts").read_text() == mounts


@pytest.fixture
def program(bed: NodeBed) -> Iterator[Program]:
    program = Program(bed)
    yield program
    program.end()


def test_texts_on_two_nodes_are_those_of_one(bed, program):
    started = program.ask("start", engine=ENGINE)
    assert "error" not in started
    assert (stages_on(bed, 0), stages_on(bed, 1)) == ({"0"}, {"1"})
    carried = bed.wire.num_bytes
    answer = program.ask("generate", max_tokens=NUM_TOKENS)
    print(f"\nstarted in {started['seconds']:.1f} s, {NUM_TOKENS} tokens in {answer['seconds']:.2f} s")
    assert answer["token_ids"] == _texts_on_one_node()
    assert bed.wire.num_bytes - carried > 2 * NUM_TOKENS * HIDDEN_BYTES, "hidden states took another way"


@pytest.mark.full
def test_members_of_a_stage_stay_on_one_node_and_send_slices_to_another(bed, program):
    engine = {**ENGINE, "tensor_parallel_size": 2, "enable_prefix_caching": False}
    assert "error" not in program.ask("start", engine=engine)
    assert (stages_on(bed, 0), stages_on(bed, 1)) == ({"0_0", "0_1"}, {"1_0", "1_1"})
    assert program.ask("generate", max_tokens=NUM_TOKENS)["token_ids"] == _texts_on_one_node()
    carried, prompt = bed.wire.num_bytes, [2 + index % 400 for index in range(1500)]
    program.ask("generate", max_tokens=1, prompts=[{"prompt_token_ids": prompt}] * 2)
    times = (bed.wire.num_bytes - carried) / (2 * len(prompt) * HIDDEN_BYTES)
    print(f"\nhidden states crossed {times:.2f} times")
    assert 1 <= times < 1.5
    assert program.ask("generate", max_tokens=NUM_TOKENS)["token_ids"] == _texts_on_one_node()


@pytest.mark.full
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_is_named_also_where_others_wait_for_its_slice(bed, program, signal_number):
    engine = {**ENGINE, "tensor_parallel_size": 2, "max_engine_restarts": 3, "step_timeout_s": 5.0, "heartbeat_s": 0.2}
    assert "error" not in program.ask("start", engine=engine)
    right, kept = program.ask("generate", max_tokens=400)["token_ids"], pids_of(bed, 1, "ray::StageActor1")
    assert len(kept) == 2
    [pid] = pids_of(bed, 0, "ray::StageActor0_1")
    start_requests(program, max_tokens=400)
    os.kill(pid, signal_number)
    answer = program.ask("collect")
    assert answer.get("token_ids") == right, answer
    died = answer["stats"]["recoveries"]["last"]["died"]
    assert re.match("member 1 of stage 0 (died|is frozen)", died), died
    assert pids_of(bed, 1, "ray::StageActor1") == kept, "they keep their weights"


@pytest.mark.full
def test_variables_of_nccl_reach_stages_on_all_nodes(bed):
    variables = {"NCCL_SOCKET_IFNAME": "wire", "NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "1"}
    program = Program(bed, **variables)
    assert "error" not in program.ask("start", engine=ENGINE, fake_ms=1, variables=variables)
    program.end()


@pytest.mark.full
@pytest.mark.parametrize(
    ("closed", "words"),
    [
        (0, r"stage 1 cannot reach the first stage; got: \S+\.1:\d+ from .*timed out"),
        (1, r"stage 0 cannot reach stage 1; got: \S+\.2:\d+ from .*timed out"),
    ],
)
def test_ports_that_a_firewall_closes_are_named(bed, program, closed, words):
    bed.wire.open_ports = {address_of(closed): OPEN_TO_RAY}
    try:
        answer = program.ask("start", engine=ENGINE, fake_ms=1)
    finally:
        bed.wire.open_ports = {}
    print(f"\nafter {answer['seconds']:.1f} s: {answer.get('error')}")
    assert answer["kind"] == "ResourceError"
    assert re.search(words, answer["error"])
    assert re.search(r"open TCP ports \d+-\d+ between the engine's nodes", answer["error"])
    assert answer["seconds"] < 60, "that is no deadline of 10 s"


@pytest.mark.full
def test_other_versions_are_named(bed, program, other_packages):
    info = other_packages / "torch-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    answer = program.ask("start", engine=ENGINE, fake_ms=1)
    shutil.rmtree(info)
    print(f"\n{answer.get('error')}")
    assert answer["kind"] == "ConfigError"
    assert f"the node of stage 1, {address_of(1)}, has other versions" in answer["error"]
    assert f"torch: 9.8.7 on {address_of(1)}" in answer["error"]


@pytest.mark.full
def test_another_model_at_the_same_path_is_named(bed, program, tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        shutil.copytree(resolve_model_path("tiny"), folder)
    [weights] = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert bed.start(1, ["mount", "--bind", str(other), str(model)]).wait(WAIT_S) == 0
    answer = program.ask("start", engine={**ENGINE, "model": str(model)})
    assert bed.start(1, ["umount", str(model)]).wait(WAIT_S) == 0
    print(f"\n{answer.get('error')}")
    assert answer["kind"] == "ModelLoadError"
    assert f"the model of stage 1 on {address_of(1)} is another one" in answer["error"]
    assert f"{weights.name}: " in answer["error"]


def _lose(bed: NodeBed, program: Program, lost: int, then: Callable[[], object]) -> None:
    """Kill the node of stage 1 while requests run; they must end as if nothing had happened."""
    num_tokens, prompts = 1500, [{"prompt_token_ids": [first]} for first in (1, 700)]
    start_requests(program, max_tokens=num_tokens, prompts=prompts)
    bed.kill_node(lost)
    killed_s = time.monotonic()
    then()
    answer = program.ask("collect")
    print(f"\nnode {lost} killed; all tokens after {time.monotonic() - killed_s:.1f} s")
    assert answer.get("token_ids") == [list(range(first + 1, first + 1 + num_tokens)) for first in (1, 700)], answer


@pytest.mark.full
def test_requests_outlive_a_node(bed, program):
    engine = {**ENGINE, "max_engine_restarts": 3, "restart_wait_s": WAIT_S}
    assert "error" not in program.ask("start", engine=engine, fake_ms=2)
    assert stages_on(bed, 1) == {"1"}
    _lose(bed, program, 1, lambda: bed.add_node(1))
    assert stages_on(bed, 1) == {"1"}, "the node came back, and its stage with it"
    bed.add_node(2)
    _lose(bed, program, 1, lambda: None)
    assert stages_on(bed, 2) == {"1"}, "there was another node"


@pytest.mark.full
def test_doctor_measures_between_nodes(bed):
    bed.wire.gbits, bed.wire.delay_ms = 1, 2
    command = [sys.executable, "-m", "raypp", "doctor", "--cluster", "2048", "--json"]
    doctor = bed.start(0, command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    said = json.loads(doctor.communicate(timeout=WAIT_S)[0])
    bed.wire.gbits, bed.wire.delay_ms = 10, 0.5
    found = {name: [c for c in said["checks"] if c["name"] == name] for name in ("node", "link")}
    assert [check["status"] for check in found["node"]] == ["ok"] * 2
    assert len(found["link"]) == 2, "one each way"
    for check in found["link"]:
        print(f"\n{check['finding']}")
        round_trip_ms, gbits = map(float, re.findall(r"([\d.]+) (?:ms, |Gb/s)", check["finding"]))
        assert round_trip_ms >= 4
        assert gbits < 1.1
        assert "hidden size of 2,048" in check["finding"]
        assert check["status"] == "warning"


@pytest.mark.full
def test_links_add_what_arithmetic_says():
    """A link's delay and rate, to a token and to a long prompt; repeated until the machine has the time to spare."""
    for _ in range(3):
        found = measure_links([(0, 0), (10, 0.5), (1, 2)])
        ratios = [
            ms / figures["predicted"][what] for figures in found.values() for what, ms in figures["measured"].items()
        ]
        if all(0.75 < ratio < 1.25 for ratio in ratios):
            break
    else:
        pytest.fail(f"measured over predicted: {ratios}")
    alone, _, slow = (figures["measured"] for figures in found.values())
    assert slow["a token at 1"] - alone["a token at 1"] > 1, "4 ms of delay are not there"
    assert slow["a token at 16"] - alone["a token at 16"] > 1


@pytest.mark.full
def test_nothing_is_left_of_a_bed_whose_owner_is_killed():
    command = [sys.executable, str(ROOT / "tools" / "node_bed.py"), "--nodes", "1", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        owner.stdin.write("there\n")
        owner.stdin.flush()
        assert select.select([owner.stdout], [], [], WAIT_S)[0]
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        namespaces = {os.readlink(f"/proc/{pid}/ns/pid_for_children") for pid in children}
        namespaces -= {os.readlink("/proc/self/ns/pid")}
        assert [line for namespace in namespaces for line in processes_of(namespace)]
        owner.kill()
        ends = time.monotonic() + WAIT_S
        while left := [line for namespace in namespaces for line in processes_of(namespace)]:
            assert time.monotonic() < ends, left
            time.sleep(0.05)
