"""Whether an engine fits machines that are not here: by the plan that a start would make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ModelLoadError, ResourceError
from raypp.models.registry import resolve_config_path
from raypp.ops.sample.draw_sizes import ROOM, digit_bytes
from raypp.plan.engine_layout import block_bytes_by_group
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.fit import (
    Fit,
    advised_cut,
    alternatives,
    check_fit,
    describe_fit,
    layers_by_memory,
    possible_cuts,
)
from raypp.plan.hardware import Gpu, Hardware, Machine, described_hardware, read_machines

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def _config(model: str, **settings: Any) -> EngineConfig:
    return EngineConfig.from_flat(_SHAPES / model, **settings)


def _fit(model: str, gpus: str, **settings: Any) -> Fit:
    machines = read_machines(gpus)
    return check_fit(_config(model, **settings), described_hardware(machines))


def _plan(model: str, gpus: str, **settings: Any) -> EnginePlan:
    return plan_engine(_config(model, **settings), described_hardware(read_machines(gpus)))


def test_the_answer_is_the_plans() -> None:
    fit, plan = _fit("qwen3-8b", "2x24GB", num_stages=2), _plan("qwen3-8b", "2x24GB", num_stages=2)
    assert fit.plan == plan
    assert fit.num_kv_tokens == (plan.num_blocks - 1) * 16 == pytest.approx(135_000, rel=0.1)
    assert fit.num_requests(8192) == fit.num_kv_tokens // 8192
    assert fit.num_machines == 1
    assert fit.request_lengths() == [2048, 8192, 32768, 40960]


def test_requests_take_whole_blocks_and_are_limited_by_max_num_seqs() -> None:
    fit = _fit("qwen3-8b", "2x24GB", num_stages=2, num_kv_blocks=101, max_model_len=1000, max_num_seqs=64)
    assert fit.num_kv_tokens == 1600
    assert (fit.requests_held(17), fit.requests_held(16)) == (50, 100)
    assert fit.num_requests(16) == 64
    assert fit.request_lengths() == [1000]


def test_the_memory_of_every_stage_adds_up_to_its_share() -> None:
    stages = _fit("qwen3-8b", "2x24GB", num_stages=2).describe()["stages"]
    parts = ("weight_bytes", "step_bytes", "graph_bytes", "library_bytes", "speculation_bytes", "item_bytes")
    for stage in stages:
        taken = sum(stage[part] for part in (*parts, "kv_cache_bytes", "left_bytes"))
        assert taken == stage["share_bytes"] == int(0.9 * stage["device_bytes"])
    assert min(stage["left_bytes"] // stage["block_bytes"] for stage in stages) == 0, "a stage is full"
    assert [stage["layers"] for stage in stages] == [[0, 19], [19, 36]]


def test_a_model_that_is_too_large_needs_more_gpus() -> None:
    fit = _fit("qwen3-32b", "2x24GB", num_stages=2)
    assert fit.plan is None
    assert "stage 0 does not fit" in str(fit.problem)
    assert fit.describe()["stages"][0]["left_bytes"] < 0
    [only] = alternatives(fit)
    assert (dict(only.settings), only.num_missing_gpus) == ({"num_stages": 4}, 2)
    assert only.fit.num_kv_tokens == _fit("qwen3-32b", "4x24GB", num_stages=4).num_kv_tokens > 8192


def test_unused_gpus_come_first() -> None:
    first = alternatives(_fit("qwen3-14b", "4x24GB"))[0]
    assert (dict(first.settings), first.num_missing_gpus) == ({"num_stages": 2}, 0)


def test_stages_without_a_gpu() -> None:
    fit = _fit("qwen3-8b", "2x24GB", num_stages=4)
    assert fit.problem is not None
    assert (fit.problem.message, fit.problem.got) == ("there are too few GPUs", "2 GPUs on 1 machine, placement=pack")
    assert dict(alternatives(fit)[0].settings) == {"num_stages": 2}
    large = _fit("qwen3-32b", "2x24GB", num_stages=4)
    assert [(dict(each.settings), each.num_missing_gpus) for each in alternatives(large)] == [({"num_stages": 4}, 2)]


def test_a_request_that_is_too_long_is_offered_as_long_as_can_be() -> None:
    fit = _fit("qwen3-8b", "2x24GB", max_model_len=32768)
    offered = {name: value for each in alternatives(fit) for name, value in each.settings.items()}
    assert offered["num_stages"] == 2
    longest = offered["max_model_len"]
    _plan("qwen3-8b", "2x24GB", max_model_len=longest)
    with pytest.raises(ResourceError):
        _plan("qwen3-8b", "2x24GB", max_model_len=longest + 16)


@pytest.mark.parametrize(
    ("model", "gpus", "settings"),
    [
        ("qwen3-8b", "1x20GB", {}),
        ("qwen3-8b", "2x24GB", {"stage_num_gpus": 0.5}),
        ("qwen3-8b", "2x24GB", {"num_kv_blocks": 100_000, "num_stages": 2}),
        ("qwen3-8b", "2x24GB", {"max_num_seqs": 4096, "max_num_batched_tokens": 8192, "num_stages": 2}),
        ("qwen3-8b", "2x24GB", {"layer_partition": [35, 1], "num_stages": 2, "max_model_len": 40960}),
        ("qwen3-vl-8b", "2x24GB", {"num_stages": 2}),
        ("qwen3-8b", "1x17.5GB", {"max_model_len": 8192}),
    ],
)
def test_every_alternative_starts(model: str, gpus: str, settings: dict[str, Any]) -> None:
    fit = _fit(model, gpus, **settings)
    assert fit.plan is None
    found = alternatives(fit)
    assert found
    for each in found:
        larger = f"{sum(machine.num_gpus for machine in read_machines(gpus)) + each.num_missing_gpus}x{gpus[2:]}"
        changed = _fit(model, larger, **settings | dict(each.settings))
        assert changed.plan is not None
        assert changed.num_kv_tokens == each.fit.num_kv_tokens


def test_an_encoder_may_share_a_gpu() -> None:
    fit = _fit("qwen3-vl-8b", "2x24GB", num_stages=2)
    assert "2 stages and 1 encoder, which ask for 3 GPUs" in str(fit.problem)
    shared = {"stage_num_gpus": 0.8, "encoder_num_gpus": 0.2}
    assert shared in [dict(each.settings) for each in alternatives(fit)]


def test_layers_by_memory_hold_more() -> None:
    """By time the last stage, which has the LM head, gets few layers; short memory makes that dear."""
    fit = _fit("qwen3-32b", "4x24GB", num_stages=4)
    found = layers_by_memory(fit)
    assert found is not None
    layers = found.settings["layer_partition"]
    assert isinstance(layers, list)
    assert sum(layers) == 64
    by_hand = _fit("qwen3-32b", "4x24GB", num_stages=4, layer_partition=layers)
    assert by_hand.num_kv_tokens == found.fit.num_kv_tokens > 1.1 * fit.num_kv_tokens
    for giver in range(4):  # no layer elsewhere would hold more
        for taker in set(range(4)) - {giver}:
            moved = [count - (stage == giver) + (stage == taker) for stage, count in enumerate(layers)]
            other = _fit("qwen3-32b", "4x24GB", num_stages=4, layer_partition=moved)
            assert other.num_kv_tokens <= found.fit.num_kv_tokens
    assert layers_by_memory(by_hand) is None
    assert layers_by_memory(_fit("qwen3-8b", "2x24GB")) is None


def test_layers_by_memory_may_fit_where_others_do_not() -> None:
    fit = _fit("qwen3-8b", "2x24GB", num_stages=2, layer_partition=[35, 1], max_model_len=40960)
    found = layers_by_memory(fit)
    assert found is not None
    assert found.settings["layer_partition"] == [18, 18]


def test_what_nothing_helps() -> None:
    assert alternatives(_fit("qwen3-8b", "36x1.5GB", num_stages=36)) == []


def _cuts(model: str, gpus: str, **settings: Any) -> dict[tuple[int, int], Fit]:
    """Return the possible cuts, by the numbers of stages and members."""
    cuts = possible_cuts(_fit(model, gpus, **settings))
    return {(len(cut.layout.layers), cut.layout.model.num_members): cut for cut in cuts}


def test_possible_cuts() -> None:
    cuts = _cuts("qwen3-14b", "2x24GB+4x24GB", num_stages=3)
    assert [(*numbers, cut.plan is not None, cut.num_machines) for numbers, cut in cuts.items()] == [
        (1, 1, False, 1),
        (2, 1, True, 1),
        (3, 1, True, 1),
        (4, 1, True, 1),
        (6, 1, True, 2),
        (1, 2, True, 1),
        (2, 2, True, 1),
        (3, 2, True, 2),
        (1, 4, True, 1),
    ]
    by_modules = _cuts("gpt-oss-20b", "2x80GB", model_impl="transformers")
    assert {numbers[1] for numbers in by_modules} == {1, 2}, "transformers' modules have members, too"


def _advised(model: str, gpus: str, **settings: Any) -> tuple[int, int]:
    cuts = _cuts(model, gpus, **settings)
    advised = advised_cut(list(cuts.values()))
    return next(numbers for numbers, cut in cuts.items() if cut is advised)


def test_which_stages_and_members_are_advised() -> None:
    assert _advised("qwen3-8b", "2x24GB") == (1, 2), "each layer is read by two"
    assert _advised("qwen3-8b", "8x80GB") == (2, 4), "sums of many rows take long, and two stages compute at once"
    assert _advised("qwen3-235b-a22b-fp8", "8x80GB+8x80GB") == (2, 8), "members of one machine, stages of several"
    assert _advised("qwen3-8b", "1x24GB+1x24GB") == (2, 1), "members are on one machine"
    assert _advised("qwen3-8b", "2x80GB", prompt_tokens_per_output=20.0) == (2, 1), "prompts make sums long"
    assert _advised("qwen3-vl-8b", "3x24GB") == (1, 2), "a GPU is an encoder's"
    assert advised_cut(possible_cuts(_fit("qwen3-32b", "2x24GB"))) is None


def test_members_are_advised_where_nvlink_joins_them() -> None:
    gpus = (Gpu(80 * 10**9, "NVIDIA H100"),) * 2
    for has_nvlink, expected in ((True, (1, 2)), (False, (2, 1))):
        hardware = described_hardware((Machine(gpus, has_nvlink=has_nvlink),))
        advised = advised_cut(possible_cuts(check_fit(_config("qwen3-8b", max_num_seqs=64), hardware)))
        assert advised is not None
        assert (len(advised.layout.layers), advised.layout.model.num_members) == expected


def test_cuts_that_settings_exclude_are_left_out() -> None:
    """A step of one stage would have all 256 rows."""
    cuts = _cuts("qwen3-8b", "2x80GB", num_stages=2, max_num_batched_tokens=128)
    assert list(cuts) == [(2, 1)]


def test_tokens_per_second_are_those_of_the_slowest_stage() -> None:
    one, two = _cuts("qwen3-8b", "2x80GB")[1, 1], _cuts("qwen3-8b", "2x80GB")[2, 1]
    assert two.tokens_per_s(1) == pytest.approx(one.tokens_per_s(1), rel=0.01), "one request passes all layers"
    assert 1.8 < two.tokens_per_s(64) / one.tokens_per_s(32) <= 2.0, "both stages compute at the same time"


@pytest.mark.parametrize(("num_requests", "measured"), [(1, 0.669), (16, 0.733), (64, 0.858)])
def test_members_and_stages_compare_as_was_measured(num_requests: int, measured: float) -> None:
    """Time per token of two members, as a share of that of two stages; benchmarks/REPORT.md, "Members of a stage"."""
    cuts = _cuts("qwen3-8b", "2x141GB")
    estimated = cuts[2, 1].tokens_per_s(num_requests) / cuts[1, 2].tokens_per_s(num_requests)
    assert estimated == pytest.approx(measured, abs=0.04)


def test_each_member_of_a_stage_has_a_gpu_of_one_machine() -> None:
    members = {"tensor_parallel_size": 2}
    fit = _fit("qwen3-14b", "4x24GB", num_stages=4, **members)
    assert fit.problem is not None
    assert fit.problem.expected == "room for 4 stages of 2 members, each stage on one machine, which ask for 8 GPUs"
    assert dict(alternatives(fit)[0].settings) == {"num_stages": 2}
    assert [stages for stages, count in _cuts("qwen3-14b", "8x24GB", **members) if count == 2] == [1, 2, 4]
    assert _fit("qwen3-14b", "1x24GB+1x24GB", **members).plan is None
    assert _fit("qwen3-14b", "2x24GB+2x24GB", num_stages=2, **members).num_machines == 2
    large = _fit("qwen3-32b", "3x24GB", num_stages=2, **members)
    assert [each.num_missing_gpus for each in alternatives(large)] == [1]


def test_members_have_half_of_the_logits_and_sums_by_digits() -> None:
    """Logits, changed ones, and 16 bytes of each while a step reports; one member keeps gathered tokens instead."""
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 256}  # logits are what takes the most
    one, two = (_fit("qwen3-0.6b", "2x24GB", tensor_parallel_size=count, **sizes).layout.memory[0] for count in (1, 2))
    assert one.step_bytes - two.step_bytes == 256 * (151_936 // 2 * (4 + 4 + 16) + 8 * ROOM - digit_bytes(2))


def test_a_plan_for_described_gpus_is_told_as_one() -> None:
    description = describe_fit(_config("qwen3-8b", num_stages=2), read_machines("2x24GB"))
    fit = description["fit"]
    assert (fit["fits"], fit["is_described"], fit["alternatives"]) == (True, True, [])
    assert description["plan"]["num_kv_blocks"] == description["config"]["cache"]["num_kv_blocks"]
    assert fit["requests"][1] == {"num_tokens": 8192, "num_requests": 16, "kv_cache_holds": 16}
    too_large = describe_fit(_config("qwen3-32b"), read_machines("1x24GB"))
    assert (too_large["plan"], too_large["fit"]["fits"]) == (None, False)
    assert too_large["fit"]["alternatives"][0]["num_missing_gpus"] == 3


def test_a_described_head_counts_its_weights_in_8_bits() -> None:
    """Whether a GPU that is not here has them is not known: the larger plan is the safe one."""
    eagle = {"method": "eagle3", "model": str(_SHAPES / "qwen3-8b-eagle3")}
    fit = _fit("qwen3-8b", "2x24GB", num_stages=2, load_format="dummy", speculative=eagle)
    assert fit.plan is not None
    assert fit.plan.describe()["draft_head_weights"] == "fp8"


def test_this_machine() -> None:
    cpu = Hardware(4, memory_bytes=8 << 30)
    fit = check_fit(EngineConfig.from_flat("tiny"), cpu)
    assert (fit.layout.device, fit.num_kv_tokens > 0, possible_cuts(fit)) == ("cpu", True, [])
    small = check_fit(EngineConfig.from_flat("tiny", max_model_len=4096, kv_cache_bytes=1 << 22), cpu)
    assert small.plan is None
    offered = [dict(each.settings) for each in alternatives(small)]
    assert {"kv_cache_bytes": 1 << 25} in offered
    with pytest.raises(ConfigError, match="device=cpu uses none"):
        describe_fit(EngineConfig.from_flat("tiny", device="cpu"), read_machines("1x24GB"))


def test_mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="more than the model was made for"):
        _fit("qwen3-8b", "2x24GB", num_stages=2, max_model_len=100_000)
    with pytest.raises(ModelLoadError, match="no-such"):
        check_fit(EngineConfig.from_flat("/no-such/model"), Hardware(1))


def test_of_a_hugging_face_id_the_configuration_alone_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if model == "Qwen/NoNetwork":
            raise OSError("no route to host")
        return str(_SHAPES / "qwen3-8b")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fit = check_fit(EngineConfig.from_flat("Qwen/Qwen3-8B"), described_hardware(read_machines("1x80GB")))
    assert fit.num_kv_tokens > 0
    assert len(asked) == 1
    assert not [pattern for patterns in asked for pattern in patterns if "safetensors" in pattern or "*" in pattern]
    with pytest.raises(ModelLoadError) as caught:
        resolve_config_path("Qwen/NoNetwork")
    assert "no route to host" in str(caught.value.got)
    assert "directory that holds the model's config.json" in str(caught.value.hint)


def test_groups_of_layers_whose_heads_differ_take_their_own_bytes() -> None:
    """Gemma 4: a block of global layers has 10 times 4 heads of 512, one of layers with a window 50 times 16 of 256."""
    config = EngineConfig.from_flat(_SHAPES / "gemma-4-31b", num_stages=2, load_format="dummy", block_size=16)
    fit = check_fit(config, described_hardware(read_machines("2x80GB")))
    assert fit.plan is not None
    of_stages = [
        block_bytes_by_group(fit.plan.model, 16, 2, stage.start_layer, stage.end_layer) for stage in fit.plan.stages
    ]
    whole = [16 * 2 * 2 * 10 * 4 * 512, 16 * 2 * 2 * 50 * 16 * 256]
    assert [sum(sizes) for sizes in zip(*of_stages, strict=True)] == whole
    taken = [
        sum(group.num_blocks * size for group, size in zip(fit.plan.groups, sizes, strict=True)) for sizes in of_stages
    ]
    assert taken == [stage.kv_cache_bytes for stage in fit.plan.stages]
    assert fit.requests_held(131072) >= 2


def test_layers_with_windows_take_the_memory_of_their_windows(tmp_path: Path) -> None:
    """Gemma-3-27B's shape at 128k tokens: 52 of 62 layers see 1,024 tokens. Against all layers keeping all."""
    kinds = [("full_attention" if index % 6 == 5 else "sliding_attention") for index in range(62)]
    values = {
        "architectures": ["MinistralForCausalLM"],
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    token_bytes, held = [], []
    for layer_types in (kinds, ["full_attention"] * 62):
        (tmp_path / "config.json").write_text(json.dumps({**values, "layer_types": layer_types}))
        machines = read_machines("2x80GB")
        config = EngineConfig.from_flat(tmp_path, num_stages=2, load_format="dummy")
        fit = check_fit(config, described_hardware(machines))
        assert fit.plan is not None
        kv_bytes = sum(stage.kv_cache_bytes for stage in fit.plan.stages)
        token_bytes.append(kv_bytes / fit.num_kv_tokens)
        held.append(fit.requests_held(131072))
    print(f"\nKV bytes per token: {token_bytes[0]:,.0f} of {token_bytes[1]:,.0f}; requests of 128k tokens: {held}")
    assert token_bytes[0] <= 0.3 * token_bytes[1]
    assert held[0] >= 3 * held[1] > 0
