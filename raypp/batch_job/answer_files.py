"""The two files of a job's answers: lines that were completed, and lines that failed. Each line is in one of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raypp.batch_job.answer import Answer
from raypp.batch_job.input_file import ScannedInput
from raypp.batch_job.output_file import OutputFile


class AnswerFiles:
    """The output and the error file. Nothing may be done with them before they are locked."""

    def __init__(self, output_path: Path, error_path: Path) -> None:
        """Open or create them.

        Raises:
            ConfigError: one cannot be written, or is no regular file.
        """
        with ExitStack() as opened:
            self._output = OutputFile(output_path)
            opened.callback(self._output.close)
            self._errors = OutputFile(error_path, "the error file")
            opened.pop_all()
        self._files = (self._output, self._errors)

    async def lock(self) -> None:
        """Keep other processes out, as `OutputFile.lock` does.

        Raises:
            ConfigError: another process is writing one of them.
        """
        for file in self._files:
            await file.lock()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in them yet."""
        return all(file.is_empty for file in self._files)

    def clear(self) -> None:
        """Throw away what they hold."""
        for file in self._files:
            file.clear()

    def repair(self, scanned: ScannedInput) -> tuple[npt.NDArray[np.bool_], int]:
        """Cut off torn last lines; return which lines of the input are done, by physical line, and how many failed.

        Raises:
            ConfigError: they hold lines that this job cannot have written.
        """
        is_done = scanned.is_blank.copy()
        self._output.repair(scanned.ids, is_done)
        return is_done, self._errors.repair(scanned.ids, is_done)

    def append(self, answer: Answer) -> None:
        """Add a line's answer where it belongs, as `OutputFile.append` does.

        Raises:
            ResourceError: the disk takes no more.
        """
        (self._errors if answer.is_error else self._output).append(answer.record)

    def sync(self) -> None:
        """Wait until the disk has everything. May be called from several threads.

        Raises:
            ResourceError: the disk does not take it.
        """
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Let others in."""
        for file in self._files:
            file.close()
