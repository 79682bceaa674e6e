"""Drafts of MTP heads are those of transformers' layers put together, and text does not depend on the head."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from drafting import NUM_DRAFTS, Witness, make_requests, run
from hf_models import hf_greedy, load_reference, make_checkpoint
from mtp_reference import MtpReference, add_mtp_head, train_mtp_head
from quantized_tensors import LINEAR, quantize_checkpoint
from safetensors.torch import load_file, save_file
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.types import SamplingParams

CELLS = [
    ("qwen3_5", 0, 2, "none"),
    ("qwen3_5_moe", 8, 3, "full"),
    ("glm4_moe", 0, 2, "full"),
    ("deepseek_v3", 0, 2, "none"),
]
CELLS += sized([], [("qwen3_next", 0, 2, "none"), ("qwen3_5", 6, 1, "full"), ("qwen3_5", 12, 4, "none")])
CELLS += sized([], [("qwen3_5_moe", 2, 1, "none"), ("qwen3_next", 2, 3, "full"), ("glm4_moe", 5, 3, "none")])
CELLS += sized([], [("deepseek_v3", 2, 3, "full"), ("glm4_moe_lite", 0, 1, "full"), ("glm4_moe_lite", 2, 2, "none")])
"""Families, seeds, stages and modes of graphs."""


def _target(family: str, seed: int, path: Path, **sizes: int) -> Path:
    make_checkpoint(family, seed, path, min_layers=4, vocab_size=128, **sizes)
    add_mtp_head(path, seed)
    load_reference.cache_clear()
    return path


def test_drafts_are_those_of_the_reference_and_text_is_that_without_a_head(tmp_path, monkeypatch) -> None:
    met: Counter[str] = Counter()
    for number, (family, seed, num_stages, mode) in enumerate(CELLS):
        target, asked = _target(family, seed, tmp_path / str(number)), make_requests(128)
        common = {
            "num_stages": num_stages,
            "max_num_batched_tokens": 24,
            "min_prefill_chunk_tokens": 5,
            "mode": mode,
            "num_kv_blocks": (34, 200)[number % 2],
        }
        plain = [request.output_token_ids for request in run(target, asked, **common)[0]]
        with monkeypatch.context() as patch:
            witness = Witness(patch)
            speculative = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
            requests, stats, _ = run(target, asked, speculative=speculative, **common)
        cell = f"{family} {seed}, {num_stages} stages, mode {mode}: {stats}"
        assert [request.output_token_ids for request in requests] == plain, cell
        met += witness.compare(MtpReference(target))
        met["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
        met["preemptions"] += stats.num_preemptions
    print(f"{len(CELLS)} cells: {dict(met)}")
    assert met["excused"] <= met["compared"] / 1000
    assert all(met[name] for name in ("compared", "rejected", "preemptions")), met


def test_n_grams_and_the_models_own_head_draft_together(tmp_path) -> None:
    target, asked = _target("qwen3_5", 0, tmp_path), make_requests(128)
    plain = [request.output_token_ids for request in run(target, asked, num_stages=2)[0]]
    found = [
        [request.output_token_ids for request in run(target, asked, num_stages=2, speculative={"method": method})[0]]
        for method in sized(("auto",), ("auto", "mtp"))  # the head alone is above
    ]
    assert found == [plain] * len(found)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.full)])
def test_a_head_that_was_not_quantized_may_be_in_a_file_of_its_own(tmp_path, family) -> None:
    """Neither config.json nor the index says so."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size": 64, "moe_intermediate_size": 24}
    dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 16, "intermediate_size": 64}
    source = _target(family, 0, tmp_path / "source", **sizes, **dims)
    linear = (*LINEAR, "in_proj_qkv", "in_proj_z", "out_proj", "fc")
    left = ("in_proj_b", "in_proj_a", "mlp.gate", "shared_expert_gate")
    quantize_checkpoint("fp8 blocks", source, tmp_path / "small", tmp_path / "plain", linear, left)
    head = {name: one for name, one in load_file(source / "model.safetensors").items() if name.startswith("mtp.")}
    asked, found = make_requests(128), []
    for name in ("plain", "small"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        others = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        save_file(others if name == "small" else others | head, tmp_path / name / "model.safetensors")
        if name == "small":
            save_file(head, tmp_path / name / "model-mtp.safetensors")
        speculative = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
        requests, stats, _ = run(tmp_path / name, asked, num_stages=2, speculative=speculative)
        found.append([(one.output_token_ids, one.draft_counts.accepted_by_position) for one in requests])
    assert found[0] == found[1]
    assert stats.num_draft_tokens > 0


def test_a_checkpoint_without_a_head_is_refused(tmp_path) -> None:
    path = make_checkpoint("qwen3_5", 0, tmp_path / "states", min_layers=4)
    layer = make_checkpoint("glm4_moe", 0, tmp_path / "layer")
    (layer / "config.json").write_text(
        json.dumps(json.loads((layer / "config.json").read_text()) | {"num_nextn_predict_layers": 0})
    )
    looked_for = {
        str(layer): "num_nextn_predict_layers of 1 or more",
        str(path): rf"tensors mtp\.fc\.\* in {path}: model\.safetensors, .*\*mtp\*",
        "tiny": "of Qwen3Next",
    }
    for model, expected in looked_for.items():
        with pytest.raises(ConfigError, match="no head of its own") as caught:
            plan_engine(EngineConfig.from_flat(model, speculative={"method": "mtp"}), Hardware(1))
        assert re.search(expected, str(caught.value.expected))


def test_accepted_drafts_of_a_trained_head_are_the_same_on_any_number_of_stages(tmp_path) -> None:
    target, rng = _target("qwen3_5", 0, tmp_path), random.Random(0)
    prompts = [[rng.randrange(2, 128) for _ in range(6)] for _ in range(12)]
    texts = [prompt + hf_greedy(target, prompt, 40)[0] for prompt in prompts]
    share = train_mtp_head(target, texts, num_steps=sized(60, 300))
    load_reference.cache_clear()
    asked = [(prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)) for prompt in prompts]
    counts, found = [], []
    stages = sized((1, 3), (1, 2, 3))
    for num_stages in stages:
        speculative = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
        requests, stats, _ = run(target, asked, num_stages=num_stages, speculative=speculative)
        counts.append([request.draft_counts.accepted_by_position for request in requests])
        found.append([request.output_token_ids for request in requests])
    accepted = stats.num_accepted_tokens / stats.num_draft_tokens
    print(f"{share:.2f} of guesses are right in training, {accepted:.2f} of drafts accepted")
    assert found == [[text[6:] for text in texts]] * len(stages)
    assert all(each == counts[0] for each in counts)
    assert accepted > 0.2
