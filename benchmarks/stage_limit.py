"""The least time that a stage's forward could take: for reading weights, KV and states, or for arithmetic, if more.

Activations, the sampler and messages are not counted. 1 / share is how much there is to be won at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from device_speed import DeviceSpeed

from raypp.api.timeline import Forward
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer
from raypp.models.config import ModelConfig
from raypp.models.sizes import kv_bytes_read, layer_sizes, lm_head_bytes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Work:
    """What a forward has to do."""

    num_tokens: int
    """Computed."""
    num_kv_tokens: int
    """Whose KV is read, over all rows."""
    num_attended: int
    """Pairs of a token and one before it, or itself."""
    num_logits: int
    """Tokens whose successor is chosen."""
    num_rows: int = 0
    """Whose states are read, in layers that keep one."""


@dataclass(frozen=True)
class StageLimit:
    """One stage of a model on a device."""

    model: ModelConfig
    start_layer: int
    end_layer: int  # exclusive
    is_last: bool
    dtype_bytes: int
    speed: DeviceSpeed
    kv_dtype_bytes: int = 0  # 0: as many as the model's

    def seconds(self, work: Work) -> float:
        """Return the least time for a forward."""
        own = slice(self.start_layer, self.end_layer)
        sizes = layer_sizes(self.model, self.dtype_bytes)[own]
        layer_bytes = sum(size.reads.of(work.num_tokens) for size in sizes)
        head_bytes = lm_head_bytes(self.model, self.dtype_bytes) * self.is_last
        of_tokens = kv_bytes_read(self.model, self.kv_dtype_bytes or self.dtype_bytes)[own]
        kv_bytes = sum(map(self._kv_bytes, of_tokens, self.model.attention[own], repeat(work)))
        state_bytes = sum(
            layer.cache.checkpoint_bytes(_DTYPE_BYTES[layer.cache.state_dtype])
            for layer in self.model.attention[own]
            if isinstance(layer, GatedDeltaConfig)
        )
        flops = sum(size.flops(work.num_tokens) for size in sizes)
        flops += 2 * head_bytes / self.dtype_bytes * work.num_logits
        attending = [layer for layer in self.model.attention[own] if isinstance(layer, AttentionConfig)]
        flops += sum(4 * layer.num_heads * layer.head_dim for layer in attending) * work.num_attended
        read_s = (layer_bytes + head_bytes + kv_bytes + state_bytes * work.num_rows) / self.speed.read_bytes_per_s
        return max(read_s, flops / self.speed.flops_per_s)

    @staticmethod
    def _kv_bytes(of_token: int, layer: LayerMixer, work: Work) -> int:
        """Return what a layer reads of the KV cache; decode rows no more of it than the layer's window."""
        window = None if layer.attention is None else layer.attention.window
        if window is None or not work.num_rows:
            return of_token * work.num_kv_tokens
        return of_token * min(work.num_kv_tokens, window * work.num_rows)


def forward_work(forward: Forward) -> Work:
    """Return the work of a step's forward."""
    work = forward.work
    return Work(
        num_tokens=work.num_tokens,
        num_kv_tokens=work.num_decode_kv + work.num_prompt_kv,
        num_attended=work.num_decode_kv + work.num_prompt_pairs,
        num_logits=work.num_logits,
        num_rows=work.num_decode_rows,
    )


def stage_limits(model: ModelConfig, plan: Mapping[str, Any], speed: DeviceSpeed) -> list[StageLimit]:
    """Return every stage of a plan, as `LLM.plan` returns it."""
    last = len(plan["stages"]) - 1
    return [
        StageLimit(model, *stage["layers"], stage["stage_index"] == last, _DTYPE_BYTES[plan["dtype"]], speed)
        for stage in plan["stages"]
    ]
