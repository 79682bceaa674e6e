"""What few requests ask of a step's logits, recorded need by need: a step replays what its rows need, and nothing else.

    logits --copy--> [ changed logits ] --> bias --> penalties --> ... --> masks --> tail

Each is a recording of its own per size, in place on one buffer: six needs are six recordings, not one for each of their
combinations. What they read is allocated at start, see `raypp.stage.sampler_sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from raypp.graphs.debug import Watched
from raypp.graphs.manager import CudaGraphManager
from raypp.ops.logits import allow_only
from raypp.stage.checked_tokens import only, owned_tokens
from raypp.stage.choose import LastHidden, place_drafts
from raypp.stage.recorded_masks import RecordedMasks
from raypp.stage.sampler import Sampler
from raypp.stage.sampling_rows import Needs
from raypp.stage.spec import StageSpec
from raypp.stage.speculation import Speculation
from raypp.stage.step_masks import StepMasks
from raypp.stage.step_shape import StepShape
from raypp.stage.step_sizes import FullSize


class RecordedChanges:
    """The recordings, and the buffers of the largest. B rows, K drafts, N = B * (1 + K), V vocabulary.

    Args:
        spec: The last stage's.
        sampler: Of its rows; keeps all its tables from now on.
        speculation: None when nobody drafts.
        graphs: The stage's.
        mode: What they are accounted to.
        sizes: Which are to be recorded.
        last_token_ids: See `StepMasks`.
    """

    def __init__(
        self,
        spec: StageSpec,
        sampler: Sampler,
        speculation: Speculation | None,
        graphs: CudaGraphManager,
        mode: str,
        sizes: Sequence[FullSize],
        last_token_ids: torch.Tensor,
    ) -> None:
        most_rows, most_tokens = max(size.num_rows for size in sizes), max(size.num_tokens for size in sizes)
        self._spec = spec
        self._sampler = sampler
        self._speculation = speculation
        self._graphs = graphs
        self._mode = mode
        self._sizes = frozenset(sizes)
        self._logits = torch.zeros(most_tokens, spec.vocab_size, device=last_token_ids.device)
        self.masks = RecordedMasks(spec, most_rows, most_tokens, last_token_ids)
        self._num_rows = 0  # of the step that ran last, without padding
        sampler.reserve()

    def __contains__(self, size: FullSize) -> bool:
        """Whether steps of that size are to be changed by recordings."""
        return size in self._sizes

    @property
    def are_steady(self) -> bool:
        """Whether all tables are still where the recordings read them."""
        return self._sampler.is_steady

    def changed(self, last: LastHidden) -> LastHidden:
        """Return what the tail goes on with."""
        return LastHidden(self._logits[: len(last.logits)], last.positions, last.hidden, is_changed=True)

    def record(self, size: FullSize, shape: StepShape, last_of: Callable[[], LastHidden]) -> None:
        """Record all needs of steps of a size.

        Args:
            size: One of those that were given.
            shape: Of such steps.
            last_of: Returns what the layers left: in a recording always the same tensors, else new ones each time.
        """
        self._num_rows = size.num_rows
        masks = self.masks.of(shape.rows, size.num_drafts)
        programs = {need: partial(self._change, need, shape, last_of) for need in Needs.CHANGES}
        programs[Needs.GREEDY] = partial(self._copy, shape, last_of)
        programs[Needs.GRAMMAR] = partial(allow_only, self._logits[: size.num_tokens], masks.bitmasks)
        for need, program in programs.items():
            self._graphs.record(self._mode, ("change", size, need), program, watched=self._watched(size, last_of))

    def run(self, size: FullSize, num_rows: int, needs: Needs, masks: StepMasks | None) -> None:
        """Change the logits of a step, of which all but the first `num_rows` rows are padding."""
        self._num_rows = num_rows
        if masks is not None:
            self.masks.load(masks, size.num_drafts)
        for need in (Needs.GREEDY, *needs.changes, *(Needs.GRAMMAR & needs)):
            self._graphs.run(("change", size, need))

    def read_by_tails(self) -> dict[str, torch.Tensor]:
        """Return what tails behind them read and leave as it is."""
        return self._tables() | {"changed logits": self._logits}

    def changed_by_tails(self) -> dict[str, torch.Tensor]:
        """Return what tails behind them read and change."""
        return self._sampler.history.tensors() | self.masks.changed()

    def _tables(self) -> dict[str, torch.Tensor]:
        return self._sampler.rows.reserved_tensors() | self.masks.read()

    def _copy(self, shape: StepShape, last_of: Callable[[], LastHidden]) -> None:
        last = last_of()
        place_drafts(shape, last, self._sampler, self._speculation)
        self._logits[: len(last.logits)].copy_(last.logits)

    def _change(self, need: Needs, shape: StepShape, last_of: Callable[[], LastHidden]) -> None:
        last = self.changed(last_of())
        self._sampler.change(need, last.logits, shape.rows_of_logits(), last.positions)

    def _watched(self, size: FullSize, last_of: Callable[[], LastHidden]) -> Watched:
        def yields(result: None) -> dict[str, torch.Tensor]:
            num_tokens = self._num_rows * (1 + size.num_drafts)
            counts = owned_tokens(last_of().hidden.slot_mapping, self._spec)[:num_tokens]
            return {"changed logits": only(counts, self._logits[:num_tokens])}

        return Watched(
            reads=self._tables,
            changes=lambda: {"changed logits": self._logits, **self._sampler.history.tensors()},
            yields=yields,
        )
