"""From a configuration to a plan in which nothing is open."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_configs import write_config

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ModelLoadError, ResourceError
from raypp.models.sizes import embedding_bytes
from raypp.ops.row_tokens import RowTokens
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.speculation_plan import speculation_bytes, table_bytes
from raypp.plan.stage_memory import plan_cpu_kv
from raypp.stage.build_stage import build_stage_model
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage_spec import NUM_PADDING_ROWS
from raypp.transport.slices import slice_bytes

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def _plan(num_cores: int = 2, **settings) -> EnginePlan:
    return plan_engine(EngineConfig.from_flat("tiny", **settings), Hardware(num_cores, memory_bytes=8 << 30))


def test_the_default_partition_counts_the_lm_head():
    assert [stage.num_layers for stage in _plan(num_stages=2).stages] == [4, 2]
    assert [stage.num_layers for stage in _plan(num_stages=1).stages] == [6]


def test_an_explicit_partition_is_kept():
    plan = _plan(num_stages=3, layer_partition=[1, 2, 3])
    assert [(stage.start_layer, stage.end_layer) for stage in plan.stages] == [(0, 1), (1, 3), (3, 6)]


def test_blocks_are_those_of_the_stage_with_the_most_layers():
    plan = _plan(num_stages=2, kv_cache_bytes=1 << 20, block_size=8, max_model_len=64)
    bytes_per_block_and_layer = 2 * 8 * 2 * 64 * 4  # keys and values, tokens, heads, head size, float32
    assert plan.num_blocks == (1 << 20) // (4 * bytes_per_block_and_layer)
    assert [stage.kv_cache_bytes for stage in plan.stages] == [
        plan.num_blocks * layers * bytes_per_block_and_layer for layers in (4, 2)
    ]


def test_one_core_is_left_to_the_driver():
    assert _plan(2).num_threads == 1
    assert _plan(16).num_threads == 15
    assert _plan(16, num_stages=4).num_threads == 3
    assert _plan(16, stage_num_threads=5).num_threads == 5


def test_blocks_in_cpu_memory_are_as_many_as_the_largest_leave_room_for():
    plan = _plan(num_stages=2, cpu_kv_bytes=1 << 22, block_size=8)
    bytes_per_block_and_layer = 2 * 8 * 2 * 64 * 4
    [group] = plan.groups
    assert group.num_cpu_blocks == (1 << 22) // (4 * bytes_per_block_and_layer)
    assert [stage.cpu_kv_bytes for stage in plan.stages] == [
        group.num_cpu_blocks * layers * bytes_per_block_and_layer for layers in (4, 2)
    ]
    limits = plan.scheduler_limits()
    assert group.block_bytes == 6 * bytes_per_block_and_layer
    assert limits.groups == plan.stage_spec(0).groups == plan.stage_spec(1).groups == plan.groups
    assert plan.describe()["num_cpu_kv_blocks"] == group.num_cpu_blocks
    assert _plan().groups[0].num_cpu_blocks == 0


@pytest.mark.parametrize(
    ("placement", "num_machines", "gib", "fits"),
    [
        ("pack", 1, 54, True),
        ("pack", 1, 55, False),
        ("pack", 2, 55, True),
        ("strict_pack", 2, 55, False),
        ("strict_spread", 2, 108, True),
        ("strict_spread", 2, 110, False),
    ],
)
def test_stages_of_one_machine_share_its_main_memory(placement, num_machines, gib, fits):
    hardware = Hardware(16, 128 << 30, 2, "GPU", 80 << 30, (9, 0), num_machines)
    config = EngineConfig.from_flat(
        "tiny", device="cuda", num_stages=2, placement=placement, cpu_kv_bytes=gib << 30, layer_partition=[3, 3]
    )
    if fits:
        assert plan_engine(config, hardware).stages[0].cpu_kv_bytes > (gib - 1) << 30
        return
    with pytest.raises(ResourceError, match="in CPU memory do not fit the machine") as caught:
        plan_engine(config, hardware)
    assert caught.value.got == "128.00 GiB of main memory"


@pytest.mark.parametrize(("gib", "num_gpus", "fits"), [(27, 4, True), (28, 4, False), (54, 2, True), (55, 2, False)])
def test_members_of_a_stage_share_the_main_memory_of_its_machine(gib, num_gpus, fits):
    """Two stages of two members: all four on one machine if it has as many GPUs."""
    hardware = Hardware(16, 128 << 30, num_gpus, "GPU", 80 << 30, (9, 0))
    settings = {"device": "cuda", "num_stages": 2, "tensor_parallel_size": 2, "layer_partition": [3, 3]}
    config = EngineConfig.from_flat("tiny", cpu_kv_bytes=gib << 30, **settings)
    if fits:
        assert plan_engine(config, hardware).num_members == 2
        return
    with pytest.raises(ResourceError, match="in CPU memory do not fit the machine"):
        plan_engine(config, hardware)


def test_nothing_is_open_in_the_resolved_config():
    config = _plan(num_stages=2).resolved_config()
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 4096)
    assert (config.parallel.layer_partition, config.parallel.transport) == ([4, 2], "gloo")
    assert config.cache.num_kv_blocks is not None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_stages": 7}, ConfigError, "more stages than layers"),
        ({"num_stages": 2, "layer_partition": [2, 3]}, ConfigError, "does not add up"),
        ({"max_model_len": 100_000}, ConfigError, "more than the model was made for"),
        ({"max_model_len": 1000, "num_kv_blocks": 4}, ResourceError, "too small for one request"),
        ({"block_size": 1, "num_kv_blocks": 2}, ResourceError, "too small for any request"),
        ({"num_kv_blocks": 1_000_000}, ResourceError, "stage 0 does not fit this machine's memory"),
        ({"kv_cache_bytes": 100}, ResourceError, "too small for one block"),
        ({"cpu_kv_bytes": 100}, ResourceError, "cpu_kv_bytes is too small for one KV block"),
        ({"cpu_kv_bytes": 1 << 50}, ResourceError, "stage 0 does not fit this machine's memory"),
        (
            {"cpu_kv_bytes": 1 << 24, "enable_prefix_caching": False},
            ConfigError,
            "has no effect without prefix caching",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        _plan(**settings)
    assert caught.value.got is not None
    assert caught.value.expected is not None


def test_no_such_model():
    with pytest.raises(ModelLoadError):
        plan_engine(EngineConfig.from_flat("/no/such/model"), Hardware(1))


_H200_BYTES = 150_000_000_000


def _gpu_plan(num_gpus: int = 2, **settings) -> EnginePlan:
    hardware = Hardware(16, num_gpus=num_gpus, gpu_memory_bytes=_H200_BYTES)
    return plan_engine(EngineConfig.from_flat("tiny", **settings), hardware)


@pytest.mark.parametrize(
    ("model", "device", "least", "most"),
    [
        ("qwen3.6-27b", "cuda", 2048, 4096),
        ("qwen3.6-35b-a3b-fp8", "cuda", 2048, 4096),
        ("qwen3.6-27b", "cpu", 512, 512),
        ("qwen3-8b", "cuda", 512, 512),
    ],
)
def test_chunks_of_models_with_states_compute_as_long_as_their_host_starts_them(model, device, least, most):
    hardware = Hardware(16, 256 << 30, 2, "GPU", 80 << 30, (9, 0))
    path = Path(__file__).parents[3] / "benchmarks" / "models" / model
    settings = {"num_stages": 2, "load_format": "dummy", "device": device, "max_model_len": 4096}
    config = EngineConfig.from_flat(str(path), **settings, num_kv_blocks=1024, max_num_seqs=4)
    assert least <= plan_engine(config, hardware).min_prefill_chunk_tokens <= most
    given = config.with_settings(min_prefill_chunk_tokens=100)
    assert plan_engine(given, hardware).min_prefill_chunk_tokens == 100


def test_gpus_are_used_when_there_are_any():
    plan = _gpu_plan(num_stages=2)
    assert (plan.device, plan.dtype, plan.transport) == ("cuda", "bfloat16", "auto")
    assert plan.stage_resources() == {"CPU": 0.01, "GPU": 1.0}
    on_cpu = _gpu_plan(num_stages=2, device="cpu")
    assert (on_cpu.device, on_cpu.dtype, on_cpu.transport) == ("cpu", "float32", "gloo")
    assert on_cpu.stage_resources() == {"CPU": 0.01}


def test_the_kv_cache_takes_what_weights_and_steps_leave_of_the_share():
    whole, half = _gpu_plan(), _gpu_plan(stage_num_gpus=0.5)
    assert 0.45 < half.num_blocks / whole.num_blocks < 0.5  # what is fixed weighs more on a half
    total = whole.stages[0].weight_bytes + whole.stages[0].kv_cache_bytes
    assert 0.85 * _H200_BYTES < total < 0.9 * _H200_BYTES
    assert _gpu_plan(num_kv_blocks=1000).num_blocks == 1000


def test_a_stage_that_does_not_fit_its_gpu_is_refused_with_the_numbers():
    with pytest.raises(ResourceError, match="stage 0 does not fit") as caught:
        _gpu_plan(gpu_memory_utilization=0.01)
    assert "KV blocks" in str(caught.value.got)
    with pytest.raises(ResourceError, match="there is no GPU"):
        _plan(device="cuda")


def test_the_token_table_is_the_last_stages_and_planned_to_the_byte():
    plan = _plan(num_stages=2, method="ngram", max_num_seqs=10, max_model_len=1000)
    num_rows = 10 + NUM_PADDING_ROWS
    assert plan.ngram_window == 1000
    # In front of the window is room for 8 drafts and the token after them; whole groups of 16 tokens.
    assert [stage.token_table_bytes for stage in plan.stages] == [0, num_rows * 1024 * 4]
    spec = plan.stage_spec(1)
    table = RowTokens(spec.max_num_seqs, spec.row_tokens_width, torch.device("cpu")).table
    assert table.nbytes == plan.stages[1].token_table_bytes
    described = plan.describe()
    assert [stage["token_table_bytes"] for stage in described["stages"]] == [0, num_rows * 1024 * 4]
    assert described["num_drafts"] == [0, 2, 4, 8]
    assert plan.resolved_config().speculative.ngram_window == 1000


@pytest.mark.parametrize("count", [1, 2])
def test_the_bytes_of_an_edge_are_those_of_its_messages(count):
    """Of each member to a stage on its node, and to one on another node."""
    drafting = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 2}
    plan = _plan(num_stages=3, tensor_parallel_size=count, speculative=drafting)
    specs = plan.stage_specs()
    messages = StageSchemas.of(specs[0], plan.model.hidden_size).forward_messages(specs[0])
    of_token = [each.schema.num_bytes(0, 1) for each in messages]
    assert plan.edge_bytes == of_token
    assert max(of_token) > plan.model.hidden_size * 4, "states that the head wants"
    stages = plan.describe()["stages"]
    assert [stage["sent_bytes_per_token"] for stage in stages] == [*of_token, 0]
    slices = [slice_bytes(each, count) for each in [*of_token, 0]]
    assert [stage["sent_bytes_per_token_to_another_node"] for stage in stages] == slices


def test_a_window_bounds_the_token_table():
    assert _plan(method="ngram").ngram_window == 4096
    assert _plan(method="ngram", ngram_window=100).ngram_window == 100
    assert _plan().ngram_window == 0
    rows = _plan().config.scheduler.max_num_seqs + NUM_PADDING_ROWS
    assert _plan().stages[-1].token_table_bytes == rows * 80 * 4, "what bad words look back at"


def test_a_token_table_without_memory_for_it_is_refused_with_the_numbers():
    small = Hardware(2, memory_bytes=1 << 29)
    config = EngineConfig.from_flat("tiny", method="ngram", max_num_seqs=40_000, max_num_batched_tokens=40_000)
    with pytest.raises(ResourceError) as caught:
        plan_engine(config, small)
    for word in ("token table", "657,952,896 bytes: 40,002 rows of 4,112 tokens", "536,870,912", "ngram_window="):
        assert word in str(caught.value)
    (fitting,) = re.findall(r"ngram_window=(\d+)", str(caught.value))
    for window, fits in ((int(fitting), True), (int(fitting) + 1, False)):
        config = EngineConfig.from_flat(
            "tiny", method="ngram", max_num_seqs=40_000, max_num_batched_tokens=40_000, ngram_window=window
        )
        with nullcontext() if fits else pytest.raises(ResourceError):
            plan_engine(config, small)


def test_a_gpus_kv_cache_leaves_room_for_the_token_table():
    gpu = Hardware(2, num_gpus=1, gpu_name="GPU", gpu_memory_bytes=4 << 30)
    narrow, wide = (
        plan_engine(EngineConfig.from_flat("tiny", method="ngram", max_num_seqs=2048, ngram_window=window), gpu)
        for window in (64, 4096)
    )
    lost = narrow.num_blocks - wide.num_blocks
    block_bytes = wide.stages[0].kv_cache_bytes // wide.num_blocks
    table_bytes = wide.stages[0].token_table_bytes - narrow.stages[0].token_table_bytes
    assert table_bytes > 30 << 20
    assert lost * block_bytes == pytest.approx(table_bytes, abs=block_bytes)


def test_a_draft_head_is_part_of_the_plan() -> None:
    """Weights, KV, tapped states and time of a head: the last stage holds fewer layers, the KV cache fewer blocks."""
    gpus = Hardware(16, num_gpus=2, gpu_memory_bytes=40 << 30)

    def plan(**settings: object) -> EnginePlan:
        config = EngineConfig.from_flat(
            str(_SHAPES / "qwen3-8b"), load_format="dummy", num_stages=2, max_model_len=4096, **settings
        )
        return plan_engine(config, gpus)

    off = plan()
    head = plan(
        speculative={"method": "eagle3", "model": str(_SHAPES / "qwen3-8b-eagle3"), "num_speculative_tokens": 4}
    )
    assert head.draft_head is not None
    assert head.draft_head.config.aux_depths == (2, 18, 33)
    assert head.stages[-1].num_layers < off.stages[-1].num_layers
    config, layer = head.draft_head.config, off.stages[0].weight_bytes
    assert head.stages[-1].draft_head_bytes == config.weight_bytes(2) + embedding_bytes(head.model, 2)
    assert layer > config.weight_bytes(2) > 700e6  # one layer, twice as wide, fc, and 32,000 rows of an LM head
    assert head.draft_head.tap_stages == tuple(int(depth >= head.stages[1].start_layer) for depth in (2, 18, 33))
    kept = speculation_bytes(head.config, head.model, head.ngram_window, head.draft_head, 2)
    per_depth = head.config.scheduler.max_num_batched_tokens * 4096 * 2
    num_last = sum(head.draft_head.tap_stages)
    assert kept == [per_depth * (3 - num_last), per_depth * num_last + table_bytes(head.config, head.ngram_window)]
    limits = head.scheduler_limits()
    assert (limits.num_lookahead_tokens, limits.caches_next_token) == (3, True)
    assert not off.scheduler_limits().caches_next_token


_EAGLE = {"method": "eagle3", "model": str(_SHAPES / "qwen3-8b-eagle3"), "num_speculative_tokens": 4}


def _on_gpus(model: str, capability: tuple[int, int] = (9, 0), **settings: object) -> EnginePlan:
    gpus = Hardware(16, num_gpus=2, gpu_memory_bytes=140 << 30, gpu_capability=capability)
    config = EngineConfig.from_flat(
        str(_SHAPES / model), load_format="dummy", num_stages=2, max_model_len=4096, **settings
    )
    return plan_engine(config, gpus)


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ((9, 0), {}, "fp8"),
        ((8, 9), {"dtype": "float16"}, "fp8"),
        ((8, 6), {}, "model"),
        ((0, 0), {}, "model"),  # not known
        ((9, 0), {"dtype": "float32"}, "model"),
        ((9, 0), {"device": "cpu", "kv_cache_bytes": 8 << 30}, "model"),
    ],
)
def test_a_heads_weights_are_read_in_8_bits_where_that_can_be(capability, settings, expected) -> None:
    plan = _on_gpus("qwen3-8b", capability, speculative=_EAGLE, **settings)
    assert plan.resolved_config().speculative.head_weights == expected
    assert plan.describe()["draft_head_weights"] == expected
    assert plan.draft_head.config.has_8_bit_weights == (expected == "fp8")
    asked = _EAGLE | {"head_weights": "fp8"}
    if expected == "model":
        with pytest.raises(ConfigError, match="cannot be read in 8 bits"):
            _on_gpus("qwen3-8b", capability, speculative=asked, **settings)
    else:
        as_given = _on_gpus("qwen3-8b", capability, speculative=_EAGLE | {"head_weights": "model"}, **settings)
        assert not as_given.draft_head.config.has_8_bit_weights
        assert as_given.stages[-1].draft_head_bytes < plan.stages[-1].draft_head_bytes  # the rounded ones are besides


def test_an_mtp_head_in_fp8_takes_what_the_device_holds_of_it() -> None:
    """In 8 bits besides, products have 16, too; experts keep their form where the device multiplies it."""
    mtp = {"method": "mtp", "num_speculative_tokens": 3}

    def head_bytes(capability: tuple[int, int], **speculative: object) -> float:
        plan = _on_gpus("qwen3.6-35b-a3b-fp8", capability, speculative=mtp | speculative)
        return plan.stages[-1].draft_head_bytes - embedding_bytes(plan.model, 2)

    hidden, expert, shared, vocab = 2048, 512, 512, 248_320
    experts = 256 * 3 * expert * hidden
    attention = (2 * 16 * 256 + 2 * 2 * 256) * hidden + hidden * 16 * 256  # queries have gates
    products = attention + 3 * shared * hidden
    others = 2 * (2 * hidden * hidden + 256 * hidden)  # fc, router
    rounded = products + 2 * hidden * hidden + vocab * hidden
    assert head_bytes((9, 0)) == pytest.approx(experts + 2 * products + others + rounded, rel=0.005)
    assert head_bytes((9, 0), head_weights="model") == pytest.approx(experts + products + others, rel=0.005)
    assert head_bytes((8, 6)) == pytest.approx(2 * (experts + products) + others, rel=0.005)


def test_layers_of_stages_on_gpus() -> None:
    """As docs/design/0048 says: drafts make a layer slower, a head takes layers from the last stage."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    for model, speculative, layers in (
        ("qwen3-0.6b", None, [15, 13]),
        ("qwen3-8b", None, [19, 17]),
        ("qwen3-8b", ngram, [19, 17]),
        ("qwen3-8b", {"method": "ngram"}, [19, 17]),
        ("qwen3-8b", _EAGLE, [21, 15]),
    ):
        plan = _on_gpus(model, speculative=speculative)
        assert [stage.num_layers for stage in plan.stages] == layers


_CPU = Hardware(4)
_H200 = Hardware(16, 128 << 30, 2, "NVIDIA H200", 140 << 30)


@pytest.mark.parametrize(
    ("shape", "num_layers", "hardware", "settings", "expected"),
    [
        ("qwen3-0.6b", 28, _H200, {}, 3),
        ("qwen3-0.6b", 28, _CPU, {}, 2),
        ("qwen3-0.6b", 28, _H200, {"speculative": {"method": "ngram"}}, 2),
        ("qwen3-0.6b", 28, _H200, {"max_steps_per_cohort": 2}, 2),
        ("qwen3-8b", 36, _H200, {}, 2),
        ("qwen3-8b", 36, _H200, {"max_steps_per_cohort": 4}, 4),
    ],
)
def test_a_third_step_is_for_short_ones(tmp_path, shape, num_layers, hardware, settings, expected):
    path = write_config(shape, num_layers, tmp_path)
    settings = {"load_format": "dummy", "num_stages": 2, "max_model_len": 1024, "num_kv_blocks": 256} | settings
    plan = plan_engine(EngineConfig.from_flat(str(path), **settings), hardware)
    assert plan.scheduler_limits().max_steps_per_cohort == expected
    assert plan.stage_spec(1).num_ring_entries == 2 * expected
    assert plan.describe()["max_steps_per_cohort"] == expected
    assert plan.resolved_config().scheduler.max_steps_per_cohort == expected


def _of_members(count: int, memory_bytes: int = 8 << 30, **settings: object) -> EnginePlan:
    config = EngineConfig.from_flat("tiny", tensor_parallel_size=count, device="cpu", **settings)
    return plan_engine(config, Hardware(4, memory_bytes=memory_bytes))


def test_members_of_a_stage_share_the_memory_of_its_machine():
    assert _of_members(1, 1 << 30, kv_cache_bytes=800 << 20).num_members == 1
    with pytest.raises(ResourceError, match=r"stage 0 does not fit this machine's memory.*2 members with"):
        _of_members(2, 1 << 30, kv_cache_bytes=800 << 20)


def test_members_have_parts_of_one_model():
    assert _of_members(2).num_parameters == _of_members(1).num_parameters
    assert _of_members(2).stages[0].weight_bytes < 0.6 * _of_members(1).stages[0].weight_bytes


def test_what_members_do_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match="compiled layers"):
        _of_members(2, compile=True)
    hardware = Hardware(16, num_gpus=2, gpu_memory_bytes=_H200_BYTES)
    with pytest.raises(ConfigError, match="each member of a stage has a GPU of its own"):
        plan_engine(EngineConfig.from_flat("tiny", tensor_parallel_size=2, stage_num_gpus=0.5), hardware)
    plan = _of_members(2)
    with pytest.raises(ConfigError, match="makes stages of one member"):
        build_stage_model(plan.stage_spec(0), plan.model, lambda spec, config: pytest.fail("not asked for"))


def test_blocks_that_take_nothing_are_not_without_end_in_cpu_memory():
    plan = _of_members(1)
    memory = [replace(stage, block_bytes=(0,), row_bytes=1 << 20) for stage in plan.memory]
    kept = plan_cpu_kv(plan.config.with_settings(cpu_kv_bytes=1 << 30), memory, [100])
    assert kept.num_snapshots == 1 << 10
    assert 100 <= kept.num_blocks[0] <= 10_000
    assert plan_cpu_kv(plan.config, memory, [100]).num_blocks == (0,)


def test_memory_of_a_step_counts_what_prompts_expand_of_latents():
    shape = str(Path(__file__).parents[3] / "benchmarks/models/glm-4.7-flash")
    few = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 1, "max_num_batched_tokens": 512}
    gpu = Hardware(16, 1 << 38, 1, "NVIDIA H200", 141 << 30, (9, 0))

    def step_bytes(longest: int) -> int:
        config = EngineConfig.from_flat(shape, max_model_len=longest, device="cuda", **few)
        return plan_engine(config, gpu).memory[0].step_bytes

    token_bytes = (512 + 64 + 256 + 256) * 2  # a latent, and key and value of one head
    assert step_bytes(32768) == step_bytes(4096), "128 MiB hold all"
    assert step_bytes(131072) - step_bytes(4096) == 131072 * token_bytes - (128 << 20)
