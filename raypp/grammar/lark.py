"""Texts, patterns, schemas and EBNF as llguidance's form of Lark has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from raypp.grammar.schema_check import MAX_COUNT, cannot_be_enforced, pattern_of
from raypp.grammar.schema_rewrite import rewritten

LARK_MARK = "%llguidance"
"""With it begins a grammar in llguidance's form of Lark."""

JSON_FORM: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    # Without "u": a name that is taken could be written once more with escapes, for any value.
    "json_allowed_escapes": 'nrbtf\\"',
}
"""How JSON is written."""

_MAX_LEVELS = 1_500  # of 3 KiB of stack each
_MAX_SHOWN_CHARS = 80
# As llguidance's lexer has them: a pattern may have several lines, and a special token quotes and #.
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|//[^\n]*|#[^\n]*|<[^<>\s]+>|%json\s*')
_EBNF_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* | (?P<rule>[^\W\d][\w.-]*)\s*::= | (?P<name>[^\W\d][\w.-]*) | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<chars>\[\^?(?:\\.|[^\]\\])*\]) | (?P<sign>[()|*+?.]) | (?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\s", "D": r"\D", "W": "[^0-9A-Za-z_]", "S": r"\S"}


def json_rule(schema: Any) -> str:
    """Return the body of a rule for the JSON that a schema accepts.

    Raises:
        RequestError: a part of it could not be enforced.
    """
    return f"%json {json.dumps({**rewritten(schema), 'x-guidance': JSON_FORM})}"


def check_schema(schema: Any) -> None:
    """Check that a grammar can be made of a schema, without a vocabulary.

    Raises:
        RequestError: a part of it could not be enforced.
    """
    from llguidance import LLMatcher

    if said := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}")):
        raise cannot_be_enforced("#", reason_of(said))


def reason_of(said: str) -> str:
    """Return in a line why llguidance takes no grammar, of what it says in many: of a pattern, which part and why."""
    at = re.match(r"at \d+\(\d+\): ", said)
    said = said.partition("failed to compile JSON schema: ")[2] or said
    said = re.sub(r'^(?:at \d+\(\d+\): )?invalid regex ".*" \(in regex\): ', at[0] if at else "", said)
    first, _, rest = said.partition("\n")
    why = re.search("^error: (.*)", rest, re.MULTILINE)
    if not first.endswith("regex parse error:") or not why:
        return first
    place = re.match(r" {4}(.*)\n {4}( *)(\^+)", rest)
    if not place:  # a pattern of several lines
        return f"{first} {why[1]}"
    pattern, begin = place[1], len(place[2])
    marked = pattern[begin : begin + len(place[3])][:_MAX_SHOWN_CHARS]
    around = pattern[max(begin - _MAX_SHOWN_CHARS, 0) : begin + _MAX_SHOWN_CHARS]
    return f"{first} {why[1]}: {marked or 'its end'} in {around}"


def literal(text: Any) -> str:
    """Return a text.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no text")
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Return a regular expression, which all of a text matches.

    Raises:
        ValueError: it would be read in another way.
    """
    from llguidance import regex_to_lark

    bare = pattern.removeprefix("^")
    bare = bare[:-1] if re.search(r"(?<!\\)(?:\\\\)*\$\Z", bare) else bare
    if re.search(r"(?<!\\)(?:\\\\)*\\\Z", bare):  # regex_to_lark would drop it
        raise ValueError(f"the pattern {pattern[:40]!r} ends with a \\ that escapes nothing")
    return f"/{regex_to_lark(pattern_of(bare), 'dw')}/" if bare else '""'


def one_of(texts: Iterable[str]) -> str:
    """Return one of several expressions."""
    several = list(texts)
    return several[0] if len(several) == 1 else f"({' | '.join(several)})"


def lark_of_grammar(text: str) -> str:
    """Return a grammar's rules: it is Lark, of which the schemas are made enforceable, or EBNF.

    Raises:
        RequestError: a schema in it could not be enforced.
        ValueError: it is no EBNF.
    """
    if not text.lstrip().startswith(LARK_MARK):
        lark = _lark_of_ebnf(text)
        _check_depth(_LARK_TOKEN.sub("", lark))
        return lark
    pieces, plain, at = list[str](), list[str](), 0
    while found := _LARK_TOKEN.search(text, at):
        pieces.append(text[at : found.start()])
        plain.append(pieces[-1])
        at = found.end()
        if not found[0].startswith("%json"):
            pieces.append(found[0])
            continue
        schema, after = json.JSONDecoder().raw_decode(text, at)
        num_lines = text.count("\n", found.start(), after)  # as many as before: errors say in which line they are
        pieces.append(json_rule(schema).replace(" ", " " + "\n" * num_lines, 1))
        at = after
    _check_depth("".join([*plain, text[at:]]))
    return "".join([*pieces, text[at:]])


def _check_depth(plain: str) -> None:
    """Refuse rules that llguidance might follow too deeply: its stack would overflow, which ends the process."""
    levels = depth = most = 0
    for sign in re.findall(r"[:()\[\]{}]", plain):
        depth += (sign in "([{") - (sign in ")]}")
        most = max(most, depth)
        if sign == ":":
            levels, most = levels + 1 + most, depth
    if levels + most > _MAX_LEVELS:
        raise ValueError(f"its rules, each with its brackets, are {levels + most:,} levels, at most {_MAX_LEVELS:,}")


def _lark_of_ebnf(text: str) -> str:
    """Return EBNF, as of GGML, as Lark.

    Its terminals are characters: llguidance's lexer takes the longest text of a terminal, so `/[a-z]+/ "x"` would
    never come to the `x`. Where no rule refers back to itself, all of it is one terminal.
    """
    rules, uses = _Rules(text).read()
    if "root" not in rules:
        raise ValueError("it has no rule root")
    if missing := sorted({name for used in uses.values() for name in used} - rules.keys()):
        raise ValueError(f"it has no rule {missing[0]}")
    try:
        TopologicalSorter(uses).prepare()
        letter = "T"
    except CycleError:
        letter = "r"
    numbers = {name: f"{letter}{number}" for number, name in enumerate(rules)}
    lines = [f"{numbers[name]}: {re.sub('<([^<>]*)>', lambda found: numbers[found[1]], body)}"
             for name, body in rules.items()]  # fmt: skip
    return "\n".join([f"start: {numbers['root']}", *lines])


class _Rules:
    """Reads EBNF: each rule becomes an expression of Lark with the names of rules within `<>`."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), ("rule", "")]
        self._at = 0
        self._uses = set[str]()

    def read(self) -> tuple[dict[str, str], dict[str, set[str]]]:
        """Return the rules, and which rules each of them uses."""
        rules, uses = dict[str, str](), dict[str, set[str]]()
        while self._at < len(self._tokens) - 1:
            kind, name = self._next()
            if kind != "rule" or name in rules:
                raise ValueError(f"{name!r} where a rule should begin" if kind != "rule" else f"two rules {name}")
            self._uses = set()
            rules[name] = self._choice()
            uses[name] = self._uses
        return rules, uses

    def _next(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _choice(self) -> str:
        branches = [self._sequence()]
        while self._tokens[self._at] == ("sign", "|"):
            self._at += 1
            branches.append(self._sequence())
        return " | ".join(branches)

    def _sequence(self) -> str:
        parts = list[str]()
        while (token := self._tokens[self._at])[0] != "rule" and token not in (("sign", "|"), ("sign", ")")):
            kind, text = self._next()
            if kind == "times" or (kind == "sign" and text in "*+?"):
                if not parts or max(map(int, re.findall(r"\d+", text)), default=0) > MAX_COUNT:
                    raise ValueError(f"{text} behind nothing, or more than {MAX_COUNT:,} times")
                times = "".join(text.split())
                parts[-1] = '""' if re.fullmatch(r"\{(0+,)?0+\}", times) else f"({parts[-1]}){times}"
            elif kind == "sign" and text == "(":
                parts.append(f"({self._choice()})")
                if self._next() != ("sign", ")"):
                    raise ValueError("a ( without its )")
            elif kind == "name":
                self._uses.add(text)
                parts.append(f"<{text}>")
            elif kind == "text":
                chars = [literal(char).replace("<", r"\u003c") for char, _ in _chars(text[1:-1])]
                parts.append(f"({' '.join(chars)})" if len(chars) > 1 else "".join(chars) or '""')
            else:
                parts.append("/(?s:.)/" if kind == "sign" else _char_class(text))
        return " ".join(parts) or '""'


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _EBNF_TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 20]!r} in line {text.count(chr(10), 0, at) + 1} is no EBNF")
        at = found.end()
        if found.lastgroup:
            yield found.lastgroup, found[found.lastgroup]


def _chars(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a text, and whether each was escaped."""
    for two, four, eight, escaped, plain in _CHAR.findall(text):
        if code := two or four or eight:
            yield chr(int(code, 16)), True
        else:
            yield (plain, False) if plain else (_ESCAPES.get(escaped, escaped), True)


def _char_class(text: str) -> str:
    """Return a class of characters with each as its code point, so that none means anything."""
    is_negated = text.startswith("[^")
    body, parts = text[2:-1] if is_negated else text[1:-1], list[str]()
    for piece in re.split(r"(\\[dwsDWS])", body):
        if re.fullmatch(r"\\[dwsDWS]", piece):
            parts.append(_CLASSES[piece[1]])
            continue
        chars = [*_chars(piece)]
        for index, (char, is_escaped) in enumerate(chars):
            is_range = char == "-" and not is_escaped and 0 < index < len(chars) - 1
            parts.append("-" if is_range else rf"\x{{{ord(char):x}}}")
    if not parts:
        raise ValueError(f"{text} without a character")
    return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"
