"""The site builds without a warning, with the packages of the extra `docs` alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.part("docs")

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path, note: Callable[[str], None]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = str(tmp_path / "venv/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", *extras["docs"]]
    subprocess.run(install, cwd=ROOT, check=True, timeout=600)
    begun = time.monotonic()
    build = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    files = [path for path in (tmp_path / "site").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    note(f"`make docs`: {time.monotonic() - begun:.0f} s, {len(files)} files, {size / 2**20:.1f} MiB")
    assert (tmp_path / "site/index.html").is_file()
    found = {each["location"] for each in json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]}
    assert "troubleshooting.html" in found
    assert not [location for location in found if location.startswith(("design/0", "source/"))]
    image = re.compile(r'(?:<img [^>]*src|srcset)="(?!https?:|data:)([^"]+)"')
    shown = [(page, target) for page in files if page.suffix == ".html" for target in image.findall(page.read_text())]
    assert not [f"{page.name}: {target}" for page, target in shown if not (page.parent / target).is_file()]
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]+(?:src|href)="https?:')
    assert not [path.name for path in files if path.suffix == ".html" and loaded.search(path.read_text())]
