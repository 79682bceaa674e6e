"""The graphs of one stage: recorded once, then replayed. Without CUDA the same programs are called.

A program reads and writes tensors that exist before it is recorded and keep their addresses; whatever it makes for
itself lies in one memory pool that all graphs share. It must not wait for the device, and everything that changes from
one replay to the next must be in those tensors, or be an argument of a break point (`raypp.ops.break_point`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from raypp.errors import ResourceError
from raypp.graphs.cost import GraphCost
from raypp.graphs.cuda_graphs import CudaGraphs
from raypp.graphs.debug import NOTHING_WATCHED, Recording, ReplayCheck, Watched
from raypp.graphs.pieces import GraphMaker, MemoryUse, PieceRecorder, Program


def bytes_each(taken: Sequence[int]) -> float:
    """Return what one more size takes, as far as those before it tell; 0: they do not.

    The mean of all but the first, which loads kernels. The largest counts as the second largest: the driver takes
    memory for graphs in chunks, of which one says nothing, and another process may have taken some meanwhile.

    Args:
        taken: What each size so far took, in bytes, in their order. Less than nothing where the count of those before
            it was corrected.
    """
    if len(taken) < 3:
        return 0.0
    *_, second, largest = sorted(taken[1:])
    return max(0.0, (sum(taken[1:]) - largest + second) / (len(taken) - 1))


def next_position(position: float, num_sizes: int, room_bytes: int, size_bytes: float) -> float:
    """Return how far the list of sizes is done after the next one, so that the room is used up at its end.

    Which size that is, `index_at` says. What it skips is left out; the last (smallest) never is, since steps of few
    rows would be padded most.

    Args:
        position: How far it is done.
        num_sizes: The list's length.
        room_bytes: What the sizes after `position` may take.
        size_bytes: What one takes; 0: not known.
    """
    count = int(room_bytes / size_bytes) if size_bytes else num_sizes
    if room_bytes < 0:
        count = 1
    return position + max(1.0, (num_sizes - position) / max(1, count))


def index_at(position: float) -> int:
    """Return the index of the size that ends at a position."""
    return int(position + 0.5) - 1


_MOST_BYTES = 256 << 20
"""No recording's graphs take as much as that: somebody else did."""
_NONE = MemoryUse(0, 0)


class MemoryMeter:
    """Measures the recordings of one mode.

    Args:
        maker: Of the graphs; None: nothing takes any.
    """

    def __init__(self, maker: GraphMaker | None) -> None:
        self._maker = maker
        self._first = self._last = self._read()
        self._graph_bytes: list[int] = []
        self._num_disturbed = 0

    def begin(self) -> None:
        """Note that a recording begins."""
        self._last = self._read()

    def end(self) -> int:
        """Note that it has ended; return the bytes of all so far."""
        before, self._last = self._last, self._read()
        graph_bytes = self._last.other_bytes - before.other_bytes
        if 0 <= graph_bytes < _MOST_BYTES:
            self._graph_bytes.append(graph_bytes)
        else:
            self._num_disturbed += 1
        return self.total_bytes

    def trim(self) -> int:
        """Give back what is kept for nothing; return the bytes of all."""
        if self._maker is not None:
            self._maker.trim()
        self._last = self._read()
        return self.total_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of the graphs themselves; one that was disturbed counts as the average of the others."""
        average = sum(self._graph_bytes) / max(1, len(self._graph_bytes))
        return sum(self._graph_bytes) + round(average * self._num_disturbed)

    @property
    def total_bytes(self) -> int:
        """Bytes of all recordings so far."""
        return max(0, self._last.own_bytes - self._first.own_bytes) + self.graph_bytes

    def _read(self) -> MemoryUse:
        return _NONE if self._maker is None else self._maker.memory()


_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class CudaGraphManager:
    """Records programs and runs them by their keys.

    Args:
        maker: Makes graphs. None: programs are kept and called, which is all that a CPU can do.
        debug_every: Check all replays, and compare one of so many with the program itself; 0: trust them.
        max_bytes: What all recordings together may take; None: what there is.
        must_record_all: Whether a size that there is no memory for is an error: members of a stage record the same.
    """

    def __init__(
        self,
        maker: GraphMaker | None,
        *,
        debug_every: int = 0,
        max_bytes: int | None = None,
        must_record_all: bool = False,
    ) -> None:
        self._must_record_all = must_record_all
        self._maker = maker
        self._max_bytes = max_bytes
        self._recorder = None if maker is None else PieceRecorder(maker)
        self._check = ReplayCheck(debug_every) if debug_every else None
        self._recordings: dict[Hashable, Recording] = {}
        self._programs: dict[Hashable, Program] = {}  # where there are no graphs
        self._meters: dict[str, MemoryMeter] = {}
        self.costs: dict[str, GraphCost] = {}
        """By mode."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Surround all recording, once."""
        if self._maker is None:
            yield
        else:
            with self._maker.recording():
                yield

    def record_sizes(self, mode: str, sizes: Sequence[T], record: Callable[[T], None]) -> list[T]:
        """Record as many sizes as memory allows; return them.

        A size that there is no memory for is left out. When the graphs that are still to come would exceed `max_bytes`,
        evenly fewer are recorded, the smallest among them: a step is then padded to the next larger one. That is judged
        anew after each size, so a wrong guess leaves out only a few. What programs need for themselves is
        not counted ahead: it grows when a program needs more than all before it, and the others use it again.

        Args:
            mode: What they are accounted to.
            sizes: The largest first: the others use its memory again.
            record: Records one of them, by calls of `record`.
        """
        if not sizes:
            return []
        cost, meter = self._account(mode)
        recorded: list[T] = []
        taken: list[int] = []
        position = 1.0
        while index_at(position) < len(sizes):
            size = sizes[index_at(position)]
            num_known, before = len(self._recordings), meter.graph_bytes
            try:
                record(size)
            except torch.OutOfMemoryError as error:
                if self._must_record_all:
                    raise ResourceError(
                        f"no memory for the {mode} graph of {size}, which all members of the stage have",
                        got=str(error).split("\n", 1)[0],
                        hint="lower max_num_seqs, gpu_memory_utilization or num_kv_blocks",
                    ) from error
                for key in list(self._recordings)[num_known:]:
                    del self._recordings[key]
                _LOG.warning("no memory to record %s of %s: %s", size, mode, str(error).split("\n", 1)[0])
            else:
                recorded.append(size)
                taken.append(meter.graph_bytes - before)
            if self._max_bytes is None:
                position += 1
            else:
                room_bytes = self._max_bytes - self.memory_bytes
                position = next_position(position, len(sizes), room_bytes, bytes_each(taken))
        cost.num_left_out += len(sizes) - len(recorded)
        cost.memory_bytes = meter.trim()
        return recorded

    @property
    def memory_bytes(self) -> int:
        """What all recordings take."""
        return sum(cost.memory_bytes for cost in self.costs.values())

    def record(
        self,
        mode: str,
        key: Hashable,
        program: Program,
        *,
        breakable: bool = False,
        watched: Watched = NOTHING_WATCHED,
    ) -> None:
        """Record a program; it is executed on the way. Record the largest first: the smaller ones reuse its memory.

        Args:
            mode: What it is accounted to.
            key: What `run` will name it by.
            program: What to record.
            breakable: Whether break points interrupt the graph.
            watched: For debug mode.
        """
        assert key not in self, f"{key} is recorded already"
        cost, meter = self._account(mode)
        started = time.perf_counter()
        meter.begin()
        program()  # compiles kernels, fills caches, makes what libraries need: none of that may be in a graph
        if self._recorder is None:
            self._programs[key] = program
        else:
            replay, result = self._recorder.record(program, breakable=breakable)
            self._recordings[key] = Recording(key, program, replay, result, watched)
        cost.num_graphs += 1
        cost.seconds += time.perf_counter() - started
        cost.memory_bytes = meter.end()

    def run(self, key: Hashable) -> Any:
        """Run what was recorded under `key`, on the current stream; return what the program returns.

        Does not wait for the device, but in debug mode.

        Raises:
            GraphMismatchError: in debug mode, the replay does something else than its program.
        """
        recording = self._recordings.get(key)
        if recording is None:
            return self._programs[key]()
        if self._check is None:
            recording.replay()
        else:
            self._check.run(recording)
        return recording.result

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a recording of that key."""
        return key in self._recordings or key in self._programs

    @property
    def makes_graphs(self) -> bool:
        """Whether recordings save launches: calls of programs save nothing, however these are cut."""
        return self._maker is not None

    @property
    def num_compared(self) -> int:
        """Replays that debug mode has compared."""
        return 0 if self._check is None else self._check.num_compared

    def log_costs(self) -> None:
        """Say what the recordings cost."""
        for mode, cost in self.costs.items():
            _LOG.log(
                logging.WARNING if cost.num_left_out else logging.INFO,
                "%d %s recordings took %.1f s and %.2f GiB%s",
                cost.num_graphs,
                mode,
                cost.seconds,
                cost.memory_bytes / 2**30,
                f"; {cost.num_left_out} sizes were left out for lack of memory" if cost.num_left_out else "",
            )
        if self._max_bytes is not None and self.memory_bytes > self._max_bytes:
            _LOG.warning(
                "the recordings take %.2f GiB, and were planned to take %.2f",
                self.memory_bytes / 2**30,
                self._max_bytes / 2**30,
            )

    def _account(self, mode: str) -> tuple[GraphCost, MemoryMeter]:
        if mode not in self.costs:
            self.costs[mode], self._meters[mode] = GraphCost(), MemoryMeter(self._maker)
        return self.costs[mode], self._meters[mode]


def graph_maker(device: torch.device) -> GraphMaker | None:
    """Return what makes graphs on a device; None on a CPU, which has none."""
    return CudaGraphs(device) if device.type == "cuda" else None
