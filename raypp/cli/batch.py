"""`raypp batch`: answer a file of requests, however often the job is killed."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from raypp.batch_job.job import BatchJob
from raypp.batch_job.job_settings import JobSettings, check_job_path
from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.cli.sampling_options import add_sampling_options, given_sampling
from raypp.config.env import read_environment

_STOP_TIMEOUT_S = 2.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests, one JSON object per line: OpenAI's batch format, or "
        '{"custom_id": ..., "prompt": ...}. Answers are appended to the output as they come, one per custom_id, in '
        "OpenAI's batch output format; lines that fail, to a file of errors, and the job goes on. A job that was "
        "stopped or killed goes on where it was when the same command is run again.",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--input", metavar="FILE", required=True, help="JSON lines")
    files.add_argument("--output", metavar="FILE", required=True, help="where answers go; FILE.job.json says which job")
    files.add_argument("--errors", metavar="FILE", help="where errors of lines go; default: OUTPUT.errors.jsonl")
    files.add_argument("--overwrite", action="store_true", help="throw existing answers and errors away; start anew")
    job = parser.add_argument_group("job")
    job.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="what lines may call the model, and answers do; default: MODEL; may be repeated",
    )
    job.add_argument("--max-in-flight", metavar="N", type=int, help="requests at the engine; default: 2 * max_num_seqs")
    job.add_argument(
        "--progress-interval",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds between reports without a terminal; default: %(default)g",
    )
    add_sampling_options(
        parser, "for lines that do not say; else the model's generation_config.json counts, then OpenAI's defaults"
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the job until it is done or stopped."""
    ray_job_id = read_environment().ray_job_id
    settings = JobSettings(
        input_path=check_job_path(args.input, "input", ray_job_id),
        output_path=check_job_path(args.output, "output", ray_job_id),
        error_path=None if args.errors is None else check_job_path(args.errors, "error file", ray_job_id),
        config=engine_config(args),
        defaults=_as_fields(given_sampling(args)),
        served_model_names=tuple(args.served_model_name),
        overwrite=args.overwrite,
        max_in_flight=args.max_in_flight,
        progress_interval_s=args.progress_interval,
    )
    return run_until_stopped(BatchJob(settings, args.entry_points.open_async_llm))


def _as_fields(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as a body has them: JSON has no keys but texts."""
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    return sampling


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
