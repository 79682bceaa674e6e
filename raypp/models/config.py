"""Reads a model's architecture and sizes from its config.json.

Both forms of that file are read: `rope_theta` with `rope_scaling` (published checkpoints) and `rope_parameters` (what
transformers 5 writes); `torch_dtype` and `dtype`. Needs no torch, so that planning stays cheap.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from raypp.errors import ConfigError, ModelLoadError, page
from raypp.models.asked import PROBE, asked
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer, ModulesConfig
from raypp.models.checkpoint_names import (
    are_alike,
    file_of_tensor,
    has_own_form,
    has_safetensors,
    name_of_text,
    stored_tensors,
)
from raypp.models.config_fields import ConfigFields, read_json
from raypp.models.expert_config import ExpertConfig, read_experts
from raypp.models.families import FAMILIES, LOGIT_CAP, NULL_IS_NONE, TEXT_FAMILIES, Activation, Family, Windows
from raypp.models.generation_config import GENERATION_CONFIG
from raypp.models.mistral_format import PARAMS_FILE, read_params
from raypp.models.quantization import Quantization, read_quantization
from raypp.models.rope_config import RopeConfig, of_kind, read_local_rope, read_rope, with_rope_scaling
from raypp.models.vision_config import VisionConfig, read_vision_config
from raypp.ops.state_sizes import ModuleState, StateTensor

_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu": ("hidden_activation", ("gelu_pytorch_tanh",)),
}
"""The field that names it, and its names."""
_KV_SCHEME = "quantization_config.kv_cache_scheme"
_KV_KNOWN = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_KV_WHERE_UNSAID = {"strategy": "tensor", "dynamic": False, "symmetric": True}


TRANSFORMERS = "transformers"
"""In front of the name of an architecture: its modules are transformers'."""
_TEXT_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
_WITH_TOWER = "ForConditionalGeneration"
_USUAL_POSITIONS = 8192  # where transformers' configuration says nothing: what positions are computed of has no end
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_STATE_DTYPES = ("float32", "bfloat16")
_LARGEST_KERNEL = 8  # of a short convolution
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
EMBEDDING = "embed_tokens.weight"
"""The token embedding's name below a model's `weight_prefix`."""
LM_HEAD = "lm_head.weight"
_LM_HEADS = (LM_HEAD, f"language_model.{LM_HEAD}")
"""Names of it, the second beside some towers."""
ModelImpl = Literal["auto", "raypp", "transformers"]
_LOG = logging.getLogger(__name__)


class MeasuredLinear(NamedTuple):
    """A linear layer of transformers' modules, or one of each expert, of one member of a stage."""

    name: str
    num_outputs: int
    num_inputs: int
    has_some_outputs: bool = False  # of several members
    has_some_inputs: bool = False
    num_experts: int = 1


class CutSize(NamedTuple):
    """What members of a stage divide among them, of a layer of transformers' modules."""

    name: str
    size: int
    can_be_shared: bool
    """By members that are more, as KV heads are."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """What a layer of transformers' modules takes."""

    num_parameters: int  # those of experts aside
    num_expert_parameters: int = 0
    share_chosen: float = 1.0  # of the experts, by a token
    linears: tuple[MeasuredLinear, ...] = ()
    experts: tuple[MeasuredLinear, ...] = ()
    mlp_width: int  # elements of the widest product, of a token
    num_outputs: int | None  # elements of the tuple that it returns; None: it returns a tensor
    cuts: tuple[CutSize, ...] = ()  # of the whole model


class LayerInputs(NamedTuple):
    """What every layer takes of each token besides the residual stream; the first stage makes it (Gemma 4 E2B)."""

    size: int = 0  # elements, of one layer
    num_parameters: int = 0  # of what makes them, for all layers


NO_INPUTS = LayerInputs()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model's architecture and sizes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[LayerMixer, ...]  # of each layer
    rms_norm_eps: float
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str  # the checkpoint's
    eos_token_ids: tuple[int, ...]  # ascending
    weight_prefix: str = "model."  # of the language model's tensors, but for the LM head's
    lm_head_name: str = LM_HEAD
    vision: VisionConfig | None = None  # None: it reads text alone
    experts: ExpertConfig | None = None  # None: all layers are dense
    quantization: Quantization | None = None  # None: weights are floats of 16 or 32 bits
    measured: tuple[MeasuredLayer, ...] | None = None  # of each layer of transformers' modules; None: raypp's layers
    modules_behind: tuple[str, ...] = ()  # of transformers' decoder, those that run behind the last layer alone
    trusts_code: bool = False  # whether transformers may run code that comes with the model
    has_fp8_kv_cache: bool = False  # whether the checkpoint was made for a KV cache in 8 bits
    adds_one_to_norms: bool = False  # whether norms multiply by 1 + weight
    mtp_prefix: str | None = None  # of the tensors of a head that drafts, if the model's checkpoints may have one
    has_mtp_layer: bool = False  # whether that head is stored as one more layer
    num_drafting_layers: int = 0  # behind the last layer, in the checkpoint alone
    has_wide_qk_norm: bool = False  # whether `qk_norm` is of all heads at once
    has_value_norm: bool = False  # whether `qk_norm` has one of value heads beside it, without a weight
    has_layer_scalars: bool = False  # whether the residual stream is multiplied by a number behind each layer
    activation: Activation = "silu"  # of MLPs, and of experts
    has_output_norms: bool = False  # whether attention's and the MLP's outputs are normalized before they are added
    embedding_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap)
    layer_inputs: LayerInputs = NO_INPUTS
    num_members: int = 1  # of a stage; all sizes but those of the vocabulary are one member's, see `of_one_member`

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.attention)

    @property
    def attending(self) -> tuple[AttentionConfig, ...]:
        """The layers that attend, to a KV cache of their own or of another layer."""
        return tuple(each.attention for each in self.attention if each.attention is not None)

    @property
    def has_row_states(self) -> bool:
        """Whether some layers keep a state per row, instead or besides."""
        return any(not isinstance(each, AttentionConfig) for each in self.attention)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the LM head that a member has; the last one pads them."""
        return -(-self.vocab_size // self.num_members)

    def group_of(self, layer: int) -> int | None:
        """Return which group of `windows` a layer is of, None if it keeps no KV."""
        attention = self.attention[layer].attention
        return None if attention is None or attention.source is not None else self.windows.index(attention.window)

    def stream_size(self, layer: int) -> int:
        """Return the elements of a token that enter a layer: residual stream, inputs of this layer and later ones."""
        return self.hidden_size + self.layer_inputs.size * (self.num_layers - layer)

    @property
    def stage_begins(self) -> tuple[int, ...]:
        """The layers that a stage may begin with: none between a layer and one that attends to its keys and values."""
        sources = [None if each.attention is None else each.attention.source for each in self.attention]
        joined = {
            layer for end, source in enumerate(sources) if source is not None for layer in range(source + 1, end + 1)
        }
        return tuple(layer for layer in range(self.num_layers) if layer not in joined)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows that layers have, the widest first: layers with the same one keep the same tokens: a group.

        Where no layer attends, one group all the same: its blocks take no memory.
        """
        found = {each.window for each in self.attending} or {None}
        widest = [None] if None in found else []
        return (*widest, *sorted((window for window in found if window is not None), reverse=True))

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """Return the experts of a layer, None if it is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def num_deepstack_layers(self) -> int:
        """Leading layers after which rows of the vision tower are added to its tokens."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)


def load_model_config(
    path: Path,
    *,
    impl: ModelImpl = "auto",
    trusts_code: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> ModelConfig:
    """Read a model directory's config.json, and the end-of-sequence ids of its generation_config.json if it has one.

    Args:
        path: The directory.
        impl: Whose layers; see `raypp.config.sections.ModelSection`.
        trusts_code: Whether code that comes with the model may be run; see there.
        rope_scaling: In place of the file's field of that name; None: as the file has it.
        max_model_len: Tokens of the longest request, which dynamic scaling is chosen by; None: as many as are trained.

    Raises:
        ModelLoadError: no such file, an architecture or a feature that raypp does not have, a missing or wrong field.
    """
    whole = read_fields(path)
    architecture = _architecture(whole, impl)
    if architecture not in FAMILIES:
        if has_own_form(path):
            raise ModelLoadError(
                f"{path}: transformers' modules do not read Mistral's own form of a model",
                got=f"{PARAMS_FILE} without {whole.file.with_name('config.json').name}, model_impl={impl}",
                expected="model_impl = auto or raypp",
            )
        has_options = rope_scaling is not None
        return _transformers_config(path, whole, architecture, trusts_code=trusts_code, has_options=has_options)
    family = FAMILIES[architecture]
    fields = _family_fields(whole, family)
    local_rope = read_local_rope(fields) if family.has_local_rope else None
    fields = of_kind(fields, _FULL)
    if rope_scaling is not None:
        fields = with_rope_scaling(fields, rope_scaling, family.rotated_share)
    refuse_unsupported(fields, family.activation)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
    head_dim = fields.integer(family.head_dim, hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error(family.head_dim, head_dim, "an even number: rotary embedding pairs dimensions")
    num_positions = fields.integer("max_position_embeddings")
    share = family.rotated_share
    if share is not None and fields.get("rotary_dim") is not None:
        if (rotated := fields.integer("rotary_dim")) % 2 or rotated > head_dim:
            raise fields.error("rotary_dim", rotated, f"an even number, at most head_dim={head_dim}")
        share = rotated / head_dim
    rope, num_positions = read_rope(fields, num_positions, max_model_len, share=share)
    num_layers = fields.integer("num_hidden_layers")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=head_dim,
        rope=rope,
        has_gate=family.has_output_gate,
        has_sinks=family.has_sinks,
    )
    layers = _read_layers(fields, family, attention, num_layers, local_rope)
    if family.layer_attention is not None:
        layers = [
            family.layer_attention(fields, index, layer) if isinstance(layer, AttentionConfig) else layer
            for index, layer in enumerate(layers)
        ]
    vision = None if family.vision is None else read_vision_config(path, whole, hidden_size, family.vision)
    if vision is not None and vision.has_axes and rope.mrope_section is None:
        raise fields.error("rope_parameters.mrope_section", "nothing", "three numbers of pairs: time, height, width")
    if vision is not None and len(vision.deepstack_layers) > num_layers:
        raise fields.error("num_hidden_layers", num_layers, f"a layer for each of {len(vision.deepstack_layers)} taps")
    num_drafting_layers = fields.integer("num_nextn_predict_layers", 0, least=0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", _least_intermediate(family)),
        attention=tuple(layers),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=fields.flag(family.qkv_bias),
        attention_output_bias=fields.flag(family.attention_output_bias),
        mlp_bias=fields.flag(family.mlp_bias),
        qk_norm=fields.flag(family.qk_norm),
        has_wide_qk_norm=family.has_wide_qk_norm,
        has_value_norm=family.has_value_norm,
        has_layer_scalars=family.has_layer_scalars,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=num_positions,
        dtype=read_dtype(fields),
        eos_token_ids=_eos_token_ids(path, fields),
        weight_prefix=family.weight_prefix,
        vision=vision,
        experts=read_experts(fields, family.experts, num_layers),
        quantization=read_quantization(fields),
        has_fp8_kv_cache=has_fp8_kv_cache(fields),
        adds_one_to_norms=family.adds_one_to_norms,
        mtp_prefix=family.prefix_of_head(num_layers, num_drafting_layers),
        has_mtp_layer=family.has_mtp_layer,
        num_drafting_layers=num_drafting_layers,
        activation=family.activation,
        has_output_norms=family.has_output_norms,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
        logit_cap=fields.number(LOGIT_CAP) if fields.get(LOGIT_CAP) is not None else None,
    )


def read_fields(path: Path) -> ConfigFields:
    """Return the fields of config.json, or what it would say of a model in Mistral's own form.

    Raises:
        ModelLoadError: there is none, or it is not understood.
    """
    if has_own_form(path):
        return read_params(path / PARAMS_FILE)
    return ConfigFields(path / "config.json", read_json(path / "config.json"))


def as_stored(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the configuration as the directory's weights have it: their names, and whether the LM head is tied.

    In Mistral's own form, also which modules have 16 bits: there patterns may be of names that are not known here.

    A model that was saved without its head has no `model.` in front of its names; one beside a tower has more.
    Some checkpoints are called tied and store an LM head besides. It is mostly the embedding once more; where it is
    not, it is the LM head (as transformers has it: 5.17, `PreTrainedModel.tie_weights`).

    Raises:
        ModelLoadError: the checkpoint is not readable.
    """
    if not has_safetensors(path):
        return config
    names = file_of_tensor(path)
    if config.quantization is not None and has_own_form(path):
        modules = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
        plain = tuple(module for module in modules if f"{module}.weight_scale" not in names)
        quantization = replace(config.quantization, skipped=(*config.quantization.skipped, *plain))
        config = replace(config, quantization=quantization)
    if config.weight_prefix + EMBEDDING not in names:
        found = next((prefix for prefix in _TEXT_PREFIXES if prefix + EMBEDDING in names), config.weight_prefix)
        config = replace(config, weight_prefix=found)
    lm_head_name = next((name for name in _LM_HEADS if name in names), LM_HEAD)
    if lm_head_name != config.lm_head_name:
        config = replace(config, lm_head_name=lm_head_name)
    if not config.tie_word_embeddings:
        return config
    tensors = stored_tensors(path)
    embedding, lm_head = tensors.get(f"{config.weight_prefix}{EMBEDDING}"), tensors.get(config.lm_head_name)
    if embedding is None or lm_head is None or are_alike(embedding, lm_head):
        return config
    _LOG.warning(
        "%s: config.json says tie_word_embeddings, but %s is stored and is not the embedding: it is used",
        path,
        config.lm_head_name,
    )
    return replace(config, tie_word_embeddings=False)


def _family_fields(whole: ConfigFields, family: Family) -> ConfigFields:
    """Return the language model's fields, with what is the family's where they say nothing."""
    fields = _text_fields(whole) if isinstance(whole.get("text_config"), dict) else whole
    unsaid = family.defaults.keys() - NULL_IS_NONE
    said = {name: value for name, value in fields.values.items() if value is not None or name not in unsaid}
    return ConfigFields(whole.file, {**family.defaults, **said})


def _text_fields(whole: ConfigFields) -> ConfigFields:
    """Return the language model's fields; what its own section leaves unsaid may stand beside it."""
    text = whole.section("text_config")
    above = {name: value for name, value in whole.values.items() if name not in ("text_config", "vision_config")}
    said = {name: value for name, value in text.values.items() if value is not None or name not in above}
    tied = {name: above[name] for name in ("tie_word_embeddings",) if name in above}  # said of the whole model
    return ConfigFields(whole.file, {**above, **said, **tied})


def _architecture(fields: ConfigFields, impl: ModelImpl) -> str:
    names = fields.get("architectures")
    listed = [str(name) for name in names] if isinstance(names, list) else []
    known = next((name for name in listed if name in FAMILIES), None)
    if impl != "transformers" and known is not None:
        text = _family_fields(fields, FAMILIES[known])
        other = next((name for name in FAMILIES[known].zeros if text.get(name) != 0), None)
        if other is None:
            return known
        if impl == "raypp":
            hint = "transformers' modules compute it: --model-impl auto"
            raise text.error(other, repr(text.get(other)), "0 for raypp's own layers", hint)
    text = fields.get("text_config")
    of_text = TEXT_FAMILIES.get(str(text.get("model_type"))) if isinstance(text, dict) else None
    if impl != "transformers" and of_text is not None:
        return of_text
    if impl != "raypp" and listed and "agle" not in str(names):
        return f"{TRANSFORMERS}:{listed[0]}"
    raise ModelLoadError(
        f"{fields.file}: raypp does not have this architecture",
        got=names if names else f"architectures={names!r}, model_type={fields.get('model_type')!r}",
        expected=f"one of {', '.join(FAMILIES)}",
        hint="the head of a draft goes beside its model: --draft-model" if "agle" in str(names) else None,
    )


@cache
def _log_code(path: Path) -> None:
    _LOG.warning("%s: code that comes with the model is run, for trust_remote_code is set", path)


def _transformers_config(
    path: Path, whole: ConfigFields, architecture: str, *, trusts_code: bool, has_options: bool
) -> ModelConfig:
    """Return what a model of transformers' modules needs, as these say it.

    Raises:
        ModelLoadError: transformers does not have it, or it needs what raypp cannot give.
    """
    name = architecture.partition(":")[2]
    if trusts_code and whole.get("auto_map"):
        _log_code(path)
    found = asked(PROBE, path, trusts_code=trusts_code)
    if (error := found.get("error")) is not None:
        raise ModelLoadError(
            f"{whole.file}: {name} does not run by transformers' modules: {error['message']}",
            got=error["got"],
            expected=error.get("expected"),
            hint=page("models"),
        )
    if name != found["class"] and not name.endswith(_WITH_TOWER):
        raise whole.error("architectures", name, f"{found['class']}, which transformers has for this model_type")
    text = ConfigFields(whole.file, {**whole.values, **(whole.get("text_config") or {})})
    tied = {"tie_word_embeddings": found["tie_word_embeddings"]}
    quantization = read_quantization(ConfigFields(text.file, {**text.values, **tied}))
    if has_options:
        raise text.error("rope_scaling", "an option", "none: transformers' modules rotate as config.json says")
    family = FAMILIES.get(name)
    tower = None if family is None or family.vision is None or family.vision.kind != "gemma4" else family.vision
    return ModelConfig(
        architecture=architecture,
        vision=None if tower is None else read_vision_config(path, whole, found["hidden_size"], tower),
        vocab_size=found["vocab_size"],
        hidden_size=found["hidden_size"],
        intermediate_size=0,
        **_measured(found),
        rms_norm_eps=0.0,
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=found["tie_word_embeddings"],
        max_position_embeddings=found["max_position_embeddings"] or _USUAL_POSITIONS,
        dtype=read_dtype(text),
        quantization=None if quantization is None else quantization.renamed(name_of_text),
        eos_token_ids=_eos_token_ids(path, ConfigFields(text.file, {**text.values, "vocab_size": found["vocab_size"]})),
        layer_inputs=LayerInputs(*found["layer_inputs"]),
        modules_behind=tuple(found["modules_behind"]),
        trusts_code=trusts_code,
    )


def member_of_modules(config: ModelConfig, path: Path, count: int) -> ModelConfig:
    """Return the sizes of one of `count` members of a stage of transformers' modules; all but the vocabulary's are cut.

    Args:
        config: Whole.
        path: The model's directory.
        count: Of the members.

    Raises:
        ConfigError: the modules cannot be cut so.
    """
    found = asked(PROBE, path, str(count), trusts_code=config.trusts_code)
    if (error := found.get("error")) is not None:
        raise ConfigError(
            f"transformers' modules cannot be cut for members of a stage: {error['message']}",
            got=f"tensor_parallel_size={count}; {error['got']}",
            expected=error.get("expected") or "tensor_parallel_size = 1",
        )
    return replace(config, num_members=count, **_measured(found))


def _measured(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of the layers of transformers' modules."""
    linear, cut = MeasuredLinear._make, CutSize._make
    tuples: dict[str, Callable[..., Any]] = {"linears": linear, "experts": linear, "cuts": cut}
    return {
        "attention": tuple(map(_measured_mixer, found["attention"], found["states"])),
        "measured": tuple(
            MeasuredLayer(**{**layer, **{name: tuple(map(make, layer[name])) for name, make in tuples.items()}})
            for layer in found["layers"]
        ),
    }


def _measured_mixer(attends: Mapping[str, Any] | None, states: Sequence[Mapping[str, Any]]) -> LayerMixer:
    """Return what a layer of transformers' modules keeps, as `raypp.models.transformers_probe` says it."""
    attention = None if attends is None else AttentionConfig(**attends)
    if attention is not None and not states:
        return attention
    modules = [
        ModuleState(
            **{
                **state,
                "tensors": tuple(StateTensor(**{**each, "shape": tuple(each["shape"])}) for each in state["tensors"]),
            }
        )
        for state in states
    ]
    return ModulesConfig(modules=tuple(modules), attention=attention)


def refuse_unsupported(fields: ConfigFields, activation: Activation = "silu") -> None:
    """Refuse what changes a layer's computation and raypp does not have."""
    name, known = _ACTIVATIONS[activation]
    if fields.get(name) not in (None, *known):
        raise fields.error(name, repr(fields.get(name)), " or ".join(known))
    if (sees := fields.get("use_bidirectional_attention")) not in (None, False, "vision"):  # tokens of images alone
        raise fields.error("use_bidirectional_attention", repr(sees), "false: a token sees those before it")


def _least_intermediate(family: Family) -> int | None:
    """Return the size of dense layers where config.json says none: families with a shared MLP and no dense layers."""
    experts = family.experts
    return 1 if experts is not None and experts.shared is not None and not experts.counts_shared else None


def _read_layers(
    fields: ConfigFields,
    family: Family,
    attention: AttentionConfig,
    num_layers: int,
    local_rope: RopeConfig | None = None,
) -> list[LayerMixer]:
    """Return what each layer is: of `attention` with a window or without one, or a gated delta net.

    Layers with a window have the `local_rope`, if there is one.

    Raises:
        ModelLoadError: a field is wrong, or names a kind of layer that the family does not have.
    """
    interval, linear = family.full_attention_interval, set[int]()
    kinds = fields.get("layer_types")
    if interval is not None and kinds is None:
        interval = fields.integer("full_attention_interval", interval)
        linear = {index for index in range(num_layers) if (index + 1) % interval}
    elif interval is not None and isinstance(kinds, list):
        linear = {index for index, kind in enumerate(kinds) if kind == _LINEAR}
    windows = read_windows(fields, family.windows, num_layers, has_linear=interval is not None)
    if len(linear) == num_layers:
        raise fields.error("layer_types", f"{num_layers} of {_LINEAR}", f"at least one {_FULL}")
    delta = replace(_read_gated_delta(fields), is_joined=family.has_joined_projections) if linear else attention
    local = attention if local_rope is None else replace(attention, rope=local_rope)
    layers = [attention if window is None else replace(local, window=window) for window in windows]
    return [delta if index in linear else layer for index, layer in enumerate(layers)]


def _read_gated_delta(fields: ConfigFields) -> GatedDeltaConfig:
    if fields.get("attn_output_gate") is False:
        raise fields.error("attn_output_gate", "false", "true: attention's output has a gate in this family")
    num_k_heads, num_v_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if num_v_heads % num_k_heads:
        raise fields.error("linear_num_value_heads", num_v_heads, f"a multiple of linear_num_key_heads={num_k_heads}")
    kernel_size = fields.integer("linear_conv_kernel_dim", 4)
    if not 2 <= kernel_size <= _LARGEST_KERNEL:
        raise fields.error("linear_conv_kernel_dim", kernel_size, f"2 to {_LARGEST_KERNEL}")
    state_dtype = fields.get("mamba_ssm_dtype") or _STATE_DTYPES[0]
    if state_dtype not in _STATE_DTYPES:
        raise fields.error("mamba_ssm_dtype", repr(state_dtype), f"one of {', '.join(_STATE_DTYPES)}")
    return GatedDeltaConfig(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=fields.integer("linear_key_head_dim", 128),
        v_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=kernel_size,
        state_dtype=state_dtype,
    )


def read_windows(
    fields: ConfigFields, windows: Windows | None, num_layers: int, *, has_linear: bool = False
) -> list[int | None]:
    """Return the window of each layer; None: it sees all, or does not attend.

    Args:
        fields: Of the language model.
        windows: Of the family.
        num_layers: Of the model.
        has_linear: Whether layers may be gated delta nets.

    Raises:
        ModelLoadError: a field is wrong, or names a kind of attention that the family does not have.
    """
    known = {_FULL, _SLIDING} | ({_LINEAR} if has_linear else set())
    window, first = None, 0
    if windows is not None and (not windows.has_switch or fields.get("use_sliding_window")):
        window = windows.default
        if "sliding_window" in fields.values:
            window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
        if windows.first_layer is not None:
            first = fields.integer("max_window_layers", windows.first_layer)
    kinds = fields.get("layer_types")
    if kinds is None:
        interval = None if windows is None else windows.interval
        if interval is not None:
            interval = fields.integer("sliding_window_pattern", interval)
        sees_all = {index for index in range(num_layers) if interval is not None and not (index + 1) % interval}
        return [window if index >= first and index not in sees_all else None for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= known:
        raise fields.error("layer_types", kinds, f"{num_layers} of {', '.join(sorted(known))}")
    if _SLIDING in kinds and window is None:
        raise fields.error("sliding_window", window, f"a number of tokens: layer_types has {_SLIDING}")
    return [window if kind == _SLIDING else None for kind in kinds]


def read_dtype(fields: ConfigFields) -> str:
    """Return the checkpoint's type."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:  # beside quantized weights nothing has 32 bits
        return "float32" if fields.get("quantization_config") is None else "bfloat16"
    if dtype not in CHECKPOINT_DTYPES:
        raise fields.error(name, repr(dtype), f"one of {', '.join(CHECKPOINT_DTYPES)}")
    return cast(str, dtype)


def _eos_token_ids(path: Path, fields: ConfigFields) -> tuple[int, ...]:
    """Return the ids of both files: chat models name the end of a turn in one and the end of a text in the other."""
    sources, vocab_size = [fields], fields.integer("vocab_size")
    generation = path / GENERATION_CONFIG
    if generation.is_file():
        sources.append(ConfigFields(generation, read_json(generation)))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [value] if value is not None else []
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise source.error("eos_token_id", repr(value), "a token id or a list of them")
        if not all(0 <= token < vocab_size for token in listed):
            raise source.error("eos_token_id", repr(value), f"token ids from 0 to {vocab_size - 1}")
        ids.update(listed)
    return tuple(sorted(ids))


def has_fp8_kv_cache(fields: ConfigFields) -> bool:
    """Return whether config.json says so.

    Raises:
        ModelLoadError: it has a scheme of another kind.
    """
    quantization = fields.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if scheme is None:
        return False
    if not isinstance(scheme, dict):
        raise fields.error(_KV_SCHEME, repr(scheme), "an object")
    said = {**_KV_WHERE_UNSAID, **{name: value for name, value in scheme.items() if value is not None}}
    others = {name: said.get(name) for name, value in _KV_KNOWN.items() if said.get(name) != value}
    if others:
        known = ", ".join(f"{name}={value}" for name, value in _KV_KNOWN.items())
        raise fields.error(
            _KV_SCHEME,
            ", ".join(f"{name}={value}" for name, value in others.items()),
            f"{known}: one scale per layer, measured before, for numbers in float8_e4m3fn",
        )
    return True
