"""A body becomes prompt, parameters and parser: the tokenizer is real, the engine is not needed."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import raypp
from raypp.api.tokenizer import Tokenizer
from raypp.errors import ContextLengthError, RequestError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import describe_error, parse_body
from raypp.openai_api.from_outputs import PreparedChat, PreparedCompletion, ResponseHead
from raypp.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput

TINY = Path(raypp.__file__).parent / "assets" / "tiny"
HELLO = [{"role": "user", "content": "hello"}]
PING = {"name": "ping", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}


def with_template(folder: Path, change: tuple[str, str]) -> Tokenizer:
    """Return the embedded model's tokenizer with another chat template, and thoughts as special tokens."""
    (folder / "tokenizer_config.json").write_text((TINY / "tokenizer_config.json").read_text())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] |= token["content"] in ("<think>", "</think>")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (TINY / "chat_template.jinja").read_text()
    assert change[0] in template
    (folder / "chat_template.jinja").write_text(template.replace(*change))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A model that only answers after a thought: its template begins one and has no switch."""
    switch = (
        "{%- if enable_thinking is defined and not enable_thinking -%}\n        {{- '<think>\\n\\n</think>\\n\\n' -}}"
    )
    return with_template(tmp_path_factory.mktemp("thinker"), (switch, "{%- if true -%}{{- '<think>\\n' -}}"))


def prepare(tokenizer: Tokenizer, *, max_model_len: int = 1000, **fields: Any) -> PreparedChat:
    request = parse_body(ChatRequest, {"messages": HELLO, **fields})
    prepared = asyncio.run(BodyPreparer(tokenizer, None, max_model_len=max_model_len).prepare(request))
    assert isinstance(prepared, PreparedChat)
    return prepared


def complete(tokenizer: Tokenizer, *, max_model_len: int = 1000, **fields: Any) -> PreparedCompletion:
    request = parse_body(CompletionRequest, fields)
    prepared = asyncio.run(BodyPreparer(tokenizer, None, max_model_len=max_model_len).prepare(request))
    assert isinstance(prepared, PreparedCompletion)
    return prepared


def answered(prepared: PreparedChat | PreparedCompletion, text: str, **more: Any) -> dict[str, Any]:
    """Return the first choice of the response to an engine that wrote this."""
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=[5],
        finish_reason=more.pop("reason", "length"),
        **more.pop("of_choice", {}),
    )
    output = RequestOutput(
        request_id="r",
        prompt=prepared.prompts[0].text,
        prompt_token_ids=prepared.prompts[0].token_ids.tolist(),
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(arrival_time_s=0.0),
        **more,
    )
    choice: dict[str, Any] = prepared.response(ResponseHead("id", 0, "tiny"), [output]).model_dump()["choices"][0]
    return choice


def form_of(prepared: PreparedChat) -> dict[str, Any]:
    """Return the form that the text is held to, as the compiler gets it."""
    constraint = prepared.params.structured_outputs
    assert constraint is not None
    form: dict[str, Any] = json.loads(constraint["structural_tag"])["format"]
    return form


def test_a_form_comes_behind_the_thought_that_the_prompt_has_begun(thinker: Tokenizer) -> None:
    prepared = prepare(thinker, response_format={"type": "json_object"})
    assert (prepared.prompts[0].text or "").endswith("<think>\n")
    thought, answer = form_of(prepared)["elements"]
    end = {"type": "token", "token": thinker.token_id("</think>")}
    assert thought["elements"][0] == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    assert answer["type"] == "json_schema"
    message = answered(prepared, "so\n</think>\n\n{}")["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "{}")


def test_a_thought_that_is_begun_is_one_whatever_was_asked_for(thinker: Tokenizer) -> None:
    silent = {"chat_template_kwargs": {"enable_thinking": False}}  # this template does not read it
    prepared = prepare(thinker, response_format={"type": "json_object"}, **silent)
    assert form_of(prepared)["type"] == "sequence"


def test_no_effort_is_no_thoughts(tiny: Tokenizer, thinker: Tokenizer) -> None:
    silent = prepare(tiny, chat_template_kwargs={"enable_thinking": False}).prompts[0].text
    assert prepare(tiny, reasoning_effort="none").prompts[0].text == silent
    assert prepare(tiny, reasoning_effort="high").prompts[0].text == prepare(tiny).prompts[0].text != silent
    loud = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prepare(tiny, **loud).prompts[0].text != silent
    form = prepare(tiny, reasoning_effort="none", response_format={"type": "json_object"}).params.structured_outputs
    assert form is not None
    assert "json_schema" in form
    with pytest.raises(RequestError, match="cannot turn thoughts off") as caught:
        prepare(thinker, reasoning_effort="none")
    assert caught.value.param == "reasoning_effort"
    prepare(thinker, reasoning_effort="low")


def test_effort_reaches_templates_that_read_it(tmp_path: Path) -> None:
    begin = "{%- if add_generation_prompt -%}"
    tokenizer = with_template(tmp_path, (begin, begin + "{{- 'effort: ' ~ reasoning_effort | default('medium') -}}"))
    assert "effort: low" in (prepare(tokenizer, reasoning_effort="low").prompts[0].text or "")
    assert "effort: medium" in (prepare(tokenizer).prompts[0].text or "")


def test_requests_bring_no_template_and_no_arguments_of_the_rendering(tiny: Tokenizer) -> None:
    own = set(inspect.signature(tiny._hf.apply_chat_template).parameters) - {"tools", "documents", "kwargs"}
    assert {"chat_template", "conversation", "tokenize", "continue_final_message"} < own
    for name in own | {"messages", "conversations", "self"}:  # those of what it calls
        with pytest.raises(RequestError, match=f"chat_template_kwargs must not have {name}") as caught:
            prepare(tiny, chat_template_kwargs={name: "{% for _ in range(9 ** 9) %}{% endfor %}"})
        assert caught.value.param == "chat_template_kwargs"


def test_strict_tools_are_held_to_their_schemas_when_the_model_may_choose(tiny: Tokenizer) -> None:
    strict, free = ({"type": "function", "function": {**PING, "strict": is_strict}} for is_strict in (True, False))
    for choice in ({}, {"tool_choice": "auto"}):
        assert prepare(tiny, tools=[free], **choice).params.structured_outputs is None
        held = form_of(prepare(tiny, tools=[strict], **choice))
        assert (held["type"], held["triggers"]) == ("triggered_tags", ["<tool_call>"])
        assert [tag["content"]["elements"][1]["json_schema"] for tag in held["tags"]] == [PING["parameters"]]


def test_deep_parameters_of_a_forced_call_are_any_object_or_refused(tiny: Tokenizer) -> None:
    schema: Any = {"type": "string"}
    for _ in range(95):  # two levels of JSON each: as deep as a body may be
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forced = prepare(tiny, max_model_len=10_000, tools=[tool], tool_choice="required")
    [_, calls] = form_of(forced)["elements"]
    assert calls["elements"][0]["elements"][1]["json_schema"] == {"type": "object", "additionalProperties": True}
    tool["function"]["strict"] = True
    with pytest.raises(RequestError, match="nesting deeper than 64"):
        prepare(tiny, max_model_len=10_000, tools=[tool])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ping"}}])
@pytest.mark.parametrize(
    "cut", ["<tool_cal", "<tool_call>", '<tool_call>\n{"name": "pi', "<think>so</think>\n<tool_call>\n{"]
)
def test_a_forced_call_that_is_cut_off_is_no_content(tiny: Tokenizer, choice: Any, cut: str) -> None:
    tools = [{"type": "function", "function": PING}]
    forced = prepare(tiny, tools=tools, tool_choice=choice)
    assert answered(forced, cut)["message"]["content"] == ""
    parser = forced.make_parser()
    assert not "".join(parser.feed(char).content for char in cut) + parser.feed("", is_last=True).content
    free = answered(prepare(tiny, tools=tools), cut)["message"]
    assert cut.endswith(free["content"])
    assert free["content"]


def test_functions_are_answered_in_their_own_form(tiny: Tokenizer) -> None:
    prepared = prepare(tiny, functions=[PING])
    choice = answered(prepared, '<tool_call>\n{"name": "ping", "arguments": {"n": 1}}\n</tool_call>', reason="stop")
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "ping", "arguments": '{"n": 1}'}
    assert choice["message"]["content"] is None
    assert "tool_calls" not in choice["message"]
    assert answered(prepared, "no", reason="stop")["finish_reason"] == "stop"


def ended(text: str, token_ids: list[int], reason: Any = "stop") -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=token_ids, finish_reason=reason)


@pytest.mark.parametrize(
    ("thought", "rest"),
    [
        ("<think>\nso\n</think>", "\n\nhello"),
        ("<think>so it never ends", ""),
        ("", "hello <think>so</think>"),
        ("", "hello"),
    ],
)
@pytest.mark.parametrize("is_spelled", [False, True])
def test_thoughts_are_counted(tiny: Tokenizer, thought: str, rest: str, is_spelled: bool) -> None:
    def ids_of(text: str) -> list[int]:
        pieces = list(text) if is_spelled else [text]
        return [token for ids in tiny.encode(pieces) for token in ids.tolist()]

    ids = ids_of(thought + rest)
    metrics = RequestMetrics(arrival_time_s=0.0)
    output = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[ended(thought + rest, ids)],
        finished=True,
        metrics=metrics,
    )
    usage = prepare(tiny).response(ResponseHead("id", 0, "tiny"), [output]).usage
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(ids_of(thought))
    assert usage.completion_tokens == len(ids)
    assert complete(tiny, prompt="a").usage([output]).completion_tokens_details is None


def test_thoughts_are_counted_from_where_the_prompt_has_begun_one(thinker: Tokenizer) -> None:
    ids = thinker.encode(["so\n</think>\n\nhello"])[0].tolist()
    behind = ids.index(thinker.token_id("</think>")) + 1
    count = prepare(thinker).num_reasoning
    assert count(ended("so\n</think>\n\nhello", ids)) == count(ended("so", ids, None)) == behind
    assert count(ended("so", ids[: behind - 1], None)) == behind - 1


def test_too_long_a_prompt_is_told_in_the_words_that_clients_look_for(tiny: Tokenizer) -> None:
    long = "hello " * 300
    for run, param in (
        (lambda: prepare(tiny, max_model_len=64, messages=[{"role": "user", "content": long}]), "messages"),
        (lambda: complete(tiny, max_model_len=64, prompt=["a", long]), "prompt"),
        (lambda: complete(tiny, max_model_len=64, prompt=[[1] * 64]), "prompt"),
    ):
        with pytest.raises(ContextLengthError) as caught:
            run()
        status, response = describe_error(caught.value)
        assert (status, response.error.code, response.error.param) == (400, "context_length_exceeded", param)
        assert "maximum context length is 64 tokens" in response.error.message
    assert len(complete(tiny, max_model_len=64, prompt=[[1] * 63]).prompts[0].token_ids) == 63


def test_too_long_a_prompt_leaves_no_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, log = Tokenizer(TINY), logging.getLogger("transformers")  # it keeps its records to itself
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(ContextLengthError):
            complete(tokenizer, max_model_len=64, prompt="hello " * 5000)  # more than its tokenizer_config.json says
    finally:
        log.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_scoring_is_an_echo_without_a_continuation(tiny: Tokenizer) -> None:
    prepared = complete(tiny, prompt="def main(", max_tokens=0, echo=True, logprobs=1)
    assert (prepared.params.max_tokens, prepared.params.prompt_logprobs) == (1, 1)
    entries = [{token: Logprob(-1.0, 1, "x")} for token in prepared.prompts[0].token_ids.tolist()]
    logprobs = {"logprobs": [{5: Logprob(-2.0, 1, "y")}]}
    choice = answered(prepared, "y", of_choice=logprobs, prompt_logprobs=[None, *entries[1:]])
    assert (choice["text"], choice["finish_reason"]) == ("def main(", "length")
    assert len(choice["logprobs"]["tokens"]) == len(entries)
    with pytest.raises(RequestError, match="echo=true") as caught:
        complete(tiny, prompt="a", max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_a_conversation_may_end_inside_of_its_last_message(tiny: Tokenizer) -> None:
    said = {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]}
    bare = prepare(tiny, **said, add_generation_prompt=False).prompts[0].text or ""
    continued = prepare(tiny, **said, add_generation_prompt=False, continue_final_message=True).prompts[0].text or ""
    assert bare.startswith(continued)
    assert continued.endswith("I am")
    with pytest.raises(RequestError, match="add_generation_prompt=false") as caught:
        prepare(tiny, **said, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(("said", "parts"), [("<think>\nso", ("far", "yes")), ("I", ("", "far</think>yes"))])
def test_a_thought_in_a_continued_message_goes_on(tiny: Tokenizer, said: str, parts: tuple[str, str]) -> None:
    whole = {"messages": [*HELLO, {"role": "assistant", "content": said}], "continue_final_message": True}
    message = answered(prepare(tiny, **whole, add_generation_prompt=False), "far</think>yes")["message"]
    assert (message["reasoning_content"] or "", message["content"]) == parts


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that puts a token before each text and one behind it."""
    folder = tmp_path_factory.mktemp("framed")
    for path in TINY.glob("*token*"):
        (folder / path.name).write_text(path.read_text())
    (folder / "chat_template.jinja").write_text((TINY / "chat_template.jinja").read_text())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    first, second = (token["content"] for token in tokenizer["added_tokens"][:2])
    ids = {
        token["content"]: {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}
        for token in tokenizer["added_tokens"][:2]
    }
    single = [
        {"SpecialToken": {"id": first, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": second, "type_id": 0}},
    ]
    framing = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}
    before = tokenizer["post_processor"]
    processors = [before, framing] if before else [framing]
    tokenizer["post_processor"] = {"type": "Sequence", "processors": processors}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Tokenizer(folder)


def test_special_tokens_are_put_around_prompts_as_asked(framed: Tokenizer) -> None:
    def ids(**fields: Any) -> list[int]:
        make = prepare if "messages" in fields else complete
        return make(framed, **fields).prompts[0].token_ids.tolist()

    bare = ids(prompt="def main(", add_special_tokens=False)
    first, *inner, last = ids(prompt="def main(")
    assert inner == bare
    assert ids(prompt="def main(", add_special_tokens=True) == [first, *bare, last]
    chat = ids(messages=HELLO)
    assert ids(messages=HELLO, add_special_tokens=True) == [first, *chat, last]


def test_prompts_are_cut_to_their_ends(framed: Tokenizer) -> None:
    text = "".join(f"line {index} of a text, and more of it\n" for index in range(2000))
    whole = framed.encode([text])[0].tolist()
    first, *inner, last = whole

    def ids(**fields: Any) -> list[int]:
        return complete(framed, max_model_len=100, **fields).prompts[0].token_ids.tolist()

    for count in (1, 2, 3, 50, 99):
        kept = [*([first, *inner[len(inner) - count + 2 :]] if count > 1 else [first]), last][:count]
        assert ids(prompt=text, truncate_prompt_tokens=count) == kept
        bare = {"add_special_tokens": False, "truncate_prompt_tokens": count}
        assert ids(prompt=text, **bare) == inner[-count:]
        assert ids(prompt=whole, **bare) == whole[-count:]
    assert ids(prompt=text, truncate_prompt_tokens=-1) == [first, *inner[-97:], last]
    assert ids(prompt="a", truncate_prompt_tokens=50) == ids(prompt="a")
    long_talk = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 40}
    chat = prepare(framed, max_model_len=100, **long_talk).prompts[0].token_ids.tolist()
    assert (
        chat == prepare(framed, max_model_len=10**6, messages=long_talk["messages"]).prompts[0].token_ids.tolist()[-40:]
    )
    echoed = complete(framed, max_model_len=100, prompt=text, truncate_prompt_tokens=20, echo=True).prompts[0].text
    assert echoed
    assert text.endswith(echoed)


@pytest.mark.parametrize("count", [0, 101, -2])
def test_cuts_that_cannot_be_are_refused(tiny: Tokenizer, count: int) -> None:
    with pytest.raises(RequestError) as caught:
        complete(tiny, max_model_len=100, prompt="a", truncate_prompt_tokens=count)
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_salt_goes_with_every_prompt(tiny: Tokenizer) -> None:
    assert [prompt.cache_salt for prompt in complete(tiny, prompt=["a", "b"], cache_salt="me").prompts] == ["me", "me"]
    assert prepare(tiny, cache_salt="me").prompts[0].cache_salt == "me"
    assert prepare(tiny).prompts[0].cache_salt == ""
    with pytest.raises(RequestError, match="cache_salt"):
        prepare(tiny, cache_salt="")


def test_tokens_are_echoed_as_text(tiny: Tokenizer) -> None:
    [ids] = tiny.encode(["def main("])
    assert answered(complete(tiny, prompt=ids.tolist(), echo=True), "y")["text"] == "def main(y"
