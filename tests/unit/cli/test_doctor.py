"""`raypp doctor`: every check is shown machines on which it has to complain, and says what to do."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from raypp.cli import doctor
from raypp.cli import machine_checks as checks
from raypp.cli.machine_checks import Check, Gpu, RayCluster
from raypp.cli.main import main

H100 = Gpu(0, "NVIDIA H100", 80 << 30, 79 << 30, (9, 0))
_CLUSTER = RayCluster("head:6379", 2, {"GPU": 4.0, "CPU": 64.0}, {"GPU": 3.0, "CPU": 60.0})
_TORCH = Requirement("torch>=2.11")
_MANY = 65536


def _package(installed: str | None, lack: checks.Status = "problem") -> Check:
    return checks.check_package(_TORCH, installed, lack=lack, advice="pip install torch")


def _nvcc(path: str | None = None, **seen: Any) -> Check:
    return checks.check_nvcc(path, **{"has_flashinfer": True, "has_compiled": False, "num_gpus": 1} | seen)


def _c_compiler(path: str | None = "/usr/bin/gcc", **seen: Any) -> Check:
    return checks.check_c_compiler(path, Path("include"), **{"has_headers": True, "num_gpus": 1} | seen)


def _cache(free_gb: float, *, can_write: bool = True) -> Check:
    return checks.check_model_cache(Path("cache"), int(free_gb * 1e9), can_write=can_write)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_python((3, 12, 3), ">=3.11"),
        _package("2.11.0+cu130"),
        _package(None, "ok"),
        checks.check_torch_build("13.0", (13, 2), 2),
        checks.check_torch_build("13.2", (13, 0), 2),  # CUDA runs newer minor versions
        checks.check_torch_build(None, None, 0),
        checks.check_torch_build("13.0", None, 0),
        checks.check_driver([H100], ["/dev/nvidia0"], None),
        checks.check_gpu(H100),
        checks.check_cuda_starts(None, 1),
        checks.check_peer_access({}),
        checks.check_peer_access({(0, 1): True, (1, 0): True}),
        _nvcc("/usr/bin/nvcc"),
        _nvcc(has_compiled=True),
        _nvcc(has_flashinfer=False),
        _nvcc(num_gpus=0),
        _c_compiler(),
        _c_compiler(None, num_gpus=0),
        checks.check_shared_memory(8 << 30),
        checks.check_open_files(_MANY, _MANY),
        checks.check_open_files(-1, -1),
        checks.check_cluster(None, None, None, None),
        checks.check_cluster("head:6379", _CLUSTER, None, None),
        checks.check_cluster("head:6379", replace(_CLUSTER, total={"CPU": 2.0}, free={"CPU": 2.0}), None, None),
        checks.check_node("a", ""),
        checks.check_link("a", "b", 0.0002, 1.2e9, 4096),
        checks.check_port(8000, "for raypp serve", None, "another"),
        _cache(100),
    ],
)
def test_what_is_all_right_needs_no_advice(check: Check) -> None:
    assert (check.status, check.advice) == ("ok", "")
    assert check.finding


@pytest.mark.parametrize(
    ("check", "finding", "advice"),
    [
        (checks.check_python((3, 10, 1), ">=3.11"), "3.10.1; raypp needs >=3.11", "new environment"),
        (_package("2.9.1"), "2.9.1; raypp needs >=2.11", "pip install"),
        (_package(None), "not installed", "pip install"),
        (checks.check_torch_build("13.0", (12, 4), 2), "built for CUDA 13.0, the driver runs up to 12.4", "driver"),
        (checks.check_torch_build(None, (12, 4), 2), "built for CPUs, but there are GPUs (2)", "CUDA 12.4 or older"),
        (checks.check_driver([], ["/dev/nvidia0"], "Driver Not Loaded"), "Driver Not Loaded", "nvidia-smi"),
        (checks.check_driver([], ["/dev/nvidia0"], None), "none may be used", "CUDA_VISIBLE_DEVICES"),
        (checks.check_gpu(replace(H100, name="T4", capability=(7, 5))), "7.5; bfloat16 needs 8.0", "leave it out"),
        (checks.check_cuda_starts("no kernel image", 1), "no kernel image", "driver"),
        (_nvcc(), "cannot compile", "CUDA_HOME"),
        (_c_compiler(None), "not found: Triton cannot compile", "apt-get install gcc"),
        (_c_compiler(has_headers=False), "/usr/bin/gcc, but no Python.h in include", "python3-dev"),
        (checks.check_shared_memory(None), "there is none", "--shm-size"),
        (checks.check_shared_memory(64 << 20), "0.06 GiB free; at least 0.12", "--shm-size"),
        (checks.check_open_files(256, 4096), "256; at least 512", "ulimit -n 4096"),
        (checks.check_cluster("head:6379", None, "no answer", None), "no answer", "ray start --head"),
        (checks.check_node("a", "torch: 2 on a, 1 there"), "a: torch: 2 on a", "make install at the same commit"),
        (_cache(100, can_write=False), "cannot be written", "HF_HOME"),
        (_cache(0.5), "no room", "HF_HOME"),
    ],
)
def test_problems_say_what_to_do(check: Check, finding: str, advice: str) -> None:
    assert check.status == "problem"
    assert finding in check.finding
    assert advice in check.advice


@pytest.mark.parametrize(
    ("check", "finding", "advice"),
    [
        (_package(None, "warning"), "not installed", "pip install"),
        (checks.check_gpu(replace(H100, free_bytes=40 << 30)), "40.0 GiB are in use", "nvidia-smi"),
        (checks.check_peer_access({(0, 1): False, (1, 0): True}), "none between GPUs 0-1:", "nvidia-smi topo"),
        (checks.check_shared_memory(512 << 20), "0.50 GiB free; 1 or more", "--shm-size"),
        (checks.check_open_files(1024, 1 << 20), "1,024: not enough", "ulimit -n 65536"),
        (checks.check_cluster(None, None, None, "head:6379"), "at head:6379", "export RAY_ADDRESS=head:6379"),
        (checks.check_link("a", "b", 0.0002, 1.2e8, 4096), "adds 0.17 ms to a token", "a faster network"),
        (checks.check_link("a", "b", 0.0002, 1.2e8, 4096), "tokens in 2.24 s", "a faster network"),
        (checks.check_link("a", "b", 0.004, 1.2e9, 2048), "adds 2.00 ms to a token", "keep an engine on one"),
        (
            checks.check_cluster("a", replace(_CLUSTER, free={"CPU": 60.0}), None, None),
            "2 nodes, free: 0 of 4 GPUs, 60 of 64 CPUs",
            "ray status",
        ),
        (checks.check_port(8000, "for raypp serve", "in use", "--port N"), "taken (in use)", "--port N"),
        (_cache(10), "10.0 GB free", "HF_HOME"),
    ],
)
def test_warnings_say_what_to_do(check: Check, finding: str, advice: str) -> None:
    assert check.status == "warning"
    assert finding in check.finding
    assert advice in check.advice


def test_many_pairs_of_gpus_are_not_all_named() -> None:
    reaches = {(one, other): False for one in range(8) for other in range(8) if one != other}
    assert "GPUs 0-1, 0-2, 0-3, 0-4, ...:" in checks.check_peer_access(reaches).finding


def test_no_gpu_is_a_warning() -> None:
    check = checks.check_driver([], [], "nvidia-ml-py is not installed")
    assert (check.status, "CPUs" in check.finding) == ("warning", True)


def _found(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    def all_checks(hidden_size: int | None) -> Iterator[Check]:
        yield from found

    monkeypatch.setattr(doctor, "all_checks", all_checks)


def test_a_line_for_each_check_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = Check("open files", "warning", "1,024", "ulimit -n 65536")
    _found(monkeypatch, Check("python", "ok", "3.12.3"), warning)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok       python             3.12.3",
        "warning  open files         1,024 -> ulimit -n 65536",
        "0 problems, 1 warning",
    ]
    _found(monkeypatch, warning, Check("torch", "problem", "not\ninstalled", "pip install torch"))
    assert main(["doctor"]) == 1
    assert "problem  torch              not installed -> pip install torch" in capsys.readouterr().out.splitlines()
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"ok": 0, "warning": 1, "problem": 1}
    assert report["checks"][0] == {
        "name": "open files",
        "status": "warning",
        "finding": "1,024",
        "advice": "ulimit -n 65536",
    }


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: every check has something to say, one that cannot look does not end the others."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def broken() -> str:
        raise OSError("no such library")

    monkeypatch.setattr(doctor, "_torch_cuda", broken)
    found = {check.name: check for check in doctor.all_checks()}
    assert found["python"].status == found["torch"].status == found["ray"].status == "ok"
    assert found["torch's CUDA"].finding == "could not be checked: OSError: no such library"
    names = ("GPUs", "CUDA", "flashinfer-python", "triton", "nvcc", "/dev/shm", "open files", "Ray cluster")
    assert set(found) >= {*names, "port 8000", "port 8265", "model cache"}


class _Driver(ModuleType):
    """The driver's library of a machine with two GPUs, the first of them in use."""

    class NVMLError(Exception):
        pass

    def __init__(self, error: str | None = None) -> None:
        super().__init__("pynvml")
        self._error = error
        self.num_shutdowns = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self._error is not None:
            raise self.NVMLError(self._error)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_shutdowns += 1

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12040

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 << 30, free=(40 + 39 * handle) << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100"


def test_the_drivers_gpus_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = _Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: "13.0")
    monkeypatch.setattr(doctor, "_cuda_checks", lambda num_gpus: [])
    found = {check.name: check for check in doctor.all_checks()}
    assert driver.num_shutdowns == 1
    assert (found["GPUs"].finding, found["GPU 0"].status, found["GPU 1"].status) == ("2", "warning", "ok")
    assert found["torch's CUDA"].finding == "torch is built for CUDA 13.0, the driver runs up to 12.4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in doctor._gpus()[0]] == [1]
    monkeypatch.setitem(sys.modules, "pynvml", _Driver("Driver Not Loaded"))
    assert doctor._gpus() == ([], None, "Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor._gpus() == ([], None, "nvidia-ml-py is not installed")


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"gcc": "/usr/bin/gcc", "clang": "/usr/bin/clang", "cc": "/usr/bin/cc"}
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.delenv("CC", raising=False)
    assert doctor._c_compiler() == "/usr/bin/gcc"
    del found["gcc"]
    assert doctor._c_compiler() == "/usr/bin/clang"
    del found["clang"]
    assert doctor._c_compiler() is None
    monkeypatch.setenv("CC", "cc")
    assert doctor._c_compiler() == "/usr/bin/cc"


def test_without_the_extra_gpu_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in doctor._GPU_PACKAGES else "99")
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: None)
    monkeypatch.setattr(doctor, "_cuda_checks", lambda num_gpus: [])
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    found = {check.name: check for check in doctor.all_checks()}
    assert (found["GPUs"].status, found["torch's CUDA"].status) == ("problem", "problem")
    assert {found[name].status for name in doctor._GPU_PACKAGES} == {"warning"}


def test_torch_is_asked_whether_it_can_use_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        init=lambda: None, device_count=lambda: 2, can_device_access_peer=lambda one, other: one > other
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [(check.name, check.status) for check in doctor._cuda_checks(2)] == [
        ("CUDA", "ok"),
        ("peer access", "warning"),
    ]

    def fail() -> None:
        raise RuntimeError("no CUDA-capable device is detected\nsecond line")

    monkeypatch.setattr(torch.cuda, "init", fail)
    [check] = doctor._cuda_checks(2)
    assert check.finding == "torch cannot use the GPUs: no CUDA-capable device is detected"


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    check = doctor._check_cluster()
    assert (check.status, check.finding) == (
        "problem",
        f"RAY_ADDRESS={address}, but: {address}: [Errno 111] Connection refused",
    )


def test_a_cluster_that_is_not_named_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [check] = [check for check in doctor.all_checks(4096) if check.name == "nodes"]
    assert (check.status, check.advice) == ("problem", "export RAY_ADDRESS=host:port of the cluster's head")


def test_a_port_that_somebody_listens_at_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert doctor._port_error(server.getsockname()[1]) == "Address already in use"
