"""Breakable capture: a program becomes graphs, and between them the calls that no graph may hold.

    program         norm, product | attention | product, norm, product | attention | ...
    its recording   graph           call        graph                    call        ...

Nothing is compiled. A replay walks the list. One list serves every step of its size, because a call gets the same
arguments each time: objects and buffers that the step fills in before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree

from raypp.ops.break_point import breaking_at

P = ParamSpec("P")
R = TypeVar("R")

Program = Callable[[], Any]
"""Without arguments: reads and writes tensors that are there before and keep their addresses. What it returns, for a
replay, is what it returned while it was recorded: tensors that the replay fills anew."""

Replay = Callable[[], object]


class MemoryUse(NamedTuple):
    """The device's memory in use."""

    own_bytes: int
    """By this process's tensors, and kept for them."""
    other_bytes: int
    """By all else: graphs and kernels, which nobody counts, and other processes."""


class GraphMaker(Protocol):
    """Records what is launched between two calls. One recording at a time."""

    can_hold_break_points: bool
    """Whether programs that need no break points on this device may be recorded without looking for any."""

    def recording(self) -> AbstractContextManager[None]:
        """Return what surrounds the recording of programs."""

    def begin(self) -> None:
        """Begin a graph."""

    def end(self) -> Replay:
        """End it; return its replay."""

    def abandon(self) -> None:
        """End it after an error; nothing is kept."""

    def memory(self) -> MemoryUse:
        """Return the device's memory in use."""

    def trim(self) -> None:
        """Give back memory that is kept for nothing."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same memory that does not keep it from being used by later pieces."""


class PieceRecorder:
    """Records programs; see `raypp.ops.break_point.Breakable`."""

    def __init__(self, maker: GraphMaker) -> None:
        self._maker = maker
        self._pieces: list[Replay] = []

    def record(self, program: Program, *, breakable: bool) -> tuple[Replay, Any]:
        """Return the program's recording, and what it returned.

        Args:
            program: Is executed on the way, its break points for good, all else as the maker does.
            breakable: Whether break points interrupt it. Else they are part of the graph, for which what they launch
                must depend on nothing that the host knows of a step.
        """
        self._pieces = []
        self._maker.begin()
        try:
            with breaking_at(self if breakable or not self._maker.can_hold_break_points else None):
                result = program()
        except BaseException:
            self._maker.abandon()
            raise
        self._pieces.append(self._maker.end())
        pieces, self._pieces = tuple(self._pieces), []
        return (pieces[0] if len(pieces) == 1 else _Sequence(pieces)), result

    def interrupt(self, op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """End the graph, call the operation now and at every replay, begin the next graph."""
        self._pieces.append(self._maker.end())
        try:
            with breaking_at(None):
                result = op(*args, **kwargs)
            self._pieces.append(self._call(op, args, kwargs, result))
        finally:
            self._maker.begin()  # `record` ends it, also after an error
        return result

    def _call(self, op: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], result: R) -> Replay:
        """Return the call to be repeated. What it returned is where the rest of the program looks."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._maker.borrow, (args, kwargs))
        given = {_place(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if all(_place(tensor) in given for tensor in results):
            return _Call(op, args, kwargs)
        return _CopiedCall(_Call(op, args, kwargs), results)


class _Sequence:
    """Pieces, run one after the other."""

    def __init__(self, pieces: tuple[Replay, ...]) -> None:
        self._pieces = pieces

    def __call__(self) -> None:
        for piece in self._pieces:
            piece()


class _Call:
    """A call that is repeated."""

    def __init__(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._op = op
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> Any:
        return self._op(*self._args, **self._kwargs)


class _CopiedCall:
    """A call whose results are new tensors: they are copied to where those of the first call are."""

    def __init__(self, call: _Call, results: list[torch.Tensor]) -> None:
        self._call = call
        self._results = results

    def __call__(self) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(self._call()) if isinstance(leaf, torch.Tensor)]
        for kept, new in zip(self._results, leaves, strict=True):
            kept.copy_(new)


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
