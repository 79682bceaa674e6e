"""How long the GPU's kernels take inside a CUDA graph, against the libraries and the memory's rate.

    python benchmarks/micro/kernels.py                        all sections, about three minutes
    python benchmarks/micro/kernels.py --sections attention   some of them

Every section runs in a process of its own: one that fails says why and does not stop the others. Figures are medians in
microseconds per call. Weights and caches go round through more bytes than the second-level cache holds. The last line
is JSON. Which cut is best for each product: `tune_layer.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kernel_sections
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

SECTION_TIMEOUT_S = 270


def run_section(name: str) -> dict[str, Any]:
    """Return a section's figures, from a process of its own."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--in-process", name],
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECTION_TIMEOUT_S,
        )
        lines = done.stdout.strip().splitlines()
        figures = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        if done.returncode:
            figures["error"] = f"ended with {done.returncode}"
        for line in lines[:-1]:
            print(line, flush=True)
    except subprocess.TimeoutExpired as error:
        figures = {"error": f"not done after {error.timeout:.0f} s"}
        print((error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or "", flush=True)
    print(f"-- {name}: {time.monotonic() - started:.0f} s {figures.get('error', '')}", flush=True)
    return figures


def main() -> None:
    """Measure, and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(kernel_sections.SECTIONS), help="default: all")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels.py needs a CUDA device")
    if arguments.in_process:
        name = arguments.in_process
        print(json.dumps(kernel_sections.SECTIONS[name]()))
        return
    names = arguments.sections or list(kernel_sections.SECTIONS)
    figures = {name: run_section(name) for name in names}
    print_report("kernels", {"sections": names}, figures)


if __name__ == "__main__":
    main()
