"""How much work a replica takes at once: what runs, and a bounded amount that waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raypp.errors import QueueFullError, RequestError

_NEWEST_SHARE = 0.1  # of the newest request in the mean duration
_MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class AdmissionLimits:
    """What a replica takes at once, and of one body."""

    max_running: int
    """Sequences that the engine runs at once."""
    max_queued: int
    """Sequences that may wait beside them."""
    max_unfinished_tokens: int = 1 << 23
    """Prompt tokens of all unfinished requests."""
    max_body_sequences: int = 256
    """Sequences of one body."""
    max_body_tokens: int = 1 << 20
    """Prompt tokens of one body with several prompts; a single prompt may be as long as the model's context."""

    def check_body(self, num_prompts: int, n: int) -> None:
        """Refuse a body that asks for more than is ever admitted.

        Raises:
            RequestError: it does.
        """
        limit = min(self.max_body_sequences, self.max_running + self.max_queued)
        if num_prompts * n > limit:
            raise RequestError(
                "one request asks for too many sequences",
                got=f"{num_prompts} prompts with n = {n}, which is {num_prompts * n} sequences",
                expected=f"at most {limit}: max_sequences_per_request, and no more than "
                "max_num_seqs + max_queued_requests",
                hint="send several requests, or raise these settings",
                param="prompt" if num_prompts > 1 else "n",
            )

    def check_tokens(self, num_prompts: int, num_tokens: int) -> None:
        """Refuse a body with too many prompt tokens.

        Raises:
            RequestError: it has.
        """
        if num_prompts > 1 and num_tokens > self.max_body_tokens:
            raise RequestError(
                "the prompts of one request have too many tokens",
                got=f"{num_prompts} prompts, at least {num_tokens} tokens",
                expected=f"at most max_tokens_per_request = {self.max_body_tokens}",
                hint="send several requests, or raise max_tokens_per_request",
                param="prompt",
            )


class Admission:
    """Counts the unfinished sequences and prompt tokens of one replica. Lives on one event loop."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            limits: What is taken at once.
            clock: Returns seconds; for tests.
        """
        self.limits = limits
        self._clock = clock
        self._mean_s = 1.0
        self.num_unfinished = 0
        self.num_unfinished_tokens = 0
        self.num_refused = 0

    @contextmanager
    def admit(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Count a request's work while it runs.

        Args:
            num_sequences: Its prompts times `n`.
            num_tokens: Of all its prompts; continuations share their prompt.

        Raises:
            QueueFullError: too much is unfinished already.
        """
        self._check_room(num_sequences, num_tokens)
        self.num_unfinished += num_sequences
        self.num_unfinished_tokens += num_tokens
        started = self._clock()
        try:
            yield
        finally:
            self.num_unfinished -= num_sequences
            self.num_unfinished_tokens -= num_tokens
            self._mean_s += _NEWEST_SHARE * (self._clock() - started - self._mean_s)

    def check(self, num_prompts: int, n: int) -> None:
        """Refuse a body before it is tokenized, if it can be told by then.

        Raises:
            RequestError: it asks for more than is ever admitted.
            QueueFullError: too much is unfinished already.
        """
        self.limits.check_body(num_prompts, n)
        self._check_room(num_prompts * n, 0)

    def _check_room(self, num_sequences: int, num_tokens: int) -> None:
        limits = self.limits
        if self.num_unfinished + num_sequences > limits.max_running + limits.max_queued:
            raise self._refusal(
                f"{self.num_unfinished} unfinished, and {num_sequences} more",
                f"at most {limits.max_running} running and {limits.max_queued} waiting",
            )
        # A prompt that is longer than the whole queue is let in alone: it would else never be.
        if (
            num_tokens
            and self.num_unfinished_tokens + num_tokens > limits.max_unfinished_tokens
            and self.num_unfinished
        ):
            raise self._refusal(
                f"{self.num_unfinished_tokens} prompt tokens unfinished, and {num_tokens} more",
                f"at most max_unfinished_tokens = {limits.max_unfinished_tokens}",
            )

    def _refusal(self, got: str, expected: str) -> QueueFullError:
        self.num_refused += 1
        return QueueFullError(
            "too many requests are waiting", retry_after_s=self._retry_after_s(), got=got, expected=expected
        )

    def _retry_after_s(self) -> int:
        """Return about how long it takes until as many have ended as wait now, in whole seconds from 1 to 60."""
        max_running = self.limits.max_running
        waves = max(self.num_unfinished - max_running, 1) / max_running
        return max(1, min(math.ceil(self._mean_s * waves), _MAX_RETRY_AFTER_S))
