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

N outputs, K inputs in C groups. An int32 holds eight numbers of 4 bits, the first one lowest; N / 8 and K / 8 are
rounded up. In MXFP4, gpt-oss has weights of all experts as one: `_blocks` [E, N, K / 32, 16], `_scales` [E, N, K / 32].

Sources: the published checkpoints' tensors; for the order of bits the code of AutoAWQ, AutoGPTQ, compressed-tensors;
for FP4 the OCP Microscaling Formats (MX) Specification 1.0 and ModelOpt's export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

import torch

from raypp.errors import ModelLoadError, page
from raypp.models.quantization import Quantization, WeightFormat
from raypp.ops.weight import FP4, Weight, quantize_rows

_NUMBERS = 8  # of an int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 AWQ keeps output 0, 1, ... of its eight."""
_SYMMETRIC_ZERO = 8
_SIGN = 128  # of a byte: with it, x + 128 becomes x
_UNSORTED = -1
"""The group of every input where compressed-tensors was told to sort and did not."""


class StoredTensors(Protocol):
    """Gives a checkpoint's tensors by their names; see `raypp.models.weights.WeightSource`."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, converted to `dtype`."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None if there is none of that name."""

    def type_of(self, name: str) -> torch.dtype | None:
        """Return the type of a tensor, None if there is none of that name."""


class StoredWeight:
    """The tensors of one linear layer.

    Args:
        tensors: Where they are.
        module: Its whole name, such as `model.layers.0.mlp.gate_proj`.
        quantization: How it is stored.
        shape: N and K.
        dtype: What weights become that are not in 8 bits yet, before they are.
        device: Where everything goes.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        module: str,
        quantization: Quantization,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        self.module = module
        self.quantization = quantization
        self.num_outputs, self.num_inputs = shape
        self.dtype = dtype
        self._device = device
        rows, columns = quantization.block
        self.block = (rows, columns or self.num_inputs)

    def read(self) -> Weight:
        """Return the weight.

        Raises:
            ModelLoadError: a tensor is missing, has the wrong shape or type, or cannot be read.
        """
        if self.quantization.bits == 4 and self.num_inputs % 2:
            raise self.error("weight", f"{self.num_inputs} inputs", "an even number of inputs, for 4 bits")
        return _READERS[self.quantization.format](self)

    @property
    def num_groups(self) -> int:
        """C."""
        return math.ceil(self.num_inputs / self.block[1])

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this layer, on the device."""
        return self._tensors.get(f"{self.module}.{name}", shape, dtype).to(self._device)

    def get_scale(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
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
    data = stored.get("weight", (stored.num_outputs, stored.num_inputs), torch.float8_e4m3fn)
    name = "weight_scale_inv" if stored.shape_of("weight_scale_inv") is not None else "weight_scale"
    rows, columns = stored.block
    shape = (math.ceil(stored.num_outputs / rows), math.ceil(stored.num_inputs / columns))
    got = stored.shape_of(name)
    if got is not None and stored.quantization.block == (1, 0) and got in ((), (1,), (1, 1), shape[:1]):
        scale = stored.get(name, got, torch.float32).reshape(-1, 1).expand(shape).contiguous()
    else:
        scale = stored.get(name, shape, torch.float32)
    return Weight(data, scale, block=stored.block)


def _read_int8(stored: StoredWeight) -> Weight:
    num_outputs, groups = stored.num_outputs, stored.num_groups
    if stored.shape_of("weight_packed") is not None:
        packed = stored.get("weight_packed", (num_outputs, math.ceil(stored.num_inputs / 4)), torch.int32)
        in_bytes = packed.contiguous().view(torch.uint8)[:, : stored.num_inputs]
        data = (in_bytes ^ _SIGN).view(torch.int8).contiguous()
    else:
        data = stored.get("weight", (num_outputs, stored.num_inputs), torch.int8)
    shape = (num_outputs,) if stored.shape_of("weight_scale") == (num_outputs,) else (num_outputs, groups)
    return Weight(data, stored.get("weight_scale", shape, torch.float32).view(num_outputs, groups), block=stored.block)


def _read_mxfp4(stored: StoredWeight) -> Weight:
    exponents = stored.get("weight_scale", (stored.num_outputs, stored.num_groups), torch.uint8)
    return Weight(_packed_fp4(stored, "weight_packed"), powers_of_two(exponents), block=stored.block)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) of uint8, in the shortest type that has all of them and that kernels read."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def _read_nvfp4(stored: StoredWeight) -> Weight:
    name = "weight_packed" if stored.shape_of("weight_packed") is not None else "weight"
    scale = stored.get("weight_scale", (stored.num_outputs, stored.num_groups), torch.float8_e4m3fn).float()
    if name == "weight":
        scale *= stored.get("weight_scale_2", stored.shape_of("weight_scale_2") or (), torch.float32)
    else:
        scale /= stored.get("weight_global_scale", stored.shape_of("weight_global_scale") or (1,), torch.float32)
    return Weight(_packed_fp4(stored, name), scale, block=stored.block)


def _packed_fp4(stored: StoredWeight, name: str) -> torch.Tensor:
    return stored.get(name, (stored.num_outputs, stored.num_inputs // 2), torch.uint8).view(FP4)


def _read_online_fp8(stored: StoredWeight) -> Weight:
    data, scale = quantize_rows(stored.get("weight", (stored.num_outputs, stored.num_inputs), stored.dtype))
    return Weight(data, scale.unsqueeze(1), block=stored.block)


def _read_awq(stored: StoredWeight) -> Weight:
    num_outputs, groups = stored.num_outputs, stored.num_groups
    packed_outputs = math.ceil(num_outputs / _NUMBERS)
    packed = stored.get("qweight", (stored.num_inputs, packed_outputs), torch.int32)
    zeros = stored.get("qzeros", (groups, packed_outputs), torch.int32)
    scale = stored.get_scale("scales", (groups, num_outputs))
    return Weight(
        _in_pairs(_unpacked(packed, 1, _AWQ_PLACES)[:, :num_outputs].t()),
        scale.t().contiguous(),
        _unpacked(zeros, 1, _AWQ_PLACES)[:, :num_outputs].t().contiguous(),
        stored.block,
    )


def _read_gptq(stored: StoredWeight) -> Weight:
    num_outputs, groups = stored.num_outputs, stored.num_groups
    packed = stored.get("qweight", (math.ceil(stored.num_inputs / _NUMBERS), num_outputs), torch.int32)
    zeros = stored.get("qzeros", (groups, math.ceil(num_outputs / _NUMBERS)), torch.int32)
    scale = stored.get_scale("scales", (groups, num_outputs))
    zero = (_unpacked(zeros, 1)[:, :num_outputs].t() + stored.quantization.zero_offset) & 15
    if not stored.quantization.has_zeros and not bool((zero == _SYMMETRIC_ZERO).all()):
        raise stored.error(
            "qzeros",
            f"zeros from {int(zero.min())} to {int(zero.max())}",
            f"{_SYMMETRIC_ZERO} everywhere: config.json says sym",
            hint="set sym to false in config.json's quantization_config if the zeros are right",
        )
    numbers, order = _by_group(stored, _unpacked(packed, 0)[: stored.num_inputs].t(), "g_idx")
    return Weight(
        _in_pairs(numbers),
        scale.t().contiguous(),
        zero.contiguous() if stored.quantization.has_zeros else None,
        stored.block,
        order,
    )


def _read_compressed_int4(stored: StoredWeight) -> Weight:
    num_outputs, num_inputs, groups = stored.num_outputs, stored.num_inputs, stored.num_groups
    packed = stored.get("weight_packed", (num_outputs, math.ceil(num_inputs / _NUMBERS)), torch.int32)
    scale = stored.get_scale("weight_scale", (num_outputs, groups))
    if stored.shape_of("weight_shape") is not None:
        shape = stored.get("weight_shape", (2,), torch.int64).tolist()
        if shape != [num_outputs, num_inputs]:
            raise stored.error("weight_shape", shape, f"{[num_outputs, num_inputs]}, by config.json")
    zero = None
    if stored.quantization.has_zeros:
        zeros = stored.get("weight_zero_point", (math.ceil(num_outputs / _NUMBERS), groups), torch.int32)
        zero = _unpacked(zeros, 0)[:num_outputs].contiguous()
    numbers, order = _by_group(stored, _unpacked(packed, 1)[:, :num_inputs], "weight_g_idx")
    return Weight(_in_pairs(numbers), scale, zero, stored.block, order)


class QuantizedTensor:
    """A weight that a checkpoint stores in few bits; indexed all at once, as transformers' loader does, it has 16.

    Args:
        read: Returns it.
        dtype: What it becomes.
    """

    def __init__(self, read: Callable[[], Weight], dtype: torch.dtype) -> None:
        self.read = read
        self._dtype = dtype

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
            found[whole] = QuantizedTensor(partial(_read_experts, tensors, whole, device), dtype)
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
_PARTS = (*_DATA, *_SCALES, *_OTHERS, "weight_global_scale", "input_scale", "input_global_scale")


def _read(
    tensors: StoredTensors, module: str, quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> Weight:
    shape = _shape(tensors, module, quantization)
    return StoredWeight(tensors, module, quantization, shape, dtype, device).read()


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


def _read_experts(tensors: StoredTensors, name: str, device: torch.device) -> Weight:
    shape = tensors.shape_of(f"{name}_blocks") or ()
    blocks = tensors.get(f"{name}_blocks", shape, torch.uint8).to(device).flatten(-2)
    exponents = tensors.get(f"{name}_scales", shape[:-1], torch.uint8).to(device)
    return Weight(blocks.view(FP4), powers_of_two(exponents), block=(1, 2 * shape[-1]))


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


def _by_group(stored: StoredWeight, numbers: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the columns of a matrix sorted by their group, and their inputs; None where they were sorted.

    Args:
        stored: Whose they are.
        numbers: [N, K].
        name: Of the tensor that says which group an input is of.
    """
    num_inputs, columns = stored.num_inputs, stored.block[1]
    if not stored.quantization.has_order and stored.shape_of(name) is None:
        return numbers, None
    group = stored.get(name, (num_inputs,), torch.int64)
    sorted_group, order = group.sort(stable=True)
    expected = torch.arange(num_inputs, device=group.device) // columns
    if torch.equal(group, expected) or bool((group == _UNSORTED).all()):
        return numbers, None
    if not torch.equal(sorted_group, expected):
        raise stored.error(name, "groups of other sizes", f"{stored.num_groups} groups of {columns} inputs")
    return numbers.index_select(1, order), order
