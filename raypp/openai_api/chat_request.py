"""The body of `/v1/chat/completions`, and the form that its answer must have: JSON, tool calls, thoughts before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from raypp.api.conversation import Rendering
from raypp.errors import RequestError, page
from raypp.openai_api.chat_messages import Message, TextPart, conversation_of
from raypp.openai_api.foreign_fields import OF_CHAT, ForeignField
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.request_fields import (
    NO_DEFAULTS,
    CompletionFields,
    Entries,
    Integer,
    RequestModel,
    make_sampling_params,
    naming_form,
    renaming,
)
from raypp.openai_api.syntax import PLAIN_SYNTAX, CallSyntax, MessageSyntax, is_thought
from raypp.openai_api.tools import (
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolChoice,
    ToolUse,
    function_use,
    tool_use,
    tools_of,
)
from raypp.types import SamplingParams

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_ANY_TEXT = {"type": "any_text"}

Form = dict[str, Any]
"""A part of a structural tag."""


@dataclass(frozen=True)
class AnswerForm:
    """What is asked of one answer."""

    schema: dict[str, Any] | None = None  # of response_format; any object for json_object
    tool_use: ToolUse | None = None
    syntax: MessageSyntax = PLAIN_SYNTAX  # how the model writes calls, where tools are, and thoughts
    may_think: bool = False  # whether thoughts may come before
    is_thinking: bool = False  # whether the prompt leaves off inside of one

    def constraint(self) -> dict[str, Any] | None:
        """Return it as `SamplingParams.structured_outputs`; None when the text is free.

        Raises:
            RequestError: a strict function whose parameters cannot be enforced, or calls that no form is known of.
        """
        use = self.tool_use
        tools = use if use is not None and use.holds_arguments else None
        answer = None if self.schema is None else {"type": "json_schema", "json_schema": self.schema}
        if tools is not None and tools.must_call:
            return self._after_thoughts(self._calls(tools))
        if use is not None and answer is not None:
            return self._after_thoughts(_one_of([self._answer(answer), self._calls(use)]))
        if tools is not None and self._is_framed:
            return self._after_thoughts(_one_of([self._answer(_ANY_TEXT), self._calls(tools)]))
        if tools is not None:
            return self._triggered(tools)
        if answer is None:
            return None
        if self.may_think or self.is_thinking or self._is_framed:
            return self._after_thoughts(self._answer(answer))
        return {"json_schema": self.schema}

    @property
    def _is_framed(self) -> bool:
        """Whether every answer has a mark in front, so that its kind is decided before its first character."""
        return self.syntax.thoughts is not None and self.syntax.thoughts.answer != "$answer"

    @property
    def _call_syntax(self) -> CallSyntax:
        assert self.syntax.calls is not None, "tools for a model that cannot call any"
        if not self.syntax.calls.call or self.syntax.calls.arguments.style is None:
            raise RequestError(
                "tool calls of this model cannot be constrained",
                got="a forced call, a strict function, or tools beside response_format",
                expected='tool_choice="auto" and functions that are not strict',
                hint=f"raypp only reads the syntax of its calls; {page('tool_calls')} lists those that it can enforce",
                param="tools",
            )
        return self.syntax.calls

    def _answer(self, answer: Form) -> Form:
        if self.syntax.thoughts is None:
            return answer
        before, _, behind = self.syntax.thoughts.answer.partition("$answer")
        return _sequence([*self._text(before), answer, *self._text(behind)])

    def _after_thoughts(self, answer: Form) -> dict[str, Any]:
        thoughts = self.syntax.thoughts
        if thoughts is None or not (self.is_thinking or self.may_think):
            return _structural_tag(answer)
        before, _, behind = thoughts.thought.partition("$thought")
        end = next(end for end in thoughts.ends if behind.startswith(end))
        [mark] = self._text(end)
        free = {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": _end(mark)}
        thought = [free, *self._text(behind.removeprefix(end))]
        if self.is_thinking:
            return _structural_tag(_sequence([_sequence(thought), answer]))
        nothing = {"type": "const_string", "value": ""}
        return _structural_tag(_sequence([_one_of([_sequence([*self._text(before), *thought]), nothing]), answer]))

    def _calls(self, use: ToolUse) -> Form:
        """Return one or several calls and nothing else."""
        syntax = self._call_syntax
        before, _, behind = syntax.calls.partition("$calls")
        return _sequence([*self._text(before), *self._in_a_row(use), *self._text(behind)])

    def _in_a_row(self, use: ToolUse) -> list[Form]:
        syntax = self._call_syntax
        call = _one_of([_sequence(self._call(use, tool)) for tool in use.tools])
        if syntax.separator is None or not use.may_call_several:
            return [call]
        more = {"type": "star", "content": _sequence([*self._text(syntax.separator), call])}
        return [call, more]

    def _call(self, use: ToolUse, tool: Tool, written: str = "") -> list[Form]:
        """Return one call, without what is written of it already."""
        before, _, behind = self._call_syntax.call.replace("$name", tool.function.name).partition("$arguments")
        style = self._call_syntax.arguments.style
        assert style is not None, "`_call_syntax` refuses it"
        arguments: Form = {"type": "json_schema", "json_schema": use.argument_schema(tool, style)}
        if style != "json":
            # More white space at a time is of no use, and a model might write nothing else for ever.
            arguments |= {"style": style, "max_whitespace_cnt": 1}
        return [*self._text(before.removeprefix(written)), arguments, *self._text(behind)]

    def _triggered(self, use: ToolUse) -> dict[str, Any]:
        """Return free text, thoughts among it; what begins as calls do is held to their form."""
        syntax = self._call_syntax
        before, _, behind = syntax.calls.partition("$calls")
        if before:
            form = [*self._text(before.removeprefix(syntax.trigger)), *self._in_a_row(use)]
        else:
            form = [_one_of([_sequence(self._call(use, tool, syntax.trigger)) for tool in use.tools])]
        end = self._text(behind)
        is_last = bool(before) or syntax.separator is None or not use.may_call_several
        [trigger] = self._text(syntax.trigger)
        if trigger["type"] == "token":
            calls = [trigger, *form, *end]
            more = {
                "type": "optional" if is_last else "star",
                "content": _sequence(calls + [_ANY_TEXT] * (not is_last)),
            }
            free = _sequence([_ANY_TEXT, more])
        else:
            last = _end(end.pop()) if end else ""
            tag = {"type": "tag", "begin": syntax.trigger, "content": _sequence([*form, *end]), "end": last}
            free = {"type": "triggered_tags", "triggers": [syntax.trigger], "tags": [tag], "stop_after_first": is_last}
        thoughts = self.syntax.thoughts
        # Free text has thoughts in it, unless it cannot write their marks.
        has_own_thoughts = thoughts is None or not self.syntax.special_tokens.keys() & set(thoughts.ends)
        return _structural_tag(free) if has_own_thoughts else self._after_thoughts(free)

    def _text(self, text: str) -> list[Form]:
        """Return a text, with special tokens as themselves: nothing else writes them."""
        tokens = self.syntax.special_tokens
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [
            {"type": "token", "token": tokens[piece]} if piece in tokens else {"type": "const_string", "value": piece}
            for piece in pieces
            if piece
        ]


def response_schema(kind: str, json_schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema that `response_format` asks for; None when it asks for text."""
    if kind == "json_object":
        return _ANY_OBJECT
    if json_schema is None:
        return None
    schema = json_schema.get("schema")
    return _ANY_OBJECT if schema is None else schema


def _structural_tag(form: Form) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def _end(mark: Form) -> Any:
    """Return what ends a tag: a text, or a token."""
    return mark.get("value", mark)


def _sequence(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _one_of(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


@dataclass(frozen=True)
class DerivedChat:
    """A chat, and where in the body it comes from."""

    request: ChatRequest
    origins: Sequence[str]
    """The field that each of its messages comes from."""
    params: Mapping[str, str]
    """A chat's fields, and what they are called in the body, where that differs."""

    def naming(self) -> AbstractContextManager[None]:
        """Let errors about the chat name the fields of the body that it was made of."""
        return renaming(self._own_param)

    def _own_param(self, param: str | None) -> str | None:
        if message := re.match(r"messages\[(\d+)\]", param or ""):
            return self.origins[int(message[1])]
        return self.params.get(param or "", param)


_NOT_FOR_TEMPLATES = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "messages",
        "self",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Arguments of the rendering itself. A request must not bring the template: it is a program."""


class ResponseFormat(RequestModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(CompletionFields):
    """The body of `/v1/chat/completions`."""

    foreign: ClassVar[Mapping[str, ForeignField]] = OF_CHAT

    messages: Entries[Message] = Field(min_length=1)
    """The conversation so far."""
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    """The most tokens to generate; wins over `max_tokens`. By default all that the context has room for."""
    logprobs: bool | None = None
    """Return log-probabilities of the generated tokens."""
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    """And of this many alternatives at each position; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values that the model's chat template reads, e.g. `enable_thinking` (vLLM)."""
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant's message begins; the default (vLLM)."""
    continue_final_message: bool | None = None
    """Go on with the last message, in place of a message of the model's own; needs `add_generation_prompt: false`
    (vLLM)."""
    response_format: ResponseFormat | None = None
    """`json_object`, or `json_schema` with a schema that the answer follows."""
    tools: Entries[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default, `none`, `required`, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several times; by default it may."""
    functions: Entries[FunctionDefinition] | None = None
    """The older form of `tools`; calls then come back as `function_call`, at most one."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """The older form of `tool_choice`, beside `functions`."""
    modalities: Entries[Literal["text", "audio"]] | None = None
    """Only text."""
    reasoning_effort: str | None = None
    """`none` asks for no thoughts, and is refused where the model's chat template cannot do without; whatever is said
    here reaches templates that read it, and changes nothing else."""
    verbosity: str | None = None
    """How much OpenAI's models write."""

    @property
    def form_param(self) -> str:
        """The field that holds the answer to a form, where one does."""
        if self.constraint():
            return super().form_param
        wanted = self.response_format
        return "response_format" if wanted is not None and wanted.type != "text" else "tools"

    def conversation(self, *, takes_images: bool) -> list[dict[str, Any]]:
        """Return the messages as a chat template reads them: texts joined, empty fields left out.

        Args:
            takes_images: Whether the engine's model does.

        Raises:
            RequestError: images for a model that takes none, or something else that the template would not be shown.
        """
        return conversation_of(self.messages, takes_images=takes_images)

    @property
    def continued_text(self) -> str:
        """The text of the message that the model goes on with; empty if it begins one of its own."""
        if not self.continue_final_message:
            return ""
        content = self.messages[-1].content or ""
        return content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, TextPart))

    def sampling_params(
        self,
        max_model_len: int,
        syntax: MessageSyntax = PLAIN_SYNTAX,
        *,
        begun: str = "",
        defaults: Mapping[str, Any] = NO_DEFAULTS,
    ) -> SamplingParams:
        """Return how to sample; without a limit, here or among the defaults, up to the engine's `max_model_len`.

        Args:
            max_model_len: The most tokens of a request, prompt and output together.
            syntax: How the model writes thoughts and calls.
            begun: What the prompt has begun of the syntax; see `thoughts.begun_in`.
            defaults: Fields of `SamplingParams` that hold where the body says nothing.

        Raises:
            RequestError: a value that makes no sense, or one that this engine cannot serve.
        """
        self._check_supported()
        given = self.given_params(defaults)
        if (constraint := self._form(syntax, begun).constraint()) is not None:
            if given.get("structured_outputs"):
                raise RequestError(
                    f"{self.form_param} beside response_format or tools that hold the answer to a form",
                    expected="one of them",
                    param=self.form_param,
                )
            given["structured_outputs"] = constraint
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise RequestError(
                "top_logprobs without logprobs",
                got=self.top_logprobs,
                expected="logprobs=true beside it",
                param="top_logprobs",
            )
        given.setdefault("max_tokens", max_model_len)
        given["shown_special_tokens"] = syntax.shown_tokens(calls=self.tool_use is not None)
        with naming_form(self.form_param):
            return make_sampling_params(given, max_model_len)

    def rendering(self, syntax: MessageSyntax = PLAIN_SYNTAX) -> Rendering:
        """Return how the conversation becomes text.

        Args:
            syntax: How the model writes thoughts, and what its template reads.

        Raises:
            RequestError: an argument of the rendering itself among those for the template, no thoughts from a model
                that cannot do without, or values that contradict each other.
        """
        kwargs = self._own_kwargs(syntax)
        for name in sorted(_NOT_FOR_TEMPLATES & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs must not have {name}",
                got=repr(kwargs[name])[:80],
                expected="values that the model's chat template reads",
                param="chat_template_kwargs",
            )
        if self.tool_use is not None:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools or tools_of(self.functions)]
            if syntax.calls is not None and syntax.calls.needs_descriptions:
                for tool in kwargs["tools"]:
                    tool["function"].setdefault("description", "")
        return Rendering(
            chat_template_kwargs=kwargs,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )

    def parser(self, syntax: MessageSyntax, *, begun: str = "") -> MessageParser:
        """Return a parser for one of the answers.

        Args:
            syntax: How the model writes thoughts and calls.
            begun: What the prompt has begun of the syntax; see `thoughts.begun_in`.
        """
        use = self.tool_use
        return MessageParser(
            thoughts=syntax.thoughts,
            calls=None if use is None else syntax.calls,
            begun=begun,
            is_continued=bool(self.continued_text),
            must_call=use is not None and use.must_call,
            as_function_call=self._has_functions,
            schemas={} if use is None else {tool.function.name: tool.function.parameters or {} for tool in use.tools},
        )

    def _own_kwargs(self, syntax: MessageSyntax) -> dict[str, Any]:
        """Return what `chat_template_kwargs` and `reasoning_effort` say to the chat template."""
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if effort is None:
            return dict(given)
        kwargs: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in syntax.template_switches else {}
        if effort == "none" and "enable_thinking" in syntax.template_switches:
            kwargs["enable_thinking"] = False
        if effort == "none" and syntax.thoughts is not None and not kwargs and "enable_thinking" not in given:
            raise RequestError(
                "this model's chat template cannot turn thoughts off",
                got="reasoning_effort='none'",
                expected="another value, or none",
                hint="leave reasoning_effort out; thoughts come apart from the answer, as reasoning_content",
                param="reasoning_effort",
            )
        return kwargs | given

    @property
    def _has_functions(self) -> bool:
        return self.functions is not None or self.function_call is not None

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may use; None when it may use none.

        Raises:
            RequestError: a choice that the tools do not have, or tools in both of their forms.
        """
        asks_for_tools = self.tools is not None or self.tool_choice is not None
        if not self._has_functions:
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls) if asks_for_tools else None
        if asks_for_tools:
            raise RequestError(
                "functions or function_call beside tools or tool_choice",
                expected="the one or the other",
                hint="functions are the older form of tools: leave them out",
                param="functions",
            )
        return function_use(self.functions, self.function_call)

    def _form(self, syntax: MessageSyntax, begun: str) -> AnswerForm:
        use = self.tool_use
        if use is not None and syntax.calls is None:
            raise RequestError(
                "the tool call syntax of this model is unknown",
                got=f"{len(use.tools)} tools",
                expected="a model whose chat template or tokens show a syntax that is known, or tool_call_parser",
                hint='leave tools out, say tool_choice="none", or start the engine with the setting tool_call_parser',
                param="tools",
            )
        wanted = self.response_format
        may_think = syntax.thoughts is not None and self._own_kwargs(syntax).get("enable_thinking") is not False
        is_thinking = is_thought(begun, syntax.thoughts)
        return AnswerForm(
            schema=None if wanted is None else response_schema(wanted.type, wanted.json_schema),
            tool_use=use,
            syntax=syntax,
            may_think=may_think or is_thinking,
            is_thinking=is_thinking,
        )

    def _check_supported(self) -> None:
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise RequestError(
                "response_format has no json_schema",
                expected='{"name": ..., "schema": {...}}',
                param="response_format",
            )
        given = (wanted.json_schema or {}) if wanted is not None else {}
        if given.get("schema") is None and (
            others := sorted(given.keys() - {"name", "description", "strict", "schema"})
        ):
            raise RequestError(
                "response_format.json_schema has no schema, and has what belongs into one",
                got=", ".join(others)[:200],
                expected='{"name": ..., "schema": {...}}',
                hint='put the schema into json_schema as "schema"; without one any object is allowed',
                param="response_format.json_schema",
            )
        if self.modalities is not None and self.modalities != ["text"]:
            raise RequestError(
                "modalities other than text", got=self.modalities, expected='["text"]', param="modalities"
            )
