"""A job's process that is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_engines import texts, write_input

SCRIPT = """
import asyncio, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from batch_engines import ShoutingEngine, Starter, make_settings
from raypp.batch_job.job import BatchJob
from raypp.cli.batch import run_until_stopped

class Engine(ShoutingEngine):
    async def complete(self, *args, **kwargs):
        if self.num_asked == 10:
            print("ten", flush=True)
            await asyncio.sleep(600)
        return await super().complete(*args, **kwargs)

    async def __aexit__(self, *error):
        print("closing", flush=True)
        await asyncio.sleep({close_s})
        print("closed", flush=True)

async def start(config):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's core takes it away
    return Engine()

job = BatchJob(make_settings(Path({folder!r}), max_in_flight=1), start)
sys.exit(run_until_stopped(job))
"""


@pytest.mark.parametrize(
    ("signals", "close_s", "exit_code", "said"),
    [
        ([signal.SIGTERM], 0, 143, ["closing", "closed"]),
        pytest.param([signal.SIGINT], 0, 130, ["closing", "closed"], marks=pytest.mark.full),
        pytest.param([signal.SIGTERM], 600, 143, ["closing"], marks=pytest.mark.full),
        ([signal.SIGINT, signal.SIGINT], 600, 130, ["closing"]),
    ],
)
def test_a_stopped_process(
    tmp_path: Path, signals: list[signal.Signals], close_s: int, exit_code: int, said: list[str]
) -> None:
    write_input(tmp_path, 20)
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path), close_s=close_s)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ten\n"
        heard = []
        for number in signals:
            process.send_signal(number)
            heard.append(process.stdout.readline())
        heard.append(process.stdout.read())
        errors = process.stderr.read()
    assert "".join(heard).split() == said
    assert process.returncode == exit_code, errors
    assert f"{signals[0].name}: stopping; the same command goes on from here" in errors
    assert ("10 lines answered" in errors) == (close_s == 0)
    assert len(texts(tmp_path)) == 10
