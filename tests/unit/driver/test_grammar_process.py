"""Ending the process that follows grammars."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import time
from types import SimpleNamespace

import pytest

from raypp.driver.grammar_process import (
    GrammarProcess,
    GrammarProcessDied,
    GrammarProcessNotStarted,
)
from raypp.grammar.grammar_messages import CloseGrammar, CompileGrammar, GrammarSettings

WAIT_S = 60.0


def make() -> GrammarProcess:
    return GrammarProcess(GrammarSettings("nowhere", 1000, (0,), compile_timeout_s=1.0))


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_restart_leaves_no_file_open() -> None:
    process = make()
    at_first = num_open_files()
    for _ in range(3):
        process.send(CloseGrammar(1))
        assert process.process_id is not None
        assert num_open_files() > at_first
        process.restart()
        assert process.process_id is None
        assert num_open_files() == at_first
        assert process.receive() == []
    process.close()


def test_a_death_is_told_once() -> None:
    process = make()
    process.send(CloseGrammar(1))
    file_descriptor, pid = process.fileno(), process.process_id
    assert file_descriptor is not None
    assert pid is not None
    os.kill(pid, 9)
    assert select.select([file_descriptor], [], [], WAIT_S)[0], "whoever waits is woken"
    assert process.receive() == [GrammarProcessDied()]
    assert process.receive() == []
    assert process.process_id is None
    process.close()


def test_who_does_not_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypp.driver.grammar_process._START_TIMEOUT_S", 0)
    process = make()
    process.send(CloseGrammar(1))
    file_descriptor = process.fileno()
    assert file_descriptor is not None
    assert process.receive() == []
    assert select.select([file_descriptor], [], [], WAIT_S)[0]
    assert process.receive() == [GrammarProcessDied()]
    assert process.process_id is None
    process.close()


def test_a_send_never_waits_and_a_process_that_reads_nothing_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raypp.driver.grammar_process._MAX_UNSENT_BYTES", 20_000_000)
    process = make()
    process.send(CloseGrammar(1))
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGSTOP)
    process._is_ready = True  # as it would be, had it not been stopped so early
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            process.send(CompileGrammar("x" * 1_000_000))
    assert time.monotonic() - started_s < 4
    assert len(caplog.messages) == 1
    assert "20 MiB" in caplog.text or "19 MiB" in caplog.text
    assert process.receive() == [GrammarProcessDied()]
    assert process.process_id is None
    process.close()


def test_of_a_process_that_is_stopped_no_text_is_to_blame() -> None:
    process = make()
    process.send(CloseGrammar(1))
    process_id, board = process.process_id, process._board
    assert process_id is not None
    assert board is not None
    process._board = SimpleNamespace(read=lambda: [(7, 30.0)], close=board.close)  # type: ignore[assignment]
    assert process.computing() == [(7, 30.0)]
    for number, expected in ((signal.SIGSTOP, []), (signal.SIGCONT, [(7, 30.0)])):
        os.kill(process_id, number)
        ends_s = time.monotonic() + WAIT_S
        while process.computing() != expected and time.monotonic() < ends_s:
            time.sleep(0.005)
        assert process.computing() == expected
    process.close()


def test_who_cannot_be_started_is_told() -> None:
    process = make()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    at_first = num_open_files()
    for num_free in range(7):  # it needs more than that, and at each of them something else fails
        blocked = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (blocked[-1] + 1, hard))
        for descriptor in blocked[len(blocked) - num_free :]:
            os.close(descriptor)
        try:
            process.send(CloseGrammar(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in blocked[: len(blocked) - num_free]:
            os.close(descriptor)
        assert num_open_files() == at_first, num_free
        [told] = process.receive()
        assert isinstance(told, GrammarProcessNotStarted)
        assert "open files" in told.reason
    process.send(CloseGrammar(1))
    assert process.process_id is not None
    process.close()
