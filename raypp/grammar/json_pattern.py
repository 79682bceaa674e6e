r"""Regular expressions for the inside of JSON strings.

What a schema says of a string's text is followed on the raw JSON. So every character class is cut down to characters
that JSON writes as themselves: no quote, no backslash, no control character. The text is then valid JSON that the
schema accepts, and a length counts characters; texts that JSON would have to escape are given up. Classes of "all but"
stay such, for xgrammar follows them much faster than the same characters counted up; docs/design/0072.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The parser that `re` itself uses: there is no other one for Python's syntax, which is ECMA's in all that is kept here.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Ranges = list[tuple[int, int]]
"""Code points from first to last, ascending."""

_SAFE: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)]
_UNSAFE: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_CATEGORIES: dict[Any, Ranges] = {
    ops.CATEGORY_DIGIT: [(0x30, 0x39)],
    ops.CATEGORY_WORD: [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    ops.CATEGORY_SPACE: [(0x20, 0x20)],
}
_NEGATED = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
}


class UnsupportedPatternError(ValueError):
    """A pattern with a part that cannot be followed."""


def length_pattern(min_length: int, max_length: int | None) -> str:
    """Return a pattern for texts of so many characters."""
    most = "" if max_length is None else str(max_length)
    return f"^{_all_but([])}{{{min_length},{most}}}$"


def json_pattern(pattern: str) -> str:
    """Return a pattern for the whole of a JSON string in which `pattern` is found.

    Raises:
        UnsupportedPatternError: says what is not supported.
    """
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedPatternError(str(error)) from None
    branches = _branches(tree)
    return f"^({'|'.join(map(_searched, branches))})$"


def _branches(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the alternatives of the whole pattern. The parser puts what they have in common in front of them."""
    before, last = list(items[:-1]), items[-1] if len(items) else None
    if last is not None and last[0] is ops.BRANCH and all(item == (ops.AT, ops.AT_BEGINNING) for item in before):
        return [[*before, *branch] for branch in last[1][1]]
    return [list(items)]


def _searched(items: Sequence[Any]) -> str:
    """Return an alternative, with any text before and behind it where it is not anchored."""
    items = list(items)
    begins, ends = _all_but([]) + "*", _all_but([]) + "*"
    if items and items[0] == (ops.AT, ops.AT_BEGINNING):
        begins, items = "", items[1:]
    if items and items[-1] == (ops.AT, ops.AT_END):
        ends, items = "", items[:-1]
    return begins + _sequence(items) + ends


def _sequence(items: Iterable[Any]) -> str:
    return "".join(_item(op, value) for op, value in items)


def _item(op: Any, value: Any) -> str:
    match op:
        case ops.LITERAL:
            return _class(_within_safe([(value, value)]))
        case ops.NOT_LITERAL:
            return _all_but([(value, value)])
        case ops.ANY:
            return _all_but([])
        case ops.IN:
            return _set(value)
        case ops.BRANCH:
            return "(" + "|".join(_sequence(branch) for branch in value[1]) + ")"
        case ops.SUBPATTERN if not value[1] and not value[2]:
            return "(" + _sequence(value[3]) + ")"
        case ops.MAX_REPEAT | ops.MIN_REPEAT:
            least, most, repeated = value
            end = "" if most is ops.MAXREPEAT else str(most)
            return f"({_sequence(repeated)}){{{least},{end}}}"
        case _:
            raise UnsupportedPatternError(f"{str(op).lower()} is not supported")


def _set(items: Sequence[Any]) -> str:
    if len(items) == 1 and items[0][0] is ops.CATEGORY and items[0][1] in _NEGATED:
        return _class(_ascii_but(_CATEGORIES[_NEGATED[items[0][1]]]))
    is_negated = items[0][0] is ops.NEGATE
    ranges: Ranges = []
    has_category = False
    for op, value in items[1:] if is_negated else items:
        match op:
            case ops.LITERAL:
                ranges.append((value, value))
            case ops.RANGE:
                ranges.append(value)
            case ops.CATEGORY if value in _CATEGORIES:
                ranges += _CATEGORIES[value]
                has_category = True
            case _:
                raise UnsupportedPatternError(f"{str(value).lower()} is not supported in a set with others")
    if is_negated:
        return _class(_ascii_but(ranges)) if has_category else _all_but(ranges)
    return _class(_within_safe(ranges))


def _ascii_but(ranges: Ranges) -> Ranges:
    """Return the safe ASCII characters outside of the ranges: what lies beyond is a word to one and none to another."""
    left = [(low, min(high, 0x7E)) for low, high in _SAFE]
    for first, last in ranges:
        pieces = [piece for low, high in left for piece in ((low, min(high, first - 1)), (max(low, last + 1), high))]
        left = sorted({(low, high) for low, high in pieces if low <= high})
    return left


def _within_safe(ranges: Ranges) -> Ranges:
    return [
        (max(first, low), min(last, high))
        for first, last in ranges
        for low, high in _SAFE
        if max(first, low) <= min(last, high)
    ]


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise UnsupportedPatternError("quotes, backslashes and control characters cannot be asked for")
    return "[" + "".join(map(_range, ranges)) + "]"


def _all_but(ranges: Ranges) -> str:
    return "[^" + "".join(map(_range, [*_UNSAFE, *ranges])) + "]"


def _range(ends: tuple[int, int]) -> str:
    first, last = ends
    return _char(first) if first == last else f"{_char(first)}-{_char(last)}"


def _char(code_point: int) -> str:
    char = chr(code_point)
    return char if (char.isalnum() and char.isascii()) or code_point >= 0x80 else f"\\x{code_point:02x}"
