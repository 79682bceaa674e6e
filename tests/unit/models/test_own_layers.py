"""A stage of transformers' modules reads the tensors of its own layers, and takes no more memory than for these."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from shrunken_models import make_shrunken

from raypp.models import config as config_module
from raypp.models.config import load_model_config
from raypp.models.registry import build_model
from raypp.models.transformers_probe import answer
from raypp.models.weights import CheckpointWeights

MIB = 1 << 20
WAIT_S = 120.0
STAGE = (1, 2)  # of four layers
TYPES = {
    "gemma3_text": {"hidden_size": 1024, "intermediate_size": 4096, "layer_types": ["full_attention"] * 4},
    "gpt_oss": {"hidden_size": 512, "intermediate_size": 1024},
    "deepseek_v3": {"hidden_size": 512, "moe_intermediate_size": 1024},
}
MOST_OTHER_BYTES = 2 * MIB  # norms, and pages around a tensor
MOST_COPIES = 3.5  # of this one layer: the file's pages, what was read, what is packed of it, and what is put together


def peak_bytes() -> int:
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


def mapped_bytes(folder: Path) -> int:
    """Return how much of a folder's files this process has touched."""
    lines: Iterator[str] = iter(Path("/proc/self/smaps").read_text().splitlines())
    total, is_there = 0, False
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_there = str(folder) in line
        elif is_there and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def measured(path: Path) -> tuple[int, int, int]:
    """Return the bytes of a stage's weights, those that were read for it, and those that were taken at most."""
    config_module.asked = lambda _, path, **options: answer(path, **options)  # in this process
    config = load_model_config(path, impl="transformers")
    source = CheckpointWeights(path)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    model = build_model(
        config,
        start_layer=STAGE[0],
        end_layer=STAGE[1],
        dtype=torch.float32,
        device=torch.device("cpu"),
        path=path,
    )
    model.load_weights(source)
    return model.weight_bytes, mapped_bytes(path), peak_bytes() - before


CELLS = [(model_type, num_files) for model_type in TYPES for num_files in ("one", "many")]
IN_CI = [("gemma3_text", "one"), ("gpt_oss", "one"), ("deepseek_v3", "many")]  # each starts a process


@pytest.mark.in_ci("gpt_oss-one", "deepseek_v3-many")
@pytest.mark.parametrize(
    ("model_type", "num_files"),
    [cell if cell in IN_CI else pytest.param(*cell, marks=pytest.mark.full) for cell in CELLS],
)
def test_a_stage_reads_its_own_layers(model_type: str, num_files: str, tmp_path: Path) -> None:
    """Measured in a process of its own: how soon freed memory goes back depends on what a process freed before."""
    path = make_shrunken(model_type, tmp_path / "one", **TYPES[model_type])
    if num_files == "many":
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        path = tmp_path / "many"
        model.save_pretrained(path, max_shard_size="20MB")
        del model
    files = list(path.glob("*.safetensors"))
    assert (len(files) > 1) == (num_files == "many")
    whole_bytes = sum(file.stat().st_size for file in files)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        weight_bytes, read, taken = process.submit(measured, path).result(WAIT_S)
    print(
        f"{model_type}, {len(files)} files of {whole_bytes / MIB:.0f} MiB: layer 1 has {weight_bytes / MIB:.1f}, "
        f"{read / MIB:.1f} were read, {taken / MIB:.1f} were taken at most"
    )
    assert whole_bytes > 3 * weight_bytes
    assert 0.9 * weight_bytes < read < weight_bytes + MOST_OTHER_BYTES
    assert taken < MOST_COPIES * weight_bytes + 8 * MIB
