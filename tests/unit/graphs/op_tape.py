"""What a CUDA graph does, without CUDA: operations are recorded with their tensors, and replayed on the same memory.

Whatever Python or the host decided while the tape ran (a length that was read, a branch, a number of rows) is repeated
as it was, exactly as a graph would. So tests without a GPU see what an operation does that should be a break point and
is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypp.graphs.graph_manager import CudaGraphManager
from raypp.graphs.pieces import MemoryUse, Replay
from raypp.stage.stage_spec import StageSpec

_SPOILED = 1
"""A number that may stand for anything: a row, a token, a length."""


@dataclass(frozen=True, eq=False)
class _Taped:
    """One operation, and the new tensors that it made."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[torch.Tensor | None]  # by place among its results; None: a view of an argument, or no tensor


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taped: list[_Taped] = []
        self._is_spoiled = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        made = [
            leaf if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given else None
            for leaf in pytree.tree_leaves(result)
        ]
        if func._schema.is_mutable or any(tensor is not None for tensor in made):
            self._taped.append(_Taped(func, args, kwargs, made))
        return result

    def spoil(self) -> None:
        """Overwrite all that it made, if it was replayed since the last time."""
        if self._is_spoiled:
            return
        self._is_spoiled = True
        for taped in self._taped:
            for tensor in taped.made:
                if tensor is not None:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else _SPOILED)

    def replay(self) -> None:
        """Do it again, with results where they were."""
        self._is_spoiled = False
        for taped in self._taped:
            results = pytree.tree_leaves(taped.op(*taped.args, **taped.kwargs))
            for kept, new in zip(taped.made, results, strict=True):
                if kept is not None:
                    kept.copy_(new)


def _storage(value: object) -> int | None:
    """Return what identifies a tensor's memory; None where there is none to be shared."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    memory: int = value.untyped_storage()._cdata
    return memory


class OpTapes:
    """See `raypp.graphs.pieces.GraphMaker`. Break points are always looked for: attention on a CPU reads lengths.

    Args:
        spoils: Whether a replay spoils what tapes that were recorded later have made. In the memory that graphs share
            it may do so: what a program needed for itself was free for those that came after it.
    """

    can_hold_break_points = False

    def __init__(self, *, spoils: bool = False) -> None:
        self._spoils = spoils
        self._tapes: list[_Tape] = []
        self._tape: _Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing is needed."""
        yield

    def begin(self) -> None:
        """Begin a tape."""
        self._tape = _Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Replay:
        """End it; return its replay."""
        assert self._tape is not None
        tape, self._tape = self._tape, None
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not self._spoils:
            return tape.replay
        self._tapes.append(tape)
        return partial(self._replay, len(self._tapes) - 1)

    def _replay(self, index: int) -> None:
        self._tapes[index].replay()
        for tape in self._tapes[index + 1 :]:
            tape.spoil()

    def abandon(self) -> None:
        """End it after an error."""
        if self._tape is not None:
            self.end()

    def memory(self) -> MemoryUse:
        """Nobody counts main memory."""
        return MemoryUse(0, 0)

    def trim(self) -> None:
        """Nothing is kept."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: a tape keeps what it uses."""
        return tensor


def tape_graphs(spec: StageSpec) -> CudaGraphManager:
    """Return what keeps a stage's recordings on tapes; see `raypp.testing.LocalEngine`."""
    return CudaGraphManager(OpTapes(), debug_every=spec.graphs.debug_every)


def spoiling_tape_graphs(spec: StageSpec) -> CudaGraphManager:
    """Return the same of tapes that spoil each other's memory."""
    return CudaGraphManager(OpTapes(spoils=True), debug_every=spec.graphs.debug_every)
