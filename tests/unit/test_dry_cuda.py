"""tools/dry_cuda runs steps of a GPU without one, and notices what would wait for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tools/dry_cuda/run"
needs = pytest.mark.skipif(
    torch.version.cuda is not None or find_spec("triton") is None or shutil.which("g++") is None,
    reason="needs a torch without CUDA, Triton and g++",
)


def run_dry(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [RUN, sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


IN_CI = (
    "wait_for_nothing and full_and_piecewise and drafts",
    "what_waits",
    "mxfp4 and full",
    "own_layers and minimax_m2 and full",
    "experts_compile_nothing and plain",
    "experts_compile_nothing and fp8",
    "parts_are_measured and not 100",
)
OTHERS = (
    "wait_for_nothing and full_and_piecewise and plain",
    *(f"test_tokens_are_transformers and {name}-full" for name in ("gemma3_text", "glm4_moe", "qwen3_moe")),
    *(f"own_layers and {name} and full" for name in ("gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss")),
)
FILES = [f"tests/gpu/test_{name}.py" for name in ("hidden_waits", "transformers_gpu", "tune_gpu")]


@needs
@pytest.mark.parametrize("tests", [IN_CI, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["few", "others"])
def test_steps_wait_for_nothing(tests):
    """Nor are kernels compiled; `raypp tune` measures. In one process, whose start takes as long as a test."""
    chosen = " or ".join(f"({test})" for test in tests)
    done = run_dry("-m", "pytest", "-q", *FILES, "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(tests)} passed" in done.stdout


@needs
def test_a_wait_is_noticed():
    program = """
import torch
with torch.inference_mode():
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    for wait in (x.cpu, x.item, x.tolist, lambda: x[torch.zeros(1, dtype=torch.int64)]):
        try:
            wait()
        except RuntimeError as error:
            print(error)
"""
    done = run_dry("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synchronizing CUDA operation") == 4
