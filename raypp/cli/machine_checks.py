"""The checks of `raypp doctor`: each is given what was seen, and returns whether that is right and what to do if not.

They look at nothing themselves, so that tests can show them machines that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from raypp.errors import install
from raypp.plan.hardware import LEAST_FREE_SHARE

Status = Literal["ok", "warning", "problem"]
Version = tuple[int, int]

LEAST_CAPABILITY = (8, 0)
"""Of GPUs that compute in bfloat16."""
_SHM_BYTES, _LEAST_SHM_BYTES = 1 << 30, 128 << 20
_OPEN_FILES, _LEAST_OPEN_FILES = 4096, 512
_LONG_PROMPT, _SLOW_EDGE_MS, _SLOW_PROMPT_S = 32_768, 1.0, 1.0
_CACHE_BYTES, _LEAST_CACHE_BYTES = 20 * 10**9, 10**9


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    status: Status
    finding: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: Version


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster that answers."""

    address: str
    num_nodes: int
    total: Mapping[str, float]
    free: Mapping[str, float]


def check_python(version: tuple[int, int, int], needed: str) -> Check:
    """Check Python's version; `needed` is a specifier such as `>=3.11`."""
    text = ".".join(map(str, version))
    if SpecifierSet(needed).contains(text):
        return Check("python", "ok", text)
    return Check("python", "problem", f"{text}; raypp needs {needed}", f"make a new environment with Python {needed}")


def check_package(needed: Requirement, installed: str | None, *, lack: Status, advice: str) -> Check:
    """Check one package's version.

    Args:
        needed: Its name and versions.
        installed: The version there is; None: it is not installed.
        lack: How bad that is.
        advice: What to do then.
    """
    if installed is None and lack == "ok":
        return Check(needed.name, "ok", "not installed, and not needed without a GPU")
    if installed is None:
        return Check(needed.name, lack, "not installed", advice)
    if needed.specifier.contains(installed, prereleases=True):
        return Check(needed.name, "ok", installed)
    return Check(needed.name, "problem", f"{installed}; raypp needs {needed.specifier}", advice)


def check_torch_build(built_for: str | None, driver_cuda: Version | None, num_gpus: int) -> Check:
    """Check that torch's CUDA is one that the driver can run.

    Args:
        built_for: The CUDA that torch was built for, e.g. `13.0`; None: it computes on CPUs alone.
        driver_cuda: The newest CUDA that the driver can run; None: there is no driver.
        num_gpus: That the driver sees.
    """
    name = "torch's CUDA"
    if built_for is None:
        if not num_gpus:
            return Check(name, "ok", "none: torch is built for CPUs, and there is no GPU")
        newest = "the driver's CUDA" if driver_cuda is None else f"CUDA {driver_cuda[0]}.{driver_cuda[1]} or older"
        return Check(
            name,
            "problem",
            f"torch is built for CPUs, but there are GPUs ({num_gpus})",
            f"install a torch that is built for {newest}: https://pytorch.org/get-started/locally",
        )
    if driver_cuda is None:
        return Check(name, "ok", f"{built_for}; there is no GPU driver, so torch computes on CPUs")
    if int(built_for.split(".")[0]) <= driver_cuda[0]:
        return Check(name, "ok", f"{built_for}; the driver runs up to {driver_cuda[0]}.{driver_cuda[1]}")
    return Check(
        name,
        "problem",
        f"torch is built for CUDA {built_for}, the driver runs up to {driver_cuda[0]}.{driver_cuda[1]}",
        f"update the NVIDIA driver, or install a torch that is built for CUDA {driver_cuda[0]}.x",
    )


def check_driver(gpus: Sequence[Gpu], device_files: Sequence[str], error: str | None) -> Check:
    """Check that the GPUs that the system has can be asked about.

    Args:
        gpus: Those that the driver names and CUDA_VISIBLE_DEVICES leaves.
        device_files: Such as /dev/nvidia0.
        error: Why the driver could not be asked; None: it answered.
    """
    if gpus:
        return Check("GPUs", "ok", f"{len(gpus)}")
    if error is not None and device_files:
        return Check(
            "GPUs",
            "problem",
            f"{len(device_files)} device files ({device_files[0]}, ...), but no answer: {error}",
            f"does `nvidia-smi` work? If so: {install('gpu')}; if not, reinstall the driver or restart the machine",
        )
    if device_files:
        return Check(
            "GPUs",
            "problem",
            f"{len(device_files)} device files, but none may be used",
            "look at CUDA_VISIBLE_DEVICES, and in a container at its GPU options (docker run --gpus all)",
        )
    return Check("GPUs", "warning", "none: raypp computes on CPUs, slowly for all but small models")


def check_gpu(gpu: Gpu) -> Check:
    """Check one GPU's compute capability, and whether its memory is free."""
    name, gib = f"GPU {gpu.index}", 2**30
    capability = ".".join(map(str, gpu.capability))
    seen = f"{gpu.name}, {gpu.memory_bytes / gib:.1f} GiB, compute capability {capability}"
    if gpu.capability < LEAST_CAPABILITY:
        return Check(
            name,
            "problem",
            f"{seen}; bfloat16 needs {'.'.join(map(str, LEAST_CAPABILITY))}",
            "leave it out by CUDA_VISIBLE_DEVICES; raypp is not tested on such GPUs",
        )
    if gpu.free_bytes < LEAST_FREE_SHARE * gpu.memory_bytes:
        return Check(
            name,
            "warning",
            f"{seen}; {(gpu.memory_bytes - gpu.free_bytes) / gib:.1f} GiB are in use",
            "end what uses it (nvidia-smi shows it), or lower gpu_memory_utilization",
        )
    return Check(name, "ok", seen)


def check_cuda_starts(error: str | None, num_gpus: int) -> Check:
    """Check that torch can use the GPUs; `error` is what it says otherwise."""
    if not num_gpus:
        return Check("CUDA", "ok", "not needed without a GPU")
    if error is None:
        return Check("CUDA", "ok", "torch can use the GPUs")
    return Check(
        "CUDA",
        "problem",
        f"torch cannot use the GPUs: {error}",
        "mend what this list says of torch and the driver; in a container, look at its GPU options",
    )


def check_peer_access(reaches: Mapping[tuple[int, int], bool]) -> Check:
    """Check that GPUs reach each other's memory: `reaches` says so for every ordered pair."""
    if not reaches:
        return Check("peer access", "ok", "not needed with fewer than two GPUs")
    not_reached = sorted({(min(pair), max(pair)) for pair, reached in reaches.items() if not reached})
    if not not_reached:
        return Check("peer access", "ok", "every GPU reaches every other one")
    pairs = ", ".join(f"{one}-{other}" for one, other in not_reached[:4]) + (", ..." if len(not_reached) > 4 else "")
    return Check(
        "peer access",
        "warning",
        f"none between GPUs {pairs}: stages there are joined by NCCL, which is slower",
        "give neighbouring stages GPUs that reach each other (nvidia-smi topo -p2p r); virtual machines and "
        "PCIe's access control (ACS) may forbid it",
    )


def check_nvcc(path: str | None, *, has_flashinfer: bool, has_compiled: bool, num_gpus: int) -> Check:
    """Check that FlashInfer can compile its kernels.

    Args:
        path: Of CUDA's compiler; None: it was not found.
        has_flashinfer: FlashInfer is installed.
        has_compiled: Kernels that are compiled already are installed (flashinfer-jit-cache).
        num_gpus: That the driver sees.
    """
    if path is not None:
        return Check("nvcc", "ok", path)
    if not num_gpus or not has_flashinfer:
        return Check("nvcc", "ok", "not found, and not needed without " + ("FlashInfer" if num_gpus else "a GPU"))
    if has_compiled:
        return Check("nvcc", "ok", "not found, but FlashInfer's compiled kernels are installed")
    return Check(
        "nvcc",
        "problem",
        "not found: FlashInfer cannot compile its kernels",
        "install the CUDA toolkit and set CUDA_HOME, or install flashinfer-jit-cache of FlashInfer's version",
    )


def check_c_compiler(path: str | None, headers: Path, *, has_headers: bool, num_gpus: int) -> Check:
    """Check that Triton can compile what launches its kernels (FlashInfer's compiler needs g++ of the same packages).

    Args:
        path: Of a C compiler; None: it was not found.
        headers: The folder of Python's headers.
        has_headers: Whether Python.h is in it.
        num_gpus: That the driver sees.
    """
    name, advice = "C compiler", "apt-get install gcc g++ libc6-dev python3-dev, or your system's packages of these"
    if not num_gpus:
        return Check(name, "ok", f"{path or 'not found'}, and not needed without a GPU")
    if path is None:
        return Check(name, "problem", "not found: Triton cannot compile what launches its kernels", advice)
    if not has_headers:
        return Check(name, "problem", f"{path}, but no Python.h in {headers}, which Triton's launchers need", advice)
    return Check(name, "ok", path)


def check_shared_memory(free_bytes: int | None) -> Check:
    """Check the room in /dev/shm, which Ray's object store and links between stages use; None: it is not there."""
    name, advice = "/dev/shm", "in a container: docker run --shm-size=2g, or an emptyDir with medium: Memory"
    if free_bytes is None:
        return Check(name, "problem", "there is none", advice)
    seen = f"{free_bytes / 2**30:.2f} GiB free"
    if free_bytes < _LEAST_SHM_BYTES:
        return Check(name, "problem", f"{seen}; at least {_LEAST_SHM_BYTES / 2**30:.2f} are needed", advice)
    if free_bytes < _SHM_BYTES:
        return Check(name, "warning", f"{seen}; {_SHM_BYTES / 2**30:g} or more is recommended", advice)
    return Check(name, "ok", seen)


def check_open_files(soft: int, hard: int) -> Check:
    """Check how many files and connections a process may have open; below 0: any number."""
    allowed = "any number" if soft < 0 else f"{soft:,}"
    advice = f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}"
    if 0 <= soft < _LEAST_OPEN_FILES:
        return Check("open files", "problem", f"{allowed}; at least {_LEAST_OPEN_FILES} are needed", advice)
    if 0 <= soft < _OPEN_FILES:
        return Check("open files", "warning", f"{allowed}: not enough for a server with many clients", advice)
    return Check("open files", "ok", allowed)


def check_cluster(named: str | None, cluster: RayCluster | None, error: str | None, other: str | None) -> Check:
    """Check the Ray cluster that raypp would use.

    Args:
        named: RAY_ADDRESS; None: it is not set.
        cluster: What answers there.
        error: Why nothing does.
        other: The address of a cluster on this machine that RAY_ADDRESS does not name.
    """
    name = "Ray cluster"
    if named is None:
        if other is None:
            return Check(name, "ok", "none runs here: raypp starts a Ray of its own, and ends it")
        return Check(
            name,
            "warning",
            f"one runs here, at {other}, but RAY_ADDRESS is not set: raypp starts another Ray beside it",
            f"export RAY_ADDRESS={other}",
        )
    if cluster is None:
        return Check(
            name,
            "problem",
            f"RAY_ADDRESS={named}, but: {error}",
            "start it (ray start --head), correct RAY_ADDRESS, or unset it: raypp then starts a Ray of its own",
        )
    free, total = cluster.free, cluster.total
    texts = [f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU")]
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    seen = f"{cluster.address}, {nodes}, free: {', '.join(texts)}"
    if total.get("GPU", 0) and free.get("GPU", 0) < 1:
        return Check(name, "warning", seen, "no GPU is free: end what has them (ray status shows it), or wait")
    return Check(name, "ok", seen)


def check_node(host: str, differing: str) -> Check:
    """Check that a node's packages are those of this one; `differing` says which are not."""
    if not differing:
        return Check("node", "ok", f"{host}: the versions of this one")
    advice = "on each node, make install at the same commit of raypp"
    return Check("node", "problem", f"{host}: {differing}", advice)


def check_link(sender: str, receiver: str, round_trip_s: float, bytes_per_s: float, hidden_size: int) -> Check:
    """Check what joins two nodes, and say what a pipeline makes of it.

    Args:
        sender: Address of one.
        receiver: Address of the other.
        round_trip_s: Between them, seconds.
        bytes_per_s: From the one to the other.
        hidden_size: Of the model, whose hidden states have 16 bits.
    """
    token_bytes = 2 * hidden_size
    edge_ms = (round_trip_s / 2 + token_bytes / bytes_per_s) * 1e3
    prompt_s = _LONG_PROMPT * token_bytes / bytes_per_s
    finding = (
        f"{sender} to {receiver}: round trip {round_trip_s * 1e3:.2f} ms, {bytes_per_s * 8e-9:.1f} Gb/s; with a hidden "
        f"size of {hidden_size:,} an edge adds {edge_ms:.2f} ms to a token, and carries a prompt of {_LONG_PROMPT:,} "
        f"tokens in {prompt_s:.2f} s"
    )
    if edge_ms <= _SLOW_EDGE_MS and prompt_s <= _SLOW_PROMPT_S:
        return Check("link", "ok", finding)
    advice = "join the nodes by a faster network (ray start --node-ip-address chooses it), or keep an engine on one"
    return Check("link", "warning", finding, advice)


def check_port(port: int, use: str, error: str | None, advice: str) -> Check:
    """Check that a port is free; `error` says why it is not, `use` what it is for."""
    if error is None:
        return Check(f"port {port}", "ok", f"free, {use}")
    return Check(f"port {port}", "warning", f"taken ({error}), {use}", advice)


def check_model_cache(folder: Path, free_bytes: int, *, can_write: bool) -> Check:
    """Check the disk that models are downloaded to."""
    name, advice = "model cache", "make room, or set HF_HOME to a folder on a larger disk"
    seen = f"{folder}, {free_bytes / 1e9:.1f} GB free"
    if not can_write:
        return Check(name, "problem", f"{folder} cannot be written", "set HF_HOME to a folder that you may write")
    if free_bytes < _LEAST_CACHE_BYTES:
        return Check(name, "problem", f"{seen}: no room for any model", advice)
    if free_bytes < _CACHE_BYTES:
        return Check(name, "warning", f"{seen}; a model of 8B parameters takes 16 GB", advice)
    return Check(name, "ok", seen)
