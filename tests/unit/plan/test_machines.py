"""GPUs that are described by a text, and what finds room on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raypp.errors import ConfigError
from raypp.plan.hardware import Gpu, GpuAsk, Hardware, Machine, described_hardware, num_machines_for, read_machines

_GB = 10**9


def _alike(num_gpus: int, memory_bytes: int) -> Machine:
    return Machine((Gpu(memory_bytes),) * num_gpus)


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        ("4x80GB", [(4, 80 * _GB)]),
        ("1X24gb", [(1, 24 * _GB)]),
        ("2x22.5GiB", [(2, 45 << 29)]),
        ("2x24GB+2x24GB", [(2, 24 * _GB), (2, 24 * _GB)]),
        (" 2 x 24 GB + 1x80GB", [(2, 24 * _GB), (1, 80 * _GB)]),
    ],
)
def test_machines_are_read(text: str, machines: list[tuple[int, int]]) -> None:
    assert read_machines(text) == tuple(_alike(*machine) for machine in machines)


@pytest.mark.parametrize("text", ["", "4", "4x80", "4x80MB", "x80GB", "4x80GB+", "H100", "4x-1GB", "1.5x80GB"])
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machines(text)
    assert caught.value.got == text
    assert "4x80GB" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("text", "allowed"), [("0x80GB", "1 to 1024"), ("9999x80GB", "1 to 1024"), ("1x0.5GB", "1 GB")]
)
def test_numbers_that_no_machine_has_are_refused(text: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machines(text)
    assert caught.value.got == text
    assert allowed in str(caught.value.expected)


@pytest.mark.parametrize(
    ("text", "smallest_card_mib"),
    # The driver's figure of the smallest card that is sold with so much: T4, L4, A100, L40S, H100, H100 NVL, H200.
    [
        ("16GB", 15360),
        ("24GB", 23028),
        ("40GB", 40536),
        ("48GB", 46068),
        ("80GB", 81559),
        ("94GB", 95830),
        ("141GB", 143771),
    ],
)
def test_a_described_gpu_is_not_larger_than_a_real_one(text: str, smallest_card_mib: int) -> None:
    [machine] = read_machines(f"1x{text}")
    assert 0.9 < machine.gpus[0].memory_bytes / (smallest_card_mib << 20) <= 1


def test_gpus_of_one_machine_may_differ() -> None:
    one = Gpu(24 * _GB), Gpu(24 * _GB), Gpu(48 * _GB)
    assert read_machines("2x24GB+48GB") == (Machine(one),)
    assert read_machines("24GB+24GB+48GB") == (Machine(one),)
    assert read_machines("2x24GB+1x48GB") == (Machine(one[:2]), Machine(one[2:]))
    hardware = described_hardware(read_machines("2x24GB+80GB"))
    assert (hardware.num_gpus, hardware.gpu_memory_bytes) == (3, 24 * _GB)


class _Driver:
    """pynvml of a machine with GPUs, of these sizes in GB."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVMLError = RuntimeError

    def __init__(self, sizes: list[int], *, has_links: bool = True) -> None:
        self._sizes, self._has_links = sizes, has_links

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: len(self._sizes),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=self._sizes[index] * _GB),
            "nvmlDeviceGetName": lambda index: f"card of {self._sizes[index]}",
            "nvmlDeviceGetCudaComputeCapability": lambda index: (8, index),
            "nvmlDeviceGetP2PStatus": lambda one, other, what: 0 if self._has_links else 5,
        }
        return answers.get(name, lambda: None)


@pytest.mark.parametrize("has_links", [True, False])
def test_this_machines_gpus(monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Driver([48, 16, 24], has_links=has_links))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hardware = Hardware.of_this_machine()
    gpus = Gpu(48 * _GB, "card of 48"), Gpu(16 * _GB, "card of 16")
    assert hardware.machines == (Machine(gpus, has_nvlink=has_links),)
    assert (hardware.num_gpus, hardware.gpu_name, hardware.gpu_memory_bytes) == (2, "card of 16", 16 * _GB)
    assert hardware.gpu_capability == (8, 0)


def test_speeds_are_those_of_data_sheets() -> None:
    speeds = [Gpu(0, f"NVIDIA {name}").speed for name in ("L4", "L40S", "H100 PCIe", "H100 NVL", "A100-SXM4-40GB")]
    assert [speed and speed.name for speed in speeds] == ["L4", "L40", "H100 PCIe", "H100", "A100"]
    assert Gpu(0).speed is None


@pytest.mark.parametrize(
    ("shares", "gpus", "strategy", "expected"),
    [
        ([1, 1], [2], "pack", 1),
        ([1, 1, 1], [2], "pack", None),
        ([1, 1, 1], [2, 2], "pack", 2),
        ([1, 1], [1, 2], "pack", 1),
        ([1, 1], [2, 2], "spread", 2),
        ([1, 1, 1], [2, 2], "strict_pack", None),
        ([1, 1], [2, 2], "strict_pack", 1),
        ([1, 1], [2, 2], "strict_spread", 2),
        ([1, 1, 1], [2, 2], "strict_spread", None),
        ([0.5] * 4, [2], "pack", 1),
        ([0.6] * 3, [2], "pack", None),  # two do not share a GPU
        ([0.8, 0.8, 0.2, 0.2], [2], "pack", 1),
        ([0.2, 0.2, 0.8, 0.8], [2], "pack", 1),
        ([1 / 3] * 3, [1], "pack", 1),
        ([1], [0], "pack", None),
    ],
)
def test_what_finds_room(shares, gpus, strategy, expected) -> None:
    machines = [_alike(number, 24 * _GB) for number in gpus]
    assert num_machines_for([GpuAsk(share) for share in shares], machines, strategy) == expected


@pytest.mark.parametrize(
    ("asks", "gpus", "strategy", "expected"),
    [
        ([GpuAsk(1, 2)] * 2, [4], "pack", 1),
        ([GpuAsk(1, 2)] * 2, [3], "pack", None),
        ([GpuAsk(1, 2)] * 2, [2, 2], "pack", 2),
        ([GpuAsk(1, 2)], [1, 1], "pack", None),  # members of a stage are on one machine
        ([GpuAsk(1, 2)] * 3, [3, 3], "pack", None),
        ([GpuAsk(1, 4)], [2, 4], "pack", 1),
        ([GpuAsk(0.2), GpuAsk(1, 2)], [2, 1], "pack", 2),
        ([GpuAsk(1, 2)] * 2, [4, 4], "spread", 2),
        ([GpuAsk(1, 2)] * 2, [2, 4], "strict_spread", 2),
        ([GpuAsk(1, 2)] * 2, [1, 4], "strict_spread", None),
        ([GpuAsk(1, 2)] * 2, [2, 2], "strict_pack", None),
    ],
)
def test_members_of_a_stage_are_on_one_machine(asks, gpus, strategy, expected) -> None:
    assert num_machines_for(asks, [_alike(number, 24 * _GB) for number in gpus], strategy) == expected
