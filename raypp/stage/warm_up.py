"""The first steps of a stage on a GPU, before anybody waits for them: kernels compile, libraries make buffers.

The largest step that a plan may order is among them, so that memory that does not suffice is found out at start. What
recordings compile is not repeated here: prompts, and decode rows beside them, whose kernels differ by their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypp.errors import ResourceError
from raypp.stage.padding_step import PaddingStep, padding_step
from raypp.stage.spec import StageSpec
from raypp.stage.stage_model import StageModel

_FEW_TOKENS = 16


def warm_up(spec: StageSpec, model: StageModel, kv_caches: Sequence[torch.Tensor]) -> None:
    """Run the largest prefill and small mixed steps, of padding alone; only the null block is written.

    Raises:
        ResourceError: the largest step does not fit the device's memory.
    """
    few_tokens = min(_FEW_TOKENS, spec.max_step_tokens)
    for step in (padding_step(spec, few_tokens), padding_step(spec, spec.max_step_tokens)):
        try:
            _run(spec, model, kv_caches, step)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"stage {spec.stage_index} has no memory for a step of {len(step.positions)} tokens",
                got=str(error).split("\n", 1)[0],
                hint="lower max_num_batched_tokens, gpu_memory_utilization or num_kv_blocks",
            ) from error
    for num_drafts in spec.speculative.ladder:
        num_rows, query_len = 1, 1 + num_drafts
        while num_rows <= spec.max_step_rows and num_rows * query_len + few_tokens <= spec.max_step_tokens:
            step = padding_step(spec, few_tokens, num_decode_rows=num_rows, decode_query_len=query_len)
            _run(spec, model, kv_caches, step)
            num_rows *= 2


def _run(spec: StageSpec, model: StageModel, kv_caches: Sequence[torch.Tensor], step: PaddingStep) -> None:
    device, num_tokens = torch.device(spec.device), len(step.positions)
    model.plan_attention(step.attention, 0)
    if spec.is_first:
        hidden = model.embed(torch.zeros(num_tokens, dtype=torch.int32, device=device))
    else:
        hidden = torch.ones(num_tokens, model.hidden_size, dtype=getattr(torch, spec.dtype), device=device)
    hidden = model.forward(hidden, step.positions, step.attention, kv_caches)
    if spec.is_last:
        model.compute_logits(hidden[: spec.max_step_rows])
