"""Layers whose pure functions were compiled compute what they computed before, on engines too; none compiles later."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from checkpoints import EXPERTS, write_config
from op_tape import tape_graphs
from recorded_plans import called_graphs, record_plans, run_plans
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.graphs.compiled import CompiledFunction
from raypp.models.config import load_model_config
from raypp.models.decoder import CompiledLayer, compile_layers
from raypp.models.registry import build_model
from raypp.models.weights import DummyWeights
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage_spec import GraphSpec
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

CPU = torch.device("cpu")
MOST_TOKENS = 80
FAMILIES = {
    "qwen3": {},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_size": 32,
    },
    "qwen3 with experts and without": EXPERTS["qwen3"],
    "mixtral": EXPERTS["mixtral"],
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention"] * 3,
    },
}


def _layers(path, kernels, dtype=torch.float32):
    config = load_model_config(path)
    model = build_model(config, start_layer=0, end_layer=3, dtype=dtype, device=CPU, kernels=kernels)
    model.load_weights(DummyWeights(3))
    own = list(model.layers)
    compile_layers(model, MOST_TOKENS, "aot_eager")
    return model, own, model.layers


def _check(model, own, compiled, counts, dtype=torch.float32, **tolerance):
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for layer, twin, count in zip(itertools.cycle(compiled), itertools.cycle(own), counts, strict=False):
            assert isinstance(layer, CompiledLayer)
            hidden = torch.randn(count, model.hidden_size, generator=generator).to(dtype)
            attended = torch.randn(count, model.attention_sizes[0], generator=generator).to(dtype)
            before = layer.before_attention(hidden)
            torch.testing.assert_close(before, twin.before_attention(hidden), **tolerance)
            after = layer.after_attention(hidden.clone(), attended)
            torch.testing.assert_close(after, twin.after_attention(hidden.clone(), attended), **tolerance)


@pytest.mark.parametrize("family", sized(("qwen3",), FAMILIES))
def test_families(tmp_path, family):
    model, own, compiled = _layers(
        write_config(tmp_path, **FAMILIES[family]), TorchKernels(torch.float32, packs_weights=False)
    )
    cost = model.costs["compile"]
    # Of each kind of layers before and after, experts aside; one token and any other number.
    assert cost.num_graphs == {"mixtral": 2, "qwen3 with experts and without": 6}.get(family, 4)
    assert cost.seconds > 0
    for index, layer in enumerate(own if family == "gemma4" else ()):  # whose dummy factors are one
        layer._scalar.fill_(1 + index / 4)
    _check(model, own, compiled, counts=(1, 2, 7, MOST_TOKENS))


def test_own_kernels_stay_where_they_are_chosen(tmp_path):
    """A GPU's kernels, in Triton's interpreter: the compiler sees what surrounds the library's products."""
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = CudaKernels(CPU, torch.float16, block_size=16, max_query_len=1, num_ring_entries=2)
    model, own, compiled = _layers(write_config(tmp_path, attention_bias=True), kernels, torch.float16)
    assert kernels.library_from_tokens == 65
    assert model.costs["compile"].num_graphs == 2
    _check(model, own, compiled, (2, 65, MOST_TOKENS), torch.float16, rtol=1e-2, atol=1e-2)


def _plan(**settings: object) -> EnginePlan:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 128, "block_size": 4}
    config = EngineConfig.from_flat("tiny", compile=True, **(sizes | settings))
    plan = plan_engine(config, Hardware(1))
    assert plan.graphs.compile_backend == "inductor"
    assert plan.describe()["graphs"]["compile"] is True
    return replace(plan, graphs=replace(plan.graphs, compile_backend="aot_eager"))


def test_an_engine_generates_the_same(monkeypatch):
    compilers = []
    make = CompiledFunction._compile
    monkeypatch.setattr(
        CompiledFunction, "_compile", lambda self, *args: (compilers.append(self), make(self, *args))[1]
    )
    plan = _plan(
        num_stages=2, mode="full_and_piecewise", max_piecewise_tokens=32
    )  # larger steps are called as they are
    plain = replace(plan, graphs=replace(plan.graphs, compile_backend=None))
    prompts = [[5 + i, 80 + i, 99, 120 + 3 * i] * (2 + 3 * i) for i in range(7)]
    params = [SamplingParams(max_tokens=8 + i, temperature=0.4 * (i % 3), seed=i, ignore_eos=True) for i in range(7)]
    expected = LocalEngine(plain).generate(prompts, params)
    assert not compilers
    engine = LocalEngine(plan)
    assert len(compilers) == 8  # two stages
    assert engine.generate(prompts, params) == expected
    assert len(compilers) == 8


def test_recordings_hold_what_was_compiled():
    """On tapes, checked by debug mode, bit by bit what calls yield."""
    plan = _plan(max_num_seqs=4)
    plans = record_plans(plan, num_requests=4, max_prompt=20)
    graphs = GraphSpec(has_full=True, max_piecewise_tokens=32, compile_backend="aot_eager")
    called = run_plans(plan, plans, graphs, make_graphs=called_graphs)
    checked = run_plans(plan, plans, replace(graphs, debug_every=3), make_graphs=tape_graphs)
    checked.assert_equals(called)
    assert checked.num_compared > 10
    assert called.costs[0]["compile"]["num_graphs"] == 4
