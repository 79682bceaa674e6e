"""Graphs on a GPU do what their programs do: pieces around attention, whole decode steps, checks of debug mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config
from recorded_plans import StageModels, called_graphs, record_plans, run_plans

from raypp.config.engine_config import EngineConfig
from raypp.errors import GraphMismatchError
from raypp.graphs.graph_manager import CudaGraphManager, graph_maker
from raypp.ops.break_point import break_point
from raypp.ops.cuda.step_attention import CudaAttention
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage_spec import GraphSpec, StageSpec

MAX_TOKENS = 64
BOTH = GraphSpec(has_full=True, max_piecewise_tokens=MAX_TOKENS)
DRAFTS = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}


def _plan(directory, shape: str, num_layers: int, num_stages: int, **settings: object) -> EnginePlan:
    """Return a plan that pads to few sizes: each has kernels to be compiled."""
    settings = {
        "load_format": "dummy",
        "device": "cuda",
        "mode": "full_and_piecewise",
        "max_piecewise_tokens": MAX_TOKENS,
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2 * MAX_TOKENS,
        "min_prefill_chunk_tokens": 60,
        "max_model_len": 1024,
        "num_kv_blocks": 600,
        "enable_prefix_caching": False,
        "stage_num_gpus": 1.0 / num_stages,
    } | settings
    path = write_config(shape, num_layers, directory, vocab_size=4096, eos_token_id=1)
    config = EngineConfig.from_flat(str(path), num_stages=num_stages, **settings)
    memory, capability = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability()
    hardware = Hardware(2, 1 << 34, 1, "this one", memory, capability)
    return plan_engine(config, hardware)


def _graphs(spec: StageSpec) -> CudaGraphManager:
    device = torch.device(spec.device)
    return CudaGraphManager(graph_maker(device), debug_every=spec.graphs.debug_every)


@pytest.mark.parametrize(
    ("shape", "num_layers", "settings"),
    [("small", 4, DRAFTS), ("qwen3-8b", 2, {}), ("qwen3-8b", 2, {"kv_cache_dtype": "fp8"})],
    ids=["small-drafts", "8b-plain", "8b-fp8_kv"],
)
def test_replays_and_calls_on_one_stage_and_two(tmp_path, shape, num_layers, settings):
    """One list of mixed plans, bit by bit: graphs against calls on the same padded sizes, two stages against one."""
    two, one = (_plan(tmp_path, shape, num_layers, num_stages, **settings) for num_stages in (2, 1))
    plans = record_plans(two, num_requests=24, max_prompt=200)
    mixed = sum(0 < plan.num_decode_rows < len(plan.rows) for plan in plans)
    large = sum(int(plan.num_scheduled_tokens.sum()) > MAX_TOKENS for plan in plans)
    decode = sum(plan.num_decode_rows == len(plan.rows) for plan in plans)
    print(f"\n{shape}: {len(plans)} plans, {mixed} mixed, {large} too large, {decode} of decode rows alone")
    assert min(mixed, large, decode) > 3
    max_step_rows = two.stage_spec(0).max_step_rows
    models = StageModels(two)
    called = run_plans(two, plans, BOTH, make_graphs=called_graphs, factory=models)
    run_plans(two, plans, BOTH, make_graphs=called_graphs, factory=models).assert_equals(called)
    replayed = run_plans(two, plans, BOTH, make_graphs=_graphs, factory=models)
    print(f"recordings of both stages: {replayed.costs}")
    checked = run_plans(two, plans, replace(BOTH, debug_every=2), make_graphs=_graphs, factory=models)
    print(f"{checked.num_compared} replays compared with their programs")
    replayed.assert_equals(called)
    checked.assert_equals(called)
    run_plans(one, plans, BOTH, max_step_rows=max_step_rows, make_graphs=_graphs).assert_equals(called)


def _attend_as_told(self, q, scale, kv_cache, batch, out) -> None:
    """Stand for attention: launch what the host knows of the step, harmlessly."""
    num_tokens = batch.num_tokens
    out[:num_tokens] = q[:num_tokens] * (1 + num_tokens)


def test_an_operation_that_should_be_a_break_point_is_caught(tmp_path, monkeypatch):
    plan = _plan(tmp_path, "small", 2, 1)
    plans = record_plans(plan, num_requests=8, max_prompt=200)
    checked = GraphSpec(max_piecewise_tokens=MAX_TOKENS, debug_every=1)
    monkeypatch.setattr(CudaAttention, "_attend_any_rows", break_point(_attend_as_told))
    assert run_plans(plan, plans, checked, make_graphs=_graphs).num_compared > 5
    monkeypatch.setattr(CudaAttention, "_attend_any_rows", _attend_as_told)
    with pytest.raises(GraphMismatchError, match="output differs in"):
        run_plans(plan, plans, checked, make_graphs=_graphs)


def test_memory_that_a_break_point_borrows_is_used_again():
    """Sixteen pieces whose temporaries are freed between them need the pool of one."""
    device = torch.device("cuda")
    x, out = (torch.ones(1 << 20, device=device) for _ in range(2))
    told = {"factor": 2.0}

    @break_point
    def scale(values: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(values * told["factor"])

    def program() -> None:
        out.copy_(x)
        for _ in range(16):
            temporary = out + 1
            scale(temporary, out)

    manager = CudaGraphManager(graph_maker(device))
    with manager.recording():
        manager.record("test", "key", program, breakable=True)
    for factor in (0.5, 2.0):
        told["factor"] = factor
        manager.run("key")
        expected = torch.ones(1, device=device)
        for _ in range(16):
            expected = (expected + 1) * factor
        torch.testing.assert_close(out[:1], expected)
    assert manager.costs["test"].memory_bytes < 16 << 22


def test_an_error_while_recording_leaves_the_device_usable():
    device = torch.device("cuda")
    x = torch.ones(8, device=device)
    manager = CudaGraphManager(graph_maker(device))
    with manager.recording():
        with pytest.raises(RuntimeError):
            manager.record("test", "waits", lambda: x.sum().item())  # a graph cannot hold what waits for the device
        manager.record("test", "key", lambda: x.add_(1))
    before = x.clone()
    manager.run("key")
    assert torch.equal(x, before + 1)


def test_recordings_keep_to_their_share():
    """Half of what all sizes would take is planned: evenly fewer are recorded.

    Needs the GPU for itself: only the device's total tells what graphs take.
    """
    device = torch.device("cuda")
    x = torch.ones(1 << 16, device=device)

    def recorded(max_bytes: int | None) -> CudaGraphManager:
        manager = CudaGraphManager(graph_maker(device), max_bytes=max_bytes)

        def record(size: int) -> None:
            def program() -> None:
                for _ in range(200):
                    x[: size << 8].mul_(1.0)

            manager.record("full", size, program)

        with manager.recording():
            manager.record_sizes("full", list(range(64, 0, -1)), record)
        return manager

    everything = recorded(None)
    assert everything.costs["full"].num_left_out == 0
    half_bytes = everything.memory_bytes // 2
    half = recorded(half_bytes)
    print(f"\n64 graphs of 200 kernels: {everything.memory_bytes} bytes; half of that: {half.costs}")
    if half_bytes:
        assert 0 < half.costs["full"].num_left_out < 62
        assert half.memory_bytes <= 1.3 * half_bytes
    assert 1 in half
    half.run(1)


def test_kernels_compiled_side_by_side(tmp_path):
    """The threads leave nothing behind but kernels: the same bits."""
    plan = _plan(tmp_path, "small", 2, 1)
    plans, models = record_plans(plan, num_requests=8, max_prompt=100), StageModels(plan)
    alone = run_plans(plan, plans, BOTH, make_graphs=_graphs, factory=models)
    beside = run_plans(plan, plans, replace(BOTH, compile_threads=4), make_graphs=_graphs, factory=models)
    beside.assert_equals(alone)
