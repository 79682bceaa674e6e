"""Reads a draft head's kind and sizes, and what it shares with its target, before any weight is read.

Three kinds, all of one layer (`raypp.models.draft_head` computes them):

    eagle    arXiv:2401.15077: guesses the target's last hidden state after the next token
    eagle3   arXiv:2503.01840: drafts from hidden states of several depths, often for a smaller vocabulary of its own
    mtp      arXiv:2404.19737, arXiv:2412.19437 section 2.2: like eagle, with norms before and after; a layer of the
             target's own kind, in the target's checkpoint, with its embedding and LM head

Published heads differ in what they bring, and their config.json says little of it; the names of their tensors do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from raypp.errors import ModelLoadError
from raypp.models.attention_config import AttentionConfig
from raypp.models.checkpoint_names import (
    PICKLED_FILE,
    PLAIN_TYPES,
    StoredTensor,
    has_own_form,
    has_safetensors,
    no_weights,
    stored_tensors,
)
from raypp.models.config import ModelConfig, read_dtype, refuse_unsupported
from raypp.models.config_fields import ConfigFields, read_json
from raypp.models.families import FAMILIES
from raypp.models.mistral_format import PARAMS_FILE
from raypp.models.rope_config import read_rope
from raypp.models.sizes import Product, WeightReads, layer_products, layer_sizes

HeadKind = Literal["eagle", "eagle3", "mtp"]

_TARGET_NAMES = [name for name, family in FAMILIES.items() if family.vision is None]
_DECORATIONS = re.compile(r"eagle3?|forcausallm|speculator|draftmodel|model", re.IGNORECASE)
_FAMILY_NAMES = {"", *(_DECORATIONS.sub("", name) for name in _TARGET_NAMES)}  # "": the head names no family
_EXPECTED = "an EAGLE or EAGLE-3 head, such as LlamaForCausalLMEagle3 or EagleLlamaForCausalLM"
_FUSED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # tensors of all experts
_NEW_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")  # of heads that compute otherwise


@dataclass(frozen=True)
class MtpNames:
    """What an MTP head's tensors are called."""

    fc: str = "fc"
    of_tokens: str = "pre_fc_norm_embedding"
    of_states: str = "pre_fc_norm_hidden"
    last: str = "norm"
    layer: str = "layers.0."


_IN_A_LAYER = MtpNames("eh_proj", "enorm", "hnorm", "shared_head.norm", "")


@dataclass(frozen=True, kw_only=True)
class DraftHeadConfig:
    """A head's architecture and sizes. H its hidden size, H_t and V the target's hidden size and vocabulary."""

    kind: HeadKind
    layer: ModelConfig  # of the one layer; its `vocab_size` is the head's own, `tie_word_embeddings` means nothing
    target_hidden_size: int
    target_vocab_size: int
    aux_depths: tuple[int, ...]  # eagle3: the target's layers after which hidden states are taken, in their order
    layer_prefix: str
    mtp_names: MtpNames = MtpNames()
    has_fc_bias: bool
    has_input_norm: bool
    has_embedding: bool  # else it uses the target's
    has_lm_head: bool  # else it uses the target's
    maps_vocabulary: bool  # whether its token ids must be mapped to the target's
    norm_before_residual: bool  # eagle3: whether the normalized state is what the layer adds to
    has_8_bit_weights: bool = False  # whether products of few rows read weights of 8 bits, which are kept besides

    @property
    def weights_name(self) -> Literal["model", "fp8"]:
        """What products of few rows read, as the configuration calls it."""
        return "fp8" if self.has_8_bit_weights else "model"

    @property
    def fc_inputs(self) -> int:
        """Columns of the product that makes the layer's input."""
        if self.kind != "eagle3":
            return 2 * self.target_hidden_size
        return len(self.aux_depths) * self.target_hidden_size

    @property
    def attention_inputs(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return self.layer.hidden_size * (2 if self.kind == "eagle3" else 1)

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of what the last stage keeps for it, the target's embedding not counted."""
        besides = self._fc.num_elements + self._num_other_elements + self.has_lm_head * self._lm_head.num_elements
        besides += self.has_embedding * self.target_vocab_size * self.layer.hidden_size
        rounded = (*self._products, self._lm_head, self._fc) if self.has_8_bit_weights else ()
        kept = self._reads(dtype_bytes).total + besides * dtype_bytes
        return kept + sum(product.rounded_bytes for product in rounded)

    def drafting_bytes(self, num_drafts: float, dtype_bytes: int) -> float:
        """Return the bytes of weights that are read to propose so many drafts, for up to 64 rows."""
        num_fc = 1 if self.kind == "eagle3" else num_drafts  # eagle3 joins states of the target alone
        per_draft = self._reads(dtype_bytes).of(1) + self._num_other_elements * dtype_bytes
        per_draft += self._bytes_read(self._lm_head, dtype_bytes)
        if self.has_8_bit_weights:
            per_draft -= sum(each.num_elements * dtype_bytes - each.rounded_bytes for each in self._products)
        return num_drafts * int(per_draft) + num_fc * self._bytes_read(self._fc, dtype_bytes)

    def _reads(self, dtype_bytes: int) -> WeightReads:
        """Return what there is of the layer: in full where it is rounded besides; experts keep their form."""
        of_form, plain = (
            layer_sizes(layer, dtype_bytes)[0].reads for layer in (self.layer, replace(self.layer, quantization=None))
        )
        return replace(of_form, always=plain.always) if self.has_8_bit_weights else of_form

    def _bytes_read(self, product: Product, dtype_bytes: int) -> int:
        return product.rounded_bytes if self.has_8_bit_weights else product.num_elements * dtype_bytes

    @property
    def _lm_head(self) -> Product:
        """Its own or the target's, or a member's part of it."""
        return Product("lm_head", self.layer.vocab_rows, self.layer.hidden_size)

    @property
    def _fc(self) -> Product:
        return Product(self.mtp_names.fc, self.layer.hidden_size, self.fc_inputs)

    @property
    def _products(self) -> list[Product]:
        """Those of the layer that every draft reads: all but experts."""
        first, *others = layer_products(self.layer, 0)[0]
        return [first._replace(columns=first.columns - self.layer.hidden_size + self.attention_inputs), *others]

    @property
    def _num_other_elements(self) -> int:
        """Beyond a usual layer's: norms, biases, and inputs of attention."""
        hidden = self.layer.hidden_size
        num_norms = {"mtp": 3, "eagle3": 2, "eagle": self.has_input_norm - 1}[self.kind]  # a layer has two
        wider = (self.attention_inputs - hidden) * self._products[0].rows
        return wider + (num_norms + self.has_fc_bias) * hidden


def checkpoint_shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor in a directory's safetensors files, else in its `pytorch_model.bin`.

    Raises:
        ModelLoadError: no such files, or not readable.
    """
    if has_safetensors(path):
        return {name: tensor.shape for name, tensor in stored_tensors(path).items()}
    if not (path / PICKLED_FILE).is_file():
        raise no_weights(path, beside=f", or {PICKLED_FILE}")
    from raypp.models.weights import PickledWeights  # with torch, which safetensors' headers do without

    return PickledWeights(path / PICKLED_FILE).shapes()


def load_mtp_config(path: Path, target: ModelConfig, *, is_dummy: bool = False) -> DraftHeadConfig | None:
    """Return the head in a model's own checkpoint; None: it has none.

    Args:
        path: The model's directory.
        target: The model.
        is_dummy: There are no weights: all models of its family have a head.
    """
    prefix = target.mtp_prefix
    if prefix is None:
        return None
    tensors = {} if is_dummy else {name: one for name, one in stored_tensors(path).items() if name.startswith(prefix)}
    names = mtp_names(target)
    if not is_dummy and not any(name.startswith(f"{prefix}{names.fc}.") for name in tensors):
        return None
    experts = None if target.experts is None else replace(target.experts, dense_layers=frozenset())
    form = target.quantization
    if form is not None and form.format != "online_fp8":
        form = replace(form, skipped=form.skipped + _plain_modules(prefix, tensors))
    layer = replace(target, attention=target.attending[:1], experts=experts, weight_prefix=prefix, quantization=form)
    return DraftHeadConfig(
        kind="mtp",
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        aux_depths=(),
        layer_prefix=names.layer,
        mtp_names=names,
        has_fc_bias=False,
        has_input_norm=True,
        has_embedding=False,
        has_lm_head=False,
        maps_vocabulary=False,
        norm_before_residual=False,
    )


def mtp_names(target: ModelConfig) -> MtpNames:
    """Return what the tensors of a model's own head are called."""
    return _IN_A_LAYER if target.has_mtp_layer else MtpNames()


def _plain_modules(prefix: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Return the modules of a head whose weights are not quantized, as `Quantization.skipped` names them.

    Tools that quantize models leave heads out, and config.json does not always say so.

    Args:
        prefix: Of the head's tensors.
        tensors: All of them.
    """
    if tensors and all(tensor.dtype in PLAIN_TYPES for tensor in tensors.values()):
        return (prefix.rstrip("."),)
    plain = [name for name, tensor in tensors.items() if tensor.dtype in PLAIN_TYPES]
    fused = {name.rpartition(".")[0] for name in plain if name.endswith(_FUSED_EXPERTS)}
    return (*(name.removesuffix(".weight") for name in plain if name.endswith(".weight")), *sorted(fused))


def load_draft_head_config(path: Path, target: ModelConfig, *, is_dummy: bool = False) -> DraftHeadConfig:
    """Read a head's config.json and the names of its tensors, and check that it fits its target.

    Args:
        path: The head's directory.
        target: The model that it drafts for.
        is_dummy: There are no weights: the head brings what such heads usually bring.

    Raises:
        ModelLoadError: no head, one of a kind that raypp does not have, or one for another model.
    """
    file = path / "config.json"
    if has_own_form(path):
        expected = "config.json, and the head's weights in model.safetensors"
        raise ModelLoadError(f"{path}: heads are not read in Mistral's own form", got=PARAMS_FILE, expected=expected)
    values = read_json(file)
    of_layer = values.get("transformer_layer_config")  # of `speculators`; published heads are flat
    fields = ConfigFields(file, {**of_layer, **values} if isinstance(of_layer, dict) else values)
    shapes = None if is_dummy else checkpoint_shapes(path)
    kind = _kind(fields, shapes)
    _refuse(fields)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    vocab_size = fields.integer("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise fields.error(
            "vocab_size", vocab_size, f"{target.vocab_size}, the target's", "the head is of another model"
        )
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size) if kind == "eagle3" else vocab_size
    if shapes is None:
        shapes = _usual_shapes(kind, hidden_size, draft_vocab_size, vocab_size)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in shapes) else "layers.0."
    rope, _ = read_rope(fields, fields.integer("max_position_embeddings", target.max_position_embeddings))
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    layer = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        attention=(
            AttentionConfig(
                num_heads=num_heads,
                num_kv_heads=fields.integer("num_key_value_heads", num_heads),
                head_dim=head_dim,
                v_dim=head_dim,
                rope=rope,
            ),
        ),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in shapes,
        attention_output_bias=f"{prefix}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{prefix}mlp.gate_proj.bias" in shapes,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in shapes,
        tie_word_embeddings=False,
        max_position_embeddings=target.max_position_embeddings,
        dtype=read_dtype(fields),
        eos_token_ids=target.eos_token_ids,
    )
    config = DraftHeadConfig(
        kind=kind,
        layer=layer,
        target_hidden_size=fields.integer("target_hidden_size", target.hidden_size),
        target_vocab_size=target.vocab_size,
        aux_depths=_aux_depths(fields, target) if kind == "eagle3" else (),
        layer_prefix=prefix,
        has_fc_bias="fc.bias" in shapes,
        has_input_norm=kind == "eagle3" or f"{prefix}input_layernorm.weight" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        has_lm_head="lm_head.weight" in shapes,
        maps_vocabulary="d2t" in shapes,
        norm_before_residual=fields.flag("norm_before_residual"),
    )
    _check_fits(fields, config, target, shapes)
    return config


def _kind(fields: ConfigFields, shapes: Mapping[str, tuple[int, ...]] | None) -> HeadKind:
    names = fields.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and "eagle" in name.lower() and _DECORATIONS.sub("", name) in _FAMILY_NAMES:
            return "eagle3" if "eagle3" in name.lower() else "eagle"
        # The first heads carry their target's name; what they are, their tensors say.
        if name in _TARGET_NAMES and shapes is not None and "fc.weight" in shapes:
            return "eagle3" if any(tensor.startswith("midlayer.") for tensor in shapes) else "eagle"
    raise ModelLoadError(f"{fields.file}: raypp does not have this draft head", got=names, expected=_EXPECTED)


def _refuse(fields: ConfigFields) -> None:
    refuse_unsupported(fields)
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error("quantization_config", repr(method), "a head in bfloat16, float16 or float32")
    if fields.integer("num_hidden_layers", 1) != 1:
        raise fields.error("num_hidden_layers", fields.get("num_hidden_layers"), "1: heads of one layer")
    for name in _NEW_FLAGS:
        if fields.get(name):
            raise fields.error(name, fields.get(name), "false: raypp does not have that kind of head")


def _usual_shapes(kind: HeadKind, hidden: int, draft_vocab: int, vocab: int) -> dict[str, tuple[int, ...]]:
    if kind == "eagle":
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.hidden_norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    return shapes | ({"d2t": (draft_vocab,)} if draft_vocab != vocab else {})


def _aux_depths(fields: ConfigFields, target: ModelConfig) -> tuple[int, ...]:
    """Return after how many layers each hidden state is taken.

    `eagle_config` names layers whose outputs they are; a list beside it names layers whose inputs they are. Without
    either they are those of the paper's code.
    """
    inner = fields.get("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = inner.get(name) if isinstance(inner, dict) else None
    depths = [layer + 1 for layer in outputs] if outputs else fields.get(name)
    if not depths:
        depths = (2, target.num_layers // 2, target.num_layers - 3)
    if not all(isinstance(depth, int) and 0 <= depth <= target.num_layers for depth in depths):
        raise fields.error(
            name, list(depths), f"depths up to {target.num_layers}, the target's layers", "the head is of another model"
        )
    return tuple(depths)


def _check_fits(
    fields: ConfigFields, config: DraftHeadConfig, target: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a head that is of another model, or that brings too little."""
    if config.target_hidden_size != target.hidden_size:
        raise fields.error(
            "target_hidden_size", config.target_hidden_size, f"{target.hidden_size}, the target's hidden_size"
        )
    hidden = config.layer.hidden_size
    shares = config.kind == "eagle" or not config.has_embedding or not config.has_lm_head
    if shares and hidden != target.hidden_size:
        raise fields.error(
            "hidden_size", hidden, f"{target.hidden_size}, the target's: the head uses its embedding or LM head"
        )
    attention = config.layer.attending[0]
    if attention.num_heads % attention.num_kv_heads:
        raise fields.error("num_key_value_heads", attention.num_kv_heads, f"a divisor of {attention.num_heads}")
    if config.layer.vocab_size != target.vocab_size and not (config.maps_vocabulary and config.has_lm_head):
        raise fields.error(
            "draft_vocab_size", config.layer.vocab_size, f"{target.vocab_size}, or tensors d2t and lm_head.weight"
        )
    wanted = {"fc.weight": (hidden, config.fc_inputs), "lm_head.weight": (config.layer.vocab_size, hidden)}
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            raise ModelLoadError(
                f"{fields.file.parent}: the draft head does not fit {target.num_layers} layers of {target.hidden_size}",
                got=f"{name} {list(shapes[name])}",
                expected=f"{list(shape)}"
                + (f" for hidden states at depths {config.aux_depths}" if config.aux_depths else ""),
                hint="the head is of another model",
            )
