"""Logits of whole models in bf16, FP8 and INT4: as near to float32 as plain torch with the same roundings.

Errors are root mean squares over all logits of some steps, as a share of the logits'. `pytest -s` prints them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from expert_models import expert_model
from logit_errors import ThreeModels
from memory_checkpoints import FORMS

from raypp.models.expert_config import ExpertConfig

CUDA = torch.device("cuda")
MAX_RATIO = 1.5
MIN_ROWS = 16
"""Over as many rows an error is taken at least: that of one row is chance."""

SIZES = {"vocab_size": 4096, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8}
MODELS = {
    "dense": expert_model(**SIZES, num_layers=4, intermediate_size=3072, experts=None),
    "4 of 16 experts": expert_model(
        **SIZES,
        num_layers=3,
        experts=ExpertConfig(num_experts=16, num_chosen=4, intermediate_size=768, normalizes=True),
    ),
    "8 of 128 experts": expert_model(
        **SIZES,
        num_layers=3,
        experts=ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768, normalizes=True),
    ),
}
STEPS = {
    "1 row": (1, ()),
    "2 rows": (2, ()),
    "8 rows": (8, ()),
    "64 rows": (64, ()),
    "256 rows": (256, ()),
    "a prompt": (0, (300,)),
    "8 rows and two prompts": (8, (300, 37)),
}
CASES = [(model, form) for model in MODELS for form in FORMS]


@pytest.fixture(scope="module", params=CASES, ids=[", ".join(case) for case in CASES])
def models(request):
    model, form = request.param
    if form.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a GPU without FP8")
    return ThreeModels(replace(MODELS[model], quantization=FORMS[form]), torch.bfloat16, CUDA)


@pytest.mark.parametrize("step", STEPS)
def test_errors_are_those_of_plain_torch(models, request, step):
    assert torch.get_float32_matmul_precision() == "highest"
    num_rows, prompt_lens = STEPS[step]
    count = -(-MIN_ROWS // (num_rows + sum(prompt_lens)))
    errors = models.errors([models.step(num_rows, prompt_lens, seed) for seed in range(count)])
    print(
        f"\n{request.node.callspec.id}: {errors.kernels:.5f} by kernels, {errors.plain:.5f} by plain torch, "
        f"{errors.ratio:.2f}x",
        flush=True,
    )
    assert 1e-4 < errors.plain < 0.3, "roundings do not show, or nothing else"
    assert errors.ratio <= MAX_RATIO
