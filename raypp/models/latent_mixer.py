"""Attention of layers whose keys and values are made of one latent per token (MLA: DeepSeek, arXiv:2405.04434).

    hidden -> norm -> q_a -> norm -> q_b    queries of all heads        q_a and kv_a are one product
                   -> kv_a                  latent, rotated key         of all heads alike: every member has them
    queries, latents -> norm of latents, rotary, attention over a cache of latents -> o -> + hidden

Where queries are made of the residual stream itself, they are one product with `kv_a`.
"""

from __future__ import annotations

import torch

from raypp.models.attention_config import AttentionConfig
from raypp.models.config import ModelConfig
from raypp.models.weights import WeightReader, read_kv_scales
from raypp.ops.attention import AttentionBatch, Heads, LatentHeads, Rotation
from raypp.ops.backend import KernelSet, Projection
from raypp.ops.kv_cache import LayerCache

_KV = "kv_a_proj_with_mqa"
_EPS = 1e-6  # of the norms of latents, whatever `rms_norm_eps` says (transformers 5.17, `models/deepseek_v3`)


class LatentMixer:
    """How a layer gathers what it needs of the tokens before: see `raypp.models.layer.AttentionMixer`.

    The arguments are those of `raypp.models.layer.TransformerLayer`, and the layer's norm.
    """

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightReader, kernels: KernelSet, norm: torch.Tensor
    ) -> None:
        attention, hidden, eps = config.attention[index], config.hidden_size, config.rms_norm_eps
        assert isinstance(attention, AttentionConfig)
        assert attention.latent is not None
        latent, weights = attention.latent, weights.below("self_attn.")
        member = weights.member
        queries, bias = member.part(attention.row_sizes[0]), None
        first, name = (queries, "q_proj") if latent.query_rank is None else (latent.query_rank, "q_a_proj")
        if config.qkv_bias:
            num_queries = queries.size if latent.query_rank is None else latent.query_rank
            bias = torch.zeros(num_queries + latent.width, dtype=weights.dtype, device=weights.device)
            bias[num_queries:] = weights.tensor(f"{_KV}.bias", latent.width)
            if latent.query_rank is not None:
                bias[:num_queries] = weights.tensor(f"{name}.bias", num_queries)
        inputs = weights.weight((name, _KV), (first, latent.width), hidden)
        self._inputs = kernels.norm_linear(norm, eps, inputs, bias)
        self._queries: Projection | None = None
        if latent.query_rank is not None:
            q_norm = weights.tensor("q_a_layernorm.weight", latent.query_rank)
            q_weight = weights.weight(("q_b_proj",), (queries,), latent.query_rank)
            self._queries = kernels.norm_linear(q_norm, _EPS, q_weight)
        self._latent_width = latent.width
        output_bias = weights.tensor("o_proj.bias", hidden) if config.attention_output_bias else None
        output = weights.weight(("o_proj",), (hidden,), member.part(attention.output_size))
        self.output = kernels.add_linear(output, output_bias)
        self.attention = kernels.latent_attention(_read_heads(config, attention, weights))

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, latents = self.split(self._inputs(hidden))
        return queries if self._queries is None else self._queries(queries.contiguous()), latents

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is before the latents, and these."""
        queries, latents = joined.split((joined.shape[1] - self._latent_width, self._latent_width), 1)
        return queries, latents

    def attend(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation | None,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert rope is not None
        if rope.query_growth is not None:
            projected[0].mul_(rope.query_growth)
        return self.attention(projected, rope, cache, batch, out)


class LatentDrafter:
    """Such a layer of a head that drafts, whose queries and latents are one tensor: see `raypp.models.draft_head`."""

    def __init__(self, mixer: LatentMixer) -> None:
        self._mixer = mixer

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries and latents, [T, Hq * (N + R) + L + R]."""
        return torch.cat(self._mixer.project(x), 1)

    def __call__(self, joined: torch.Tensor, rope: Rotation, cache: LayerCache, batch: AttentionBatch) -> torch.Tensor:
        return self._mixer.attend(self._mixer.split(joined), rope, cache, batch, None)

    def append(self, joined: torch.Tensor, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """See `raypp.ops.backend.LatentAttention.append`."""
        self._mixer.attention.append(self._mixer.split(joined), rope, cache, slot_mapping)


def _read_heads(config: ModelConfig, attention: AttentionConfig, weights: WeightReader) -> LatentHeads:
    """Read what is between the projections of a layer, below its `self_attn.`.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """
    latent, num_heads = attention.latent, attention.num_heads
    assert latent is not None
    key_dim = attention.head_dim - latent.rotary_dim
    rows = weights.member.part(num_heads * (key_dim + attention.v_dim))
    expand = weights.weight(("kv_b_proj",), (rows,), latent.rank).dequantized(weights.dtype)
    scale, _ = read_kv_scales(weights)
    return LatentHeads(
        heads=Heads(
            num_heads,
            1,
            latent.width,
            k_scale=scale,
            v_scale=scale,
            v_dim=latent.rank,
            scale=attention.head_dim**-0.5 if attention.scale is None else attention.scale,
            window=attention.window,
            group=config.windows.index(attention.window),
            rotary_dim=latent.rotary_dim,
            has_latents=True,
        ),
        expand=expand.view(num_heads, key_dim + attention.v_dim, latent.rank),
        value_dim=attention.v_dim,
        norm_weight=weights.tensor("kv_a_layernorm.weight", latent.rank),
        eps=_EPS,
        has_neighbours=attention.has_neighbours,
    )
