"""The grammar process with its nursery, over the driver's own end: constraints of any size."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.driver.grammar_process import GrammarProcess
from raypp.grammar.grammar_messages import (
    Compiled,
    CompileGrammar,
    GrammarMasks,
    GrammarReply,
    NotCompiled,
    OpenGrammar,
    Ready,
    key_of,
)
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.structured_outputs import as_structured_outputs, source_of

DEADLINE_S = 60.0


@pytest.fixture
def process() -> Iterator[GrammarProcess]:
    plan = plan_engine(EngineConfig.from_flat("tiny"), Hardware(1))
    process = GrammarProcess(plan.grammar_settings())
    yield process
    process.close()


def source(**constraint: object) -> str:
    kept = as_structured_outputs(constraint)
    assert kept is not None
    return source_of(kept)


def replies(process: GrammarProcess, count: int) -> list[GrammarReply]:
    """Return the next so many, in their order."""
    found: list[GrammarReply] = []
    ends_s = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < ends_s, f"{len(found)} of {count} came"
        select.select([process.fileno()], [], [], 1.0)
        received = process.receive()
        assert all(isinstance(reply, Ready | Compiled | NotCompiled | GrammarMasks) for reply in received), received
        found += [reply for reply in received if not isinstance(reply, Ready)]
    return found


def test_llguidance_compiles_what_xgrammar_cannot_and_both_refuse_the_same_way(process: GrammarProcess) -> None:
    good = source(json_schema={"allOf": [{"type": "string"}, {"minLength": 2}]})
    bad = source(json_schema={"type": "array", "uniqueItems": True})
    long = source(json_schema={"type": "string", "pattern": "^(a|b)*a(a|b){40}$", "maxLength": 200})
    for text in (good, bad, long):
        process.send(CompileGrammar(text))
    answers = {answer.key: answer for answer in replies(process, 3) if isinstance(answer, Compiled | NotCompiled)}
    assert isinstance(answers[key_of(good)], Compiled)
    refused = answers[key_of(bad)]
    assert isinstance(refused, NotCompiled)
    assert "uniqueItems" in str(refused.error)
    process.send(OpenGrammar(1, key_of(good)))
    assert isinstance(replies(process, 1)[0], GrammarMasks)


def test_many_that_are_larger_than_what_sockets_hold(process: GrammarProcess) -> None:
    started_s = time.monotonic()
    bad = [source(grammar=f"{number} is not a grammar " + "x" * 400_000) for number in range(24)]
    good = source(choice=["yes", "no"])
    for text in bad[:12]:
        process.send(CompileGrammar(text))
    process.send(CompileGrammar(good))
    sent_s = time.monotonic()
    answers = replies(process, 13)
    assert {answer.key for answer in answers if isinstance(answer, NotCompiled)} == set(map(key_of, bad[:12]))
    assert [answer.key for answer in answers if isinstance(answer, Compiled)] == [key_of(good)]
    assert sent_s - started_s < time.monotonic() - sent_s, "the driver waited for a process that was still starting"
    for text in bad[12:]:  # now that it reads
        process.send(CompileGrammar(text))
    assert {answer.key for answer in replies(process, 12)} == set(map(key_of, bad[12:]))
