"""What a log of requests says about traffic: how many prompt tokens are computed for every token of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.errors import ConfigError

_HINT = 'one JSON object a line: {"prompt_tokens": 800, "completion_tokens": 120}, or answers with such a "usage"'


@dataclass(frozen=True, kw_only=True)
class TrafficMeans:
    """Means over some requests."""

    num_requests: int
    prompt_tokens: float
    """That are computed: those found in a prefix cache are not."""
    output_tokens: float
    context_len: float
    """Tokens before each token of an answer, over all of these."""

    @property
    def prompt_tokens_per_output(self) -> float:
        """Prompt tokens that are computed for every token of an answer."""
        return self.prompt_tokens / self.output_tokens


def read_traffic(path: Path) -> TrafficMeans:
    """Return the means of a log: a line per request, its usage as OpenAI's answers have it, alone or in an answer.

    Lines of the output of a batch file are taken too; those of requests that failed are passed over.

    Raises:
        ConfigError: the file cannot be read, or says nothing of tokens.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the log of traffic cannot be read", got=f"{path}: {error}", expected=_HINT) from error
    usages = list(_usages(path, lines))
    num_output = sum(output for _, _, output in usages)
    if not num_output:
        raise ConfigError("the log of traffic has no token of an answer", got=str(path), expected=_HINT)
    num_attended = sum(output * (prompt + output / 2) for prompt, _, output in usages)
    return TrafficMeans(
        num_requests=len(usages),
        prompt_tokens=sum(prompt - cached for prompt, cached, _ in usages) / len(usages),
        output_tokens=num_output / len(usages),
        context_len=num_attended / num_output,
    )


def _usages(path: Path, lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield prompt tokens, those of them that were cached, and output tokens."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            response = entry.get("response", entry) or {}  # of a batch file; None where the request failed
            body = response.get("body", response) or {}
            usage: Mapping[str, Any] = body.get("usage", body)
            if not usage or "error" in usage:
                continue
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts = int(usage["prompt_tokens"]), int(cached), int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "a line of the log of traffic says nothing of tokens",
                got=f"line {number} of {path}: {line[:80]}",
                expected=_HINT,
            ) from error
        if min(counts) < 0 or counts[1] > counts[0]:
            raise ConfigError(
                "a line of the log of traffic has impossible numbers of tokens",
                got=f"line {number} of {path}: {line[:80]}",
                expected="numbers of at least 0, and no more cached tokens than those of the prompt",
            )
        yield counts
