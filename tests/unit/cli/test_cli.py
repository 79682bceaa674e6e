"""The command line: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from PIL import Image

from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.errors import ModelLoadError, ResourceError
from raypp.plan.fit import check_fit
from raypp.plan.hardware import Hardware
from raypp.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams


class FakeLLM:
    """Answers every prompt with its capital letters, and remembers what it was asked."""

    def __init__(self) -> None:
        self.config: EngineConfig | None = None
        self.params: SamplingParams | None = None
        self.prompts: list[str] = []
        self.conversations: list[list[dict[str, Any]]] = []
        self.num_closed = 0
        self.raises: BaseException | None = None
        self.does_not_start: BaseException | None = None
        self.plan_differs: dict[str, Any] = {}
        self.sampling_defaults: dict[str, Any] = {}

    def open(self, config: EngineConfig) -> FakeLLM:
        if self.does_not_start is not None:
            raise self.does_not_start
        self.config = config
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.num_closed += 1

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        if self.raises is not None:
            raise self.raises
        self.prompts, self.params = prompts, params
        return [self._answer(index, prompt) for index, prompt in enumerate(prompts)]

    def chat(self, conversations: list[list[dict[str, Any]]], params: SamplingParams) -> list[RequestOutput]:
        self.conversations = conversations
        return self.generate([conversation[-1]["content"][-1]["text"] for conversation in conversations], params)

    def plan(self) -> dict[str, Any]:
        return describe(EngineConfig.from_flat("tiny"))["plan"] | self.plan_differs

    def stats(self) -> dict[str, Any]:
        cost = {"num_graphs": 3, "seconds": 0.256, "memory_bytes": 2**28, "num_left_out": 0}
        return {"stages": [{"graphs": {"piecewise": cost, "full": cost}}, {"graphs": {}}]}

    def _answer(self, index: int, prompt: str) -> RequestOutput:
        completion = CompletionOutput(index=0, text=str(prompt).upper(), token_ids=[1, 2], finish_reason="length")
        return RequestOutput(
            request_id=f"r{index}",
            prompt=prompt,
            prompt_token_ids=[1],
            outputs=[completion],
            finished=True,
            metrics=RequestMetrics(arrival_time_s=1.0, ttft_s=0.5),
        )


def run(llm: FakeLLM, *argv: str, model: str = "tiny") -> int:
    return main(["generate", model, *argv], entry_points=EntryPoints(open_llm=llm.open))


def test_texts_on_stdout_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    assert run(llm, "--num-stages", "2", "--prompt", "b", "--prompt", "a", "--max-tokens", "5") == 0
    assert capsys.readouterr() == ("B\nA\n", "")
    assert llm.config is not None
    assert llm.config.parallel.num_stages == 2
    assert llm.params == SamplingParams(max_tokens=5)
    assert llm.num_closed == 1


def test_on_a_terminal_the_prompt_stands_before_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(FakeLLM(), "--prompt", "def f(") == 0
    assert capsys.readouterr().out == "def f(DEF F(\n"


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "batch", "info", "tune", "compile", "serve"])
def test_the_most_used_options_come_first_in_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("most used settings:")
    assert first < 70
    assert lines[first + 1].split()[0] == "--num-stages"
    assert sum(line.startswith("  --max-num-seqs") for line in lines) == 1  # each once


def test_compiling_needs_no_weights_and_no_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    assert main(["compile", "tiny", "--num-stages", "2"], entry_points=EntryPoints(open_llm=llm.open)) == 0
    assert capsys.readouterr().out.startswith("ready after 0 s, first tokens ")
    assert llm.config is not None
    assert (llm.config.model.load_format, llm.config.model.skip_tokenizer_init) == ("dummy", True)
    assert llm.config.parallel.num_stages == 2
    assert llm.num_closed == 1


def test_the_models_defaults_hold_for_options_that_are_left_out() -> None:
    llm = FakeLLM()
    llm.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    assert run(llm, "--prompt", "a", "--temperature", "0", "--max-tokens", "5") == 0
    assert llm.params == SamplingParams(temperature=0, top_k=20, max_tokens=5)


def test_pictures_are_asked_about(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    llm, images = FakeLLM(), [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    for image in images:
        Image.new("RGB", (32, 32)).save(image)
    options = ["--image", images[0], "--image", images[1], "--prompt", "what?", "--prompt", "why?"]
    assert run(llm, *options, model="tiny-vl") == 0
    assert capsys.readouterr().out == "WHAT?\nWHY?\n"
    pictures = [{"type": "image", "image": image} for image in images]
    assert llm.conversations == [
        [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}] for text in ("what?", "why?")
    ]


def test_all_sampling_options() -> None:
    llm = FakeLLM()
    options = (
        "--max-tokens 7 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --seed 9 --stop x --stop y --ignore-eos "
        "--min-tokens 2 --presence-penalty 1 --frequency-penalty -0.5 --repetition-penalty 1.1 --logit-bias 5=-1.5 "
        "--logit-bias 6=2 --allow-token 5 --allow-token 6 --bad-word b --logprobs 2 --prompt-logprobs 0 "
        "--stop-token 8 --include-stop --keep-special-tokens"
    )
    assert run(llm, "--prompt", "a", *options.split()) == 0
    assert llm.params == SamplingParams(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=9,
        stop=["x", "y"],
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={5: -1.5, 6: 2},
        allowed_token_ids=[5, 6],
        bad_words=["b"],
        logprobs=2,
        prompt_logprobs=0,
        stop_token_ids=[8],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert run(llm, "--prompt", "a", "--n", "3") == 0
    assert llm.params == SamplingParams(n=3)


def test_every_continuation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class TwoTexts(FakeLLM):
        def _answer(self, index: int, prompt: str) -> RequestOutput:
            output = super()._answer(index, prompt)
            output.outputs[0].logprobs = [{1: Logprob(-0.5, 1, "x")}, {2: Logprob(-1.5, 2, None)}]
            output.outputs[0].cumulative_logprob = -2.0
            output.outputs.append(CompletionOutput(index=1, text="two", token_ids=[3], finish_reason="stop"))
            output.prompt_logprobs = [None]
            return output

    assert run(TwoTexts(), "--prompt", "a", "--prompt", "b") == 0
    assert capsys.readouterr().out == "A\ntwo\nB\ntwo\n"
    assert run(TwoTexts(), "--prompt", "a", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["index"], second["index"], second["text"]) == (0, 1, "two")
    assert first["logprobs"][0] == {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}
    assert (first["cumulative_logprob"], first["prompt_logprobs"]) == (-2.0, [None])
    assert "logprobs" not in second


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLLM(), "--prompt", "é", "--prompt", "b", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["text"], first["token_ids"], first["finish_reason"]) == ("é", "É", [1, 2], "length")
    assert (second["request_id"], second["metrics"]["ttft_s"]) == ("r1", 0.5)


@pytest.mark.parametrize(("stdin", "prompt"), [("one\ntwo\n", "one\ntwo"), ("one", "one"), ("one\n\n", "one\n")])
def test_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch, stdin: str, prompt: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    llm = FakeLLM()
    assert run(llm, "--prompt", "-", "--prompt", "x") == 0
    assert llm.prompts == [prompt, "x"]


def test_file_then_environment_then_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('[model]\nmodel = "other"\n[cache]\nblock_size = 8\n[parallel]\nnum_stages = 4\n')
    llm = FakeLLM()
    for name, value in {
        "NUM_STAGES": "3",
        "DTYPE": "float32",
        "LAYER_PARTITION": "1,1",
        "PORT": "tcp://1.2.3.4",
    }.items():
        monkeypatch.setenv(f"RAYPP_{name}", value)
    assert run(llm, "--config", str(path), "--num-stages", "2", "--prompt", "a") == 0
    assert llm.config is not None
    assert (llm.config.model.model, llm.config.model.dtype, llm.config.cache.block_size) == ("tiny", "float32", 8)
    assert (llm.config.parallel.num_stages, llm.config.parallel.layer_partition) == (2, [1, 1])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-stages", "0"], ["parallel.num_stages", "got: 0", "expected: greater than or equal to 1"]),
        (["--block-size", "x"], ["got: 'x'", "expected: integer"]),
        (["--layer-partition", "1,x"], ["layer_partition", "got: 'x'", "expected: integer"]),
        (["--dtype", "int3"], ["model.dtype", "got: 'int3'", "'auto', 'float32', 'bfloat16' or 'float16'"]),
        (["--config", "/no/such.toml"], ["cannot be read", "/no/such.toml"]),
        (["--max-tokens", "0"], ["SamplingParams.max_tokens"]),
        (["--temperature", "nan"], ["SamplingParams.temperature"]),
    ],
)
def test_mistakes_exit_2_with_one_message(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(FakeLLM(), "--prompt", "a", *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("raypp: ")
    for word in words:
        assert word in err


def test_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a"], entry_points=EntryPoints(open_llm=FakeLLM().open)) == 2
    assert "raypp COMMAND MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["sing"], ["generate", "tiny"], ["generate", "--max-tokens", "x"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, "usage: raypp" in err) == ("", True)


def test_errors_of_the_engine_exit_2_and_close_it(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.raises = ModelLoadError("no weights", got="x", expected="y", hint="z")
    assert run(llm, "--prompt", "a") == 2
    assert capsys.readouterr() == ("", "raypp: no weights\n  got: x\n  expected: y\n  hint: z\n")
    assert llm.num_closed == 1


def test_ctrl_c_exits_130_and_closes(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.raises = KeyboardInterrupt()
    assert run(llm, "--prompt", "a") == 130
    assert capsys.readouterr().out == ""
    assert llm.num_closed == 1


def test_unknown_environment_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RAYPP_LOG_LEVL", "INFO")
    assert run(FakeLLM(), "--prompt", "a") == 0
    assert "RAYPP_LOG_LEVL: did you mean RAYPP_LOG_LEVEL?" in caplog.text


def describe(config: EngineConfig) -> dict[str, Any]:
    cpu = check_fit(EngineConfig.from_flat("tiny"), Hardware(2))
    return {
        "config": config.model_dump(mode="json"),
        "plan": {
            "stages": [{"layers": "0-9", "kv_bytes": 12345678}, {"layers": "9-12", "note": None}],
            "num_blocks": 7,
        },
        "fit": cpu.describe() | {"is_described": False, "alternatives": [], "layers_by_memory": None, "cuts": []},
    }


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    entry_points = EntryPoints(describe=describe)
    assert main(["info", "tiny", "--num-stages", "2", "--json"], entry_points=entry_points) == 0
    assert json.loads(capsys.readouterr().out)["config"]["parallel"]["num_stages"] == 2
    assert main(["info", "tiny", "--full"], entry_points=entry_points) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    num_stages: 1" in lines
    table = [line.split() for line in lines[lines.index("  stages") + 1 :]]
    assert table[:3] == [["layers", "kv_bytes", "note"], ["0-9", "12,345,678", "-"], ["9-12", "-", "-"]]
    assert "  num_blocks: 7" in lines


def test_info_of_a_started_engine(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    assert main(["info", "tiny", "--start"], entry_points=EntryPoints(describe=describe, open_llm=llm.open)) == 0
    lines = capsys.readouterr().out.splitlines()
    started = lines[lines.index("started") + 1 :]
    assert started[0].startswith("  seconds: ")
    assert started[1] == "  graphs"
    assert [line.split() for line in started[2:]] == [
        ["stage_index", "mode", "num_graphs", "seconds", "gib", "num_left_out"],
        ["0", "piecewise", "3", "0.26", "0.25", "0"],
        ["0", "full", "3", "0.26", "0.25", "0"],
    ]
    assert llm.num_closed == 1


def test_info_tells_the_plan_of_a_cluster_and_of_what_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.plan_differs = {"device": "cuda"}
    entry_points = EntryPoints(describe=describe, open_llm=llm.open)
    assert main(["info", "tiny", "--start", "--json"], entry_points=entry_points) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["plan"]["num_blocks"] == description["started"]["plan"]["num_blocks"] == 7
    assert description["started"]["plan"]["device"] == "cuda"
    assert description["started"]["graphs"][0]["mode"] == "piecewise"
    llm.does_not_start = ResourceError("no memory")
    assert main(["info", "tiny", "--start"], entry_points=entry_points) == 2
    out, err = capsys.readouterr()
    assert "It fits. KV cache: " in out
    assert "no memory" in err


def test_python_m_and_a_reader_that_goes_away() -> None:
    version = subprocess.run([sys.executable, "-m", "raypp", "--version"], capture_output=True, text=True, timeout=60)
    assert (version.returncode, version.stdout.split()[0]) == (0, "raypp")
    script = (
        "import sys, os, raypp.cli.main as m, raypp.cli.info as i\n"
        "i.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.exit(m.main(['info', 'tiny']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


def test_speculation_on_the_command_line() -> None:
    llm = FakeLLM()
    options = ["--speculative", "ngram", "--num-speculative-tokens", "4", "--max-n", "3"]
    assert run(llm, "--prompt", "a", *options) == 0
    assert llm.config is not None
    given = llm.config.speculative
    assert (given.method, given.num_speculative_tokens, given.max_n) == ("ngram", 4, 3)


def test_shells_complete_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert not ended.value.code
    assert "--max-model-len" in capsys.readouterr().out
