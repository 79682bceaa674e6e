"""Debug mode: checks that a replay finds its tensors at the recorded addresses, and does what its program does.

An operation that should be a break point and is not, a length that was read on the host, a table that was allocated
anew: all of these replay the past without a word. Here they are an error that says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raypp.errors import GraphMismatchError
from raypp.graphs.pieces import Program, Replay
from raypp.messages import NULL_BLOCK


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What debug mode must know of a program. Asked at every replay, so that what was allocated anew is noticed."""

    reads: Sequence[object] = ()
    """Whose tensors it reads, at addresses that must stay; see `tensors_of`."""
    changes: Sequence[object] = ()
    """Whose tensors it both reads and changes: saved, so that it can be run twice."""
    yields: Callable[[Any], Mapping[str, torch.Tensor]] = lambda result: {}
    """What must come out alike, of what the program returned; without padding."""


NOTHING_WATCHED = Watched()


@dataclass(eq=False)
class Recording:
    """A program and what was recorded of it."""

    key: object
    program: Program
    replay: Replay
    result: Any
    watched: Watched
    addresses: dict[str, int] = field(init=False)
    num_replays: int = 0

    def __post_init__(self) -> None:
        self.addresses = _addresses(self.watched)


class ReplayCheck:
    """Runs recordings with all checks. Waits for the device, and so is slow.

    Args:
        every: Of so many replays of a recording one is compared with its program, the first among them.
    """

    def __init__(self, every: int) -> None:
        assert every >= 1
        self._every = every
        self.num_compared = 0

    def run(self, recording: Recording) -> None:
        """Replay.

        Raises:
            GraphMismatchError: the replay reads elsewhere than the program would, or yields something else.
        """
        _check_addresses(recording)
        recording.num_replays += 1
        if (recording.num_replays - 1) % self._every:
            recording.replay()
            return
        watched, changed = recording.watched, tensors_of(recording.watched.changes)
        before = {name: tensor.clone() for name, tensor in changed.items()}
        recording.replay()
        replayed = {name: tensor.clone() for name, tensor in watched.yields(recording.result).items()}
        for name, tensor in changed.items():
            tensor.copy_(before[name])
        _compare(recording.key, replayed, watched.yields(recording.program()))
        self.num_compared += 1


def tensors_of(owners: Sequence[object]) -> dict[str, torch.Tensor]:
    """Return the tensors in the owners' attributes, alone or in tuples and lists, by owner and attribute.

    An owner may be a mapping of names, and None owns nothing.
    """
    found: dict[str, torch.Tensor] = {}
    for owner in owners:
        if owner is None:
            continue
        attributes = owner if isinstance(owner, Mapping) else vars(owner)
        prefix = "" if isinstance(owner, Mapping) else f"{type(owner).__name__}."
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                found[prefix + name.lstrip("_")] = value
            elif isinstance(value, tuple | list):
                tensors = [each for each in value if isinstance(each, torch.Tensor)]
                found |= {f"{prefix}{name.lstrip('_')}[{index}]": tensor for index, tensor in enumerate(tensors)}
    return found


def _addresses(watched: Watched) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors_of([*watched.reads, *watched.changes]).items()}


def _check_addresses(recording: Recording) -> None:
    now = _addresses(recording.watched)
    moved = [name for name, address in recording.addresses.items() if now.get(name) != address]
    if moved:
        raise GraphMismatchError(
            f"the recording {recording.key} reads memory that is no longer what it stands for",
            got=f"{', '.join(moved)} at another address",
            expected="the address of the time of recording",
            hint="allocate it once, before anything is recorded, and copy into it",
        )


def _compare(key: object, replayed: Mapping[str, torch.Tensor], computed: Mapping[str, torch.Tensor]) -> None:
    for name, expected in computed.items():
        got = replayed[name]
        if got.shape == expected.shape and torch.equal(_bits(got), _bits(expected)):
            continue
        rows = (_bits(got) != _bits(expected)).flatten(1).any(1).nonzero().flatten().tolist()
        raise GraphMismatchError(
            f"the replay of {key} does not do what its program does",
            got=f"{name} differs in {len(rows)} of {len(expected)} rows, the first is {rows[0]}",
            expected="the same bits",
            hint="an operation that depends on what the host knows of a step must be a @break_point",
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as bytes, at least two dimensions: NaN equals itself."""
    return tensor.contiguous().view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)


def owned_tokens(slot_mapping: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return whether each token lies in a block of its row, bool [T]. Shapes: slot_mapping [T] int64.

    A token at or past its row's limit writes the null block, as padding does, and reads there what others wrote at the
    same time. Nobody reads what becomes of it, and it need not be the same twice.
    """
    return slot_mapping >= (NULL_BLOCK + 1) * block_size


def only(counts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values, zero where they do not count. Shapes: counts [T] bool; values [T, ...]."""
    return values.masked_fill(~counts.view(-1, *[1] * (values.ndim - 1)), 0)
