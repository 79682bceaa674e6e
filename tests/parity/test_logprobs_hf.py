"""Log-probabilities of output and prompt tokens against transformers' log-softmax.

In chunks, on several stages, after preemptions, beside rows that ask for others or none, and with cached prefixes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import torch
from hf_models import FAMILIES, hf_logits, make_checkpoint

from raypp.config.engine_config import EngineConfig
from raypp.messages import TokenLogprobs
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.stage import logprob_reports as stage_logprobs
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

TOLERANCE = 1e-4
NUM_NEW_TOKENS = 20


def run_with_logprobs(engine: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Reported]:
    requests = [engine.submit(prompt, of_prompt) for prompt, of_prompt in zip(prompts, params, strict=True)]
    output, prompt = defaultdict(list), defaultdict(list)
    while engine.has_unfinished:
        for update in engine.step():
            for pieces, piece in ((output, update.logprobs), (prompt, update.prompt_logprobs)):
                if piece is not None:
                    pieces[update.request.request_id].append(piece.own)
    engine.scheduler.check_integrity()
    return [Reported(r, output[r.request_id], prompt[r.request_id]) for r in requests]


class Reported:
    """A request that ended, and what was reported of its tokens."""

    def __init__(self, request: Request, output: list[TokenLogprobs], prompt: list[TokenLogprobs]) -> None:
        self.request = request
        self.output = output
        self.prompt = prompt

    def check(self, path) -> None:
        params, known = self.request.params, self.request.prompt_token_ids.tolist() + self.request.output_token_ids
        num_prompt = len(self.request.prompt_token_ids)
        expected = hf_logits(path, known).double().log_softmax(-1)
        if params.logprobs is None:
            assert not self.output
        else:
            assert len(self.request.output_token_ids) == NUM_NEW_TOKENS
            _check(self.output, expected[num_prompt - 1 : -1], known[num_prompt:], params.logprobs)
        if params.prompt_logprobs is None or num_prompt == 1:
            assert not self.prompt
        else:
            _check(self.prompt, expected[: num_prompt - 1], known[1:num_prompt], params.prompt_logprobs)


def _check(pieces: list[TokenLogprobs], expected: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Compare with the reference's log-softmax [n, V] at the positions before the tokens."""
    found_ids = torch.from_numpy(np.concatenate([p.token_ids for p in pieces]).astype(np.int64))
    found = torch.from_numpy(np.concatenate([p.logprobs for p in pieces])).double()
    ranks = np.concatenate([p.ranks for p in pieces]).tolist()
    assert found_ids[:, 0].tolist() == token_ids
    assert found.shape == (len(token_ids), 1 + num_top)
    torch.testing.assert_close(found, expected.gather(1, found_ids), rtol=0, atol=TOLERANCE)
    # The most likely tokens: where two are nearly alike, either may come first.
    torch.testing.assert_close(found[:, 1:], expected.topk(num_top).values, rtol=0, atol=TOLERANCE)
    assert all(len(set(row)) == num_top for row in found_ids[:, 1:].tolist())
    own = expected.gather(1, found_ids[:, :1])
    num_above, num_not_below = (expected > own + TOLERANCE).sum(1), (expected > own - TOLERANCE).sum(1)
    for rank, low, high in zip(ranks, num_above.tolist(), num_not_below.tolist(), strict=True):
        assert 1 + low <= rank <= max(1, high)


def _params(rng: random.Random, vocab_size: int, **asked) -> SamplingParams:
    """Return parameters that change what is chosen, and must not change what is reported."""
    changing = {"repetition_penalty": 1.3, "temperature": rng.choice([0.0, 0.8]), "logit_bias": {3: 2.0}}
    few = {"allowed_token_ids": [3, 4]}  # drafts are often right
    return SamplingParams(
        max_tokens=NUM_NEW_TOKENS, ignore_eos=True, seed=rng.getrandbits(30), **rng.choice([{}, changing, few]), **asked
    )


def test_logprobs_are_transformers_log_softmax(tmp_path_factory, monkeypatch):
    """On models of all families: what is reported depends on logits alone."""
    monkeypatch.setattr(stage_logprobs, "_SLICE_TOKENS", 7)  # chunks of a test are computed in slices, too
    met = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        num_stages, family = 1 + seed, FAMILIES[seed % len(FAMILIES)]
        path = make_checkpoint(family, seed, tmp_path_factory.mktemp(f"{family}-{seed}"), min_layers=num_stages)
        settings = {
            "num_stages": num_stages,
            "block_size": 4,
            "max_num_batched_tokens": 24,
            "min_prefill_chunk_tokens": 5,
            "max_model_len": 100,
            "max_num_seqs": 6,
            "num_kv_blocks": (60, 200)[seed % 2],
            "stage_num_threads": 1,
            "mode": ("none", "full")[seed // 2],
        }
        if seed % 2:
            settings["speculative"] = {"method": "ngram", "min_n": 1, "num_speculative_tokens": 2}
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
        vocab_size = plan.model.vocab_size
        engine = LocalEngine(plan)
        shared = [rng.randrange(vocab_size) for _ in range(40)]
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(2, 50))] for _ in range(5)]
        prompts += [[*shared, rng.randrange(vocab_size)] for _ in range(3)] + [[5]]
        # Fills the cache with the prompts' prefixes, the output of others among them.
        filling = run_with_logprobs(engine, prompts, [_params(rng, vocab_size, logprobs=0) for _ in prompts])
        asked = [
            {"logprobs": rng.choice([None, 0, 1, 5]), "prompt_logprobs": rng.choice([None, 0, 3])} for _ in prompts
        ]
        asked[0], asked[5] = {"logprobs": vocab_size}, {"prompt_logprobs": 2, "logprobs": 2}
        reported = run_with_logprobs(engine, prompts, [_params(rng, vocab_size, **a) for a in asked])
        for one in filling + reported:
            one.check(path)
        for one in reported:
            met["cached"] += one.request.num_cached_tokens > 0 and bool(one.output)
            met["prompt in pieces"] += len(one.prompt) > 1
            met["prompt was in the cache"] += bool(one.prompt)
            met["preempted"] += one.request.num_preemptions > 0 and bool(one.output)
            counts = one.request.draft_counts
            met["drafts accepted"] += counts is not None and counts.num_accepted > 0 and bool(one.output)
            met["preempted prompt"] += one.request.num_preemptions > 0 and bool(one.prompt)
    print(f"\n{dict(met)}")
    for what in (
        "cached",
        "prompt in pieces",
        "prompt was in the cache",
        "preempted",
        "preempted prompt",
        "drafts accepted",
    ):
        assert met[what] > 0, what
