"""The first steps of a stage on a GPU, of padding alone: kernels compile, and memory is found to suffice.

`warm_up` runs the largest step that a plan may order, smaller ones down to those that graphs hold, and mixed ones, and
chooses tokens as called steps do: full graphs, which also verify drafts and follow grammars, hold other kernels, and
the first request that draws would have all others wait for these. `compile_ahead` runs every decode step that will be
captured, side by side in threads: one after the other their kernels take a second each to compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from raypp.errors import ResourceError
from raypp.messages import NULL_BLOCK
from raypp.ops.attention import AttentionBatch
from raypp.ops.row_inputs import NewEntries, Queries, row_inputs
from raypp.ops.row_state import LayerMemory, RowSpans, moved
from raypp.ops.row_tokens import StepTokens
from raypp.row_params import Needs
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_end import Sampler
from raypp.stage.step_sizes import FullSize


@dataclass(frozen=True, eq=False)
class PaddingStep:
    """Rows without a prefix, of T tokens together; they write the null block alone."""

    positions: torch.Tensor  # [T] int64
    attention: AttentionBatch


def padding_step(
    spec: StageSpec, num_prefill_tokens: int, *, num_decode_rows: int = 0, decode_query_len: int = 1
) -> PaddingStep:
    """Return a step of some decode rows and `num_prefill_tokens` tokens in as few rows as the model's length allows."""
    device, most = torch.device(spec.device), spec.max_model_len
    prefill_lens = [min(most, num_prefill_tokens - start) for start in range(0, num_prefill_tokens, most)]
    lens = [decode_query_len] * num_decode_rows + prefill_lens
    shape = (len(spec.groups), len(lens), spec.blocks_per_row + 1)
    begins = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    nothing = torch.zeros(len(lens), dtype=torch.int32, device=device)
    # By the operation of real steps: the first prompt would wait for its kernel, too.
    inputs = row_inputs(
        torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device),
        NewEntries(*torch.empty(3, 0, dtype=torch.int64, device=device).unbind()),
        torch.arange(len(lens), device=device),
        nothing,
        Queries(begins, sum(lens), max(lens)),
        block_size=spec.block_size,
        max_len=spec.max_seq_len,
    )
    spans = RowSpans(
        rows=torch.full((len(lens),), spec.padding_row, dtype=torch.int64, device=device),
        starts=nothing,
        query_start_loc=begins,
        token_rows=torch.repeat_interleave(torch.tensor(lens)).to(device),
        held=nothing,
        kept=moved(nothing, begins, num_decode_rows, spec.block_size),
    )
    attention = AttentionBatch(
        spans=spans,
        num_decode_rows=num_decode_rows,
        decode_query_len=decode_query_len,
        seq_lens=inputs.seq_lens,
        block_tables=inputs.block_tables,
        slot_mappings=inputs.slot_mappings,
        prefill_query_lens=prefill_lens,
        prefill_seq_lens=prefill_lens,
    )
    return PaddingStep(inputs.positions, attention)


_FEW_TOKENS = 16


def warm_up(
    spec: StageSpec, model: StageModel, kv_caches: Sequence[LayerMemory], sampler: Sampler | None = None
) -> None:
    """Run the largest prefill, others that no graph holds, and small mixed steps, of padding alone.

    Only the null block is written.

    Args:
        spec: Of the stage.
        model: Its layers.
        kv_caches: Theirs.
        sampler: Of the last stage; None on others.

    Raises:
        ResourceError: the largest step does not fit the device's memory.
    """
    if sampler is not None:  # before the largest step, which has to fit beside the buffers that this makes
        with _in_memory(spec, "choosing tokens"):
            _choose(spec, sampler)
    few_tokens = min(_FEW_TOKENS, spec.max_step_tokens)
    sizes = [few_tokens, spec.max_step_tokens]
    while sizes[-1] // 2 > max(few_tokens, spec.graphs.max_piecewise_tokens):  # products are cut by powers of two
        sizes.append(sizes[-1] // 2)
    for num_tokens in sizes:
        with _in_memory(spec, f"a step of {num_tokens} tokens"):
            _run(spec, model, kv_caches, padding_step(spec, num_tokens))
    for num_drafts in spec.speculative.ladder:
        num_rows, query_len = 1, 1 + num_drafts
        while num_rows <= spec.max_step_rows and num_rows * query_len + few_tokens <= spec.max_step_tokens:
            step = padding_step(spec, few_tokens, num_decode_rows=num_rows, decode_query_len=query_len)
            _run(spec, model, kv_caches, step)
            num_rows *= 2


@contextmanager
def _in_memory(spec: StageSpec, what: str) -> Iterator[None]:
    """Say what there is no memory for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"stage {spec.stage_index} has no memory for {what}",
            got=str(error).split("\n", 1)[0],
            hint="lower max_num_batched_tokens, gpu_memory_utilization or num_kv_blocks",
        ) from error


def _choose(spec: StageSpec, sampler: Sampler) -> None:
    """Choose a token for padding: greedily and by a draw, of the model's own logits and of changed ones."""
    device = torch.device(spec.device)
    rows = torch.full((1,), spec.padding_row, dtype=torch.int64, device=device)
    logits, positions = torch.zeros(1, spec.num_logits, device=device), torch.zeros_like(rows)
    written = torch.full_like(rows, spec.scrap_row)
    for needs in (Needs.GREEDY, Needs.DRAW | Needs.TRUNCATE, Needs.CHANGES, Needs.ALL):
        chosen = sampler.choose(logits, rows, positions, needs)
        if needs & Needs.HISTORY:
            sampler.remember(StepTokens(written, positions, chosen.to(torch.int32).unsqueeze(1)), counts=True)
    sampler.report(logits, rows, chosen)


def _run(spec: StageSpec, model: StageModel, kv_caches: Sequence[LayerMemory], step: PaddingStep) -> None:
    device, num_tokens = torch.device(spec.device), len(step.positions)
    model.plan_attention(step.attention, 0)
    if spec.is_first:
        hidden = model.embed(torch.zeros(num_tokens, dtype=torch.int32, device=device))
    else:
        hidden = _entering(spec, model, num_tokens, device)
    hidden = model.forward(hidden, step.positions, step.attention, kv_caches)
    if spec.is_last:
        model.compute_logits(hidden[: spec.max_step_rows])


def _entering(spec: StageSpec, model: StageModel, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return what enters the layers of a stage, of padding."""
    size = spec.stream_size(spec.stage_index, model.hidden_size)
    return torch.ones(num_tokens, size, dtype=getattr(torch, spec.dtype), device=device)


def compile_ahead(
    spec: StageSpec,
    model: StageModel,
    kv_caches: Sequence[LayerMemory],
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
    kv_caches: Sequence[LayerMemory],
    sampler: Sampler | None,
    size: FullSize,
) -> None:
    step = padding_step(spec, 0, num_decode_rows=size.num_rows, decode_query_len=1 + size.num_drafts)
    device = torch.device(spec.device)
    model.plan_attention(step.attention, 0)
    hidden = _entering(spec, model, size.num_tokens, device)
    hidden = model.forward(hidden, step.positions, step.attention, kv_caches)
    if sampler is not None:
        rows = torch.full((size.num_tokens,), spec.padding_row, dtype=torch.int64, device=device)
        sampler.choose(model.compute_logits(hidden), rows, step.positions, Needs.DRAW)
