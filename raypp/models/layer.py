"""The layer of all `raypp.models.families`, and its parts, of which a draft head is made, too.

    hidden -> norm -> q, k, v -> norm of heads -> rotary -> attention -> o -> + hidden -> norm -> MLP -> + hidden
    hidden -> norm -> q, latent -> ... -> o -> + hidden -> ...      see `raypp.models.latent_mixer`
    hidden -> norm -> q, k, v, gates -> convolution -> gated delta net -> gated norm -> o -> + hidden -> ...

Families differ in biases, in norms of queries and keys, and in norms of what is added to the residual stream; the
configuration says which a model has. Whether a layer attends or has a state, what its heads are, and whether its MLP
is one gated MLP or experts, is by the layer's index.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.errors import ModelLoadError
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig
from raypp.models.config import ModelConfig
from raypp.models.expert_config import ExpertConfig
from raypp.models.families import Activation
from raypp.models.latent_mixer import LatentMixer
from raypp.models.member_sizes import Member, Size, Span, part_of_experts
from raypp.models.rope_config import RopeConfig
from raypp.models.weight_formats import Index
from raypp.models.weights import WeightReader, WeightSource, read_kv_scales
from raypp.ops.attention import AttentionBatch, HeadNorm, Heads, Rotation
from raypp.ops.backend import GELU, SILU, ExpertWeights, Gate, KernelSet, Projection, Router, Routing
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import DeltaHeads, LayerState
from raypp.ops.weight import Weight

_FUSED_BLOCK = "mlp."
"""Of fused tensors, whatever the family."""
_PAIRS = "gate_up_proj"
"""The product of gates and ups that take turns."""
_CLAMPED_ALPHA = 1.702  # of gpt-oss's gate
_BLOCK_BYTES = 16  # of MXFP4: 32 inputs
_FP8_SCALE, _FUSED_SCALE = "weight_scale_inv", "_scale_inv"
"""Of an expert, and behind the name of a tensor of all of them."""
_GATES: dict[Activation, Gate] = {"silu": SILU, "gelu": GELU}
_LEAST_OUTPUTS = 16
"""Of a product: kernels are made for no fewer."""
_QUANTIZED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """What a checkpoint holds below a layer's `self_attn.`. Queries, keys and values are one product."""

    heads: Heads
    qkv: Weight  # [(Hq + 2 Hk) * D, K]; where values are keys, [(Hq + Hk) * D, K]
    qkv_bias: torch.Tensor | None
    output: Weight  # [H, Hq * D]
    output_bias: torch.Tensor | None
    norm: WideNorm | None  # of all queries, and of all keys


class WideNorm:
    """The norm of all queries of a token at once, and of all its keys (OLMo 2, MiniMax-M2).

    Members of a stage have some of the heads each, and add up the squares.

    Args:
        attention: Of the layer; one member's.
        weights: Below the attention.
        eps: Of the norm.
        kernels: Of the device, or of a member.
    """

    def __init__(self, attention: AttentionConfig, weights: WeightReader, eps: float, kernels: KernelSet) -> None:
        queries, keys, _ = attention.row_sizes
        sharing, member = attention.num_sharing, weights.member
        parts = (member.part(queries), member.part(keys, sharing))
        self._gain = weights.stacked(("q_norm.weight", "k_norm.weight"), parts).float()
        # Keys that several members have are counted as often.
        counts = torch.tensor([queries * member.count, keys * member.count], dtype=torch.float32)
        self._share = (1.0 / counts).to(weights.device)
        self._sizes = (queries, keys)
        self._eps = eps
        self._summed = kernels.summed

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return queries and keys normalized, and values as they are. Shapes: qkv [T, ...], overwritten."""
        qk = qkv[:, : sum(self._sizes)]
        wide = qk.float()
        squares = torch.stack([part.square().sum(1) for part in wide.split(self._sizes, 1)], 1)
        scales = torch.rsqrt(self._summed(squares) * self._share + self._eps)
        for part, scale in zip(wide.split(self._sizes, 1), scales.split(1, 1), strict=True):
            part.mul_(scale)
        qk.copy_(wide.mul_(self._gain))
        return qkv


def read_attention(
    config: ModelConfig, index: int, weights: WeightReader, num_inputs: int, kernels: KernelSet
) -> AttentionWeights:
    """Read the attention of layer `index`, whose projection has `num_inputs` columns K.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """
    hidden, attention = config.hidden_size, config.attention[index]
    assert isinstance(attention, AttentionConfig)
    head_dim, member, shared = attention.head_dim, weights.member, attention.num_sharing
    queries, keys, values = attention.row_sizes
    modules = ("q_proj", "k_proj", "v_proj")[: 3 - attention.values_are_keys]
    parts = (member.part(queries), *(member.part(size, shared) for size in (keys, values)[: len(modules) - 1]))
    qkv_bias = output_bias = norm = wide_norm = sinks = None
    if config.qkv_bias:
        qkv_bias = weights.stacked([f"{module}.bias" for module in modules], parts)
    if config.attention_output_bias:
        output_bias = weights.tensor("o_proj.bias", hidden)
    if config.has_wide_qk_norm:
        wide_norm = WideNorm(attention, weights, config.rms_norm_eps, kernels)
    elif config.qk_norm:
        q_norm, k_norm = (read_norm(config, weights, f"{name}_norm.weight", head_dim) for name in "qk")
        norm = HeadNorm(q_norm, k_norm, config.rms_norm_eps, config.has_value_norm)
    if attention.has_sinks:
        sinks = weights.tensor("sinks", member.part(attention.num_heads)).float()
    k_scale, v_scale = read_kv_scales(weights)
    qkv = weights.weight(modules, parts, num_inputs)
    if (order := attention.order_of_pairs) is not None:
        qkv = qkv.sorted_outputs(order)
    return AttentionWeights(
        heads=Heads(
            attention.num_heads,
            attention.num_kv_heads,
            head_dim,
            norm=norm,
            k_scale=k_scale,
            v_scale=v_scale,
            v_dim=attention.v_dim,
            scale=head_dim**-0.5 if attention.scale is None else attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            sinks=sinks,
            group=config.windows.index(attention.window),
            rotary_dim=None if attention.rope is None else attention.rotation[0],
            has_gate=attention.has_gate,
            values_are_keys=attention.values_are_keys,
            sees_ahead=attention.sees_ahead,
        ),
        qkv=qkv,
        qkv_bias=qkv_bias,
        output=weights.weight(("o_proj",), (hidden,), member.part(attention.output_size)),
        output_bias=output_bias,
        norm=wide_norm,
    )


def read_norm(config: ModelConfig, weights: WeightReader, name: str, size: int) -> torch.Tensor:
    """Return what a norm multiplies by, [size]; 1 + weight in float32, whose small parts 16 bits would lose."""
    if not config.adds_one_to_norms:
        return weights.tensor(name, size)
    return weights.tensor(name, size, dtype=torch.float32).add_(1.0)


def read_mlp_norm(config: ModelConfig, weights: WeightReader) -> torch.Tensor:
    """Return what the norm before a layer's MLP multiplies by, [H]."""
    name = "pre_feedforward_layernorm" if config.has_output_norms else "post_attention_layernorm"
    return read_norm(config, weights, f"{name}.weight", config.hidden_size)


def read_output_norm(config: ModelConfig, weights: WeightReader, name: str) -> tuple[torch.Tensor, float] | None:
    """Return the weight and the epsilon of the norm of what is added, None for models without."""
    if not config.has_output_norms:
        return None
    return read_norm(config, weights, name, config.hidden_size), config.rms_norm_eps


def read_vocabulary(config: ModelConfig, weights: WeightReader, name: str) -> torch.Tensor:
    """Return the member's rows of a matrix with a row per token, [V / members, H]; zeros behind the last token."""
    rows, vocab_size = config.vocab_rows, config.vocab_size
    begin = min(weights.member.rank * rows, vocab_size)
    span = Span(begin, min(rows, vocab_size - begin), vocab_size)
    found = weights.tensor(name, span, config.hidden_size)
    return F.pad(found, (0, 0, 0, rows - span.size)) if span.size < rows else found


def read_gated_delta(config: ModelConfig, delta: GatedDeltaConfig, weights: WeightReader) -> DeltaHeads:
    """Read what a gated delta net has between its projections.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """
    shape, heads = delta.cache, weights.member.part(delta.num_v_heads)
    conv = weights.stacked(("conv1d.weight",) * 3, _conv_parts(delta, weights.member), 1, shape.kernel_size)
    a_log, dt_bias = (weights.tensor(name, heads, dtype=torch.float32) for name in ("A_log", "dt_bias"))
    norm_weight = weights.tensor("norm.weight", shape.v_dim)
    return DeltaHeads(shape, conv.squeeze(1), a_log, dt_bias, norm_weight, config.rms_norm_eps)


def _conv_parts(delta: GatedDeltaConfig, member: Member) -> tuple[Span, Span, Span]:
    """Return which queries, keys and values a member has, of what goes into the convolution."""
    begin, parts = 0, []
    keys, values = delta.num_k_heads * delta.k_dim, delta.output_size
    total = member.count * (2 * keys + values)
    for size in (keys, keys, values):
        parts.append(Span(begin + member.rank * size, size, total))
        begin += member.count * size
    return parts[0], parts[1], parts[2]


class AttentionMixer:
    """How a layer gathers what it needs of the tokens before: attention over a KV cache.

    The arguments are those of `TransformerLayer`, and the layer's norm.
    """

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightReader, kernels: KernelSet, norm: torch.Tensor
    ) -> None:
        attention = read_attention(config, index, weights.below("self_attn."), config.hidden_size, kernels)
        projection = kernels.norm_linear(norm, config.rms_norm_eps, attention.qkv, attention.qkv_bias)
        wide = attention.norm
        self.project: Projection = projection if wide is None else lambda hidden: wide(projection(hidden))
        output_norm = read_output_norm(config, weights, "post_attention_layernorm.weight")
        self.output = kernels.add_linear(attention.output, attention.output_bias, output_norm)
        self._attention = kernels.attention(attention.heads)
        self._num_queries = attention.heads.num_heads * attention.heads.head_dim

    def attend(
        self,
        projected: torch.Tensor,
        rope: Rotation | None,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert rope is not None
        if rope.query_growth is not None:
            projected[:, : self._num_queries].mul_(rope.query_growth)
        return self._attention(projected, rope, cache, batch, out)


class GatedDeltaMixer:
    """The same by a gated delta net over a state per row. The arguments are those of `AttentionMixer`.

    Its two numbers per head are a product of their own: checkpoints of few bits keep it in 16.
    """

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightReader, kernels: KernelSet, norm: torch.Tensor
    ) -> None:
        delta, hidden, weights = config.attention[index], config.hidden_size, weights.below("linear_attn.")
        assert isinstance(delta, GatedDeltaConfig)
        mixed, gates, both = delta.row_sizes
        member, eps = weights.member, config.rms_norm_eps
        if delta.is_joined:
            orders = delta.joined_rows
            inputs = weights.weight(("in_proj_qkvz",), (member.part(mixed + gates),), hidden).sorted_outputs(orders[0])
            numbers = weights.weight(("in_proj_ba",), (member.part(both),), hidden).sorted_outputs(orders[1])
        else:
            heads = member.part(delta.num_v_heads)
            parts: tuple[Size, ...] = _conv_parts(delta, member) if member.count > 1 else (mixed,)
            modules = ("in_proj_qkv",) * len(parts) + ("in_proj_z",)
            inputs = weights.weight(modules, (*parts, member.part(gates)), hidden)
            numbers = weights.weight(("in_proj_b", "in_proj_a"), (heads, heads), hidden)
        self._inputs = kernels.norm_linear(norm, eps, inputs)
        self._numbers = kernels.norm_linear(norm, eps, numbers)
        self.output = kernels.add_linear(weights.weight(("out_proj",), (hidden,), member.part(delta.output_size)))
        self._delta = kernels.gated_delta(read_gated_delta(config, delta, weights))

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs(hidden), self._numbers(hidden)

    def attend(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation | None,
        cache: LayerState,
        batch: AttentionBatch,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._delta(projected, cache, batch, out)


class GatedMLP:
    """hidden + down(silu(gate(x)) * up(x)) with x = norm(hidden); gate and up are one product.

    Some have GELU, and a norm of what is added.

    Args:
        config: The model's.
        weights: Below the layer's prefix.
        kernels: Of the device.
        output_norm: The name of the norm of what is added, for models that have one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        kernels: KernelSet,
        output_norm: str = "post_feedforward_layernorm.weight",
    ) -> None:
        hidden, intermediate = config.hidden_size, weights.member.part(config.intermediate_size)
        norm_weight = read_mlp_norm(config, weights)
        mlp = weights.below("mlp.")
        rows = (intermediate, intermediate)
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = mlp.stacked(("gate_proj.bias", "up_proj.bias"), rows)
            down_bias = mlp.tensor("down_proj.bias", hidden)
        gate_up = mlp.weight(("gate_proj", "up_proj"), rows, hidden)
        down = mlp.weight(("down_proj",), (hidden,), intermediate)
        gate = _GATES[config.activation]
        self._gate_up = kernels.norm_gated_linear(norm_weight, config.rms_norm_eps, gate_up, gate_up_bias, gate)
        self._down = kernels.add_linear(down, down_bias, read_output_norm(config, weights, output_norm))

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H].

        Shapes: hidden, residual [T, H], may be overwritten; without a residual `hidden` is it.
        """
        return self._down(self._gate_up(hidden), hidden if residual is None else residual)


class TransformerLayer:
    """One layer; see `raypp.models.decoder.DecoderLayer`.

    Args:
        config: The model's.
        index: Which layer it is.
        weights: Below the layer's prefix.
        kernels: Of the device.
    """

    def __init__(self, config: ModelConfig, index: int, weights: WeightReader, kernels: KernelSet) -> None:
        norm = read_norm(config, weights, "input_layernorm.weight", config.hidden_size)
        mixer = config.attention[index]
        make: type[AttentionMixer | LatentMixer | GatedDeltaMixer] = GatedDeltaMixer
        if isinstance(mixer, AttentionConfig):
            make = AttentionMixer if mixer.latent is None else LatentMixer
        self._mixer = make(config, index, weights, kernels, norm)
        experts, self.output_size = config.experts_of(index), config.attention[index].output_size
        self.has_experts = experts is not None
        self.kind: Hashable = (type(self._mixer), config.attention[index].row_sizes, self.output_size, self.has_experts)
        mlp: type[GatedMLP | SparseMLP | MLPBesideExperts] = GatedMLP
        if experts is not None:
            mlp = MLPBesideExperts if experts.is_beside_mlp else SparseMLP
        self._mlp = mlp(config, weights, kernels)
        self._scalar = weights.tensor("layer_scalar", 1) if config.has_layer_scalars else None

    def before_attention(self, hidden: torch.Tensor) -> Any:
        return self._mixer.project(hidden)

    def attend(
        self,
        projected: Any,
        rope: Rotation | None,
        cache: Any,
        attention: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._mixer.attend(projected, rope, cache, attention, out)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self._mlp(self._mixer.output(attended, hidden))
        return hidden if self._scalar is None else hidden.mul_(self._scalar)


def inverse_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Return each pair's angle per position, [head_dim / 2] float32.

    `linear` divides all by the factor. `llama3` divides only the slow ones: waves that fit less than `low_freq_factor`
    times into the original context are stretched, those that fit more than `high_freq_factor` times are kept, and
    between the two it blends (Llama 3.1's release; transformers 5.17, `modeling_rope_utils.py`). `yarn` does so by the
    number of the pair, between the pairs that turn `beta_fast` and `beta_slow` times (arXiv:2309.00071, section 3.2;
    transformers likewise). `dynamic` raises the base by as much as its longest context needs, none of them slower.
    `proportional` turns the first pairs alone, as those of the whole head, divided by the factor.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / _base(head_dim, config) ** exponents
    if config.rope_type == "proportional":
        frequencies[int(config.share * head_dim // 2) :] = 0.0
        return frequencies / config.factor
    if config.rope_type in ("default", "dynamic"):
        return frequencies
    stretched = frequencies / config.factor
    if config.rope_type == "linear":
        return stretched
    if config.rope_type == "yarn":
        kept = _kept_by_yarn(head_dim, config)
        return (1.0 - kept) * stretched + kept * frequencies
    waves_in_context = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = ((waves_in_context - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * stretched + kept * frequencies


def _base(head_dim: int, config: RopeConfig) -> float:
    if config.rope_type != "dynamic" or head_dim == 2:  # the only pair of two dimensions turns as fast with any base
        return config.theta
    growth = config.factor * config.stretched_to / config.original_max_position_embeddings - (config.factor - 1.0)
    return float(config.theta * growth ** (head_dim / (head_dim - 2)))


def _kept_by_yarn(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Return how much of each pair's own frequency stays, [head_dim / 2] float32, 0..1."""

    def pair_that_turns(num_turns: float) -> float:
        turns = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1.0 - ((pairs - first) / span).clamp(0.0, 1.0)


def axis_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor | None:
    """Return each pair's angle per position in time, height and width, [3, head_dim / 2] float32; None without axes.

    Every pair turns with one axis, so two of its three numbers are 0. Interleaved M-RoPE: pairs 0, 3, 6, ... belong to
    time, and the axes take turns over as many pairs as the section of each says; what is left over is time's (Qwen3-VL,
    arXiv:2511.21631; transformers 5.17, `models/qwen3_vl`). A token whose three positions are equal turns as ever.
    """
    if config.mrope_section is None:
        return None
    frequencies = inverse_frequencies(head_dim, config)
    axis_of_pair = torch.zeros(len(frequencies), dtype=torch.int64)
    for axis in (1, 2):
        axis_of_pair[axis : 3 * config.mrope_section[axis] : 3] = axis
    return torch.where(axis_of_pair == torch.arange(3).unsqueeze(1), frequencies, 0.0)


class SparseMLP:
    """hidden + the weighted sum of the gated MLPs that a token's router chooses, all of norm(hidden).

    Some models add an MLP for all tokens, times the sigmoid of a product with one row. Checkpoints store experts one by
    one, or all in one tensor (`FusedExperts`).

    Args:
        config: The model's, which has experts.
        weights: Below the layer's prefix.
        kernels: Of the device.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, kernels: KernelSet) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        name = "pre_feedforward_layernorm_2.weight"
        norm_weight = (
            read_norm(config, weights, name, hidden) if experts.is_beside_mlp else read_mlp_norm(config, weights)
        )
        names, own = experts.names, part_of_experts(experts, weights.member)
        size = weights.member.part(experts.intermediate_size, experts.num_parts)
        is_renamed = names.block != _FUSED_BLOCK and weights.has(f"{_FUSED_BLOCK}gate.weight")
        block = weights.below(_FUSED_BLOCK if is_renamed else names.block)
        router = _read_router(experts, block, hidden)
        if block.has("experts.gate_up_proj") or block.has("experts.gate_up_proj_blocks"):
            block = block.of(FusedExperts(block.source, block.prefix + "experts.", experts, size.total, hidden))
        if experts.has_pairs:
            products = _read_pairs(experts, block, own, size, hidden)
        else:
            gate_up = block.expert_weight("experts.{}.", own, (names.gate, names.up), (size, size), hidden)
            down = block.expert_weight("experts.{}.", own, (names.down,), (hidden,), size)
            products = ExpertWeights(gate_up, down, gate=_GATES[config.activation])
        products = replace(products, first=own.start, num_others=own.total - own.size)
        self._experts = kernels.experts(norm_weight, config.rms_norm_eps, router, products)
        self._shared: SharedMLP | None = None
        if experts.shared_size:
            self._shared = SharedMLP(config, experts, block, kernels, norm_weight)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H].

        Shapes: hidden, residual [T, H], may be overwritten; without a residual `hidden` is it.
        """
        if self._shared is None:
            return self._experts(hidden, residual)
        inner = self._shared.inner(hidden)
        return self._shared.add(inner, self._experts(hidden, residual))


class MLPBesideExperts:
    """hidden + norm(norm(MLP(hidden)) + norm(experts(hidden))): each has norms of its own (Gemma 4).

    The arguments are those of `SparseMLP`.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, kernels: KernelSet) -> None:
        self._mlp = GatedMLP(config, weights, kernels, "post_feedforward_layernorm_1.weight")
        self._experts = SparseMLP(config, weights, kernels)
        names = ("post_feedforward_layernorm_2.weight", "post_feedforward_layernorm.weight")
        norms = [read_norm(config, weights, name, config.hidden_size) for name in names]
        self._norm_of_experts, self._norm = (kernels.norm(norm, config.rms_norm_eps) for norm in norms)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after both, [T, H]. Shapes: hidden [T, H]."""
        added = self._mlp(hidden, torch.zeros_like(hidden))
        added = added.add_(self._norm_of_experts(self._experts(hidden, torch.zeros_like(hidden))))
        return hidden + self._norm(added)


def _read_router(experts: ExpertConfig, block: WeightReader, hidden_size: int) -> Router:
    """Read what chooses experts, below a layer's MLP."""
    names, num_experts, bias, correction, norm_weight, scales = experts.names, experts.num_experts, *(None,) * 4
    name = names.router
    if any(block.has(f"{name}.{tensor}") for tensor in _QUANTIZED):
        weight = block.weight((name,), (num_experts,), hidden_size).dequantized(block.dtype)
    else:
        weight = block.tensor(f"{name}.weight", num_experts, hidden_size)
    if experts.has_pairs:
        bias = block.tensor(f"{name}.bias", num_experts)
    if experts.has_sigmoid:
        correction = block.tensor(names.correction, num_experts, dtype=torch.float32)
    if names.router_scale is not None:
        norm_weight = block.tensor(names.router_scale, hidden_size, dtype=torch.float32).mul_(hidden_size**-0.5)
    if names.expert_scales is not None:
        scales = block.tensor(names.expert_scales, num_experts, dtype=torch.float32)
    routing = Routing(
        experts.num_chosen,
        experts.normalizes,
        experts.are_chosen_evenly,
        has_sigmoid=experts.has_sigmoid,
        num_groups=experts.num_groups,
        num_chosen_groups=experts.num_chosen_groups,
        num_ranking=experts.num_ranking,
        scaling=experts.scaling,
    )
    return Router(weight, routing, bias, correction, norm_weight, scales)


def _read_pairs(experts: ExpertConfig, block: WeightReader, own: Span, size: Span, hidden_size: int) -> ExpertWeights:
    """Read experts with biases whose gate and up take turns; the member has its `own` of E, and `size` of I."""
    name = experts.names.down
    pairs = Span(2 * size.start, 2 * size.size, 2 * size.total)
    order = [*range(0, pairs.size, 2), *range(1, pairs.size, 2)]
    gate_up = block.expert_weight("experts.{}.", own, (_PAIRS,), (pairs,), hidden_size)
    down = block.expert_weight("experts.{}.", own, (name,), (hidden_size,), size)
    gate_up_bias = block.tensor(f"experts.{_PAIRS}_bias", own, pairs)
    down_bias = block.tensor(f"experts.{name}_bias", own, hidden_size)
    gate = Gate(_CLAMPED_ALPHA, experts.gate_limit, offset=1.0)
    return ExpertWeights(gate_up.sorted_outputs(order), down, gate_up_bias[:, order], down_bias, gate)


class SharedMLP:
    """down(s silu(gate(x)) up(x)) with x = norm(hidden): for all tokens alike.

    s is the sigmoid of one more product, or 1.

    Args:
        config: The model's.
        experts: Its experts.
        weights: Below the layer's MLP.
        kernels: Of the device.
        norm: Of the layer's MLP.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertConfig, weights: WeightReader, kernels: KernelSet, norm: torch.Tensor
    ) -> None:
        hidden, eps, mlp = config.hidden_size, config.rms_norm_eps, weights.below(experts.names.shared)
        part = weights.member.part(experts.shared_size)
        gate_up = mlp.weight(("gate_proj", "up_proj"), (part, part), hidden)
        self._gate_up = kernels.norm_gated_linear(norm, eps, gate_up)
        self._share: Projection | None = None
        if experts.has_shared_gate:
            gate = weights.weight(("shared_expert_gate",), (1,), hidden).dequantized(weights.dtype)
            rows = torch.cat((gate, gate.new_zeros(_LEAST_OUTPUTS - 1, hidden)))
            self._share = kernels.norm_linear(norm, eps, Weight(rows))
        self.add = kernels.add_linear(mlp.weight(("down_proj",), (hidden,), part))
        """(inner, residual) -> residual + what the MLP gives."""

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the last product takes, [T, size]. Shapes: hidden [T, H]."""
        inner = self._gate_up(hidden)
        if self._share is None:
            return inner
        share = torch.sigmoid(self._share(hidden)[:, :1])
        if inner.dtype == share.dtype:
            return inner.mul_(share)
        return inner.to(share.dtype).mul_(share).to(inner.dtype)  # what a product in 8 bits takes


class FusedExperts:
    """Gives tensors of one expert's layers by name, out of those of all. See `raypp.models.weights.WeightSource`.

        by expert    mlp.experts.{e}.gate_proj.weight [I, H], up_proj.weight [I, H], down_proj.weight [H, I]
        fused        mlp.experts.gate_up_proj [E, 2 I, H], mlp.experts.down_proj [E, H, I]
        turned       mlp.experts.gate_up_proj [E, H, 2 I], mlp.experts.down_proj [E, I, H]
        MXFP4        mlp.experts.gate_up_proj_blocks [E, 2 I, H / 32, 16], .._scales [E, 2 I, H / 32], and so on
        FP8          fused, and mlp.experts.gate_up_proj_scale_inv [E, 1, 1], or [E, 2 I / rows, H / columns] by block

    E experts of I dimensions. The published Qwen3-VL-MoE is turned; transformers 5 writes it fused, the others by
    expert. gpt-oss is turned in 16 bits, and its first tensor is one product. Mistral Small 4 is in FP8.

    Args:
        source: Has the fused tensors.
        prefix: Before their names, up to `experts.`.
        experts: The model's.
        size: I, whole.
        hidden_size: H.
    """

    def __init__(self, source: WeightSource, prefix: str, experts: ExpertConfig, size: int, hidden_size: int) -> None:
        self._source = source
        self._prefix = prefix
        names = experts.names
        self._parts = {
            names.gate: ("gate_up_proj", slice(0, size)),
            names.up: ("gate_up_proj", slice(size, 2 * size)),
            _PAIRS: ("gate_up_proj", slice(0, 2 * size)),
            names.down: ("down_proj", slice(0, hidden_size)),
        }
        shapes = {
            "gate_up_proj": (experts.num_experts, 2 * size, hidden_size),
            "down_proj": (experts.num_experts, hidden_size, size),
        }
        has_blocks = source.shape_of(prefix + "gate_up_proj_blocks") is not None
        self._endings = {"weight_packed": "_blocks", "weight_scale": "_scales"} if has_blocks else {"weight": ""}
        # One of the two may be square, never both.
        self._has_inputs_first = all(source.shape_of(prefix + name) == _turned(shape) for name, shape in shapes.items())
        self._shapes = {name: _turned(shape) if self._has_inputs_first else shape for name, shape in shapes.items()}
        if not self._has_inputs_first and source.shape_of(f"{prefix}gate_up_proj{_FUSED_SCALE}") is not None:
            self._endings[_FP8_SCALE] = _FUSED_SCALE

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Index | None = None) -> torch.Tensor:
        """Return a tensor of one expert, or any other of the source.

        Raises:
            ModelLoadError: the fused tensor is missing, has the wrong shape or type, or cannot be read.
        """
        expert, module, kind = self._split(name)
        if expert is None:
            return self._source.get(name, shape, dtype, where)
        if kind not in self._endings:
            raise ModelLoadError(
                f"there is no tensor {name} for quantized experts",
                got=f"experts in one tensor, {self._prefix}gate_up_proj{next(iter(self._endings.values()))}",
                expected="experts in one tensor only in 16 or 32 bits, in MXFP4, or in FP8",
                hint="use a checkpoint that stores each expert by itself, or leave them out of quantization_config",
            )
        fused, rows = self._parts[module]
        outputs, inputs = (slice(None), slice(None)) if where is None else where
        assert isinstance(outputs, slice)
        if kind == _FP8_SCALE:
            num_parts = self._parts_of_scale(fused, rows)
            first = shape[0] * (rows.start // (rows.stop - rows.start)) if num_parts > 1 else 0
            begin, end, _ = outputs.indices(shape[0])
            place: Index = (expert, slice(first + begin, first + end), inputs)
            whole: tuple[int, ...] = (self._shapes[fused][0], num_parts * shape[0], shape[1])
            return self._source.get(self._prefix + fused + _FUSED_SCALE, whole, dtype, place)
        begin, end, _ = outputs.indices(rows.stop - rows.start)
        outputs, stored = slice(rows.start + begin, rows.start + end), self._prefix + fused + self._endings[kind]
        num_experts, *sizes = self._shapes[fused]
        if kind != "weight":  # blocks of 16 bytes, and their scales
            in_block = (_BLOCK_BYTES,) if kind == "weight_packed" else ()
            assert isinstance(inputs, slice)
            first, last, _ = inputs.indices(shape[1])
            blocks = Span(first, last - first, shape[1]).by(math.prod(in_block))
            whole = (num_experts, sizes[0], blocks.total, *in_block)
            return self._source.get(stored, whole, dtype, (expert, outputs, blocks.slice)).flatten(1)
        place = (expert, *((inputs, outputs) if self._has_inputs_first else (outputs, inputs)))
        part = self._source.get(stored, self._shapes[fused], dtype, place)
        return (part.t() if self._has_inputs_first else part).contiguous()

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a stored tensor; of single experts, there are scales in FP8 alone."""
        expert, module, kind = self._split(name)
        if expert is None or kind != _FP8_SCALE or kind not in self._endings:
            return self._source.shape_of(name)
        fused, rows = self._parts[module]
        stored = self._source.shape_of(self._prefix + fused + _FUSED_SCALE) or (0, 0, 0)
        return stored[1] // self._parts_of_scale(fused, rows), *stored[2:]

    def _split(self, name: str) -> tuple[int | None, str, str]:
        """Return the number of an expert, its linear layer, and which of its tensors a name is of; None: of none."""
        expert, _, layer = name.removeprefix(self._prefix).partition(".")
        module, _, kind = layer.rpartition(".")
        return int(expert) if name.startswith(self._prefix) and expert.isdecimal() else None, module, kind

    def _parts_of_scale(self, fused: str, rows: slice) -> int:
        """Return of how many linear layers a tensor has scales, one after the other; 1: of all together."""
        stored = self._source.shape_of(self._prefix + fused + _FUSED_SCALE)
        if stored is None or stored[1:] == (1, 1):
            return 1
        return int(self._shapes[fused][1] // (rows.stop - rows.start))

    def type_of(self, name: str) -> torch.dtype | None:
        return self._source.type_of(name)

    def unread(self) -> Collection[str]:
        return self._source.unread()


def _turned(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[0], shape[2], shape[1]
