"""Decode steps as padded recordings yield what they yield operation by operation; on a CPU by plain calls."""

from __future__ import annotations

from itertools import product

import pytest
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.full_graphs import FullGraphs, UploadRing
from raypp.testing import LocalEngine
from raypp.types import SamplingParams


def _prompts(count: int) -> list[list[int]]:
    return [[5 + i, 80 + i, 99, 120 + 3 * i] * (2 + i % 5) for i in range(count)]


def _params(count: int) -> list[SamplingParams]:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
    )
    return [SamplingParams(max_tokens=8 + i, seed=i, ignore_eos=True, **kinds[i % 4]) for i in range(count)]


def _engine(mode: str, **settings: object) -> LocalEngine:
    return LocalEngine(plan_engine(EngineConfig.from_flat("tiny", mode=mode, **settings), Hardware(1)))


@pytest.mark.parametrize(
    ("num_stages", "num_requests"), sized([(1, 5), (2, 11), (3, 1)], list(product((1, 2, 3), (1, 5, 11))))
)
def test_recordings_yield_the_same_tokens(monkeypatch, num_stages, num_requests):
    runs = []
    run = FullGraphs.run
    monkeypatch.setattr(FullGraphs, "run", lambda self, size: (runs.append(size[0]), run(self, size))[1])
    settings = {"num_stages": num_stages, "max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 4}
    expected = _engine("none", **settings).generate(_prompts(num_requests), _params(num_requests))
    assert not runs
    assert _engine("full", **settings).generate(_prompts(num_requests), _params(num_requests)) == expected
    assert len(runs) > 5
    assert set(runs) <= {1, 2, 4, 6, 8, 12}


def test_what_is_uploaded_while_graphs_are_recorded_arrives_before_the_next_is_written(monkeypatch):
    """A stream may stand still meanwhile: a replay waits for the other members of the stage."""
    pending, num_uploads = [], []
    upload = UploadRing.upload

    def queue(ring, step_id, num_values):
        assert not pending, "the host writes over what is not copied yet"
        pending.append((ring, step_id, num_values, ring.host[step_id].copy()))
        num_uploads.append(num_values)

    def settle(ring):
        for _, step_id, num_values, written in pending:
            assert (ring.host[step_id] == written).all()
            upload(ring, step_id, num_values)
        pending.clear()

    monkeypatch.setattr(UploadRing, "upload", queue)
    monkeypatch.setattr(UploadRing, "settle", settle)
    _engine("full", max_num_seqs=12, max_num_batched_tokens=64, block_size=4)
    assert len(num_uploads) > 3
    assert not pending


def test_preempted_rows_and_shrinking_steps():
    settings = {"num_stages": 2, "max_num_seqs": 12, "num_kv_blocks": 30, "block_size": 4, "max_model_len": 96}
    plain, recorded = _engine("none", **settings), _engine("full", **settings)
    expected = plain.generate(_prompts(10), _params(10))
    assert recorded.generate(_prompts(10), _params(10)) == expected
    assert recorded.stats().num_preemptions > 0
