"""Builds an encoder around its model: budgets that fit the memory, buffers, graphs."""

from __future__ import annotations

import logging

import torch

from raypp.encoder.batch_buffers import BatchBuffers
from raypp.encoder.budgets import largest_fitting, token_ladder
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager
from raypp.encoder.encoder_spec import EncoderSpec
from raypp.encoder.protocol import BatchShape, BatchT, SupportsEncoderCudaGraph
from raypp.graphs.buckets import Buckets
from raypp.graphs.graph_manager import graph_maker

_GRAPH_SHARE = 0.85  # of the memory that is left: graphs and libraries take some beside what a batch takes

logger = logging.getLogger(__name__)


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
        ResourceError: the memory does not suffice for the smallest image.
    """
    if spec.token_budgets is not None:
        return Buckets(set(spec.token_budgets))
    wanted = model.budget_range()
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
