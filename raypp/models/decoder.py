"""One stage's part of a decoder-only transformer.

    first stage: embedding     every stage: layers [start_layer, end_layer)     last stage: final norm, LM head

Between layers, as between stages, one tensor travels: the residual stream.
The objects are plain, not `torch.nn.Module`s: nothing is trained, and each of a layer's calls would take 1.8 us longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.graphs.cost import GRAPH_MODES, GraphCost, GraphMode
from raypp.members import Members
from raypp.models.attention_config import AttentionConfig
from raypp.models.config import EMBEDDING, ModelConfig
from raypp.models.draft_head import DraftHead
from raypp.models.layer import TransformerLayer, axis_frequencies, inverse_frequencies, read_norm, read_vocabulary
from raypp.models.member_sizes import ONLY_MEMBER, Member
from raypp.models.sizes import embedding_bytes, layer_sizes, lm_head_bytes
from raypp.models.vision_config import TOWER_PREFIXES
from raypp.models.weights import WeightReader, WeightSource
from raypp.ops.attention import AttentionBatch, Rotation, query_growth
from raypp.ops.backend import KernelSet, LMHead, Projection
from raypp.ops.member_kernels import with_members
from raypp.ops.row_attention import capped
from raypp.ops.row_state import LayerMemory
from raypp.ops.sample.vocabulary_part import VocabularyPart, hide_padding
from raypp.ops.weight import Weight

if TYPE_CHECKING:
    from raypp.graphs.compiled import CompiledFunction

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Deepstack:
    """Rows of a vision tower that are added to the residual stream after leading layers (arXiv:2406.04334).

    M of a step's tokens stand for images.
    """

    token_indices: torch.Tensor  # [M] int64, ascending
    rows: torch.Tensor  # [L, M, H]
    first_layer: int  # after which the first of these L is added


@dataclass(frozen=True, kw_only=True)
class HeadSupport:
    """What a stage does for a draft head besides computing its layers; see `raypp.models.draft_head`."""

    tap_depths: tuple[int, ...]  # layers of the model after which this stage keeps the residual stream
    max_tokens: int  # of a step
    gives_embedding: bool = False  # last stage: the draft head has none
    gives_lm_head: bool = False  # last stage: the draft head has none


class DecoderLayer(Protocol):
    """One layer. What lies before and after attention are pure functions, so that graphs can hold them."""

    has_experts: bool
    """Whether its MLP is sparse."""
    kind: Hashable
    """Layers of one kind differ in the values of their weights alone."""
    output_size: int
    """Elements of attention's output per token, Hq * Dv."""

    def before_attention(self, hidden: torch.Tensor) -> Any:
        """Return what `attend` takes of the residual stream [T, H]: queries, keys, values [T, (Hq + 2 Hk) * D], say."""

    def attend(
        self,
        projected: Any,
        rope: Rotation | None,
        cache: LayerMemory,
        attention: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention's output, [T, Hq * D], and write what the layer keeps; see `raypp.ops.backend.Attention`."""

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer, [T, H].

        Shapes: hidden [T, H], may be overwritten; attended [T, Hq * D].
        """


class DecoderModel:
    """The layers [start_layer, end_layer) of a model; with the embedding if they are the first, the head if the last.

    It computes once `load_weights` has been called.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        start_layer: int,
        end_layer: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
        head_support: HeadSupport | None = None,
        members: Members | None = None,
    ) -> None:
        assert 0 <= start_layer < end_layer <= config.num_layers
        self.hidden_size = config.hidden_size
        self.is_first = start_layer == 0
        self.is_last = end_layer == config.num_layers
        self._config = config
        self._layer_indices = range(start_layer, end_layer)
        self.dtype = dtype
        self.device = device
        self.kernels = with_members(kernels, members)
        self._members = members
        self._part = None if members is None else VocabularyPart(members, config.vocab_size)
        self._member = ONLY_MEMBER if members is None else Member(members.rank, members.count)
        rotations = [
            each.rotation if isinstance(each, AttentionConfig) else None
            for each in config.attention[start_layer:end_layer]
        ]
        self._rotations = list(dict.fromkeys(each for each in rotations if each is not None))
        self._rotation_of = [None if each is None else self._rotations.index(each) for each in rotations]
        self._inverse_frequencies = [inverse_frequencies(*each).to(device) for each in self._rotations]
        axes = [axis_frequencies(*each) for each in self._rotations]
        self._axis_frequencies = [each.to(device) for each in axes if each is not None]
        self.layers: list[DecoderLayer] = []
        """None yet before `load_weights`."""
        self._embedding: torch.Tensor | None = None
        self._embedding_scale: torch.Tensor | None = None
        if config.embedding_scale != 1.0:  # rounded to the type, as models were trained
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._head_embedding: torch.Tensor | None = None
        self._head_weight: torch.Tensor | None = None
        self._lm_head: LMHead | None = None
        self._head_support = head_support
        self._final_norm: Projection | None = None
        self._plain_lm_head: LMHead | None = None
        self.draft_head: DraftHead | None = None
        """On the last stage: what drafts for this model, if anything; set once both have weights."""
        self.taps: dict[int, torch.Tensor] = {}
        """By depth, the residual stream of the last forward after so many layers, [max_tokens, H]; it never moves."""
        self.costs: dict[str, GraphCost] = {}
        """What `compile_layers` took, as `compile`."""
        if head_support is not None:
            for depth in head_support.tap_depths:
                self.taps[depth] = torch.zeros(head_support.max_tokens, config.hidden_size, dtype=dtype, device=device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights, tied ones counted once."""
        config, size = self._config, self.dtype.itemsize
        sizes = layer_sizes(config, size)
        total = sum(sizes[index].weight_bytes for index in self._layer_indices)
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
        whole = WeightReader(source, self.dtype, self.device, quantization=config.quantization, member=self._member)
        weights = whole.below(config.weight_prefix)
        if self.is_first:
            self._embedding = read_vocabulary(config, weights, EMBEDDING)
        self.layers = [
            TransformerLayer(config, index, weights.below(f"layers.{index}."), self.kernels)
            for index in self._layer_indices
        ]
        if self.is_last:
            self._load_lm_head(whole)

    def owns_tensor(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to this stage; at most one stage returns True.

        A layer's stage owns all that is stored for it. The rest of the language model is the last stage's, but for the
        embedding and a tied LM head, which are always read; a vision tower's tensors are its encoders'.
        """
        config = self._config
        prefix = f"{config.weight_prefix}layers."
        if name.startswith(prefix):
            index = name.removeprefix(prefix).partition(".")[0]
            if index.isdecimal() and int(index) < config.num_layers + config.num_drafting_layers:
                return int(index) in self._layer_indices
        embeddings = (config.weight_prefix + EMBEDDING, config.lm_head_name)[: 1 + config.tie_word_embeddings]
        is_of_tower = name.startswith(TOWER_PREFIXES)
        is_of_head = config.mtp_prefix is not None and name.startswith(config.mtp_prefix)
        return self.is_last and name not in embeddings and not is_of_tower and not is_of_head

    def _load_lm_head(self, whole: WeightReader) -> None:
        config, support, kernels = self._config, self._head_support, self.kernels
        weights, weight = whole.below(config.weight_prefix), self._embedding
        if weight is None or not config.tie_word_embeddings:
            name = config.weight_prefix + EMBEDDING if config.tie_word_embeddings else config.lm_head_name
            weight = read_vocabulary(config, whole, name)
        norm_weight = read_norm(config, weights, "norm.weight", config.hidden_size)
        if support is not None and support.gives_embedding:
            embedding = self._embedding
            if embedding is None and config.tie_word_embeddings and self.device.type != "cpu":
                embedding = weight  # linear layers on a CPU may keep their weights in a form of their own
            if embedding is None or self._members is not None:  # kernels look tokens up, so a member has all of them
                embedding = weights.tensor(EMBEDDING, config.vocab_size, config.hidden_size)
            self._head_embedding = embedding
        if support is not None:
            self._final_norm = kernels.norm(norm_weight, config.rms_norm_eps)
        if support is not None and support.gives_lm_head:
            self._plain_lm_head, self._head_weight = kernels.lm_head(Weight(weight)), weight
            return
        # A tied head counts as shared on any stage, so that a model computes the same however it is cut.
        self._lm_head = kernels.lm_head(
            Weight(weight), norm_weight, config.rms_norm_eps, is_shared=config.tie_word_embeddings
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, [T, H]. First stage only. Shapes: input_ids [T] int32 or int64."""
        assert self._embedding is not None, "not the first stage, or no weights yet"
        look_up = partial(F.embedding, weight=self._embedding)
        embedded = look_up(input_ids) if self._part is None else self._part.embedded(input_ids, look_up)
        return embedded if self._embedding_scale is None else embedded.mul_(self._embedding_scale)

    def embed_items(self, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of images, [N, H], as they are."""
        return rows

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[LayerMemory],
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after the stage's layers, [T, H]; write what these keep.

        Shapes: hidden [T, H], may be overwritten on a GPU; positions [T] int64, or [T, 3] along the axes of a model
        that has some; kv_caches one per layer, see `raypp.ops.kv_cache`.
        """
        frequencies = self._inverse_frequencies if positions.ndim == 1 else self._axis_frequencies
        assert len(frequencies) == len(self._rotations), "positions along axes, for a model that has none"
        ropes = [
            self.kernels.rotation(positions, each, rope.attention_factor)
            for each, (_, rope) in zip(frequencies, self._rotations, strict=True)
        ]
        for index, (_, turns) in enumerate(self._rotations):
            if turns.query_growth:
                growth = query_growth(positions, turns.query_growth, turns.original_max_position_embeddings)
                ropes[index] = ropes[index]._replace(query_growth=growth)
        for depth, layer, rotation, cache in zip(
            self._layer_indices, self.layers, self._rotation_of, kv_caches, strict=True
        ):
            if depth in self.taps:
                self._tap(depth, hidden)
            out = None if attention.padded_out is None else attention.padded_out[layer.output_size]
            rope = None if rotation is None else ropes[rotation]
            attended = layer.attend(layer.before_attention(hidden), rope, cache, attention, out)
            hidden = layer.after_attention(hidden, attended)
            if deepstack is not None and depth - deepstack.first_layer < len(deepstack.rows):
                indices = deepstack.token_indices
                rows = hidden.index_select(0, indices).add_(deepstack.rows[depth - deepstack.first_layer])
                hidden = hidden.index_copy_(0, indices, rows)
        if self._layer_indices.stop in self.taps:
            self._tap(self._layer_indices.stop, hidden)
        return hidden

    def _tap(self, depth: int, hidden: torch.Tensor) -> None:
        self.taps[depth][: len(hidden)].copy_(hidden)  # a layer may overwrite its input

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Elements of attention's output per token, Hq * Dv, of any of the layers; all differ."""
        return tuple({self._config.attention[index].output_size: None for index in self._layer_indices})

    @property
    def graph_modes(self) -> Collection[GraphMode]:
        """Which graphs can hold the stage's steps."""
        return GRAPH_MODES if self.kernels.can_be_recorded or self.device.type == "cpu" else ("piecewise",)

    def plan_attention(self, attention: AttentionBatch, ring_entry: int) -> None:
        """Do the host's part of a step's attention; see `raypp.ops.backend.KernelSet`."""
        self.kernels.plan_attention(attention, ring_entry)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [N, V] float32, in `out` if that is given; a member's part of them. Last stage only.

        Shapes: hidden [N, H].
        """
        if self._plain_lm_head is not None:
            logits = self._plain_lm_head(self.normalize(hidden), out)
        else:
            assert self._lm_head is not None, "not the last stage, or no weights yet"
            logits = self._lm_head(hidden, out)
        cap = self._config.logit_cap
        return hide_padding(logits if cap is None else capped(logits, cap, 1.0), self._part)

    def head_embedding(self) -> torch.Tensor:
        """Return the token embedding, [V, H]; see `raypp.models.draft_head.HeadTarget`."""
        assert self._head_embedding is not None, "no draft head without an embedding was announced"
        return self._head_embedding

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the final norm of the residual stream, [T, H]."""
        assert self._final_norm is not None, "no draft head was announced"
        return self._final_norm(hidden)

    def project(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the LM head's logits, [N, V] float32. Shapes: normalized [N, H]."""
        assert self._plain_lm_head is not None, "no draft head was announced"
        return hide_padding(self._plain_lm_head(normalized), self._part)

    def head_weight(self) -> torch.Tensor:
        """Return the LM head's weight, [V, H]; of a member, its part."""
        assert self._head_weight is not None, "no draft head without an LM head was announced"
        return self._head_weight


def _before(layer: DecoderLayer, hidden: torch.Tensor) -> Any:
    return layer.before_attention(hidden)


def _after(layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    return layer.after_attention(hidden, attended)


class CompiledLayer:
    """A layer whose pure functions run compiled; with few tokens, its own. See `DecoderLayer`."""

    def __init__(
        self, layer: DecoderLayer, before: CompiledFunction, after: CompiledFunction | None, fewest_tokens: int
    ) -> None:
        self.has_experts, self.output_size, self.kind = layer.has_experts, layer.output_size, layer.kind
        self._layer = layer
        self._before = before
        self._after = after
        self._fewest_tokens = fewest_tokens

    def before_attention(self, hidden: torch.Tensor) -> Any:
        if len(hidden) < self._fewest_tokens:
            return self._layer.before_attention(hidden)
        return self._before(self._layer, hidden)

    def attend(
        self,
        projected: Any,
        rope: Rotation | None,
        cache: LayerMemory,
        attention: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._layer.attend(projected, rope, cache, attention, out)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        if self._after is None or len(hidden) < self._fewest_tokens:
            return self._layer.after_attention(hidden, attended)
        return self._after(self._layer, hidden, attended)


def compile_layers(model: DecoderModel, max_tokens: int, backend: str) -> None:
    """Run what is before and after attention of a model's layers through torch.compile, from here on.

    Experts are not compiled: which weights they read is known on the device alone.

    What that took is in `model.costs`. Steps of few tokens, whose products the model's own kernels compute, run the
    layers' own functions.

    Args:
        model: It has its weights.
        max_tokens: Of a step.
        backend: torch's name of the compiler.

    Raises:
        ConfigError: the compiler cannot; says why.
    """
    from raypp.graphs.compiled import CompiledFunction  # torch's compiler takes seconds to import

    fewest_tokens = model.kernels.library_from_tokens
    if max_tokens < fewest_tokens:
        model.costs["compile"] = GraphCost()
        return
    started = time.perf_counter()
    of_kinds: dict[Hashable, tuple[CompiledFunction, CompiledFunction | None]] = {}
    sizes_of_steps = {"fewest_tokens": fewest_tokens, "most_tokens": max_tokens}
    with torch.inference_mode():
        for kind, layer in {layer.kind: layer for layer in model.layers}.items():
            sizes = (model.hidden_size, layer.output_size)
            hidden, attended = (torch.zeros(1, size, dtype=model.dtype, device=model.device) for size in sizes)
            before, after = CompiledFunction(_before, layer, (hidden,), **sizes_of_steps, backend=backend), None
            if not layer.has_experts:
                after = CompiledFunction(_after, layer, (hidden, attended), **sizes_of_steps, backend=backend)
            of_kinds[kind] = before, after
    functions = [function for both in of_kinds.values() for function in both if function is not None]
    num_compiled = sum(function.num_compiled for function in functions)
    cost = GraphCost(num_compiled, time.perf_counter() - started)
    _LOG.info(
        "%s compiled what is before and after attention, for steps of %d to %d tokens, in %.1f s",
        backend,
        fewest_tokens,
        max_tokens,
        cost.seconds,
    )
    model.layers = [CompiledLayer(layer, *of_kinds[layer.kind], fewest_tokens) for layer in model.layers]
    model.costs["compile"] = cost
