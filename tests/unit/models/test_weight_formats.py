"""Weights of few bits: what a checkpoint stores comes back as the values that it stands for."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from quantized_tensors import CONFIGS, quantized_layer
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.config_fields import ConfigFields
from raypp.models.member_sizes import Member
from raypp.models.quantization import ONLINE_FP8, Quantization, read_quantization
from raypp.models.weights import CheckpointWeights, DummyWeights, WeightReader
from raypp.ops.weight import Weight, WeightKind

CPU = torch.device("cpu")


def kind_of(form: str) -> WeightKind:
    known: tuple[WeightKind, ...] = ("fp8", "int8", "fp4")
    return next((kind for kind in known if kind in form), "int4")


def quantization_of(config: dict[str, object]) -> Quantization:
    read = read_quantization(ConfigFields(Path("config.json"), {"quantization_config": config}))
    assert read is not None
    return read


def reader(directory: Path, quantization: Quantization | None) -> WeightReader:
    return WeightReader(CheckpointWeights(directory), torch.float32, CPU, "m.", quantization)


def write(directory: Path, form: str, layers: dict[str, tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Write layers, each of so many outputs, inputs, and an order; return the values."""
    generator, stored, values = torch.Generator().manual_seed(0), {}, {}
    for name, (num_outputs, num_inputs, order) in layers.items():
        weight = torch.randn(num_outputs, num_inputs, generator=generator)
        tensors, values[name] = quantized_layer(form, weight, order)
        stored |= {f"m.{name}.{end}": tensor for end, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    return values


@pytest.mark.parametrize("form", CONFIGS)
def test_values_come_back(tmp_path, form):
    values = write(tmp_path, form, {"a": (16, 40, 0), "b": (24, 40, 0), "c": (8, 40, 1)})
    weights = reader(tmp_path, quantization_of(CONFIGS[form]))
    for name, expected in values.items():
        weight = weights.weight((name,), (len(expected),), 40)
        assert weight.kind == kind_of(form)
        assert (weight.order is not None) == ("order" in form)
        assert torch.equal(weight.dequantized(torch.float32), expected)
    for names in (("a", "b"), ("b", "a", "c")):
        stacked = weights.weight(names, [len(values[name]) for name in names], 40)
        assert torch.equal(stacked.dequantized(torch.float32), torch.cat([values[name] for name in names]))
        assert (stacked.kind == "plain") == ("order" in form and "c" in names)
    assert {name.rpartition(".")[2] for name in weights.source.unread()} <= {"input_scale", "activation_scale"}


@pytest.mark.parametrize("form", CONFIGS)
def test_experts_are_stacked(tmp_path, form):
    layers = {f"experts.{e}.{name}": (16, 24, e) for e in range(3) for name in ("gate", "up")}
    values = write(tmp_path, form, layers)
    weight = reader(tmp_path, quantization_of(CONFIGS[form])).expert_weight(
        "experts.{}.", 3, ("gate", "up"), (16, 16), 24
    )
    assert weight.data.shape[:2] == (3, 32)
    assert weight.kind == kind_of(form)
    expected = torch.stack([torch.cat([values[f"experts.{e}.gate"], values[f"experts.{e}.up"]]) for e in range(3)])
    assert torch.equal(weight.dequantized(torch.float32), expected)


def test_experts_whose_own_layers_differ_in_order_become_plain(tmp_path):
    layers = {f"experts.{e}.{name}": (8, 24, e * (name == "up")) for e in range(3) for name in ("gate", "up")}
    values = write(tmp_path, "gptq order", layers)
    weights = reader(tmp_path, quantization_of(CONFIGS["gptq order"]))
    weight = weights.expert_weight("experts.{}.", 3, ("gate", "up"), (8, 8), 24)
    assert weight.kind == "plain"
    for e in range(3):
        assert torch.equal(weight.data[e], torch.cat([values[f"experts.{e}.gate"], values[f"experts.{e}.up"]]))


def test_a_zero_of_0_comes_back_though_what_is_stored_is_less_by_one(tmp_path):
    tensors, _ = quantized_layer("gptq zeros", torch.randn(16, 24))
    codes_of_0 = {"qweight": torch.zeros_like(tensors["qweight"]), "qzeros": torch.full_like(tensors["qzeros"], -1)}
    save_file({f"m.a.{end}": tensor for end, tensor in (tensors | codes_of_0).items()}, tmp_path / "model.safetensors")
    weight = reader(tmp_path, quantization_of(CONFIGS["gptq zeros"])).weight(("a",), (16,), 24)
    assert weight.zero is not None
    assert not weight.zero.any()
    assert not weight.dequantized(torch.float32).any()


def test_skipped_layers_stay_as_they_are(tmp_path):
    plain = torch.randn(16, 24)
    quantized, values = quantized_layer("awq", torch.randn(16, 24))
    stored = {"m.plain.weight": plain} | {f"m.small.{end}": tensor for end, tensor in quantized.items()}
    save_file(stored, tmp_path / "model.safetensors")
    weights = reader(tmp_path, quantization_of({**CONFIGS["awq"], "modules_to_not_convert": ["plain"]}))
    assert torch.equal(weights.weight(("plain",), (16,), 24).data, plain)
    assert weights.weight(("small",), (16,), 24).kind == "int4"
    stacked = weights.weight(("plain", "small"), (16, 16), 24)
    assert torch.equal(stacked.data, torch.cat([plain, values]))


def test_rounding_at_load(tmp_path):
    weight = torch.randn(16, 24)
    save_file({"m.a.weight": weight.bfloat16(), "m.b.weight": weight}, tmp_path / "model.safetensors")
    read = reader(tmp_path, ONLINE_FP8).weight(("a", "b"), (16, 16), 24)
    assert (read.kind, read.block, read.scale.shape) == ("fp8", (1, 24), (32, 1))
    torch.testing.assert_close(read.dequantized(torch.float32), torch.cat([weight, weight]), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("form", CONFIGS)
def test_dummies_are_in_the_form_of_the_checkpoint(tmp_path, form):
    quantization = quantization_of(CONFIGS[form])
    write(tmp_path, form, {name: (64, 320, 0) for name in "ab"})
    read = reader(tmp_path, quantization).weight(("a", "b"), (64, 64), 320)

    def drawn(prefix: str = "m.", seed: int = 0) -> Weight:
        weights = WeightReader(DummyWeights(seed), torch.float32, CPU, prefix, quantization)
        return weights.weight(("a", "b"), (64, 64), 320)

    dummy = drawn()
    for name in ("data", "scale", "zero", "order"):
        of_read, of_dummy = getattr(read, name), getattr(dummy, name)
        assert (of_read is None) == (of_dummy is None), name
        if of_read is not None:
            assert (of_read.shape, of_read.dtype) == (of_dummy.shape, of_dummy.dtype), name
    assert (read.block, read.num_bytes) == (dummy.block, dummy.num_bytes)
    values = dummy.dequantized(torch.float32)
    assert 0.0195 < values.std() < 0.0205
    assert abs(values.mean()) < 0.0005
    assert torch.equal(values, drawn().dequantized(torch.float32))
    for other in (drawn(seed=1), drawn("n.")):
        assert not torch.equal(values, other.dequantized(torch.float32))
    experts = WeightReader(DummyWeights(0), torch.float32, CPU, "m.", quantization)
    weight = experts.expert_weight("experts.{}.", 3, ("gate", "up"), (64, 64), 320)
    assert (weight.num_bytes, weight.kind) == (3 * dummy.num_bytes, dummy.kind)
    assert len(weight.dequantized(torch.float32).flatten(0, 1).unique(dim=0)) == 3 * 128


class _Counting(CheckpointWeights):
    """Remembers the most elements of each tensor that were read at once, and its shape."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.read: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(self, name, shape, dtype, where=None):
        tensor = super().get(name, shape, dtype, where)
        end = name.rpartition(".")[2]
        self.read[end], self.shapes[end] = max(tensor.numel(), self.read.get(end, 0)), shape
        return tensor


def _units(form: str) -> tuple[int, int]:
    """Return how many outputs and inputs may be stored as one, or share a scale."""
    if kind_of(form) == "int4":
        return 8, 32 if form.endswith("of 32") else 8
    known = {"blocks": (12, 20), "mxfp4": (1, 32), "nvfp4": (1, 16), "groups": (1, 8), "int8": (1, 4)}
    return next((units for name, units in known.items() if name in form), (1, 1))


@pytest.mark.parametrize("shape", [(96, 96), (60, 120), (12, 60)])
@pytest.mark.parametrize("form", CONFIGS)
def test_a_part_is_that_of_the_whole_and_no_more_is_read(tmp_path, form, shape):
    whole, quantization = write(tmp_path, form, {"a": (*shape, 0)})["a"], quantization_of(CONFIGS[form])
    for cut, count in product((0, 1), (2, 3, 4)):
        size = shape[cut] // count
        for rank in range(count):
            source, part = _Counting(tmp_path), Member(rank, count).part(size)
            sizes = (part, shape[1]) if cut == 0 else (shape[0], part)
            read = WeightReader(source, torch.float32, CPU, "m.", quantization).weight(("a",), sizes[:1], sizes[1])
            expected = whole.narrow(cut, part.start, part.size)
            assert torch.equal(read.dequantized(torch.float32), expected), (cut, count, rank)
            has_halves = quantization.bits == 4 and size % 2 == 1
            assert read.kind == ("plain" if cut and ("order" in form or has_halves) else kind_of(form))
            share = part.widened(_units(form)[cut]).size / shape[cut]
            for name, num_read in source.read.items():
                stored = source.shapes[name]
                is_uncut = name in ("g_idx", "weight_g_idx", "weight_shape") or math.prod(stored) == 1
                is_by_output = cut == 1 and (len(stored) == 1 or 1 in stored)
                if not is_uncut and not is_by_output and not (cut and "order" in form):
                    # The last stored number of a line may be filled in part.
                    assert num_read <= share * math.prod(stored) + max(stored), (name, cut, count, rank)


def test_planned_bytes_are_those_of_weights(tmp_path):
    for form, config in CONFIGS.items():
        quantization = quantization_of(config)
        weights = WeightReader(DummyWeights(0), torch.bfloat16, CPU, "", quantization)
        weight = weights.weight(("a",), (60,), 320)
        assert quantization.weight_bytes(60, 320) == weight.num_bytes, form


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("fp8 blocks", {"weight_scale_inv": None}, ["no tensor m.a.weight_scale", "[2, 2]"]),
        ("fp8 blocks", {"weight_scale_inv": torch.ones(2, 3)}, ["a.weight_scale_inv", "[2, 3]", "[2, 2]"]),
        ("fp8 blocks", {"weight": torch.ones(16, 24)}, ["m.a.weight is not of a type", "F32", "F8_E4M3", "16 bits"]),
        ("fp8 blocks", {"weight": torch.ones(16, 24).to(torch.float8_e5m2)}, ["F8_E5M2", "F8_E4M3"]),
        ("fp8 blocks", {"weight_scale_inv": torch.ones(2, 2).to(torch.int8)}, ["weight_scale_inv", "I8"]),
        ("compressed fp8 channel", {"weight_scale": torch.ones(3)}, ["a.weight_scale", "[3]", "[16, 1]"]),
        ("compressed int4", {"weight_scale": None}, ["no tensor m.a.weight_scale"]),
        ("compressed int4", {"weight_shape": torch.tensor([16, 32])}, ["weight_shape", "[16, 32]", "[16, 24]"]),
        ("compressed int4 zeros", {"weight_zero_point": None}, ["no tensor m.a.weight_zero_point"]),
        ("compressed int4 order", {"weight_g_idx": None}, ["no tensor m.a.weight_g_idx"]),
        ("compressed int4 order", {"weight_g_idx": torch.zeros(24).int()}, ["weight_g_idx", "3 groups of 8"]),
        ("awq", {"qweight": torch.ones(24, 3).int()}, ["a.qweight", "[24, 3]", "[24, 2]"]),
        ("awq", {"qweight": torch.ones(24, 2)}, ["a.qweight", "F32", "I32"]),
        ("awq", {"scales": None}, ["no tensor m.a.scales"]),
        ("gptq", {"qzeros": None}, ["no tensor m.a.qzeros"]),
        ("gptq", {"qzeros": torch.ones(3, 2).int()}, ["a.qzeros", "sym", "from 1 to 2"]),
        ("gptq order", {"g_idx": None}, ["no tensor m.a.g_idx"]),
    ],
)
def test_what_is_wrong_with_tensors_is_said(tmp_path, form, change, words):
    tensors, _ = quantized_layer(form, torch.randn(16, 24))
    stored = {f"m.a.{end}": tensor for end, tensor in (tensors | change).items() if tensor is not None}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        reader(tmp_path, quantization_of(CONFIGS[form])).weight(("a",), (16,), 24)
    for word in words:
        assert word in str(caught.value)


def test_quantized_tensors_that_config_json_does_not_speak_of(tmp_path):
    tensors, _ = quantized_layer("fp8 blocks", torch.randn(16, 24))
    save_file({f"m.a.{end}": tensor for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"a\.weight is not of a type .* got: F8_E4M3; .*quantization_config"):
        reader(tmp_path, None).weight(("a",), (16,), 24)


def test_a_quantized_lm_head(tmp_path):
    save_file({"m.lm_head.weight": torch.ones(16, 24).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"lm_head\.weight is not of a type .* got: F8_E4M3; .*only linear layers and experts of"
    ):
        reader(tmp_path, quantization_of(CONFIGS["fp8 blocks"])).tensor("lm_head.weight", 16, 24)


def test_a_truncated_file(tmp_path):
    write(tmp_path, "awq", {"a": (16, 24, 0)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match="truncated"):
        reader(tmp_path, quantization_of(CONFIGS["awq"])).weight(("a",), (16,), 24)


def test_an_odd_number_of_inputs_is_refused_in_4_bits(tmp_path):
    save_file({"m.a.qweight": torch.ones(1).int()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="25 inputs"):
        reader(tmp_path, quantization_of(CONFIGS["gptq"])).weight(("a",), (16,), 25)


def test_inputs_that_were_never_sorted(tmp_path):
    tensors, values = quantized_layer("compressed int4", torch.randn(16, 24))
    tensors["weight_g_idx"] = torch.full((24,), -1)
    save_file({f"m.a.{end}": tensor for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weight = reader(tmp_path, quantization_of(CONFIGS["compressed int4 order"])).weight(("a",), (16,), 24)
    assert weight.order is None
    assert torch.equal(weight.dequantized(torch.float32), values)


@pytest.mark.parametrize("form", [form for form in CONFIGS if form.startswith("compressed")])
def test_the_tests_own_tensors_are_those_of_compressed_tensors(form):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    if "order" in form:
        pytest.skip("it no longer knows that")
    config = quantization.QuantizationConfig.model_validate(CONFIGS[form])
    scheme = config.config_groups["group_0"]
    tensors, values = quantized_layer(form, torch.randn(16, 40))
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    theirs = compressor.decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(theirs.float(), values, rtol=0.01, atol=0)  # it multiplies in 16 bits


def test_fixtures_are_configurations_of_json():
    assert json.loads(json.dumps(CONFIGS)) == CONFIGS
