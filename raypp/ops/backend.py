"""Protocols of the operations that layers and LM heads are made of, and of the kernel sets that make them.

A layer is five operations, and the LM head one. Each is made once, with its weights, and takes the fastest way for the
rows it is given.

    hidden -> norm_linear -> attention -> add_linear -> norm_gated_linear -> add_linear -> hidden -> lm_head -> logits
              q, k, v        rotary,      + hidden      silu(gate) * up      + hidden                           float32
                             cache

Two sets exist: that of `raypp.ops.cpu.torch_kernels` runs everywhere, and is the CPU's; that of
`raypp.ops.cuda.cuda_kernels` uses Triton and FlashInfer. `raypp.ops.device_kernels` chooses one at start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.members import Members
from raypp.ops.attention import AttentionBatch, Heads, LatentHeads, Rotation
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import DeltaHeads, LayerState
from raypp.ops.weight import Weight


class Projection(Protocol):
    """A product with a weight, with what is computed before and after it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: x [T, K] contiguous."""


class AddedProjection(Protocol):
    """A product that is added to the residual stream."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T, [T, H]. Shapes: x [T, K] contiguous; residual [T, H], may be overwritten."""


class LMHead(Protocol):
    """From the residual stream, or its norm, to logits."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [N, V] float32; in `out` if that is given. Shapes: x [N, H] contiguous."""


class JoinedProjection(Protocol):
    """A product of tokens and states side by side, each normalized: how a draft head's layer begins."""

    def __call__(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return [T, N]. Shapes: token_ids [T] int32 or int64; states [T, H] contiguous."""


class Experts(Protocol):
    """The sparse MLP of a layer: norm, router, the products of each token's experts, their weighted sum."""

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H].

        Shapes: hidden, residual [T, H] contiguous, may be overwritten; without a residual `hidden` is it.
        """


class ChosenExperts(Protocol):
    """Experts of a sparse MLP, without a norm before and a residual stream behind them."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of w_e down_e(gate(gate_e(x), up_e(x))) over a token's experts e that are here, [T, H].

        Shapes: x [T, H]; experts [T, k] of integers; weights [T, k].
        """


class Attention(Protocol):
    """From a projection to the attention's output; the KV cache is written on the way. A break point of graphs."""

    def __call__(
        self,
        qkv: torch.Tensor,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, [T, Hq * Dv]; in `out` if that is given.

        Shapes: qkv [T, `Heads.width`]: queries, keys, values that are not keys; with gates one of Dk elements behind
        each head of queries; rope: the step's, of the same kernel set. T may be more than the batch's tokens: the rest
        of `out` is left alone. What a row computes behind its block table is finite, meaningless and never read.
        """

    def append(self, qkv: torch.Tensor, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """Only write the cache, as a call does. Never waits for the device. Shapes: slot_mapping [T] int64."""


class LatentAttention(Protocol):
    """From the projections of a layer with latents to the attention's output; the cache is written on the way.

    A break point of graphs.
    """

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, [T, Hq * Dv]; in `out` if that is given.

        Shapes: projected [T, Hq * (N + R)]: queries; and [T, L + R]: latents, rotated keys; either may be columns of
        more. Else as `Attention`.
        """

    def append(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Only write the cache; queries are left alone. Shapes: slot_mapping [T] int64."""


class GatedDelta(Protocol):
    """From the projections of a gated delta net to its gated norm; states are moved on the way. A break point."""

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        state: LayerState,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output, [T, Hv * Dv]; in `out` if that is given. The batch says its `spans`.

        Shapes: projected [T, C + Hv * Dv]: inputs of the convolution, gates; and [T, 2 Hv]: b and a. T may be more than
        the batch's tokens: the rest of `out` is left alone.
        """


@dataclass(frozen=True)
class Gate:
    """How two halves of a product become one: (up + offset) * gate * sigmoid(alpha * (gate + cubic * gate^3)).

    Args:
        alpha: See above.
        limit: The most of a gate, and of up in both directions; None: any.
        offset: See above.
        cubic: See above. Of `GELU`: its tanh is a sigmoid of twice as much.
    """

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    cubic: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return both as one, of their type. Shapes: alike."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self == SILU:
            return F.silu(gate) * up
        if self == GELU:
            return F.gelu(gate, approximate="tanh") * up
        return (up + self.offset) * (gate * torch.sigmoid((gate + self.cubic * gate**3) * self.alpha))


SILU = Gate()
GELU = Gate(alpha=2.0 * math.sqrt(2.0 / math.pi), cubic=0.044715)
"""With the tanh that stands for the normal distribution (Gemma)."""


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of E experts: of all that a router knows, or of one member's."""

    gate_up: Weight  # [E, 2 I, H], the gate first
    down: Weight  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 I]
    down_bias: torch.Tensor | None = None  # [E, H]; with the other or without
    gate: Gate = SILU
    first: int = 0  # the number of the first one
    num_others: int = 0  # experts of other members: what tokens get of them is left out

    @property
    def num_bytes(self) -> int:
        """Of all."""
        biases = (self.gate_up_bias, self.down_bias)
        return self.gate_up.num_bytes + self.down.num_bytes + sum(bias.nbytes for bias in biases if bias is not None)


class KernelSet(Protocol):
    """Makes operations of weights."""

    can_be_recorded: bool
    """Whether a decode step never waits for the device, so that a CUDA graph can hold it."""

    def in_8_bits(self) -> KernelSet:
        """Return a set that shares its attention with this one, and reads fewer bytes where products have few rows.

        For few rows it rounds weights to 8 bits, and often their inputs, where the device has kernels for that. For
        more rows neither is rounded. Meant for draft heads, whose mistakes cost drafts and change no text.
        """

    @property
    def library_from_tokens(self) -> int:
        """The number of tokens from which on the library computes every product that was made so far.

        From there on a compiler may be given the projections: it sees the products and plain torch around them.
        """

    def norm_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> Projection:
        """Return x -> norm(x) W^T + b. Shapes: norm_weight [K]; weight [N, K]; bias [N].

        The weight belongs to the projection from then on and may be changed.
        """

    def norm(self, weight: torch.Tensor, eps: float) -> Projection:
        """Return the norm of rows by itself. Shapes: weight [K]."""

    def joined_norms_linear(
        self,
        embedding: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> JoinedProjection:
        """Return (token_ids, states) -> (norm(embedding[token_ids]) beside norm(states)) W^T + b.

        Shapes: embedding [V, H]; norm_weights [H] each, the tokens' first; weight [N, 2 H]; bias [N]. The weight
        belongs to the projection from then on and may be changed.
        """

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Projection:
        """Return x -> x W^T + b. Shapes: weight [N, K]; bias [N]."""

    def norm_gated_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gate: Gate = SILU,
    ) -> Projection:
        """Return x -> gate(a, b) of the halves a and b of norm(x) W^T + b, as a rule silu(a) * b.

        Shapes: norm_weight [K]; weight [2 I, K], the gate's first. The weight belongs to the projection from then on
        and may be changed.
        """

    def add_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None
    ) -> AddedProjection:
        """Return (x, residual) -> residual + x W^T + b, or residual + norm(x W^T + b).

        Shapes: weight [H, K]; bias [H]; norm a weight [H], and the norm's epsilon.
        """

    def member_sum(self, members: Members) -> AddedProjection:
        """Return (x, residual) -> the sum of all members' x and the residual, which may be in place of x."""

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the x of all members of the stage, maybe in its place; x itself where it has no others."""

    def experts(self, norm_weight: torch.Tensor, eps: float, router: Router, weights: ExpertWeights) -> Experts:
        """Return x -> x + sum of w_e down_e(gate(gate_e(n), up_e(n))) over a token's experts e, with n = norm(x).

        The router may have a norm of x of its own, of the same epsilon. Experts of other members add nothing.

        The host never knows the routing, so a CUDA graph can hold it at every decode size. Shapes: norm_weight [H].
        """

    def chosen_experts(self, weights: ExpertWeights) -> ChosenExperts:
        """Return the experts by themselves, for tokens whose experts are chosen."""

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> LMHead:
        """Return x -> norm(x) W^T, or x W^T without a norm, in float32. Shapes: norm_weight [H]; weight [V, H].

        Logits are not rounded to the model's type, in which the best of them often are equal; only a CPU's product
        is. The weight belongs to the head from then on and may be changed, unless it `is_shared`.
        """

    def attention(self, heads: Heads) -> Attention:
        """Return the attention of a layer with these heads."""

    def latent_attention(self, latents: LatentHeads) -> LatentAttention:
        """Return the attention of a layer with latents. `latents.expand` belongs to it from then on."""

    def gated_delta(self, heads: DeltaHeads) -> GatedDelta:
        """Return the gated delta net of a layer with these heads."""

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rotation:
        """Return the rotation of a step's tokens for `Attention`, once for all layers; see `raypp.ops.attention`.

        Shapes: positions [T] int64 and inverse_frequencies [D / 2]; or, along axes, [T, A] and [A, D / 2]. Cosines and
        sines are multiplied by `scale`.
        """

    def rotation_of(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        """Return the same of a step's cosines and sines. Shapes: [T, D / 2] each."""

    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Do the host's part of a step's attention, before its first layer. Nothing for steps of decode rows alone.

        Args:
            batch: Gets its `plans`.
            ring_entry: Which of the plan buffers to use; free again when the step that used it last has finished.
        """


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and their weights.

    Args:
        num_chosen: k, experts by token.
        normalizes: Whether a token's weights are divided by their sum (`norm_topk_prob`; Mixtral always).
        is_even: For measurements: choose by a hash of the logits' bits, so that random weights load experts evenly.
        has_sigmoid: Whether each expert's score is the sigmoid of its logit (arXiv:2412.19437); else their softmax.
        num_groups: G, of as many experts each; a token's experts are of some of them.
        num_chosen_groups: Of these: those with the largest sum of their best scores.
        num_ranking: So many best scores of a group count for that.
        scaling: What the weights are multiplied by.
    """

    num_chosen: int
    normalizes: bool
    is_even: bool = False
    has_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_ranking: int = 2
    scaling: float = 1.0


@dataclass(frozen=True, eq=False)
class Router:
    """What chooses each token's experts, by the norm of its state."""

    weight: torch.Tensor  # [E, H]
    routing: Routing
    bias: torch.Tensor | None = None  # [E], of the logits
    correction: torch.Tensor | None = None  # [E] float32: added to the scores for the choice, not for the weights
    norm_weight: torch.Tensor | None = None  # [H], of the norm of what it sees; None: it sees what the experts see
    expert_scales: torch.Tensor | None = None  # [E] float32: what the weight of an expert is multiplied by at last


def choose_experts(
    logits: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, [T, k] int64, the best first, and their weights, [T, k] float32.

    Shapes: logits [T, E] of any float type; the others as in `Router`. Of equal scores the expert with the lower number
    comes first. Nothing is asked of the device.
    """
    scores = torch.sigmoid(logits.float()) if routing.has_sigmoid else torch.softmax(logits.float(), -1)
    ranks = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        by_group = ranks.unflatten(1, (routing.num_groups, -1))
        best = by_group.topk(routing.num_ranking).values.sum(-1).topk(routing.num_chosen_groups).indices
        is_open = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranks = by_group.masked_fill(~is_open.unsqueeze(2), -torch.inf).flatten(1)
    ranked = torch.sort(_hashed(logits) if routing.is_even else ranks, dim=-1, descending=True, stable=True)
    experts = ranked.indices[:, : routing.num_chosen]
    weights = scores.gather(1, experts)
    if routing.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights if routing.scaling == 1.0 else weights * routing.scaling
    return experts, weights if expert_scales is None else weights * expert_scales[experts]


def _hashed(logits: torch.Tensor) -> torch.Tensor:
    """Return numbers that look random, and depend on the bits of a logit and its expert's number: [T, E] int64."""
    bits = logits.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    mixed = (bits + 0x9E3779B9 * torch.arange(1, logits.shape[-1] + 1, device=logits.device)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # lowbias32
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return mixed
