"""The schema of an edge: which tensors it carries, and where each lies in a step's message.

Neighbours exchange their schemas once, at start, and refuse to run when they differ. With the step's numbers of rows
and tokens, which the plan says, the schema fixes the layout: no key, type or shape travels with a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from raypp.errors import ConfigError

_ALIGNMENT = 16
_MAX_KNOWN = 1024


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor: a row of `trailing_shape` per row of the step, per token, or per token of some kind."""

    name: str
    dtype: torch.dtype
    trailing_shape: tuple[int, ...]
    per: Literal["row", "token", "item token", "drafting token"]

    def num_bytes(self, count: int) -> int:
        """Return the bytes of `count` rows of it, padded."""
        raw = count * math.prod(self.trailing_shape) * self.dtype.itemsize
        return -(-raw // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Schema:
    """The tensors of an edge, in the order in which they are packed."""

    specs: tuple[TensorSpec, ...]
    _known_views: dict[tuple[int, ...], dict[str, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _known_sizes: dict[tuple[int, int, int, int | None], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def num_bytes(
        self, num_rows: int, num_tokens: int, num_item_tokens: int = 0, num_drafting_tokens: int | None = None
    ) -> int:
        """Return the bytes of a message for that many rows and tokens.

        `num_item_tokens` of the tokens stand for images. A draft head needs the hidden states of
        `num_drafting_tokens` of them; None: of all.
        """
        key = (num_rows, num_tokens, num_item_tokens, num_drafting_tokens)
        num_bytes = self._known_sizes.get(key)
        if num_bytes is None:
            if len(self._known_sizes) >= _MAX_KNOWN:
                self._known_sizes.clear()
            counts = _counts(*key)
            num_bytes = self._known_sizes[key] = sum(s.num_bytes(counts[s.per]) for s in self.specs)
        return num_bytes

    def views(
        self,
        buffer: torch.Tensor,
        num_rows: int,
        num_tokens: int,
        num_item_tokens: int = 0,
        num_drafting_tokens: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a message that lies at the start of `buffer` (uint8), as views into it.

        Slots have fixed addresses and steps repeat their shapes, so views are kept. Shapes: [num_rows, num_tokens,
        num_item_tokens or num_drafting_tokens, *trailing_shape].
        """
        counts = _counts(num_rows, num_tokens, num_item_tokens, num_drafting_tokens)
        key = (buffer.data_ptr(), *counts.values())  # a kept view keeps its memory: no other can have the address
        views = self._known_views.get(key)
        if views is None:
            if len(self._known_views) >= _MAX_KNOWN:
                self._known_views.clear()
            views = self._known_views[key] = self._make_views(buffer, counts)
        return views

    def _make_views(self, buffer: torch.Tensor, counts: dict[str, int]) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for spec in self.specs:
            count = counts[spec.per]
            used = count * math.prod(spec.trailing_shape) * spec.dtype.itemsize
            view = buffer[offset : offset + used].view(spec.dtype).view(count, *spec.trailing_shape)
            views[spec.name] = view
            offset += spec.num_bytes(count)
        return views

    def describe(self) -> list[str]:
        """Return one line per tensor: what neighbours exchange at start, and what the error shows."""
        return [f"{s.name}: {s.dtype} [{s.per}s, {', '.join(map(str, s.trailing_shape))}]" for s in self.specs]


def _counts(num_rows: int, num_tokens: int, num_item_tokens: int, num_drafting_tokens: int | None) -> dict[str, int]:
    drafting = num_tokens if num_drafting_tokens is None else num_drafting_tokens
    return {"row": num_rows, "token": num_tokens, "item token": num_item_tokens, "drafting token": drafting}


@dataclass(frozen=True)
class MessageSpec:
    """What the messages of an edge hold, and how large they get."""

    schema: Schema
    max_rows: int
    max_tokens: int

    @property
    def slot_bytes(self) -> int:
        """The largest message, bytes."""
        return self.schema.num_bytes(self.max_rows, self.max_tokens, self.max_tokens)

    def describe(self) -> list[str]:
        """Return what both ends of an edge must agree on, one line each."""
        return [*self.schema.describe(), f"at most {self.max_rows} rows and {self.max_tokens} tokens a step"]


def check_schemas(sender: str, sends: list[str], receiver: str, expects: list[str]) -> None:
    """Refuse to run when the two ends of an edge do not describe the same message.

    Args:
        sender: Name of the sending end, for the error.
        sends: Its `Schema.describe()`.
        receiver: Name of the receiving end, for the error.
        expects: Its `Schema.describe()`.

    Raises:
        ConfigError: they differ; both sides are named.
    """
    if sends != expects:
        raise ConfigError(
            f"{sender} and {receiver} disagree about the tensors that travel between them",
            got=f"{sender} sends {sends}",
            expected=f"{receiver} expects {expects}",
            hint="all stages must run the same version of raypp on the same model",
        )


def aux_states_name(depth: int) -> str:
    """Return the name of the hidden states after so many layers, on their way to a draft head."""
    return f"aux_hidden_states_{depth}"


def hidden_states_schema(
    hidden_size: int,
    dtype: torch.dtype,
    num_carried_taps: int = 0,
    aux_depths: Sequence[int] = (),
    stream_size: int | None = None,
) -> Schema:
    """Return what a stage sends to the next: the residual stream, and each row's computed tokens.

    With `num_carried_taps`, for tokens of images also the deepstack rows of layers that the first stage lacks. For a
    draft head on the last stage also hidden states after `aux_depths` layers, of the tokens that it drafts from.
    With `stream_size` the residual stream has so many elements of a token: behind it lie inputs of later layers.
    """
    specs = (
        TensorSpec("num_computed_tokens", torch.int32, (), "row"),
        TensorSpec("hidden_states", dtype, (stream_size or hidden_size,), "token"),
        *(TensorSpec(aux_states_name(depth), dtype, (hidden_size,), "drafting token") for depth in aux_depths),
    )
    if not num_carried_taps:
        return Schema(specs)
    return Schema((*specs, TensorSpec("deepstack", dtype, (num_carried_taps, hidden_size), "item token")))


def feedback_schema(max_drafts: int) -> Schema:
    """Return what the last stage sends to the first: per row its length, sampled tokens and next drafts.

    `length` is -1 for a row that yielded nothing.
    """
    return Schema(
        (
            TensorSpec("length", torch.int32, (), "row"),
            TensorSpec("token_ids", torch.int32, (max_drafts + 1,), "row"),
            TensorSpec("draft_ids", torch.int32, (max_drafts,), "row"),
        )
    )
