"""Beam search finds what trying all continuations finds, where the beams are wide enough for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

from raypp.api.beam_search import BeamSearchParams, search_beams
from raypp.api.llm import LLM
from raypp.api.picture_prompts import EncodedPrompt
from raypp.errors import RequestError
from raypp.testing import launch_in_threads
from raypp.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams

VOCABULARY, EOS = range(5), 4


@cache
def scores_after(tokens: tuple[int, ...]) -> list[float]:
    """The log-probabilities of a model that remembers all tokens."""
    logits = np.random.default_rng(hash(tokens) % 2**32).normal(0, 2, len(VOCABULARY))
    return list(logits - np.log(np.exp(logits).sum()))


def run(prompts: list[EncodedPrompt], params: SamplingParams) -> list[RequestOutput]:
    assert (params.max_tokens, params.temperature) == (1, 0)
    outputs = []
    for prompt in prompts:
        scores = scores_after(tuple(prompt.token_ids.tolist()))
        ranked = sorted(VOCABULARY, key=lambda token: -scores[token])[: params.logprobs]
        logprobs = {token: Logprob(scores[token], rank, None) for rank, token in enumerate(ranked, 1)}
        one = CompletionOutput(index=0, text="", token_ids=ranked[:1], logprobs=[logprobs], finish_reason="length")
        ids, metrics = prompt.token_ids.tolist(), RequestMetrics(arrival_time_s=0.0)
        outputs.append(
            RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=ids, outputs=[one], finished=True, metrics=metrics
            )
        )
    return outputs


def all_continuations(prompt: tuple[int, ...], length: int, *, ignore_eos: bool) -> Iterator[tuple[int, ...]]:
    for size in range(1, length + 1):
        for tokens in itertools.product(VOCABULARY, repeat=size):
            ends = [index for index, token in enumerate(tokens) if token == EOS and not ignore_eos]
            if ends == [size - 1] or (not ends and size == length):
                yield tokens


def total(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    return sum(scores_after(prompt + tokens[:index])[token] for index, token in enumerate(tokens))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_wide_beams_find_the_best_of_all(ignore_eos: bool, length_penalty: float) -> None:
    width = 5**3
    params = BeamSearchParams(beam_width=width, max_tokens=3, ignore_eos=ignore_eos, length_penalty=length_penalty)
    prompts = [(1,), (2, 3)]
    encoded = [EncodedPrompt(np.array(prompt, np.int32)) for prompt in prompts]
    for prompt, output in zip(prompts, search_beams(encoded, params, run, eos={EOS}, max_model_len=99), strict=True):

        def score(tokens: tuple[int, ...], prompt: tuple[int, ...] = prompt) -> float:
            num_tokens = len(tokens) - (tokens[-1] == EOS and not ignore_eos)
            return total(prompt, tokens) / max(num_tokens, 1) ** length_penalty

        best = sorted(all_continuations(prompt, 3, ignore_eos=ignore_eos), key=score, reverse=True)[:width]
        for sequence, tokens in zip(output.sequences, best, strict=True):
            has_ended = tokens[-1] == EOS and not ignore_eos
            assert sequence.tokens == [*prompt, *(tokens[:-1] if has_ended else tokens)]
            assert sequence.finish_reason == ("stop" if has_ended else "length")
            assert sequence.cum_logprob == pytest.approx(total(prompt, tokens))
            assert len(sequence.logprobs) == len(tokens)


def test_the_context_ends_a_search() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True)
    [output] = search_beams([EncodedPrompt(np.array([1], np.int32))], params, run, eos={EOS}, max_model_len=4)
    assert {len(sequence.tokens) for sequence in output.sequences} == {4}


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[[], LLM]]:
    with LLM("tiny", launch=launch_in_threads, kv_cache_bytes=1 << 23, max_model_len=64) as llm:
        yield lambda: llm


def test_one_beam_is_greedy_and_more_are_no_worse(make_llm: Callable[[], LLM]) -> None:
    llm, prompts = make_llm(), ["def main(", {"prompt": "import os", "cache_salt": "me"}]
    greedy = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0))
    narrow = llm.beam_search(prompts, BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    wide = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    for one, few, many in zip(greedy, narrow, wide, strict=True):
        [beam] = few.sequences
        assert beam.tokens == one.prompt_token_ids + one.outputs[0].token_ids
        assert beam.text == (one.prompt or "") + one.outputs[0].text
        assert beam.cum_logprob == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-4)
        assert len(many.sequences) == 4
        assert many.sequences[0].cum_logprob >= beam.cum_logprob - 1e-4
        assert not math.isnan(many.sequences[-1].cum_logprob)


def test_what_cannot_be_searched(make_llm: Callable[[], LLM]) -> None:
    with pytest.raises(RequestError, match="at most 10, half of max_logprobs = 20"):
        make_llm().beam_search("a", BeamSearchParams(beam_width=11, max_tokens=8))
    for values in ({"beam_width": 0, "max_tokens": 1}, {"beam_width": 1, "max_tokens": 0}):
        with pytest.raises(RequestError, match="out of range"):
            BeamSearchParams(**values)
