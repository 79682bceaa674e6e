"""The job: scan the input, take up where an earlier run stopped, keep the engine full, write answers as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from raypp.api.async_llm import AsyncLLM
from raypp.batch_job.answer import Answer, Answerer, refusal
from raypp.batch_job.input_file import ScannedInput, bad_lines, scan_input, stream_lines
from raypp.batch_job.job_settings import JobSettings
from raypp.batch_job.line import Line
from raypp.batch_job.output_file import AnswerFiles, Manifest
from raypp.batch_job.progress import Progress, Reporter
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, EngineDeadError

_SYNC_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


OpenEngine = Callable[[EngineConfig], Awaitable[AsyncLLM]]
"""Starts an engine. It may be called again after that engine's death."""


class BatchJob:
    """One run of a job. Cancelling it leaves what was answered so far, for the next run to go on from."""

    def __init__(self, settings: JobSettings, open_engine: OpenEngine) -> None:
        self.settings = settings
        self._open_engine = open_engine
        self._is_new = False  # whether this run began the job

    async def run(
        self, say: Callable[[str], None] = print, on_engine_started: Callable[[], None] = lambda: None
    ) -> None:
        """Answer every line that has no answer yet.

        Args:
            say: Called with what was found and what was done.
            on_engine_started: Called whenever an engine was started.

        Raises:
            ConfigError: the input, the files of answers or the settings cannot work; nothing was run.
            RayppError: the engine cannot start, or dies again and again; what was answered is kept.
        """

        async def open_engine(config: EngineConfig) -> AsyncLLM:
            engine = await self._open_engine(config)
            on_engine_started()
            return engine

        scanned = await asyncio.to_thread(scan_input, self.settings.input_path)
        files = AnswerFiles(self.settings.output_path, self.settings.errors_path)
        try:
            await files.lock()
            is_done, num_failed = await asyncio.to_thread(self._take_up, scanned, files)
            num_done = int(is_done.sum() - scanned.is_blank.sum())
            progress = Progress(scanned.num_requests, num_done, num_failed)
            if not progress.num_left:
                say(f"nothing to do: {progress.totals()}")
            else:
                say(f"{progress.total:,} lines, {num_done:,} of them answered by earlier runs")
                try:
                    await _Run(self.settings, scanned, files, is_done, progress).answer_all(open_engine)
                finally:
                    say(progress.summary())
            if progress.num_failed_before + progress.num_failed:
                say(f"errors are in {self.settings.errors_path}")
        finally:
            if self._is_new and files.is_empty:  # what could not start, say for a misspelt model, is no job yet
                self.settings.manifest_path.unlink(missing_ok=True)
            files.close()

    def _take_up(self, scanned: ScannedInput, files: AnswerFiles) -> tuple[npt.NDArray[np.bool_], int]:
        """Return which lines are done, and how many failed; make sure that it was this job that did them."""
        manifest = Manifest(
            scanned.sha256, scanned.num_bytes, scanned.num_requests, self.settings.what_answers_depend_on()
        )
        path = self.settings.manifest_path
        if self.settings.overwrite:
            files.clear()
        elif (earlier := Manifest.read(path)) is not None:
            manifest.check_same_job(earlier, path)
            return files.repair(scanned)
        elif not files.is_empty:
            raise ConfigError(
                "the output or the error file exists without a manifest",
                got=f"{self.settings.output_path}, {self.settings.errors_path}",
                expected=f"{path} beside the output, or no such files",
                hint="name another output, or start anew with --overwrite",
            )
        manifest.write(path)
        self._is_new = True
        return scanned.is_blank.copy(), 0


class _Run:
    """What one run works on."""

    def __init__(
        self,
        settings: JobSettings,
        scanned: ScannedInput,
        files: AnswerFiles,
        is_done: npt.NDArray[np.bool_],
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._scanned = scanned
        self._files = files
        self._is_done = is_done
        self._progress = progress

    async def answer_all(self, open_engine: OpenEngine) -> None:
        """Answer what is left, with a new engine whenever one dies, as long as each brings the job forward.

        Lines that cannot be run come first: they need no engine, and mistakes show early.
        """
        progress, num_fruitless = self._progress, 0
        reporter = Reporter(progress, self._settings.progress_interval_s)
        try:
            async with (
                _beside(_every(_SYNC_INTERVAL_S, partial(asyncio.to_thread, self._files.sync))),
                _beside(_every(reporter.interval_s, reporter.show)),
            ):
                await self._refuse_bad_lines()
                while progress.num_left:
                    num_done = progress.num_done
                    progress.engine_starts()
                    try:
                        engine = await open_engine(self._settings.config)
                        progress.engine_runs()
                        await self._answer_with(engine)
                    except EngineDeadError as error:
                        num_fruitless = 0 if progress.num_done > num_done else num_fruitless + 1
                        if num_fruitless >= self._settings.max_engine_starts:
                            raise
                        logger.warning("the engine died and is started again: %s", error)
        finally:
            reporter.close()

    async def _refuse_bad_lines(self) -> None:
        for index, error in bad_lines(self._scanned, self._is_done):
            self._write(index, refusal(index, error))
            await asyncio.sleep(0)
        self._files.sync()

    async def _answer_with(self, llm: AsyncLLM) -> None:
        async with llm:
            try:
                await self._answer_lines(Answerer(llm, self._settings))
            finally:
                self._files.sync()  # before the engine is closed, which may take longer than a stopped job has

    async def _answer_lines(self, answerer: Answerer) -> None:
        window = Window(self._settings.window, self._settings.max_in_flight_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in stream_lines(self._scanned, self._is_done):
                    await window.enter(line.num_bytes)
                    tasks.create_task(self._answer_line(line, answerer, window))
                    await asyncio.sleep(0)  # on its way before the next line is read
        except ExceptionGroup as failures:  # all that was at the engine failed, for one reason
            others = [error for error in failures.exceptions if not isinstance(error, EngineDeadError)]
            raise (others or failures.exceptions)[0] from None

    async def _answer_line(self, line: Line, answerer: Answerer, window: Window) -> None:
        self._progress.num_running += 1
        try:
            answer = await answerer.answer(line)
        finally:
            self._progress.num_running -= 1
            window.leave(line.num_bytes)
        self._write(line.index, answer)

    def _write(self, index: int, answer: Answer) -> None:
        self._files.append(answer)
        self._is_done[index] = True
        self._progress.count(answer)


@asynccontextmanager
async def _beside(coroutine: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run something endless beside the block; its failure is the block's, once that has ended."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _every(interval_s: float, action: Callable[[], Awaitable[None] | None]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        waits = action()
        if waits is not None:
            await waits


class Window:
    """Counts requests and their bytes. One task enters, any task leaves; all on one event loop."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_requests = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room. A request larger than all the room there is enters alone."""
        while self._num_requests >= self._max_requests or (
            self._num_requests and self._num_bytes + num_bytes > self._max_bytes
        ):
            self._changed.clear()
            await self._changed.wait()
        self._num_requests += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Make room."""
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._changed.set()
