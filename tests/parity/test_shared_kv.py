"""Gemma 4 E2B and E4B by transformers' modules: inputs of all layers, and layers without keys and values of their own.

Small random copies of 8 layers, the last 4 of which attend to keys and values of layers 2 and 3: tokens equal
transformers' own with prompts in chunks, cached prefixes, preemption, n-grams, in graphs, with blocks in CPU memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from asked_here import ask_here
from op_tape import spoiling_tape_graphs, tape_graphs
from shrunken_models import make_shrunken
from test_any_decoder import RUNS, compare, prompts_of

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ModelLoadError
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.sizes import kv_bytes_per_token, parameter_counts
from raypp.models.weights import CheckpointWeights
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.fit import describe_layers
from raypp.plan.hardware import Hardware
from raypp.plan.measure import measure_costs
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.testing.shrunken_model import save_random_model
from raypp.testing.try_decoder import first_difference
from raypp.types import SamplingParams

SHAPES = Path(__file__).parents[2] / "benchmarks/models"
SMALL = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3, 5, 7)},
    "hidden_size_per_layer_input": 16,
    "use_double_wide_mlp": True,
}
FIXED = {"block_size": 4, "max_model_len": 64, "stage_num_threads": 1, "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shrunken("gemma4_text", tmp_path_factory.mktemp("model"), **SMALL)


def _plan(path: Path, **settings: object) -> EnginePlan:
    return plan_engine(EngineConfig.from_flat(str(path), **FIXED, **settings), Hardware(1))


def test_greedy_tokens_equal_transformers(path: Path) -> None:
    compare(path, RUNS)


def test_members_give_the_same_tokens(path: Path) -> None:
    compare(path, [RUNS[1] | {"tensor_parallel_size": 2}, RUNS[2] | {"num_stages": 1, "tensor_parallel_size": 4}])


def test_a_checkpoint_with_towers_is_read(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As E2B and E4B are published: text, images, and an encoder of sounds, which is left out."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = ("image_token_id", "audio_token_id", "video_token_id", "boi_token_id", "eoi_token_id", "boa_token_id")
    config = transformers.Gemma4Config(
        text_config=transformers.AutoConfig.from_pretrained(path).to_dict(),
        vision_config=sizes
        | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64, "use_clipped_linears": True},
        audio_config=sizes | {"output_proj_dims": 32, "subsampling_conv_channels": [8, 4]},
        **{name: 250 + place for place, name in enumerate((*names, "eoa_token_index"))},
    )
    save_random_model(config, tmp_path)
    config = _plan(tmp_path).model
    assert config.architecture == "transformers:Gemma4ForConditionalGeneration"
    assert config.vision is not None
    assert config.vision.has_clipped_products
    source = CheckpointWeights(tmp_path)
    build_encoder(config, dtype=torch.float32, device=torch.device("cpu"), source=source)
    assert any("audio_tower" in name for name in source.unread())
    assert "not used" not in caplog.text
    assert _plan(tmp_path, num_encoders=0).model.vision is None
    assert [first_difference(tmp_path, partition) for partition in ([8], [2, 6])] == [None, None]


def test_blocks_come_back_from_cpu_memory(path: Path) -> None:
    compare(path, [RUNS[1] | RUNS[2] | {"num_stages": 2, "cpu_kv_bytes": 1 << 20}])


@pytest.mark.in_ci("fp8")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_recorded_and_called_steps_yield_the_same(path: Path, kv_cache_dtype: str) -> None:
    params, texts = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), []
    settings = {"num_stages": 3, "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_dtype": kv_cache_dtype}
    for make_graphs in (None, tape_graphs, spoiling_tape_graphs):
        mode = "none" if make_graphs is None else "full_and_piecewise"
        plan = _plan(path, mode=mode, max_piecewise_tokens=32, **settings)
        engine = LocalEngine(plan, pipeline=build_local_pipeline(plan, make_graphs=make_graphs))
        texts.append(engine.generate(prompts_of(), params))
    assert texts[0] == texts[1] == texts[2]


def test_layers_without_a_cache_take_no_memory(path: Path) -> None:
    config = load_model_config(path)
    with_cache = [True] * 4 + [False] * 4
    assert [each.source for each in config.attending] == [None] * 4 + [2, 3, 2, 3]
    assert [num_bytes > 0 for num_bytes in kv_bytes_per_token(config, 2)] == with_cache
    assert [config.group_of(layer) is not None for layer in range(8)] == with_cache
    assert "4 with the keys and values of other layers" in describe_layers(config)
    plan, sizes = _plan(path, num_stages=2, layer_partition=[1, 7], num_kv_blocks=20), kv_bytes_per_token(config, 4)
    blocks = [plan.groups[config.group_of(layer) or 0].num_blocks for layer in range(8)]
    of_layers = [4 * count * num_bytes for count, num_bytes in zip(blocks, sizes, strict=True)]
    assert [stage.kv_cache_bytes for stage in plan.stages] == [of_layers[0], sum(of_layers[1:])]
    assert plan.edge_bytes == [4 * (64 + 7 * 16)]


@pytest.mark.parametrize(("partition", "layer", "source"), [([3, 5], 4, 2), ([2, 2, 4], 4, 2), ([1, 6, 1], 7, 3)])
def test_a_cut_before_a_layer_that_shares_is_refused(path: Path, partition: list[int], layer: int, source: int) -> None:
    with pytest.raises(ConfigError) as raised:
        _plan(path, num_stages=len(partition), layer_partition=partition)
    words = [str(partition), f"layer {layer} takes those of layer {source}", "layers 1 to 2", "layer_partition=["]
    assert [word for word in words if word not in str(raised.value)] == []


def test_more_stages_than_possible_cuts_are_refused(path: Path) -> None:
    assert [stage.num_layers for stage in _plan(path, num_stages=3).stages] == [1, 1, 6]
    with pytest.raises(ConfigError, match=r"num_stages=4; expected: at most 3 stages, .* layers 1 to 2"):
        _plan(path, num_stages=4)


def test_layers_that_share_are_not_measured(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers that share keys and values are not measured; got: .*Gemma4"):
        measure_costs(_plan(path, num_stages=2), num_rows=1, context_len=8, params=SamplingParams(max_tokens=1))


def test_gemma_3n_is_refused(tmp_path: Path) -> None:
    """It has inputs of layers, too, and several residual streams."""
    config = transformers.Gemma3nTextConfig(architectures=["Gemma3nForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="inputs of token ids in a way that raypp does not have; got: Gemma3n"):
        load_model_config(tmp_path)


@pytest.mark.in_ci("gemma-4-e2b-35-13-4.6")
@pytest.mark.parametrize(
    ("name", "num_layers", "last_begin", "num_billions"), [("gemma-4-e2b", 35, 13, 4.6), ("gemma-4-e4b", 42, 22, 7.5)]
)
def test_published_sizes(name: str, num_layers: int, last_begin: int, num_billions: float, tmp_path: Path) -> None:
    config = load_model_config(SHAPES / name)
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": json.loads((SHAPES / name / "config.json").read_text(encoding="utf-8")),
        "vision_config": {"model_type": "gemma4_vision", "standardize": False, "use_clipped_linears": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    both = load_model_config(tmp_path)
    assert replace(both, architecture=config.architecture, vision=None) == config
    tower = both.vision
    assert tower is not None
    assert (tower.depth, tower.hidden_size, tower.head_dim, tower.intermediate_size) == (16, 768, 64, 3072)
    assert (tower.tokens_per_max_image, tower.has_clipped_products, tower.is_standardized) == (280, True, False)
    assert not tower.sees_ahead
    assert config.stage_begins == tuple(range(last_begin + 1))
    assert parameter_counts(config)[0] == pytest.approx(num_billions * 1e9, rel=0.02)
    assert config.stream_size(0) == config.hidden_size + num_layers * 256
    shared = json.loads((SHAPES / name / "config.json").read_text(encoding="utf-8"))["num_kv_shared_layers"]
    assert sum(num_bytes > 0 for num_bytes in kv_bytes_per_token(config, 2)) == num_layers - shared
