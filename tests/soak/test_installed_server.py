"""raypp as it is installed from its wheel, in an empty environment by deploy/install.sh: it serves, and it stops."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.part("docs")

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy/raypp.service").read_text()
# What this environment was made from: it has none of its packages.
PYTHON = shutil.which("python3", path=str(Path(sys.base_prefix) / "bin")) or "python3"
START_S = 240.0
KEY = "a key of this test"


def clean_environment(home: Path) -> dict[str, str]:
    """Return an environment in which nothing of this one's packages and Ray is found."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_AUTH_MODE", "RAY_ADDRESS")
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, "HOME": str(home)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def block_of_page() -> str:
    """Return the block of docs/deploy.md that this test runs."""
    mark = "<!-- run by tests/soak/test_installed_server.py -->"
    (code,) = re.findall(rf"^{mark}\n```sh\n(.*?)^```", (ROOT / "docs/deploy.md").read_text(), re.M | re.S)
    return str(code)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone that `python -m build` has run in."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "raypp")], check=True, timeout=120)
    subprocess.run([PYTHON, "-m", "venv", str(folder / "tools")], check=True, timeout=120)
    pip = [str(folder / "tools/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "build"], check=True, timeout=300)
    command = [str(folder / "tools/bin/python"), "-m", "build"]
    environment = clean_environment(folder)
    subprocess.run(command, cwd=folder / "raypp", env=environment, check=True, capture_output=True, timeout=600)
    return folder / "raypp"


@pytest.fixture(scope="module")
def wheel(clone: Path, note: Callable[[str], None]) -> Path:
    (wheel,) = (clone / "dist").glob("*.whl")
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    sizes = ", ".join(f"{file.suffix} {file.stat().st_size / 1e6:.1f} MB" for file in (wheel, sdist))
    note(f"`python -m build`: {wheel.name}, {sizes}")
    return wheel


@pytest.fixture(scope="module")
def installed(clone: Path, wheel: Path, note: Callable[[str], None]) -> Path:
    """Run the first block of docs/deploy.md, on another port and with the wheel; return the environment."""
    into = clone.parent / "environment"
    code = block_of_page()
    for old, new in (
        ("/tmp/raypp", str(into)),
        ("--device cpu", f"--device cpu --from {wheel}"),
        ("8000", str(free_port())),
    ):
        assert old in code
        code = code.replace(old, new)
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", "-e", "-c", code],
        cwd=clone,
        env={**clean_environment(clone.parent), "PYTHON": PYTHON},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    note(f"deploy/install.sh from the wheel, a server, and its end: {time.monotonic() - begun:.0f} s")
    return into


def test_the_wheel_has_the_packages_and_nothing_else(clone: Path, wheel: Path) -> None:
    """Where git is there, setuptools-scm has a say in what goes in; tests/unit/test_wheel.py builds without."""
    command = ["git", "ls-files", "raypp", "serve_app"]
    tracked = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    with zipfile.ZipFile(wheel) as opened:
        assert {name for name in opened.namelist() if ".dist-info/" not in name} == set(tracked)


def test_the_wheel_works_where_nothing_else_is(installed: Path, wheel: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path)
    raypp = str(installed / "bin/raypp")

    def printed(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    version = wheel.name.split("-")[1]
    assert printed(raypp, "--version").strip() == f"raypp {version}"
    code = "import raypp, serve_app; print(raypp.__version__, raypp.__file__, serve_app.__file__)"
    shown, *files = printed(str(installed / "bin/python"), "-c", code).split()
    assert shown == version
    assert all(file.startswith(str(installed)) for file in files)
    assert printed(raypp, "generate", "tiny", "--num-stages", "2", "--prompt", "def main(", "--max-tokens", "8").strip()


class UnitsServer:
    """The server as deploy/raypp.service starts and stops it."""

    def __init__(self, installed: Path, folder: Path) -> None:
        keys = folder / "api-keys"
        keys.write_text(KEY + "\n")
        port = free_port()
        (start,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
        for old, new in (
            ("/opt/raypp", str(installed)),
            ("$MODEL", "tiny"),
            ("%d", str(folder)),
            ("$OPTIONS", f"--num-stages 2 --port {port}"),
        ):
            assert old in start
            start = start.replace(old, new)
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Authorization": f"Bearer {KEY}"}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                shlex.split(start), cwd=folder, env=clean_environment(folder), stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it says that it serves; a moment before, `/health` answers already."""
        ends = time.monotonic() + START_S
        while "serving on" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < ends, self.log.read_text()
            time.sleep(0.1)
        assert httpx.get(f"{self.url}/health", timeout=60).status_code == 200

    def stop(self) -> float:
        """Tell it to stop, as systemd does; return how many seconds that took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
        assert self.process.wait(float(limit_s)) == 0, self.log.read_text()
        return time.monotonic() - begun


@pytest.fixture
def server(installed: Path, tmp_path: Path) -> Iterator[UnitsServer]:
    server = UnitsServer(installed, tmp_path)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def test_the_units_server_answers_those_with_a_key_and_stops(
    server: UnitsServer, installed: Path, note: Callable[[str], None]
) -> None:
    body = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 401
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "<html" in httpx.get(server.url, timeout=60).text.lower()
    shown = subprocess.run([str(installed / "bin/raypp"), "--version"], capture_output=True, text=True, timeout=60)
    assert httpx.get(f"{server.url}/version", timeout=60).json()["version"] == shown.stdout.split()[1]

    lines: list[str] = []
    has_begun = threading.Event()

    def stream() -> None:
        long = {**body, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, headers=server.headers, timeout=60) as it:
            for line in it.iter_lines():
                lines.append(line)
                has_begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert has_begun.wait(60)
    seconds = server.stop()
    reader.join(60)
    assert "data: [DONE]" in lines, "a running stream ends before its server does"
    note(f"SIGTERM to the end of `raypp serve` with a running stream: {seconds:.1f} s")
