"""`LLM` against an engine that speaks the real wire."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_engine import MAX_MODEL_LEN, FakeEngine

from raypp.api.frontend import Frontend
from raypp.api.launch import open_engine
from raypp.api.llm import LLM
from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    ModelLoadError,
    QueueFullError,
    RequestError,
    StageDiedError,
)
from raypp.types import SamplingParams

MakeEngine = Callable[..., FakeEngine]


def open_llm(engine: FakeEngine, **settings: object) -> LLM:
    return LLM("tiny", launch=engine.launch, **settings)


def test_outputs_in_order_with_text_and_metrics(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    prompts = [f"import os{i}" for i in range(150)]
    params = [SamplingParams(max_tokens=1 + i % 9, seed=i) for i in range(150)]
    engine = make_engine()
    with open_llm(engine) as llm:
        outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    for output, param in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        assert output.finished
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == param.max_tokens
        assert completion.text == tokenizer.decode(completion.token_ids)
        metrics = output.metrics
        assert metrics.num_cached_tokens == 16
        assert (metrics.num_preemptions, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (1, 4, 3)
        assert (metrics.acceptance_rate, metrics.acceptance_length) == (0.75, 2.5)
        assert metrics.arrival_time_s <= metrics.first_token_time_s <= metrics.finish_time_s
        assert 0 <= metrics.ttft_s < 5
        assert (metrics.tpot_s is None) == (param.max_tokens == 1)
    assert [r.seed for r in engine.added] == list(range(150))
    assert engine.added[0].eos_token_ids == frozenset({2})
    assert engine.num_closed == 1


def test_one_prompt_one_conversation_and_none(make_engine: MakeEngine) -> None:
    messages = [{"role": "user", "content": "os"}]
    with open_llm(make_engine()) as llm:
        assert len(llm.generate("import os")) == 1
        ids = {"prompt_token_ids": [5, 6]}
        for given in (ids, [5, 6], (5, 6), np.array([5, 6]), [[5, 6]], [ids]):
            assert [output.prompt_token_ids for output in llm.generate(given)] == [[5, 6]]
        assert [o.prompt for o in llm.generate([{"prompt": "hi"}, "hi"])] == ["hi", "hi"]
        assert llm.generate({"prompt": "hi"})[0].prompt == "hi"
        assert list(llm.stream([5, 6]))[-1].prompt_token_ids == [5, 6]
        assert llm.generate([]) == []
        assert [o.prompt for o in llm.chat([messages, messages])] == [llm.chat(messages)[0].prompt] * 2


def test_the_ending_token_is_reported_and_has_no_text(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["import os"])[0].tolist()
    with open_llm(make_engine(lambda request: [*ids, *request.params.stop_token_ids, 2][: len(ids) + 1])) as llm:
        prompts = ["a", "b"]
        by_eos, by_token = llm.generate(
            prompts, [SamplingParams(max_tokens=99), SamplingParams(max_tokens=99, stop_token_ids=[50])]
        )
    assert by_eos.outputs[0].text == by_token.outputs[0].text == "import os"
    assert (by_eos.outputs[0].finish_reason, by_eos.outputs[0].stop_reason) == ("stop", None)
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", 50)
    assert by_token.outputs[0].token_ids == [*ids, 50]


@pytest.mark.parametrize("tokens_per_step", [1, 4, 99])
def test_stop_strings_end_the_request_in_the_engine_too(
    make_engine: MakeEngine, tokenizer: Tokenizer, tokens_per_step: int
) -> None:
    ids = tokenizer.encode(["print(argv) then\nimport sys and more of it"])[0].tolist()
    engine = make_engine(lambda _: ids, tokens_per_step=tokens_per_step)
    with open_llm(engine) as llm:
        [output] = llm.generate(["x"], SamplingParams(max_tokens=99, stop=["nothing", "import s"]), request_ids=["r"])
        if tokens_per_step < 99:
            engine.wait_until(lambda: engine.aborted == ["r"])
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "print(argv) then\n",
        "stop",
        "import s",
    )
    assert "import s" in tokenizer.decode(completion.token_ids)
    assert "import s" not in tokenizer.decode(completion.token_ids[:-1])


def test_nothing_is_sent_when_one_of_the_list_is_bad(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with open_llm(engine) as llm:
        with pytest.raises(RequestError) as caught:
            llm.generate(["fine", {"prompt_token_ids": [1] * MAX_MODEL_LEN}, "fine"], request_ids=["a", "b", "c"])
        assert caught.value.request_id == "b"
        llm.stats()  # answered after everything that was sent before
        assert engine.added == []
        assert len(llm.generate(["fine"])) == 1


def test_a_rejection_ends_the_call_and_aborts_the_others(make_engine: MakeEngine) -> None:
    def rejects(request: object) -> RequestError | None:
        return RequestError("too much", request_id="b", got=1, expected=2) if request.request_id == "b" else None

    engine = make_engine(rejects=rejects)
    with open_llm(engine) as llm:
        engine.set_gate(is_open=False)
        with pytest.raises(RequestError, match="too much") as caught:
            llm.generate(["a", "b", "c"], request_ids=["a", "b", "c"])
        assert caught.value.request_id == "b"
        engine.wait_until(lambda: engine.aborted == ["a", "c"])
        engine.set_gate(is_open=True)
        assert len(llm.generate(["d"])) == 1


def test_abort_from_another_thread(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with open_llm(engine) as llm, ThreadPoolExecutor(1) as pool:
        engine.set_gate(is_open=False)
        pending = pool.submit(llm.generate, ["a", "b"], None, request_ids=["a", "b"])
        engine.wait_until(lambda: len(engine.added) == 2)
        with pytest.raises(RequestError, match="running already"):
            llm.generate(["a"], request_ids=["a"])
        llm.abort("nobody")
        llm.abort("a")
        engine.wait_until(lambda: engine.aborted == ["a"])
        engine.set_gate(is_open=True)
        aborted, finished = pending.result(timeout=60)
        assert aborted.outputs[0].finish_reason == "abort"
        assert finished.outputs[0].finish_reason == "length"
        assert len(llm.generate(["a"], request_ids=["a"])) == 1  # the id is free again


@pytest.mark.parametrize("way", ["die_unseen", "die_loudly"])
def test_a_dead_engine_ends_every_call(make_engine: MakeEngine, way: str) -> None:
    engine = make_engine()
    with open_llm(engine) as llm, ThreadPoolExecutor(2) as pool:
        engine.set_gate(is_open=False)
        pending = [pool.submit(llm.generate, ["a", "b"]) for _ in range(2)]
        engine.wait_until(lambda: len(engine.added) == 4)
        getattr(engine, way)(StageDiedError("stage 1 died", stage_index=1))
        for future in pending:
            with pytest.raises(StageDiedError) as caught:
                future.result(timeout=60)
            assert caught.value.stage_index == 1
        with pytest.raises(StageDiedError):
            llm.generate(["c"])
        with pytest.raises(StageDiedError):
            llm.stats()
    assert engine.num_closed == 1


def test_closing_ends_what_is_running(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with ThreadPoolExecutor(1) as pool:
        llm = open_llm(engine)
        engine.set_gate(is_open=False)
        pending = pool.submit(llm.generate, ["a"])
        engine.wait_until(lambda: len(engine.added) == 1)
        llm.close()
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            pending.result(timeout=60)
    for call in (lambda: llm.generate(["a"]), llm.stats):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    assert engine.num_closed == 1


def test_the_engine_hears_of_a_client_that_leaves(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def come_and_leave() -> None:
        Frontend(open_engine("tiny", {}, None, engine.launch)).close()

    asyncio.run(come_and_leave())
    engine.wait_until(lambda: engine.num_clients_left == 1)


def test_a_forgotten_llm_is_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    others = set(threading.enumerate())  # one of an earlier test may be about to end
    llm = open_llm(engine)
    assert len(llm.generate(["a"])) == 1
    del llm
    gc.collect()
    assert engine.num_closed == 1
    assert set(threading.enumerate()) <= others


def test_streams_of_a_prompt_and_of_a_conversation(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    with open_llm(make_engine()) as llm:
        outputs = list(llm.stream("def main", SamplingParams(max_tokens=6)))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 6
        assert outputs[-1].outputs[0].text == tokenizer.decode(outputs[-1].outputs[0].token_ids)
        *_, last = llm.stream([{"role": "user", "content": "hi"}], chat_template_kwargs={"quiet": True})
        assert last.prompt is not None
        assert last.prompt.endswith("<quiet>")


def test_tools_and_templates_of_a_conversation(make_engine: MakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    template = "{{ tools[0].function.name }} {{ messages[0].content }}"
    with open_llm(make_engine()) as llm:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert llm.chat(messages, tools=tools, chat_template=template)[0].prompt == "f hi"
        continued = {"add_generation_prompt": False, "continue_final_message": True}
        *_, last = llm.stream(messages, **continued)
        assert last.prompt == llm.chat([messages], **continued)[0].prompt == "<|im_start|>user\nhi"


def test_the_tokenizer_and_its_template(make_engine: MakeEngine, tmp_path: Path) -> None:
    messages, file = [{"role": "user", "content": "hi"}], tmp_path / "mine.jinja"
    file.write_text("file: {{ messages[0].content }}")
    with open_llm(make_engine(), chat_template=str(file)) as llm:
        assert llm.chat(messages)[0].prompt == "file: hi"
        tokenizer = llm.get_tokenizer()
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "file: hi"
        assert llm.generate("import os")[0].prompt_token_ids == tokenizer.encode("import os")
    with open_llm(make_engine(), chat_template="{{ messages[0].role }}") as llm:
        assert llm.chat(messages)[0].prompt == "user"
    engine = make_engine()
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        open_llm(engine, chat_template=str(tmp_path / "none.jinja"))
    assert not hasattr(engine, "client_address"), "the engine was not started for it"
    with open_llm(make_engine(), skip_tokenizer_init=True) as llm, pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()


def test_a_stream_left_early_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with open_llm(engine) as llm:
        engine.set_gate(is_open=False)
        engine.grant_steps(1)
        outputs = llm.stream("a", SamplingParams(max_tokens=50), request_id="r")
        assert len(next(outputs).outputs[0].token_ids) == 1
        outputs.close()
        engine.wait_until(lambda: engine.aborted == ["r"])
        with pytest.raises(RequestError):
            llm.stream("")


def test_a_stream_of_an_engine_that_was_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    llm = open_llm(engine)
    engine.set_gate(is_open=False)
    engine.grant_steps(1)
    outputs = llm.stream("a", SamplingParams(max_tokens=50))
    next(outputs)
    llm.close()
    with pytest.raises(EngineDeadError):
        next(outputs)


def test_inside_a_running_event_loop(make_engine: MakeEngine) -> None:
    async def notebook_cell() -> int:
        with open_llm(make_engine()) as llm:
            return len(llm.generate(["a", "b"]))

    assert asyncio.run(notebook_cell()) == 2


def test_figures_plan_and_processes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with open_llm(engine) as llm:
        stats = llm.stats()
        assert stats["num_running"] == 0
        assert stats["recoveries"] == {"count": 0, "paused_s": 0.0, "num_carried_over": 0, "last": None}
        assert not stats["is_recovering"]
        assert llm.plan() == {"stages": []}
        assert llm.processes() == {"driver": 1, "stages": [2], "encoders": []}
    engine = make_engine()
    engine.answers_stats = False
    with open_llm(engine, step_timeout_s=0.1) as llm, pytest.raises(DeadlineError):
        llm.stats()


def test_settings_reach_the_engine(make_engine: MakeEngine) -> None:
    config = EngineConfig.from_flat("tiny", num_stages=3)

    def factory() -> None: ...

    engine = make_engine()
    with LLM(config, launch=engine.launch, stage_factory=factory, block_size=32) as llm:  # type: ignore[arg-type]
        assert (llm.config.parallel.num_stages, llm.config.cache.block_size) == (3, 32)
        assert engine.stage_factory is factory
    with pytest.raises(ConfigError, match="num_stages"):
        open_llm(make_engine(), num_stage=2)


def test_skip_tokenizer_init_leaves_texts_empty(make_engine: MakeEngine) -> None:
    with open_llm(make_engine(model_path="/nowhere"), skip_tokenizer_init=True) as llm:
        [output] = llm.generate([{"prompt_token_ids": [9]}], SamplingParams(max_tokens=3))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [9, 9, 9])


def test_an_engine_whose_tokenizer_is_missing_is_closed(make_engine: MakeEngine) -> None:
    engine = make_engine(model_path="/nowhere")
    with pytest.raises(ModelLoadError):
        open_llm(engine)
    assert engine.num_closed == 1


def test_the_tokenizers_eos_when_the_model_names_none(make_engine: MakeEngine) -> None:
    engine = make_engine(eos_token_ids=[])
    with open_llm(engine) as llm:
        llm.generate(["a"])
    assert engine.added[0].eos_token_ids == frozenset({2})


def test_progress_bar(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with open_llm(make_engine()) as llm:
        llm.generate(["a"] * 3, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err


_SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from raypp.api.llm import LLM
engine = FakeEngine(lambda request: [5] * 99)
llm = LLM("tiny", launch=engine.launch, skip_tokenizer_init=True)
prompt = {{"prompt_token_ids": [5]}}
engine.set_gate(is_open=False)
def interrupt():
    engine.wait_until(lambda: len(engine.added) == {num_requests})
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    {call}
except KeyboardInterrupt:
    engine.wait_until(lambda: engine.aborted == ["a", "b"][:{num_requests}])
    engine.set_gate(is_open=True)
    assert len(llm.generate([prompt])) == 1
    print("interrupted")
import atexit
atexit._run_exitfuncs()
print("closed", engine.num_closed)
"""


@pytest.mark.parametrize(
    ("call", "num_requests"),
    [
        ('llm.generate([prompt] * 2, request_ids=["a", "b"])', 2),
        ('list(llm.stream(prompt, request_id="a"))', 1),
    ],
)
def test_ctrl_c_aborts_and_exit_closes(call: str, num_requests: int) -> None:
    script = _SCRIPT.format(tests=str(__file__).rsplit("/", 1)[0], call=call, num_requests=num_requests)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\nclosed 1\n", "", 0)


_FORK_SCRIPT = """
import asyncio, os, sys, time
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from raypp.api.async_llm import AsyncLLM
from raypp.api.launch import open_engine
from raypp.api.llm import LLM

def fork(child, end=sys.exit):
    pid, ends_s = os.fork(), time.monotonic() + 20
    if pid == 0:
        child()
        end(0)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > ends_s:
            os.kill(pid, 9)
        time.sleep(0.01)
    print("child", ended[1])

engine, settings = FakeEngine(lambda request: [5] * 9), {{"skip_tokenizer_init": True}}
prompt = {{"prompt_token_ids": [5]}}
llm = LLM("tiny", launch=engine.launch, **settings)
fork(lambda: None)
fork(llm.close)
print(len(llm.generate([prompt])), engine.num_clients_left, engine.num_closed)
llm.close()
print(engine.num_closed)

async def serve():
    engine = FakeEngine(lambda request: [5] * 9)
    llm = AsyncLLM(open_engine("tiny", settings, None, engine.launch))
    await llm.complete([prompt])
    fork(llm.close_when_replaced, end=os._exit)  # the loop's own end would disturb the parent's
    print(len(await llm.complete([prompt])), engine.num_clients_left, engine.num_closed)
    await llm.close()
    print(engine.num_closed)
asyncio.run(serve())
"""


def test_a_forked_child_leaves_the_engine_alone() -> None:
    """However the child ends: the engine, its threads and its sockets are its parent's."""
    script = _FORK_SCRIPT.format(tests=str(__file__).rsplit("/", 1)[0])
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]  # of a fork beside threads: that is what is tested
    done = subprocess.run([*python, "-c", script], capture_output=True, text=True, timeout=90)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["child 0", "child 0", "1 0 0", "1", "child 0", "1 0 0", "1"]


def test_continuations_are_requests_of_their_own_to_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with open_llm(engine) as llm:
        params = SamplingParams(max_tokens=3, n=3, seed=5, prompt_logprobs=1)
        [output] = llm.generate(["a"], params, request_ids=["r"], priority=4)
        assert [len(c.token_ids) for c in output.outputs] == [3, 3, 3]
        assert len({r.request_id for r in engine.added}) == len({r.seed for r in engine.added}) == 3
        assert [r.params.prompt_logprobs for r in engine.added] == [1, None, None]
        assert {r.priority for r in engine.added} == {4}
        assert output.metrics.num_preemptions == 3
        assert output.metrics.num_cached_tokens == 16
        llm.generate(["a"], SamplingParams(seed=5, max_tokens=3), request_ids=["r"])
        assert engine.added[-1].seed == engine.added[0].seed == 5


def test_a_continuation_that_is_refused_fails_its_request(make_engine: MakeEngine) -> None:
    def rejects(request: object) -> RequestError | None:
        is_second = request.request_id.endswith("1")
        return RequestError("too much", request_id=request.request_id, got=1, expected=2) if is_second else None

    engine = make_engine(rejects=rejects)
    with open_llm(engine) as llm:
        engine.set_gate(is_open=False)
        with pytest.raises(RequestError, match="too much") as caught:
            llm.generate(["a"], SamplingParams(n=3), request_ids=["r"])
        assert caught.value.request_id == "r"
        refused = engine.added[1].request_id
        engine.wait_until(lambda: set(engine.aborted) == {r.request_id for r in engine.added} - {refused})
        engine.set_gate(is_open=True)
        assert len(llm.generate(["b"], request_ids=["r"])) == 1


def test_a_failing_progress_bar_ends_its_call_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, count: int) -> None:
        raise OSError("the terminal is gone")

    engine = make_engine()
    with open_llm(engine) as llm, ThreadPoolExecutor(1) as pool:
        engine.set_gate(is_open=False)
        other = pool.submit(llm.generate, ["a", "b"])
        engine.wait_until(lambda: len(engine.added) == 2)
        monkeypatch.setattr("tqdm.auto.tqdm.update", broken)
        engine.set_gate(is_open=True)
        with pytest.raises(OSError, match="terminal"):
            llm.generate(["c"], use_tqdm=True)
        assert len(other.result(timeout=60)) == 2


def test_a_list_that_is_longer_than_the_engine_has_room_for_is_sent_as_others_end(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.rejects = lambda _: QueueFullError("full", retry_after_s=3) if engine.num_running > 15 else None
    with open_llm(engine, max_waiting_bytes=1 << 16) as llm:
        outputs = llm.generate([{"prompt_token_ids": [10 + i] * 8} for i in range(60)], SamplingParams(max_tokens=2))
    assert [output.prompt_token_ids[0] for output in outputs] == list(range(10, 70))


def test_what_is_not_sent_yet_has_its_id_and_can_be_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = [f"r{index}" for index in range(30)]
    with open_llm(engine, max_waiting_bytes=1 << 16) as llm, ThreadPoolExecutor(1) as pool:
        engine.set_gate(is_open=False)
        prompts = [{"prompt_token_ids": [10]}] * len(ids)
        whole = pool.submit(llm.generate, prompts, SamplingParams(max_tokens=2), request_ids=ids)
        engine.wait_until(lambda: bool(engine.added))
        with pytest.raises(RequestError, match="running already"):
            llm.generate({"prompt_token_ids": [10]}, request_ids=["r29"])
        for request_id in ids[10:]:
            llm.abort(request_id)
        engine.set_gate(is_open=True)
        outputs = whole.result(timeout=60)
        assert [output.request_id for output in outputs] == ids
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 10 + ["abort"] * 20
        llm.generate({"prompt_token_ids": [10]}, SamplingParams(max_tokens=2), request_ids=["r29"])
