"""How a layer attends, and what it keeps of the tokens that it saw."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.models.rope_config import RopeConfig
from raypp.ops.state_sizes import ModuleState, RowState


@dataclass(frozen=True)
class PagedKV:
    """What a layer keeps of every token that a query may see: keys and values, in blocks, addressed by position.

    Of latents: one head, whose value is the latent, and whose key is the rotated part of all heads' keys.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None  # tokens that a query sees, its own included; None: all before it

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return what a token takes, with elements of `dtype_bytes`."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) * dtype_bytes


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net in the place of attention (arXiv:2412.06464): its output depends on a state, not on a cache."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel_size: int
    state_dtype: str = "float32"
    is_joined: bool = False  # whether checkpoints have its projections as two, sorted by key head (Qwen3-Next)

    @property
    def joined_rows(self) -> tuple[list[int], list[int]]:
        """Where rows of `in_proj_qkvz` and `in_proj_ba` lie: all queries, keys, values, gates; all b, all a."""
        ratio = self.num_v_heads // self.num_k_heads
        sizes = (self.k_dim, self.k_dim, ratio * self.v_dim, ratio * self.v_dim)
        return _by_kind(self.num_k_heads, sizes), _by_kind(self.num_k_heads, (ratio, ratio))

    @property
    def attention(self) -> None:
        """How the layer attends: it does not."""

    @property
    def cache(self) -> RowState:
        """What the layer keeps."""
        sizes = (self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim)
        return RowState(*sizes, self.kernel_size, self.state_dtype)

    @property
    def row_sizes(self) -> tuple[int, int, int]:
        """Elements of a token's inputs of the convolution, of its output gate, and of its two numbers per head."""
        return self.cache.conv_dim, self.output_size, 2 * self.num_v_heads

    @property
    def output_size(self) -> int:
        """Elements of a token's output."""
        return self.num_v_heads * self.v_dim


def _by_kind(num_groups: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the rows of groups, each of which has all kinds, one kind after the other."""
    begins = [sum(sizes[:kind]) for kind in range(len(sizes))]
    return [
        group * sum(sizes) + begin + row
        for begin, size in zip(begins, sizes, strict=True)
        for group in range(num_groups)
        for row in range(size)
    ]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """How keys and values of all heads are made of one latent per token (MLA, arXiv:2405.04434).

    Of a head's key some elements are a product of the latent; the others, its last, are rotated, and the same for all
    heads. Values are products of the latent.
    """

    rank: int  # elements of a latent
    rotary_dim: int  # elements of queries and keys that are rotated
    query_rank: int | None  # elements of what all queries are made of; None: they are made of the residual stream

    @property
    def width(self) -> int:
        """Elements of a token's latent and of the rotated part of its key."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a layer attends."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hk, a divisor of Hq; of latents 1
    head_dim: int  # of queries and keys
    v_dim: int  # of values
    rope: RopeConfig | None  # None: the modules that call attention rotate
    window: int | None = None  # tokens that a query sees, its own included; None: all before it
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    has_sinks: bool = False  # whether every head has a logit of its own in the softmax
    has_gate: bool = False  # whether the output is multiplied by the sigmoid of a projection of its own
    values_are_keys: bool = False  # whether values are keys before their norm and rotation: no product is theirs
    sees_ahead: bool = True  # whether tokens of an image see later ones of it, where those of the model do
    num_sharing: int = 1  # members of a stage that have the same KV heads, where there are fewer heads than members
    has_neighbours: bool = False
    """Whether pairs that are rotated lie side by side in the checkpoint; else half of what is rotated apart."""
    latent: LatentConfig | None = None  # what keys and values are made of; None: of the residual stream
    source: int | None = None  # the layer whose keys and values it attends to; None: its own

    @property
    def attention(self) -> AttentionConfig:
        """How the layer attends."""
        return self

    @property
    def cache(self) -> PagedKV:
        """What the layer keeps, or the one whose keys and values it attends to."""
        if self.latent is not None:
            return PagedKV(1, self.latent.rotary_dim, self.latent.rank, self.window)
        return PagedKV(self.num_kv_heads, self.head_dim, self.v_dim, self.window)

    @property
    def rotation(self) -> tuple[int, RopeConfig]:
        """The elements of a head that are rotated, and how."""
        assert self.rope is not None, "what calls attention rotates"
        if self.latent is not None:
            return self.latent.rotary_dim, self.rope
        return self.head_dim if self.rope.pairs_all else int(self.head_dim * self.rope.share), self.rope

    @property
    def order_of_pairs(self) -> list[int] | None:
        """Where the outputs of queries, keys and values lie in a checkpoint, None: where they are used."""
        if not self.has_neighbours or self.latent is not None:
            return None
        queries, keys, values = self.row_sizes
        turned = queries + keys
        halves = [*range(0, self.head_dim, 2), *range(1, self.head_dim, 2)]
        return [first + row for first in range(0, turned, self.head_dim) for row in halves] + [
            *range(turned, turned + values)
        ]

    @property
    def row_sizes(self) -> tuple[int, int, int]:
        """Elements of a token's queries with their gates, keys and values; or queries, rotated key and latent."""
        if self.latent is not None:
            return self.num_heads * self.head_dim, self.latent.rotary_dim, self.latent.rank
        keys, values = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_dim * (not self.values_are_keys)
        return self.num_heads * self.head_dim * (1 + self.has_gate), keys, values

    @property
    def output_size(self) -> int:
        """Elements of a token's output."""
        return self.num_heads * self.v_dim


@dataclass(frozen=True, kw_only=True)
class ModulesConfig:
    """A layer of transformers' modules some of which keep states of rows, or that keeps nothing."""

    modules: tuple[ModuleState, ...]
    attention: AttentionConfig | None  # None: no module attends

    @property
    def row_sizes(self) -> tuple[int, int, int]:
        """See `AttentionConfig.row_sizes`."""
        return (0, 0, 0) if self.attention is None else self.attention.row_sizes

    @property
    def output_size(self) -> int:
        """Elements of a token's output of attention."""
        return 0 if self.attention is None else self.attention.output_size


LayerMixer = AttentionConfig | GatedDeltaConfig | ModulesConfig
"""How a layer gathers what it needs of the tokens before."""
