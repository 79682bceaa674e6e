"""The requests under a grammar: held back until theirs is compiled, then told about step by step.

    add --> OpenGrammar ... first masks --> scheduler ... a row --> masks to the last stage
                                                 |
            StepResult --> tokens, next drafts --> GrammarAdvance ... GrammarMasks --> masks to the last stage

The driver never waits for a grammar. What comes late costs its own request a step, see `raypp.messages.MaskUpdate`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raypp.driver.grammar_process import GrammarBackend, GrammarProcessDied
from raypp.errors import RequestError
from raypp.grammar.messages import CloseGrammar, GrammarAdvance, GrammarMasks, OpenGrammar, Refused
from raypp.messages import NO_INT32S, NO_STEP, Int32s, MaskUpdate
from raypp.scheduler.request import Request, RequestUpdate
from raypp.structured_outputs import source_of

_MASK_TIMEOUT_S = 20.0
"""A mask takes microseconds. Whoever takes this long has a grammar that grows worse with every token."""

_MAX_RESTARTS = 2

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _LatestMasks:
    after_step: int
    num_accepted: int
    draft_ids: Int32s
    bitmasks: Int32s


@dataclass(eq=False, slots=True)
class _Text:
    """A request and what is known of its grammar."""

    number: int
    request: Request
    is_admitted: bool = False
    row: int = -1
    start_step: int = NO_STEP
    latest: _LatestMasks | None = None
    waits_since_s: float | None = None  # for masks that it was told to make; not while its grammar is compiled
    num_restarts: int = 0


@dataclass(frozen=True)
class GrammarNews:
    """What has become of requests since the last look."""

    admitted: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RequestError]] = field(default_factory=list)


_NO_NEWS = GrammarNews()


class Grammars:
    """Knows every unfinished request under a grammar."""

    def __init__(self, backend: GrammarBackend, send_masks: Callable[[MaskUpdate], None]) -> None:
        """Know none yet.

        Args:
            backend: Follows the grammars.
            send_masks: To the last stage.
        """
        self._backend = backend
        self._send_masks = send_masks
        self._texts: dict[Request, _Text] = {}
        self._by_number: dict[int, _Text] = {}
        self._num_opened = 0

    @property
    def num_held_back(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return sum(not text.is_admitted for text in self._texts.values())

    @property
    def num_texts(self) -> int:
        """Unfinished requests under a grammar."""
        return len(self._texts)

    def fileno(self) -> int | None:
        """Return what a poller finds readable when `poll` has something to do; see `GrammarBackend`."""
        return self._backend.fileno()

    def open(self, request: Request) -> None:
        """Have a request's grammar compiled; `poll` tells when that is done."""
        self._num_opened += 1
        text = self._texts[request] = self._by_number[self._num_opened] = _Text(self._num_opened, request)
        self._begin(text)

    def is_held_back(self, request: Request) -> bool:
        """Return whether the request's grammar is not compiled yet."""
        return request in self._texts and not self._texts[request].is_admitted

    def close(self, request: Request) -> None:
        """Forget a request; one without a grammar is none that was known."""
        if (text := self._texts.pop(request, None)) is not None:
            del self._by_number[text.number]
            self._backend.send(CloseGrammar(text.number))

    def note_started(self, request: Request, row: int, step_id: int) -> None:
        """Say that a request takes a row over with a step, for the first time or after a preemption."""
        if (text := self._texts.get(request)) is not None:
            text.row, text.start_step = row, step_id
            self._tell_stage([text])

    def note_step(self, step_id: int, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step brought."""
        told = [
            (text, update)
            for update in updates
            if update.draft_ids is not None and (text := self._texts.get(update.request)) is not None
        ]
        for text, update in told:
            if update.request.finish_reason:
                self.close(text.request)
        told = [(text, update) for text, update in told if not update.request.finish_reason]
        if not told:
            return
        now_s = time.monotonic()
        for text, _ in told:
            text.waits_since_s = text.waits_since_s or now_s
        entries, token_ids, draft_ids = list[tuple[int, int, int]](), list[int](), list[int]()
        for text, update in told:
            drafts = update.draft_ids or ()
            entries.append((text.number, len(update.new_token_ids), len(drafts)))
            token_ids += update.new_token_ids
            draft_ids += drafts
        self._backend.send(GrammarAdvance(step_id, np.array(entries, np.int32), _int32s(token_ids), _int32s(draft_ids)))

    def poll(self) -> GrammarNews:
        """Take in what the grammars allow, and send it on; return what has become of requests."""
        replies = self._backend.receive()
        if not replies and not self._texts:
            return _NO_NEWS
        news, fresh = GrammarNews(), []
        for reply in replies:
            match reply:
                case GrammarMasks():
                    fresh += self._take_masks(reply, news)
                case Refused(number, error):
                    self._refuse(number, error, news)
                case GrammarProcessDied():
                    logger.warning("the grammar process died; %d texts begin again", len(self._texts))
                    self._restart(list(self._by_number.values()), news)
        self._tell_stage(fresh)
        self._check_time(news)
        return news

    def stop(self) -> None:
        """End whoever follows the grammars."""
        self._backend.close()

    def _begin(self, text: _Text) -> None:
        request = text.request
        allowed = request.params.allowed_token_ids
        assert request.params.structured_outputs is not None
        self._backend.send(
            OpenGrammar(
                text.number,
                source_of(dict(request.params.structured_outputs)),
                None if allowed is None else list(allowed),
                request.output_token_ids.copy(),
            )
        )

    def _take_masks(self, masks: GrammarMasks, news: GrammarNews) -> list[_Text]:
        fresh, first = [], 0
        for index, (number, after_step, num_accepted, num_masks) in enumerate(masks.entries.tolist()):
            end = first + num_masks
            text = self._by_number.get(number)
            if text is not None:
                drafts, bitmasks = masks.draft_ids[first - index : end - index - 1], masks.bitmasks[first:end]
                text.latest = _LatestMasks(after_step, num_accepted, drafts, bitmasks)
                text.waits_since_s = None
                fresh.append(text)
                if not text.is_admitted:
                    text.is_admitted = True
                    news.admitted.append(text.request)
            first = end
        return fresh

    def _tell_stage(self, texts: Sequence[_Text]) -> None:
        by_row: dict[int, _Text] = {}
        for text in texts:
            # A row's old owner may still be on its way out.
            if text.start_step != NO_STEP and by_row.get(text.row, text).start_step <= text.start_step:
                by_row[text.row] = text
        told = [(text, text.latest) for text in by_row.values() if text.latest is not None]
        if not told:
            return
        drafts = [m.draft_ids for _, m in told if len(m.draft_ids)]
        self._send_masks(
            MaskUpdate(
                rows=_int32s([text.row for text, _ in told]),
                moments=np.array([_moment(text, latest) for text, latest in told], np.int64),
                draft_ids=np.concatenate(drafts) if drafts else NO_INT32S,
                bitmasks=np.concatenate([m.bitmasks for _, m in told]),
            )
        )

    def _refuse(self, number: int, error: RequestError | Exception, news: GrammarNews) -> None:
        if (text := self._by_number.get(number)) is not None:
            assert isinstance(error, RequestError)
            news.refused.append((text.request, error))
            self.close(text.request)

    def _check_time(self, news: GrammarNews) -> None:
        """Give up on texts whose masks do not come, and on the process that makes none of them."""
        ends_s = time.monotonic() - _MASK_TIMEOUT_S
        late = [text for text in self._texts.values() if (text.waits_since_s or ends_s) < ends_s]
        if not late:
            return
        for text in late:
            error = RequestError(
                "a grammar takes too long to follow",
                got=f"no mask within {_MASK_TIMEOUT_S:g} s, after {len(text.request.output_token_ids)} tokens",
                hint="a grammar with many ways to read the same text grows slow; write it without",
            )
            self._refuse(text.number, error, news)
        self._restart([], news)

    def _restart(self, suspects: Sequence[_Text], news: GrammarNews) -> None:
        """Begin all texts again in a new process; those that were there too often when one died are given up."""
        self._backend.restart()
        for text in suspects:
            text.num_restarts += 1
            if text.num_restarts > _MAX_RESTARTS:
                error = RequestError("the grammar process died over this request, or beside it", got="three times")
                self._refuse(text.number, error, news)
        for text in self._by_number.values():
            text.waits_since_s = None
            self._begin(text)


def _moment(text: _Text, latest: _LatestMasks) -> tuple[int, int, int, int]:
    """Return what masks are for, in the order of `MaskMoment`."""
    # The request's own tokens from before the row took it over count as that step's.
    after_step = max(latest.after_step, text.start_step - 1)
    position = len(text.request.prompt_token_ids) + latest.num_accepted
    return text.start_step, after_step, position, len(latest.bitmasks)


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)
