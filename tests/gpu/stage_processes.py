"""Stages in processes of their own, linked to each other, and functions to run in them.

Each function gets the `LinkedStage` of its process first. A stage that does not answer in time shows where its threads
are (on stderr), and dies.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from raypp.errors import RayppError
from raypp.transport.edges import StageLinks
from raypp.transport.open import open_stage_links
from raypp.transport.rendezvous import Rendezvous, RendezvousServer
from raypp.transport.schema import MessageSpec, Schema, TensorSpec

DEADLINE_S = 60.0


@dataclass
class LinkedStage:
    """One stage in its process."""

    index: int = 0
    num_stages: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    links: StageLinks | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


def bytes_message(num_bytes: int) -> MessageSpec:
    """Return messages of up to `num_bytes` bytes, a multiple of 16."""
    return MessageSpec(Schema((TensorSpec("bytes", torch.uint8, (num_bytes,), "token"),)), max_rows=1, max_tokens=1)


def open_links(
    stage: LinkedStage,
    kind: str,
    index: int,
    num_stages: int,
    device: str,
    rendezvous: Rendezvous,
    forward_bytes: int,
    feedback_bytes: int,
) -> list[str]:
    """Open a stage's links; return the kinds of its ends."""
    stage.index, stage.num_stages, stage.device = index, num_stages, torch.device(device)
    if stage.device.type == "cuda":
        torch.cuda.set_device(stage.device)  # before all else that touches CUDA
    stage.links = open_stage_links(
        kind,  # type: ignore[arg-type]
        index,
        num_stages,
        forward=[bytes_message(forward_bytes)] * (num_stages - 1),
        feedback=bytes_message(feedback_bytes),
        rendezvous=rendezvous,
        open_timeout_s=DEADLINE_S / 2,
        deadline_s=DEADLINE_S / 2,
        device=stage.device,
    )
    ends = (stage.links.previous, stage.links.next, stage.links.feedback_in, stage.links.feedback_out)
    return [type(end).__name__ for end in ends if end is not None]


def close_links(stage: LinkedStage) -> None:
    """Close a stage's links."""
    assert stage.links is not None
    stage.links.close()
    stage.links = None


def serve_stage(pipe: Connection, environment: Mapping[str, str]) -> None:
    """Run what comes through the pipe, until None comes."""
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stage = LinkedStage()
    while (order := pipe.recv()) is not None:
        function, args = order
        try:
            with torch.inference_mode():
                pipe.send((function(stage, *args), None))
        except BaseException as error:
            known = error if isinstance(error, RayppError) else None
            pipe.send((known, f"{function.__name__}{args}\n{traceback.format_exc()}"))


class StageProcess:
    """One process, near end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # A server that has torch imported, but has not touched CUDA: a process is there in a moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stage_processes", "link_programs"])
        self._pipe, far_pipe = context.Pipe()
        self._process = context.Process(target=serve_stage, args=(far_pipe, dict(environment)), daemon=True)
        self._process.start()
        far_pipe.close()
        self._pool = ThreadPoolExecutor(1)

    def call(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        """Start a function there."""
        return self._pool.submit(self._call, function, args)

    def kill(self) -> None:
        """End the process as a fault would."""
        self._process.kill()

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the process's exit code, once it has one."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            try:
                self._pipe.send(None)
                self._process.join(5.0)
            except OSError:
                pass
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._pool.shutdown()
        self._pipe.close()

    def _call(self, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
        self._pipe.send((function, args))
        if not self._pipe.poll(DEADLINE_S):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
            self._process.kill()
            raise TimeoutError(f"{function.__name__} did not return within {DEADLINE_S} s; its stacks are on stderr")
        value, problem = self._pipe.recv()
        if problem is not None:
            raise value if value is not None else AssertionError(problem)
        return value


class StageProcesses:
    """As many processes as a test asks for, kept for the next one."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment or {}
        self._processes: list[StageProcess] = []

    def open(
        self, kind: str, devices: Sequence[str], forward_bytes: int = 1 << 18, feedback_bytes: int = 1 << 14
    ) -> Pipeline:
        """Return a pipeline with one stage per device."""
        while len(self._processes) < len(devices):
            self._processes.append(StageProcess(self._environment))
        pipeline = Pipeline(self._processes[: len(devices)])
        server = RendezvousServer()
        try:
            pipeline.kinds = pipeline.results(
                [
                    process.call(
                        open_links, kind, index, len(devices), device, server.address, forward_bytes, feedback_bytes
                    )
                    for index, (process, device) in enumerate(zip(pipeline.stages, devices, strict=True))
                ]
            )
        except RayppError:
            raise  # refused in order: the processes can go on
        except BaseException:
            self.close()
            raise
        finally:
            server.close()
        return pipeline

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes = []


class Pipeline:
    """Linked stages."""

    def __init__(self, stages: Sequence[StageProcess]) -> None:
        self.stages = list(stages)
        self.kinds: list[list[str]] = []

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Run a function in all stages at once; return what each returned."""
        return self.results([stage.call(function, *args) for stage in self.stages])

    def close(self) -> None:
        """Close the links; the processes stay."""
        self.run(close_links)

    @staticmethod
    def results(calls: Sequence[Future[Any]]) -> list[Any]:
        """Return all results, or raise what all stages have to say."""
        errors = [(index, call.exception()) for index, call in enumerate(calls)]
        failed = [(index, error) for index, error in errors if error is not None]
        if not failed:
            return [call.result() for call in calls]
        for index, error in failed:
            print(f"--- stage {index}: {error!r}\n{error}")
        raise failed[0][1]
