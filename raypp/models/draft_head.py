"""A draft head: one layer that drafts tokens from its target's hidden states. On the last stage.

    eagle   (token, the target's last hidden state)      -> fc -> layer -> the target's LM head
    eagle3  the target's hidden states at three depths   -> fc -> (token, that) -> layer -> norm -> own LM head
    mtp     norms of (token, the last hidden state)      -> fc -> layer -> norm -> the target's LM head

What enters at position p is the target's state there and the token *after* it; what leaves guesses the token after
that, and takes the state's place at the next position. Nothing but keys and values of a position is ever needed again,
so a step's tokens all enter, and only the newest of each row goes through the rest of the layer.

Sources: the papers (`raypp.models.draft_head_config`), the tensor names of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.errors import ModelLoadError
from raypp.models.draft_head_config import DraftHeadConfig
from raypp.models.latent_mixer import LatentDrafter, LatentMixer
from raypp.models.layer import (
    AttentionWeights,
    GatedMLP,
    SparseMLP,
    inverse_frequencies,
    read_attention,
    read_norm,
    read_vocabulary,
)
from raypp.models.weights import WeightReader
from raypp.ops.attention import AttentionBatch, Rotation
from raypp.ops.backend import AddedProjection, Attention, JoinedProjection, KernelSet, Projection
from raypp.ops.kv_cache import LayerCache
from raypp.ops.sample.tables import AdjustedLogits
from raypp.ops.sample.token_choice import TokenChoice
from raypp.ops.sample.vocabulary_part import VocabularyPart, hide_padding
from raypp.ops.weight import Weight, rounded_to_8_bits


class HeadTarget(Protocol):
    """What a head uses of the model that it drafts for."""

    def head_embedding(self) -> torch.Tensor:
        """Return the token embedding, [V, H]."""

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the final norm of the residual stream, [T, H]."""

    def project(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the LM head's logits, [N, V] float32; of a member, its part. Shapes: normalized [N, H]."""

    def head_weight(self) -> torch.Tensor:
        """Return the LM head's weight, [V, H]; of a member, its part. It stays the model's."""


@dataclass(frozen=True, eq=False)
class Entered:
    """What a token has become before attention."""

    residual: torch.Tensor  # [T, H]
    qkv: torch.Tensor  # [T, (Hq + 2 Hk) * D]


class DraftHead:
    """The layer, and what goes before and after.

    Args:
        config: The head's.
        target: The model that it drafts for, with its weights.
        weights: The head's checkpoint.
        kernels: Of the device; of a member of a stage, if that has several.
        choice: Of the device; chooses the most likely token.
        part: Of the tokens that the head guesses, of a member; None: it is alone. Attention, the MLP and the LM head
            are cut, the rest is whole.
    """

    def __init__(
        self,
        config: DraftHeadConfig,
        target: HeadTarget,
        weights: WeightReader,
        kernels: KernelSet,
        choice: TokenChoice,
        part: VocabularyPart | None = None,
    ) -> None:
        self.config = config
        self._target = target
        given, self._kernels = kernels, kernels.in_8_bits() if config.has_8_bit_weights else kernels
        kernels = self._kernels
        self._choice = choice
        self._part = part
        layer, hidden = config.layer, config.layer.hidden_size
        self._embedding = (
            weights.tensor("embed_tokens.weight", config.target_vocab_size, hidden)
            if config.has_embedding
            else target.head_embedding()
        )
        fc_bias = weights.tensor("fc.bias", hidden) if config.has_fc_bias else None
        fc = weights.weight((config.mtp_names.fc,), (hidden,), config.fc_inputs)
        self._joining: JoinedProjection | None = None  # of mtp
        self._last_norm: Projection | None = None  # of mtp, before the LM head and the next draft
        if config.kind == "mtp":
            names = config.mtp_names
            of_tokens, of_states, last = (
                read_norm(layer, weights, f"{name}.weight", hidden)
                for name in (names.of_tokens, names.of_states, names.last)
            )
            self._joining = kernels.joined_norms_linear(self._embedding, (of_tokens, of_states), layer.rms_norm_eps, fc)
            self._last_norm = kernels.norm(last, layer.rms_norm_eps)
        else:
            self._fc = kernels.linear(fc, fc_bias)
        below = weights.below(config.layer_prefix)
        self._qkv: Projection | None = None  # of eagle and mtp
        self._joined: JoinedProjection | None = None  # of eagle3
        self._state_norm: Projection | None = None  # of eagle3, if the normalized state is what the layer adds to
        self._attention: Attention | LatentDrafter
        if layer.attending[0].latent is None:
            attention = read_attention(layer, 0, below.below("self_attn."), config.attention_inputs, kernels)
            self._read_entry(below, attention)
            self._attention = kernels.attention(attention.heads)
            self._output: AddedProjection = kernels.add_linear(attention.output, attention.output_bias)
        else:
            mixer = LatentMixer(layer, 0, below, kernels, read_norm(layer, below, "input_layernorm.weight", hidden))
            self._attention = drafter = LatentDrafter(mixer)
            self._qkv, self._output = drafter.project, mixer.output
        self._mlp = (GatedMLP if layer.experts is None else SparseMLP)(layer, below, kernels)
        self._logits = self._read_lm_head(weights, given)
        self._draft_to_target = _draft_to_target(config, weights) if config.maps_vocabulary else None
        head_dim, self._rope = layer.attending[0].rotation
        self._inverse_frequencies = inverse_frequencies(head_dim, self._rope).to(weights.device)

    def _read_entry(self, weights: WeightReader, attention: AttentionWeights) -> None:
        config, kernels, eps = self.config, self._kernels, self.config.layer.rms_norm_eps
        qkv, qkv_bias = attention.qkv, attention.qkv_bias
        input_norm = state_norm = None
        if config.has_input_norm:
            input_norm = read_norm(config.layer, weights, "input_layernorm.weight", config.layer.hidden_size)
        if config.kind == "eagle3":
            state_norm = weights.tensor("hidden_norm.weight", config.layer.hidden_size)
            assert input_norm is not None
            self._joined = kernels.joined_norms_linear(self._embedding, (input_norm, state_norm), eps, qkv, qkv_bias)
            if config.norm_before_residual:
                self._state_norm = kernels.norm(state_norm, eps)
        elif input_norm is not None:
            self._qkv = kernels.norm_linear(input_norm, eps, qkv, qkv_bias)
        else:
            self._qkv = kernels.linear(qkv, qkv_bias)

    def _read_lm_head(self, weights: WeightReader, given: KernelSet) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes logits. The target's LM head is rounded to 8 bits besides: every draft reads all of it."""
        config, kernels = self.config, self._kernels
        hidden, eps, part = config.layer.hidden_size, config.layer.rms_norm_eps, self._part
        is_normed = config.kind in ("eagle", "mtp")  # what it guesses is normalized already
        norm_weight = None if is_normed else weights.tensor("norm.weight", hidden)
        project: Callable[[torch.Tensor], torch.Tensor]
        if config.has_lm_head:
            own = Weight(read_vocabulary(config.layer, weights, "lm_head.weight"))
            project = kernels.linear(own) if norm_weight is None else kernels.norm_linear(norm_weight, eps, own)
        elif config.has_8_bit_weights:  # inputs have scales of their own, as beside any weight that is stored in 8 bits
            project = given.linear(rounded_to_8_bits(self._target.head_weight()))
        else:
            project = self._target.project
        if norm_weight is None or config.has_lm_head:
            return lambda x: hide_padding(project(x), part)
        norm = kernels.norm(norm_weight, eps)
        return lambda x: hide_padding(project(norm(x)), part)

    def states(self, hidden: torch.Tensor, aux: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what stands for the target's states, [T, H].

        Shapes: hidden [T, H_t], the residual stream after the last layer; aux one [T, H_t] per depth.
        """
        if self.config.kind != "eagle3":
            return self._target.normalize(hidden)
        return self._fc(torch.cat(list(aux), 1))

    def enter(self, states: torch.Tensor, token_ids: torch.Tensor) -> Entered:
        """Return tokens ready for attention. Shapes: states [T, H]; token_ids [T], each the one after its state's."""
        if self._joined is not None:
            residual = states if self._state_norm is None else self._state_norm(states)
            return Entered(residual, self._joined(token_ids, states))
        assert self._qkv is not None
        if self._joining is not None:
            residual = self._joining(token_ids, states)
            return Entered(residual, self._qkv(residual))
        residual = self._fc(torch.cat((F.embedding(token_ids, self._embedding), states), 1))
        return Entered(residual, self._qkv(residual))

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return what tokens at these positions are rotated by. Shapes: positions [T] int64."""
        return self._kernels.rotation(positions, self._inverse_frequencies, self._rope.attention_factor)

    def append(self, qkv: torch.Tensor, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """Write the keys and values of tokens. Shapes: qkv [T, (Hq + 2 Hk) * D]; slot_mapping [T] int64."""
        self._attention.append(qkv, rope, cache, slot_mapping)

    def finish(
        self, entered: Entered, rope: Rotation, cache: LayerCache, attention: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses of the states after tokens, [R, H], and of the tokens after these, int32 [R].

        Shapes: entered [R, ...], of decode rows of one token each; it may be overwritten.
        """
        self._kernels.plan_attention(attention, 0)  # decode rows alone: it takes none of the plans' buffers
        attended = self._attention(entered.qkv, rope, cache, attention)
        hidden = self._mlp(self._output(attended, entered.residual))
        if self._last_norm is not None:
            hidden = self._last_norm(hidden)
        token_ids = self._choice.greedy(AdjustedLogits(self._logits(hidden))).clamp(min=0)
        if self._draft_to_target is not None:
            return hidden, self._draft_to_target.index_select(0, token_ids)
        return hidden, token_ids.to(torch.int32)


def _draft_to_target(config: DraftHeadConfig, weights: WeightReader) -> torch.Tensor:
    """Return the target's id of each of the head's own, int32. The checkpoint says by how much they differ."""
    size = config.layer.vocab_size
    ids = weights.integers("d2t", size) + torch.arange(size, device=weights.device)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= config.target_vocab_size:
        raise ModelLoadError(
            "the draft head's d2t names tokens that the target does not have",
            got=f"ids from {lowest} to {highest}",
            expected=f"0 to {config.target_vocab_size - 1}",
            hint="the head is of another model",
        )
    return ids.to(torch.int32)
