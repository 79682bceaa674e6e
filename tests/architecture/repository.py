"""Where the repository is, and which files belong to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def project_files(suffix: str = "") -> list[Path]:
    """Return the files that are committed or could be (not ignored by git), whose names end in `suffix`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    paths = sorted({ROOT / name for name in listed.split("\0") if name.endswith(suffix)} - {ROOT})
    return [path for path in paths if path.is_file()]  # one that was deleted may still be listed


def package_modules() -> list[Path]:
    """Return the modules that raypp ships."""
    return [path for path in project_files(".py") if path.relative_to(ROOT).parts[0] in ("raypp", "serve_app")]


def name_of(path: Path) -> str:
    """Return the path as a reader of the repository would write it."""
    return path.relative_to(ROOT).as_posix()
