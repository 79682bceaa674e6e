"""Reads weights from safetensors files, or draws them at random; only the tensors that are asked for.

Weights that are not floats of 16 or 32 bits are made by `raypp.models.weight_formats`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from raypp.errors import ModelLoadError, page
from raypp.models.checkpoint_names import PLAIN_TYPES, file_of_tensor, lacks_file, names_in_file
from raypp.models.member_sizes import ONLY_MEMBER, Member, Size, Span, span_of
from raypp.models.quantization import FP4_FORMATS, Quantization
from raypp.models.weight_formats import Index, StoredTensors, StoredWeight, part_of, read_part
from raypp.ops.weight import FP4, Weight, has_form_of, own_copy, stacked_weights

_LOG = logging.getLogger(__name__)
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""As safetensors names types."""
_TYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}
_SCALE_NAMES = {"k": ("k_scale", "k_proj.k_scale", "kv_scale"), "v": ("v_scale", "v_proj.v_scale", "kv_scale")}
"""Below a layer's `self_attn.`, as tools that measure scales write them; `kv_scale` is of keys and values alike."""
_FP4_DEVIATION = math.sqrt(8.5625)  # of all sixteen codes
_INT8_DEVIATION = 24.0


class WeightSource(StoredTensors, Protocol):
    """Gives a model's tensors by the names of its checkpoint."""

    def unread(self) -> Collection[str]:
        """Return the names of the tensors that are there and were not read."""


class CheckpointWeights:
    """A directory with `model.safetensors`, or with shards and their index; or one in Mistral's own form.

    Files are mapped, not read: a stage touches the pages of its own tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open_files: dict[str, Any] = {}
        self._names: dict[str, dict[str, str]] = {}  # of the tensors in an open file: what they are called there
        self._read: set[str] = set()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Index | None = None) -> torch.Tensor:
        """Return a tensor, or a part. Floats, integers and floats of 8 bits do not become each other.

        Raises:
            ModelLoadError: missing, of another shape or kind, or in a file that is truncated or no safetensors.
        """
        file_name = self._file_with(name)
        if file_name is None:
            raise missing_tensor(self._path, name, shape, self._file_of_tensor)
        self._read.add(name)
        file = self._path / file_name
        try:
            opened, stored = self._open(file_name), self._names_in(file_name).get(name, name)
            found = opened.get_slice(stored)
            got_shape, got_dtype = tuple(found.get_shape()), str(found.get_dtype())
            check_tensor(file, name, (got_shape, got_dtype), (shape, dtype))
            tensor: torch.Tensor = opened.get_tensor(stored) if where is None else found[where]
        except SafetensorError as error:
            raise ModelLoadError(f"{file} cannot be read for tensor {name}", got=str(error)) from error
        # Never the mapping itself: a file that is replaced later must not change or kill a running engine.
        return tensor.to(dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        file_name = self._file_with(name)
        return None if file_name is None else tuple(self._slice(file_name, name).get_shape())

    def type_of(self, name: str) -> torch.dtype | None:
        """Return the type of a tensor, None if there is none of that name, or it is one that raypp never uses."""
        file_name = self._file_with(name)
        return None if file_name is None else _TYPES.get(self._slice(file_name, name).get_dtype())

    def slices(self) -> dict[str, Any]:
        """Return all tensors by name, as safetensors' slices: what is not indexed is not read."""
        found = {name: self._file_with(name) for name in self._file_of_tensor}
        return {name: self._slice(file, name) for name, file in found.items() if file is not None}

    def unread(self) -> Collection[str]:
        return self._file_of_tensor.keys() - self._read

    @cached_property
    def _file_of_tensor(self) -> dict[str, str]:
        """Which file holds which tensor."""
        return file_of_tensor(self._path)

    def _file_with(self, name: str) -> str | None:
        """Return the file that holds a tensor, which may be another one than the index says."""
        said = self._file_of_tensor.get(name)
        if said is None or name in self._names_in(said):
            return said
        others = dict.fromkeys(self._file_of_tensor.values())
        found = (file for file in others if (self._path / file).is_file() and name in self._names_in(file))
        return next(found, said)

    def _names_in(self, file_name: str) -> dict[str, str]:
        if file_name not in self._names:
            self._names[file_name] = names_in_file(file_name, self._open(file_name).keys())
        return self._names[file_name]

    def _slice(self, file_name: str, name: str) -> Any:
        return self._open(file_name).get_slice(self._names_in(file_name).get(name, name))

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            file = self._path / file_name
            if not file.is_file():
                raise lacks_file(self._path, file_name)
            try:
                self._open_files[file_name] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(
                    f"{file} is truncated or not a safetensors file",
                    got=f"{error} ({file.stat().st_size} bytes)",
                    hint="download it again",
                ) from error
        return self._open_files[file_name]


def missing_tensor(path: Path, name: str, shape: tuple[int, ...], there: Collection[str]) -> ModelLoadError:
    """Return the error for a tensor that is not among those that are `there`."""
    return ModelLoadError(
        f"{path} has no tensor {name}",
        got=f"{len(there)} tensors, such as {', '.join(sorted(there)[:3])}",
        expected=f"{name} {list(shape)}",
    )


def type_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type."""
    return _TYPE_NAMES.get(dtype, str(dtype))


def check_tensor(
    file: Path, name: str, got: tuple[tuple[int, ...], str], wanted: tuple[tuple[int, ...], torch.dtype]
) -> None:
    """Refuse a tensor that is not what the model needs.

    Args:
        file: Where it is.
        name: Its name there.
        got: Its shape, and what safetensors calls its type.
        wanted: The shape that it must have, and the type that it becomes.

    Raises:
        ModelLoadError: floats where integers are needed or the other way round, other numbers in 8 bits, or another
            shape.
    """
    (got_shape, got_type), (shape, dtype) = got, wanted
    if dtype.itemsize == 1:
        allowed: tuple[str, ...] = (type_name(dtype),)
    else:
        allowed = PLAIN_TYPES if dtype.is_floating_point else _INTEGERS
    if got_type not in allowed:
        hint = None
        if allowed == PLAIN_TYPES:
            hint = (
                "only linear layers and experts of the language model's layers can be quantized, and config.json's "
                f"quantization_config has to say so; {page('quantization')}"
            )
        elif got_type in PLAIN_TYPES:
            hint = (
                "if it is not quantized, config.json's quantization_config has to name it among what stays in 16 bits"
            )
        raise ModelLoadError(
            f"{file}: tensor {name} is not of a type that raypp can use for it",
            got=got_type,
            expected=allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}",
            hint=hint,
        )
    if got_shape != shape:
        raise ModelLoadError(
            f"{file}: tensor {name} has the wrong shape",
            got=list(got_shape),
            expected=f"{list(shape)}, by config.json",
        )


_ONES = (
    *(f"{norm}.weight" for norm in ("norm", "norm1", "norm2", "norm_1", "norm_2")),
    *("layer_scalar", "router.scale", "per_expert_scale"),
)


class DummyWeights:
    """Random weights: each tensor depends on the seed and its name alone, so any partition gives the same model.

    Norms and such factors are one, everything else is normal with a standard deviation of 0.02. The noise repeats after
    a prime number of elements, so that large models are made at the speed of copying, yet no two rows of a matrix are
    alike.

    Args:
        seed: Of all tensors.
        device: Where they are made. The noise is the same on any.
    """

    _PERIOD = 1_048_573
    _STANDARD_DEVIATION = 0.02

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed
        self._device = device

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Index | None = None) -> torch.Tensor:
        """Return a random tensor, or a part; integers are all zero."""
        if where is not None:
            return own_copy(self.get(name, shape, dtype)[where])
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if name.endswith(_ONES):
            return torch.ones(shape, dtype=dtype, device=self._device)
        count = min(math.prod(shape), self._PERIOD)
        noise = torch.randn(count, generator=self._generator(name)).mul_(self._STANDARD_DEVIATION).to(dtype)
        return self._repeated(noise, shape)

    def quantized(self, name: str, shape: tuple[int, ...], quantization: Quantization) -> Weight:
        """Return a random weight in a form of few bits; its values have the usual deviation.

        Shapes: shape [N, K], or [E, N, K]. Of as many inputs, all weights have the same order.
        """
        *outer, num_outputs, num_inputs = shape
        rows, columns = quantization.block[0], quantization.block[1] or num_inputs
        blocks = (*outer, math.ceil(num_outputs / rows), math.ceil(num_inputs / columns))
        generator = self._generator(name)
        zero = order = None
        dtype = torch.float32
        if quantization.bits == 4:
            is_float = quantization.format in FP4_FORMATS
            count = min(math.prod(shape) // 2, self._PERIOD)
            lowest = 0 if is_float else 1  # so that the mean is 8, or 0
            numbers = torch.randint(lowest, 16, (count, 2), generator=generator, dtype=torch.uint8)
            data = self._repeated(numbers[:, 0] | numbers[:, 1] << 4, (*outer, num_outputs, num_inputs // 2))
            deviation = _FP4_DEVIATION if is_float else math.sqrt((15**2 - 1) / 12)
            data, dtype = (data.view(FP4), torch.float32) if is_float else (data, torch.float16)
            dtype = torch.bfloat16 if quantization.format == "mxfp4" else dtype
            zero = torch.full(blocks, 8, dtype=torch.uint8, device=self._device) if quantization.has_zeros else None
            if quantization.has_order:
                order = torch.randperm(num_inputs, generator=self._generator(f"order/{num_inputs}")).to(self._device)
                order = order.expand(*outer, num_inputs).contiguous()
        else:
            noise = torch.randn(min(math.prod(shape), self._PERIOD), generator=generator)
            is_int = quantization.format == "int8"
            noise = (noise * _INT8_DEVIATION).to(torch.int8) if is_int else noise.to(torch.float8_e4m3fn)
            data, deviation = self._repeated(noise, shape), _INT8_DEVIATION if is_int else 1.0
        scale = torch.full(blocks, self._STANDARD_DEVIATION / deviation, dtype=dtype, device=self._device)
        return Weight(data, scale, zero, (rows, columns), order)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def _repeated(self, noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that is the noise over and over."""
        tensor = torch.empty(shape, dtype=noise.dtype, device=self._device)
        noise = noise.to(self._device)
        for chunk in torch.split(tensor.view(-1), self._PERIOD):
            chunk.copy_(noise[: len(chunk)])
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return None: what a checkpoint need not have is not there."""
        return None

    def type_of(self, name: str) -> torch.dtype | None:
        """Return None: what a checkpoint need not have is not there."""
        return None

    def unread(self) -> Collection[str]:
        """Return nothing: a tensor is there once it is read."""
        return ()


_NAMED_AT_MOST = 8
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_UNUSED = (
    "rotary_emb.inv_freq",  # stored by old checkpoints; follows from config.json
    ".input_scale",  # of activations in few bits, which are never rounded by a scale of the checkpoint
    ".input_global_scale",
    ".input_zero_point",
    "activation_scale",  # of experts in one tensor, too
)


def warn_of_unread(source: WeightSource, part: str, is_own: Callable[[str], bool], experts: Span | None = None) -> None:
    """Log the names of tensors that were not read: config.json does not speak of them, so the model may be another.

    Args:
        source: Where all was read from.
        part: Of the model, for the log.
        is_own: Whether a tensor is this part's; each is of exactly one.
        experts: Those of each layer that the member has; None: there are none.
    """

    def is_of_others(name: str) -> bool:
        found = _OF_EXPERT.search(name)
        return found is not None and experts is not None and not 0 <= int(found[1]) - experts.start < experts.size

    unread = filter(is_own, source.unread())
    names = sorted(name for name in unread if not name.endswith(_UNUSED) and not is_of_others(name))
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        _LOG.warning(
            "%s: %d tensors of the checkpoint are not used: %s%s; if the model has such parts, its config.json or its "
            "architecture is not the right one, and its texts will be wrong",
            part,
            len(names),
            ", ".join(names[:_NAMED_AT_MOST]),
            more,
        )


def open_weights(
    load_format: Literal["auto", "dummy"], model_path: str, seed: int, device: torch.device
) -> WeightSource:
    """Return where a model's weights come from, as the configuration says; random ones are made on the device."""
    return DummyWeights(seed, device) if load_format == "dummy" else CheckpointWeights(Path(model_path))


class WeightReader:
    """Reads tensors below a prefix, of one type, onto one device.

    Args:
        source: Where they come from.
        dtype: What they become.
        device: Where they go.
        prefix: Before every name, e.g. `model.layers.3.`.
        quantization: The form of linear layers; None: all are of that type.
        member: Of the stage, whose parts are read.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        quantization: Quantization | None = None,
        member: Member = ONLY_MEMBER,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self.prefix = prefix
        self.member = member
        self._quantization = quantization

    def below(self, prefix: str) -> WeightReader:
        """Return a reader of the tensors below a further prefix."""
        return WeightReader(self.source, self.dtype, self.device, self.prefix + prefix, self._quantization, self.member)

    def of(self, source: WeightSource) -> WeightReader:
        """Return a reader of the same tensors that come from elsewhere."""
        return WeightReader(source, self.dtype, self.device, self.prefix, self._quantization, self.member)

    def has(self, name: str) -> bool:
        """Return whether a checkpoint has a tensor; random weights have none that one need not have."""
        return self.source.shape_of(self.prefix + name) is not None

    def tensor(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor or a part of it, of the reader's type if no other is asked for."""
        return self._get(name, shape, dtype or self.dtype).to(self.device)

    def _get(self, name: str, shape: Sequence[Size], dtype: torch.dtype) -> torch.Tensor:
        return read_part(self.source, self.prefix + name, shape, dtype)

    def number(self, name: str) -> float | None:
        """Return a tensor of one element that the checkpoint may have or not, None if it has none of that name."""
        shape = self.source.shape_of(self.prefix + name)
        if shape is None:
            return None
        if math.prod(shape) != 1:
            raise ModelLoadError(
                f"tensor {self.prefix}{name} is not one number", got=f"shape {list(shape)}", expected="one element"
            )
        return float(self.source.get(self.prefix + name, shape, torch.float32))

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor of integers, int64."""
        return self.source.get(self.prefix + name, shape, torch.int64).to(self.device)

    def weight(self, modules: Sequence[str], rows: Sequence[Size], num_inputs: Size) -> Weight:
        """Return the weights of linear layers of the same inputs as one product, one below the other.

        Args:
            modules: Their names, such as `gate_proj` and `up_proj`; one may come several times, with other outputs.
            rows: The outputs of each.
            num_inputs: K.
        """
        if not any(map(self._covers, modules)):
            names = [f"{module}.weight" for module in modules]
            if len(names) == 1:
                return Weight(self.tensor(names[0], rows[0], num_inputs))
            return Weight(self.stacked(names, rows, num_inputs))
        weights = [self._one(module, count, num_inputs) for module, count in zip(modules, rows, strict=True)]
        if not all(has_form_of(weights[0], weight) for weight in weights):
            _LOG.info(
                "%s: %s are kept in %s, since they are quantized in different forms or act-orders, and one product",
                self.prefix,
                ", ".join(modules),
                self.dtype,
            )
            weights = [Weight(weight.dequantized(self.dtype)) for weight in weights]
        return stacked_weights(weights)

    def expert_weight(
        self, prefix: str, experts: Size, modules: Sequence[str], rows: Sequence[Size], num_inputs: Size
    ) -> Weight:
        """Return the same linear layers of E experts, [E, N, K]; see `weight`.

        Args:
            prefix: Of an expert's tensors, with `{}` for its number: `experts.{}.`.
            experts: E, all or some.
            modules: Names of each expert's layers.
            rows: The outputs of each.
            num_inputs: K.
        """
        span = span_of(experts)
        if isinstance(self.source, DummyWeights):  # drawing them one by one would take minutes
            return self._dummy_experts(f"{self.prefix}{prefix}", span, modules, rows, span_of(num_inputs))
        num_experts = span.size
        first = self.below(prefix.format(span.start)).weight(modules, rows, num_inputs)
        whole = first.mapped(lambda part: part.new_empty(num_experts, *part.shape))
        for expert in range(num_experts):
            of_expert = self.below(prefix.format(span.start + expert))
            weight = of_expert.weight(modules, rows, num_inputs) if expert else first
            if not has_form_of(whole, weight, with_order=False):
                whole = _as_plain(whole, expert, self.dtype)
                weight = Weight(weight.dequantized(self.dtype))
            if whole.order is None and weight.order is not None:
                inputs = torch.arange(whole.num_inputs, device=self.device)
                whole = replace(whole, order=inputs.expand(num_experts, whole.num_inputs).contiguous())
            _put(whole, expert, weight)
        return whole

    def _dummy_experts(
        self, prefix: str, experts: Span, modules: Sequence[str], rows: Sequence[Size], inputs: Span
    ) -> Weight:
        assert isinstance(self.source, DummyWeights)
        spans = [span_of(size) for size in rows]
        totals, name = [span.total for span in spans], f"{prefix}{'+'.join(modules)}"
        shape, form = (experts.total, sum(totals), inputs.total), self._quantization
        if form is not None and form.covers(prefix.format(0) + modules[0]):
            if any(count % form.block[0] for count in totals[:-1]):  # as stacked weights have it
                form = replace(form, block=(1, form.block[1]))
            whole = self._dummy(name, shape, form)
        else:
            whole = Weight(self.source.get(name, shape, self.dtype).to(self.device))
        if not experts.is_whole:
            whole = whole.of_experts(experts.slice)
        if all(span.is_whole for span in (*spans, inputs)):
            return whole
        begins = [sum(totals[:index]) + span.start for index, span in enumerate(spans)]
        parts = [Span(begin, span.size, shape[1]) for begin, span in zip(begins, spans, strict=True)]
        return stacked_weights([part_of(whole, part, inputs, self.dtype) for part in parts])

    def _covers(self, module: str) -> bool:
        return self._quantization is not None and self._quantization.covers(self.prefix + module)

    def _one(self, module: str, num_outputs: Size, num_inputs: Size) -> Weight:
        if self._quantization is None or not self._covers(module):
            return Weight(self.tensor(f"{module}.weight", num_outputs, num_inputs))
        outputs, inputs, name = span_of(num_outputs), span_of(num_inputs), self.prefix + module
        if isinstance(self.source, DummyWeights):
            whole = self._dummy(name, (outputs.total, inputs.total), self._quantization)
            return part_of(whole, outputs, inputs, self.dtype)
        shape = outputs, inputs
        return StoredWeight(self.source, name, self._quantization, shape, self.dtype, self.device).read()

    def _dummy(self, name: str, shape: tuple[int, ...], quantization: Quantization) -> Weight:
        assert isinstance(self.source, DummyWeights)
        return self.source.quantized(name, shape, quantization).mapped(lambda part: part.to(self.device))

    def stacked(self, names: Sequence[str], rows: Sequence[Size], *columns: Size) -> torch.Tensor:
        """Return tensors of `[rows[i], *columns]` one below the other: several weights in one product."""
        counts = [span_of(size).size for size in rows]
        stacked = torch.empty(
            sum(counts), *(span_of(size).size for size in columns), dtype=self.dtype, device=self.device
        )
        for part, name, size in zip(torch.split(stacked, counts), names, rows, strict=True):
            part.copy_(self._get(name, (size, *columns), self.dtype))
        return stacked


def _as_plain(whole: Weight, num_there: int, dtype: torch.dtype) -> Weight:
    """Return a weight of as many experts in plain form, of which some are there."""
    if whole.scale is None:
        return whole
    shape = len(whole.data), whole.num_outputs, whole.num_inputs
    plain = torch.empty(shape, dtype=dtype, device=whole.data.device)
    plain[:num_there] = whole.mapped(lambda part: part[:num_there]).dequantized(dtype)
    return Weight(plain)


def _put(whole: Weight, expert: int, weight: Weight) -> None:
    """Make a weight one expert's. Without an order, its inputs are as they come."""
    order = weight.order
    if whole.order is not None and order is None:
        order = torch.arange(whole.num_inputs, device=whole.order.device)
    pairs = (
        (whole.data, weight.data),
        (whole.scale, weight.scale),
        (whole.zero, weight.zero),
        (whole.order, order),
    )
    for to, part in pairs:
        if to is not None and part is not None:
            to[expert].copy_(part)


def read_kv_scales(weights: WeightReader) -> tuple[float, float]:
    """Return what keys and what values are divided by before they are rounded, 1 where the checkpoint does not say.

    Raises:
        ModelLoadError: a scale that is not one positive number.
    """
    return _scale(weights, _SCALE_NAMES["k"]), _scale(weights, _SCALE_NAMES["v"])


def _scale(weights: WeightReader, names: tuple[str, ...]) -> float:
    found = {name: scale for name in names if (scale := weights.number(name)) is not None}
    for name, scale in found.items():
        if not (math.isfinite(scale) and scale > 0):
            raise ModelLoadError(
                f"the checkpoint's scale {weights.prefix}{name} is not usable",
                got=scale,
                expected="a positive number",
                hint="the checkpoint is damaged, or its scales were never measured",
            )
    return next(iter(found.values()), 1.0)


class PickledWeights:
    """A file that `torch.save` wrote: a dict of tensors. Mapped, not read; see `WeightSource`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: set[str] = set()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Index | None = None) -> torch.Tensor:
        """Return a tensor, or a part.

        Raises:
            ModelLoadError: missing, of another shape or kind, or in a file that is not one of tensors.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise missing_tensor(self._file, name, shape, self._tensors)
        self._read.add(name)
        check_tensor(self._file, name, (tuple(tensor.shape), type_name(tensor.dtype)), (shape, dtype))
        return (tensor if where is None else tensor[where]).to(dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(tensor.shape)

    def type_of(self, name: str) -> torch.dtype | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.dtype

    def unread(self) -> Collection[str]:
        return self._tensors.keys() - self._read

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        try:
            found = torch.load(self._file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
            raise ModelLoadError(
                f"{self._file} is not a file of tensors alone",
                got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                hint="convert it to safetensors",
            ) from error
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise ModelLoadError(f"{self._file} is not a dict of tensors", got=type(found).__name__)
        return found
