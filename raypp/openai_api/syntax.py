"""How a model writes thoughts and tool calls into its text, as data. `raypp.openai_api.syntaxes` holds those known.

A syntax is made of marks. Reading looks for them in the text, in whatever pieces it comes; what a form holds a call to
is one line of text with `$name` and `$arguments`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from raypp.api.tokenizer import Tokenizer
from raypp.openai_api.call_arguments import ArgumentsReader, JsonArguments
from raypp.types import CompletionOutput


@dataclass(frozen=True)
class Mark:
    """Something in the text that is no text: `opening` alone, or all from `opening` through `closing`."""

    opening: str
    closing: str = ""
    """Ends the mark, at most `raypp.openai_api.syntax.MAX_INSIDE_CHARS` behind the opening. A brace is left to the
    arguments that it begins."""
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
    """Between the calls of one answer that is held to a form; None: such an answer has one call."""
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

    @property
    def has_thoughts(self) -> bool:
        """Whether the model was taught to think."""
        return self.thoughts is not None

    def shown_tokens(self, *, calls: bool) -> tuple[int, ...]:
        """Return the special tokens that have to be in the text to read it.

        Args:
            calls: Whether calls are looked for.
        """
        read = (self.thoughts, self.calls if calls else None)
        literals = [text for syntax in read if syntax is not None for text in syntax.literals()]
        return tuple(token_id for text, token_id in self.special_tokens.items() if uses(literals, text))

    def reads(self, name: str) -> bool:
        """Return whether the chat template reads one of these values."""
        return name in self.template_switches


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
                end = closing if mark.closing == "{" else closing + len(mark.closing)
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
