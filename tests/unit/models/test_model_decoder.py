"""A model built for a layer range: what it reads, what it weighs, and that any cut computes the same."""

from __future__ import annotations

import pytest
import torch
from checkpoints import EXPERTS, tensor_shapes, write_config

from raypp.models.config import load_model_config
from raypp.models.registry import build_model
from raypp.models.sizes import embedding_bytes, kv_bytes_per_token, layer_sizes, lm_head_bytes
from raypp.models.weights import DummyWeights
from raypp.ops.attention import AttentionBatch
from raypp.ops.kv_cache import allocate_layer_cache

CPU = torch.device("cpu")
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class RecordingWeights:
    """Random weights that remember what was asked for."""

    def __init__(self):
        self.num_bytes = {}
        self.shapes = {}

    def shape_of(self, name):
        return None

    def get(self, name, shape, dtype, where=None):
        tensor = DummyWeights(3).get(name, shape, dtype, where)
        self.num_bytes[name], self.shapes[name] = tensor.nbytes, shape
        return tensor


def _build(path, start, end, dtype=torch.float32):
    source = RecordingWeights()
    model = build_model(load_model_config(path), start_layer=start, end_layer=end, dtype=dtype, device=CPU)
    model.load_weights(source)
    return model, source


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_reads_its_own_tensors(tmp_path, tied):
    path = write_config(tmp_path, tie_word_embeddings=tied)
    first, middle, last = (set(_build(path, start, end)[1].shapes) for start, end in ((0, 1), (1, 2), (2, 3)))
    head = EMBEDDING if tied else LM_HEAD
    for index, names in enumerate((first, middle, last)):
        assert {name for name in names if name.startswith("model.layers.")} == {
            name for name in tensor_shapes(path) if name.startswith(f"model.layers.{index}.")
        }
    assert {name for name in first if "layers" not in name} == {EMBEDDING}
    assert not {name for name in middle if "layers" not in name}
    assert {name for name in last if "layers" not in name} == {"model.norm.weight", head}
    assert _build(path, 0, 3)[1].shapes == tensor_shapes(path)


@pytest.mark.parametrize("tied", [False, True])
def test_exactly_one_stage_owns_an_unread_tensor(tmp_path, tied):
    path = write_config(tmp_path, tie_word_embeddings=tied)
    stages = [_build(path, start, end) for start, end in ((0, 1), (1, 2), (2, 3))]

    def lookers(name):
        return [index for index, (model, _) in enumerate(stages) if model.owns_tensor(name)]

    assert [lookers(f"model.layers.{index}.self_attn.q_proj.bias") for index in range(4)] == [[0], [1], [2], [2]]
    assert [lookers(name) for name in ("model.norm.bias", "score.weight")] == [[2], [2]]
    assert (lookers(EMBEDDING), lookers(LM_HEAD)) == ([], [] if tied else [2])
    for index, (_, source) in enumerate(stages):
        assert all(lookers(name) in ([index], []) for name in source.shapes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"architectures": ["Qwen2ForCausalLM"], "head_dim": 6},
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
        {**EXPERTS["qwen3"], "mlp_only_layers": []},
        EXPERTS["mixtral"],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_those_that_are_read(tmp_path, changes, dtype):
    path = write_config(tmp_path, **changes)
    config = load_model_config(path)
    for start, end in ((0, 3), (0, 1), (1, 2), (1, 3)):
        model, source = _build(path, start, end, dtype)
        assert model.weight_bytes == sum(source.num_bytes.values())
    _, middle = _build(path, 1, 2, dtype)
    _, last = _build(path, 2, 3, dtype)
    assert layer_sizes(config, dtype.itemsize)[1].weight_bytes == sum(middle.num_bytes.values())
    assert lm_head_bytes(config, dtype.itemsize) == sum(last.num_bytes.values()) - sum(middle.num_bytes.values())
    assert embedding_bytes(config, dtype.itemsize) == _build(path, 0, 1, dtype)[1].num_bytes[EMBEDDING]


def test_kv_bytes_are_those_of_the_cache(tmp_path):
    config = load_model_config(write_config(tmp_path))
    attention = config.attention[0]
    sizes = attention.num_kv_heads, attention.head_dim, attention.v_dim
    cache = allocate_layer_cache(5, 16, *sizes, torch.bfloat16, CPU)
    assert not any(side.any() for side in cache)
    assert sum(side.nbytes for side in cache) == 5 * 16 * kv_bytes_per_token(config, 2)[0]


@torch.inference_mode()
def _logits(path, cuts, dtype=torch.float32):
    """Return the logits of a prompt that passes through stages cut at the given layers."""
    config = load_model_config(path)
    input_ids = torch.arange(7, dtype=torch.int32) * 9
    hidden = None
    for start, end in zip([0, *cuts], [*cuts, config.num_layers], strict=True):
        model, _ = _build(path, start, end, dtype)
        if hidden is None:
            hidden = model.embed(input_ids)
        before = hidden.clone()
        attention = AttentionBatch(
            num_decode_rows=0,
            decode_query_len=1,
            seq_lens=torch.tensor([7], dtype=torch.int32),
            block_tables=[torch.tensor([[2, 1]], dtype=torch.int32)],
            slot_mappings=[torch.tensor([8, 9, 10, 11, 4, 5, 6])],
            prefill_query_lens=[7],
            prefill_seq_lens=[7],
        )
        kept = config.attention[0].cache
        sizes = (kept.num_kv_heads, kept.k_dim, kept.v_dim)
        caches = [allocate_layer_cache(3, 4, *sizes, dtype, CPU) for _ in range(start, end)]
        out = model.forward(hidden, torch.arange(7), attention, caches)
        assert torch.equal(hidden, before), "the input is left as it is"
        hidden = out
    return model.compute_logits(hidden)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_any_cut_computes_the_same(tmp_path, architecture, tied):
    path = write_config(tmp_path, architectures=[architecture], head_dim=6, tie_word_embeddings=tied)
    whole = _logits(path, [])
    assert whole.shape == (7, 64)
    for cuts in ([1], [2], [1, 2]):
        assert torch.equal(_logits(path, cuts), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(tmp_path, dtype):
    path = write_config(tmp_path)
    got = _logits(path, [1], dtype)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, _logits(path, []), atol=5e-3, rtol=5e-2)
