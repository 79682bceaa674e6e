"""Builds an encoder around its model: budgets that fit the memory, buffers, graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from raypp.encoder.encoder_graphs import BatchBuffers, EncoderCudaGraphManager
from raypp.encoder.protocol import BatchShape, BatchT, BudgetRange, EncoderSpec, SupportsEncoderCudaGraph
from raypp.errors import ConfigError, ResourceError
from raypp.graphs.buckets import Buckets
from raypp.graphs.graph_manager import graph_maker

MAX_PADDING_SHARE = 0.1
"""Of a batch; powers of two, which waste up to half of it, would need a sixth of the graphs."""

_GRAIN = 32
"""Tokens. Products are computed in tiles of a hundred rows and more: a budget in between would pay for whole tiles."""

_GRAPH_SHARE = 0.85  # of the memory that is left: graphs and libraries take some beside what a batch takes

logger = logging.getLogger(__name__)


def token_ladder(budgets: BudgetRange, max_padding_share: float = MAX_PADDING_SHARE) -> Buckets:
    """Return budgets from the smallest item up, such that no batch has more padding than that share.

    An exception is a batch of less than `budgets.min_tokens`, which no item makes. Budgets that are far enough apart
    are multiples of 32, or of the least multiple of what items have that is no smaller.
    """
    step = budgets.multiple_of
    grain = -(-_GRAIN // step) * step
    sizes = [min(budgets.min_tokens, budgets.max_tokens)]
    while sizes[-1] < budgets.max_tokens:
        smallest_too_large = sizes[-1] + step
        size = int(smallest_too_large / (1 - max_padding_share))
        size -= size % (grain if size - size % grain > sizes[-1] + grain // 2 else step)
        sizes.append(min(size, budgets.max_tokens))
    return Buckets(set(sizes))


def largest_fitting(budgets: BudgetRange, measure: Callable[[int], int], limit_bytes: int) -> BudgetRange:
    """Return the part of a range of budgets whose batches fit a memory.

    Args:
        budgets: What the model deems worth a graph.
        measure: Returns the bytes that a batch of so many tokens takes. Asked for large ones first, so that what it
            allocates can be used again.
        limit_bytes: The memory.

    Raises:
        ResourceError: not even the smallest item fits.
    """
    num_tokens = budgets.max_tokens
    while (needed := measure(num_tokens)) > limit_bytes:
        if num_tokens == budgets.min_tokens:
            raise ResourceError(
                "an encoder's memory is too small for the smallest image",
                got=f"{limit_bytes / 2**30:.2f} GiB",
                expected=f"{needed / 2**30:.2f} GiB for {num_tokens} tokens, besides the weights",
                hint="raise encoder_num_gpus or gpu_memory_utilization, or lower encoder_cache_bytes",
            )
        # Memory grows with the tokens; the next guess is a little below what that says.
        fitting = int(num_tokens * limit_bytes / needed * 0.95)
        num_tokens = max(min(fitting, num_tokens - 1), budgets.min_tokens)
        num_tokens -= num_tokens % budgets.multiple_of
    return replace(budgets, max_tokens=num_tokens)


def build_manager(model: SupportsEncoderCudaGraph[BatchT], spec: EncoderSpec) -> EncoderCudaGraphManager[BatchT]:
    """Return the manager of a model's graphs, captured.

    Args:
        model: With its weights, on its device.
        spec: What was asked for.

    Raises:
        ResourceError: the memory does not suffice for the smallest image.
    """
    device = torch.device(spec.device)
    with torch.inference_mode():
        budgets = choose_budgets(model, spec, device)
        maker = graph_maker(device) if spec.captures else None
        manager = EncoderCudaGraphManager(model, budgets, spec.max_images_per_batch, device, maker)
        manager.capture()
    return manager


def choose_budgets(model: SupportsEncoderCudaGraph[BatchT], spec: EncoderSpec, device: torch.device) -> Buckets:
    """Return the budgets to capture for: those that were configured, else a ladder as high as the memory allows.

    Raises:
        ConfigError: the model's images do not fill a budget that was configured.
        ResourceError: the memory does not suffice for the smallest image.
    """
    wanted = model.budget_range()
    if spec.token_budgets is not None:
        if any(size % wanted.multiple_of for size in spec.token_budgets):
            raise ConfigError(
                "token_budgets do not go with the model's images",
                got=list(spec.token_budgets),
                expected=f"multiples of {wanted.multiple_of}, the tokens of each image",
                hint="leave token_budgets out",
            )
        return Buckets(set(spec.token_budgets))
    if device.type != "cuda":
        return token_ladder(wanted)
    left = spec.memory_bytes - torch.cuda.memory_allocated(device) - spec.cache_bytes

    def measure(num_tokens: int) -> int:
        return _batch_bytes(model, BatchShape(num_tokens, spec.max_images_per_batch), device, left)

    fitting = largest_fitting(wanted, measure, int(left * _GRAPH_SHARE))
    if fitting.max_tokens < wanted.max_tokens:
        logger.warning(
            "an encoder's graphs end at %d tokens, for want of memory: the model would use up to %d",
            fitting.max_tokens,
            wanted.max_tokens,
        )
    return token_ladder(fitting)


def _batch_bytes(
    model: SupportsEncoderCudaGraph[BatchT], shape: BatchShape, device: torch.device, left_bytes: int
) -> int:
    """Return what the largest moment of a batch takes of a GPU, its buffers included."""
    before = torch.cuda.memory_allocated(device)
    try:
        torch.cuda.reset_peak_memory_stats(device)
        buffers = BatchBuffers(model.graph_config(), shape, device)
        buffers.upload(model.replay_values(model.capture_batch(shape), shape), shape)
        output = model.captured_forward(buffers.inputs(shape), shape)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del buffers, output
    except torch.OutOfMemoryError:
        peak = 2 * max(left_bytes, 1)
    torch.cuda.empty_cache()
    return peak
