"""The heads of a layer, and a step's decode and prefill rows as attention over the paged KV cache sees them.

A step's tokens lie in one dimension, decode rows first. All decode rows have the same number of query tokens, 1 + K;
prefill rows have any. Queries attend causally to their row's cache, this step's tokens included.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from raypp.ops.row_state import RowSpans


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """The norm of each query and key head before it is rotated (Qwen3)."""

    q_weight: torch.Tensor  # [D]
    k_weight: torch.Tensor  # [D]
    eps: float
    has_values: bool = False
    """Whether value heads are normalized, too, without a weight (Gemma 4)."""


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of a layer: how its projection is cut, and what happens to them before attention."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hk, a divisor of Hq
    head_dim: int  # D or Dk, of queries and keys
    norm: HeadNorm | None = None
    k_scale: float = 1.0
    """What keys are divided by before a cache in 8 bits holds them; a cache of more bits holds them as they are."""
    v_scale: float = 1.0
    """The same of values."""

    v_dim: int | None = None
    """Dv, of values; None: `head_dim`."""
    scale: float = 0.0
    """The factor of the scores; 0: head_dim ** -0.5."""
    window: int | None = None
    """A query at position p attends to positions (p - window, p]; None: to all up to p."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap), after the factor, before the mask."""
    sinks: torch.Tensor | None = None
    """[Hq] float32: one more score per head in the softmax, without a value (gpt-oss)."""
    group: int = 0
    """Which of a step's block tables and slot mappings the layer uses."""
    rotary_dim: int | None = None
    """Leading elements of queries and keys that are rotated; None: `head_dim`."""
    has_gate: bool = False
    """Whether each query head is followed by as many elements, whose sigmoid the head's output is multiplied by."""
    values_are_keys: bool = False
    """Whether values are keys before their norm and rotation; then there is no projection of values."""
    sees_ahead: bool = True
    """Whether queries of a batch's `prefill_spans` see each other, later ones, too."""
    has_latents: bool = False
    """Whether the key of the one KV head is its value, and behind it what the cache has as key: see `LatentHeads`."""

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", float(self.head_dim**-0.5))

    @cached_property
    def is_plain(self) -> bool:
        """Whether all of a head is rotated, and none has a gate."""
        return not self.has_gate and self.rotary_dim in (None, self.head_dim)

    @cached_property
    def value_dim(self) -> int:
        """Dv."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @cached_property
    def width(self) -> int:
        """Elements of a token's projection."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = 0 if self.values_are_keys else self.num_kv_heads * self.value_dim
        return queries * (1 + self.has_gate) + keys + values

    @cached_property
    def kind(self) -> HeadsKind:
        """All that the plan of a step depends on: layers of one kind share it."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        has_sinks = self.sinks is not None
        of_scores = self.scale, self.window, self.soft_cap, has_sinks
        return HeadsKind(*sizes, *of_scores, self.group, self.has_latents, self.sees_ahead)


class HeadsKind(NamedTuple):
    """Heads without what differs from layer to layer of one kind: norms, scales of 8 bits, values of sinks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    group: int
    has_latents: bool
    sees_ahead: bool


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """Heads whose keys and values are products of one latent per token: L elements, R more of a key are rotated.

    A head's key is `expand[:N]` latent, then the rotated part; its value is the rest of `expand`, times the latent. So
    a score is the product of the latent with the head's query times `expand[:N]`, and what the weights sum may be
    latents: attention sees one KV head of L + R, and the cache holds no more (arXiv:2405.04434, section 2.1).
    """

    heads: Heads  # as attention sees them: one KV head, D = L + R, Dv = L
    expand: torch.Tensor  # [Hq, N + Dv, L]
    value_dim: int  # Dv, of a head's output
    norm_weight: torch.Tensor  # [L]: latents are normalized before they are kept
    eps: float
    has_neighbours: bool = True
    """Whether elements 2 i and 2 i + 1 of what is rotated are a pair; else i and i + R / 2."""

    @property
    def key_dim(self) -> int:
        """N, of a query and a key what is not rotated."""
        return self.expand.shape[1] - self.value_dim

    @property
    def rank(self) -> int:
        """L."""
        return self.heads.value_dim

    @property
    def rotary_dim(self) -> int:
        """R."""
        return self.heads.head_dim - self.heads.value_dim


Span = tuple[int, int]
"""Begin and end, excluded, of queries of a row, counted from the first that the step computes."""


@dataclass(eq=False, slots=True)
class AttentionBatch:
    """A step as attention sees it; the same for all layers. R rows, T tokens, G groups of layers with own blocks.

    Tensors are exact, and on the device. Integers are what the host knows when it plans: upper bounds where a row's
    length depends on steps still in flight.
    """

    num_decode_rows: int
    decode_query_len: int  # 1 + K
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: Sequence[torch.Tensor]
    """[R, blocks] int32 by group. An entry is for positions [i * block_size, (i + 1) * block_size). In a windowed
    group, entries wholly before what the row's first query sees are stale: they may name blocks of other rows."""
    slot_mappings: Sequence[torch.Tensor]  # [T] int64 by group
    prefill_query_lens: list[int]
    prefill_seq_lens: list[int]
    prefill_spans: Sequence[Sequence[Span]] | None = None
    """By prefill row, ascending: queries that see each other, later ones too, as far as a window reaches back: tokens
    of one image, in some layers of some models. None: no row has any."""
    plans: dict[Hashable, object] = field(default_factory=dict)
    """What the kernel set prepared, by kind of heads; see `raypp.ops.backend.KernelSet.plan_attention`."""
    spans: RowSpans | None = None
    """What layers with a state per row compute; None: no layer has one."""
    padded_out: Mapping[int, torch.Tensor] | None = None
    """[P, width] by width Hq * Dv, for a step that is padded to P tokens: where a layer's attention writes its T rows.
    Padding lies behind the step's tokens, belongs to no row, and `slot_mappings` [P] send it to the null block."""

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.num_decode_rows * self.decode_query_len + sum(self.prefill_query_lens)

    def adopt(self, step: AttentionBatch) -> None:
        """Take over that step's fields, all but `slot_mappings` and `padded_out`, whose addresses stay."""
        self.num_decode_rows = step.num_decode_rows
        self.decode_query_len = step.decode_query_len
        self.seq_lens = step.seq_lens
        self.block_tables = step.block_tables
        self.prefill_query_lens = step.prefill_query_lens
        self.prefill_seq_lens = step.prefill_seq_lens
        self.prefill_spans = step.prefill_spans
        self.plans = step.plans
        self.spans = step.spans


class Rotation(NamedTuple):
    """Cosines and sines of a step's tokens. T tokens, D head_dim.

    Of `rotation`: cos [T, 1, 1, D / 2]; sin [T, 1, 2, D / 2], minus the sine for the first half of a head, the sine for
    the second. Kernels have shapes of their own, see `raypp.ops.cuda.heads`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_growth: torch.Tensor | None = None
    """[T, 1] float32: what queries are multiplied by besides; None: nothing. See `query_growth`."""


def query_growth(positions: torch.Tensor, rate: float, context: int) -> torch.Tensor:
    """Return 1 + rate * log(1 + contexts before a token), [T, 1] float32: later queries attend more sharply (Llama 4).

    Shapes: positions [T] int64.
    """
    num_before = torch.div(positions, context, rounding_mode="floor").to(torch.float32)
    return num_before.log1p_().mul_(rate).add_(1.0).unsqueeze(1)


def rotary_angles(positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Return each token's angles, float32 [T, D / 2].

    Shapes: positions [T] int64 and inverse_frequencies [D / 2] float32; or, for positions along A axes, [T, A] and
    [A, D / 2], whose angles are added up.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    return angles if positions.ndim == 1 else angles.sum(1)


def rotation(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Rotation:
    """Return the rotation of tokens at `positions` by `inverse_frequencies`, see `rotary_angles`.

    Angles, sines and cosines are float32 whatever `dtype` says of the result. These are multiplied by `scale`, as some
    stretched embeddings have it: queries and keys grow, and attention is sharper.
    """
    angles = rotary_angles(positions, inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return signed(cos, sin, dtype)


def signed(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Return cosines and sines as `apply_rotary` has them. Shapes: [T, D / 2] each."""
    signed_sin = torch.stack((-sin, sin), 1).unsqueeze(1)
    return Rotation(cos.to(dtype).view(len(cos), 1, 1, -1), signed_sin.to(dtype))


def apply_rotary(heads: torch.Tensor, rope: Rotation) -> torch.Tensor:
    """Return the heads rotated. Shapes: heads [T, any number, D]; so queries and keys are one call."""
    halves = heads.unflatten(2, (2, -1))
    # (a, b) -> (a cos - b sin, b cos + a sin), as one product and one fused addition over both halves.
    return torch.addcmul(halves * rope.cos, halves.flip(-2), rope.sin).view(heads.shape)
