"""Many clients at once, with random parameters, aborts and priorities, on a KV cache that is always too small.

Every request is answered, nothing is left behind, and what was generated is what a quiet engine generates. The number
of requests is STORM_REQUESTS.
"""

from __future__ import annotations

import asyncio
import os
import random
import string
from collections import Counter
from dataclasses import dataclass, field

from exactness import TIE_GAP
from hf_models import hf_logits
from sampling_reference import Case, reference_scores

from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.models.registry import resolve_model_path
from raypp.testing import launch_in_threads
from raypp.types import CompletionOutput, RequestOutput, SamplingParams

NUM_REQUESTS = int(os.environ.get("STORM_REQUESTS", "24"))
MAX_MODEL_LEN = 160
STORMY = {
    "num_stages": 3,
    "max_steps_per_cohort": 3,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 48,
    "min_prefill_chunk_tokens": 8,
    "num_kv_blocks": 130,
    "block_size": 3,
    "cpu_kv_bytes": 1 << 22,
    "max_model_len": MAX_MODEL_LEN,
    "stage_num_threads": 1,
}
QUIET = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "stage_num_threads": 1}
BEGINNINGS = ("def main(", "import os\nimport sys\n\n\nclass Node:\n    def __init__(self, value):\n", "", "for i in ")


@dataclass
class Sent:
    """A request, and what became of it."""

    request_id: str
    prompt: str
    params: SamplingParams
    priority: int
    leaves_after: int | None  # outputs after which the client leaves, or aborts
    leaves_by: str
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


def _random_request(rng: random.Random, index: int, vocab_size: int) -> Sent:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(count)]

    def sometimes(value: object, otherwise: object, share: float = 0.2) -> object:
        return value if rng.random() < share else otherwise

    max_tokens = rng.choice([1, 8, 40, 90])
    temperature = rng.choice([0.0, 0.0, 0.7, 1.2])
    params = SamplingParams(
        n=rng.randint(2, 3) if temperature and rng.random() < 0.15 else 1,
        max_tokens=max_tokens,
        min_tokens=sometimes(rng.randint(0, max_tokens), 0),
        temperature=temperature,
        top_p=sometimes(0.8, 1.0),
        top_k=sometimes(20, 0),
        min_p=sometimes(0.05, 0.0),
        seed=index,
        presence_penalty=sometimes(rng.uniform(-1, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-0.5, 2), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.8, 1.6), 1.0),
        logit_bias=sometimes({t: rng.uniform(-5, 5) for t in tokens(20)}, {}),
        allowed_token_ids=sometimes(tokens(200), None, 0.1),
        bad_words=sometimes(["self", "return x", "import"], []),
        logprobs=sometimes(rng.randint(0, 4), None),
        prompt_logprobs=sometimes(rng.randint(0, 4), None, 0.1),
        stop=sometimes([":\n", "zzz", " = "], []),
        stop_token_ids=sometimes(tokens(30), []),
        ignore_eos=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        detokenize=True,
    )
    text = rng.choice(BEGINNINGS) + "".join(rng.choices(string.ascii_lowercase + "    ()=:.\n", k=rng.randint(1, 40)))
    leaves_after = rng.randint(1, 4) if rng.random() < 0.2 else None
    leaves_by = rng.choice(["abort", "break", "cancel"])
    return Sent(f"r{index}", text, params, rng.choice([0, 0, 0, -1, 5]), leaves_after, leaves_by)


async def _read(llm: AsyncLLM, sent: Sent) -> None:
    async for output in llm.generate(sent.prompt, sent.params, sent.request_id, priority=sent.priority):
        sent.outputs.append(output)
        if len(sent.outputs) != sent.leaves_after:
            continue
        if sent.leaves_by == "break":
            return
        if sent.leaves_by == "cancel":
            asyncio.current_task().cancel()  # takes effect where it waits for the next output
        else:
            await llm.abort(sent.request_id)


async def _storm(requests: list[Sent]) -> dict[str, int]:
    async with await AsyncLLM.create("tiny", launch=launch_in_threads, **STORMY) as llm:
        rng = random.Random(0)
        tasks = []
        for sent in requests:
            tasks.append(asyncio.create_task(_read(llm, sent)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        stats = await llm.stats()
        while stats["num_in_flight"]:  # of requests that were left
            await asyncio.sleep(0.01)
            stats = await llm.stats()
        scheduler = llm._engine.handle.scheduler
    scheduler.check_integrity()
    assert scheduler._running.num_free_rows == STORMY["max_num_seqs"]
    return stats


def test_all_are_answered_and_nothing_is_left() -> None:
    rng = random.Random(3)
    requests = [_random_request(rng, index, 4000) for index in range(NUM_REQUESTS)]
    stats = asyncio.run(asyncio.wait_for(_storm(requests), 30 + 2 * NUM_REQUESTS))
    assert (stats["num_running"], stats["num_waiting"], stats["num_in_flight"]) == (0, 0, 0)
    assert stats["num_free_blocks"] == STORMY["num_kv_blocks"] - 1
    ends = Counter()
    for sent in requests:
        stays = sent.leaves_after is None or sent.leaves_by == "abort"
        assert sent.outputs or not stays, f"{sent.request_id} was never answered"
        assert not stays or sent.last.finished
        ends.update(c.finish_reason or "left" for c in (sent.last.outputs if sent.outputs else ()))

    with LLM("tiny", launch=launch_in_threads, **QUIET) as llm:
        quiet = llm.generate([s.prompt for s in requests], [s.params for s in requests])
        assert llm.stats()["num_preemptions"] == 0
        comparison = _Comparison(llm)
        for sent, alone in zip(requests, quiet, strict=True):
            if sent.outputs:
                comparison.compare(sent, alone)
    print(f"\n{len(requests)} requests, {stats['num_preemptions']} preemptions, ends {dict(ends)}; {comparison}")
    assert stats["num_preemptions"] > NUM_REQUESTS // 10
    assert {"stop", "length"} < set(ends), "nobody left, and nobody was aborted"
    assert comparison.num_excused <= max(1, comparison.num_tokens // 1000)


class _Comparison:
    """Compares with a quiet run, token by token; a near-tie of the reference ends a comparison, and is counted."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm._engine
        self.num_tokens = self.num_excused = self.num_greedy = 0

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens compared, {self.num_greedy} of greedy requests, {self.num_excused} near-ties"

    def compare(self, sent: Sent, alone: RequestOutput) -> None:
        assert sent.last.prompt_token_ids == alone.prompt_token_ids
        for found, expected in zip(sent.last.outputs, alone.outputs, strict=True):
            compared = min(len(found.token_ids), len(expected.token_ids))
            if found.token_ids[:compared] != expected.token_ids[:compared]:
                self._excuse(sent, found, expected)
                continue
            self.num_tokens += compared
            self.num_greedy += compared if sent.params.is_greedy else 0
            if found.finish_reason in (None, "abort"):
                assert compared == len(found.token_ids)
                continue
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if found.logprobs is not None:
                assert abs(found.cumulative_logprob - expected.cumulative_logprob) < 1e-4 * (1 + compared)
        if sent.params.prompt_logprobs is not None and sent.last.finished and sent.leaves_after is None:
            assert len(sent.last.prompt_logprobs) == len(alone.prompt_logprobs) == len(alone.prompt_token_ids)

    def _excuse(self, sent: Sent, found: CompletionOutput, expected: CompletionOutput) -> None:
        first = next(i for i, (a, b) in enumerate(zip(found.token_ids, expected.token_ids, strict=False)) if a != b)
        [prepared] = self._engine.preparer.prompts([sent.prompt], sent.params)
        prompt = prepared.prompt_token_ids.tolist()
        case = Case(
            prompt,
            sent.params,
            prepared.bad_word_token_ids,
            set(self._engine.eos_token_ids),
            prepared.seed_of(found.index),
        )
        known = prompt + found.token_ids[:first]
        scores = reference_scores(hf_logits(resolve_model_path("tiny"), known)[-1], known, case)
        gap = float((scores[found.token_ids[first]] - scores[expected.token_ids[first]]).abs())
        assert gap < TIE_GAP, f"{sent}: token {first} of {found.index} differs by a gap of {gap:.2e}"
        self.num_excused += 1
        self.num_tokens += first + 1
