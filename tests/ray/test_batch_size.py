"""A long input streams through: memory does not grow with it.

TEST_BATCH_LINES sets how many lines; 100000 is the full size.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import ray
from batch_jobs import num_lines, start_job, write_prompts

pytestmark = pytest.mark.ray

NUM_LINES = int(os.environ.get("TEST_BATCH_LINES", "2000"))
MAX_MEMORY_MB = 500
TIMEOUT_S = 60 + NUM_LINES / 50


def test_a_long_input_streams_through(local_ray, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", (f"def f{i}(" for i in range(NUM_LINES)), max_tokens=1)
    env = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = start_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", env=env)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said
    assert num_lines(tmp_path / "out.jsonl") == NUM_LINES
    print("\n" + "\n".join(said.splitlines()[-6:]))
    memory = re.search(r"peak memory ([\d,]+) MB", said)
    assert memory is not None
    assert int(memory[1].replace(",", "")) < MAX_MEMORY_MB
    assert re.search(r"lines/s, [\d,]+ tokens/s, 0 errors, .* left", said), "no progress was reported"
