"""Every kernel compiles for the GPUs that it is meant for, and keeps its values in registers.

CI compiles those that are not in `compiled_kernels.txt`, which has digests of what was compiled for Hopper: by soak, or
with KEEP_DIGESTS=1, which is to be run after kernels or their calls have changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sizes import IS_FULL, sized

ROOT = Path(__file__).parents[3]
STACK = {
    "_rotation_table": 32,  # the reduction of very large angles keeps a table there
    "_replay": 8,  # without drafts: the assembler prefers four programs of 128 registers to three of 144
}
MOST_SPILLED = (0, 512, 1024, 512)  # as usual; of 16 drafts, or heads of 256; the last, a sum that rests in the loop
IS_INVARIANT = 3  # place of kernels whose sums must not depend on the number of rows
MOST_SPILLED_ELSEWHERE = 256  # tuned for Hopper, which has 255 registers of a thread, too, but keeps products elsewhere
MORE_SPILLED = {120: 2}  # times as much: the same products take more registers there
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
NEEDS_FP8 = {"_narrow", "_quantize_tokens"}
IN_SOAK = {  # of experts and quantized weights
    "_project_int4",
    "_dequantize_int4",
    "_quantize_tokens",
    "_route",
    "_arrange",
    "_gate_up_few",
    "_down_few",
    "_multiply_tiles",
    "_sum_of_experts",
}
FULL = pytest.mark.full
COMPILED = Path(__file__).with_name("compiled_kernels.txt")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=FULL) for other in (80, 86, 89, 120))])
def test_kernels_compile(tmp_path: Path, capability: int) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {
        "CAPABILITY": str(capability),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # compiled anew, whatever lies around
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    if not IS_FULL and COMPILED.exists():
        environment["KNOWN"] = str(COMPILED)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=sized(300, 1500), env=environment
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    missing = NEEDS_FP8 if capability < 89 else set()
    missing |= sized(IN_SOAK, set())
    assert {kernel["kernel"] for kernel in kernels} | missing == IN_SOAK | {
        "_narrow",
        "_rms_norm",
        "_join_norms",
        "_gather_heads",
        "_silu_and_mul",
        "_rotation_table",
        "_append_heads",
        "_decode_attention",
        "_attend_by_parts",
        "_row_inputs",
        "_move_words",
        "project_few",
        "_project_rows",
        "_best",
        "_survey",
        "_gather",
        "_finish",
        "_search",
        "_add_by_digit",
        "_draw_part",
        "_best_of_members",
        "_adjust",
        "_remember",
        "_report",
        "_rotate_qk",
        "_hold",
        "_verify",
        "_propose",
        "_convolve",
        "_replay",
        "_append_latents",
        "_decode_latents",
        "_combine_latents",
        "_gated_norm",
        "_gate_heads",
        "_push_and_sum",
        "_project_many",
    }
    digests = sorted({kernel["digest"] for kernel in kernels})
    kernels = [kernel for kernel in kernels if not kernel["is_known"]]
    print_table(kernels, capability)
    for kernel in kernels:
        allowed = STACK.get(kernel["kernel"], MOST_SPILLED[kernel["width"]])
        allowed = allowed if capability == 90 else max(allowed, MOST_SPILLED_ELSEWHERE)
        allowed *= MORE_SPILLED.get(capability, 1)
        assert kernel["stack_bytes"] <= allowed, kernel
        assert kernel["shared_bytes"] <= SHARED_KB[capability] << 10, kernel
        assert not kernel["refills_too_early"], kernel
        assert not kernel["overwrites_operands"], kernel  # see `kernel_launch.finished`
        assert not kernel["lacks_fence"], kernel  # see `kernel_launch.fence_shared`
        if kernel["width"] == IS_INVARIANT:
            others = [other for other in kernels if other["kernel"] == kernel["kernel"]]
            assert {tuple(other["products"]) for other in others if other["width"] == IS_INVARIANT} == {
                tuple(kernel["products"])
            }, f"other instructions sum in another order: {kernel}"
    if capability == 90 and (IS_FULL or "KEEP_DIGESTS" in os.environ):
        COMPILED.write_text("\n".join(digests) + "\n")


def print_table(kernels: list[dict[str, Any]], capability: int) -> None:
    """Print what the largest variant of each kernel takes."""
    print(
        f"\n| kernel, {capability / 10:.1f} | variants | registers | stack bytes | shared KB |\n|---|---|---|---|---|"
    )
    for name in sorted({kernel["kernel"] for kernel in kernels}):
        variants = [kernel for kernel in kernels if kernel["kernel"] == name]
        registers, stack, shared = (
            max(v[key] for v in variants) for key in ("registers", "stack_bytes", "shared_bytes")
        )
        print(f"| `{name}` | {len(variants)} | {registers} | {stack} | {shared / 1024:.0f} |")
