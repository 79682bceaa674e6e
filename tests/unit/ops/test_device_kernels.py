"""Which kernels a device gets, what it is told when faster ones are missing, and XQA's mask."""

from __future__ import annotations

import logging

import pytest
import torch

from raypp.ops import device_kernels, flashinfer_attention
from raypp.ops.device_kernels import choose_kernels
from raypp.ops.flashinfer_attention import causal_mask, missing_for_flashinfer, missing_for_xqa
from raypp.ops.torch_kernels import TorchKernels

CUDA = torch.device("cuda")
HOPPER = (9, 0)


def test_a_cpu_computes_by_torch(caplog):
    assert isinstance(choose_kernels(torch.device("cpu"), torch.float32), TorchKernels)
    assert not caplog.records


def test_a_gpu_without_triton_says_so(monkeypatch, caplog):
    monkeypatch.setattr(device_kernels, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_kernels(CUDA, torch.bfloat16), TorchKernels)
    assert "Triton is not installed" in caplog.text


def test_float32_on_a_gpu_is_said_to_be_slow(caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_kernels(CUDA, torch.float32), TorchKernels)
    assert "float32" in caplog.text


@pytest.fixture
def with_flashinfer(monkeypatch):
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: object())


def test_what_flashinfer_lacks(monkeypatch, with_flashinfer):
    assert missing_for_flashinfer(128) is None
    assert "head_dim=80" in missing_for_flashinfer(80)
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: None)
    assert "raypp[gpu]" in missing_for_flashinfer(128)
    assert "raypp[gpu]" in missing_for_xqa(32, 8, 16, HOPPER)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size", "capability", "missing"),
    [
        (32, 8, 16, HOPPER, None),
        (32, 8, 16, (8, 0), "compute capability"),
        (64, 1, 16, HOPPER, "query heads per KV head"),
        (32, 8, 8, HOPPER, "block_size"),
    ],
)
def test_what_xqa_lacks(with_flashinfer, num_heads, num_kv_heads, block_size, capability, missing):
    reason = missing_for_xqa(num_heads, num_kv_heads, block_size, capability)
    assert reason is None if missing is None else missing in reason


@pytest.mark.parametrize("query_len", [2, 5, 16, 17, 33])
def test_the_mask_of_drafts_is_causal(query_len):
    mask = causal_mask(query_len, 3, torch.device("cpu"))
    assert mask.shape == (3, query_len, 2 * -(-query_len // 32))
    for row in mask.tolist():
        for token, words in enumerate(row):
            bits = [words[seen // 16] >> (seen % 16) & 1 for seen in range(16 * len(words))]
            assert bits == [int(seen <= token) for seen in range(16 * len(words))]
