"""OpenAI bodies become prompts and sampling parameters; what is wrong with one is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raypp.errors import EngineDeadError, FatalRequestError, RequestError
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import BodyError, describe_error, parse_body
from raypp.openai_api.syntax import MessageSyntax
from raypp.openai_api.syntaxes import HERMES_CALLS
from raypp.openai_api.tools import FunctionDefinition, Tool, ToolUse
from raypp.types import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": HELLO, **fields})


def complete(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, {"prompt": "a", **fields})


def test_defaults() -> None:
    assert chat().sampling_params(100) == SamplingParams(max_tokens=100)
    assert complete().sampling_params(100) == SamplingParams(max_tokens=16)
    assert complete(max_tokens=10**12).sampling_params(100) == SamplingParams(max_tokens=100)
    assert chat(max_tokens=5, max_completion_tokens=7).sampling_params(100).max_tokens == 7


def test_the_models_defaults_hold_for_fields_that_are_left_out():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    for make in (chat, complete):
        assert make().sampling_params(100, defaults=defaults) == SamplingParams(**defaults)
        assert make(temperature=None, top_k=0, max_tokens=4).sampling_params(100, defaults=defaults) == SamplingParams(
            temperature=0.6, top_k=0, max_tokens=4
        )
        assert make(temperature=0, n=1).sampling_params(5, defaults=defaults) == SamplingParams(
            temperature=0, top_k=20, max_tokens=5
        )
    assert chat(max_completion_tokens=7).sampling_params(100, defaults=defaults).max_tokens == 7


def test_all_parameters_of_the_engine() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": -4, "stop": ["x", "y"]}
    fields |= {"n": 2, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"7": -100}}
    vllm = {"stop_token_ids": [7], "ignore_eos": True, "repetition_penalty": 1.5, "min_tokens": 2, "bad_words": ["z"]}
    vllm |= {"allowed_token_ids": [1, 2], "skip_special_tokens": False, "include_stop_str_in_output": True}
    vllm |= {"prompt_logprobs": 3}
    expected = SamplingParams(**fields, **vllm, max_tokens=9)  # type: ignore[arg-type]
    assert chat(**fields, **vllm, max_tokens=9).sampling_params(100) == expected
    assert complete(**fields, **vllm, max_tokens=9).sampling_params(100) == expected


def test_logprobs() -> None:
    assert chat(logprobs=True).sampling_params(100).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling_params(100).logprobs == 4
    assert complete(logprobs=2).sampling_params(100) == SamplingParams(max_tokens=16, logprobs=2)
    assert complete(logprobs=2, echo=True).sampling_params(100).prompt_logprobs == 2


def test_values_that_change_nothing_are_no_parameters() -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "stream": False}
    assert chat(**neutral, metadata={"a": "b"}).sampling_params(100) == SamplingParams(max_tokens=100)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert complete(prompt=prompt).prompts() == prompts


def test_messages_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts, "name": "jo"},
        {"role": "assistant", "content": None, "refusal": None},
    ]
    assert chat(messages=messages).conversation(takes_images=False) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "jo"},
        {"role": "assistant", "content": ""},
    ]


def test_images_go_only_to_models_that_take_them() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,x"}}, {"type": "text", "text": "what?"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.conversation(takes_images=True)[0]["content"] == parts
    with pytest.raises(RequestError, match="takes no images"):
        request.conversation(takes_images=False)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"temperature": "1"}, "temperature", "'1'"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'king'"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            "got: 3; expected: string or a list of p",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "expected: a JSON object"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": 3}, "stop", "expected: string or a list of texts"),
        ({"stop": ""}, "stop", "expected: at least 1 character"),
        ({"request_id": "a\nb"}, "request_id", "expected: text without line breaks and other control characters"),
        (
            {"logit_bias": {str(index): 1 for index in range(2000)}},
            "logit_bias",
            "got: 2,000 entries; expected: at most 1,024 entries",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": ["x"]}]}]},
            "messages[0].content[0]",
            "got: 'video'; expected: 'text', 'image_url'",
        ),
    ],
)
def test_a_bad_body_names_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BodyError) as caught:
        chat(**fields)
    status, response = describe_error(caught.value)
    assert (status, response.error.type, response.error.param) == (400, "invalid_request_error", param)
    assert words in response.error.message


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (["a", [4]], "prompt[1]", "got: prompt[1] = [4]; expected: text, as prompt[0] is: all have to be of one kind"),
        ([[4], [5], "a"], "prompt[2]", "expected: a list of token ids, as prompt[0] is"),
        ([4, True], "prompt[1]", "expected: a token id, as prompt[0] is"),
        ([4, -1], "prompt[1]", "greater than or equal to 0"),
        ([[4], [5, "a"]], "prompt[1][1]", "integer"),
        (5, "prompt", "expected: string or a list of texts, of token ids, or of lists of token ids"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, param: str, words: str) -> None:
    with pytest.raises(BodyError) as caught:
        complete(prompt=prompt)
    assert caught.value.param == param
    assert words in str(caught.value)


INT = {"type": "integer"}


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("parameters", "is_held"),
    [
        ({"type": ["object", "null"], "properties": {"a": INT}}, True),
        ({"anyOf": [INT, {"type": "object", "properties": {"a": INT}}]}, True),
        (INT, False),
        ({"type": ["array", "null"]}, False),
        ({"enum": ["x"]}, False),
        ({"type": "objects"}, False),
    ],
)
def test_arguments_are_an_object_whatever_the_schema_of_a_function(
    parameters: dict[str, Any], is_held: bool, is_strict: bool
) -> None:
    tool = Tool(type="function", function=FunctionDefinition.model_validate({"name": "f", "parameters": parameters}))
    tool.function.strict = is_strict
    use = ToolUse((tool,), must_call=True, may_call_several=False)
    if is_strict and not is_held:
        with pytest.raises(RequestError, match="the parameters of f cannot be enforced, and it is strict"):
            use.argument_schema(tool, "json")
    else:
        expected = parameters if is_held else {"additionalProperties": True}
        assert use.argument_schema(tool, "json") == {**expected, "type": "object"}


@pytest.mark.parametrize("given", [{"name": "a"}, {"name": "a", "schema": None}, {"name": "a", "strict": None}])
def test_a_form_without_a_schema_is_any_object(given: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": given}
    form = chat(response_format=wanted).sampling_params(100).structured_outputs
    assert form is not None
    assert json.loads(form["json_schema"]) == {"type": "object", "additionalProperties": True}


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "several kinds for one text; got: ['choice', 'regex']; expected: a dict with one of",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex is empty"),
        ({"structured_outputs": {"regex": "a" * (1 << 21)}}, "structured_outputs", "too long"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format",
            "json_schema is no JSON object; got: 5",
        ),
        (
            {"tools": [FUNCTION, FUNCTION]},
            "tools",
            "got: f, as tools[0] and tools[1]; expected: a name of its own for every tool",
        ),
    ],
)
def test_what_is_refused_later_names_the_field_too(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields).sampling_params(100)
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
        {"top_logprobs": 3},
        {"logit_bias": {"x": 1}},
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        chat(**fields).sampling_params(100)


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("guided_json", "json_schema", {"type": "integer"}),
        ("guided_regex", "regex", "a+"),
        ("guided_choice", "choice", ["a", "b"]),
        ("guided_grammar", "grammar", 'root ::= "a"'),
    ],
)
def test_guided_fields_are_structured_outputs(name: str, kind: str, value: Any) -> None:
    for make in (chat, complete):
        same = make(structured_outputs={kind: value}).sampling_params(100)
        assert make(**{name: value}).sampling_params(100) == same
        assert same.structured_outputs is not None
        assert make(**{name: value}, structured_outputs={kind: value}).sampling_params(100) == same  # guidance's
        with pytest.raises(RequestError, match="two constraints for one text") as caught:
            make(**{name: value}, structured_outputs={"regex": "b"}).sampling_params(100)
        assert caught.value.param == name
    with pytest.raises(RequestError, match=f"{name} beside response_format") as caught:
        chat(**{name: value}, response_format={"type": "json_object"}).sampling_params(100)
    assert chat(**{name: value}).form_param == complete(**{name: value}).form_param == caught.value.param == name


def test_functions_are_tools() -> None:
    functions = [FUNCTION["function"], {"name": "g"}]
    request = chat(functions=functions)
    tools = [{"type": "function", "function": function} for function in functions]
    assert request.rendering().chat_template_kwargs == chat(tools=tools).rendering().chat_template_kwargs
    forced, tool = chat(functions=functions, function_call={"name": "g"}), {"name": "g"}
    syntax = MessageSyntax(calls=HERMES_CALLS)
    same = chat(tools=tools, tool_choice={"type": "function", "function": tool}).sampling_params(100, syntax)
    assert forced.sampling_params(100, syntax) == same
    assert chat(functions=functions, function_call="none").rendering().chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}], "tools": [FUNCTION]}, "functions"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": {"name": "g"}}, "function_call"),
    ],
)
def test_functions_that_contradict_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields).rendering()
    assert caught.value.param == param


def test_the_older_form_of_calls_in_messages() -> None:
    call = {"name": "f", "arguments": '{"x": 1}'}
    older = [*HELLO, {"role": "assistant", "content": None, "function_call": call}]
    older += [{"role": "function", "name": "f", "content": "2"}]
    newer = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}]
    newer += [{"role": "tool", "name": "f", "content": "2"}]
    plain = [chat(messages=messages).conversation(takes_images=False) for messages in (older, newer)]
    assert plain[0] == plain[1]
    both = {"role": "assistant", "function_call": call, "tool_calls": [{"function": call}]}
    with pytest.raises(RequestError, match="beside tool_calls"):
        chat(messages=[both]).conversation(takes_images=False)


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(BodyError, match="invalid value for the body"):
        parse_body(ChatRequest, [1])
    with pytest.raises(BodyError, match="messages is missing"):
        parse_body(ChatRequest, {})


def test_errors_of_the_engine_have_a_status() -> None:
    assert describe_error(EngineDeadError("gone"))[0] == 503
    status, response = describe_error(FatalRequestError("kills engines"))
    assert (status, response.error.code) == (400, "fatal_request"), "clients send again what fails with 5xx"
    status, response = describe_error(KeyError("secret"))
    assert (status, "secret" in response.error.message) == (500, False)
