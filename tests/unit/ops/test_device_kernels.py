"""Which kernels a device gets, and what is logged when faster ones are missing."""

from __future__ import annotations

import logging

import torch

from raypp.ops import device_kernels
from raypp.ops.attention import Heads
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.cuda import step_attention
from raypp.ops.cuda.step_attention import missing_for_flashinfer
from raypp.ops.device_kernels import choose_kernels

CUDA = torch.device("cuda")


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


def test_what_flashinfer_lacks(monkeypatch):
    monkeypatch.setattr(step_attention, "find_spec", lambda name: object())
    assert missing_for_flashinfer(Heads(8, 2, 128)) is None
    assert "head_dim=80" in missing_for_flashinfer(Heads(8, 2, 80))
    assert "values of 64" in missing_for_flashinfer(Heads(8, 2, 128, v_dim=64))
    monkeypatch.setattr(step_attention, "find_spec", lambda name: None)
    assert 'pip install ".[gpu]" in the clone' in missing_for_flashinfer(Heads(8, 2, 128))
