"""What machines have that stages will run on; or a description of GPUs that are not here: `4x80GB`.

A described GPU has as many bytes as its name says in decimal gigabytes. Cards have up to 7 % more: one sold with 24 GB
has 24.1 to 25.8 billion bytes. So a plan for a description leaves some memory over, and never promises too much.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from raypp.config.sections import Placement
from raypp.errors import ConfigError, install

_FP8_CAPABILITY = (8, 9)
_GPUS = re.compile(r"(?:(\d+)\s*x)?\s*(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
_UNITS = {"gb": 10**9, "gib": 1 << 30}
_MAX_GPUS = 1024
_MIN_BYTES, _MAX_BYTES = 10**9, 10**12
_EXPECTED = (
    "NUMBERxMEMORY, e.g. 4x80GB or 2x22.5GiB; for several machines joined by +, e.g. 2x24GB+2x24GB; for unlike GPUs of "
    "one machine the others without a number, e.g. 16GB+32GB or 2x24GB+48GB"
)
_CAPABILITY = (8, 9)
"""Assumed: from it on a draft head keeps weights in 8 bits besides, so that the plan counts them."""
_ROUNDING = 1e-6
LEAST_FREE_SHARE = 0.9
"""Of its memory that a GPU has free where nothing else runs on it."""
_ALIKE = 1.02
"""Times the memory of another that a GPU of the same kind may have."""


class GpuSpeed(NamedTuple):
    """What the data sheet of a GPU says."""

    name: str  # there
    bytes_per_s: float  # of its memory
    flops: float  # per second, of dense products in 16 bits

    @property
    def flops_per_byte(self) -> float:
        """Of them, while a byte is read."""
        return self.flops / self.bytes_per_s


H200 = GpuSpeed("H200", 4.8e12, 989e12)
_SPEEDS = (  # the first counts whose name a GPU's own contains
    GpuSpeed("B200", 8.0e12, 2250e12),
    GpuSpeed("GH200", 4.9e12, 989e12),
    H200,
    GpuSpeed("H100 PCIe", 2.0e12, 756e12),
    GpuSpeed("H100", 3.35e12, 989e12),
    GpuSpeed("A100", 2.0e12, 312e12),
    GpuSpeed("A6000", 0.768e12, 155e12),
    GpuSpeed("L40", 0.864e12, 362e12),
    GpuSpeed("RTX 5090", 1.79e12, 210e12),
    GpuSpeed("RTX 4090", 1.01e12, 165e12),
    GpuSpeed("RTX 3090", 0.936e12, 71e12),
    GpuSpeed("A10", 0.6e12, 125e12),
    GpuSpeed("L4", 0.3e12, 121e12),
    GpuSpeed("T4", 0.32e12, 65e12),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    memory_bytes: int
    name: str = ""  # as its driver gives it; of a described one not known

    @property
    def speed(self) -> GpuSpeed | None:
        """What is known of its speed; None: nothing."""
        return next((speed for speed in _SPEEDS if re.search(rf"\b{speed.name}S?\b", self.name)), None)


@dataclass(frozen=True)
class Machine:
    """The GPUs of one machine, in the order of their PCI buses."""

    gpus: tuple[Gpu, ...]
    has_nvlink: bool = True  # between all of them; assumed of described ones
    node_id: str = ""  # in a Ray cluster; that of the engine's owner if empty

    @property
    def num_gpus(self) -> int:
        """How many there are."""
        return len(self.gpus)


@dataclass(frozen=True)
class Hardware:
    """The machine that stages will run on."""

    num_cpu_cores: int
    memory_bytes: int = 0
    num_gpus: int = 0
    gpu_name: str = ""
    gpu_memory_bytes: int = 0  # of the smallest GPU
    gpu_capability: tuple[int, int] = (0, 0)  # the lowest compute capability; (0, 0): not known
    num_machines: int = 1  # that have these GPUs together; cores and memory are of the smallest
    machines: tuple[Machine, ...] = ()  # which of them has which GPUs; empty: not known, all are taken to be alike
    num_unusable_gpus: int = 0  # that the system has, while the extra `gpu` is not installed

    @property
    def complaint(self) -> str | None:
        """What to say where stages compute on CPUs beside GPUs; None: nothing."""
        if not self.num_unusable_gpus:
            return None
        return (
            f"this machine has GPUs ({self.num_unusable_gpus}), but raypp cannot use them without the extra gpu: "
            f"{install('gpu')}; `raypp doctor` says what else is missing"
        )

    @property
    def has_fp8(self) -> bool:
        """Whether the GPUs convert and multiply float8_e4m3fn."""
        return self.gpu_capability >= _FP8_CAPABILITY

    def threads_per_stage(self, num_stages: int) -> int:
        """Return the compute threads of each of `num_stages` stages on this machine; the driver needs a core, too."""
        return max(1, (self.num_cpu_cores - 1) // num_stages)

    @classmethod
    def of_this_machine(cls) -> Hardware:
        """Return what this process may use. Asks the driver's library, so that no GPU is touched."""
        return cls(
            num_cpu_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            **_gpus(),
        )


def _gpus() -> dict[str, Any]:
    """Return what `Hardware` says of GPUs."""
    try:
        import pynvml
    except ImportError:  # the extra `gpu` is not installed: raypp could not compute on one
        return {"num_unusable_gpus": len(visible_indices(len(device_files()))), "machines": (Machine(()),)}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {"machines": (Machine(()),)}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in visible_indices(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return {"machines": (Machine(()),)}
        gpus = tuple(
            Gpu(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), str(pynvml.nvmlDeviceGetName(handle)))
            for handle in handles
        )
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        major, minor = min(pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles)
        return {
            "num_gpus": len(handles),
            "gpu_name": smallest.name,
            "gpu_memory_bytes": smallest.memory_bytes,
            "gpu_capability": (major, minor),
            "machines": (Machine(gpus, _has_nvlink(pynvml, handles)),),
        }
    finally:
        pynvml.nvmlShutdown()


def _has_nvlink(pynvml: Any, handles: Sequence[Any]) -> bool:
    """Return whether NVLink joins each GPU with each other one."""
    link, good = pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK
    try:
        return all(pynvml.nvmlDeviceGetP2PStatus(*pair, link) == good for pair in combinations(handles, 2))
    except pynvml.NVMLError:
        return False


def busy_gpus() -> list[int]:
    """Return which of the GPUs that this process may use have memory that others use."""
    import pynvml

    pynvml.nvmlInit()
    try:
        busy = []
        for index in visible_indices(pynvml.nvmlDeviceGetCount()):
            memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
            if memory.free < LEAST_FREE_SHARE * memory.total:
                busy.append(index)
        return busy
    finally:
        pynvml.nvmlShutdown()


def device_files() -> list[str]:
    """Return the files of the GPUs that the system has, such as /dev/nvidia0, whether raypp can use them or not."""
    return sorted(glob.glob("/dev/nvidia[0-9]*"))


def visible_indices(count: int) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES leaves; ids in other forms than numbers leave all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    indices = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    if visible.strip() and not indices:
        return list(range(count))
    return [index for index in indices if index < count]


def read_machines(text: str) -> tuple[Machine, ...]:
    """Return the machines that a text like `4x80GB`, `2x24GB+2x24GB` or `16GB+32GB` describes.

    A part with a number begins a machine; one without is a GPU more of the machine before.

    Raises:
        ConfigError: it has another form, or numbers that no machine has.
    """
    machines = list[Machine]()
    for part in text.split("+"):
        match = _GPUS.fullmatch(part.strip())
        if match is None:
            raise ConfigError("--gpus does not describe GPUs", got=text, expected=_EXPECTED)
        num_gpus, memory_bytes = int(match[1] or 1), int(float(match[2]) * _UNITS[match[3].lower()])
        if not 1 <= num_gpus <= _MAX_GPUS:
            raise ConfigError("--gpus: no machine has so many GPUs", got=part, expected=f"1 to {_MAX_GPUS} GPUs")
        if not _MIN_BYTES <= memory_bytes <= _MAX_BYTES:
            raise ConfigError("--gpus: no GPU has so much memory", got=part, expected="1 GB to 1000 GB per GPU")
        before = () if match[1] or not machines else machines.pop().gpus
        machines.append(Machine((*before, *[Gpu(memory_bytes)] * num_gpus)))
    return tuple(machines)


def described_hardware(machines: Sequence[Machine]) -> Hardware:
    """Return the hardware to plan for.

    Cores and main memory are not described; plans for GPUs do not depend on them.
    """
    return Hardware(
        num_cpu_cores=1,
        num_gpus=sum(machine.num_gpus for machine in machines),
        gpu_name="as described",
        gpu_memory_bytes=min(gpu.memory_bytes for machine in machines for gpu in machine.gpus),
        gpu_capability=_CAPABILITY,
        machines=tuple(machines),
    )


class StageGpus(NamedTuple):
    """The GPUs of one stage, one for each member."""

    weakest: Gpu  # of them: as members have parts of equal size, what each counts on
    node_id: str = ""
    indices: tuple[int, ...] | None = None  # among the machine's, by rank; None: those that Ray gives


def gpus_of_stages(hardware: Hardware, num_stages: int, num_members: int, *, take_all: bool) -> list[StageGpus]:
    """Return which GPUs each stage has.

    Where GPUs differ and stages take all of them, that is decided: machine by machine, in the order of a machine's.
    Else Ray gives any of them, and each stage counts on the smallest.

    Args:
        hardware: What there is.
        num_stages: P.
        num_members: Of each stage.
        take_all: Whether each member has a GPU of its own, and nothing else of the engine has one.
    """
    speeds = [gpu.speed for machine in hardware.machines for gpu in machine.gpus]
    slowest = min((speed for speed in speeds if speed is not None), key=lambda speed: speed.bytes_per_s, default=None)

    def weakest(gpus: Sequence[Gpu]) -> Gpu:
        """Return the least memory and the slowest speed of some; what is unknown is as slow as the slowest known."""
        known = [gpu.speed or slowest for gpu in gpus]
        names = [speed.name for speed in sorted(filter(None, known), key=lambda speed: speed.bytes_per_s)]
        return Gpu(min(gpu.memory_bytes for gpu in gpus), names[0] if names else "")

    groups = [
        StageGpus(
            weakest(machine.gpus[first : first + num_members]),
            machine.node_id,
            tuple(range(first, first + num_members)),
        )
        for machine in hardware.machines
        for first in range(0, machine.num_gpus, num_members)
    ]
    gpus = [gpu for machine in hardware.machines for gpu in machine.gpus]
    sizes = [gpu.memory_bytes for gpu in gpus]
    are_alike = len({gpu.speed for gpu in gpus}) < 2 and max(sizes, default=0) <= _ALIKE * min(sizes, default=0)
    is_whole = all(machine.num_gpus % num_members == 0 for machine in hardware.machines)
    if are_alike or not take_all or not is_whole or len(groups) != num_stages:
        return [StageGpus(Gpu(hardware.gpu_memory_bytes, hardware.gpu_name))] * num_stages
    return groups


class GpuAsk(NamedTuple):
    """What a stage or an encoder asks for: shares of GPUs that are all of one machine."""

    share: float  # of each GPU, above 0 and at most 1
    num_gpus: int = 1  # one for each member of a stage


def num_machines_for(asks: Sequence[GpuAsk], machines: Sequence[Machine], strategy: Placement) -> int | None:
    """Return over how many machines these stages and encoders are spread; None when there is no room for them.

    Args:
        asks: Of each of them.
        machines: With GPUs that are all free.
        strategy: See `ParallelSection.placement`.
    """
    if strategy == "strict_spread":
        largest_first = zip(sorted(asks, key=_size), sorted(machines, key=_num_gpus, reverse=True), strict=False)
        has_room = len(asks) <= len(machines) and all(_num_used([ask], [machine]) for ask, machine in largest_first)
        return len(asks) if has_room else None
    if strategy != "spread" and any(_num_used(asks, [machine]) for machine in machines):
        return 1
    used = None if strategy == "strict_pack" else _num_used(asks, machines)
    return min(len(asks), len(machines)) if used and strategy == "spread" else used


def _size(ask: GpuAsk) -> tuple[int, float]:
    """Return what asks are sorted by, the largest first."""
    return -ask.num_gpus, -ask.share


def _num_gpus(machine: Machine) -> int:
    return machine.num_gpus


def _num_used(asks: Sequence[GpuAsk], machines: Sequence[Machine]) -> int | None:
    """Return over how many machines the asks lie if the largest are placed first; None: they find no room."""
    free = [[1.0] * machine.num_gpus for machine in machines]
    used = set()
    for share, num_gpus in sorted(asks, key=_size):
        possible = [[gpu for gpu, left in enumerate(gpus) if left + _ROUNDING >= share] for gpus in free]
        machine = next((index for index, gpus in enumerate(possible) if len(gpus) >= num_gpus), None)
        if machine is None:
            return None
        for gpu in possible[machine][:num_gpus]:
            free[machine][gpu] -= share
        used.add(machine)
    return len(used)
