"""Models with experts: what config.json says of them, the layouts of their tensors, and that a stage reads its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import EXPERTS, random_tensors, tensor_shapes, write_config, write_sharded
from safetensors.torch import save_file

from raypp.errors import ModelLoadError
from raypp.models.config import load_model_config
from raypp.models.expert_config import ExpertConfig
from raypp.models.families import ExpertNames
from raypp.models.layer import FusedExperts
from raypp.models.member_sizes import Member
from raypp.models.quantization import ONLINE_FP8, Quantization
from raypp.models.registry import build_model
from raypp.models.weights import CheckpointWeights, DummyWeights, WeightReader

CPU = torch.device("cpu")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2")


def test_published_forms(tmp_path):
    qwen3 = load_model_config(write_config(tmp_path, **EXPERTS["qwen3"]))
    assert qwen3.experts == ExpertConfig(
        num_experts=5, num_chosen=2, intermediate_size=16, normalizes=True, dense_layers=frozenset({1})
    )
    assert qwen3.qk_norm
    assert [qwen3.experts_of(layer) for layer in range(3)] == [qwen3.experts, None, qwen3.experts]
    mixtral = load_model_config(write_config(tmp_path, **EXPERTS["mixtral"]))
    assert mixtral.experts == ExpertConfig(
        num_experts=3, num_chosen=2, intermediate_size=40, normalizes=True, names=MIXTRAL_NAMES
    )
    assert not mixtral.qk_norm
    assert load_model_config(write_config(tmp_path)).experts_of(0) is None


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [
        ({"num_experts": ..., "num_local_experts": 5}, {1}),  # as transformers 5 writes it
        ({"num_local_experts": 5}, {1}),
        ({"mlp_only_layers": None}, set()),
        ({"mlp_only_layers": [7]}, set()),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 2}, {0, 1, 2}),
        ({"shared_expert_intermediate_size": 0, "n_group": 1, "scoring_func": "softmax"}, {1}),
    ],
)
def test_ways_to_say_the_same(tmp_path, changes, dense_layers):
    experts = load_model_config(write_config(tmp_path, **{**EXPERTS["qwen3"], **changes})).experts
    assert experts.num_experts == 5
    assert experts.dense_layers == dense_layers


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"num_experts": ...}, ["'num_experts'", "nothing"]),
        ("qwen3", {"num_experts": 0}, ["'num_experts'", "0"]),
        ("qwen3", {"num_local_experts": 6}, ["'num_experts'", "5", "num_local_experts=6"]),
        ("qwen3", {"num_experts_per_tok": 6}, ["'num_experts_per_tok'", "6", "5 experts"]),
        ("qwen3", {"moe_intermediate_size": ...}, ["'moe_intermediate_size'", "nothing"]),
        ("qwen3", {"norm_topk_prob": 1}, ["'norm_topk_prob'", "true or false"]),
        ("qwen3", {"mlp_only_layers": [True]}, ["'mlp_only_layers'", "list of layers"]),
        ("qwen3", {"decoder_sparse_step": 0}, ["'decoder_sparse_step'", "0"]),
        ("qwen3", {"shared_expert_intermediate_size": 64}, ["'shared_expert_intermediate_size'", "64"]),
        ("qwen3", {"n_shared_experts": 1}, ["'n_shared_experts'"]),
        ("qwen3", {"n_group": 8}, ["'n_group'", "8", "0 or 1"]),
        ("qwen3", {"scoring_func": "sigmoid"}, ["'scoring_func'", "'sigmoid'", "'softmax'"]),
        ("qwen3", {"routed_scaling_factor": 2.5}, ["'routed_scaling_factor'", "2.5"]),
        ("qwen3", {"router_bias": True}, ["'router_bias'", "True"]),
        ("mixtral", {"num_local_experts": ...}, ["'num_experts'", "nothing"]),
    ],
)
def test_refusals_name_the_field(tmp_path, family, changes, words):
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(write_config(tmp_path, **{**EXPERTS[family], **changes}))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


class _Recorder(CheckpointWeights):
    """Remembers what was read, and the most elements at once."""

    def __init__(self, path):
        super().__init__(path)
        self.names, self.most = set(), 0

    def get(self, name, shape, dtype, where=None):
        tensor = super().get(name, shape, dtype, where)
        self.names.add(name)
        if "expert" in name:
            self.most = max(self.most, tensor.numel())
        return tensor


def _stage(path, start, end, source):
    model = build_model(load_model_config(path), start_layer=start, end_layer=end, dtype=torch.float32, device=CPU)
    model.load_weights(source)
    return model


def _outputs(layers):
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(2))
    attended = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return torch.stack([layer.after_attention(x, attended) for layer in layers])


def _fused(tensors, num_experts, names, block, *, is_turned):
    """Return a checkpoint's tensors with those of each layer's experts in two."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    fused = {name.replace("block_sparse_moe.", block): tensor for name, tensor in fused.items()}
    for layer in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{layer}experts.{expert}.{name}.weight"] for expert in range(num_experts)])
            for name in names
        )
        to = layer.replace("block_sparse_moe.", block) + "experts."
        for name, tensor in ((f"{to}gate_up_proj", torch.cat([gate, up], 1)), (f"{to}down_proj", down)):
            fused[name] = (tensor.transpose(1, 2) if is_turned else tensor).contiguous()
    return fused


def _write(path, family, form):
    write_config(path, **EXPERTS[family])
    tensors = random_tensors(path)
    experts = load_model_config(path).experts
    names = (experts.names.gate, experts.names.up, experts.names.down)
    if form in ("fused", "turned"):
        tensors = _fused(tensors, experts.num_experts, names, "mlp.", is_turned=form == "turned")
    elif form == "fused, own block":
        tensors = _fused(tensors, experts.num_experts, names, experts.names.block, is_turned=False)
    if form == "sharded":
        write_sharded(path, tensors)
    else:
        save_file(tensors, path / "model.safetensors")
    return set(tensors)


@pytest.mark.parametrize("form", ["by expert", "sharded", "fused", "turned", "fused, own block"])
@pytest.mark.parametrize("family", EXPERTS)
def test_layouts(tmp_path, family, form, caplog):
    """All layouts are one model. A stage reads its own layers alone, of fused experts one at a time."""
    names = _write(tmp_path, family, form)
    read, outputs = [], []
    for start, end in ((0, 1), (1, 3)):
        source = _Recorder(tmp_path)
        model = _stage(tmp_path, start, end, source)
        outputs += _outputs(model.layers)
        read.append(source.names)
        assert all(model.owns_tensor(name) or name.endswith("embed_tokens.weight") for name in source.names)
        assert not [name for name in source.unread() if model.owns_tensor(name)]
        config = model._config
        assert source.most <= max(config.experts.intermediate_size, config.intermediate_size) * config.hidden_size
    assert read[0] | read[1] == names
    assert not read[0] & read[1]
    whole = _stage(write_config(tmp_path / "whole", **EXPERTS[family]), 0, 3, DummyWeights(1))
    by_expert = _write(tmp_path / "plain", family, "by expert")
    assert set(tensor_shapes(tmp_path)) == by_expert
    twin = _stage(tmp_path / "plain", 0, 3, CheckpointWeights(tmp_path / "plain"))
    assert torch.equal(torch.stack(outputs), _outputs(twin.layers))
    assert _outputs(whole.layers).isfinite().all()


@pytest.mark.parametrize("form", ["by expert", "fused", "turned"])
def test_a_member_reads_its_part_of_experts(tmp_path, form):
    _write(tmp_path, "qwen3", form)
    hidden, size = 24, 16
    experts = load_model_config(tmp_path).experts
    products = ((("gate_proj", "up_proj"), size, hidden), (("down_proj",), hidden, size))

    def read(source, member):
        weights = WeightReader(source, torch.float32, CPU, "model.layers.0.mlp.", member=member)
        of_experts = (
            weights
            if form == "by expert"
            else weights.of(FusedExperts(source, weights.prefix + "experts.", experts, size, hidden))
        )
        part = member.part(size // member.count)
        found = []
        for names, rows, columns in products:
            cut = (part if rows == size else rows, part if columns == size else columns)
            found.append(of_experts.expert_weight("experts.{}.", 5, names, (cut[0],) * len(names), cut[1]).data)
        return found

    gate_up, down = read(CheckpointWeights(tmp_path), Member())
    for rank in range(4):
        source, part = _Recorder(tmp_path), slice(rank * 4, rank * 4 + 4)
        got = read(source, Member(rank, 4))
        assert torch.equal(got[0], torch.cat([each[:, part] for each in gate_up.split(size, 1)], 1))
        assert torch.equal(got[1], down[:, :, part])
        assert source.most == hidden * size // 4


def test_a_square_product_is_told_by_the_other(tmp_path):
    """With as many inputs as outputs, 2 I = H or I = H, one shape does not say which come first."""
    for number, size in enumerate((12, 24)):
        path = tmp_path / str(number)
        write_config(path, **{**EXPERTS["qwen3"], "moe_intermediate_size": size})
        tensors = random_tensors(path)
        save_file(tensors, path / "model.safetensors")
        expected = _outputs(_stage(path, 0, 3, CheckpointWeights(path)).layers)
        for is_turned in (False, True):
            names = ("gate_proj", "up_proj", "down_proj")
            save_file(_fused(tensors, 5, names, "mlp.", is_turned=is_turned), path / "model.safetensors")
            assert torch.equal(_outputs(_stage(path, 0, 3, CheckpointWeights(path)).layers), expected)


def test_wrong_shapes_and_missing_experts_are_named(tmp_path):
    _write(tmp_path, "qwen3", "turned")
    write_config(tmp_path, **{**EXPERTS["qwen3"], "num_experts": 4})
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.mlp\.gate\.weight has the wrong shape"):
        _stage(tmp_path, 0, 1, CheckpointWeights(tmp_path))
    write_config(tmp_path, **{**EXPERTS["qwen3"], "moe_intermediate_size": 20})
    with pytest.raises(ModelLoadError, match=r"mlp\.experts\.gate_up_proj has the wrong shape"):
        _stage(tmp_path, 0, 1, CheckpointWeights(tmp_path))
    write_config(tmp_path, **EXPERTS["qwen3"])
    tensors = {name: tensor for name, tensor in random_tensors(tmp_path).items() if ".experts.3.up" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has no tensor model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight"):
        _stage(tmp_path, 0, 1, CheckpointWeights(tmp_path))


def _experts_of(path, quantization):
    """Return what the layers compute after attention, with the checkpoint's weights in another form."""
    config = replace(load_model_config(path), quantization=quantization)
    model = build_model(config, start_layer=0, end_layer=1, dtype=torch.float32, device=CPU)
    model.load_weights(CheckpointWeights(path))
    return _outputs(model.layers)


def test_fused_experts_become_fp8_while_they_are_read(tmp_path):
    expected = []
    for form in ("by expert", "turned"):
        _write(tmp_path / form, "qwen3", form)
        expected.append(_experts_of(tmp_path / form, ONLINE_FP8))
    assert torch.equal(*expected)
    plain = _experts_of(tmp_path / "turned", None)
    assert not torch.equal(plain, expected[0])
    torch.testing.assert_close(plain, expected[0], rtol=0.05, atol=0.05)


def test_fused_experts_in_4_bits_are_refused(tmp_path):
    _write(tmp_path, "qwen3", "turned")
    awq = Quantization(format="awq", block=(1, 8), has_zeros=True, skipped=("self_attn",))
    with pytest.raises(
        ModelLoadError, match=r"model\.layers\.0\.mlp\.experts\.0\.gate_proj\.qweight.*experts in one tensor"
    ):
        _experts_of(tmp_path, awq)


def test_a_quantized_router_is_widened(tmp_path):
    _write(tmp_path, "qwen3", "by expert")
    tensors = random_tensors(tmp_path)
    expected = _experts_of(tmp_path, None)
    scale = 2.0
    tensors["model.layers.0.mlp.gate.weight_scale"] = torch.tensor(scale)
    rounded = (tensors["model.layers.0.mlp.gate.weight"] / scale).to(torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.gate.weight"] = rounded
    save_file(tensors, tmp_path / "model.safetensors")
    others = ("self_attn", "experts")
    got = _experts_of(tmp_path, Quantization(format="fp8", block=(1, 0), skipped=others))
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.02)


def test_dummies_are_drawn_for_all_experts_at_once(tmp_path):
    reader = WeightReader(DummyWeights(1), torch.bfloat16, CPU, "model.layers.0.mlp.")
    weight = reader.expert_weight("experts.{}.", 128, ("gate_proj", "up_proj"), (96, 96), 128)
    assert weight.data.shape == (128, 192, 128)
    again = reader.expert_weight("experts.{}.", 128, ("gate_proj", "up_proj"), (96, 96), 128)
    assert torch.equal(weight.data, again.data)
    rows = weight.data.view(-1, 128).float()
    assert len(torch.unique(rows[:, :4], dim=0)) > 0.9 * len(rows)
    path = write_config(tmp_path, **EXPERTS["qwen3"])
    whole = _outputs(_stage(path, 0, 3, DummyWeights(1)).layers)
    cut = [_stage(path, *layers, DummyWeights(1)).layers for layers in ((0, 1), (1, 3))]
    assert torch.equal(_outputs([layer for layers in cut for layer in layers]), whole)
