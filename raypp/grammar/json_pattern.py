r"""Regular expressions for the inside of JSON strings.

What a schema says of a string's text is followed on the raw JSON. So every character class is cut down to characters
that JSON writes as themselves: no quote, no backslash, no control character. The text is then valid JSON that the
schema accepts, and a length counts characters; texts that JSON would have to escape are given up. Classes of "all but"
stay such, for xgrammar follows them much faster than the same characters counted up; docs/design/0072.

llguidance follows a string's text as it is meant, and writes it as JSON itself. Its patterns are complete but for
control characters without a short form in JSON, which it cannot write.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# The parser that `re` itself uses: there is no other one for Python's syntax, which is ECMA's in all that is kept here.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Ranges = list[tuple[int, int]]
"""Code points from first to last, ascending."""

_LAST = 0x10FFFF
_UNSAFE: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_UNWRITABLE: Ranges = [(0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F)]
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_SPACES: Ranges = [
    *[(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)],
    *[(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
]  # as of ECMA
_CATEGORIES: dict[Any, Ranges] = {
    ops.CATEGORY_DIGIT: [(0x30, 0x39)],
    ops.CATEGORY_WORD: [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    ops.CATEGORY_SPACE: _SPACES,
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
    return f"^{_RAW.all_but([])}{{{min_length},{most}}}$"


def json_pattern(pattern: str) -> str:
    """Return a pattern for the whole of a JSON string in which `pattern` is found.

    Raises:
        UnsupportedPatternError: says what is not supported.
    """
    return f"^({_RAW.of(pattern)})$"


def name_pattern(pattern: str) -> str:
    """Return a pattern as of `json_pattern` for names, of those without `>`: it ends a name in some forms of calls.

    Raises:
        UnsupportedPatternError: says what is not supported.
    """
    return f"^({_NAME.of(pattern)})$"


def other_names_pattern(names: Collection[str]) -> str:
    """Return a pattern as of `name_pattern` for all names but these."""
    is_other = re.compile(_NAME.all_but([]) + "*").fullmatch
    return f"^{_others([name for name in names if is_other(name)], _NAME)}$"


def text_pattern(pattern: str) -> str:
    """Return a pattern for the whole of a text in which `pattern` is found, of texts that JSON can write in short.

    It matches all of these, as ECMA reads the pattern: what it does not match, `pattern` is not found in.

    Raises:
        UnsupportedPatternError: says what is not supported.
    """
    return _TEXT.of(pattern)


def length_of_text_pattern(min_length: int, max_length: int | None) -> str:
    """Return a pattern as of `text_pattern` for texts of so many characters."""
    return f"{_TEXT.all_but([])}{{{min_length},{'' if max_length is None else max_length}}}"


def other_texts_pattern(texts: Collection[str]) -> str:
    """Return a pattern as of `text_pattern` for all texts but these, of at most `MAX_EXCLUDED` characters each.

    Raises:
        UnsupportedPatternError: there is a longer one.
    """
    if any(len(text) > MAX_EXCLUDED for text in texts):
        raise UnsupportedPatternError(f"all strings but one of more than {MAX_EXCLUDED} characters")
    return _others(texts, _TEXT)


MAX_EXCLUDED = 200


@dataclass(frozen=True)
class _Rewriter:
    """Writes patterns without characters that a text cannot have."""

    unsafe: Ranges
    is_complete: bool  # whether all that a class means has to be in it, or what every dialect takes for it

    def of(self, pattern: str) -> str:
        if "{," in pattern:
            raise UnsupportedPatternError("'{,' is read in two ways")
        try:
            tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedPatternError(str(error)) from None
        if self.is_complete and tree.state.flags & ~re.UNICODE:
            raise UnsupportedPatternError("flags are not supported")
        return "|".join(self._searched(branch) for branch in _branches(tree))

    def all_but(self, ranges: Ranges) -> str:
        return "[^" + "".join(map(_range, [*self.unsafe, *ranges])) + "]"

    def _searched(self, items: Sequence[Any]) -> str:
        """Return an alternative, with any text before and behind it where it is not anchored."""
        items = list(items)
        begins, ends = self.all_but([]) + "*", self.all_but([]) + "*"
        if items and items[0] == (ops.AT, ops.AT_BEGINNING):
            begins, items = "", items[1:]
        if items and items[-1] == (ops.AT, ops.AT_END):
            ends, items = "", items[:-1]
        return begins + self._sequence(items) + ends

    def _sequence(self, items: Iterable[Any]) -> str:
        return "".join(self._item(op, value) for op, value in items)

    def _item(self, op: Any, value: Any) -> str:
        match op:
            case ops.LITERAL:
                return self._class([(value, value)])
            case ops.NOT_LITERAL:
                return self.all_but([(value, value)])
            case ops.ANY:
                return self.all_but(_LINE_ENDS)
            case ops.IN:
                return self._set(value)
            case ops.BRANCH:
                return "(" + "|".join(self._sequence(branch) for branch in value[1]) + ")"
            case ops.SUBPATTERN if not value[1] and not value[2]:
                return "(" + self._sequence(value[3]) + ")"
            case ops.MAX_REPEAT | ops.MIN_REPEAT:
                least, most, repeated = value
                end = "" if most is ops.MAXREPEAT else str(most)
                return f"({self._sequence(repeated)}){{{least},{end}}}"
            case _:
                raise UnsupportedPatternError(f"{str(op).lower()} is not supported")

    def _set(self, items: Sequence[Any]) -> str:
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
                    ranges += _CATEGORIES[value] if self.is_complete else _ascii(_CATEGORIES[value])
                    has_category = True
                case ops.CATEGORY if self.is_complete or len(items) == 1:
                    ranges += _but(_CATEGORIES[_NEGATED[value]], _LAST if self.is_complete else 0x7E)
                case _:
                    raise UnsupportedPatternError(f"{str(value).lower()} is not supported in a set with others")
        if not is_negated:
            return self._class(ranges)
        # What lies beyond ASCII is a word to one and none to another.
        return self._class(_but(ranges, 0x7E)) if has_category and not self.is_complete else self.all_but(ranges)

    def _class(self, ranges: Ranges) -> str:
        safe = _but(self.unsafe, _LAST)
        kept = [
            (max(first, low), min(last, high))
            for first, last in ranges
            for low, high in safe
            if max(first, low) <= min(last, high)
        ]
        if not kept:
            raise UnsupportedPatternError("quotes, backslashes and control characters cannot be asked for")
        return "[" + "".join(map(_range, kept)) + "]"


_RAW, _TEXT = _Rewriter(_UNSAFE, is_complete=False), _Rewriter(_UNWRITABLE, is_complete=True)
_NAME = _Rewriter([*_UNSAFE, (0x3E, 0x3E)], is_complete=False)


def _others(texts: Collection[str], rewriter: _Rewriter) -> str:
    """Return a pattern for all texts but these."""
    by_first: dict[str, set[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], set()).add(text[1:])
    branches = [f"[{_char(ord(first))}]{_others(rests, rewriter)}" for first, rests in sorted(by_first.items())]
    firsts = [(ord(first), ord(first)) for first in by_first]
    branches.append(f"{rewriter.all_but(firsts)}{rewriter.all_but([])}*")
    # `?` of a group is misread by xgrammar: its last repetition may begin anew.
    return f"({'|'.join(branches)})" + ("" if "" in texts else "{0,1}")


def _branches(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the alternatives of the whole pattern. The parser puts what they have in common in front of them."""
    before, last = list(items[:-1]), items[-1] if len(items) else None
    if last is not None and last[0] is ops.BRANCH and all(item == (ops.AT, ops.AT_BEGINNING) for item in before):
        return [[*before, *branch] for branch in last[1][1]]
    return [list(items)]


def _ascii(ranges: Ranges) -> Ranges:
    return [(first, last) for first, last in ranges if last < 0x7F]


def _but(ranges: Ranges, last: int) -> Ranges:
    """Return what lies outside of the ranges, up to a last character."""
    kept, begin = list[tuple[int, int]](), 0
    for low, high in [*sorted(ranges), (last + 1, last + 1)]:
        if begin < min(low, last + 1):
            kept.append((begin, min(low, last + 1) - 1))
        begin = max(begin, high + 1)
    return kept


def _range(ends: tuple[int, int]) -> str:
    first, last = ends
    return _char(first) if first == last else f"{_char(first)}-{_char(last)}"


def _char(code_point: int) -> str:
    """Return a character as in a class.

    One of xgrammar's readers takes more than two digits for those of an escape, so none follows as itself.
    """
    char = chr(code_point)
    is_itself = code_point >= 0x80 or (char.isalnum() and char not in string.hexdigits)
    return char if is_itself else f"\\x{code_point:02x}"
