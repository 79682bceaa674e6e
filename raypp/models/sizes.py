"""Computes the bytes of a model's parts from its configuration alone, for planning without building anything.

Weights are counted in the checkpoint's form; which one a device holds says `raypp.plan.engine_layout`. On a CPU linear
layers may keep more, see `raypp.ops.cpu.torch_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer, ModulesConfig
from raypp.models.config import MeasuredLayer, MeasuredLinear, ModelConfig
from raypp.models.quantization import Quantization
from raypp.ops.sample.draw_sizes import digit_bytes

STATE_BYTES = {"float32": 4, "bfloat16": 2}
_SQUARES = 4  # numbers of 16 bits that hold two of 32: of queries and keys that have one norm each
LOGIT_BYTES = 4  # whatever the model's type, see `raypp.ops.backend.KernelSet.lm_head`


@dataclass(frozen=True)
class WeightReads:
    """The bytes of weights that a step reads: of experts, those that any of its tokens chooses, evenly."""

    always: int
    experts: int = 0  # of all experts, or of a member's
    chosen: float = 1.0  # the share of a layer's experts that one token chooses
    num_experts: int = 0  # E, of all members, where these have whole ones
    num_parts: int = 1  # such members

    def of(self, num_tokens: float) -> float:
        """Return the bytes that a step of T tokens reads: of E experts, k a token, E * (1 - (1 - k / E)^T) are read.

        Where members have whole experts, those that one of them reads are about normally distributed. It counts what
        the member reads that has most to read: all wait for it.
        """
        unread = math.pow(1.0 - self.chosen, num_tokens)
        share = 1.0 - unread
        if self.num_parts > 1:
            of_others = max(0.0, 1.0 - self.chosen * self.num_experts / max(1, self.num_experts - 1))
            variance = unread * (1.0 - math.pow(of_others, num_tokens)) * self.num_parts / self.num_experts
            most = NormalDist().inv_cdf((self.num_parts - 0.375) / (self.num_parts + 0.25))  # of so many (Blom)
            share = min(1.0, share + most * math.sqrt(variance))
        return self.always + self.experts * share

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.always + self.experts


def total_reads(parts: Iterable[WeightReads]) -> WeightReads:
    """Return what several parts of one model read together."""
    listed = list(parts)
    least = min((part for part in listed if part.experts), key=lambda part: part.chosen, default=WeightReads(0))
    return replace(least, always=sum(part.always for part in listed), experts=sum(part.experts for part in listed))


@dataclass(frozen=True)
class LayerSize:
    """One layer."""

    reads: WeightReads
    num_parameters: int
    num_active: int  # parameters that one token is multiplied by
    summed: tuple[int, ...] = ()  # numbers of a token, in 16 bits, of each sum that the members of a stage make

    @property
    def weight_bytes(self) -> int:
        """Of all its weights."""
        return self.reads.total

    def flops(self, num_tokens: float) -> float:
        """Return the operations of its products for T tokens; attention itself is not counted."""
        return 2.0 * self.num_active * num_tokens


class Product(NamedTuple):
    """The weight of a linear layer, or of several that are one product."""

    module: str  # below the layer; of products that are one, the first
    rows: int
    columns: int
    is_summed: bool = False  # over the members of a stage: each has a part of the inputs

    @property
    def num_elements(self) -> int:
        """Of the whole weight."""
        return self.rows * self.columns

    @property
    def rounded_bytes(self) -> int:
        """The bytes of the weight in 8 bits, and of a scale per output."""
        return self.num_elements + 4 * self.rows


@lru_cache(maxsize=16)
def layer_sizes(config: ModelConfig, dtype_bytes: int) -> tuple[LayerSize, ...]:
    """Return the size of each layer: dense or with experts, quantized or with elements of `dtype_bytes`."""
    if config.measured is not None:
        return tuple(_measured_size(layer, config.quantization, dtype_bytes) for layer in config.measured)
    return tuple(_layer_size(config, index, dtype_bytes) for index in range(config.num_layers))


def _measured_size(layer: MeasuredLayer, form: Quantization | None, dtype_bytes: int) -> LayerSize:
    shared, of_experts, share = layer.num_parameters, layer.num_expert_parameters, layer.share_chosen
    shared_bytes = shared * dtype_bytes
    for linear in layer.linears:
        if form is not None and form.covers(linear.name):
            num_bytes = _part_bytes(form, linear, dtype_bytes)
            shared_bytes += num_bytes - linear.num_outputs * linear.num_inputs * dtype_bytes
    expert_bytes = of_experts * dtype_bytes
    if form is not None and form.is_of_experts:
        expert_bytes = sum(_part_bytes(form, each, dtype_bytes) for each in layer.experts)
    reads = WeightReads(shared_bytes, expert_bytes, share)
    summed = tuple(each.num_outputs for each in (*layer.linears, *layer.experts) if each.has_some_inputs)
    return LayerSize(reads, shared + of_experts, shared + int(of_experts * share), summed)


def _part_bytes(form: Quantization, linear: MeasuredLinear, dtype_bytes: int) -> int:
    """Return the bytes of a weight of few bits, or of a member's part: within a block it makes smaller ones."""
    num_outputs, num_inputs, (rows, columns) = linear.num_outputs, linear.num_inputs, form.block
    if not form.is_kept(num_inputs, is_part=linear.has_some_inputs, is_of_experts=linear.num_experts > 1):
        return linear.num_experts * num_outputs * num_inputs * dtype_bytes
    if linear.has_some_outputs and num_outputs % rows:
        rows = 1
    if linear.has_some_inputs:
        columns = math.gcd(columns, num_inputs) if columns else 0
    return linear.num_experts * replace(form, block=(rows, columns)).weight_bytes(num_outputs, num_inputs)


def share_of_member(config: ModelConfig) -> float:
    """Return the share of its layers' weights that a member of a stage of transformers' modules has."""
    layers = config.measured or ()
    own = sum(layer.num_parameters + layer.num_expert_parameters for layer in layers)
    products = [each for layer in layers for each in (*layer.linears, *layer.experts)]
    cut = sum(
        each.num_outputs * each.num_inputs * each.num_experts
        for each in products
        if each.has_some_outputs or each.has_some_inputs
    )
    return own / (own + (config.num_members - 1) * cut)


def linear_modules(config: ModelConfig, layer_index: int) -> list[str]:
    """Return the modules of a layer that may be quantized, below the layer's prefix: of products that are one, one."""
    return [product.module for products in layer_products(config, layer_index) for product in products]


def layer_prefix(config: ModelConfig, layer_index: int) -> str:
    """Return what the names of a layer's modules begin with, in the checkpoint."""
    return f"{config.weight_prefix}layers.{layer_index}."


def qkv_width(config: ModelConfig) -> int:
    """Return the elements of a token's queries, keys and values, in the widest layer."""
    return max(sum(attention.row_sizes) for attention in config.attention)


def decode_width(config: ModelConfig) -> int:
    """Return the same of a token that decodes: over latents queries and sums of all heads, too, in the widest layer."""
    latents = [each.num_heads * each.latent.rank for each in config.attending if each.latent is not None]
    return qkv_width(config) + max(latents, default=0)


def kv_bytes_per_token(config: ModelConfig, kv_dtype_bytes: int) -> list[int]:
    """Return the bytes of KV cache that one token takes in each layer; 0 where it has none of its own."""
    read = kv_bytes_read(config, kv_dtype_bytes)
    return [0 if config.group_of(layer) is None else num_bytes for layer, num_bytes in enumerate(read)]


def kv_bytes_read(config: ModelConfig, kv_dtype_bytes: int) -> list[int]:
    """Return the bytes of KV cache that each layer reads of a token; 0 where there is a state per row instead."""
    attention = [layer.attention for layer in config.attention]
    return [0 if each is None else each.cache.bytes_per_token(kv_dtype_bytes) for each in attention]


def state_bytes_per_row(
    config: ModelConfig, block_size: int, max_drafts: int, dtype_bytes: int, *, has_snapshots: bool
) -> list[int]:
    """Return the bytes that one row takes in each layer with a state per row; 0 in others.

    Args:
        config: The model's.
        block_size: Of the KV cache.
        max_drafts: K, of a step.
        dtype_bytes: Of an activation.
        has_snapshots: Whether rows are copied, see `raypp.ops.state_sizes.conv_entries`.
    """
    sizes = (block_size, max_drafts, dtype_bytes)

    def of_layer(layer: LayerMixer) -> int:
        if isinstance(layer, ModulesConfig):
            return sum(each.bytes_per_row(*sizes, STATE_BYTES) for each in layer.modules)
        if isinstance(layer, AttentionConfig):
            return 0
        state_bytes = max(dtype_bytes, STATE_BYTES[layer.cache.state_dtype])
        return layer.cache.bytes_per_row(*sizes, state_bytes, has_snapshots=has_snapshots)

    return list(map(of_layer, config.attention))


def mlp_width(config: ModelConfig) -> int:
    """Return the elements that a token's MLP takes at once, its input and output aside, in the widest layer.

    Of an expert: its gated product, once as it is made and once as it is read, and its output before these are summed.
    """
    if config.measured is not None:
        return 3 * max(layer.mlp_width for layer in config.measured)
    dense = 3 * config.intermediate_size
    if config.experts is None:
        return dense
    experts = config.experts
    sparse = experts.num_chosen * (2 * experts.intermediate_size + config.hidden_size)
    if experts.is_beside_mlp:  # whose output waits, beside room for that of the experts
        return max(sparse, dense) + 2 * config.hidden_size
    return max(sparse, dense) if experts.dense_layers else sparse


def embedding_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of the token embedding, and of what makes inputs of layers, which the first stage holds."""
    return (config.vocab_rows * config.hidden_size + config.layer_inputs.num_parameters) * dtype_bytes


def lm_head_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of the final norm and the LM head, which the last stage holds; also when it is tied."""
    return (config.vocab_rows + 1) * config.hidden_size * dtype_bytes


def logit_row_bytes(config: ModelConfig) -> int:
    """Return the bytes of one row's logits on a member; where there are several, of what they exchange to draw, too."""
    return config.vocab_rows * LOGIT_BYTES + digit_bytes(config.num_members)


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Return how many parameters the language model has, and how many of them one token is multiplied by."""
    sizes, ends = layer_sizes(config, 1), lm_head_bytes(config, 1)
    total = sum(size.num_parameters for size in sizes) + ends
    total += embedding_bytes(config, 1) - config.tie_word_embeddings * config.vocab_rows * config.hidden_size
    return total, sum(size.num_active for size in sizes) + ends


def _layer_size(config: ModelConfig, index: int, dtype_bytes: int) -> LayerSize:
    prefix, (shared, of_expert) = layer_prefix(config, index), layer_products(config, index)
    others = _num_other_parameters(config, index)
    shared_parameters = others + sum(product.num_elements for product in shared)
    always = others * dtype_bytes + sum(_held_bytes(config, prefix, product, dtype_bytes) for product in shared)
    summed = [product.rows for product in shared if product.is_summed] + [_SQUARES] * config.has_wide_qk_norm
    if not of_expert or config.experts is None:
        return LayerSize(WeightReads(always), shared_parameters, shared_parameters, tuple(summed))
    experts = config.experts
    expert_bytes = sum(_held_bytes(config, prefix, product, dtype_bytes) for product in of_expert)
    expert_parameters = sum(product.num_elements for product in of_expert)
    return LayerSize(
        WeightReads(
            always,
            experts.num_held * expert_bytes,
            experts.num_chosen / experts.num_experts,
            experts.num_experts,
            experts.num_parts,
        ),
        shared_parameters + experts.num_held * expert_parameters,
        shared_parameters + experts.num_chosen * expert_parameters // experts.num_parts,
        (*summed, config.hidden_size),
    )


def layer_products(config: ModelConfig, index: int) -> tuple[list[Product], list[Product]]:
    """Return the products of a layer that all tokens share, and those of one of its experts."""
    hidden, attention = config.hidden_size, config.attention[index]
    if isinstance(attention, AttentionConfig):
        queries, others, latent = attention.row_sizes[0], sum(attention.row_sizes[1:]), attention.latent
        block, inner = "self_attn.", [("q_proj", queries + others, hidden)]
        if latent is not None and (rank := latent.query_rank) is not None:
            inner = [("q_a_proj", rank + others, hidden), ("q_b_proj", queries, rank)]
    else:
        assert isinstance(attention, GatedDeltaConfig)
        mixed, gates, numbers = attention.row_sizes
        first, second = ("in_proj_qkvz", "in_proj_ba") if attention.is_joined else ("in_proj_qkv", "in_proj_b")
        block, inner = "linear_attn.", [(first, mixed + gates, hidden), (second, numbers, hidden)]
    shared = [Product(block + name, rows, columns) for name, rows, columns in inner]
    output = block + ("o_proj" if block == "self_attn." else "out_proj")
    shared.append(Product(output, hidden, attention.output_size, is_summed=True))
    experts = config.experts_of(index)
    if experts is not None and experts.shared_size:
        below = experts.names.block + experts.names.shared
        shared += _gated_mlp(below, ("gate_proj", "down_proj"), hidden, experts.shared_size)
        if experts.has_shared_gate:
            shared.append(Product(f"{experts.names.block}shared_expert_gate", 1, hidden))
    if experts is None or experts.is_beside_mlp:
        shared += _gated_mlp("mlp.", ("gate_proj", "down_proj"), hidden, config.intermediate_size)
    if experts is None:
        return shared, []
    names = experts.names
    below, is_whole, size = f"{names.block}experts.0.", experts.num_parts > 1, experts.intermediate_size
    return shared, _gated_mlp(below, (names.gate, names.down), hidden, size, is_whole=is_whole)


def _gated_mlp(
    prefix: str, names: tuple[str, str], hidden: int, intermediate: int, *, is_whole: bool = False
) -> list[Product]:
    gate, down = names
    return [
        Product(prefix + gate, 2 * intermediate, hidden),
        Product(prefix + down, hidden, intermediate, is_summed=not is_whole),
    ]


def _num_other_parameters(config: ModelConfig, index: int) -> int:
    """Return how many parameters of a layer are never kept quantized: norms, biases, routers, what latents meet."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attention = config.attention[index]
    count = (4 if config.has_output_norms else 2) * hidden
    latent = attention.latent if isinstance(attention, AttentionConfig) else None
    if isinstance(attention, AttentionConfig) and latent is not None:
        expanded = attention.num_heads * (attention.head_dim - latent.rotary_dim + attention.v_dim)
        query_rank = latent.query_rank or 0
        count += expanded * latent.rank + latent.rank + query_rank
        count += (query_rank + latent.width) * config.qkv_bias + hidden * config.attention_output_bias
    elif isinstance(attention, AttentionConfig):
        of_norms = sum(attention.row_sizes[:2]) if config.has_wide_qk_norm else 2 * attention.head_dim
        count += of_norms * config.qk_norm + attention.num_heads * attention.has_sinks
        count += sum(attention.row_sizes) * config.qkv_bias + hidden * config.attention_output_bias
    else:  # numbers per head, the norm, and the convolution
        assert isinstance(attention, GatedDeltaConfig)
        shape = attention.cache
        count += 2 * shape.num_v_heads + shape.v_dim + shape.conv_dim * shape.kernel_size
    count += config.has_layer_scalars
    experts = config.experts_of(index)
    if experts is not None and experts.is_beside_mlp:
        count += 3 * hidden
    if experts is not None:
        names = experts.names
        count += hidden * (names.router_scale is not None) + experts.num_experts * (names.expert_scales is not None)
        biases = experts.num_held * (2 * experts.intermediate_size + hidden) * experts.has_pairs
        return count + experts.num_experts * (hidden + experts.has_sigmoid + experts.has_pairs) + biases
    return count + (2 * intermediate + hidden) * config.mlp_bias


def _held_bytes(config: ModelConfig, prefix: str, product: Product, dtype_bytes: int) -> int:
    quantization, is_part = config.quantization, product.is_summed and config.num_members > 1
    if quantization is None or not quantization.covers(prefix + product.module):
        return product.num_elements * dtype_bytes
    is_of_experts = ".experts." in product.module
    if not quantization.is_kept(product.columns, is_part=is_part, is_of_experts=is_of_experts):
        return product.num_elements * dtype_bytes
    return quantization.weight_bytes(product.rows, product.columns)
