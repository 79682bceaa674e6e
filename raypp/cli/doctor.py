"""`raypp doctor`: what is wrong with this machine, and what to do about it.

Exit codes: 0 no problem, warnings or not; 1 a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from raypp.cli import machine_checks as checks
from raypp.cli.machine_checks import Check, Gpu, RayCluster, Status
from raypp.errors import install
from raypp.plan.fit import counted
from raypp.plan.hardware import device_files, visible_indices

_PROBLEM = 1
_PACKAGE = "raypp"
_SERVE_PORT, _DASHBOARD_PORT = 8000, 8265
_PACKAGES = ("torch", "transformers", "ray")
_GPU_PACKAGES = ("flashinfer-python", "triton", "nvidia-ml-py", "cuda-bindings", "nccl4py")
_HIDDEN_SIZE = 4096
_COMPILED_KERNELS = "flashinfer-jit-cache"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is wrong with this machine",
        description="Check Python, packages, GPUs, shared memory, limits, Ray, ports and disks: a line for each, and "
        "what to do. Exit code 1 if there is a problem. Starts no Ray.",
    )
    parser.add_argument(
        "--cluster",
        type=int,
        nargs="?",
        const=_HIDDEN_SIZE,
        metavar="HIDDEN_SIZE",
        help="also measure between the nodes of the cluster of RAY_ADDRESS, a second for each pair, and say what a "
        f"pipeline makes of it; the model's hidden size is {_HIDDEN_SIZE} by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print."""
    found = []
    for check in all_checks(args.cluster):
        found.append(check)
        if not args.json:
            print(line_of(check), flush=True)  # one after the other: some take seconds
    counts = {status: sum(check.status == status for check in found) for status in ("ok", "warning", "problem")}
    if args.json:
        print(json.dumps({"counts": counts, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        print(f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}")
    return _PROBLEM if counts["problem"] else 0


def line_of(check: Check) -> str:
    """Return a check as one line."""
    advice = f" -> {check.advice}" if check.advice else ""
    return f"{check.status:8} {check.name:18} {' '.join(check.finding.split())}{advice}"


def all_checks(hidden_size: int | None = None) -> Iterator[Check]:
    """Yield every check of this machine. One that cannot look is a warning, and the others go on.

    Args:
        hidden_size: Of what travels between nodes of the cluster; None: these are not measured.
    """
    gpus, driver_cuda, error = _gpus()
    files = device_files()
    num_gpus = len(gpus) if _installed("nvidia-ml-py") is not None else len(visible_indices(len(files)))
    needed = _needed()
    has_flashinfer = _installed("flashinfer-python") is not None
    yield from _guarded(
        "python", lambda: [checks.check_python(sys.version_info[:3], metadata(_PACKAGE)["Requires-Python"])]
    )
    for name in _PACKAGES:
        advice = f"pip install '{needed[name]}'"
        yield checks.check_package(needed[name], _installed(name), lack="problem", advice=advice)
    yield from _guarded("torch's CUDA", lambda: [checks.check_torch_build(_torch_cuda(), driver_cuda, num_gpus)])
    yield checks.check_driver(gpus, files, error)
    yield from map(checks.check_gpu, gpus)
    yield from _guarded("CUDA", lambda: _cuda_checks(num_gpus))
    for name in _GPU_PACKAGES:
        lack: Status = "warning" if num_gpus else "ok"
        yield checks.check_package(needed[name], _installed(name), lack=lack, advice=install("gpu"))
    yield checks.check_nvcc(
        _nvcc(),
        has_flashinfer=has_flashinfer,
        has_compiled=_installed(_COMPILED_KERNELS) is not None,
        num_gpus=num_gpus,
    )
    headers = _python_headers()
    yield checks.check_c_compiler(
        _c_compiler(), headers, has_headers=(headers / "Python.h").is_file(), num_gpus=num_gpus
    )
    yield from _guarded("/dev/shm", lambda: [checks.check_shared_memory(_free_bytes(Path("/dev/shm")))])
    yield checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from _guarded("Ray cluster", lambda: [_check_cluster()])
    if hidden_size is not None and os.environ.get("RAY_ADDRESS"):
        yield from _guarded("nodes", lambda: _check_nodes(hidden_size))
    elif hidden_size is not None:
        yield Check("nodes", "problem", "RAY_ADDRESS is not set", "export RAY_ADDRESS=host:port of the cluster's head")
    yield checks.check_port(
        _SERVE_PORT, "for raypp serve", _port_error(_SERVE_PORT), "raypp serve --port N takes another one"
    )
    yield checks.check_port(
        _DASHBOARD_PORT,
        "for Ray's dashboard",
        _port_error(_DASHBOARD_PORT),
        "fine if a Ray cluster runs here; else ray start --dashboard-port N",
    )
    yield from _guarded("model cache", lambda: [_check_model_cache()])


def _c_compiler() -> str | None:
    """Return the compiler that Triton takes (its `runtime/build.py`)."""
    named = os.environ.get("CC")
    return shutil.which("gcc") or shutil.which("clang") if named is None else shutil.which(named)


def _python_headers() -> Path:
    """Return where Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _guarded(name: str, check: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    try:
        yield from check()
    except Exception as error:  # whatever a broken installation throws
        yield Check(name, "warning", f"could not be checked: {type(error).__name__}: {error}")


def _needed() -> dict[str, Requirement]:
    """Return what raypp asks of each package, those of its extras included; any version where it says nothing."""
    needed = {name: Requirement(name) for name in (*_PACKAGES, *_GPU_PACKAGES)}
    for text in (requires(_PACKAGE) if _installed(_PACKAGE) else None) or []:
        requirement = Requirement(text)
        if requirement.specifier:
            needed[requirement.name] = Requirement(f"{requirement.name}{requirement.specifier}")
    return needed


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[list[Gpu], checks.Version | None, str | None]:
    """Return the GPUs that this process may use, the newest CUDA that the driver runs, and why it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return [], None, "nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        return [], None, str(error)
    try:
        newest = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = []
        for index in visible_indices(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = str(pynvml.nvmlDeviceGetName(handle))
            gpus.append(Gpu(index, name, int(memory.total), int(memory.free), (int(major), int(minor))))
        return gpus, (newest // 1000, newest % 1000 // 10), None
    except (pynvml.NVMLError, AttributeError) as error:  # an old library lacks functions
        return [], None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _cuda_checks(num_gpus: int) -> list[Check]:
    """Return whether torch can use the GPUs, and whether these reach each other."""
    if not num_gpus:
        return [checks.check_cuda_starts(None, 0), checks.check_peer_access({})]
    import torch

    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        reaches = {
            (one, other): torch.cuda.can_device_access_peer(one, other)
            for one in range(count)
            for other in range(count)
            if one != other
        }
    except (RuntimeError, AssertionError) as error:
        return [checks.check_cuda_starts(str(error).splitlines()[0], num_gpus)]
    return [checks.check_cuda_starts(None, num_gpus), checks.check_peer_access(reaches)]


def _nvcc() -> str | None:
    """Return the compiler that FlashInfer would take: of CUDA_HOME, on the path, or where the toolkit usually is."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _free_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _check_cluster() -> Check:
    from raypp.actors.cluster import local_cluster, named_cluster
    from raypp.errors import RayppError

    named = os.environ.get("RAY_ADDRESS") or None
    if named is None:
        return checks.check_cluster(None, None, None, local_cluster())
    try:
        num_nodes, total, free = named_cluster()
    except RayppError as error:
        return checks.check_cluster(named, None, str(error.got or error.message), None)
    return checks.check_cluster(named, RayCluster(named, num_nodes, total, free), None, None)


def _check_nodes(hidden_size: int) -> Iterator[Check]:
    from raypp.actors.node_links import measure_nodes

    nodes, links = measure_nodes()
    yield from (checks.check_node(host, differing) for host, differing in nodes.items())
    for link in links:
        if isinstance(link, str):
            yield Check("link", "problem", link)
        else:
            yield checks.check_link(link.sender, link.receiver, link.round_trip_s, link.bytes_per_s, hidden_size)


def _port_error(port: int) -> str | None:
    """Return why no server could listen at a port; None: it is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _check_model_cache() -> Check:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    there = next(existing for existing in (folder, *folder.absolute().parents) if existing.exists())
    return checks.check_model_cache(folder, shutil.disk_usage(there).free, can_write=os.access(there, os.W_OK))
