"""Reading safetensors: one file or shards, every precision, and what is wrong with broken checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import random_tensors, tensor_shapes, write_config, write_sharded
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import has_safetensors
from raypp.models.draft_head_config import checkpoint_shapes
from raypp.models.weights import CheckpointWeights, DummyWeights, PickledWeights, WeightReader, warn_of_unread

CPU = torch.device("cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_come_back_converted(tmp_path, stored, wanted, sharded):
    tensors = random_tensors(write_config(tmp_path), stored)
    if sharded:
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    source = CheckpointWeights(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(source.get(name, tuple(tensor.shape), wanted), tensor.to(wanted))


def test_tensors_outlive_their_file(tmp_path):
    tensors = random_tensors(write_config(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    read = CheckpointWeights(tmp_path).get("model.norm.weight", (24,), torch.float32)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert torch.equal(read, tensors["model.norm.weight"])


def test_only_the_files_of_named_tensors_are_opened(tmp_path):
    write_sharded(tmp_path, random_tensors(write_config(tmp_path)))
    names = list(tensor_shapes(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    source = CheckpointWeights(tmp_path)
    assert source.get(names[0], (64, 24), torch.float32).shape == (64, 24)
    with pytest.raises(ModelLoadError, match="lacks model-00002-of-00002"):
        source.get(names[1], (24,), torch.float32)


def test_planning_and_loading_agree_on_what_a_checkpoint_is(tmp_path):
    tensors = random_tensors(write_config(tmp_path))
    save_file(tensors, tmp_path / "weights.safetensors")  # a name that nobody else takes for a checkpoint
    assert not has_safetensors(tmp_path)
    for read in (checkpoint_shapes, lambda path: CheckpointWeights(path).unread()):
        with pytest.raises(ModelLoadError, match="has no weights"):
            read(tmp_path)
    save_file({"fc.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    assert checkpoint_shapes(tmp_path) == {"fc.weight": (3, 2)}
    assert CheckpointWeights(tmp_path).unread() == {"fc.weight"}
    write_sharded(tmp_path, tensors)  # an index counts
    assert checkpoint_shapes(tmp_path) == tensor_shapes(tmp_path)
    assert CheckpointWeights(tmp_path).unread() == tensors.keys()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="lacks model-00002-of-00002"):
        checkpoint_shapes(tmp_path)


def test_what_was_read_is_not_warned_of(tmp_path, caplog):
    names = [f"layers.0.{index}.bias" for index in range(10)]
    tensors = {name: torch.ones(1) for name in (*names, "layers.1.bias", "layers.0.rotary_emb.inv_freq")}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for source in (CheckpointWeights(tmp_path), PickledWeights(tmp_path / "pytorch_model.bin")):
        caplog.clear()
        source.get(names[0], (1,), torch.float32)
        warn_of_unread(source, "stage 3", lambda name: name.startswith("layers.0."))
        [record] = caplog.records
        assert record.getMessage().startswith("stage 3: 9 tensors of the checkpoint are not used: layers.0.1.bias, ")
        assert "layers.0.8.bias and 1 more; " in record.getMessage()
    caplog.clear()
    warn_of_unread(source, "stage 3", lambda name: name == names[0])
    warn_of_unread(DummyWeights(0), "stage 3", lambda name: True)
    assert not caplog.records


def _get(directory, name="model.norm.weight", shape=(24,)):
    return CheckpointWeights(directory).get(name, shape, torch.float32)


def test_missing_tensor(tmp_path):
    tensors = random_tensors(write_config(tmp_path))
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no tensor model\.norm\.weight"):
        _get(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path):
    tensors = random_tensors(write_config(tmp_path))
    write_sharded(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    files = values["weight_map"]
    shards = sorted(set(files.values()))
    values["weight_map"] = {name: shards[file == shards[0]] for name, file in files.items()}
    index.write_text(json.dumps(values))
    source = CheckpointWeights(tmp_path)
    assert checkpoint_shapes(tmp_path) == tensor_shapes(tmp_path)
    for name, tensor in tensors.items():
        assert source.shape_of(name) == tuple(tensor.shape)
        assert source.type_of(name) == torch.float32
        assert torch.equal(source.get(name, tuple(tensor.shape), torch.float32), tensor)
    assert not source.unread()


def test_tensor_that_the_index_promises_and_the_shard_lacks(tmp_path):
    tensors = random_tensors(write_config(tmp_path))
    write_sharded(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["more.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"cannot be read for tensor more\.weight"):
        _get(tmp_path, "more.weight")


def test_wrong_shape(tmp_path):
    save_file({"model.norm.weight": torch.ones(25)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has the wrong shape; got: \[25\]; expected: \[24\]"):
        _get(tmp_path)


def test_quantized_tensor(tmp_path):
    save_file({"model.norm.weight": torch.ones(24, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is not of a type .* got: I8"):
        _get(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "header only"])
def test_damaged_file(tmp_path, damage):
    file = tmp_path / "model.safetensors"
    save_file(random_tensors(write_config(tmp_path)), file)
    content = file.read_bytes()
    file.write_bytes(
        {"truncated": content[:-100], "garbage": b"\x80" * 500, "empty": b"", "header only": content[:200]}[damage]
    )
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or not a safetensors file"):
        _get(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json is not an index"):
        _get(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(ModelLoadError, match="no such directory"):
        _get(tmp_path / "missing")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"has no weights; got: \['pytorch_model\.bin'\]"):
        _get(tmp_path)


def test_dummy_weights_depend_on_seed_and_name_alone():
    def get(seed, name, shape=(40, 30)):
        return DummyWeights(seed).get(name, shape, torch.float32)

    assert torch.equal(get(0, "a.weight"), get(0, "a.weight"))
    assert not torch.equal(get(0, "a.weight"), get(0, "b.weight"))
    assert not torch.equal(get(0, "a.weight"), get(1, "a.weight"))
    assert 0.018 < get(0, "a.weight").std() < 0.022
    assert torch.equal(get(0, "input_layernorm.weight", (7,)), torch.ones(7))


def test_large_dummy_weights_have_no_equal_rows():
    large = DummyWeights(0).get("large.weight", (1100, 1024), torch.bfloat16)
    assert len(large.unique(dim=0)) == 1100


def test_stacked_tensors_lie_one_below_the_other():
    source = DummyWeights(0)
    reader = WeightReader(source, torch.float32, CPU, "model.").below("layers.0.")
    stacked = reader.stacked(("q.weight", "k.weight"), (4, 2), 8)
    assert torch.equal(stacked[:4], source.get("model.layers.0.q.weight", (4, 8), torch.float32))
    assert torch.equal(stacked[4:], source.get("model.layers.0.k.weight", (2, 8), torch.float32))
