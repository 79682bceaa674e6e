"""As many sizes as memory allows, the rest said; a mode that was asked for and has none is refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.graphs.buckets import few_row_buckets, row_buckets, token_buckets
from raypp.graphs.graph_manager import CudaGraphManager, bytes_each, index_at, next_position
from raypp.graphs.pieces import MemoryUse, Replay
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage_spec import StageSpec
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.types import SamplingParams

CPU = torch.device("cpu")
SIZES = [64, 48, 32, 24, 16, 8, 4, 2, 1]


class CountedMaker:
    """Memory as a number: every graph takes some, in chunks, the first one the pool besides; and there is an end."""

    can_hold_break_points = True

    def __init__(self, *, pool_bytes: int, graph_bytes: int, chunk_bytes: int = 1, total_bytes: int = 1 << 40) -> None:
        self._num_graphs = 0
        self.others_bytes = 0
        self._pool_bytes = pool_bytes
        self._graph_bytes = graph_bytes
        self._chunk_bytes = chunk_bytes
        self._total_bytes = total_bytes

    def grow_pool(self, pool_bytes: int) -> None:
        self._pool_bytes = pool_bytes

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        if self._pool_bytes + (self._num_graphs + 1) * self._graph_bytes > self._total_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
        self._num_graphs += 1

    def end(self) -> Replay:
        return lambda: None

    def abandon(self) -> None:
        pass

    def memory(self) -> MemoryUse:
        own_bytes = self._pool_bytes if self._num_graphs else 0
        num_chunks = -(-self._num_graphs * self._graph_bytes // self._chunk_bytes)
        return MemoryUse(own_bytes, num_chunks * self._chunk_bytes + self.others_bytes)

    def trim(self) -> None:
        pass

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _record(manager: CudaGraphManager, sizes: list[int]) -> list[int]:
    return manager.record_sizes("full", sizes, lambda size: manager.record("full", size, lambda: None))


def test_all_fit():
    manager = CudaGraphManager(CountedMaker(pool_bytes=1000, graph_bytes=10), max_bytes=1090)
    assert _record(manager, SIZES) == SIZES
    cost = manager.costs["full"]
    assert (cost.num_graphs, cost.memory_bytes, cost.num_left_out) == (9, 1090, 0)


def test_others_memory_is_not_ours():
    """Somebody else on the device allocates while we record."""
    maker = CountedMaker(pool_bytes=1000, graph_bytes=10)
    manager = CudaGraphManager(maker, max_bytes=1100)

    def record(size: int) -> None:
        manager.record("full", size, lambda: setattr(maker, "others_bytes", 1 << 30 if size < 32 else 0))

    assert manager.record_sizes("full", SIZES, record) == SIZES
    assert manager.costs["full"].memory_bytes == 1090


@pytest.mark.parametrize("max_bytes", [None, 1 << 40])
def test_memory_that_others_give_back_costs_no_size_its_place(max_bytes):
    """A first graph loads kernels, and while the second is recorded, somebody else frees memory."""
    maker = CountedMaker(pool_bytes=1000, graph_bytes=2)
    maker.others_bytes = 300 << 20
    manager = CudaGraphManager(maker, max_bytes=max_bytes)

    def record(size: int) -> None:
        others_bytes = 500 << 20 if size == SIZES[0] else 0
        manager.record("full", size, lambda: setattr(maker, "others_bytes", others_bytes))

    assert manager.record_sizes("full", SIZES, record) == SIZES


def test_one_program_that_needs_much_for_itself_costs_no_other_its_place():
    """Sampling with truncation is recorded for small sizes only: the pool grows when the first of them comes."""
    maker = CountedMaker(pool_bytes=100, graph_bytes=10)
    manager = CudaGraphManager(maker, max_bytes=1000)

    def record(size: int) -> None:
        maker.grow_pool(100 if size > 32 else 600)
        manager.record("full", size, lambda: None)

    assert manager.record_sizes("full", SIZES, record) == SIZES
    assert manager.memory_bytes == 600 + 90


def test_fewer_where_the_plan_has_no_more(caplog):
    manager = CudaGraphManager(CountedMaker(pool_bytes=1000, graph_bytes=10), max_bytes=1050)
    with caplog.at_level(logging.WARNING):
        recorded = _record(manager, SIZES)
        manager.log_costs()
    assert recorded[:2] == [64, 48]
    assert recorded[-1] == 1
    assert len(recorded) == 5
    assert manager.memory_bytes <= 1050
    assert "4 sizes were left out" in caplog.text


def test_what_there_is_no_memory_for_is_left_out(caplog):
    maker = CountedMaker(pool_bytes=0, graph_bytes=10, total_bytes=35)
    manager = CudaGraphManager(maker)
    assert _record(manager, SIZES) == [64, 48, 32]
    assert manager.costs["full"].num_left_out == 6
    assert "Tried to allocate" in caplog.text
    assert 24 not in manager


def test_a_size_is_recorded_as_a_whole_or_not_at_all():
    manager = CudaGraphManager(CountedMaker(pool_bytes=0, graph_bytes=10, total_bytes=50))

    def record(size: int) -> None:
        for part in ("body", "tail"):
            manager.record("full", (part, size), lambda: None)

    assert manager.record_sizes("full", SIZES, record) == [64, 48]
    assert ("body", 32) not in manager


@pytest.mark.parametrize("count", range(10))
def test_thinned_evenly(count):
    """What is known at once is spread evenly; the smallest is recorded whatever there is."""
    position, kept = next_position(0.0, len(SIZES), 10 * count + 3, 10.0), []
    while index_at(position) < len(SIZES):
        kept.append(index_at(position))
        position = next_position(position, len(SIZES), 10 * (count - len(kept)) + 3, 10.0)
    assert len(kept) == min(max(count, 1), len(SIZES))
    assert kept[-1] == len(SIZES) - 1
    gaps = [later - earlier for earlier, later in itertools.pairwise([-1, *kept])]
    assert max(gaps) - min(gaps) <= 1


def test_what_one_more_takes():
    assert bytes_each([500]) == bytes_each([500, 10]) == 0.0
    assert bytes_each([500, 10, 10, 10]) == 10.0
    assert bytes_each([500, 10, 300, 20]) == pytest.approx(50 / 3)
    assert bytes_each([500, 300, 0, 0]) == 0.0


def _evenness(recorded: list[int], sizes: list[int]) -> int:
    """Return the most sizes in a row that were left out."""
    places = [-1, *map(sizes.index, recorded), len(sizes)]
    return max(later - earlier - 1 for earlier, later in itertools.pairwise(places))


@pytest.mark.parametrize("chunk_bytes", [10, 20, 32])
def test_memory_that_grows_in_chunks(chunk_bytes):
    """The second size opens a chunk: that is not what each of the others will take."""
    maker = CountedMaker(pool_bytes=0, graph_bytes=10, chunk_bytes=chunk_bytes)
    manager, sizes = CudaGraphManager(maker, max_bytes=320), list(range(64, 0, -1))
    recorded = _record(manager, sizes)
    assert 28 <= len(recorded) <= 32
    assert recorded[-1] == 1
    assert _evenness(recorded, sizes) <= 4
    assert manager.memory_bytes <= 320 + chunk_bytes


@pytest.mark.parametrize("chunk_bytes", [80, 160, 320])
def test_chunks_that_are_a_large_part_of_the_room(chunk_bytes):
    maker = CountedMaker(pool_bytes=0, graph_bytes=10, chunk_bytes=chunk_bytes)
    manager = CudaGraphManager(maker, max_bytes=320)
    recorded = _record(manager, list(range(64, 0, -1)))
    assert 17 <= len(recorded) <= 34
    assert recorded[-1] == 1
    assert manager.memory_bytes <= 320 + chunk_bytes


@pytest.mark.parametrize("disturbed", [2, 3, 10])
def test_others_memory_at_one_size_costs_no_other_its_place(disturbed):
    maker = CountedMaker(pool_bytes=0, graph_bytes=10)
    manager, sizes = CudaGraphManager(maker, max_bytes=320 + 1000), list(range(64, 0, -1))

    def record(size: int) -> None:
        manager.record("full", size, lambda: setattr(maker, "others_bytes", 1000 * (size <= 65 - disturbed)))

    recorded = manager.record_sizes("full", sizes, record)
    assert 30 <= len(recorded) <= 33
    assert _evenness(recorded, sizes) <= 4


@pytest.mark.parametrize("make", [row_buckets, few_row_buckets, token_buckets])
@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 12, 16, 100, 128, 256, 300, 1024, 2048])
def test_sizes(make, largest):
    sizes = make(largest).sizes
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert len(sizes) <= 100


def _engine(mode: str, maker: CountedMaker | None) -> LocalEngine:
    plan = plan_engine(
        EngineConfig.from_flat("tiny", mode=mode, max_num_seqs=4, max_num_batched_tokens=16), Hardware(1)
    )
    graphs = None if maker is None else (lambda spec: CudaGraphManager(maker))
    return LocalEngine(plan, pipeline=build_local_pipeline(plan, make_graphs=graphs))


@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_a_mode_without_memory_is_refused_when_asked_for(mode):
    maker = CountedMaker(pool_bytes=10, graph_bytes=10, total_bytes=5)
    with pytest.raises(ResourceError, match="no memory for a single") as caught:
        _engine(mode, maker)
    assert "GiB" in str(caught.value.got)
    assert "graphs.mode" in str(caught.value.hint)


def test_stages_use_the_sizes_that_all_have():
    """The second stage has memory for fewer recordings: both pad to what it has, and yield the same."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "num_stages": 2}
    plan = plan_engine(EngineConfig.from_flat("tiny", mode="full_and_piecewise", **settings), Hardware(1))

    def build(most_of_second: int) -> tuple[LocalEngine, list[CudaGraphManager]]:
        managers = []

        def make_graphs(spec: StageSpec) -> CudaGraphManager:
            managers.append(_FewCalls(None))
            managers[-1].max_calls = most_of_second if spec.stage_index else 1000
            return managers[-1]

        return LocalEngine(plan, pipeline=build_local_pipeline(plan, make_graphs=make_graphs)), managers

    _, (_, second) = build(1000)
    pieces, full = second.costs["piecewise"].num_graphs, second.costs["full"].num_graphs
    engine, managers = build(pieces + full // 2 + 1)  # of four sizes two, and a part of the third
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 20, [3] * 9]
    assert engine.generate(prompts, params) == _engine("none", None).generate(prompts, params)
    assert [manager.costs["full"].num_left_out for manager in managers] == [0, 2]


class _FewCalls(CudaGraphManager):
    max_calls = 0

    def record(self, mode, key, program, **options) -> None:
        if sum(cost.num_graphs for cost in self.costs.values()) >= self.max_calls:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super().record(mode, key, program, **options)
