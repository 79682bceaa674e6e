"""What a request's parameters leave of transformers' logits, by transformers' own logits processors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers as hf

from raypp.ops.sample.token_choice import gumbel_noise
from raypp.types import SamplingParams


@dataclass
class Case:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos: set[int] = field(default_factory=set)
    seed: int | None = None  # params.seed unless said

    def __post_init__(self) -> None:
        if self.seed is None:
            self.seed = self.params.seed


def end_token_ids(case: Case) -> set[int]:
    """Return the tokens that end a request."""
    return {*case.params.stop_token_ids, *(() if case.params.ignore_eos else case.eos)}


def reference_scores(logits: torch.Tensor, known: list[int], case: Case) -> torch.Tensor:
    """Return what transformers' processors leave of the logits [V] for the token after `known`."""
    params, num_prompt = case.params, len(case.prompt)
    scores, input_ids = logits.float().unsqueeze(0), torch.tensor([known])
    if params.logit_bias:
        # transformers takes no bias for token 0; none of the cases has one.
        scores = hf.SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in params.logit_bias.items()])(
            input_ids, scores
        )
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(input_ids, scores)
    counts = torch.bincount(torch.tensor(known[num_prompt:], dtype=torch.int64), minlength=len(logits))
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if case.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(w) for w in case.bad_words])(torch.tensor([[0, *known]]), scores)
    if params.min_tokens:
        ends = sorted(end_token_ids(case))
        scores = hf.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends)(input_ids, scores)
    if params.allowed_token_ids is not None:
        others = sorted(set(range(len(logits))) - set(params.allowed_token_ids))
        scores = hf.SuppressTokensLogitsProcessor(others)(input_ids, scores)
    if params.is_greedy:
        return scores[0]
    scores = hf.TemperatureLogitsWarper(params.temperature)(input_ids, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(input_ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(input_ids, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(input_ids, scores)
    noise = gumbel_noise(torch.tensor([case.seed]), torch.tensor([len(known)]), len(logits))
    return (scores + noise)[0]
