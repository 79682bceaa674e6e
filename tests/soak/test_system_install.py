"""The steps of deploy/Dockerfile, run as root on a copy of this system that is thrown away: no Docker is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.part("docs")

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"  # the system's, as in an image
ON_A_COPY = """
set -e
mount -t tmpfs -o size=8g tmpfs "$1"
cd "$1"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root || exit 77
mount -t proc proc root/proc
mount --rbind /dev root/dev
cp -r "$2" root/opt/source
rm -f root/etc/resolv.conf
cp /etc/resolv.conf root/etc/resolv.conf
exec chroot root /bin/bash -ec "$3"
"""
AS_RAYPP = "env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin runuser --login --shell /bin/bash raypp --command"
"""A login shell, as KubeRay may start Ray in."""


def is_possible() -> bool:
    """Return whether this is root on a Debian whose Python is new enough."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("apt-get", "unshare", "runuser"))):
        return False
    return (
        subprocess.run([PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], timeout=30).returncode == 0
    )


@pytest.mark.skipif(not is_possible(), reason="needs root, apt-get, and Python 3.11 of the system's")
def test_the_images_steps_make_a_system_on_which_the_user_raypp_generates(
    tmp_path: Path, note: Callable[[str], None]
) -> None:
    source, system = tmp_path / "source", tmp_path / "system"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True, timeout=120)
    shutil.rmtree(source / ".git")  # the image's context has none
    system.mkdir()
    (options,) = re.findall(r"deploy/install\.sh (.*--device cpu.*)", (ROOT / "deploy/Dockerfile").read_text())
    steps = f"""
export PYTHON={PYTHON} PIP_NO_CACHE_DIR=1 SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RAYPP=1.2.3
bash /opt/source/deploy/install.sh {options}
{AS_RAYPP} "raypp --version && raypp generate tiny --num-stages 2 --prompt 'def main(' --max-tokens 8"
"""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_AUTH_MODE", "RAY_ADDRESS")
    begun = time.monotonic()
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            ON_A_COPY,
            "bash",
            system,
            source,
            steps,
        ],
        env={name: value for name, value in os.environ.items() if name not in dropped},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode == 77:
        pytest.skip(f"needs overlay mounts: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    installed, text = done.stdout.rsplit("raypp 1.2.3\n", 1)
    assert "Setting up" in installed, "packages of the system"
    assert text.strip()
    note(f"the steps of deploy/Dockerfile, and a text by the user raypp: {time.monotonic() - begun:.0f} s")
