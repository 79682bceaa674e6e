"""The wheel that users install: built without isolation, from the files that an image is built from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from repository import ROOT, project_files

MAX_BYTES = 16_000_000
"""Nearly all of it is the weights of the models that come with raypp."""


def tracked_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in project_files()]


def in_image_context(name: str) -> bool:
    """Return whether deploy/Dockerfile.dockerignore leaves a file in the context; its last line that fits decides."""
    kept = True
    for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#"):
            paths = [name, *map(str, Path(name).parents)]
            if any(fnmatch(path, pattern) for path in paths):
                kept = line.startswith("!")
    return kept


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    if not os.environ.get("CI"):  # there `make install` has installed it
        pytest.importorskip("setuptools_scm", reason="of the extra dev: run make install")
    folder = tmp_path_factory.mktemp("wheel")
    for name in filter(in_image_context, tracked_files()):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})"],
        cwd=folder / "source",
        env={**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RAYPP": "1.2.3"},
        check=True,
        capture_output=True,
        timeout=120,
    )
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def test_its_files_are_those_of_the_packages_and_no_others(wheel: zipfile.ZipFile) -> None:
    of_packages = {name for name in tracked_files() if name.startswith(("raypp/", "serve_app/"))}
    in_wheel = {name for name in wheel.namelist() if not name.startswith("raypp-1.2.3.dist-info/")}
    assert in_wheel == of_packages
    assert {
        "raypp/py.typed",
        "raypp/assets/tiny/model.safetensors",
        "raypp/assets/tiny-eagle3/model.safetensors",
        "raypp/assets/tiny-vl/tokenizer.json",
        "serve_app/page/index.html",
    } <= in_wheel


def test_it_is_named_described_and_licensed(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read("raypp-1.2.3.dist-info/METADATA").decode()
    assert "\nVersion: 1.2.3\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "raypp = raypp.cli.main:main" in wheel.read("raypp-1.2.3.dist-info/entry_points.txt").decode()
    assert "raypp-1.2.3.dist-info/licenses/LICENSE" in wheel.namelist()


def test_it_stays_small(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert Path(wheel.filename).stat().st_size < MAX_BYTES
