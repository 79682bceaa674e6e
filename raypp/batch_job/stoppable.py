"""Running a job until it is done or told to stop: a stopped Ray job has three seconds before it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import NoReturn

from raypp.batch_job.job import BatchJob

_STOP_TIMEOUT_S = 2.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_until_stopped(job: BatchJob) -> int:
    """Run a job in this thread, which must be the process's main one; return 0 when it is done.

    SIGTERM and Ctrl-C end the process in an orderly way, with exit code 143 or 130. What was answered so far is on
    disk. What takes longer than 2.5 s then is cut off, as is everything at a second signal.

    Raises:
        RayppError: the job failed.
    """
    return asyncio.run(_run(job))


async def _run(job: BatchJob) -> int:
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if received:
            _exit_now(number)
        received.append(number)
        _say(f"{number.name}: stopping; the same command goes on from here")
        timer = threading.Timer(_STOP_TIMEOUT_S, _exit_now, [number])
        timer.daemon = True
        timer.start()
        work.cancel()

    def listen() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)

    listen()
    work = asyncio.create_task(job.run(_say, on_engine_started=listen))  # again: Ray's core takes SIGTERM for itself
    try:
        await work
    except asyncio.CancelledError:
        _exit_now(received[0])  # the engine is closed; Ray's own way out of a process can take seconds
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return 0


def _exit_now(number: signal.Signals) -> NoReturn:
    """End without ado. Ray ends what belonged to this process; the output needs nothing more."""
    os._exit(128 + number)


def _say(text: str) -> None:
    for line in text.splitlines():
        print(f"raypp batch: {line}", file=sys.stderr, flush=True)
