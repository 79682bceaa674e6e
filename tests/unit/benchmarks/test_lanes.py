"""`benchmarks/lanes.sh` runs lists of commands side by side, and the lists name programs that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LANES = ROOT / "benchmarks" / "lanes.sh"
LISTS = sorted((ROOT / "benchmarks" / "jobs").glob("*.txt"))

LIST = """# two commands, one of which takes too long
a_$LANE 20 echo $LANE \\
  $CUDA_VISIBLE_DEVICES {x,y}

slow 0.2 sleep 60
"""


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_lists_name_programs_that_exist(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    jobs = [line.split(maxsplit=2) for line in lines if not line.startswith("#")]
    names = [name for name, _limit, _command in jobs]
    assert len(set(names)) == len(names)
    for _name, limit, command in jobs:
        assert 0 < int(limit) <= 600
        programs = re.findall(r"(?:benchmarks|tests)/[\w/]+\.py", command)
        assert programs or "-m raypp " in command
        assert all((ROOT / program).is_file() for program in programs), command
        for model in re.findall(r"--model (\S+)", command):
            assert (ROOT / "benchmarks" / "models" / model).exists() or (ROOT / model).is_dir(), command


def test_lanes_run_side_by_side_and_end_what_takes_too_long(tmp_path: Path) -> None:
    list_path, out = tmp_path / "list.txt", tmp_path / "out"
    list_path.write_text(LIST)
    command = ["bash", str(LANES), str(out), f"0,1:0:{list_path}", f"2:0:{list_path}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (out / "a_0_1.log").read_text() == "0_1 0,1 x y\n"
    assert (out / "a_2.log").read_text() == "2 2 x y\n"
    assert len(re.findall(r"^== a_\w+: exit status 0 ", said, re.MULTILINE)) == 2
    assert len(re.findall(r"^== slow: exit status 124 ", said, re.MULTILINE)) == 2


def test_jobs_are_chosen_by_name(tmp_path: Path) -> None:
    list_path, out = tmp_path / "list.txt", tmp_path / "out"
    list_path.write_text(LIST)
    command = ["bash", str(LANES), str(out), f"0:0:{list_path}"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "JOBS": "a_.*"}
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    assert "== a_0: exit status 0" in said
    assert "slow" not in said


@pytest.mark.parametrize("lane", ["0:list.txt", "0:0:no_list.txt"])
def test_a_lane_that_is_none_is_named(tmp_path: Path, lane: str) -> None:
    done = subprocess.run(["bash", str(LANES), str(tmp_path), lane], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"no lane: '{lane}'; expected: GPUS:CORES:FILE" in done.stderr
