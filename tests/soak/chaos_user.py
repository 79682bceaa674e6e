"""A user's program for the tests of chaos: `python chaos_user.py WHAT`; it says in JSON lines how things end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from raypp import LLM, SamplingParams
from raypp.actors.processes import children_of
from raypp.errors import RayppError
from raypp.testing import FakeStage

PROMPT = {"prompt_token_ids": [1]}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)
WAIT_S = 60.0


def say(**facts: object) -> None:
    """Print a line, with the time."""
    print(json.dumps({"at_s": time.monotonic(), **facts}), flush=True)


def pid_of(name: str) -> int:
    """Return one of Ray's servers, as soon as it is there: a child of this process."""
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        for process in children_of(os.getpid()):
            if process.name == name:
                return process.pid
        time.sleep(0.01)
    raise AssertionError(f"no {name}")


def open_llm() -> LLM:
    return LLM("tiny", num_stages=2, stage_factory=FakeStage(step_ms=5), skip_tokenizer_init=True)


def use(llm: LLM, params: SamplingParams) -> None:
    say(tokens=len(llm.generate(PROMPT, params)[0].outputs[0].token_ids))


def hit(name: str, number: int) -> None:
    os.kill(pid_of(name), number)
    say(hit=name)


def start_hit(name: str, after: str) -> None:
    """Have one of Ray's servers die as soon as another one, or itself, is there."""

    def hit_after() -> None:
        pid_of(after)
        hit(name, signal.SIGKILL)

    threading.Thread(target=hit_after).start()
    open_llm()


def run_hit(name: str) -> None:
    with open_llm() as llm:
        threading.Timer(0.5, hit, args=(name, signal.SIGKILL)).start()
        use(llm, LONG)


def close_frozen(name: str) -> None:
    llm = open_llm()
    hit(name, signal.SIGSTOP)
    llm.close()


def fork() -> None:
    with open_llm() as llm:
        for child_closes in (False, True):
            if (child := os.fork()) == 0:
                if child_closes:
                    llm.close()
                sys.exit()
            say(child=os.waitpid(child, 0)[1])
        use(llm, SamplingParams(max_tokens=2))


def thread() -> None:
    opened: list[LLM] = []
    opener = threading.Thread(target=lambda: opened.append(open_llm()))
    opener.start()
    opener.join()
    time.sleep(2.0)  # Ray's servers would be gone by now
    use(opened[0], SamplingParams(max_tokens=2))
    opened[0].close()


def kill_stage() -> None:
    with open_llm() as llm:
        os.kill(llm.processes()["stages"][0], signal.SIGKILL)
        time.sleep(6.0)  # Ray tells of it by now


def orphan() -> None:
    with open_llm() as llm:
        processes = llm.processes()
        say(pids=[processes["driver"], *processes["stages"]])
        use(llm, SamplingParams(max_tokens=100_000, ignore_eos=True))


if __name__ == "__main__":
    deed, *args = sys.argv[1:]
    try:
        globals()[deed](*args)
    except RayppError as error:
        say(error=type(error).__name__, message=str(error))
    say(ended=deed)
    if deed in ("start_hit", "run_hit", "close_frozen"):
        with open_llm() as again:
            use(again, SamplingParams(max_tokens=2))
        say(ended="again")
