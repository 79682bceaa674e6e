"""Encodes items in captured batches: the budgeted CUDA graphs of an encoder.

    items --pack--> batches of whole items --pad--> the smallest budget that fits --replay--> embeddings, in order
                        +-- larger than every budget, or faster without --> eager forward --^

A graph fixes the shapes of everything; images come in all sizes. So there is one graph per budget of tokens, each
batch is padded to one, and what depends on the items lies in buffers that are filled before the replay. Without CUDA
the same padded batches run on the same buffers with calls in place of graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Generic

import torch

from raypp.encoder.batch_buffers import BatchBuffers
from raypp.encoder.encoded_item import EncodedItem
from raypp.encoder.encoder_stats import EncoderStats
from raypp.encoder.graph_choice import BudgetTimes, GraphChoice
from raypp.encoder.packing import PackedBatch, pack_items
from raypp.encoder.protocol import BatchShape, BatchT, SupportsEncoderCudaGraph
from raypp.errors import ResourceError
from raypp.graphs.buckets import Buckets
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.graphs.pieces import GraphMaker
from raypp.prompt_items import EncoderItem

_MODE = "encoder"
_NUM_MEASURED = 3
_NUM_MEASURED_LAUNCHES = 15  # one figure, which all budgets are compared with


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
        sizes = [spec.num_tokens for spec in self._model.item_specs(items)]
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
            self._settle()
            started = time.perf_counter()
            function()
            self._settle()
            seconds.append(time.perf_counter() - started)
        return median(seconds[1:])

    def _settle(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _shape(self, budget: int) -> BatchShape:
        return BatchShape(budget, self._max_items)

    def _forward(self, shape: BatchShape) -> torch.Tensor:
        return self._model.captured_forward(self._buffers.inputs(shape), shape)
