"""The `openai` client's loop of tools against a server of gpt-oss's shape: an engine that answers in channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from channel_model import make_folder
from fake_engine import FakeEngine
from running_app import RunningApp, running_app

from raypp.api.tokenizer import Tokenizer
from raypp.openai_api.syntaxes import GPT_OSS_CALLS, GPT_OSS_THOUGHTS
from raypp.request import Request

START = "<|start|>assistant"
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather where I live?"}]
FORECAST = {"city": 'Ny-\u00c5lesund "}{" \n<|end', "days": 3, "at": [1.5, None, {"hourly": True}], "unit": {}}
ANSWERS = [  # by the number of results in the prompt
    f"<|channel|>analysis<|message|>Where is that?<|end|>{START}<|channel|>commentary<|message|>I look it up.<|end|>"
    f"{START}<|channel|>commentary to=functions.locate <|constrain|>json<|message|>{{}}<|call|>",
    f"<|channel|>analysis<|message|>Now the forecast.<|end|>{START} to=functions.forecast<|channel|>commentary "
    f"<|constrain|>json<|message|>{json.dumps(FORECAST, ensure_ascii=False)}<|call|>",
    f"<|channel|>analysis<|message|>Cold.<|end|>{START}<|channel|>final<|message|>It snows: \u22122\u00b0.<|return|>",
]
SEEN = [("Where is that?", "I look it up.", "locate", {}), ("Now the forecast.", None, "forecast", FORECAST)]
RESULTS = {"locate": '{"city": "Ny-\u00c5lesund"}', "forecast": "snow"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in RESULTS]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


class ChannelModel:
    """Answers by how many results of tools the prompt has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompts: list[str] = []

    def __call__(self, request: Request) -> list[int]:
        prompt = self._tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)
        self.prompts.append(prompt)
        return self._tokenizer.encode([ANSWERS[prompt.count(" to=assistant")]], add_special_tokens=False)[0].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChannelModel:
    return ChannelModel(Tokenizer(make_folder(tmp_path_factory.mktemp("gpt-oss-like"))))


@pytest.fixture(scope="module")
def app(model: ChannelModel) -> Iterator[RunningApp]:
    tokenizer = model._tokenizer
    ids = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_token_ids}
    ends = [ids["<|return|>"], ids["<|call|>"]]
    engine = FakeEngine(model, tokenizer.model_path, eos_token_ids=ends)
    engine.model_info |= {"vocab_size": tokenizer.vocab_size, "max_model_len": 4096}
    settings = {"served_model_name": ["gpt-oss"]}
    with running_app(settings, model=tokenizer.model_path, launch=engine.launch) as app:
        yield app


@pytest.fixture
def client(app: RunningApp, model: ChannelModel) -> Iterator[openai.OpenAI]:
    model.prompts.clear()
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_chats(app: RunningApp, client: openai.OpenAI, model: ChannelModel, stream: bool) -> None:
    assert (app.context.preparer.syntax.calls, app.context.preparer.syntax.thoughts) == (
        GPT_OSS_CALLS,
        GPT_OSS_THOUGHTS,
    )
    messages, seen = list(QUESTION), list[Any]()
    while True:
        given: dict[str, Any] = {"model": "gpt-oss", "messages": messages, "tools": TOOLS, "reasoning_effort": "high"}
        if stream:
            with client.chat.completions.stream(stream_options={"include_usage": True}, **given) as events:
                for _ in events:
                    pass
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**given)
        [choice] = answer.choices
        message = choice.message
        thought = message.model_extra["reasoning_content"]  # type: ignore[index]
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert choice.finish_reason == "tool_calls"
        [call] = message.tool_calls
        function: Any = call.function
        seen.append((thought, message.content or None, function.name, json.loads(function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[function.name]})
    assert seen == SEEN
    assert (choice.finish_reason, thought, message.content) == ("stop", "Cold.", "It snows: \u22122\u00b0.")
    check_prompts(model.prompts)
    client.chat.completions.create(model="gpt-oss", messages=[*messages, *QUESTION], tools=TOOLS)
    assert "analysis" not in model.prompts[-1]  # of what was answered, the template shows no thoughts
    assert "Reasoning: medium" in model.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_responses(client: openai.OpenAI, model: ChannelModel, stream: bool) -> None:
    items, seen = list(QUESTION), list[Any]()
    while True:
        given: dict[str, Any] = {"model": "gpt-oss", "input": items, "tools": RESPONSE_TOOLS}
        given["reasoning"] = {"effort": "high"}
        if stream:
            with client.responses.stream(**given) as events:
                for _ in events:
                    pass
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**given)
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content or ()]
        calls = [item for item in response.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        if not calls:
            break
        [call] = calls
        seen.append(("".join(thoughts), response.output_text or None, call.name, json.loads(call.arguments)))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]})
    assert seen == SEEN
    assert (thoughts, response.output_text) == (["Cold."], "It snows: \u22122\u00b0.")
    check_prompts(model.prompts)


def check_prompts(prompts: list[str]) -> None:
    """Check what the model was shown of its own calls, thoughts and results."""
    first, second, third = prompts
    place = json.dumps(RESULTS["locate"], ensure_ascii=False)
    assert "Reasoning: high" in first
    assert "type forecast = " in first
    assert first.endswith(f"<|end|>{START}")
    assert second.startswith(first.removesuffix(START))
    assert second.removeprefix(first.removesuffix(START)) == (
        f"{START}<|channel|>analysis<|message|>Where is that?\n\nI look it up.<|end|>"
        f"{START} to=functions.locate<|channel|>commentary json<|message|>{{}}<|call|>"
        f"<|start|>functions.locate to=assistant<|channel|>commentary<|message|>{place}<|end|>{START}"
    )
    assert third.startswith(second.removesuffix(START))
    assert f"{START}<|channel|>analysis<|message|>Now the forecast.<|end|>{START} to=functions.forecast" in third
    assert json.dumps(FORECAST, ensure_ascii=False) in third
