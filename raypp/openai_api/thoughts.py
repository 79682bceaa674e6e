"""Thoughts beside the text of an answer: what the prompt has begun of one, and how many tokens they are."""

from __future__ import annotations

from itertools import accumulate, pairwise

from raypp.api.tokenizer import Tokenizer
from raypp.openai_api.marks import MAX_INSIDE_CHARS, MarkFinder
from raypp.openai_api.syntax import ThoughtSyntax, marks
from raypp.types import CompletionOutput


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
