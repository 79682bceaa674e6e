"""Whole models by the GPU's kernels, in Triton's interpreter: logits are those of the same roundings in plain torch.

On a GPU tests/gpu/test_quantized_model_gpu.py compares larger ones, and measures how far from exact both are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import kernel_checks as checks
import plain_arithmetic
import torch
from expert_models import expert_model
from logit_errors import ThreeModels
from memory_checkpoints import FORMS

from raypp.models.expert_config import ExpertConfig
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.token_quantization import quantize_tokens

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_layers": 1,
    "intermediate_size": 256,
}
MODELS = {
    "dense": expert_model(**SIZES, experts=None),
    "experts": expert_model(
        **SIZES, experts=ExpertConfig(num_experts=6, num_chosen=2, intermediate_size=128, normalizes=True)
    ),
}

IN_CI = (("dense", "fp8 outputs"), ("dense", "awq"), ("experts", "bf16"), ("experts", "fp8 blocks"))


def as_kernels_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return x in 8 bits: the interpreter rounds some numbers wrongly, see `kernel_checks.Kernels.assert_narrowed`."""
    tokens = quantize_tokens(x.contiguous(), block, Device.of(checks.DEVICE))
    columns = torch.arange(x.shape[1]) // min(block, x.shape[1])
    return tokens.tokens.float() * tokens.scale.t()[: len(x), columns]


@pytest.mark.skipif(checks.IS_GPU, reason="the interpreter alone multiplies float32")
@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(model, form, marks=[] if (model, form) in IN_CI else pytest.mark.full)
        for model in MODELS
        for form in FORMS
    ],
)
def test_logits_are_those_of_plain_torch(monkeypatch, model, form):
    monkeypatch.setattr(plain_arithmetic, "in_8_bits", as_kernels_round)
    models = ThreeModels(replace(MODELS[model], quantization=FORMS[form]), torch.float32, checks.DEVICE)
    for num_rows, prompt_lens in ((1, ()), (2, (11,))):
        errors = models.errors([models.step(num_rows, prompt_lens, seed=num_rows)])
        if form.startswith("fp8") and errors.between >= 2e-6 + errors.plain / 50:
            # A number in 8 bits may be rounded the other way by chance, one step in forty: not in two steps.
            assert errors.between < 2e-6 + errors.plain / 8
            errors = models.errors([models.step(num_rows, prompt_lens, seed=num_rows + 10)])
        assert errors.between < 2e-6 + errors.plain / 50
        if form.startswith("fp8") and prompt_lens:
            assert errors.plain > 1e-3, "8 bits do not show"
