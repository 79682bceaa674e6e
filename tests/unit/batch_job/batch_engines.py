"""Engines that answer with capital letters, and the files that jobs read and write."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import raypp
from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.tokenizer import Tokenizer
from raypp.batch_job.job_settings import JobSettings
from raypp.config.engine_config import EngineConfig
from raypp.errors import EncoderDiedError, EngineDeadError, NonFiniteLogitsError, RequestError
from raypp.types import CompletionOutput, Prompt, RequestMetrics, RequestOutput, SamplingParams


class ShoutingEngine:
    """Answers every prompt with its capital letters. Dies before its answer number `lives_for`, if that is given."""

    max_model_len = 1000
    pictures = None
    tokenizer = Tokenizer(Path(raypp.__file__).parent / "assets" / "tiny")
    sampling_defaults: Mapping[str, Any] = {}

    def __init__(
        self, lives_for: int | None = None, num_turns: int = 1, on_question: Callable[[int], object] = lambda _: None
    ) -> None:
        self.lives_for = lives_for
        self.num_turns = num_turns
        self.on_question = on_question
        self.num_asked = 0
        self.num_at_once = 0
        self.most_at_once = 0
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.prompts: list[str] = []
        self.num_closed = 0

    async def complete(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        params: SamplingParams | None = None,
        request_ids: Sequence[str] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        assert params is not None
        assert request_ids is not None
        self.priorities.append(priority)
        texts = [_text_of(prompt) for prompt in prompts]
        self.prompts += texts
        await self._take_a_turn(params)
        return [shout(text, request_id) for text, request_id in zip(texts, request_ids, strict=True)]

    async def __aenter__(self) -> ShoutingEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.num_closed += 1

    async def _take_a_turn(self, params: SamplingParams) -> None:
        self.params.append(params)
        self.num_asked += 1
        number = self.num_asked
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            self.on_question(number)
            for _ in range(self.num_turns + number % 3):  # answers come in another order than questions
                await asyncio.sleep(0)
            if self.lives_for is not None and number > self.lives_for:
                raise EngineDeadError("the engine died")
        finally:
            self.num_at_once -= 1


def _text_of(prompt: Prompt | EncodedPrompt) -> str:
    assert isinstance(prompt, EncodedPrompt)
    assert prompt.text is not None
    return prompt.text


def shout(prompt: str, request_id: str) -> RequestOutput:
    """Return the engine's answer."""
    if not prompt:
        raise RequestError("a prompt has no tokens", request_id=request_id)
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    if asked:  # a conversation: its last question
        prompt = asked[-1]
    if prompt == "crash":
        raise KeyError("a bug")
    if prompt == "nan":
        raise NonFiniteLogitsError("the logits are not finite")
    if prompt == "poison":
        raise EncoderDiedError("an encoder died over and over with this picture")
    completion = CompletionOutput(index=0, text=prompt.upper(), token_ids=[1, 2], finish_reason="stop")
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=[1, 2, 3],
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(arrival_time_s=0.0),
    )


class Starter:
    """Starts the given engines, one after the other."""

    def __init__(self, *engines: ShoutingEngine) -> None:
        self._engines = list(engines)
        self.num_started = 0

    async def __call__(self, config: EngineConfig) -> ShoutingEngine:
        self.num_started += 1
        return self._engines.pop(0)


def make_settings(folder: Path, **changes: Any) -> JobSettings:
    """Return the settings of a job from `in.jsonl` to `out.jsonl`."""
    model = changes.pop("model", "tiny")
    seed = changes.pop("model_seed", 0)
    config = EngineConfig.from_flat(model, seed=seed, **changes.pop("model_settings", {}))
    return JobSettings(input_path=folder / "in.jsonl", output_path=folder / "out.jsonl", config=config, **changes)


def write_input(folder: Path, num_lines: int) -> list[str]:
    """Write prompts `p0`, `p1`, ... of ids `id-0`, `id-1`, ...; return the ids."""
    ids = [f"id-{i}" for i in range(num_lines)]
    lines = [json.dumps({"custom_id": custom_id, "prompt": f"p{i}"}) for i, custom_id in enumerate(ids)]
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in lines))
    return ids


def read_output(folder: Path) -> list[dict[str, Any]]:
    """Return the output's lines: all of them completed."""
    lines = _read_lines(folder / "out.jsonl")
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    return lines


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """Return the error file's lines: all of them failed."""
    lines = _read_lines(folder / "out.jsonl.errors.jsonl")
    for line in lines:
        assert list(line) == ["id", "custom_id", "response", "error"]
        error = dict(line["error"])
        assert error.pop("line") >= 1
        assert line["response"]["status_code"] >= 400
        assert line["response"]["body"] == {"error": error}
    return lines


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(folder: Path) -> dict[str, str]:
    """Return the texts by id; no id may be there twice."""
    lines = read_output(folder)
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(found) == len(lines)
    return found
