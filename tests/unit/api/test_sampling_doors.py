"""Sampling parameters as users see them: a real engine with the embedded model, in a thread instead of on Ray."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raypp import sampling_params as limits
from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.errors import RayppError, RequestError
from raypp.testing import launch_in_threads
from raypp.types import RequestOutput, SamplingParams

SETTINGS = {"num_stages": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64, "stage_num_threads": 1}
PROMPT = "def main(argv):\n    import os\n    for name in os.listdir(argv[1]):\n        if name"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", launch=launch_in_threads, **SETTINGS) as llm:
        yield llm


def sampled(**changed: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.9, "seed": 11, "ignore_eos": True, **changed})


def greedy(**changed: object) -> SamplingParams:
    return sampled(**{"temperature": 0.0, "max_tokens": 24, **changed})


def only(outputs: list[RequestOutput]) -> RequestOutput:
    assert len(outputs) == 1
    return outputs[0]


def test_continuations_in_order_each_with_its_own_seed(llm: LLM) -> None:
    output = only(llm.generate(PROMPT, sampled(n=4, logprobs=1)))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    tokens = [tuple(c.token_ids) for c in output.outputs]
    assert len(set(tokens)) == 4
    assert tokens == [tuple(c.token_ids) for c in only(llm.generate(PROMPT, sampled(n=4))).outputs]
    assert tokens[:2] == [tuple(c.token_ids) for c in only(llm.generate(PROMPT, sampled(n=2))).outputs]
    assert list(tokens[0]) == only(llm.generate(PROMPT, sampled())).outputs[0].token_ids
    assert all(c.text and c.finish_reason == "length" and len(c.logprobs) == 12 for c in output.outputs)
    assert output.finished


def test_continuations_share_the_prompt(llm: LLM) -> None:
    before = llm.stats()
    output = only(llm.generate(PROMPT + " is new here", sampled(n=5, max_tokens=2, prompt_logprobs=0)))
    after = llm.stats()
    num_prompt = len(output.prompt_token_ids)
    shared = (num_prompt - 1) // 16 * 16
    assert after["num_prefix_hit_tokens"] - before["num_prefix_hit_tokens"] == 4 * shared > 0
    assert len(output.prompt_logprobs) == num_prompt


def test_logprobs_of_every_token(llm: LLM) -> None:
    output = only(llm.generate(PROMPT, sampled(logprobs=3, prompt_logprobs=2, stop=["zzzz"])))
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, of_token in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(of_token)[0] == token_id  # noqa: RUF015  # the order is what is tested
        assert 3 <= len(of_token) <= 4
        ranked = sorted(of_token.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in ranked[:3]] == [1, 2, 3]
        assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(ranked))
        assert all(entry.logprob <= 0 and isinstance(entry.decoded_token, str) for entry in of_token.values())
    assert "".join(lp[t].decoded_token for t, lp in zip(completion.token_ids, completion.logprobs, strict=True)) == (
        completion.text
    )
    total = sum(lp[t].logprob for t, lp in zip(completion.token_ids, completion.logprobs, strict=True))
    assert math.isclose(completion.cumulative_logprob, total)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(of_token)) for of_token in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]


def test_what_was_not_asked_for_is_none(llm: LLM) -> None:
    output = only(llm.generate(PROMPT, sampled()))
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    output = only(llm.generate("x", sampled(prompt_logprobs=0)))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_logprobs_end_where_a_stop_string_cuts(llm: LLM) -> None:
    text = only(llm.generate(PROMPT, greedy())).outputs[0].text
    stop = text[10:13]
    completion = only(llm.generate(PROMPT, greedy(stop=stop, logprobs=0))).outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert len(completion.logprobs) == len(completion.token_ids) < 24


def test_stop_strings_with_and_without_and_not_before_min_tokens(llm: LLM) -> None:
    whole = only(llm.generate(PROMPT, greedy())).outputs[0]
    stop = whole.text[4:6]
    cut = only(llm.generate(PROMPT, greedy(stop=stop))).outputs[0]
    kept = only(llm.generate(PROMPT, greedy(stop=stop, include_stop_str_in_output=True))).outputs[0]
    assert kept.text == cut.text + stop
    assert kept.token_ids == cut.token_ids
    late = only(llm.generate(PROMPT, greedy(stop=stop, min_tokens=20))).outputs[0]
    assert len(late.token_ids) > 20 or late.finish_reason == "length"
    assert late.text.startswith(kept.text)


def test_the_stop_tokens_text_when_it_is_asked_for(llm: LLM) -> None:
    whole = only(llm.generate(PROMPT, greedy())).outputs[0]
    token_id = next(t for i, t in enumerate(whole.token_ids) if i > 2 and t not in whole.token_ids[:i])
    silent = only(llm.generate(PROMPT, greedy(stop_token_ids=[token_id]))).outputs[0]
    told = only(llm.generate(PROMPT, greedy(stop_token_ids=[token_id], include_stop_str_in_output=True))).outputs[0]
    assert silent.token_ids == told.token_ids == whole.token_ids[: len(silent.token_ids)]
    assert silent.stop_reason == told.stop_reason == token_id
    assert len(told.text) > len(silent.text)
    assert whole.text.startswith(told.text)


def test_special_tokens_have_text_when_it_is_asked_for(llm: LLM) -> None:
    special = min(llm._engine.tokenizer.special_token_ids)
    params = {"allowed_token_ids": [special], "max_tokens": 2}
    assert only(llm.generate("x", greedy(**params))).outputs[0].text == ""
    assert only(llm.generate("x", greedy(**params, skip_special_tokens=False))).outputs[0].text != ""


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    completion = only(llm.generate(PROMPT, greedy(detokenize=False))).outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 24)


def test_bad_words_do_not_appear(llm: LLM) -> None:
    text = only(llm.generate(PROMPT, greedy())).outputs[0].text
    words = sorted({word.strip("()[]:.,'\"=") for word in text.split()} - {""}, key=len)[-3:]
    other = only(llm.generate(PROMPT, greedy(bad_words=words))).outputs[0].text
    assert other != text
    assert not set(words) & set(other.split())


def test_bad_words_are_written_as_the_tokenizer_writes_them(llm: LLM) -> None:
    preparer = llm._engine.preparer
    [prepared] = preparer.prompts(["x"], SamplingParams(bad_words=[" import"]))
    tokenizer = llm._engine.tokenizer
    assert {tokenizer.decode(word) for word in prepared.request.bad_word_token_ids} == {"import", " import"}


BAD: list[tuple[str, Callable[[LLM], object]]] = [
    ("empty prompt", lambda llm: llm.generate("")),
    ("no tokens", lambda llm: llm.generate({"prompt_token_ids": []})),
    ("too long", lambda llm: llm.generate({"prompt_token_ids": [5] * 100_000})),
    ("outside the vocabulary", lambda llm: llm.generate({"prompt_token_ids": [5, 10**6]})),
    ("negative token", lambda llm: llm.generate({"prompt_token_ids": [-1]})),
    ("not a prompt", lambda llm: llm.generate(5)),  # type: ignore[arg-type]
    ("lone surrogate", lambda llm: llm.generate("\ud800")),
    ("no max_tokens", lambda llm: llm.generate("x", SamplingParams(max_tokens=0))),
    ("negative max_tokens", lambda llm: llm.generate("x", SamplingParams(max_tokens=-3))),
    ("fractional max_tokens", lambda llm: llm.generate("x", SamplingParams(max_tokens=2.5))),  # type: ignore[arg-type]
    ("NaN temperature", lambda llm: llm.generate("x", SamplingParams(temperature=math.nan))),
    ("infinite temperature", lambda llm: llm.generate("x", SamplingParams(temperature=math.inf))),
    ("negative temperature", lambda llm: llm.generate("x", SamplingParams(temperature=-1))),
    ("top_p of 0", lambda llm: llm.generate("x", SamplingParams(top_p=0))),
    ("NaN top_p", lambda llm: llm.generate("x", SamplingParams(top_p=math.nan))),
    ("top_k of -2", lambda llm: llm.generate("x", SamplingParams(top_k=-2))),
    ("min_p above 1", lambda llm: llm.generate("x", SamplingParams(min_p=1.5))),
    ("huge seed", lambda llm: llm.generate("x", SamplingParams(seed=2**63))),
    ("n of 0", lambda llm: llm.generate("x", SamplingParams(n=0))),
    ("n greedy continuations", lambda llm: llm.generate("x", SamplingParams(n=2, temperature=0))),
    ("min_tokens above max_tokens", lambda llm: llm.generate("x", SamplingParams(min_tokens=5, max_tokens=4))),
    ("no room for min_tokens", lambda llm: llm.generate("x", SamplingParams(min_tokens=10**6, max_tokens=10**6))),
    ("NaN penalty", lambda llm: llm.generate("x", SamplingParams(presence_penalty=math.nan))),
    ("large penalty", lambda llm: llm.generate("x", SamplingParams(frequency_penalty=2.5))),
    ("repetition_penalty of 0", lambda llm: llm.generate("x", SamplingParams(repetition_penalty=0))),
    ("bias outside the vocabulary", lambda llm: llm.generate("x", SamplingParams(logit_bias={10**6: 1}))),
    ("infinite bias", lambda llm: llm.generate("x", SamplingParams(logit_bias={5: math.inf}))),
    ("bias of a word", lambda llm: llm.generate("x", SamplingParams(logit_bias={"word": 1}))),  # type: ignore[dict-item]
    ("bias named twice", lambda llm: llm.generate("x", SamplingParams(logit_bias={5: 1, "5": 2}))),  # type: ignore[dict-item]
    ("bias as a list", lambda llm: llm.generate("x", SamplingParams(logit_bias=[1]))),  # type: ignore[arg-type]
    ("nothing allowed", lambda llm: llm.generate("x", SamplingParams(allowed_token_ids=[]))),
    ("allowed outside the vocabulary", lambda llm: llm.generate("x", SamplingParams(allowed_token_ids=[10**6]))),
    ("more allowed than there are", lambda llm: llm.generate("x", SamplingParams(allowed_token_ids=[5] * 10_000))),
    (
        "too many spellings of bad words",
        lambda llm: llm.generate("x", SamplingParams(bad_words=[f"w{index}" for index in range(200)])),
    ),
    ("too many end tokens", lambda llm: llm.generate("x", SamplingParams(stop_token_ids=[*range(100, 164)]))),
    (
        "allowed and banned",
        lambda llm: llm.generate("x", SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1)),
    ),
    ("empty bad word", lambda llm: llm.generate("x", SamplingParams(bad_words=[""]))),
    ("blank bad word", lambda llm: llm.generate("x", SamplingParams(bad_words=["  "]))),
    ("long bad word", lambda llm: llm.generate("x", SamplingParams(bad_words=["qzx7" * 100]))),
    ("too many logprobs", lambda llm: llm.generate("x", SamplingParams(logprobs=21))),
    ("all logprobs", lambda llm: llm.generate("x", SamplingParams(logprobs=-1))),
    ("too many prompt logprobs", lambda llm: llm.generate("x", SamplingParams(prompt_logprobs=21))),
    ("fewer than no logprobs", lambda llm: llm.generate("x", SamplingParams(logprobs=-2))),
    ("empty stop string", lambda llm: llm.generate("x", SamplingParams(stop=""))),
    ("stop token outside", lambda llm: llm.generate("x", SamplingParams(stop_token_ids=[10**6]))),
    ("stop without text", lambda llm: llm.generate("x", SamplingParams(stop="a", detokenize=False))),
    ("a word for a truth value", lambda llm: llm.generate("x", SamplingParams(ignore_eos="no"))),  # type: ignore[arg-type]
    ("parameters that do not fit", lambda llm: llm.generate(["x", "y"], [SamplingParams()])),
    ("priority of another kind", lambda llm: llm.generate("x", priority="high")),  # type: ignore[arg-type]
    ("too few priorities", lambda llm: llm.generate(["x", "y"], priority=[1])),
    ("a broken id", lambda llm: llm.generate("x", request_ids=["a\0b"])),
    ("no conversation", lambda llm: llm.chat([[]])),
]


@pytest.mark.parametrize(("what", "call"), BAD, ids=[what for what, _ in BAD])
def test_bad_input_says_what_was_got_and_what_was_expected(llm: LLM, what: str, call: Callable[[LLM], object]) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert caught.value.got is not None
    assert caught.value.expected is not None
    assert caught.value.hint is not None


def test_as_many_entries_as_the_limits_allow(llm: LLM) -> None:
    eos = llm._engine.eos_token_ids
    params = {
        "stop_token_ids": [*range(100, 164 - len(eos))],
        "bad_words": [f"w{index}" for index in range(limits.MAX_BAD_WORD_SPELLINGS // 2)],
        "logit_bias": dict.fromkeys(range(limits.MAX_BIASED_TOKENS), 0.5),
    }
    assert only(llm.generate("x", greedy(min_tokens=2, max_tokens=3, **params))).finished


def test_bad_input_does_not_touch_those_that_run(llm: LLM) -> None:
    prompts = [f"{PROMPT} == {i}:" for i in range(4)]
    params = [greedy(max_tokens=60), sampled(max_tokens=60), greedy(max_tokens=60, presence_penalty=1.0)]
    params.append(sampled(max_tokens=60, logprobs=2))
    quiet = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    num_refused_meanwhile = 0
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(llm.generate, prompts, params)
        for _, call in BAD:
            with pytest.raises(RayppError):
                call(llm)
            num_refused_meanwhile += not pending.done()
        assert [o.outputs[0].token_ids for o in pending.result(timeout=60)] == quiet
    assert num_refused_meanwhile > 0
    assert llm.stats()["num_running"] == 0


def test_a_request_ends_where_the_models_length_ends() -> None:
    with LLM("tiny", launch=launch_in_threads, num_kv_blocks=4, max_model_len=48, **SETTINGS) as small:
        output = only(small.generate("x", greedy(max_tokens=999)))
        assert output.outputs[0].finish_reason == "length"
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 48


def test_streaming_of_several_continuations(llm: LLM) -> None:
    async def body() -> None:
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, **SETTINGS) as engine:
            outputs = [o async for o in engine.generate(PROMPT, sampled(n=3, logprobs=1, prompt_logprobs=1), "r")]
            last = outputs[-1]
            assert last.finished
            assert not any(o.finished for o in outputs[:-1])
            assert [len(c.token_ids) for c in last.outputs] == [12] * 3
            for output in outputs:
                assert [c.index for c in output.outputs] == [0, 1, 2]
                for c, end in zip(output.outputs, last.outputs, strict=True):
                    assert end.token_ids[: len(c.token_ids)] == c.token_ids
                    assert end.text.startswith(c.text)
                    assert len(c.logprobs) == len(c.token_ids)
            assert len(last.prompt_logprobs) == len(last.prompt_token_ids)

            outputs = []
            async for output in engine.generate(PROMPT, sampled(n=3, max_tokens=2000), "r"):
                outputs.append(output)
                if len(outputs) == 2:
                    await engine.abort("r")
            assert {c.finish_reason for c in outputs[-1].outputs} == {"abort"}
            assert (await engine.stats())["num_running"] == 0

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_text_that_cannot_be_made_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"{PROMPT} == {i}:" for i in range(3)]
    quiet = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy())]
    tokenizer = llm._engine.tokenizer
    token_bytes = tokenizer.token_bytes
    poison = 3  # a token that only the request that is allowed nothing else draws

    def broken(token_id: int, **options: bool) -> bytes:
        if token_id == poison:
            raise ValueError("no such token")
        return token_bytes(token_id, **options)

    monkeypatch.setattr(tokenizer, "token_bytes", broken)
    failed = threading.Event()

    def poisoned() -> None:
        with pytest.raises(RequestError, match="cannot be turned into text") as caught:
            llm.generate("x", sampled(n=2, allowed_token_ids=[poison], max_tokens=9), request_ids=["bad"])
        assert caught.value.request_id == "bad"
        assert "no such token" in str(caught.value)
        failed.set()

    with ThreadPoolExecutor(2) as pool:
        bad, good = pool.submit(poisoned), pool.submit(llm.generate, prompts, greedy())
        bad.result(timeout=60)
        assert [o.outputs[0].token_ids for o in good.result(timeout=60)] == quiet
    assert failed.is_set()
    assert llm.stats()["num_running"] == 0


def test_priorities_reach_the_scheduler(llm: LLM) -> None:
    outputs = llm.generate(["a", "b", "c"], greedy(max_tokens=2), priority=[2, 1, 0])
    assert len(outputs) == 3
    assert only(llm.generate("a", greedy(max_tokens=2), priority=-1)).finished
    assert np.isclose(llm.stats()["kv_usage"], 0.0)
