"""What "exact" means: equal tokens, but for near-ties of the reference, which are counted and must be rare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hf_models import hf_choices

TIE_GAP = 1e-4
"""Below this gap between two of the reference's logits, either token may be chosen: linear layers differ by about 1e-6
between batch sizes."""

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and output lengths in, output tokens out."""

Reference = Callable[[Path, list[int], list[int]], tuple[list[int], list[float]]]
"""Model, prompt and output in; out, for every token of the output, which one the reference chooses after those before
it, and by how much the logit of its choice exceeds the output's."""


class ExactComparison:
    """Compares continuations with the reference's, over many configurations, and counts what it excuses.

    The reference reads the whole output at once, and says at each token what it would have chosen. An output without
    near-ties that agrees everywhere is the reference's own continuation.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_excused = 0
        self._read: dict[tuple[object, ...], tuple[list[int], list[float]]] = {}

    def compare(
        self,
        path: Path,
        prompts: Sequence[list[int]],
        num_tokens: int,
        generate: Generate,
        reference: Reference = hf_choices,
    ) -> None:
        """Check greedy continuations of `prompts` by `num_tokens` tokens each."""
        outputs = generate([list(prompt) for prompt in prompts], [num_tokens] * len(prompts))
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            assert len(output) == num_tokens
            key = reference, path, tuple(prompt), tuple(output)
            if key not in self._read:  # other stages, and another round, generate the same
                self._read[key] = reference(path, prompt, list(output))
            choices, gaps = self._read[key]
            for place, (token, choice, gap) in enumerate(zip(output, choices, gaps, strict=True)):
                if token != choice:
                    assert gap < TIE_GAP, (
                        f"prompt {index} of {path.name}: token {place} is {token}, the reference has {choice} by a gap "
                        f"of {gap:.2e}"
                    )
                    self.num_excused += 1
            self.num_tokens += num_tokens

    def assert_rare(self) -> None:
        """Check that at most one token in a thousand was excused, and print the count."""
        print(f"\nexact: {self.num_tokens} tokens equal to the reference, {self.num_excused} near-ties excused")
        assert self.num_excused <= max(1, self.num_tokens // 1000)
