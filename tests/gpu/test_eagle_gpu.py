"""EAGLE heads on a GPU: recorded against operation by operation, and text with them against text without.

An EAGLE-1 head has no LM head of its own: it drafts by the target's, which is rounded to 8 bits besides.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

PROMPTS = [list(range(start, start + length)) for start, length in ((5, 40), (100, 17), (300, 90), (7, 3))]


def write_head(target: Path, directory: Path, kind: str = "eagle3") -> Path:
    """Write the config.json of a head for a target."""
    shapes = json.loads((target / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    head = {name: shapes[name] for name in kept} | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    head |= {"draft_vocab_size": shapes["vocab_size"] // 2, "num_hidden_layers": 1, "rope_theta": 1e4}
    if kind == "eagle":
        head |= {"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": shapes["vocab_size"]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(head | {"torch_dtype": "bfloat16"}))
    return directory


def run(target: Path, **settings) -> tuple[list[list[int]], LocalEngine]:
    config = EngineConfig.from_flat(
        str(target),
        load_format="dummy",
        device="cuda",
        max_model_len=512,
        num_kv_blocks=300,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        min_prefill_chunk_tokens=16,
        **settings,
    )
    hardware = Hardware(
        num_cpu_cores=4,
        num_gpus=1,
        gpu_memory_bytes=torch.cuda.mem_get_info()[1],
        gpu_capability=torch.cuda.get_device_capability(),
    )
    engine = LocalEngine(plan_engine(config, hardware))
    return engine.generate(PROMPTS, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)), engine


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("method", "weights", "drafts"),
    [
        ("eagle3", "fp8", {"num_speculative_tokens": 3}),
        ("eagle3", "model", {"num_speculative_tokens": 3}),
        ("auto", "auto", {"num_speculative_tokens": 3}),
        ("eagle", "fp8", {"draft_ladder": [0, 1, 3]}),
    ],
)
def test_replays_do_what_the_programs_do(
    tmp_path: Path, num_stages: int, method: str, weights: str, drafts: dict[str, object]
) -> None:
    target = write_config("small", 6, tmp_path / "target")
    head = write_head(target, tmp_path / "head", "eagle" if method == "eagle" else "eagle3")
    speculative = {"method": method, "model": str(head), "forced_acceptance_rate": 0.6, "head_weights": weights}
    speculative |= drafts
    common = {"num_stages": num_stages, "speculative": speculative}
    _, engine = run(target, mode="full", debug_every=3, **common)  # a difference ends it with an error
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    print(f"{num_stages} stages, {method}: {stats.num_draft_tokens} drafts, {stats.acceptance_length:.2f} per step")


def test_text_is_that_without_a_head(tmp_path: Path) -> None:
    """In bfloat16 near-ties fall otherwise when a step has more tokens: random weights have many. All begin alike."""
    target = write_config("small", 6, tmp_path / "target")
    plain, _ = run(target, mode="none")
    cells = (
        ("eagle3", "none", "fp8"),
        ("eagle3", "full", "fp8"),
        ("eagle3", "full", "model"),
        ("eagle", "full", "fp8"),
    )
    for kind, mode, weights in cells:
        head = write_head(target, tmp_path / f"{kind} {mode} {weights}", kind)
        speculative = {"method": kind, "model": str(head), "num_speculative_tokens": 3}
        text, engine = run(target, mode=mode, speculative=speculative | {"head_weights": weights})
        assert engine.stats().num_draft_tokens > 0
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(plain, text, strict=True)]
        print(f"{kind}, mode {mode}, weights {weights}: equal tokens of 48: {same}")
        assert [line[0] for line in text] == [line[0] for line in plain]
