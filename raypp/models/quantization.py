"""How a checkpoint's weights are quantized, by the `quantization_config` of its config.json. Needs no torch.

Which tensors a format stores, and how they become a `raypp.ops.weight.Weight`, is in `raypp.models.weight_formats`.

Sources: the published checkpoints' config.json; the documentation of transformers' `FineGrainedFP8Config`,
`AwqConfig`, `GPTQConfig`, `Mxfp4Config` and `AutoRoundConfig`, of compressed-tensors' `QuantizationScheme`, and of
ModelOpt's export.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from raypp.models.config_fields import ConfigFields

WeightFormat = Literal["fp8", "int8", "awq", "gptq", "compressed_int4", "mxfp4", "nvfp4", "online_fp8"]
"""Tensors by which a checkpoint stores a weight; `online_fp8` is 16 bits that become FP8 when they are read."""

LM_HEAD_MODULE = "lm_head"
_FIELD = "quantization_config"
_PATTERN = "re:"
_EXPERTS = ("experts",)
_ALL_LINEAR = "Linear"  # the class, as compressed-tensors' `targets` may name one
_FOUR_BITS = ("awq", "gptq", "compressed_int4", "mxfp4", "nvfp4")
_SCALE_BYTES = {"mxfp4": 2, "awq": 2, "gptq": 2, "compressed_int4": 2}
_USUAL_SCALE_BYTES = 4
_LEAST_BLOCK = 32
_TILE = 64
"""Inputs of a block that a GPU's kernels multiply."""
FP4_FORMATS: dict[WeightFormat, int] = {"nvfp4": 16, "mxfp4": 32}
"""Inputs that share a scale, by the form of floats of 4 bits."""
_COMPRESSED_FORMATS = {
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("float", 4): ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    ("int", 4): ("pack-quantized",),
    ("int", 8): ("int-quantized", "naive-quantized", "pack-quantized"),
}
"""By the type and the bits of an element."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The form of a model's linear layers or experts, embedding and LM head aside."""

    format: WeightFormat
    block: tuple[int, int]  # outputs and inputs that share a scale; 0 inputs: all of them
    has_zeros: bool = False  # int4: each block has a zero of its own
    has_order: bool = False  # int4: inputs are sorted by their group (act-order)
    zero_offset: int = 0  # gptq: what stored zeros lack
    skipped: tuple[str, ...] = ()  # modules, or patterns behind `re:`, that stay in 16 bits
    only: tuple[str, ...] = ()  # the modules, or patterns, that are quantized; none: all linear layers
    is_for_gpus: bool = False  # whether it is of weights that a GPU's kernels multiply as they are

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if self.format in _FOUR_BITS else 8

    def renamed(self, rename: Callable[[str], str]) -> Quantization:
        """Return the same with other names of modules; patterns stay."""
        return replace(self, skipped=tuple(map(rename, self.skipped)), only=tuple(map(rename, self.only)))

    @property
    def is_of_experts(self) -> bool:
        """Whether the checkpoint has the weights of all experts as one in this form, and nothing else."""
        return self.only == _EXPERTS

    def weight_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the bytes of one weight: elements, scales, zeros, order."""
        rows, columns = self.block
        num_blocks = math.ceil(num_outputs / rows) * (math.ceil(num_inputs / columns) if columns else 1)
        scale_bytes = _SCALE_BYTES.get(self.format, _USUAL_SCALE_BYTES)
        total = num_outputs * num_inputs * self.bits // 8 + num_blocks * (scale_bytes + self.has_zeros)
        return total + 8 * num_inputs * self.has_order

    @property
    def has_gpu_product(self) -> bool:
        """Whether a GPU multiplies it as it is; `raypp.ops.cuda.quantized_projection` says it of a weight."""
        rows, columns = self.block
        if self.format in ("nvfp4", "int8"):
            return False
        if columns == 0:
            return True
        if self.bits == 4:
            return rows == 1 and (columns == _LEAST_BLOCK or columns % _TILE == 0)
        return columns >= _LEAST_BLOCK and columns & (columns - 1) == 0

    def is_kept(self, num_inputs: int, *, is_part: bool, is_of_experts: bool) -> bool:
        """Return whether a weight keeps the form, by its inputs: parts in order, of whole bytes; others become plain.

        A GPU's kernels of experts ask for more, as `raypp.ops.cuda.expert_products.has_kernel` says.

        Args:
            num_inputs: All, or a part.
            is_part: Of a member, beside other inputs.
            is_of_experts: Whether it is of one of several experts.
        """
        is_for_kernels, block = is_of_experts and self.is_for_gpus, self.block[1]  # 0: a scale for all inputs
        if (self.has_order and (is_part or is_for_kernels)) or (is_part and self.bits == 4 and num_inputs % 2):
            return False
        block = math.gcd(block, num_inputs) if is_part and block else block
        is_multiplied = block % 128 == 0 if self.bits == 8 else block == 32 or block % 64 == 0
        return not is_for_kernels or (num_inputs % 32 == 0 and is_multiplied)

    def covers(self, module: str) -> bool:
        """Return whether a linear layer is quantized, by its whole name, such as `model.layers.0.mlp.gate_proj`.

        A name that is skipped may be all of a module's name, or some of its parts: `model.layers.0`, `mlp.gate`.
        """
        (skipped, only) = self._named
        return not _names_module(*skipped, module) and (not self.only or _names_module(*only, module))

    @cached_property
    def _named(self) -> tuple[_Named, _Named]:
        return _sorted_names(self.skipped), _sorted_names(self.only)


_Named = tuple[frozenset[str], list[re.Pattern[str]]]


def _sorted_names(listed: Sequence[str]) -> _Named:
    """Return the names, and the patterns. A star in a name is any text."""
    patterns = [name.removeprefix(_PATTERN) for name in listed if name.startswith(_PATTERN)]
    others = [name.strip(".") for name in listed if not name.startswith(_PATTERN)]
    globs = [name for name in others if "*" in name]
    patterns += [fnmatch.translate(name + below) for name in globs for below in ("", ".*")]
    return frozenset(name for name in others if "*" not in name), [re.compile(pattern) for pattern in patterns]


def _names_module(names: frozenset[str], patterns: list[re.Pattern[str]], module: str) -> bool:
    if names:
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        if any(".".join(parts[start:end]) in names for end in ends for start in range(end)):
            return True
    return any(pattern.match(module) for pattern in patterns)


_GATES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
ONLINE_FP8 = Quantization(format="online_fp8", block=(1, 0), skipped=_GATES)
"""Weights in 16 bits that become FP8 when they are read, with a scale per output.

What chooses experts stays, and so does what a whole state decays by.
"""


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Return how config.json says that weights are quantized, None where it does not.

    Raises:
        ModelLoadError: a method, or a form of one, that raypp does not have.
    """
    value = fields.get(_FIELD)
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise fields.error(_FIELD, repr(value), "an object")
    section = _Section(fields.file, value, f"{_FIELD}.")
    method = section.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise section.error("quant_method", _said(method), f"one of {', '.join(_READERS)}, or weights in 16 bits")
    return reader(section, fields)


class _Section(ConfigFields):
    """An object inside of config.json; errors name its fields by their whole path."""

    def below(self, name: str) -> _Section:
        """Return an object in here."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.error(name, _said(value), "an object")
        return _Section(self.file, value, f"{self.path}{name}.")

    def require(self, name: str, allowed: Sequence[object], *, where_unsaid: object = None) -> Any:
        """Return a field, which must be one of some values; what is null counts as unsaid."""
        value = self.get(name)
        value = where_unsaid if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise self.error(name, _said(self.get(name)), " or ".join(_said(one) for one in allowed))
        return value

    def group_size(self, name: str = "group_size") -> int:
        """Return the inputs that share a scale, 0 for all of them."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value >= 1):
            raise self.error(name, _said(value), "a positive integer, or -1: all inputs of an output")
        return max(value, 0)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of modules or patterns."""
        value = self.get(name)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
            raise self.error(name, _said(value), "a list of names of modules")
        for one in listed:
            self.check_pattern(name, one)
        return tuple(listed)

    def check_pattern(self, name: str, module: str, mark: str = _PATTERN) -> None:
        """Refuse a pattern, behind its mark, that is none."""
        if module.startswith(mark):
            try:
                re.compile(module.removeprefix(mark))
            except re.error as error:
                raise self.error(name, _said(module), f"a regular expression behind {mark} ({error})") from error


def _said(value: object) -> str:
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _read_fp8(section: _Section, _: ConfigFields) -> Quantization:
    section.require("fmt", ("e4m3", "float8_e4m3fn"), where_unsaid="e4m3")
    section.require("activation_scheme", ("dynamic", "static"), where_unsaid="dynamic")
    return Quantization(
        format="fp8",
        block=_block(section, "weight_block_size") if section.get("weight_block_size") is not None else (1, 0),
        skipped=section.names("modules_to_not_convert") + section.names("ignored_layers"),
    )


def _block(section: _Section, name: str) -> tuple[int, int]:
    value = section.get(name)
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ):
        raise section.error(name, _said(value), "two positive integers: outputs and inputs that share a scale")
    return value[0], value[1]


def _read_awq(section: _Section, _: ConfigFields) -> Quantization:
    section.require("bits" if section.get("bits") is not None else "w_bit", (4,))
    section.require("version", ("gemm",), where_unsaid="gemm")
    section.require("zero_point", (True,), where_unsaid=True)
    group_size = section.group_size("group_size" if section.get("group_size") is not None else "q_group_size")
    skipped = tuple(map(_anywhere, section.names("modules_to_not_convert")))
    return Quantization(format="awq", block=(1, group_size), has_zeros=True, skipped=skipped)


def _anywhere(part: str) -> str:
    """Return the pattern of modules whose names hold a text, as AWQ's tools take it; a dot at its end ends a part."""
    if part.startswith(_PATTERN):
        return part
    return rf"{_PATTERN}.*{re.escape(part.rstrip('.'))}" + (r"(\.|$)" if part.endswith(".") else "")


def _read_gptq(section: _Section, _: ConfigFields) -> Quantization:
    section.require("bits", (4,))
    section.require(LM_HEAD_MODULE, (False,), where_unsaid=False)
    section.require("is_marlin_format", (False,), where_unsaid=False)
    section.require("pack_dtype", ("int32",), where_unsaid="int32")
    if section.get("modules_in_block_to_quantize"):
        listed = _said(section.get("modules_in_block_to_quantize"))
        raise section.error("modules_in_block_to_quantize", listed, "nothing: all linear layers are quantized")
    name = "format" if section.get("checkpoint_format") is None else "checkpoint_format"
    form = section.require(name, ("gptq", "gptq_v2"), where_unsaid="gptq")
    group_size = section.group_size()
    return Quantization(
        format="gptq",
        block=(1, group_size),
        has_zeros=not section.require("sym", (True, False), where_unsaid=True),
        has_order=section.require("desc_act", (False, True), where_unsaid=False) and group_size > 0,
        zero_offset=1 if form == "gptq" else 0,
        skipped=section.names("modules_to_not_convert") + _dynamic_skips(section),
    )


def _dynamic_skips(section: _Section) -> tuple[str, ...]:
    """Return the patterns of GPTQModel's `dynamic` that take modules out; others give modules bits of their own."""
    value = section.get("dynamic")
    if not value:
        return ()
    others = sorted(map(str, value)) if not isinstance(value, dict) else [one for one in value if one[:2] != "-:"]
    if others:
        raise section.error("dynamic", ", ".join(others), "patterns behind `-:` alone: all modules have the same bits")
    for one in value:
        section.check_pattern("dynamic", one, "-:")
    return tuple(_PATTERN + one[2:] for one in value)


def _read_compressed(section: _Section, model: ConfigFields) -> Quantization | None:
    """Read compressed-tensors' `config_groups`, which must agree on the weights; None if only the KV cache has a form.

    What form that is: `raypp.models.config`.
    """
    if section.get("sparsity_config"):
        section.below("sparsity_config").require("format", ("dense",), where_unsaid="dense")
    for name in ("transform_config", "moe_sparsity_config"):
        if section.get(name):
            raise section.error(name, _said(section.get(name)), "nothing: raypp reads the layers as the model has them")
    skipped = section.names("ignore")
    if not section.get("config_groups") and section.get("kv_cache_scheme"):
        return None
    groups = section.below("config_groups")
    if not groups.values:
        raise section.error("config_groups", "no group", "a group of the weights of all linear layers")
    read = {name: _read_group(section, groups.below(name), skipped) for name in groups.values}
    if len({replace(group, only=()) for group in read.values()}) > 1:
        raise section.error("config_groups", f"{len(read)} kinds of weights", "one kind for all linear layers")
    only = [group.only for group in read.values()]
    quantization = replace(next(iter(read.values())), only=sum(only, ()) if all(only) else ())
    heads = (LM_HEAD_MODULE, f"language_model.{LM_HEAD_MODULE}")  # beside a tower
    if all(map(quantization.covers, heads)) and not model.get("tie_word_embeddings"):
        raise section.error(
            "ignore", f"{len(skipped)} names without {LM_HEAD_MODULE}", f"{LM_HEAD_MODULE} among them: it is in 16 bits"
        )
    return quantization


def _read_group(section: _Section, group: _Section, skipped: tuple[str, ...]) -> Quantization:
    targets = group.names("targets")
    if not targets:
        raise group.error("targets", "nothing", "['Linear'], or names and patterns of modules")
    only = () if _ALL_LINEAR in targets else targets
    weights = group.below("weights")
    kind = weights.require("type", ("float", "int"), where_unsaid="int")
    bits = weights.require("num_bits", (4, 8))
    weights.require("dynamic", (False,), where_unsaid=False)
    form = (group if group.get("format") is not None else section).require("format", _COMPRESSED_FORMATS[kind, bits])
    if kind == "float" and bits == 4:
        return replace(_fp4(weights, form.removesuffix("-pack-quantized"), skipped), only=only)
    may_have_zeros = (kind, bits) == ("int", 4)
    has_zeros = not weights.require("symmetric", (True, False) if may_have_zeros else (True,), where_unsaid=True)
    strategies = ("channel", "group") if kind == "int" else ("tensor", "channel", "group", "block")
    default = "tensor" if weights.get("group_size") is None else "group"
    strategy = weights.require("strategy", strategies, where_unsaid=default)
    block = (1, 0)
    if strategy == "group":
        block = (1, weights.group_size())
    elif strategy == "block":
        block = _block(weights, "block_structure")
    order = weights.get("actorder")
    by_group = (True, "group", "dynamic") if may_have_zeros else ()
    if order not in (None, False, "weight", "static", *by_group):
        raise weights.error("actorder", _said(order), ("'group' or " if by_group else "") + "'weight', or nothing")
    formats: dict[tuple[str, int], WeightFormat] = {("int", 4): "compressed_int4", ("int", 8): "int8"}
    return Quantization(
        format=formats.get((kind, bits), "fp8"),
        block=block,
        has_zeros=has_zeros,
        has_order=order in by_group and block[1] > 0,
        skipped=skipped,
        only=only,
    )


def _fp4(weights: _Section, form: WeightFormat, skipped: tuple[str, ...]) -> Quantization:
    group_size = weights.require("group_size", (FP4_FORMATS[form],), where_unsaid=FP4_FORMATS[form])
    return Quantization(format=form, block=(1, group_size), skipped=skipped)


def _read_mxfp4(section: _Section, _: ConfigFields) -> Quantization:
    return replace(_fp4(section, "mxfp4", section.names("modules_to_not_convert")), only=_EXPERTS)


def _read_modelopt(section: _Section, _: ConfigFields) -> Quantization:
    algorithm = section.require("quant_algo", ("nvfp4", "fp8"))
    skipped = section.names("ignore" if section.get("ignore") is not None else "exclude_modules")
    return (
        _fp4(section, "nvfp4", skipped)
        if algorithm == "nvfp4"
        else Quantization(format="fp8", block=(1, 0), skipped=skipped)
    )


def _read_auto_round(section: _Section, fields: ConfigFields) -> Quantization:
    section.require("data_type", ("int",), where_unsaid="int")
    packing = section.require("packing_format", tuple(_AUTO_ROUND_PACKINGS), where_unsaid="auto_round:auto_gptq")
    skipped = []
    for module, of_module in (section.below("extra_config").values if section.get("extra_config") else {}).items():
        bits = of_module.get("bits", section.get("bits")) if isinstance(of_module, dict) else of_module
        group_size = of_module.get("group_size", section.get("group_size")) if isinstance(of_module, dict) else None
        if bits in (16, 32):
            skipped.append(module if re.fullmatch(r"[\w.]+", module) else f"{_PATTERN}.*(?:{module})")
        elif (bits, group_size) != (section.get("bits"), section.get("group_size")):
            raise section.error("extra_config", f"{module}: {of_module}", "modules of 16 bits: all others are alike")
    for module in skipped:
        section.check_pattern("extra_config", module)
    read = _AUTO_ROUND_PACKINGS[packing](section, fields)
    return replace(read, skipped=(*read.skipped, *skipped))


_Reader = Callable[[_Section, ConfigFields], Quantization | None]
_AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": _read_gptq, "auto_round:auto_awq": _read_awq}
_READERS: dict[str, _Reader] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
}
"""By `quant_method`."""
