"""Compares what became of requests with what becomes of them undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exactness import TIE_GAP
from handing_over import Answer
from hf_models import hf_logits
from sampling_reference import Case, reference_scores

from raypp.models.registry import resolve_model_path

MAX_LOGPROB_GAP = 1e-4


class Comparison:
    """Holds answers against those of the undisturbed run, and excuses near-ties, which must be rare."""

    def __init__(self, model: str = "tiny") -> None:
        self._model = model
        self.num_tokens = self.num_excused = 0

    def compare(self, answers: Sequence[Answer], expected: Sequence[Answer], excuses: bool = True) -> None:
        for found, right in zip(answers, expected, strict=True):
            ids = found.token_ids, right.token_ids
            same = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
            self.num_tokens += same
            of_prompt = found.prompt_logprobs, right.prompt_logprobs
            assert len(of_prompt[0]) == len(of_prompt[1])
            _assert_close(found, of_prompt)
            _assert_close(found, (found.logprobs[:same], right.logprobs[:same]))
            if ids[0] != ids[1]:
                assert excuses, f"{found.asked.name}: {ids[0]} instead of {ids[1]}"
                self._excuse(found, right, same)
                continue
            assert len(found.logprobs) == len(right.logprobs)
            assert (found.finish_reason, found.stop_token_id) == (right.finish_reason, right.stop_token_id)

    def _excuse(self, found: Answer, right: Answer, first: int) -> None:
        asked = found.asked
        message = f"{asked.name}: {found.token_ids[first:]} instead of {right.token_ids[first:]} after {first} tokens"
        assert first < min(len(found.token_ids), len(right.token_ids)), message
        case = Case(asked.prompt.tolist(), asked.params, asked.bad_words, set(asked.eos_token_ids))
        known = case.prompt + found.token_ids[:first]
        scores = reference_scores(hf_logits(resolve_model_path(self._model), known)[-1], known, case)
        gap = float((scores[found.token_ids[first]] - scores[right.token_ids[first]]).abs())
        assert gap < TIE_GAP, f"{message}, by a gap of {gap:.2e}"
        self.num_excused += 1


def num_parted_at_ties(
    model: Path, cases: Sequence[tuple[Case, Case]], answers: Sequence[tuple[list[int], list[int]]], share: float
) -> int:
    """Return how many of two engines' greedy or sampled answers in 16 bits part; each does where float32 nearly ties.

    Args:
        model: A checkpoint's folder.
        cases: What each engine was asked. Answers are not compared where that differs, since an earlier one parted.
        answers: Token ids of each.
        share: Of the standard deviation of the scores there, the most that the two tokens may be apart.
    """
    gaps = []
    for (case, other), (ids, others) in zip(cases, answers, strict=True):
        if case.prompt != other.prompt or ids == others:
            continue
        first = next(i for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b)
        known = case.prompt + ids[:first]
        logits = hf_logits(model, known)[-1]
        scores = reference_scores(logits, known, case)
        deviation = float(logits.std()) / (case.params.temperature or 1.0)
        gaps.append(float((scores[ids[first]] - scores[others[first]]).abs()) / deviation)
    print(f"\n{len(gaps)} of {len(answers)} answers part, by {max(gaps, default=0.0):.4f} of the deviation at most")
    assert max(gaps, default=0.0) < share
    return len(gaps)


def _assert_close(answer: Answer, pairs: tuple[list[dict[int, float]], list[dict[int, float]]]) -> None:
    for index, (found, right) in enumerate(zip(*pairs, strict=True)):
        # At a near-tie of the last ones that are reported, another token may be among them.
        shared = found.keys() & right.keys()
        assert len(shared) >= len(right) - 1, f"{answer.asked.name}, {index}: {found} instead of {right}"
        gap = max((abs(found[token] - right[token]) for token in shared), default=0.0)
        assert gap < MAX_LOGPROB_GAP, f"{answer.asked.name}, {index}: {found} instead of {right}"
