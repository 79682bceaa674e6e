"""How a model writes thoughts and tool calls into its text, as data; how arguments become JSON as the text comes."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

from pydantic_core import from_json

from raypp.api.tokenizer import Tokenizer
from raypp.grammar.structural_tag import PARAMETER_MARKS, ParameterMarks
from raypp.openai_api.tools import ALL_TYPES, has_type, parameter_types
from raypp.types import CompletionOutput


class JsonScanner:
    """Counts braces outside of strings."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_complete = False
        self.control_chars: list[int] = []
        """Where in the text that was read last there are control characters inside of strings: JSON has none there."""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0, *, stop: str = "") -> int:
        """Read on; return where in the text the object ends, which begins with the first character ever.

        Args:
            text: What comes next.
            start: Where in it.
            stop: A character before which to leave off, outside of strings; empty: none is.
        """
        self.control_chars.clear()
        for index in range(start, len(text)):
            char = text[index]
            if self.is_complete:
                return index
            if self._is_in_string:
                if char < " ":
                    self.control_chars.append(index)
                self._read_in_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
                self.is_begun = True
            elif char in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
            elif char == stop:
                return index
        return len(text)

    def _read_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    style: ClassVar[str | None]
    """How a form writes them: `style` of a `json_schema` in structural tags. None: no form is known."""

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        """Begin before the first character.

        Args:
            end: What ends the call; arguments that are no JSON end there too. Empty: nothing does.
            schema: Of the arguments, as the request has it; empty if it has none.
        """

    @property
    def is_complete(self) -> bool:
        """Whether all of them were read."""

    def may_begin(self, text: str) -> bool | None:
        """Return whether a text begins with arguments; None if there is too little of it to say."""

    def feed(self, text: str) -> tuple[str, int]:
        """Return what of the JSON object has become clear, and how many characters of the text were read for it.

        Args:
            text: What comes next: what was not read the last time, and what is new.
        """


class JsonArguments:
    """Arguments that are a JSON object: they are passed on as they are, with control characters in strings escaped.

    Where there should be one, null, an empty list and nothing at all are the empty object.
    """

    style: ClassVar[str | None] = "json"
    _NOTHING = ("null", "[]")

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        self._nothing = (*self._NOTHING, end) if end else self._NOTHING
        self._scanner = JsonScanner()
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return whether a brace comes first, or what stands for an empty object."""
        text = text.lstrip()
        if text.startswith(("{", *self._nothing)):
            return True
        return None if any(nothing.startswith(text) for nothing in self._nothing) else False

    def feed(self, text: str) -> tuple[str, int]:
        """Return the text up to the last brace; if that lacks, up to the call's end, outside of strings."""
        start = len(text) - len(text.lstrip()) if not self._scanner.is_begun else 0
        if not self._scanner.is_begun and not text.startswith("{", start):
            self.is_complete = text.startswith(self._nothing, start)
            word = next((word for word in self._NOTHING if text.startswith(word, start)), "")
            return ("{}", start + len(word)) if self.is_complete else ("", 0)
        at, control_chars = start, list[int]()
        while not self.is_complete and at < len(text):
            at = self._scanner.feed(text, at, stop=self._end[:1])
            control_chars += self._scanner.control_chars
            self.is_complete = self._scanner.is_complete
            rest = text[at : at + len(self._end)]
            if self.is_complete or not rest:
                break
            if rest == self._end:
                self.is_complete = True
            elif self._end.startswith(rest):
                break  # it may become the end
            else:
                at += 1
        pieces = list[str]()
        for place in control_chars:
            pieces += text[start:place], _escaped(text[place])
            start = place + 1
        return "".join((*pieces, text[start:at])), at


class XmlParameters:
    """Arguments with marks around names and values, see `PARAMETER_MARKS`; here as Qwen3-Coder writes them.

    A value ends where the next one begins behind its mark, or the call ends: other marks are part of it. The schema
    says which types it may have, see `parameter_types`. What is not certain to be a text is JSON, or what Python writes
    in its place (`None`), where that has one of the types; else it is a text. Certain texts are passed on as they come.
    """

    style: ClassVar[str | None] = "qwen_xml"
    marks: ClassVar[ParameterMarks] = PARAMETER_MARKS["qwen_xml"]

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        marks = self.marks
        behind_name = r"\s*".join(map(re.escape, marks.value))
        self._begin = re.compile(rf"\s*{re.escape(marks.name)}(.*?){behind_name}", re.DOTALL)
        self._name_mark, self._value_end = marks.name, marks.end
        self._line = "\n" if marks.has_lines else ""
        self._end = end
        self._behind_value = (marks.name, end)  # what follows a value's end
        properties = schema.get("properties")
        of_names = properties if isinstance(properties, Mapping) else {}
        self._types = {name: parameter_types(of_name, schema) for name, of_name in of_names.items()}
        self._num_values = 0
        self._name: str | None = None  # of the value that is being read
        self._is_open = False  # whether its text has begun
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return True: whatever comes is a list of parameters, maybe an empty one."""
        return True

    def feed(self, text: str) -> tuple[str, int]:
        """Return the JSON of what has been read."""
        out, at = "", 0
        while not self.is_complete:
            if self._name is None:
                begin, end = self._begin.match(text, at), text.find(self._end, at)
                if begin is not None and not 0 <= end < begin.end():
                    out += ("{" if not self._num_values else ", ") + json.dumps(begin[1].strip()) + ": "
                    self._name, at = begin[1].strip(), begin.end()
                    self._num_values += 1
                elif end >= 0:
                    nested = text.find(self._name_mark, at, end)
                    if nested > at:  # behind something that is no parameter
                        at = nested
                        continue
                    out, at = out + ("}" if self._num_values else "{}"), end
                    self.is_complete = True
                else:
                    break
            else:
                value, num_read, is_whole = self._value(text[at:])
                out, at = out + value, at + num_read
                if not is_whole:
                    break
                self._name = None
        return out, at

    def _value(self, text: str) -> tuple[str, int, bool]:
        """Return the JSON of a value as far as it is certain, the characters read for it, and whether it is whole."""
        end, is_whole = self._end_of(text)
        types = self._types.get(self._name or "", ALL_TYPES)
        if types != {"string"}:
            return (_json_of(text[:end], types), end + len(self._value_end), True) if is_whole else ("", 0, False)
        line, opening = self._line, "" if self._is_open else '"'
        start = len(line) if line and not self._is_open and text.startswith(line) else 0
        if is_whole:
            self._is_open = False
            return opening + _escaped(text[start:end].removesuffix(line)) + '"', end + len(self._value_end), True
        end -= len(line) if line and text.endswith(line, start, end) else 0  # it may be the value's end
        if end <= start:
            return "", 0, False
        self._is_open = True
        return opening + _escaped(text[start:end]), end, False

    def _end_of(self, text: str) -> tuple[int, bool]:
        """Return how many characters are certain to be the value's, and whether it ends behind them."""
        at = 0
        mark = self._value_end
        while (end := text.find(mark, at)) >= 0:
            at = end + len(mark)
            behind = text[at:].lstrip()
            if behind.startswith(self._behind_value):
                return end, True
            if any(mark.startswith(behind) for mark in self._behind_value):
                return end, False
        for tail in range(min(len(mark), len(text)), 0, -1):
            if mark.startswith(text[-tail:]):
                return len(text) - tail, False
        return len(text), False


class MinimaxParameters(XmlParameters):
    """As MiniMax-M2 writes them: `<parameter name="NAME">`, the value, `</parameter>`."""

    style: ClassVar[str | None] = "minimax_xml"
    marks = PARAMETER_MARKS["minimax_xml"]


class GlmParameters(XmlParameters):
    """As GLM-4.5 and later write them: `<arg_key>NAME</arg_key>`, `<arg_value>`, the value, `</arg_value>`."""

    style: ClassVar[str | None] = "glm_xml"
    marks = PARAMETER_MARKS["glm_xml"]

    def may_begin(self, text: str) -> bool | None:
        """Return whether a name's mark or the call's end comes first: a `<` behind a word announces nothing yet."""
        text = text.lstrip()
        if text.startswith(self._behind_value):
            return True
        return None if any(mark.startswith(text) for mark in self._behind_value) else False


class GemmaArguments:
    """Arguments as Gemma 4 writes them: `{key:<|"|>text<|"|>,n:1,list:[true,{a:null}]}`; texts have no escapes.

    Quoted names and JSON's texts are taken too. A bare value that is no JSON is a text. Only texts between the marks of
    their own may hold the call's end.
    """

    style: ClassVar[str | None] = None
    _QUOTE = '<|"|>'
    _NAME = re.compile(
        r'\s*(?:<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([^\s:{}\[\],<"](?:[^:{}\[\],<"]*[^\s:{}\[\],<"])?))\s*:',
        re.DOTALL,
    )
    _TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        self._word = re.compile(rf"(?:(?!{re.escape(end)})[^,{{}}\[\]])+(?=[,}}\]]|{re.escape(end)})")
        self._open = list[str]()  # the brackets that are not closed
        self._is_name_next = False
        self._is_in_text = False
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return whether a brace comes first."""
        text = text.lstrip()
        return text.startswith("{") if text else None

    def feed(self, text: str) -> tuple[str, int]:
        """Return the JSON of what has been read."""
        out, at = list[str](), 0
        while at < len(text) and not self.is_complete:
            written, end = self._in_text(text, at) if self._is_in_text else self._outside(text, at)
            out.append(written)
            if end == at and not self.is_complete:
                break  # more of it has to come
            at = end
        return "".join(out), at

    def _in_text(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(self._QUOTE, at)
        if end >= 0:
            self._is_in_text = False
            return _escaped(text[at:end]) + '"', end + len(self._QUOTE)
        tails = range(min(len(self._QUOTE) - 1, len(text) - at), 0, -1)
        kept = next((tail for tail in tails if self._QUOTE.startswith(text[-tail:])), 0)
        return _escaped(text[at : len(text) - kept]), len(text) - kept

    def _outside(self, text: str, at: int) -> tuple[str, int]:
        """Return the JSON of the next piece that is no part of a text, and where it ends; `at`: it is not there yet."""
        char, rest = text[at], text[at : at + max(len(self._QUOTE), len(self._end))]
        if char.isspace():
            return "", at + 1
        if rest == self._end or (char == "<" and self._end.startswith(rest)):
            self.is_complete = rest == self._end
            return "", at
        if char in "}]":
            self.is_complete = len(self._open) <= 1
            self._is_name_next = False
            if self._open:
                self._open.pop()
            return char, at + 1
        if self._is_name_next and char != ",":
            found = self._before_end(self._NAME.match(text, at), text, at)
            if found is None:
                return self._unread(text, at)
            self._is_name_next = False
            quoted, as_json, bare = found.groups()
            return f"{as_json or json.dumps(quoted if bare is None else bare, ensure_ascii=False)}: ", found.end()
        if char in "{[":
            self._open.append(char)
            self._is_name_next = char == "{"
            return char, at + 1
        if char == ",":
            self._is_name_next = self._open[-1:] == ["{"]
            return ", ", at + 1
        if rest.startswith(self._QUOTE):
            self._is_in_text = True
            return '"', at + len(self._QUOTE)
        if self._QUOTE.startswith(rest):
            return "", at
        found = self._before_end((self._TEXT if char == '"' else self._word).match(text, at), text, at)
        if found is None:
            return self._unread(text, at)
        return _json_of(found[0], ALL_TYPES), found.end()

    def _before_end(self, found: re.Match[str] | None, text: str, at: int) -> re.Match[str] | None:
        """Return a piece if the call's end does not stand in it."""
        return None if found is None or self._end in text[at : found.end()] else found

    def _unread(self, text: str, at: int) -> tuple[str, int]:
        """Go to the call's end, if it has come: what stands before it is no argument."""
        end = text.find(self._end, at)
        self.is_complete = end >= 0
        return "", max(end, at)


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that has one of these types, as far as its text can be read as one of them."""
    for read in (from_json, literal_eval):
        try:
            value = read(text.strip())
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        is_json = read is from_json and not (isinstance(value, str) and types <= {"string", "null"})
        is_clear = is_json or value is None or isinstance(value, bool)  # no text that looks like it
        if "string" not in types or (is_clear and has_type(value, types)):
            return written
    bare = text.removeprefix("\n").removesuffix("\n") if "string" in types else text.strip()
    return json.dumps(bare, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Mark:
    """Something in the text that is no text: `opening` alone, or all from `opening` through `closing`."""

    opening: str
    closing: str = ""
    """Ends the mark, at most MAX_INSIDE_CHARS behind the opening. A `{` or `<` is left to the arguments it begins."""
    pattern: str = ""
    """A regular expression to be found between opening and closing; its group `name` is the function. Of several marks
    with the same opening, and then the same closing, the first one whose pattern is found counts."""


def marks(*openings: str) -> tuple[Mark, ...]:
    """Return marks that are nothing but their openings."""
    return tuple(map(Mark, openings))


@dataclass(frozen=True, kw_only=True)
class ThoughtSyntax:
    """How a family of models writes thoughts."""

    begins: tuple[Mark, ...]
    """Each begins a thought."""
    ends: tuple[str, ...]
    """Each ends one."""
    is_anywhere: bool = False
    """Whether thoughts come between other texts too; False: one, in front of everything else."""
    dropped: tuple[Mark, ...] = ()
    """What else is no text, wherever it stands."""
    thought: str
    """A whole thought, as a form writes it in front of an answer, with `$thought`."""
    answer: str = "$answer"
    """An answer that is neither thought nor call, as a form writes it, with `$answer`."""
    template_field: str = ""
    """What chat templates call the thought of an earlier message. Beside tool calls they take either that or content:
    the content is put behind the thought. Empty: `reasoning_content`, beside whatever else the message has."""
    in_template: tuple[str, ...] = ()
    """A chat template that has all of these is of such a model. Empty: no template tells."""
    in_vocabulary: tuple[str, ...] = ()
    """A vocabulary that has all of these is of such a model, unless the template says otherwise. Empty: none tells."""

    def literals(self) -> list[str]:
        """Return all texts that marks are made of."""
        return [*_literals((*self.begins, *self.dropped)), *self.ends, self.thought, self.answer]


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How a family of models writes a tool call.

    Where the pattern of a beginning has a group `name`, the arguments come next; else a JSON object with `name` and
    `arguments` (or `parameters`).
    """

    begins: tuple[Mark, ...]
    """Each announces a call, wherever it stands."""
    end: str = ""
    """Ends a call. Empty: the object's last brace does."""
    dropped: tuple[Mark, ...] = ()
    """What else is no text, for instance marks around all calls."""
    may_be_bare: bool = False
    """Whether an object with a name and arguments is a call without a mark, at the start of an answer."""
    between: str = ""
    """Without `end`: characters that stand between calls, or behind the last one. An object there is a call too."""
    arguments: type[ArgumentsReader] = JsonArguments
    """Reads the arguments."""
    call: str = ""
    """A call as a form writes it, with `$name` and `$arguments`. Empty: calls are read only, and a request that forces
    one, or has a strict function, is refused."""
    calls: str = "$calls"
    """All calls of an answer as a form writes them, with `$calls`."""
    separator: str | None = None
    """Between the calls of one answer that is held to a form; None: such an answer has one call, as have the messages
    that the chat template is shown."""
    needs_descriptions: bool = False
    """Whether the chat template fails where a function has no description: an empty one is shown then."""
    in_template: tuple[str, ...] = ()
    """A chat template that has all of these is of such a model. Empty: no template tells."""
    in_vocabulary: tuple[str, ...] = ()
    """A vocabulary that has all of these is of such a model, unless the template says otherwise. Empty: none tells."""

    def __post_init__(self) -> None:
        """Check that calls can be written, if there is something to write."""
        for text, values in ((self.call or "$name$arguments", ("$name", "$arguments")), (self.calls, ("$calls",))):
            if any(text.count(value) != 1 for value in values):
                raise ValueError(f"a CallSyntax writes {text!r}, which has not {' and '.join(values)}, once each")
        before, _, behind = self.calls.partition("$calls")
        if bool(before) != bool(behind):
            raise ValueError(f"a CallSyntax writes {self.calls!r}: around all calls stand two marks, or none")

    @property
    def trigger(self) -> str:
        """With what free text goes over into a call that is held to a form."""
        written = self.calls.partition("$calls")[0] or self.call
        openings = sorted((mark.opening for mark in (*self.begins, *self.dropped)), key=len, reverse=True)
        return next((text for text in openings if written.startswith(text)), written.partition("$name")[0])

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls as a form writes them.

        Args:
            calls: Names and arguments, the latter as JSON. One if there is no separator.
        """
        texts = [self.call.replace("$name", name).replace("$arguments", arguments) for name, arguments in calls]
        return self.calls.replace("$calls", (self.separator or "").join(texts))

    def literals(self) -> list[str]:
        """Return all texts that marks are made of."""
        return [*_literals((*self.begins, *self.dropped)), self.end, self.call, self.calls]


def _literals(of: Sequence[Mark]) -> Iterable[str]:
    for mark in of:
        yield from (mark.opening, mark.closing, mark.pattern)


def uses(literals: Sequence[str], token: str) -> bool:
    """Return whether a token's text is part of what a syntax is written with."""
    return any(token in text or re.escape(token) in text for text in literals)


@dataclass(frozen=True)
class MessageSyntax:
    """How one model writes a message: what its text may hold besides the answer."""

    thoughts: ThoughtSyntax | None = None
    calls: CallSyntax | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Tokens of these syntaxes that have no text unless they are asked for: their text and their ids."""
    template_switches: frozenset[str] = frozenset()
    """What of `enable_thinking` and `reasoning_effort` the chat template reads."""

    def shown_tokens(self, *, calls: bool) -> tuple[int, ...]:
        """Return the special tokens that have to be in the text to read it.

        Args:
            calls: Whether calls are looked for.
        """
        read = (self.thoughts, self.calls if calls else None)
        literals = [text for syntax in read if syntax is not None for text in syntax.literals()]
        return tuple(token_id for text, token_id in self.special_tokens.items() if uses(literals, text))


PLAIN_SYNTAX = MessageSyntax()
"""Of a model that writes answers and nothing else."""


MAX_INSIDE_CHARS = 256
"""Between the opening and the closing of a mark. What is longer is text: a stream must not be held back for ever."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in a text."""

    mark: Mark
    start: int
    end: int  # where the text goes on
    name: str | None  # of a function


class MarkFinder:
    """Finds the first of some marks."""

    def __init__(self, among: Sequence[Mark]) -> None:
        self.marks = tuple(among)
        self._by_opening: dict[str, list[Mark]] = {}
        for mark in among:
            self._by_opening.setdefault(mark.opening, []).append(mark)
        openings = sorted(self._by_opening, key=len, reverse=True)
        self._openings = re.compile("|".join(map(re.escape, openings)) or r"(?!)")
        self._longest = len(openings[0]) if openings else 0

    def __bool__(self) -> bool:
        return bool(self._by_opening)

    def find(self, text: str, *, is_last: bool) -> tuple[int, Found | None]:
        """Return how many characters are certainly no mark, and the mark behind them.

        Without a mark, the characters behind those may become one: more text tells. With the last text they do not.
        """
        undecided = len(text) if is_last else self._first_beginning(text)
        at = 0
        while (match := self._openings.search(text, at)) is not None and match.start() < undecided:
            found, may_be = self._whole(text, match, is_last)
            if found is not None:
                return found.start, found
            if may_be:
                return match.start(), None
            at = match.end()
        return undecided, None

    def _first_beginning(self, text: str) -> int:
        """Return where the text's end begins that may be the beginning of an opening; its length if none may."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(len(opening) > len(end) and opening.startswith(end) for opening in self._by_opening):
                return start
        return len(text)

    def _whole(self, text: str, opening: re.Match[str], is_last: bool) -> tuple[Found | None, bool]:
        """Return the mark that begins here; if there is none yet, whether there may be one."""
        for mark in self._by_opening[opening.group()]:
            inside, name = opening.end(), None
            end = inside
            if mark.closing:
                most = inside + MAX_INSIDE_CHARS + len(mark.closing)
                closing = text.find(mark.closing, inside, most)
                if closing < 0:
                    return None, not is_last and len(text) < most
                match = re.search(mark.pattern, text[inside:closing])
                if match is None:
                    continue
                name = match.groupdict().get("name")
                end = closing if mark.closing in "{<" else closing + len(mark.closing)
            return Found(mark, opening.start(), end, name), False
        return None, False


def begun_in(prompt: str, thoughts: ThoughtSyntax | None, continued: str = "") -> str:
    """Return the mark that a prompt leaves off with, as far as it got; empty if it leaves off with none.

    A whole mark is the beginning of a thought. A part of one is of a message whose kind the model is to say.

    Args:
        prompt: The rendered conversation.
        thoughts: How the model writes them.
        continued: The message that the model goes on with, if it does; it may have begun a thought.
    """
    if thoughts is None:
        return ""
    ended_at = max(map(continued.rfind, thoughts.ends), default=-1)
    for mark in thoughts.begins:
        if mark.closing:
            at = prompt.rfind(mark.opening)  # one further back is of an earlier message
            begun = prompt[at:]
            if at >= 0 and len(begun) <= MAX_INSIDE_CHARS and mark.closing not in begun:
                return begun
        elif prompt.rstrip().endswith(mark.opening) or continued.rfind(mark.opening) > ended_at:
            return mark.opening
    return ""


def is_thought(begun: str, thoughts: ThoughtSyntax | None) -> bool:
    """Return whether what a prompt has begun is a thought."""
    return thoughts is not None and any(mark.opening == begun and not mark.closing for mark in thoughts.begins)


def num_thought_tokens(
    tokenizer: Tokenizer, thoughts: ThoughtSyntax | None, answer: CompletionOutput, *, begun: str = ""
) -> int:
    """Return how many tokens of an answer are thoughts, their marks included.

    Args:
        tokenizer: The model's.
        thoughts: How the model writes them.
        answer: As far as it has come.
        begun: What the prompt has begun; see `begun_in`.
    """
    if thoughts is None:
        return 0
    pieces = [tokenizer.token_text(token_id) for token_id in answer.token_ids]
    text = begun + "".join(pieces)
    begins, ends = MarkFinder(thoughts.begins), MarkFinder(marks(*thoughts.ends))
    spans, at = list[tuple[int, int]](), 0
    while (found := begins.find(rest := text[at:], is_last=True)[1]) is not None:
        if not thoughts.is_anywhere and rest[: found.start].strip():
            break
        end = ends.find(rest[found.end :], is_last=True)[1]
        stop = len(rest) if end is None else found.end + end.end
        spans.append((at + found.start, at + stop))
        at += stop
        if not thoughts.is_anywhere:
            break
    ends_at = list(accumulate(map(len, pieces), initial=len(begun)))
    return sum(
        any(start < stop_at and end > start_at for start, end in spans)
        for start_at, stop_at in pairwise(ends_at)
        if stop_at > start_at
    )
