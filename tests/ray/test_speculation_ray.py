"""Speculation on real actors: the same texts, stop strings, log-probabilities and aborts; and what is told about it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from raypp import LLM, SamplingParams
from raypp.specdec.table_bytes import row_tokens_width
from raypp.testing import launch_in_threads

pytestmark = pytest.mark.ray

CODE = (
    "def load(self, name):\n    self.name = name\n    self.path = path\n\ndef save(self, name):\n    self.name = name\n"
)
STOP = "None\n    self.source = None\n    self.s"  # what the model keeps writing here
PROMPTS = [CODE, CODE + "    self.path", "import os\nimport os\nimport", CODE[:40], "x = [1, 2, 1, 2, 1,"]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.0, stop=["\n\n", STOP], ignore_eos=True),
    SamplingParams(max_tokens=50, temperature=0.3, seed=7, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.5, seed=8, n=2, repetition_penalty=1.05),
    SamplingParams(max_tokens=60, temperature=0.0, bad_words=["self"], min_tokens=20, logprobs=0),
]


def generate(**settings):
    with LLM("tiny", num_stages=2, max_num_seqs=8, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        # One request is aborted while the other runs on.
        with ThreadPoolExecutor() as pool:
            long = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
            aborted = pool.submit(llm.generate, PROMPTS[0], long, request_ids=["victim"])
            other = pool.submit(llm.generate, PROMPTS[2], PARAMS[2])
            survivor = other.result()[0]
            llm.abort("victim")
            victim = aborted.result()[0].outputs[0]
        return outputs, survivor, victim, llm.stats(), llm.plan()


@pytest.mark.full
def test_texts_are_those_without_speculation(local_ray):
    outputs, survivor, victim, stats, _ = generate(launch=launch_in_threads)
    assert stats["num_draft_tokens"] == 0
    eagle, eagle_survivor, _, eagle_stats, eagle_plan = generate(
        speculative={"method": "auto", "model": "tiny-eagle3", "num_speculative_tokens": 3}
    )
    assert [o.outputs[0].text for o in [*eagle, eagle_survivor]] == [o.outputs[0].text for o in [*outputs, survivor]]
    assert 0 < eagle_stats["num_accepted_tokens"] < eagle_stats["num_draft_tokens"]
    assert eagle_stats["num_missed_rows"] == 0
    assert [stage["draft_head_bytes"] > 0 for stage in eagle_plan["stages"]] == [False, True]
    drafted, drafted_survivor, drafted_victim, drafted_stats, plan = generate(
        speculative={"method": "ngram", "num_speculative_tokens": 4, "min_n": 2, "max_n": 5}
    )
    for expected, got in zip([*outputs, survivor], [*drafted, drafted_survivor], strict=True):
        for completion, of_drafts in zip(expected.outputs, got.outputs, strict=True):
            assert of_drafts.text == completion.text
            assert of_drafts.token_ids == completion.token_ids
            assert of_drafts.finish_reason == completion.finish_reason
            assert of_drafts.stop_reason == completion.stop_reason
            assert (of_drafts.logprobs is None) == (completion.logprobs is None)
            for at, of_draft in zip(completion.logprobs or [], of_drafts.logprobs or [], strict=True):
                assert list(of_draft) == list(at)
                assert [p.logprob for p in of_draft.values()] == pytest.approx(
                    [p.logprob for p in at.values()], abs=1e-4
                )
    assert any(output.outputs[0].stop_reason for output in outputs), "no stop string was met"
    assert victim.finish_reason == drafted_victim.finish_reason == "abort"
    shorter, longer = sorted([victim.token_ids, drafted_victim.token_ids], key=len)
    assert longer[: len(shorter)] == shorter

    assert 0 < drafted_stats["num_accepted_tokens"] < drafted_stats["num_draft_tokens"]
    assert sum(drafted_stats["accepted_by_position"]) == drafted_stats["num_accepted_tokens"]
    assert drafted_stats["drafted_by_position"][0] == drafted_stats["num_verified_rows"]
    assert 1 < drafted_stats["acceptance_length"] <= 5
    assert 0 < drafted_stats["acceptance_rate"] < 1
    metrics = drafted[0].metrics
    assert sum(metrics.accepted_by_position) == metrics.num_accepted_tokens > 0
    assert metrics.acceptance_length > 1
    width = row_tokens_width(4096, plan["num_drafts"][-1])
    assert [stage["token_table_bytes"] for stage in plan["stages"]] == [0, 10 * width * 4]
