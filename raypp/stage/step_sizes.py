"""The sizes that steps are padded to. They follow from the plan alone, so every stage finds the same ones.

    full graph  every row has 1 + K tokens: padded to a number of rows, one CUDA graph for the whole step
    piecewise   any other step: padded to a number of tokens, graphs between attention calls
    eager       larger steps, and those without a graph: operation by operation

The number of rows of a step is never changed to make it fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets, few_row_buckets, row_buckets, token_buckets
from raypp.graphs.cost import GRAPH_MODES, GraphCost, GraphMode
from raypp.messages import StepForm, StepPlan
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
        modes: Collection[GraphMode] = GRAPH_MODES,
    ) -> StepSizes:
        """Return what a stage is to record, the largest first.

        Args:
            graphs: Which steps at all.
            ladder: The numbers of drafts that a step may have.
            max_step_rows: Rows of one step.
            max_step_tokens: Tokens of one step.
            modes: Which graphs can hold the stage's steps.
        """
        full: list[FullSize] = []
        if graphs.has_full and "full" in modes:
            for num_drafts in ladder:
                rows = few_row_buckets(max_step_rows) if num_drafts else row_buckets(max_step_rows)
                sizes = (FullSize(num_rows, num_drafts) for num_rows in rows.sizes)
                full += (size for size in sizes if size.num_tokens <= max_step_tokens)
        max_tokens = graphs.max_piecewise_tokens if "piecewise" in modes else 0
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
class StageGraphs:
    """The CUDA graphs that a stage has captured, and what that took."""

    sizes: StepSizes
    costs: dict[str, GraphCost]  # by mode

    def describe(self) -> dict[str, dict[str, float]]:
        """Return the costs as plain data, by mode."""
        return {mode: asdict(cost) for mode, cost in self.costs.items()}


def check_required(stage_index: int, wanted: StepSizes, recorded: StepSizes, costs: Mapping[str, GraphCost]) -> None:
    """Refuse a stage that has not a single graph of a mode that was asked for by name.

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


class StepSize(NamedTuple):
    """How a step runs, and what it is padded to."""

    form: StepForm
    bucket: int | None  # rows of a full graph, tokens of a piecewise one
    message: tuple[int, int, int, int]  # its rows, tokens, image tokens and drafting tokens in messages between stages


def full_graph_size(size: FullSize) -> StepSize:
    """Return the size of a decode step that is one graph: messages are padded, too."""
    return StepSize(StepForm.FULL_GRAPH, size.num_rows, (size.num_rows, size.num_tokens, 0, size.num_tokens))


class StepPadding:
    """Says what a step is padded to."""

    def __init__(self, sizes: StepSizes, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._full: dict[int, list[StepSize]] = {}  # by K: what decode steps of 0, 1, 2, ... rows are padded to
        for size in sorted(sizes.full):
            of_rows = self._full.setdefault(size.num_drafts, [])
            of_rows += [full_graph_size(size)] * (size.num_rows + 1 - len(of_rows))
        self._tokens = Buckets(set(sizes.piecewise)) if sizes.piecewise else None

    def size_of(self, plan: StepPlan) -> StepSize:
        """Return what the step is padded to.

        One graph takes the whole step if every row decodes with K drafts, so that all have the same number of tokens,
        and none starts. A graph has room for as many new blocks by group of layers as it has rows: more is rare.
        """
        num_rows = len(plan.rows)
        if plan.num_decode_rows == num_rows and not len(plan.start_rows):
            of_rows, num_blocks = self._full.get(plan.num_drafts, ()), -(-len(plan.block_rows) // self._num_groups)
            most = max(num_rows, num_blocks)
            if most < len(of_rows):
                return of_rows[most]
        num_tokens = int(plan.num_scheduled_tokens.sum())
        bucket = None if self._tokens is None else self._tokens.fit(num_tokens)
        form = StepForm.EAGER if bucket is None else StepForm.PIECEWISE
        num_drafting = int(plan.num_scheduled_tokens[plan.drafting].sum()) if len(plan.drafting) else num_tokens
        return StepSize(form, bucket, (num_rows, num_tokens, plan.num_item_tokens, num_drafting))
