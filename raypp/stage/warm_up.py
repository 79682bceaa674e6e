"""The first steps of a stage on a GPU, before anybody waits for them: kernels compile, libraries make buffers.

The largest step that a plan may order is among them, so that memory that does not suffice is found out at start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypp.errors import ResourceError
from raypp.stage.padding_step import padding_step
from raypp.stage.spec import StageSpec
from raypp.stage.stage_model import StageModel

_FEW_TOKENS = 16


def warm_up(spec: StageSpec, model: StageModel, kv_caches: Sequence[torch.Tensor]) -> None:
    """Run a small and the largest prefill of padding alone; only the null block is written.

    Raises:
        ResourceError: the largest step does not fit the device's memory.
    """
    for num_tokens in (min(_FEW_TOKENS, spec.max_step_tokens), spec.max_step_tokens):
        try:
            _prefill(spec, model, kv_caches, num_tokens)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"stage {spec.stage_index} has no memory for a step of {num_tokens} tokens",
                got=str(error).split("\n", 1)[0],
                hint="lower max_num_batched_tokens, gpu_memory_utilization or num_kv_blocks",
            ) from error


def _prefill(spec: StageSpec, model: StageModel, kv_caches: Sequence[torch.Tensor], num_tokens: int) -> None:
    step, device = padding_step(spec, num_tokens), torch.device(spec.device)
    model.plan_attention(step.attention, 0)
    if spec.is_first:
        hidden = model.embed(torch.zeros(num_tokens, dtype=torch.int32, device=device))
    else:
        hidden = torch.ones(num_tokens, model.hidden_size, dtype=getattr(torch, spec.dtype), device=device)
    hidden = model.forward(hidden, step.positions, step.attention, kv_caches)
    if spec.is_last:
        model.compute_logits(hidden[: spec.max_step_rows])
