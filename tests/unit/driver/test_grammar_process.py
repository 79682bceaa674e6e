"""Ending the process that follows grammars, while its reader waits for it."""

from __future__ import annotations

import os
import threading
import time

from raypp.driver.grammar_process import GrammarProcess, GrammarProcessDied, GrammarSettings
from raypp.grammar.messages import CloseGrammar

WAIT_S = 60.0


def make() -> GrammarProcess:
    return GrammarProcess(GrammarSettings("nowhere", 1000, (0,), compile_timeout_s=1.0))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "grammar-reader"]


def test_nobody_reads_any_more_when_it_is_closed() -> None:
    """What is closed under a reader's hands may be another file by the time that it reads on."""
    before = readers()
    process = make()
    for _ in range(3):
        process.send(CloseGrammar(1))
        assert process.process_id is not None
        assert len(readers()) == len(before) + 1
        files = set(os.listdir("/proc/self/fd"))
        process.restart()
        assert readers() == before
        assert len(set(os.listdir("/proc/self/fd"))) < len(files)
        assert process.receive() == []
    process.close()


def test_a_death_is_told_once() -> None:
    woken = threading.Event()
    process = make()
    process.wake_with(woken.set)
    process.send(CloseGrammar(1))
    pid = process.process_id
    assert pid is not None
    os.kill(pid, 9)
    assert woken.wait(WAIT_S)
    ends = time.monotonic() + WAIT_S
    while not (replies := process.receive()):
        assert time.monotonic() < ends
    assert replies == [GrammarProcessDied()]
    process.close()
    assert process.receive() == []
    assert process.process_id is None
