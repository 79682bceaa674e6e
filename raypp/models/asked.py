"""What programs of raypp say of a model's config.json, kept for the next time: asking takes seconds, mostly of imports.

Such a program gets the model's directory and prints one line of JSON. Kept is it by config.json, the program, and the
versions of transformers and raypp.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raypp.errors import ModelLoadError

PROBE = "raypp.models.transformers_probe"
_MODULES = tuple(f"raypp.models.transformers_{name}" for name in ("model", "layers", "members", "states"))
TRUSTS_CODE, HAS_MEMBERS = "--trust-remote-code", "--members"
_TIMEOUT_S = 900.0
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


def cache_folder() -> Path:
    """Return where raypp keeps what it found out: `raypp` in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypp"


def asked(program: str, path: Path, *arguments: str, trusts_code: bool = False) -> dict[str, Any]:
    """Return what a program says of the model in a directory; runs it the first time.

    Args:
        program: Its module.
        path: The directory.
        arguments: What it gets besides.
        trusts_code: Whether it may run code that comes with the model.

    Raises:
        ModelLoadError: it ends without an answer.
    """
    arguments = (*arguments, *([TRUSTS_CODE] if trusts_code else []))
    kept = cache_folder() / "models" / f"{_digest(program, path, arguments)}.json"
    try:
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = _ask(program, path, arguments)
        _keep(kept, json.dumps(found))
    return found


def _digest(program: str, path: Path, arguments: tuple[str, ...]) -> str:
    versions = [_version(name) for name in ("transformers", "raypp")]
    parts = [(path / "config.json").read_bytes(), json.dumps([program, *arguments, *versions]).encode()]
    parts += [
        Path(spec.origin).read_bytes() for name in (program, *_MODULES) if (spec := find_spec(name)) and spec.origin
    ]
    if TRUSTS_CODE in arguments:
        parts += [file.read_bytes() for file in sorted(path.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return ""


def _ask(program: str, path: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", program, str(path), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, env={**os.environ, **_ENVIRONMENT}
    )
    if done.returncode or not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ModelLoadError(f"{path}: transformers could not be asked about it", got=last or f"exit {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _keep(file: Path, text: str) -> None:
    """Write a file at once, if it can be written: without it the next one asks again."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
