"""Kernels of decode steps, compiled side by side: one after the other they take a second each, and recordings wait.

Every size is run once by a thread of its own, on tensors of its own. All threads launch into one stream, so that what
kernels share (scratch memory, the null block) is used by one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from raypp.ops.sample.tables import Needs
from raypp.stage.padding_step import padding_step
from raypp.stage.sampler import Sampler
from raypp.stage.spec import StageSpec
from raypp.stage.stage_model import StageModel
from raypp.stage.step_sizes import FullSize


def compile_ahead(
    spec: StageSpec,
    model: StageModel,
    kv_caches: Sequence[torch.Tensor],
    sampler: Sampler | None,
    sizes: Sequence[FullSize],
) -> None:
    """Run decode steps of padding alone, of all sizes, in `spec.graphs.compile_threads` threads; 1: do nothing.

    Only the null block is written. A size for which there is no memory is left to whoever records it.
    """
    num_threads = min(spec.graphs.compile_threads, len(sizes))
    if num_threads <= 1:
        return
    device = torch.device(spec.device)
    if device.type == "cuda" and device.index is None:  # threads begin with the first one as theirs
        device = torch.device("cuda", torch.cuda.current_device())

    def run(size: FullSize) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.inference_mode(), suppress(torch.OutOfMemoryError):
            _decode(spec, model, kv_caches, sampler, size)

    with ThreadPoolExecutor(num_threads, "compile") as pool:
        for _ in pool.map(run, sizes):  # raises what a thread raised
            pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _decode(
    spec: StageSpec,
    model: StageModel,
    kv_caches: Sequence[torch.Tensor],
    sampler: Sampler | None,
    size: FullSize,
) -> None:
    step = padding_step(spec, 0, num_decode_rows=size.num_rows, decode_query_len=1 + size.num_drafts)
    device = torch.device(spec.device)
    model.plan_attention(step.attention, 0)
    hidden = torch.ones(size.num_tokens, model.hidden_size, dtype=getattr(torch, spec.dtype), device=device)
    hidden = model.forward(hidden, step.positions, step.attention, kv_caches)
    if sampler is not None:
        rows = torch.full((size.num_tokens,), spec.padding_row, dtype=torch.int64, device=device)
        sampler.choose(model.compute_logits(hidden), rows, step.positions, Needs.DRAW)
