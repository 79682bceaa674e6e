"""What the driver and the grammar process tell each other. Arrays are packed by `raypp.messages`, all else is JSON.

    driver -> grammar process              grammar process -> driver
                                           Ready           it has been loaded, and reads orders from now on
    CompileGrammar  prepare a constraint   Compiled        texts under it may be opened
                                           NotCompiled     it cannot be compiled
    OpenGrammar     follow a text          GrammarMasks    what is allowed now, the first time too
    GrammarAdvance  tokens and drafts      Refused         the text cannot be followed
    CloseGrammar    no longer              Unknown         its constraint is not compiled, or no longer

G texts, each with the number that the driver gave it. W words of a bit mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from raypp.client_messages import error_from_dict, error_to_dict
from raypp.errors import RayppError
from raypp.messages import Int32s, Int64s, pack, unpack

NO_TOKENS_YET = -1
"""The `after_steps` of masks for a text that has not begun."""


def key_of(source: str) -> str:
    """Return what names a constraint, `structured_outputs.source_of`, from then on: constraints may be long."""
    return blake2b(source.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class GrammarSettings:
    """What the grammar process is told when it is started."""

    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_timeout_s: float


@dataclass(frozen=True)
class CompileGrammar:
    """Compile a constraint, if that was not done before; `Compiled` or `NotCompiled` answers."""

    source: str  # `structured_outputs.source_of`


@dataclass(frozen=True)
class OpenGrammar:
    """Follow a text under a constraint that was compiled."""

    number: int
    key: str  # of the constraint
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
class Compiled:
    """Texts under a constraint may be opened."""

    key: str


@dataclass(frozen=True)
class NotCompiled:
    """A constraint cannot be compiled."""

    key: str
    error: RayppError


@dataclass(frozen=True)
class Refused:
    """A text cannot go on."""

    number: int
    error: RayppError


@dataclass(frozen=True)
class Unknown:
    """A text cannot be opened before its constraint is compiled, perhaps once more: few are kept that are not used."""

    number: int


GrammarOrder = CompileGrammar | OpenGrammar | GrammarAdvance | CloseGrammar
GrammarReply = Ready | Compiled | NotCompiled | GrammarMasks | Refused | Unknown

_ADVANCE, _MASKS = b"A", b"M"
_PLAIN: dict[bytes, Any] = {
    b"P": CompileGrammar,
    b"O": OpenGrammar,
    b"C": CloseGrammar,
    b"!": Ready,
    b"+": Compiled,
    b"-": NotCompiled,
    b"R": Refused,
    b"?": Unknown,
}
_KINDS = {made_of: kind for kind, made_of in _PLAIN.items()}


def encode(message: GrammarOrder | GrammarReply) -> bytes:
    """Return a message's bytes."""
    match message:
        case GrammarAdvance():
            return _ADVANCE + pack(message)
        case GrammarMasks():
            return _MASKS + pack(message)
        case NotCompiled(error=error) | Refused(error=error):
            values = vars(message) | {"error": error_to_dict(error)}
        case _:
            values = vars(message)
    return _KINDS[type(message)] + json.dumps(values).encode()


def decode(data: bytes) -> Any:
    """Return the message that `encode` wrote."""
    kind, payload = data[:1], data[1:]
    if kind == _ADVANCE:
        return unpack(GrammarAdvance, payload)
    if kind == _MASKS:
        return unpack(GrammarMasks, payload)
    values = json.loads(payload)
    if "error" in values:
        values["error"] = error_from_dict(values["error"])
    return _PLAIN[kind](**values)
