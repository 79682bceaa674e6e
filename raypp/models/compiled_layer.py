"""A layer's pure functions, before and after attention, as torch.compile makes them: one for all layers of a stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from raypp.graphs.compiled import CompiledFunction
from raypp.graphs.cost import RecordingCost
from raypp.models.decoder import DecoderLayer
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
        self, layer: DecoderLayer, before: CompiledFunction, after: CompiledFunction, fewest_tokens: int
    ) -> None:
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
        if len(hidden) < self._fewest_tokens:
            return self._layer.after_attention(hidden, attended)
        return self._after(self._layer, hidden, attended)


def compile_layers(
    layers: Sequence[DecoderLayer],
    *,
    hidden: torch.Tensor,
    attended: torch.Tensor,
    fewest_tokens: int,
    most_tokens: int,
    backend: str,
) -> tuple[list[DecoderLayer], RecordingCost]:
    """Return layers that run compiled functions, and what compiling took.

    Shapes: hidden [1, H], attended [1, Hq * D], like those of a step.

    Args:
        layers: At least one; all of one class and shape.
        hidden: A residual stream.
        attended: An output of attention.
        fewest_tokens: Steps of fewer tokens run the layers' own functions.
        most_tokens: Of a step.
        backend: torch's name of the compiler.

    Raises:
        ConfigError: the compiler cannot.
    """
    if most_tokens < fewest_tokens:
        return list(layers), RecordingCost()
    started, functions = time.perf_counter(), []
    with torch.inference_mode():
        for function, like in ((_before, (hidden,)), (_after, (hidden, attended))):
            functions.append(
                CompiledFunction(
                    function,
                    layers[0],
                    like,
                    fewest_tokens=fewest_tokens,
                    most_tokens=most_tokens,
                    backend=backend,
                )
            )
    before, after = functions
    cost = RecordingCost(sum(function.num_compiled for function in functions), time.perf_counter() - started)
    _LOG.info(
        "%s compiled what is before and after attention, for steps of %d to %d tokens, in %.1f s",
        backend,
        fewest_tokens,
        most_tokens,
        cost.seconds,
    )
    return [CompiledLayer(layer, before, after, fewest_tokens) for layer in layers], cost
