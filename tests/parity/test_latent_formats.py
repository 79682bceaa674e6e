"""Latents in the forms in which checkpoints have them: FP8, INT4, AWQ, beside towers; tokens equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import NUM_DRAFTS, Witness, make_requests, run
from hf_models import load_reference, make_checkpoint, sizes_for_members
from mtp_reference import MtpReference, add_mtp_head
from quantized_tensors import LINEAR, OF_LATENTS, quantize_checkpoint
from safetensors.torch import load_file, save_file
from test_quantized_weights import compare_texts

from raypp.models.config import as_stored, load_model_config

ALL = (*LINEAR, *OF_LATENTS)
OF_KIMI = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*")
"""What Kimi-K2's INT4 leaves in 16 bits."""
IN_CI = ("deepseek-fp8", "kimi-int4", "mistral-fp8-members")
CELLS = {
    "deepseek-fp8": ("deepseek_v3", 6, "fp8 blocks", (), 1, 2),
    "deepseek-fp8-plain-queries": ("deepseek_v3", 0, "fp8 blocks", (), 1, 3),
    "deepseek-fp8-members": ("deepseek_v3", 2, "fp8 blocks", (), 2, 2),
    "deepseek-fp8-four-members": ("deepseek_v3", 8, "fp8 blocks", (), 4, 1),
    "kimi-int4": ("deepseek_v3", 8, "compressed int4 of 32", OF_KIMI, 1, 3),
    "kimi-int4-members": ("deepseek_v3", 2, "compressed int4 of 32", OF_KIMI, 2, 2),
    "flash-awq": ("glm4_moe_lite", 2, "awq", (), 1, 4),
    "flash-awq-members": ("glm4_moe_lite", 0, "awq", (), 2, 2),
    "mistral-fp8": ("mistral4", 2, "fp8 static", (), 1, 3),
    "mistral-fp8-members": ("mistral4", 0, "fp8 static", (), 2, 2),
    "mistral-fp8-blocks": ("mistral4", 8, "fp8 blocks", (), 1, 2),
    "mistral-fp8-blocks-members": ("mistral4", 2, "fp8 blocks", (), 3, 1),
}
"""Family and seed, form, what is left in 16 bits, members and stages."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in CELLS]
)
def test_greedy_tokens_equal_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    family, seed, form, left, count, num_stages = CELLS[name]
    sizes = sizes_for_members(family, count, seed) if count > 1 else {}
    source = make_checkpoint(family, seed, tmp_path / "source", min_layers=4, **sizes)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", ALL, left)
    changed = ("mlp.experts.",) if left else ("_proj",)
    more = {"tensor_parallel_size": count, "num_stages": num_stages}
    compare_texts(source, tmp_path / "small", tmp_path / "plain", changed, **more)


def _put_beside_a_tower(path: Path, prefix: str, lm_head: str, **outer: Any) -> None:
    """Make a checkpoint of one file the language model of one that has a tower, too."""
    names = {"model.": prefix, "lm_head.": lm_head}
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        first = next(first for first in names if name.startswith(first))
        tensors[names[first] + name.removeprefix(first)] = tensor
    for part in ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight", "mm_projector.proj.weight"):
        tensors[part] = torch.ones(4, 4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    del text["architectures"]
    if outer["model_type"] == "kimi_k25":
        text["model_type"] = "kimi_k2"
    else:
        outer["quantization_config"] = text.pop("quantization_config")
    whole = {"text_config": text, "vision_config": {"hidden_size": 4}, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(outer | whole))


_SMALL_4 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
_K25 = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
TOWERS = [
    ("mistral4", "fp8 static", (), _SMALL_4, "model.language_model.", "lm_head.", 1),
    ("mistral4", "fp8 blocks", (), _SMALL_4, "language_model.model.", "language_model.lm_head.", 1),
    ("ministral3", "fp8 static", (), _SMALL_4, "model.language_model.", "lm_head.", 1),
    ("deepseek_v3", "compressed int4 of 32", OF_KIMI, _K25, "language_model.model.", "language_model.lm_head.", 2),
]


@pytest.mark.parametrize(("family", "form", "left", "outer", "prefix", "lm_head", "count"), TOWERS)
def test_the_text_of_a_model_beside_a_tower(
    family: str,
    form: str,
    left: tuple[str, ...],
    outer: dict[str, Any],
    prefix: str,
    lm_head: str,
    count: int,
    tmp_path: Path,
) -> None:
    """Mistral Small 4 as it is published and as transformers writes it; Ministral 3; Kimi-K2.5. Images are refused."""
    sizes = sizes_for_members(family, count, 8) | {"tie_word_embeddings": False}
    source = make_checkpoint(family, 8, tmp_path / "source", min_layers=4, **sizes)
    small, plain = tmp_path / "small", tmp_path / "plain"
    quantize_checkpoint(form, source, small, plain, ALL, left)
    _put_beside_a_tower(small, prefix, lm_head, **outer)
    model = as_stored(load_model_config(small), small)
    assert (model.vision, model.weight_prefix, model.lm_head_name) == (None, prefix, f"{lm_head}weight")
    changed = ("mlp.experts.",) if left else ("_proj",)
    compare_texts(source, small, plain, changed, tensor_parallel_size=count, num_stages=2)


@pytest.mark.parametrize(
    ("form", "count", "num_stages"), [("fp8 blocks", 1, 2), pytest.param("fp8 blocks", 2, 1, marks=pytest.mark.full)]
)
def test_a_quantized_head_drafts(
    form: str, count: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3's layer in FP8, what joins its inputs in 16 bits: drafts are those of the dequantized head."""
    sizes = sizes_for_members("deepseek_v3", count, 0) | {"vocab_size": 128}
    source = make_checkpoint("deepseek_v3", 0, tmp_path / "source", min_layers=4, **sizes)
    add_mtp_head(source, 0)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain", ALL)
    load_reference.cache_clear()
    asked, common = make_requests(128), {"num_stages": num_stages, "tensor_parallel_size": count, "num_kv_blocks": 60}
    plain = [request.output_token_ids for request in run(tmp_path / "plain", asked, num_stages=1)[0]]
    witness = Witness(monkeypatch)
    speculative = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    requests, stats, _ = run(tmp_path / "small", asked, speculative=speculative, **common)
    assert [request.output_token_ids for request in requests] == plain
    met = witness.compare(MtpReference(tmp_path / "plain"))
    assert met["compared"] > 100
    assert met["excused"] <= met["compared"] / 1000
    assert stats.num_draft_tokens > 0
