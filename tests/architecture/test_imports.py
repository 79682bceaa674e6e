"""The import layers of docs/architecture.md hold (contracts in pyproject.toml), and the checker sees a breach."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from repository import ROOT

_LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _LINT_IMPORTS, "--no-cache"],
        cwd=directory,
        env={"PYTHONPATH": str(directory), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_layers_are_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_breaches_are_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("assets", "__pycache__")
    package = Path(shutil.copytree(ROOT / "raypp", tmp_path / "raypp", ignore=ignored))
    app = Path(shutil.copytree(ROOT / "serve_app", tmp_path / "serve_app", ignore=ignored))
    (app / "routes" / "breach.py").write_text('"""Breaks a third."""\n\nimport ray\n')
    (package / "scheduler" / "breach.py").write_text(
        '"""Breaks two contracts."""\n\nimport torch\nimport raypp.stage\n'
    )
    (package / "driver" / "breach.py").write_text('"""Breaks another."""\n\nimport ray\n')
    (package / "plan" / "breach.py").write_text('"""Breaks the layers."""\n\nimport raypp.driver.engine_loop\n')
    (package / "transport" / "host" / "breach.py").write_text(
        '"""Breaks one of the rooms."""\n\nimport raypp.transport.ipc.ipc_ends\n'
    )
    (package / "driver" / "link_breach.py").write_text(
        '"""Breaks another."""\n\nimport raypp.transport.nccl.nccl_ends\n'
    )
    (package / "ops" / "cpu" / "breach.py").write_text(
        '"""Breaks two more."""\n\nimport triton\nimport raypp.ops.cuda.kernel_launch\n'
    )
    (package / "homeless.py").write_text('"""Is in no layer."""\n')
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    for breach in (
        "raypp.scheduler.breach -> raypp.stage",
        "raypp.scheduler.breach -> torch",
        "raypp.driver.breach -> ray",
        "raypp.plan.breach -> raypp.driver",
        "serve_app.routes.breach -> ray",
        "raypp.transport.host.breach -> raypp.transport.ipc.ipc_ends",
        "raypp.driver.link_breach -> raypp.transport.nccl.nccl_ends",
        "raypp.ops.cpu.breach -> raypp.ops.cuda.kernel_launch",
        "raypp.ops.cpu.breach -> triton",
        "raypp.homeless",
    ):
        assert breach in result.stdout
