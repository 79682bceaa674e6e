"""graphs.compile on a GPU: compiled layers compute what the layers do, recordings hold them, none compiles later."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config
from recorded_plans import StageModels, called_graphs, record_plans, run_plans

from raypp.config.engine_config import EngineConfig
from raypp.graphs.compiled import CompiledFunction
from raypp.graphs.graph_manager import CudaGraphManager, graph_maker
from raypp.models.config import load_model_config
from raypp.models.decoder import CompiledLayer, DecoderLayer, compile_layers
from raypp.models.registry import build_model
from raypp.models.weights import DummyWeights
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage_spec import GraphSpec, StageSpec

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
MOST_TOKENS = 2048
FEWEST = {"qwen3-0.6b": 65, "qwen3-8b": 33}  # tokens from which on no own kernel multiplies


def _seconds_in_graph(layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> float:
    """Return the seconds of both functions, replayed from a graph of ten calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def run() -> None:
        for _ in range(10):
            layer.before_attention(hidden)
            layer.after_attention(hidden, attended)

    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / 200


@pytest.mark.parametrize("shape", FEWEST)
def test_layers(tmp_path, shape):
    """As far from float32 as the layers themselves are; the time of both is printed."""
    config = load_model_config(write_config(shape, 2, tmp_path, vocab_size=4096, eos_token_id=1))
    model = build_model(config, start_layer=0, end_layer=1, dtype=BF16, device=CUDA)
    exact = build_model(config, start_layer=0, end_layer=1, dtype=torch.float32, device=CUDA)
    for each in (model, exact):
        each.load_weights(DummyWeights(3, CUDA))
    own, twin = model.layers[0], exact.layers[0]
    compile_layers(model, MOST_TOKENS, "inductor")
    compiled = model.layers[0]
    assert isinstance(compiled, CompiledLayer)
    cost = model.costs["compile"]
    print(f"\n{shape}: {cost.num_graphs} functions compiled in {cost.seconds:.1f} s")
    assert cost.num_graphs == 2
    assert compiled._fewest_tokens == FEWEST[shape]
    generator = torch.Generator(CUDA).manual_seed(1)
    with torch.inference_mode():
        for count in (FEWEST[shape], 100, 128, 256, 511, 1024, MOST_TOKENS):
            sizes = (config.hidden_size, model.attention_sizes[0])
            hidden, attended = (
                torch.randn(count, size, generator=generator, device=CUDA, dtype=BF16) for size in sizes
            )
            for name, given in (("before_attention", (hidden,)), ("after_attention", (hidden, attended))):
                got, ours = (getattr(layer, name)(*(x.clone() for x in given)).float() for layer in (compiled, own))
                truth = getattr(twin, name)(*(x.float() for x in given))
                scale = truth.abs().mean()
                errors = [float((values - truth).abs().mean() / scale) for values in (got, ours)]
                assert errors[0] <= 1.5 * errors[1] + 1e-4, f"{name} of {count} tokens: {errors}"
            times = [_seconds_in_graph(layer, hidden.clone(), attended) * 1e6 for layer in (compiled, own)]
            print(f"{count:5d} tokens: compiled {times[0]:.1f} us, own {times[1]:.1f} us per layer without attention")


def _plan(directory, **settings: object) -> EnginePlan:
    settings = {
        "load_format": "dummy",
        "device": "cuda",
        "compile": True,
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "min_prefill_chunk_tokens": 60,
        "max_model_len": 1024,
        "num_kv_blocks": 600,
        "enable_prefix_caching": False,
        "stage_num_gpus": 0.5,
    } | settings
    path = write_config("qwen3-8b", 2, directory, vocab_size=4096, eos_token_id=1)
    config = EngineConfig.from_flat(str(path), num_stages=2, **settings)
    return plan_engine(config, Hardware(2, 1 << 34, 1, "this one", torch.cuda.get_device_properties(0).total_memory))


def _graphs(spec: StageSpec) -> CudaGraphManager:
    return CudaGraphManager(graph_maker(torch.device(spec.device)), debug_every=spec.graphs.debug_every)


def test_recordings(tmp_path, monkeypatch):
    """Full steps and pieces: replays, calls and debug mode give the same bits, and nothing is compiled for a step."""
    num_compiled = []
    make = CompiledFunction._compile
    monkeypatch.setattr(CompiledFunction, "_compile", lambda *args: (num_compiled.append(1), make(*args))[1])
    plan = _plan(tmp_path)
    models = StageModels(plan)
    assert len(num_compiled) == 4  # two stages; before and after
    plans = record_plans(plan, num_requests=16, max_prompt=300)
    num_started = len(num_compiled)
    graphs = GraphSpec(has_full=True, max_piecewise_tokens=128)
    called = run_plans(plan, plans, graphs, make_graphs=called_graphs, factory=models)
    replayed = run_plans(plan, plans, graphs, make_graphs=_graphs, factory=models)
    checked = run_plans(plan, plans, replace(graphs, debug_every=2), make_graphs=_graphs, factory=models)
    print(f"\n{len(plans)} plans; recordings: {replayed.costs}; {checked.num_compared} replays compared")
    replayed.assert_equals(called)
    checked.assert_equals(called)
    assert checked.num_compared > 10
    assert replayed.costs[0]["compile"]["num_graphs"] == 2
    assert len(num_compiled) == num_started
