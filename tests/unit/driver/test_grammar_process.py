"""Ending the process that follows grammars."""

from __future__ import annotations

import os
import select

import pytest

from raypp.driver.grammar_process import GrammarProcess, GrammarProcessDied, GrammarSettings
from raypp.grammar.messages import CloseGrammar

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
