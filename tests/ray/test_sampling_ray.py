"""Sampling parameters on real actors: the outputs of an engine in threads, over the real wire; bad input meanwhile."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypp import LLM, RequestError, SamplingParams
from raypp.testing import launch_in_threads

pytestmark = pytest.mark.ray

PROMPTS = [f"def main(argv):\n    import os\n    for name in os.listdir(argv[{i}]):\n" for i in range(6)]
SETTINGS = {"num_stages": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64, "stage_num_threads": 1}


def _params() -> list[SamplingParams]:
    common = {"max_tokens": 40, "seed": 5, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=3, prompt_logprobs=2, **common),
        SamplingParams(temperature=0.8, n=3, logprobs=0, presence_penalty=0.5, **common),
        SamplingParams(temperature=0.0, bad_words=["name", "os"], min_tokens=10, stop=["\n\n"], **common),
        SamplingParams(temperature=0.9, top_p=0.9, logit_bias={7: 3.0}, frequency_penalty=0.7, **common),
        SamplingParams(temperature=0.7, allowed_token_ids=list(range(100, 900)), min_p=0.01, **common),
    ]


@pytest.mark.full
def test_outputs_are_those_of_an_engine_in_threads(local_ray):
    with LLM("tiny", launch=launch_in_threads, **SETTINGS) as llm:
        expected = llm.generate(PROMPTS, _params())
    with LLM("tiny", **SETTINGS) as llm, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(llm.generate, PROMPTS, _params(), priority=[0, 1, -1, 0, 2, 0])
        num_refused_meanwhile = 0
        while not pending.done():
            for bad in ({"max_tokens": 0}, {"temperature": math.nan}, {"logprobs": 99}, {"stop_token_ids": [10**6]}):
                with pytest.raises(RequestError):
                    llm.generate("x", SamplingParams(**bad))
            with pytest.raises(RequestError):
                llm.generate({"prompt_token_ids": [10**6]})
            num_refused_meanwhile += 5
        found = pending.result(timeout=60)
    assert num_refused_meanwhile > 0
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.index, a.token_ids, a.text, a.finish_reason) == (b.index, b.token_ids, b.text, b.finish_reason)
            assert (a.logprobs is None) == (b.logprobs is None)
            for of_a, of_b in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert list(of_a) == list(of_b)
                assert all(abs(of_a[t].logprob - of_b[t].logprob) < 1e-4 for t in of_a)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert len(one.prompt_logprobs or []) == len(other.prompt_logprobs or [])
