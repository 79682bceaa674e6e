"""Tools as Llama 3 calls them, over HTTP: the embedded model with Llama's tokens and a chat template like its."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_tools import HELLO, MODELS, SILENT, TOOLS, check_named_tool_and_none, check_tools
from running_app import RunningApp, running_app

import raypp
from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.syntax import MessageSyntax
from raypp.openai_api.syntaxes import LLAMA3_CALLS

RENAMED = {"<tool_call>": "<|python_tag|>", "</tool_call>": "<|eom_id|>"}
# As Llama's own it takes one call per message, and writes arguments that it takes for an object.
TEMPLATE = """{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\n' -}}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}{{ raise_exception('only single tool calls') }}{%- endif -%}
{%- set function = message.tool_calls[0].function -%}
{{- '{"name": "' ~ function.name ~ '", "parameters": ' ~ (function.arguments | tojson) ~ '}' -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tiny = tmp_path_factory.mktemp("llama-like"), Path(raypp.__file__).parent / "assets" / "tiny"
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(tiny / name)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in RENAMED:
            token |= {"content": RENAMED[token["content"]], "special": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def app(model: Path) -> Iterator[RunningApp]:
    with running_app({"served_model_name": ["tiny"]}, model=str(model), max_model_len=1024, num_stages=1) as app:
        yield app


@pytest.fixture
def client(app: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_clients_helpers(app: RunningApp, client: openai.OpenAI) -> None:
    assert app.context.preparer.syntax.calls is LLAMA3_CALLS
    check_tools(client)
    check_named_tool_and_none(client)


def test_what_the_model_writes_is_its_own_syntax(client: openai.OpenAI) -> None:
    params = ChatRequest(messages=HELLO, tools=TOOLS, tool_choice="required", **SILENT).sampling_params(
        1024, MessageSyntax(calls=LLAMA3_CALLS)
    )
    # The form by itself, without tools: what comes is the text.
    constraint = params.structured_outputs
    assert constraint is not None
    text = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=200, seed=3, extra_body={"structured_outputs": dict(constraint)}
    )
    call = json.loads(text.choices[0].message.content or "")
    assert list(call) == ["name", "parameters"]
    MODELS[call["name"]].model_validate(call["parameters"])


@pytest.mark.parametrize("prefix", ["", "<|python_tag|>"])
def test_free_text_is_searched_for_calls(client: openai.OpenAI, prefix: str) -> None:
    text, arguments = prefix + '{"name": "Ping", "parameters": {"text": "a {b}"}}', '{"text": "a {b}"}'
    # Not strict, so nothing is held to a form: a constraint plays the model that writes this by itself.
    tool = {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": False}}
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "tools": [tool]}
    given["extra_body"] = {"structured_outputs": {"choice": [text]}}
    [choice] = client.chat.completions.create(**given).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("Ping", arguments)
    chunks = list(client.chat.completions.create(stream=True, **given))
    pieces = [piece.function for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.name for piece in pieces if piece.name] == ["Ping"]
    assert "".join(piece.arguments or "" for piece in pieces) == arguments
    # They came as they were written; where the machine is busy, several tokens come as one chunk.
    assert len(pieces) > 2 or len(chunks) < 5


def test_tools_of_a_model_whose_calls_are_not_known_are_refused() -> None:
    with pytest.raises(RequestError, match=r"unknown.*tool_call_parser"):
        ChatRequest(messages=HELLO, tools=TOOLS).sampling_params(1024, MessageSyntax())
