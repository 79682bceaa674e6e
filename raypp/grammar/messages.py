"""What the driver and the grammar process tell each other. Packed by `raypp.messages`, but for `OpenGrammar`, JSON.

    driver -> grammar process              grammar process -> driver
    OpenGrammar     follow this one        Ready           it has been loaded, and reads orders from now on
    GrammarAdvance  tokens and drafts      GrammarMasks    what is allowed now, the first time too
    CloseGrammar    no longer              Refused         it cannot be compiled, or not be followed

G grammars, each with the number that the driver gave it. W words of a bit mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raypp.client_messages import error_from_dict, error_to_dict
from raypp.errors import RayppError
from raypp.messages import Int32s, Int64s, pack, unpack

NO_TOKENS_YET = -1
"""The `after_steps` of masks for a text that has not begun."""


@dataclass(frozen=True)
class OpenGrammar:
    """Compile a constraint, if that was not done before, and follow a text under it."""

    number: int
    source: str  # `structured_outputs.source_of`
    allowed_token_ids: list[int] | None = None  # of what the grammar allows these alone, where any is left
    token_ids: list[int] | None = None  # the text so far, when it has begun


@dataclass(frozen=True)
class CloseGrammar:
    """Forget a text."""

    number: int


@dataclass(frozen=True, eq=False)
class GrammarAdvance:
    """What a step brought to texts."""

    step_id: int
    # [G, 3] the grammar's number; how many new tokens it has, 0 when the row yielded nothing; how many drafts behind
    entries: Int32s
    token_ids: Int32s  # [sum of new tokens]
    draft_ids: Int32s  # [sum of drafts]


@dataclass(frozen=True)
class Ready:
    """The first word of a grammar process."""


@dataclass(frozen=True, eq=False)
class GrammarMasks:
    """What the grammars allow; see `raypp.messages.MaskUpdate`."""

    # [G, 4] the grammar's number; the newest step that it was told of; tokens of the text so far; masks
    entries: Int64s
    draft_ids: Int32s  # [sum of masks - 1]
    bitmasks: Int32s  # [sum of masks, W]


@dataclass(frozen=True)
class Refused:
    """A constraint that cannot be compiled, or a text that cannot go on."""

    number: int
    error: RayppError


GrammarOrder = OpenGrammar | GrammarAdvance | CloseGrammar
GrammarReply = GrammarMasks | Refused

_OPEN, _ADVANCE, _CLOSE, _READY, _MASKS, _REFUSED = b"O", b"A", b"C", b"!", b"M", b"R"


def encode(message: GrammarOrder | GrammarReply | Ready) -> bytes:
    """Return a message's bytes."""
    match message:
        case Ready():
            return _READY
        case OpenGrammar():
            return _OPEN + json.dumps(vars(message)).encode()
        case CloseGrammar(number):
            return _CLOSE + json.dumps(number).encode()
        case Refused(number, error):
            return _REFUSED + json.dumps([number, error_to_dict(error)]).encode()
        case GrammarAdvance():
            return _ADVANCE + pack(message)
        case GrammarMasks():
            return _MASKS + pack(message)


def decode(data: bytes) -> Any:
    """Return the message that `encode` wrote."""
    kind, payload = data[:1], data[1:]
    if kind == _ADVANCE:
        return unpack(GrammarAdvance, payload)
    if kind == _MASKS:
        return unpack(GrammarMasks, payload)
    if kind == _READY:
        return Ready()
    values = json.loads(payload)
    if kind == _OPEN:
        return OpenGrammar(**values)
    if kind == _CLOSE:
        return CloseGrammar(values)
    assert kind == _REFUSED, f"unknown kind of message: {kind!r}"
    return Refused(values[0], error_from_dict(values[1]))
