"""KV caches in 8 bits: what a checkpoint's config.json says of them, and the scales that it has."""

from __future__ import annotations

import pytest
import torch
from checkpoints import write_config
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.config import has_fp8_kv_cache, load_model_config
from raypp.models.config_fields import ConfigFields
from raypp.models.weights import CheckpointWeights, DummyWeights, WeightReader, read_kv_scales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYER = "model.layers.1.self_attn."


def says(tmp_path, scheme):
    return has_fp8_kv_cache(
        ConfigFields(tmp_path / "config.json", {"quantization_config": {"kv_cache_scheme": scheme}})
    )


@pytest.mark.parametrize("groups", [{}, None])
def test_a_checkpoint_that_has_scales_alone(tmp_path, groups):
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": SCHEME}
    config = load_model_config(write_config(tmp_path, quantization_config=quantization))
    assert config.has_fp8_kv_cache
    assert config.quantization is None


def test_the_scheme_of_compressed_tensors(tmp_path):
    published = SCHEME | {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax"}
    assert says(tmp_path, published)
    assert says(tmp_path, {"num_bits": 8, "type": "float"})
    assert not says(tmp_path, None)
    for fields in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        assert not has_fp8_kv_cache(ConfigFields(tmp_path / "config.json", fields))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "int"}, "type=int"),
        ({"num_bits": 4}, "num_bits=4"),
        ({"strategy": "attn_head"}, "strategy=attn_head"),
        ({"dynamic": True}, "dynamic=True"),
        ({"symmetric": False}, "symmetric=False"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ModelLoadError, match="kv_cache_scheme") as error:
        says(tmp_path, SCHEME | changes)
    assert error.value.got == said
    with pytest.raises(ModelLoadError, match="kv_cache_scheme"):
        says(tmp_path, "fp8")


def scales_of(tmp_path, **stored):
    write_config(tmp_path)
    save_file({LAYER + name: value for name, value in stored.items()}, tmp_path / "model.safetensors")
    source = CheckpointWeights(tmp_path)
    scales = read_kv_scales(WeightReader(source, torch.bfloat16, torch.device("cpu"), LAYER))
    assert not source.unread()
    return scales


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_by_the_names_that_tools_write(tmp_path, stored, shape, names):
    k, v = (torch.full(shape, value, dtype=stored) for value in (0.0625, 3.0))
    assert scales_of(tmp_path, **{names[0]: k, names[1]: v}) == (0.0625, 3.0)


def test_one_scale_for_both_and_none(tmp_path):
    assert scales_of(tmp_path, kv_scale=torch.tensor(0.5)) == (0.5, 0.5)
    assert read_kv_scales(WeightReader(DummyWeights(0), torch.float32, torch.device("cpu"), LAYER)) == (1.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be(tmp_path, value):
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.v_scale is not usable"):
        scales_of(tmp_path, k_scale=torch.tensor(1.0), v_scale=torch.tensor(value))


def test_scales_of_each_head_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="k_scale is not one number"):
        scales_of(tmp_path, k_scale=torch.ones(2))
