"""What "exact" means: equal tokens, but for near-ties of the reference, which are counted and must be rare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hf_models import hf_greedy

TIE_GAP = 1e-4
"""Below this gap between the reference's two best logits, either may be chosen: linear layers differ by about 1e-6
between batch sizes."""

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and output lengths in, output tokens out."""

Reference = Callable[[Path, list[int], int], tuple[list[int], list[float]]]
"""Model, prompt and output length in; tokens out, and by how much each one's logit exceeds the second best."""


class ExactComparison:
    """Compares continuations with the reference's, over many configurations, and counts what it excuses."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_excused = 0

    def compare(
        self,
        path: Path,
        prompts: Sequence[list[int]],
        num_tokens: int,
        generate: Generate,
        reference: Reference = hf_greedy,
    ) -> None:
        """Check greedy continuations of `prompts` by `num_tokens` tokens each."""
        references = [reference(path, prompt, num_tokens) for prompt in prompts]
        pending = {index: 0 for index in range(len(prompts))}  # prompt -> reference tokens already agreed on
        while pending:
            indices = list(pending)
            outputs = generate(
                [list(prompts[i]) + references[i][0][: pending[i]] for i in indices],
                [num_tokens - pending[i] for i in indices],
            )
            for index, output in zip(indices, outputs, strict=True):
                tokens, gaps = references[index]
                start = pending.pop(index)
                assert len(output) == num_tokens - start
                differs = next((i for i in range(start, num_tokens) if output[i - start] != tokens[i]), None)
                if differs is None:
                    self.num_tokens += num_tokens - start
                    continue
                assert gaps[differs] < TIE_GAP, (
                    f"prompt {index} of {path.name}: token {differs} is {output[differs - start]}, the reference has "
                    f"{tokens[differs]} by a gap of {gaps[differs]:.2e}"
                )
                self.num_excused += 1
                self.num_tokens += differs + 1 - start
                if differs + 1 < num_tokens:
                    pending[index] = differs + 1  # the reference's prefix is fed back, and the comparison goes on

    def assert_rare(self) -> None:
        """Check that at most one token in a thousand was excused, and print the count."""
        print(f"\nexact: {self.num_tokens} tokens equal to the reference, {self.num_excused} near-ties excused")
        assert self.num_excused <= max(1, self.num_tokens // 1000)
