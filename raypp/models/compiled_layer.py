"""Compiles what a layer computes before and after attention, by torch.compile, once for all layers of a stage.

What experts compute is left as it is: which weights they read is known on the device alone.
"""

from __future__ import annotations

import logging
import time

import torch

from raypp.graphs.compiled import CompiledFunction
from raypp.graphs.cost import GraphCost
from raypp.models.decoder import DecoderLayer, DecoderModel
from raypp.ops.attention import AttentionBatch
from raypp.ops.rotary import Rotation

_LOG = logging.getLogger(__name__)


def _before(layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    return layer.before_attention(hidden)


def _after(layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    return layer.after_attention(hidden, attended)


class CompiledLayer:
    """A layer whose pure functions run compiled; with few tokens, its own. See `raypp.models.decoder.DecoderLayer`."""

    def __init__(
        self, layer: DecoderLayer, before: CompiledFunction, after: CompiledFunction | None, fewest_tokens: int
    ) -> None:
        self.has_experts = layer.has_experts
        self._layer = layer
        self._before = before
        self._after = after
        self._fewest_tokens = fewest_tokens

    def before_attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values, [T, (Hq + 2 Hk) * D]. Shapes: hidden [T, H]."""
        if len(hidden) < self._fewest_tokens:
            return self._layer.before_attention(hidden)
        return self._before(self._layer, hidden)

    def attend(
        self,
        qkv: torch.Tensor,
        by: Rotation,
        kv_cache: torch.Tensor,
        attention: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention's output, [T, Hq * D]; see `raypp.ops.backend.Attention`."""
        return self._layer.attend(qkv, by, kv_cache, attention, out)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer, [T, H]. Shapes: hidden [T, H]; attended [T, Hq * D]."""
        if self._after is None or len(hidden) < self._fewest_tokens:
            return self._layer.after_attention(hidden, attended)
        return self._after(self._layer, hidden, attended)


def compile_layers(model: DecoderModel, max_tokens: int, backend: str) -> None:
    """Run what is before and after attention of a model's layers through torch.compile, from here on.

    What that took is in `model.costs`. Steps of few tokens, whose products the model's own kernels compute, run the
    layers' own functions.

    Args:
        model: It has its weights.
        max_tokens: Of a step.
        backend: torch's name of the compiler.

    Raises:
        ConfigError: the compiler cannot; says why.
    """
    fewest_tokens = model.kernels.library_from_tokens
    if max_tokens < fewest_tokens:
        model.costs["compile"] = GraphCost()
        return
    started = time.perf_counter()
    sizes = (model.hidden_size, model.attention_size)
    hidden, attended = (torch.zeros(1, size, dtype=model.dtype, device=model.device) for size in sizes)
    dense = next((layer for layer in model.layers if not layer.has_experts), None)
    sizes_of_steps = {"fewest_tokens": fewest_tokens, "most_tokens": max_tokens}
    with torch.inference_mode():
        before = CompiledFunction(_before, model.layers[0], (hidden,), **sizes_of_steps, backend=backend)
        after = None
        if dense is not None:
            after = CompiledFunction(_after, dense, (hidden, attended), **sizes_of_steps, backend=backend)
    num_compiled = before.num_compiled + (0 if after is None else after.num_compiled)
    cost = GraphCost(num_compiled, time.perf_counter() - started)
    _LOG.info(
        "%s compiled what is before and after attention, for steps of %d to %d tokens, in %.1f s",
        backend,
        fewest_tokens,
        max_tokens,
        cost.seconds,
    )
    model.layers = [
        CompiledLayer(layer, before, None if layer.has_experts else after, fewest_tokens) for layer in model.layers
    ]
    model.costs["compile"] = cost
