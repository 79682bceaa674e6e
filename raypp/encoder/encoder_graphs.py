"""Encodes items in captured batches: the budgeted CUDA graphs of an encoder.

    items --pack--> batches of whole items --pad--> the smallest budget that fits --replay--> embeddings, in order
                        +-- larger than every budget, or faster without --> eager forward --^

A graph fixes the shapes of everything; images come in all sizes. So there is one graph per budget of tokens, each
batch is padded to one, and what depends on the items lies in buffers that are filled before the replay. Without CUDA
the same padded batches run on the same buffers with calls in place of graphs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Generic

import torch

from raypp.encoder.protocol import (
    BatchShape,
    BatchT,
    EncodedItem,
    EncoderGraphConfig,
    Per,
    SupportsEncoderCudaGraph,
    TensorSpec,
)
from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.graphs.pieces import GraphMaker
from raypp.prompt_items import EncoderItem

_MODE = "encoder"
_NUM_MEASURED = 3
_NUM_MEASURED_LAUNCHES = 15  # one figure, which all budgets are compared with


class BatchBuffers:
    """The inputs of batches up to a shape, allocated once for the largest; a smaller batch has the front.

    Args:
        config: What the inputs are.
        largest: The largest shape.
        device: Where they are.
    """

    def __init__(self, config: EncoderGraphConfig, largest: BatchShape, device: torch.device) -> None:
        self._config = config
        self._inputs = {
            spec.name: torch.zeros(self._extent(spec, largest), dtype=spec.dtype, device=device)
            for spec in config.inputs
        }

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._inputs.values())

    def inputs(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        """Return the inputs of a batch of that shape, by name. Their addresses are always the same."""
        return {spec.name: self._inputs[spec.name][: self._extent(spec, shape)[0]] for spec in self._config.inputs}

    def upload(self, values: Mapping[str, torch.Tensor], shape: BatchShape) -> None:
        """Put into the inputs what they are to hold: queued from page-locked memory, at once from any other.

        Args:
            values: By name, on the host, never to change; they may be dropped. One that has fewer rows than its input
                leaves the rest as it is.
            shape: Of the batch.
        """
        inputs = self.inputs(shape)
        assert values.keys() == inputs.keys(), f"values {sorted(values)} for inputs {sorted(inputs)}"
        for name, value in values.items():
            target, rows = inputs[name], len(value)
            assert value.dtype == target.dtype, f"{name} is {value.dtype}, not {target.dtype}"
            assert rows <= len(target), f"{name} has {rows} rows for {len(target)}"
            target[:rows].copy_(value, non_blocking=True)

    def _extent(self, spec: TensorSpec, shape: BatchShape) -> Sequence[int]:
        num_rows = {
            Per.TOKEN: shape.num_tokens,
            Per.PATCH: shape.num_tokens * self._config.patches_per_token,
            Per.ITEM: shape.max_items,
        }[spec.per]
        return (num_rows + spec.extra_rows, *spec.trailing)


class EncoderCudaGraphManager(Generic[BatchT]):
    """Owns an encoder's graphs and buffers. Knows of the model what the protocol says.

    Args:
        model: The encoder.
        budgets: Tokens per batch to capture for.
        max_items: The most items of a batch.
        device: Where the model is.
        maker: Makes graphs. None: the same batches are encoded by calls.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph[BatchT],
        budgets: Buckets,
        max_items: int,
        device: torch.device,
        maker: GraphMaker | None,
    ) -> None:
        self._model = model
        self._budgets = budgets
        self._max_items = max_items
        self._device = device
        self._graphs = CudaGraphManager(maker) if maker is not None else None
        self._buffers = BatchBuffers(model.graph_config(), self._shape(budgets.sizes[-1]), device)
        self.choice = GraphChoice(budgets, {})
        self.stats = EncoderStats()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of the captured batches, ascending."""
        return self._budgets.sizes

    def capture(self) -> None:
        """Capture all budgets, the largest first: the others use its memory again. Under `torch.inference_mode`.

        A budget that there is no memory for is left out. Where calls stand in for graphs there is nothing to capture.

        Raises:
            ResourceError: there was memory for none.
        """
        graphs = self._graphs
        if graphs is None:
            return

        def record(budget: int) -> None:
            shape = self._shape(budget)
            self._buffers.upload(self._model.replay_values(self._model.capture_batch(shape), shape), shape)
            graphs.record(_MODE, budget, partial(self._forward, shape))

        with graphs.recording():
            recorded = graphs.record_sizes(_MODE, self._budgets.sizes[::-1], record)
        if not recorded:
            raise ResourceError(
                "an encoder's memory is too small for any of its CUDA graphs",
                got=f"graphs for {', '.join(map(str, self._budgets.sizes))} tokens",
                hint="smaller token_budgets, or a larger encoder_num_gpus",
            )
        self._budgets = Buckets(set(recorded))
        self.choice = self._measured(recorded)
        graphs.log_costs()
        cost = graphs.costs[_MODE]
        self.stats.num_graphs, self.stats.capture_s = cost.num_graphs, cost.seconds
        self.stats.graph_bytes = cost.memory_bytes + self._buffers.num_bytes

    def pack(self, items: Sequence[EncoderItem]) -> list[PackedBatch]:
        """Return which of the items are to be encoded together."""
        sizes = [item.num_tokens for item in items]
        return pack_items(sizes, self._budgets.sizes[-1], self._max_items, self.choice.budget_of)

    def encode(self, items: Sequence[EncoderItem]) -> list[EncodedItem]:
        """Return what the encoder makes of each item, in their order. Queues the work on a GPU, and does not wait.

        Under `torch.inference_mode`.
        """
        encoded: dict[int, EncodedItem] = {}
        for packed in self.pack(items):
            encoded.update(zip(packed.indices, self.encode_batch(items, packed), strict=True))
        return [encoded[index] for index in range(len(items))]

    def encode_batch(self, items: Sequence[EncoderItem], packed: PackedBatch) -> list[EncodedItem]:
        """Return what the encoder makes of the items of one batch, in the order of its indices. As `encode`."""
        batch = self._model.select_items(items, packed.indices)
        output = self._encode(batch, packed)
        return self._model.split_output(output, batch)

    def _encode(self, batch: BatchT, packed: PackedBatch) -> torch.Tensor:
        stats = self.stats
        stats.num_items += len(packed.indices)
        stats.num_tokens += packed.num_tokens
        if packed.budget is None:
            stats.num_eager_batches += 1
            stats.num_oversize_items += packed.num_tokens > self._budgets.sizes[-1]
            return self._model.eager_forward(batch)
        stats.num_captured_batches += 1
        stats.num_captured_items += len(packed.indices)
        stats.num_captured_tokens += packed.num_tokens
        stats.num_padding_tokens += packed.budget - packed.num_tokens
        return self._encode_captured(batch, packed.budget)

    def _encode_captured(self, batch: BatchT, budget: int) -> torch.Tensor:
        """Encode a batch, padded to a budget."""
        shape = self._shape(budget)
        self._buffers.upload(self._model.replay_values(batch, shape), shape)
        # What a graph returns lies where the next one will write: it is split, into copies, at once.
        output: torch.Tensor = self._forward(shape) if self._graphs is None else self._graphs.run(budget)
        return output

    def _measured(self, budgets: Sequence[int]) -> GraphChoice:
        """Return the choice by what batches take with and without their graphs."""
        smallest = self._model.budget_range().min_tokens
        times = {}
        for budget in budgets:
            num_items = max(min(self._max_items, budget // smallest), 1)
            each, left = divmod(budget, num_items)
            whole = self._model.capture_batch(self._shape(budget))
            split = self._model.capture_batch(self._shape(budget), num_items)
            times[budget] = BudgetTimes(
                budget=budget,
                captured_s=self._seconds_of(partial(self._encode_captured, whole, budget)),
                eager_s=self._seconds_of(partial(self._model.eager_forward, whole)),
                split_captured_s=self._seconds_of(partial(self._encode_captured, split, budget)),
                split_squares=(num_items - left) * each**2 + left * (each + 1) ** 2,
            )
        launches = partial(self._model.eager_forward, self._model.capture_batch(self._shape(smallest)))
        return GraphChoice(self._budgets, times, self._seconds_of(launches, _NUM_MEASURED_LAUNCHES))

    def _seconds_of(self, function: Callable[[], object], num_runs: int = _NUM_MEASURED) -> float:
        """Return the median time of a call and what it put on the device."""
        seconds = []
        for _ in range(1 + num_runs):
            self._synchronize()
            started = time.perf_counter()
            function()
            self._synchronize()
            seconds.append(time.perf_counter() - started)
        return median(seconds[1:])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _shape(self, budget: int) -> BatchShape:
        return BatchShape(budget, self._max_items)

    def _forward(self, shape: BatchShape) -> torch.Tensor:
        return self._model.captured_forward(self._buffers.inputs(shape), shape)


@dataclass(frozen=True)
class PackedBatch:
    """Items that are encoded by one forward."""

    indices: tuple[int, ...]  # into the list of items, ascending
    num_tokens: int  # of these items together
    budget: int | None  # what they are padded to; None when they are encoded eagerly


def pack_items(
    num_tokens: Sequence[int], largest: int, max_items: int, budget_of: Callable[[Sequence[int]], int | None]
) -> list[PackedBatch]:
    """Fill batches one after the other, each with as many items as go into the largest budget.

    Items keep their order, but for those too large for any budget: each of them is a batch of its own.

    Args:
        num_tokens: Of each item.
        largest: The largest budget.
        max_items: The most items of a batch.
        budget_of: Returns what a batch of items of so many tokens each is padded to: the smallest budget that holds
            them; None when they had better be encoded eagerly.
    """
    batches: list[PackedBatch] = []
    indices: list[int] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if indices:
            batches.append(PackedBatch(tuple(indices), filled, budget_of([num_tokens[index] for index in indices])))
            indices.clear()
            filled = 0

    for index, size in enumerate(num_tokens):
        if size > largest:
            batches.append(PackedBatch((index,), size, None))
            continue
        if filled + size > largest or len(indices) == max_items:
            close()
        indices.append(index)
        filled += size
    close()
    return batches


@dataclass(frozen=True)
class BudgetTimes:
    """What full batches of one budget take, seconds: of one item, and of several."""

    budget: int  # tokens
    captured_s: float
    eager_s: float
    split_captured_s: float  # several items; the same as `captured_s` where there is room for one only
    split_squares: int  # the sum of the squares of their tokens

    def captured_with(self, squares: int) -> float:
        """Return what the graph takes, by the sum of squares of its items, padding included."""
        return self.captured_s - self._attention_s(squares)

    def eager_with(self, squares: int) -> float:
        """Return what a full batch takes eagerly, by the sum of squares of its items, unless launching takes longer."""
        return self.eager_s - self._attention_s(squares)

    def _attention_s(self, squares: int) -> float:
        """Return how much less attention takes than for one item. By the graphs: eagerly, launching may hide it."""
        if self.split_squares == self.budget**2:
            return 0.0
        difference = max(self.captured_s - self.split_captured_s, 0.0)
        return difference * (self.budget**2 - squares) / (self.budget**2 - self.split_squares)


class GraphChoice:
    """Chooses by measurement whether a batch is worth its graph: a graph saves launches, and costs padding.

        time of eager, by tokens      ______/     launches bound it below, computing above
        time of graphs, by budget     __--''      a stair: padded to the next budget

    Where the stair is above the line, the batch is computed eagerly. Items attend to themselves alone, so attention
    takes what the squares of their sizes take. One item that fills a budget is one end, many small ones are the other;
    both are measured, and the sum of its squares places a batch between them.

    Args:
        budgets: There are graphs for these.
        times: Of each; empty where nothing was measured: then every batch that fits takes its graph.
        launch_s: What the smallest batch takes eagerly: it is as many launches as any.
    """

    def __init__(self, budgets: Buckets, times: Mapping[int, BudgetTimes], launch_s: float = 0.0) -> None:
        self._budgets = budgets
        self.times = times
        self.launch_s = launch_s

    def budget_of(self, sizes: Sequence[int]) -> int | None:
        """Return what a batch of items of these sizes, in tokens, is padded to; None: it is to be computed eagerly."""
        num_tokens = sum(sizes)
        budget = self._budgets.fit(num_tokens)
        if budget is None or not self.times:
            return budget
        squares = sum(size**2 for size in sizes)
        with_padding = squares + (budget - num_tokens) ** 2  # padding attends to itself, like one more item
        captured_s = self.times[budget].captured_with(with_padding)
        return budget if captured_s <= max(self.launch_s, self._computing_s(num_tokens, squares)) else None

    def _computing_s(self, num_tokens: int, squares: int) -> float:
        """Return what computing a batch takes eagerly: interpolated between the budgets around it."""
        sizes = self._budgets.sizes
        index = bisect_left(sizes, num_tokens)
        above = self.times[sizes[index]].eager_with(squares)
        if index == 0:
            return above  # below the smallest budget launches count
        start, end = sizes[index - 1], sizes[index]
        below = self.times[start].eager_with(squares)
        return below + (above - below) * (num_tokens - start) / (end - start)


@dataclass(slots=True)
class EncoderStats:
    """Counters of encoded batches, and what their graphs cost."""

    num_items: int = 0
    """Encoded, not found in a cache."""
    num_tokens: int = 0
    """Of these items."""
    num_captured_batches: int = 0
    num_captured_items: int = 0
    num_captured_tokens: int = 0
    """Without padding."""
    num_padding_tokens: int = 0
    num_eager_batches: int = 0
    """Encoded without a graph: an item larger than every budget, or a batch whose padding costs more than launching."""
    num_oversize_items: int = 0
    """Items that are larger than every budget."""
    num_graphs: int = 0
    capture_s: float = 0.0
    graph_bytes: int = 0
    """What capturing took of the device's memory, and the buffers of the batches."""

    @property
    def hit_rate(self) -> float:
        """The share of items that were encoded by a captured batch, 0..1."""
        return self.num_captured_items / max(self.num_items, 1)

    @property
    def padding_share(self) -> float:
        """The share of the captured batches' tokens that were padding, 0..1."""
        return self.num_padding_tokens / max(self.num_captured_tokens + self.num_padding_tokens, 1)
