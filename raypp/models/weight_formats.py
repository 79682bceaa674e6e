"""Makes a `Weight` of the tensors by which a checkpoint stores a linear layer's, one reader for each format.

    fp8              weight [N, K] float8_e4m3fn; weight_scale_inv or weight_scale, by block, by output, or one
    awq              qweight [K, N / 8], qzeros [C, N / 8] int32, outputs interleaved; scales [C, N]
    gptq             qweight [K / 8, N], qzeros [C, N / 8] int32; scales [C, N]; g_idx [K]
    compressed_int4  weight_packed [N, K / 8], weight_zero_point [N / 8, C] int32; weight_scale [N, C]; weight_g_idx [K]
    int8             weight [N, K] int8, or weight_packed [N, K / 4] int32, 128 more; weight_scale [N, C] or [N]
    mxfp4            weight_packed [N, K / 2] uint8; weight_scale [N, K / 32] uint8, powers of two
    nvfp4            weight_packed [N, K / 2] uint8, weight_scale [N, K / 16] float8_e4m3fn, divided by
                     weight_global_scale; or weight, weight_scale, multiplied by weight_scale_2
    online_fp8       weight [N, K] in 16 or 32 bits

Of a part of the outputs and inputs no more is read than belongs to the numbers and blocks that it begins and ends in.
Of inputs in an order of their own all are, and so are those that are rounded at load, by a scale of the whole row.

N outputs, K inputs in C groups. An int32 holds eight numbers of 4 bits, the first one lowest; N / 8 and K / 8 are
rounded up. In MXFP4, gpt-oss has weights of all experts as one: `_blocks` [E, N, K / 32, 16], `_scales` [E, N, K / 32].

Sources: the published checkpoints' tensors; for the order of bits the code of AutoAWQ, AutoGPTQ, compressed-tensors;
for FP4 the OCP Microscaling Formats (MX) Specification 1.0 and ModelOpt's export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from raypp.errors import ModelLoadError, page
from raypp.models.member_sizes import Size, Span, span_of
from raypp.models.quantization import Quantization, WeightFormat
from raypp.ops.weight import FP4, Weight, quantize_rows, stacked_weights

_NUMBERS = 8  # of an int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 AWQ keeps output 0, 1, ... of its eight."""
_SYMMETRIC_ZERO = 8
_SIGN = 128  # of a byte: with it, x + 128 becomes x
_UNSORTED = -1
"""The group of every input where compressed-tensors was told to sort and did not."""
_PACKED: dict[WeightFormat, tuple[int, int]] = {
    "awq": (_NUMBERS, 1),
    "gptq": (_NUMBERS, _NUMBERS),
    "compressed_int4": (_NUMBERS, _NUMBERS),
    "int8": (1, 4),
    "mxfp4": (1, 2),
    "nvfp4": (1, 2),
}
"""Outputs and inputs whose numbers, or zeros, may be in one stored one."""
_GROUPS: dict[WeightFormat, str] = {"gptq": "g_idx", "compressed_int4": "weight_g_idx"}
"""The tensor that says which group an input is of."""

Index = tuple[int | slice, ...]


class StoredTensors(Protocol):
    """Gives a checkpoint's tensors by their names; see `raypp.models.weights.WeightSource`."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Index | None = None) -> torch.Tensor:
        """Return the tensor, converted to `dtype`, in host memory or already where it is going.

        Args:
            name: As the checkpoint has it.
            shape: Of the whole tensor.
            dtype: What it becomes.
            where: The part to read; None: all of it.

        Raises:
            ModelLoadError: there is none of that name and shape.
        """

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None if there is none of that name."""

    def type_of(self, name: str) -> torch.dtype | None:
        """Return the type of a tensor, None if there is none of that name."""


def read_part(tensors: StoredTensors, name: str, shape: Sequence[Size], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor, or the part of it that the sizes say; see `StoredTensors.get`."""
    spans = [span_of(size) for size in shape]
    where = None if all(span.is_whole for span in spans) else tuple(span.slice for span in spans)
    return tensors.get(name, tuple(span.total for span in spans), dtype, where)


def part_of(weight: Weight, outputs: Span, inputs: Span, dtype: torch.dtype) -> Weight:
    """Return some outputs and inputs of a weight; in `dtype` where its form has no such part.

    That are inputs in an order of their own, and half a byte.
    """
    if outputs.is_whole and inputs.is_whole:
        return weight
    is_in_bytes = weight.data.shape[-1] == weight.num_inputs or not (inputs.start % 2 or inputs.stop % 2)
    if not inputs.is_whole and (weight.order is not None or not is_in_bytes):
        weight = Weight(weight.dequantized(dtype))
    return weight.part(outputs.slice, inputs.slice)


class StoredWeight:
    """The tensors of one linear layer, or of a part of it.

    Args:
        tensors: Where they are.
        module: Its whole name, such as `model.layers.0.mlp.gate_proj`.
        quantization: How it is stored.
        shape: N and K, whole or a part.
        dtype: What weights become that are not in 8 bits yet, before they are.
        device: Where everything goes.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        module: str,
        quantization: Quantization,
        shape: tuple[Size, Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        self.module = module
        self.quantization = quantization
        self.dtype = dtype
        self._device = device
        self._wanted = span_of(shape[0]), span_of(shape[1])
        self.outputs, self.inputs = self._wanted
        """What is read: all of each stored number, and of each block."""

    def read(self) -> Weight:
        """Return the weight.

        Raises:
            ModelLoadError: a tensor is missing, has the wrong shape or type, or cannot be read.
        """
        (outputs, inputs), form = self._wanted, self.quantization
        if form.bits == 4 and inputs.total % 2:
            raise self.error("weight", f"{inputs.total} inputs", "an even number of inputs, for 4 bits")
        rows, columns = _PACKED.get(form.format, (1, 1))
        self.outputs = outputs.widened(math.lcm(rows, form.block[0]))
        self.inputs = span_of(inputs.total)
        if not (inputs.is_whole or form.format == "online_fp8" or self._has_order()):
            self.inputs = inputs.widened(math.lcm(columns, form.block[1] or 1))
        weight = _READERS[form.format](self)
        return part_of(weight, outputs.within(self.outputs), inputs.within(self.inputs), self.dtype)

    @property
    def num_outputs(self) -> int:
        """N, of what is read."""
        return self.outputs.size

    @property
    def num_inputs(self) -> int:
        """K, of what is read."""
        return self.inputs.size

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        rows, columns = self.quantization.block
        return rows, columns or self.num_inputs

    @property
    def groups(self) -> Span:
        """C, and which of them are read."""
        columns = self.quantization.block[1]
        return self.inputs.by(columns) if columns else span_of(1)

    def group_of_inputs(self) -> torch.Tensor | None:
        """Return the group of each input, of those that are read; None: they come as they are.

        Raises:
            ModelLoadError: config.json says that it is stored, and it is not.
        """
        name = _GROUPS[self.quantization.format]
        if not self.quantization.has_order and self.shape_of(name) is None:
            return None
        group = self.get(name, (self.inputs,), torch.int64)
        columns = self.quantization.block[1] or self.inputs.total
        expected = torch.arange(self.inputs.start, self.inputs.stop, device=group.device) // columns
        is_sorted = torch.equal(group, expected) or bool((group == _UNSORTED).all())
        return None if is_sorted else group

    def _has_order(self) -> bool:
        return self.quantization.format in _GROUPS and self.group_of_inputs() is not None

    def get(self, name: str, shape: tuple[Size, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this layer, or a part, on the device."""
        return read_part(self._tensors, f"{self.module}.{name}", shape, dtype).to(self._device)

    def get_scale(self, name: str, shape: tuple[Size, ...]) -> torch.Tensor:
        """Return the scales of 4-bit integers: in 16 bits, where they are stored so, else in float32."""
        dtype = self._tensors.type_of(f"{self.module}.{name}")
        return self.get(name, shape, dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of this layer, None if it has none of that name."""
        return self._tensors.shape_of(f"{self.module}.{name}")

    def error(self, name: str, got: object, expected: str, hint: str | None = None) -> ModelLoadError:
        """Return the error of a tensor of this layer."""
        return ModelLoadError(f"tensor {self.module}.{name} is not usable", got=got, expected=expected, hint=hint)


def _read_fp8(stored: StoredWeight) -> Weight:
    data = stored.get("weight", (stored.outputs, stored.inputs), torch.float8_e4m3fn)
    name = "weight_scale_inv" if stored.shape_of("weight_scale_inv") is not None else "weight_scale"
    blocks, got = stored.outputs.by(stored.block[0]), stored.shape_of(name)
    if got is not None and stored.quantization.block == (1, 0) and got in ((), (1,), (1, 1), (blocks.total,)):
        shape: tuple[Size, ...] = (blocks,) if got == (blocks.total,) else got
        scale = stored.get(name, shape, torch.float32).reshape(-1, 1).expand(blocks.size, 1).contiguous()
    else:
        scale = stored.get(name, (blocks, stored.groups), torch.float32)
    return Weight(data, scale, block=stored.block)


def _read_int8(stored: StoredWeight) -> Weight:
    outputs, groups = stored.outputs, stored.groups
    if stored.shape_of("weight_packed") is not None:
        packed = stored.get("weight_packed", (outputs, stored.inputs.by(4)), torch.int32)
        in_bytes = packed.contiguous().view(torch.uint8)[:, : stored.num_inputs]
        data = (in_bytes ^ _SIGN).view(torch.int8).contiguous()
    else:
        data = stored.get("weight", (outputs, stored.inputs), torch.int8)
    shape = (outputs,) if stored.shape_of("weight_scale") == (outputs.total,) else (outputs, groups)
    scale = stored.get("weight_scale", shape, torch.float32).view(outputs.size, groups.size)
    return Weight(data, scale, block=stored.block)


def _read_mxfp4(stored: StoredWeight) -> Weight:
    exponents = stored.get("weight_scale", (stored.outputs, stored.groups), torch.uint8)
    return Weight(_packed_fp4(stored, "weight_packed"), powers_of_two(exponents), block=stored.block)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) of uint8, in the shortest type that has all of them and that kernels read."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def _read_nvfp4(stored: StoredWeight) -> Weight:
    name = "weight_packed" if stored.shape_of("weight_packed") is not None else "weight"
    scale = stored.get("weight_scale", (stored.outputs, stored.groups), torch.float8_e4m3fn).float()
    if name == "weight":
        scale *= stored.get("weight_scale_2", stored.shape_of("weight_scale_2") or (), torch.float32)
    else:
        scale /= stored.get("weight_global_scale", stored.shape_of("weight_global_scale") or (1,), torch.float32)
    return Weight(_packed_fp4(stored, name), scale, block=stored.block)


def _packed_fp4(stored: StoredWeight, name: str) -> torch.Tensor:
    return stored.get(name, (stored.outputs, stored.inputs.by(2)), torch.uint8).view(FP4)


def _read_online_fp8(stored: StoredWeight) -> Weight:
    data, scale = quantize_rows(stored.get("weight", (stored.outputs, stored.inputs), stored.dtype))
    return Weight(data, scale.unsqueeze(1), block=stored.block)


def _read_awq(stored: StoredWeight) -> Weight:
    num_outputs, packed_outputs = stored.num_outputs, stored.outputs.by(_NUMBERS)
    packed = stored.get("qweight", (stored.inputs, packed_outputs), torch.int32)
    zeros = stored.get("qzeros", (stored.groups, packed_outputs), torch.int32)
    scale = stored.get_scale("scales", (stored.groups, stored.outputs))
    return Weight(
        _in_pairs(_unpacked(packed, 1, _AWQ_PLACES)[:, :num_outputs].t()),
        scale.t().contiguous(),
        _unpacked(zeros, 1, _AWQ_PLACES)[:, :num_outputs].t().contiguous(),
        stored.block,
    )


def _read_gptq(stored: StoredWeight) -> Weight:
    packed = stored.get("qweight", (stored.inputs.by(_NUMBERS), stored.outputs), torch.int32)
    zeros = stored.get("qzeros", (stored.groups, stored.outputs.by(_NUMBERS)), torch.int32)
    scale = stored.get_scale("scales", (stored.groups, stored.outputs))
    zero = (_unpacked(zeros, 1)[:, : stored.num_outputs].t() + stored.quantization.zero_offset) & 15
    if not stored.quantization.has_zeros and not bool((zero == _SYMMETRIC_ZERO).all()):
        raise stored.error(
            "qzeros",
            f"zeros from {int(zero.min())} to {int(zero.max())}",
            f"{_SYMMETRIC_ZERO} everywhere: config.json says sym",
            hint="set sym to false in config.json's quantization_config if the zeros are right",
        )
    numbers, order = _by_group(stored, _unpacked(packed, 0)[: stored.num_inputs].t())
    return Weight(
        _in_pairs(numbers),
        scale.t().contiguous(),
        zero.contiguous() if stored.quantization.has_zeros else None,
        stored.block,
        order,
    )


def _read_compressed_int4(stored: StoredWeight) -> Weight:
    packed = stored.get("weight_packed", (stored.outputs, stored.inputs.by(_NUMBERS)), torch.int32)
    scale = stored.get_scale("weight_scale", (stored.outputs, stored.groups))
    if stored.shape_of("weight_shape") is not None:
        shape, expected = (
            stored.get("weight_shape", (2,), torch.int64).tolist(),
            [stored.outputs.total, stored.inputs.total],
        )
        if shape != expected:
            raise stored.error("weight_shape", shape, f"{expected}, by config.json")
    zero = None
    if stored.quantization.has_zeros:
        zeros = stored.get("weight_zero_point", (stored.outputs.by(_NUMBERS), stored.groups), torch.int32)
        zero = _unpacked(zeros, 0)[: stored.num_outputs].contiguous()
    numbers, order = _by_group(stored, _unpacked(packed, 1)[:, : stored.num_inputs])
    return Weight(_in_pairs(numbers), scale, zero, stored.block, order)


Blocks = Callable[[int, int], Sequence[tuple[Size, Size]]]
"""Which parts of N outputs and K inputs are read, one below the other."""


def _whole(num_outputs: int, num_inputs: int) -> Sequence[tuple[Size, Size]]:
    return [(num_outputs, num_inputs)]


class QuantizedTensor:
    """A weight that a checkpoint stores in few bits; indexed all at once, as transformers' loader does, it has 16.

    Args:
        read: Returns some parts of it.
        dtype: What it becomes.
        blocks: The parts.
    """

    def __init__(self, read: Callable[[Blocks], Weight], dtype: torch.dtype, blocks: Blocks = _whole) -> None:
        self._read = read
        self._dtype = dtype
        self._blocks = blocks

    def of(self, blocks: Blocks) -> QuantizedTensor:
        """Return some parts of it, one below the other."""
        return QuantizedTensor(self._read, self._dtype, blocks)

    def read(self) -> Weight:
        """Return the weight."""
        return self._read(self._blocks)

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.read().dequantized(self._dtype)

    def get_dtype(self) -> str:
        """Return the type, as safetensors calls it."""
        return "BF16"


def quantized_tensors(
    names: Collection[str], tensors: StoredTensors, quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, QuantizedTensor], set[str]]:
    """Return a model's quantized weights by the names that they have in 16 bits, and the tensors that they are made of.

    What is quantized is what has such tensors, whatever config.json skips.

    Args:
        names: Of all tensors.
        tensors: Where they are.
        quantization: How they are stored.
        dtype: What they become in 16 bits.
        device: Where they go.
    """
    found: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    is_online = quantization.format == "online_fp8"
    for name in names:
        module, _, last = name.rpartition(".")
        if quantization.format == "mxfp4" and last.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            found[whole] = QuantizedTensor(partial(_read_experts, tensors, whole, dtype, device), dtype)
            used |= {name, f"{whole}_scales"}
        elif last in _DATA and (is_online or any(f"{module}.{scale}" in names for scale in _SCALES)):
            read = partial(_read, tensors, module, quantization, dtype, device)
            found[f"{module}.weight"] = QuantizedTensor(read, dtype)
            used |= {each for end in _PARTS if (each := f"{module}.{end}") in names}
    return found, used


def require_floats(types: Mapping[str, str]) -> None:
    """Refuse tensors of few bits that are no quantized weight: as floats they would have no scale.

    Raises:
        ModelLoadError: there is one.
    """
    for name, dtype in types.items():
        if dtype.startswith("F8") or (dtype in ("I8", "U8", "I32") and name.endswith(_DATA)):
            raise ModelLoadError(
                f"tensor {name} is not of a type that raypp can use for it",
                got=dtype,
                expected="F32, F16 or BF16, or a weight as config.json's quantization_config describes it",
                hint=page("quantization"),
            )


def check_shape(name: str, weight: Weight, shape: tuple[int, ...]) -> None:
    """Refuse a weight of another shape than the model needs, outputs before inputs or after them.

    Raises:
        ModelLoadError: it has one.
    """
    got = (*weight.data.shape[:-2], weight.num_outputs, weight.num_inputs)
    if shape != got and (len(got) < 3 or shape != (*got[:-2], *got[:-3:-1])):
        expected = f"{list(shape)}, by config.json"
        raise ModelLoadError(f"weight {name} has the wrong shape", got=list(got), expected=expected)


_DATA = ("weight", "weight_packed", "qweight")
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_OTHERS = ("input_zero_point", "qzeros", "g_idx", "weight_shape", "weight_g_idx", "weight_zero_point", "weight_scale_2")
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "activation_scale")
_PARTS = (*_DATA, *_SCALES, *_OTHERS, *_OF_ACTIVATIONS, "weight_global_scale")


def _read(
    tensors: StoredTensors,
    module: str,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks,
) -> Weight:
    parts = blocks(*_shape(tensors, module, quantization))
    return stacked_weights([StoredWeight(tensors, module, quantization, part, dtype, device).read() for part in parts])


def _shape(tensors: StoredTensors, module: str, quantization: Quantization) -> tuple[int, int]:
    """Return N and K of a linear layer, by its tensors."""
    name = next(each for each in _DATA if tensors.shape_of(f"{module}.{each}") is not None)
    rows, columns = tensors.shape_of(f"{module}.{name}") or (0, 0)
    if quantization.format == "awq":
        return (tensors.shape_of(f"{module}.scales") or (0,))[-1], rows
    if quantization.format == "gptq":
        return columns, (tensors.shape_of(f"{module}.g_idx") or (rows * _NUMBERS,))[0]
    if tensors.shape_of(f"{module}.weight_shape") is not None:
        rows, columns = tensors.get(f"{module}.weight_shape", (2,), torch.int64).tolist()
        return rows, columns
    dtype = tensors.type_of(f"{module}.{name}")
    in_one = 8 * dtype.itemsize // quantization.bits if dtype in (torch.uint8, torch.int32) else 1
    return rows, columns * in_one


def _read_experts(
    tensors: StoredTensors, name: str, dtype: torch.dtype, device: torch.device, blocks: Blocks
) -> Weight:
    num_experts, num_outputs, num_blocks, in_block = tensors.shape_of(f"{name}_blocks") or (0, 0, 0, 0)
    columns, parts = 2 * in_block, list[Weight]()
    for block in blocks(num_outputs, num_blocks * columns):
        outputs, inputs = map(span_of, block)
        there = num_experts, outputs, inputs.by(columns)
        data = read_part(tensors, f"{name}_blocks", (*there, in_block), torch.uint8).to(device).flatten(-2)
        exponents = read_part(tensors, f"{name}_scales", there, torch.uint8).to(device)
        weight = Weight(data.view(FP4), powers_of_two(exponents), block=(1, columns))
        parts.append(part_of(weight, span_of(outputs.size), inputs.within(inputs.widened(columns)), dtype))
    return stacked_weights(parts)


_READERS: dict[WeightFormat, Callable[[StoredWeight], Weight]] = {
    "fp8": _read_fp8,
    "online_fp8": _read_online_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed_int4": _read_compressed_int4,
    "int8": _read_int8,
    "mxfp4": _read_mxfp4,
    "nvfp4": _read_nvfp4,
}


def _unpacked(packed: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(_NUMBERS))) -> torch.Tensor:
    """Return the numbers of a matrix of int32 along one of its dimensions, uint8.

    Args:
        packed: [A, B] int32.
        dim: Along which eight numbers were put into one.
        places: Where in an int32 the first, second, ... number of these is.
    """
    in_bytes = packed.contiguous().view(torch.uint8).view(*packed.shape, _NUMBERS // 2)
    numbers = torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(-2)  # [A, B, 8]
    if places != tuple(range(_NUMBERS)):
        numbers = numbers[..., list(places)]
    return numbers.transpose(1, 2).flatten(0, 1) if dim == 0 else numbers.flatten(1)


def _in_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of 4 bits, [N, K] uint8, two in a byte, [N, K / 2]: the first in its low half."""
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous()


def _by_group(stored: StoredWeight, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the columns of a matrix sorted by their group, and their inputs; None where they were sorted.

    Shapes: numbers [N, K].
    """
    group = stored.group_of_inputs()
    if group is None:
        return numbers, None
    (num_inputs, columns), name = (stored.num_inputs, stored.block[1]), _GROUPS[stored.quantization.format]
    sorted_group, order = group.sort(stable=True)
    if not torch.equal(sorted_group, torch.arange(num_inputs, device=group.device) // columns):
        raise stored.error(name, "groups of other sizes", f"{stored.groups.total} groups of {columns} inputs")
    return numbers.index_select(1, order), order
