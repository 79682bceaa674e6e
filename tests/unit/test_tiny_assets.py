"""The embedded model: its size, its tokenizer, its chat template, and that it has learned something."""

from __future__ import annotations

import importlib
import json
import math
import struct
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "raypp" / "assets" / "tiny"
RESERVED = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def train_tiny() -> ModuleType:
    return importlib.import_module("train_tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def render(tokenizer: Any, *messages: dict[str, Any], **settings: Any) -> str:
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **settings)
    return text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def test_the_checkpoint_is_small_and_in_bf16() -> None:
    data = (TINY / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    tensors = {name: t for name, t in json.loads(data[8 : 8 + header_bytes]).items() if name != "__metadata__"}
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert sum(math.prod(tensor["shape"]) for tensor in tensors.values()) <= 4_000_000
    assert len(data) <= 8_000_000
    assert "lm_head.weight" not in tensors


def test_the_configuration_is_a_qwen3_that_four_stages_can_share() -> None:
    config = json.loads((TINY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_hidden_layers"] >= 4
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["tie_word_embeddings"] is True


def test_generation_ends_with_a_turn_or_a_text(tokenizer: Any) -> None:
    ends = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_tokenizer_gives_every_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    "text", ["  two  spaces ", "e\u0301 is not \u00e9", "\r\n\t\x00", "\U0001f600\u4f60\u597d", "don't"]
)
def test_the_tokenizer_changes_nothing(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_byte_has_a_token(tokenizer: Any) -> None:
    assert set(ByteLevel.alphabet()) <= set(tokenizer.get_vocab())


def test_marks_are_single_tokens_within_the_vocabulary(tokenizer: Any) -> None:
    vocab_size = json.loads((TINY / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == vocab_size
    for mark in RESERVED:
        assert tokenizer(mark).input_ids == [tokenizer.convert_tokens_to_ids(mark)]


def test_decoding_without_special_tokens_keeps_thoughts_and_tool_calls(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|><think>a</think><tool_call>b</tool_call><|image_pad|><|im_end|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"


def test_a_conversation(tokenizer: Any) -> None:
    messages = ({"role": "system", "content": "Be kind."}, user("hello"), assistant("Hi."), user("bye"))
    assert render(tokenizer, *messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_switching_thinking_off_begins_the_answer_with_empty_thoughts(tokenizer: Any) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, user("hi"), add_generation_prompt=True, enable_thinking=True) == prompt
    assert render(tokenizer, user("hi"), add_generation_prompt=True, enable_thinking=False) == (
        prompt + "<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    "answer",
    [assistant("<think>\nhm\n</think>\n\nYes."), assistant("Yes.", reasoning_content="hm")],
    ids=["in the content", "beside the content"],
)
def test_only_the_newest_thoughts_are_shown(tokenizer: Any, answer: dict[str, Any]) -> None:
    assert render(tokenizer, user("a"), answer, user("b"), answer) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.<|im_end|>\n"
    )


def test_tools_are_listed_in_the_system_turn(tokenizer: Any) -> None:
    text = render(tokenizer, {"role": "system", "content": "Be kind."}, user("hi"), tools=[WEATHER])
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n\n")
    assert f"\n<tools>\n{json.dumps(WEATHER)}\n</tools>\n" in system
    assert system.endswith('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    assert rest == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(tokenizer, user("hi"), tools=[WEATHER]).startswith("<|im_start|>system\n# Tools\n\n")


@pytest.mark.parametrize("arguments", [{"city": "K\u00f6ln"}, '{"city": "K\u00f6ln"}'], ids=["object", "JSON"])
def test_tool_calls_and_their_responses(tokenizer: Any, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    responses = [{"role": "tool", "content": "sun"}, {"role": "tool", "content": "rain"}]
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>'
    text = render(
        tokenizer, user("?"), assistant(None, tool_calls=[call, call]), *responses, add_generation_prompt=True
    )
    assert text == (
        f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_thoughts_outlive_the_tool_calls_that_they_led_to(tokenizer: Any) -> None:
    call = {"function": {"name": "weather", "arguments": {}}}
    messages = (
        user("?"),
        assistant("Wait.", reasoning_content="ask", tool_calls=[call]),
        {"role": "tool", "content": "sun"},
    )
    assert render(tokenizer, *messages) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\nask\n</think>\n\nWait.\n"
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
    )


def test_content_may_come_in_parts(tokenizer: Any) -> None:
    content = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "video"}]
    assert render(tokenizer, user(content)) == (
        "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
    )


def test_neither_held_out_files_nor_their_tests_are_trained_on(train_tiny: ModuleType) -> None:
    names = ["heapq.py", "test/test_heapq.py", "http/cookiejar.py", "test/test_http_cookiejar.py", "http/client.py"]
    training, held_out = train_tiny.split_held_out(dict.fromkeys(names, "text"))
    assert list(training) == ["http/client.py"]
    assert set(held_out) == {"heapq.py", "http/cookiejar.py"}


def test_held_out_text_takes_less_than_the_promised_bits(train_tiny: ModuleType, model: Any, tokenizer: Any) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    texts = {n: (library / n).read_text(encoding="utf-8")[:8000] for n in ("heapq.py", "shlex.py", "csv.py")}
    assert set(texts) <= set(train_tiny.HELD_OUT)
    total, _ = train_tiny.bits_per_byte(model, tokenizer, texts)
    assert total <= 1.9
    backwards, _ = train_tiny.bits_per_byte(model, tokenizer, {"csv.py": texts["csv.py"][:2000][::-1]})
    assert backwards > 1.9, "a score that text read backwards can reach measures nothing"


def test_windows_score_every_token_once(train_tiny: ModuleType) -> None:
    class Uniform:
        """Says that all of 16 tokens are equally likely: four bits each, wherever the windows lie."""

        device = torch.device("cpu")

        def __call__(self, ids: torch.Tensor) -> Any:
            assert ids.shape[1] <= 8
            return type("Output", (), {"logits": torch.zeros(*ids.shape, 16)})

    for num_tokens in (1, 7, 8, 9, 12, 13, 40):
        assert train_tiny.score_bits(Uniform(), [3] * num_tokens, 0, context=8) == pytest.approx(4 * num_tokens)


def test_a_chat_answer_ends_by_itself(model: Any, tokenizer: Any) -> None:
    prompt = render(tokenizer, user("hello"), add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(output).endswith("<|im_end|>")
    assert len(output) > 2
