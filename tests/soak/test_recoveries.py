"""Requests outlive their engine: 80 deaths of its parts, a request that kills engines, batch jobs, a node that is lost.

RECOVERY_KILLS is the number of deaths, to which those of members come; RECOVERY_SEED says where they fall; `-s` shows a
line for each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from batch_jobs import actors_below, num_lines, start_job, texts_by_id, wait_for, write_prompts
from leftovers import wait_until_gone
from ray import cloudpickle
from ray.cluster_utils import Cluster
from recovery_campaign import Report, Setting, picture_engine, run_campaign, text_engine

from raypp import LLM, SamplingParams
from raypp.errors import FatalRequestError
from raypp.stage.build_stage import build_stage_model
from raypp.testing import launch_in_threads

pytestmark = pytest.mark.part("chaos")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module

NUM_KILLS = int(os.environ.get("RECOVERY_KILLS", "60"))
SEED = os.environ.get("RECOVERY_SEED", "0")
WAIT_S = 150.0
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
MEMBERS_DEATHS = ("stage, in prefill", "stage, then another", "stage stopped", "two at once")
SETTINGS: dict[str, tuple[float, Setting]] = {
    "n-grams": (0.4, text_engine("n-grams", speculative={"method": "ngram", "min_n": 1, "num_speculative_tokens": 3})),
    "a head, KV in CPU memory": (
        0.35,
        text_engine(
            "a head, KV in CPU memory",
            speculative={"method": "auto", "model": "tiny-eagle3", "num_speculative_tokens": 3},
            num_kv_blocks=130,
            cpu_kv_bytes=1 << 24,
        ),
    ),
    "pictures": (0.25, picture_engine("pictures")),
    "members": (
        0.34,
        text_engine(
            "members",
            num_stages=2,
            tensor_parallel_size=2,
            device="cpu",
            stage_num_threads=1,
            deaths=(*(f"stage {index}" for index in range(4)), *MEMBERS_DEATHS),
        ),
    ),
}


@pytest.fixture
def local_ray() -> Iterator[str]:
    """Have a local Ray; yields its address."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_of_all_kinds_outlive_whatever_dies(
    name: str, local_ray: str, note: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    share, setting = SETTINGS[name]
    report: Report = asyncio.run(run_campaign(setting, round(share * NUM_KILLS), SEED, kills_per_batch=5))
    note(f"recoveries with {name}: {report}")
    print(report)
    assert report.comparison.num_excused <= max(1, report.comparison.num_tokens // 1000)


POISON = 4001  # a token of no other request


def deadly_stage(spec: Any, config: Any) -> Any:
    """Make the real stage, which ends its process where a prompt holds the poison."""
    model = build_stage_model(spec, config, None)
    embed = model.embed

    def embed_or_die(input_ids: Any) -> Any:
        if (input_ids == POISON).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return embed(input_ids)

    model.embed = embed_or_die
    return model


def test_a_request_that_kills_engines_fails_alone(local_ray: str, note: Callable[[str], None]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [5 + i, 6 + i, 7, 8 + i]} for i in range(32)]
    params = [SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(32)]
    with LLM("tiny", launch=launch_in_threads) as llm:
        right = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    poisoned = 17
    prompts[poisoned] = {"prompt_token_ids": [5, POISON, 7]}

    def ask(llm: LLM, index: int) -> list[int]:
        return list(llm.stream(prompts[index], params[index]))[-1].outputs[0].token_ids

    settings = {"num_stages": 3, "max_engine_restarts": 3, "stage_factory": deadly_stage, "max_num_seqs": 32}
    with LLM("tiny", **settings) as llm, ThreadPoolExecutor(32) as pool:
        pending = [pool.submit(ask, llm, index) for index in range(32)]
        error = pending[poisoned].exception(WAIT_S)
        found = [None if index == poisoned else one.result(WAIT_S) for index, one in enumerate(pending)]
        num_restarts = llm.stats()["recoveries"]["count"]
        again = ask(llm, 0)
    note(f"a request that kills engines: {error!r} after {num_restarts} restarts")
    assert isinstance(error, FatalRequestError)
    assert num_restarts <= 4
    assert [tokens for tokens in found if tokens is not None] == right[:poisoned] + right[poisoned + 1 :]
    assert again == right[0], "the engine works"


def test_a_batch_job_goes_on_when_a_stage_is_killed(
    local_ray: str, tmp_path: Path, note: Callable[[str], None]
) -> None:
    prompts = [f"def f{i}(a, b):" for i in range(200)]
    write_prompts(tmp_path / "in.jsonl", prompts, max_tokens=60)
    with LLM("tiny", num_stages=2, launch=launch_in_threads) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0))
    output = tmp_path / "out.jsonl"
    job = start_job(tmp_path / "in.jsonl", output, "--max-in-flight", "8", env={"RAY_ADDRESS": local_ray})
    try:
        victims = list[int]()
        for stage in (0, 1):
            wanted = num_lines(output) + 20
            wait_for(lambda wanted=wanted: num_lines(output) >= wanted, f"{wanted} lines")
            [victim] = actors_below(os.getpid(), f"StageActor{stage}")
            os.kill(victim, signal.SIGKILL)
            victims.append(victim)
        _, said = job.communicate(timeout=WAIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert texts_by_id(output) == {f"line-{i}": one.outputs[0].text for i, one in enumerate(outputs)}
    assert said.count("the engine runs again") == 2, said
    note(f"a batch job went on after 2 deaths: {said.splitlines()[-1]}")
    assert not wait_until_gone(victims, 0.0)


def test_requests_go_on_when_a_node_is_lost(note: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        worker = cluster.add_node(**NODE)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        prompts = ["def main(", "import os", "class Node:", "for i in"]
        params = [SamplingParams(max_tokens=2500, temperature=0.5 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
        with LLM("tiny", launch=launch_in_threads) as llm:
            right = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        with LLM("tiny", num_stages=2, placement="spread", max_engine_restarts=3) as llm, ThreadPoolExecutor(1) as pool:
            assert len({_raylet_of(pid) for pid in llm.processes()["stages"]}) == 2
            pending = pool.submit(llm.generate, prompts, params)
            wait_for(lambda: llm.stats()["num_generated_tokens"] >= 40, "tokens")
            lost_s = time.monotonic()
            cluster.remove_node(worker, allow_graceful=False)
            found = [output.outputs[0].token_ids for output in pending.result(WAIT_S)]
            took_s = time.monotonic() - lost_s
            recoveries = llm.stats()["recoveries"]
            assert len({_raylet_of(pid) for pid in llm.processes()["stages"]}) == 1
        note(f"a node is lost: {recoveries['last']}; all requests ended {took_s:.1f} s later")
        assert recoveries["count"] == 1
        assert recoveries["num_carried_over"] == len(prompts)
        assert found == right
    finally:
        ray.shutdown()
        cluster.shutdown()


def _raylet_of(pid: int) -> bytes:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(one for one in variables if one.startswith(b"RAY_RAYLET_PID="))
