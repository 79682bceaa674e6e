"""The sizes that steps are padded to. They follow from the plan alone, so every stage finds the same ones.

    full       every row has 1 + K tokens: padded to a number of rows, one recording for the whole step
    piecewise  any other step: padded to a number of tokens, pieces between attention calls
    neither    larger steps, and those that nothing was recorded for: operation by operation

The number of rows of a step is never changed to make it fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets, few_row_buckets, row_buckets, token_buckets
from raypp.graphs.cost import RecordingCost
from raypp.messages import StepPlan
from raypp.stage.stage_spec import GraphSpec


class FullSize(NamedTuple):
    """A decode step that is padded to so many rows."""

    num_rows: int
    num_drafts: int  # K

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.num_rows * (1 + self.num_drafts)


@dataclass(frozen=True)
class StepSizes:
    """The sizes that a stage has, or all of them have."""

    full: tuple[FullSize, ...] = ()
    piecewise: tuple[int, ...] = ()  # tokens

    @classmethod
    def wanted(
        cls,
        graphs: GraphSpec,
        ladder: Sequence[int],
        *,
        max_step_rows: int,
        max_step_tokens: int,
        can_be_full: bool = True,
    ) -> StepSizes:
        """Return what a stage is to record, the largest first.

        Args:
            graphs: Which steps at all.
            ladder: The numbers of drafts that a step may have.
            max_step_rows: Rows of one step.
            max_step_tokens: Tokens of one step.
            can_be_full: Whether its decode steps never wait for the device.
        """
        full: list[FullSize] = []
        if graphs.has_full and can_be_full:
            for num_drafts in ladder:
                rows = few_row_buckets(max_step_rows) if num_drafts else row_buckets(max_step_rows)
                sizes = (FullSize(num_rows, num_drafts) for num_rows in rows.sizes)
                full += (size for size in sizes if size.num_tokens <= max_step_tokens)
        max_tokens = graphs.max_piecewise_tokens
        piecewise = token_buckets(max_tokens).sizes if max_tokens else ()
        return cls(tuple(sorted(full, key=lambda size: -size.num_tokens)), tuple(reversed(piecewise)))

    @classmethod
    def common(cls, of_stages: Sequence[StepSizes]) -> StepSizes:
        """Return what all stages have: messages between them are padded, too."""
        first, *others = of_stages
        return cls(
            tuple(size for size in first.full if all(size in other.full for other in others)),
            tuple(size for size in first.piecewise if all(size in other.piecewise for other in others)),
        )


@dataclass(frozen=True)
class StageRecordings:
    """What a stage has recorded, and what it took."""

    sizes: StepSizes
    costs: dict[str, RecordingCost]  # by mode

    def describe(self) -> dict[str, dict[str, float]]:
        """Return the costs as plain data, by mode."""
        return {mode: asdict(cost) for mode, cost in self.costs.items()}


def check_required(
    stage_index: int, wanted: StepSizes, recorded: StepSizes, costs: Mapping[str, RecordingCost]
) -> None:
    """Refuse a stage that has not a single recording of a mode that was asked for by name.

    Raises:
        ResourceError: says what memory there was.
    """
    for mode, has_wanted, has_any in (
        ("full", wanted.full, recorded.full),
        ("piecewise", wanted.piecewise, recorded.piecewise),
    ):
        if has_wanted and not has_any:
            taken = ", ".join(f"{name} {cost.memory_bytes / 2**30:.2f} GiB" for name, cost in costs.items())
            raise ResourceError(
                f"stage {stage_index} has no memory for a single {mode} recording",
                got=f"{len(has_wanted)} sizes left out; all recordings: {taken}",
                expected="at least one",
                hint='lower gpu_memory_utilization, num_kv_blocks or max_num_seqs, or leave graphs.mode at "auto"',
            )


class StepPadding:
    """Says what a step is padded to."""

    def __init__(self, sizes: StepSizes) -> None:
        rows: dict[int, set[int]] = {}
        for num_rows, num_drafts in sizes.full:
            rows.setdefault(num_drafts, set()).add(num_rows)
        self._rows = {num_drafts: Buckets(of_drafts) for num_drafts, of_drafts in rows.items()}
        self._tokens = Buckets(set(sizes.piecewise)) if sizes.piecewise else None

    def full_rows(self, plan: StepPlan) -> int | None:
        """Return the rows of the recording that takes the whole step; None for a step that no recording can take.

        Every row of such a step decodes with K drafts, so that all have the same number of tokens, and none starts.
        """
        if plan.num_decode_rows != len(plan.rows) or len(plan.start_rows):
            return None
        buckets = self._rows.get(plan.num_drafts)
        # A recording has room for as many new blocks as it has rows: more is rare, since few tokens of a row need them.
        return None if buckets is None else buckets.fit(max(len(plan.rows), len(plan.block_rows)))

    def piecewise_tokens(self, num_tokens: int) -> int | None:
        """Return the tokens of the pieces that take a step of any rows; None for one that is too large."""
        return None if self._tokens is None else self._tokens.fit(num_tokens)
