"""Plays a client whose engines die: it keeps its requests, and hands them to the next engine with the tokens it has.

An engine is abandoned between two turns of its loop, with steps in flight. Of what it brought the newest tokens may not
have reached the client. The next engine may be cut into other stages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raypp.prompt_items import PromptItems
from raypp.request import LogprobRows, Request, RequestUpdate
from raypp.testing import LocalEngine
from raypp.types import FinishReason, SamplingParams

_MANY_TURNS = 5000

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a client asks for."""

    name: str
    prompt: np.ndarray  # [P]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    items: PromptItems | None = None
    cache_salt: str = ""


@dataclass(eq=False)
class Answer:
    """What the client has of a request."""

    asked: Asked
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each token, and of those beside it
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int = -1
    text: str = ""  # where there is a tokenizer
    num_lives: int = 0  # engines that it was handed to

    def params_of_next_life(self) -> SamplingParams:
        """Return what to hand over: log-probabilities of the prompt are asked for again unless all have come."""
        params = self.asked.params
        if params.prompt_logprobs is None:
            return params
        if len(self.prompt_logprobs) == len(self.asked.prompt) - 1:
            return replace(params, prompt_logprobs=None)
        self.prompt_logprobs.clear()
        return params

    def forget(self, num_tokens: int) -> None:
        """Lose the newest tokens on their way, but for those that it had when it was handed over last."""
        if num_tokens:
            del self.token_ids[-num_tokens:], self.logprobs[-num_tokens:]

    def take(self, update: RequestUpdate, decode: Decode) -> bool:
        """Take in what came; return whether the text has reached a stop string, so that the engine has to end it."""
        request, before = update.request, len(self.token_ids)
        self.token_ids += update.new_token_ids
        self.logprobs += _dicts(update.logprobs)
        self.prompt_logprobs += _dicts(update.prompt_logprobs)
        for count in range(before + 1, len(self.token_ids) + 1):
            if any(stop in decode(self.token_ids[:count]) for stop in self.asked.params.stop):
                self.finish_reason = FinishReason.STOP
                self.forget(len(self.token_ids) - count)
                return not request.finish_reason
        self.finish_reason, self.stop_token_id = request.finish_reason, request.stop_token_id
        return False


def _dicts(rows: LogprobRows | None) -> list[dict[int, float]]:
    if rows is None:
        return []
    own = rows.own
    return [
        dict(zip(ids, values, strict=True))
        for ids, values in zip(own.token_ids.tolist(), own.logprobs.tolist(), strict=True)
    ]


class MortalEngines:
    """Answers requests by one engine after the other.

    Args:
        make_engines: Makes the next engine; they are taken in turn.
        decode: Turns tokens into text, for stop strings.
        rng: Chooses when what happens.
        num_deaths: Engines that die before the one that ends everything.
        most_turns: Of the loop of an engine that dies.
    """

    def __init__(
        self,
        make_engines: Sequence[Callable[[], LocalEngine]],
        decode: Decode,
        rng: random.Random,
        *,
        num_deaths: int = 0,
        most_turns: int = 30,
    ) -> None:
        self._make_engines = make_engines
        self._decode = decode
        self._rng = rng
        self._num_deaths = num_deaths
        self._most_turns = most_turns
        self.num_handed_over = 0
        """Requests that an engine got with tokens."""
        self.num_forgotten = 0
        """Tokens that were lost on their way."""
        self.engine = make_engines[0]()
        """The one that ended everything, once it has."""

    def answer(self, asked: Sequence[Asked]) -> list[Answer]:
        """Return the ended requests; they arrive one after the other."""
        answers = [Answer(one) for one in asked]
        coming, begun = list(answers), list[Answer]()
        for life in range(self._num_deaths + 1):
            if life:
                self.engine = self._make_engines[life % len(self._make_engines)]()
            turns = self._rng.randrange(1, self._most_turns) if life < self._num_deaths else None
            self._live(begun, coming, turns)
            for answer in begun:
                self._lose_some(answer)
        assert all(answer.finish_reason for answer in answers)
        self.engine.drain()
        self.engine.scheduler.check_integrity()
        return answers

    def _live(self, begun: list[Answer], coming: list[Answer], turns: int | None) -> None:
        """Run an engine for some turns, or to the end; first it gets what was begun, then what comes, bit by bit."""
        rng, engine = self._rng, self.engine
        waiting = [answer for answer in begun if not answer.finish_reason]
        owners: dict[Request, Answer] = {}
        turn = 0
        while turn != turns and (waiting or coming or engine.has_unfinished):
            turn += 1
            assert turn < _MANY_TURNS, "a standstill"
            while waiting and rng.random() < 0.9:
                answer = waiting.pop(0)
                owners[self._submit(answer)] = answer
            if coming and not waiting and rng.random() < 0.6:
                begun.append(coming.pop(0))
                owners[self._submit(begun[-1])] = begun[-1]
            for update in engine.step():
                if owners[update.request].take(update, self._decode):
                    engine.abort(update.request)

    def _submit(self, answer: Answer) -> Request:
        asked = answer.asked
        self.num_handed_over += bool(answer.token_ids)
        answer.num_lives += 1
        return self.engine.submit(
            asked.prompt,
            answer.params_of_next_life(),
            eos_token_ids=asked.eos_token_ids,
            bad_word_token_ids=asked.bad_words,
            priority=asked.priority,
            items=asked.items,
            cache_salt=asked.cache_salt,
            output_token_ids=answer.token_ids,
        )

    def _lose_some(self, answer: Answer) -> None:
        count = min(self._rng.choice([0, 0, 0, 1, 4]), len(answer.token_ids))
        if count and not answer.finish_reason:
            answer.forget(count)
            self.num_forgotten += count
