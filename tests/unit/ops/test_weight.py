"""What weights of few bits stand for, against loops over their elements; and several as one."""

from __future__ import annotations

import math

import pytest
import torch

from raypp.ops.weight import FP4, Weight, has_form_of, stacked_weights

KINDS = ("plain", "fp8", "int4", "int4 zeros", "int4 order")
BLOCKS = ((1, 4), (1, 12), (3, 5), (128, 128))


def make(
    kind: str, block: tuple[int, int], num_outputs: int, num_inputs: int = 12, experts: tuple[int, ...] = (), seed=0
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    shape = (*experts, num_outputs, num_inputs)
    if kind == "plain":
        return Weight(torch.randn(shape, generator=generator))
    blocks = (*experts, math.ceil(num_outputs / block[0]), math.ceil(num_inputs / block[1]))
    scale = torch.rand(blocks, generator=generator) + 0.5
    if kind == "fp8":
        return Weight(torch.randn(shape, generator=generator).to(torch.float8_e4m3fn), scale, block=block)
    data = torch.randint(256, (*shape[:-1], num_inputs // 2), generator=generator, dtype=torch.uint8)
    zero = order = None
    if "zeros" in kind:
        zero = torch.randint(16, blocks, generator=generator, dtype=torch.uint8)
    if "order" in kind:
        order = torch.randperm(num_inputs, generator=generator).expand(*experts, num_inputs).contiguous()
    return Weight(data, scale, zero, block, order)


def by_loops(weight: Weight) -> torch.Tensor:
    """Return a matrix element by element."""
    values = torch.zeros(weight.num_outputs, weight.num_inputs)
    for output in range(weight.num_outputs):
        for column in range(weight.num_inputs):
            row, group = output // weight.block[0], column // weight.block[1]
            if weight.kind == "int4":
                code = int(weight.data[output, column // 2]) >> (4 * (column % 2)) & 15
                value = float(code - (8 if weight.zero is None else int(weight.zero[row, group])))
            else:
                value = float(weight.data[output, column])
            if weight.scale is not None:
                value = torch.tensor(value) * weight.scale[row, group].float()
            values[output, column if weight.order is None else int(weight.order[column])] = value
    return values


def part(weight: Weight, expert: int) -> Weight:
    tensors = (weight.data, weight.scale, weight.zero, weight.order)
    data, scale, zero, order = (None if tensor is None else tensor[expert] for tensor in tensors)
    return Weight(data, scale, zero, weight.block, order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values(kind, block):
    weight = make(kind, block, 7)
    assert (weight.num_outputs, weight.num_inputs) == (7, 12)
    assert weight.kind == kind.split()[0]
    assert torch.equal(weight.dequantized(torch.float32), by_loops(weight))
    assert weight.dequantized(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_experts(kind):
    weight = make(kind, (3, 5), 7, experts=(3,))
    values = weight.dequantized(torch.float32)
    for expert in range(3):
        assert torch.equal(values[expert], by_loops(part(weight, expert)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_in_16_bits_count_as_they_are(dtype):
    exact = make("int4", (1, 4), 7)
    assert exact.scale is not None
    weight = Weight(exact.data, exact.scale.to(dtype), block=exact.block)
    assert torch.equal(weight.dequantized(torch.float32), by_loops(weight))
    assert exact.num_bytes - weight.num_bytes == 2 * 7 * 3
    assert not has_form_of(exact, weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("outputs", [(6, 3, 9), (4, 5), (7,)])
def test_stacked(kind, block, outputs):
    weights = [make(kind, block, count, seed=count) for count in outputs]
    if kind == "int4 order":
        weights = [Weight(w.data, w.scale, w.zero, w.block, weights[0].order) for w in weights]
    stacked = stacked_weights(weights)
    assert (stacked.kind, stacked.num_outputs) == (kind.split()[0], sum(outputs))
    expected = torch.cat([weight.dequantized(torch.float32) for weight in weights])
    assert torch.equal(stacked.dequantized(torch.float32), expected)
    ends_within = kind != "plain" and any(count % block[0] for count in outputs[:-1])
    assert stacked.block == ((1, block[1]) if ends_within else weights[0].block)


def test_what_can_be_stacked():
    weight = make("int4 order", (1, 4), 7)
    same = make("int4 order", (1, 4), 9)
    assert has_form_of(weight, Weight(same.data, same.scale, same.zero, same.block, weight.order))
    other = make("int4 order", (1, 4), 7, seed=1)
    assert not has_form_of(weight, other)
    assert has_form_of(weight, other, with_order=False)
    for kind, block in (("int4", (1, 4)), ("int4 zeros", (1, 4)), ("fp8", (1, 4)), ("plain", (1, 4))):
        assert not has_form_of(weight, make(kind, block, 7))
    assert not has_form_of(weight, make("int4 order", (1, 12), 7), with_order=False)
    assert has_form_of(make("fp8", (3, 5), 7), make("fp8", (1, 5), 7))


@pytest.mark.parametrize("experts", [(), (2,)])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_its_values_and_keeps_nothing_else(kind, block, experts):
    weight = make(kind, (1, 4) if "int4" in kind else block, 14, experts=experts)
    values = weight.dequantized(torch.float32)
    for outputs, inputs in ((slice(3, 9), slice(0, 12)), (slice(0, 14), slice(4, 10)), (slice(6, 14), slice(2, 12))):
        if weight.order is not None and inputs != slice(0, 12):
            continue
        found = weight.part(outputs, inputs)
        assert torch.equal(found.dequantized(torch.float32), values[..., outputs, inputs])
        tensors = [tensor for tensor in (found.data, found.scale, found.zero) if tensor is not None]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_experts_in_halves_of_bytes_are_stacked():
    data = torch.randint(256, (3, 8, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    whole = Weight(data.view(FP4), torch.ones(3, 8, 1), block=(1, 32))
    parts = [whole.part(slice(start, start + 2), slice(0, 32)) for start in (0, 4)]
    assert torch.equal(stacked_weights(parts).data.view(torch.uint8), data[:, [0, 1, 4, 5]])
