"""A syntax of a user's own, marked by special tokens, over HTTP: read, streamed, and held to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_tools import HELLO, SILENT, TOOLS
from running_app import RunningApp, running_app

import raypp

SPECIAL = {"<tool_call>": "<|do|>", "</tool_call>": "<|done|>", "<think>": "<|muse|>", "</think>": "<|tell|>"}
MODULE = """
from raypp.openai_api.syntax import CallSyntax, Mark, ThoughtSyntax, marks

CALLS = CallSyntax(
    begins=(Mark("<|do|>", "{", r"^(?P<name>[^\\s{}]+) $"),),
    end="<|done|>",
    call="<|do|>$name $arguments<|done|>",
    separator="",
)
THOUGHTS = ThoughtSyntax(begins=marks("<|muse|>"), ends=("<|tell|>",), thought="<|muse|>$thought<|tell|>")
"""


@pytest.fixture(scope="module")
def token_ids() -> dict[str, int]:
    """The marks' ids; filled in by `app`."""
    return {}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, token_ids: dict[str, int]) -> Iterator[RunningApp]:
    folder, tiny = tmp_path_factory.mktemp("own"), Path(raypp.__file__).parent / "assets" / "tiny"
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(tiny / name)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in SPECIAL:
            token |= {"content": SPECIAL[token["content"]], "special": True}
            token_ids[token["content"]] = token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "own_syntax_of_a_test.py").write_text(MODULE)
    parsers = {
        "tool_call_parser": "own_syntax_of_a_test:CALLS",
        "reasoning_parser": "own_syntax_of_a_test:THOUGHTS",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with running_app(
            {"served_model_name": ["tiny"]}, model=str(folder), max_model_len=1024, num_stages=1, **parsers
        ) as app:
            yield app


@pytest.fixture
def client(app: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_forced_calls_are_written_with_the_models_own_tokens(client: openai.OpenAI, token_ids: dict[str, int]) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "tools": TOOLS, "seed": 1}
    given |= {"tool_choice": "required", "parallel_tool_calls": False}
    body = {**SILENT, "return_token_ids": True}
    [choice] = client.chat.completions.create(extra_body=body, **given).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or ()
    assert isinstance(json.loads(call.function.arguments), dict)  # type: ignore[union-attr]
    ids = choice.model_extra["token_ids"]  # type: ignore[index]
    assert (ids[0], ids[-2]) == (token_ids["<|do|>"], token_ids["<|done|>"])
    chunks = list(client.chat.completions.create(stream=True, extra_body=body, **given))
    pieces = [piece.function for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.arguments or "" for piece in pieces if piece) == call.function.arguments  # type: ignore[union-attr]
    assert len(pieces) > 2


@pytest.mark.parametrize("stream", [False, True])
def test_free_text_is_read(client: openai.OpenAI, token_ids: dict[str, int], stream: bool) -> None:
    """A form plays the model that writes this by itself, with a special token that belongs to no syntax."""
    texts = ["<|muse|>", "so", "<|tell|>", "I look.", "<|do|>", 'Ping {"text": "a"}', "<|done|>", "<|vision_start|>"]
    known = token_ids | {"<|vision_start|>": 4021}
    parts = [
        {"type": "token", "token": known[text]} if text in known else {"type": "const_string", "value": text}
        for text in texts
    ]
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    tool = {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": False}}
    body = {"structured_outputs": {"structural_tag": form}}
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "tools": [tool]}
    with client.chat.completions.stream(extra_body=body, **given) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion()
    answer = streamed if stream else client.chat.completions.create(extra_body=body, **given)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.model_extra["reasoning_content"] == "so"  # type: ignore[index]
    [call] = choice.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("Ping", '{"text": "a"}')  # type: ignore[union-attr]
    plain = client.chat.completions.create(extra_body=body, **{**given, "tools": openai.NOT_GIVEN})
    assert plain.choices[0].message.content == 'I look.Ping {"text": "a"}'
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.reasoning_tokens in (3, 4)  # "so" is one token or two
