"""Every kernel compiles for the GPUs that it is meant for, and keeps its values in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STACK_OF_SINES = 32  # the reduction of very large angles keeps a table there
MOST_SPILLED = 512  # with 16 drafts, or heads of 256


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compile_for_hopper(tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # compiled anew, whatever lies around
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert {kernel["kernel"] for kernel in kernels} == {
        "_narrow",
        "_rms_norm",
        "_join_norms",
        "_gather_heads",
        "_silu_and_mul",
        "_rotation_table",
        "_append_heads",
        "_decode_attention",
        "_row_inputs",
        "_move_words",
        "project_few",
        "_project_rows",
        "_project_int4",
        "_dequantize_int4",
        "_quantize_tokens",
        "_route",
        "_arrange",
        "_gate_up_few",
        "_down_few",
        "_multiply_tiles",
        "_sum_of_experts",
        "_best",
        "_survey",
        "_gather",
        "_finish",
        "_search",
        "_adjust",
        "_remember",
        "_report",
        "_rotate_qk",
        "_hold",
    }
    for kernel in kernels:
        allowed = STACK_OF_SINES if kernel["kernel"] == "_rotation_table" else MOST_SPILLED if kernel["is_wide"] else 0
        assert kernel["stack_bytes"] <= allowed, kernel
        assert kernel["shared_bytes"] <= 227 << 10, kernel
        assert not kernel["refills_too_early"], kernel
        assert not kernel["lacks_fence"], kernel  # see `kernel_launch.fence_shared`
