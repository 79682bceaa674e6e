"""A machine on which the agents of Ray, programs in Python, take long to start: Ray starts nevertheless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.full]

ROOT = Path(__file__).parents[2]
AGENT_S = 25  # a raylet (Ray 2.60.0) waits 15 s for the port of each
WAIT_S = 150.0
LATE = f"""
import time

with open("/proc/self/cmdline", "rb") as file:
    command = file.read()
if b"dashboard/agent.py" in command or b"runtime_env/agent/main.py" in command:
    time.sleep({AGENT_S})
"""
CONNECT = """
import os, time
import ray
from raypp.actors.cluster import Cluster

started_s = time.monotonic()
cluster = Cluster.connect()
read = ray.remote(lambda: os.environ["OWN"]).options(runtime_env={"env_vars": {"OWN": "value"}})
assert ray.get(read.remote()) == "value"  # the agent of environments has come
print(time.monotonic() - started_s)
cluster.disconnect()
"""


def test_ray_starts_though_its_agents_are_late(no_ray: None, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", CONNECT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) > AGENT_S, "the agents were not late"
