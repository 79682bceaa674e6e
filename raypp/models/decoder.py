"""What the families share: one stage's part of a decoder-only transformer.

    first stage: embedding     every stage: layers [start_layer, end_layer)     last stage: final norm, LM head

Between layers, as between stages, one tensor travels: the residual stream. A family brings its layer class, no more.
The objects are plain, not `torch.nn.Module`s: nothing is trained, and each of a layer's eight calls would take 1.8 us
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.models.config import ModelConfig
from raypp.models.rope import inverse_frequencies
from raypp.models.sizes import embedding_bytes, layer_weight_bytes, lm_head_bytes
from raypp.models.weights import WeightReader, WeightSource
from raypp.ops.attention import AttentionBatch, paged_attention
from raypp.ops.linear import Linear
from raypp.ops.norm import RMSNorm
from raypp.ops.rotary import Rotation, rotation

_EMBEDDING = "model.embed_tokens.weight"


class DecoderLayer(Protocol):
    """One layer of a family. What lies before and after attention are pure functions, so that graphs can hold them."""

    def __init__(self, config: ModelConfig, weights: WeightReader) -> None:
        """Read the layer's weights, from below its own prefix."""

    def before_attention(self, hidden: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, Hq, D], k [T, Hk, D], v [T, Hk, D] of the residual stream [T, H]."""

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer, [T, H]. Shapes: hidden [T, H]; attended [T, Hq, D]."""


class DecoderModel:
    """The layers [start_layer, end_layer) of a model; with the embedding if they are the first, the head if the last.

    It computes once `load_weights` has been called.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_class: type[DecoderLayer],
        *,
        start_layer: int,
        end_layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert 0 <= start_layer < end_layer <= config.num_layers
        self.hidden_size = config.hidden_size
        self.is_first = start_layer == 0
        self.is_last = end_layer == config.num_layers
        self._config = config
        self._layer_class = layer_class
        self._layer_indices = range(start_layer, end_layer)
        self._dtype = dtype
        self._device = device
        self._scale = config.head_dim**-0.5
        self._inverse_frequencies = inverse_frequencies(config.head_dim, config.rope).to(device)
        self._layers: list[DecoderLayer] = []
        self._embedding: torch.Tensor | None = None
        self._final_norm: RMSNorm | None = None
        self._lm_head: Linear | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights, tied ones counted once."""
        config, size = self._config, self._dtype.itemsize
        total = len(self._layer_indices) * layer_weight_bytes(config, size)
        if self.is_first:
            total += embedding_bytes(config, size)
        if self.is_last:
            total += lm_head_bytes(config, size)
            if self.is_first and config.tie_word_embeddings:
                total -= embedding_bytes(config, size)
        return total

    def load_weights(self, source: WeightSource) -> None:
        """Read this stage's tensors, and no others.

        Raises:
            ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
        """
        config = self._config
        weights = WeightReader(source, self._dtype, self._device)
        if self.is_first:
            self._embedding = weights.tensor(_EMBEDDING, config.vocab_size, config.hidden_size)
        self._layers = [
            self._layer_class(config, weights.below(f"model.layers.{index}.")) for index in self._layer_indices
        ]
        if self.is_last:
            self._final_norm = RMSNorm(weights.tensor("model.norm.weight", config.hidden_size), config.rms_norm_eps)
            self._lm_head = Linear(self._lm_head_weight(weights))

    def _lm_head_weight(self, weights: WeightReader) -> torch.Tensor:
        config = self._config
        if config.tie_word_embeddings and self._embedding is not None:
            return self._embedding
        name = _EMBEDDING if config.tie_word_embeddings else "lm_head.weight"
        return weights.tensor(name, config.vocab_size, config.hidden_size)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, [T, H]. First stage only. Shapes: input_ids [T] int32 or int64."""
        assert self._embedding is not None, "not the first stage, or no weights yet"
        return F.embedding(input_ids, self._embedding)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the residual stream after the stage's layers, [T, H]; write their KV caches.

        Shapes: hidden [T, H], left as it is; positions [T] int64; kv_caches one per layer, see `raypp.ops.kv_cache`.
        """
        by = rotation(positions, self._inverse_frequencies, self._dtype)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            q, k, v = layer.before_attention(hidden, by)
            attended = paged_attention(q, k, v, kv_cache, attention, self._scale)
            hidden = layer.after_attention(hidden, attended)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [N, V], of the model's type. Last stage only. Shapes: hidden [N, H]."""
        norm, lm_head = self._final_norm, self._lm_head
        assert norm is not None, "not the last stage, or no weights yet"
        assert lm_head is not None
        return lm_head(norm(hidden))
