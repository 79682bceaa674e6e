"""The syntaxes of thoughts and tool calls that are known by name, and which of them is a model's.

hermes, qwen3     <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
llama3_json       {"name": "f", "parameters": {"x": 1}}                  or the same behind <|python_tag|>
mistral           [TOOL_CALLS]f[ARGS]{"x": 1}                            older: [TOOL_CALLS][{"name": ...}]
deepseek_v3       tokens around each call and around all; the arguments in a block of ```json; v31 without
gpt_oss           <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
qwen3_coder       <tool_call> <function=f> <parameter=x> 1 </parameter> </function> </tool_call>
glm45             <tool_call>f <arg_key>x</arg_key> <arg_value>1</arg_value> </tool_call>
gemma4            <|tool_call>call:f{x:<|"|>1<|"|>,n:1}<tool_call|>
minimax_m2        <minimax:tool_call> <invoke name="f"> <parameter name="x">1</parameter> </invoke> </minimax:tool_call>

The published library for gpt-oss's channels, openai-harmony, is the reference of a test
(`tests/unit/openai_api/channel_texts.py`), not the parser: it downloads a vocabulary of its own, reads the token ids of
that alone, and stops with an error where a model leaves out a header. Forms, stop strings and the count of thoughts
need the marks besides.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

from raypp.api.tokenizer import Tokenizer
from raypp.errors import ConfigError, page
from raypp.openai_api.syntax import (
    CallSyntax,
    GemmaArguments,
    GlmParameters,
    Mark,
    MessageSyntax,
    MinimaxParameters,
    ThoughtSyntax,
    XmlParameters,
    marks,
    uses,
)

_SWITCHES = ("enable_thinking", "reasoning_effort")

HERMES_CALLS = CallSyntax(
    begins=marks("<tool_call>"),
    end="</tool_call>",
    call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
    separator="\n",
    in_template=("<tool_call>",),
    in_vocabulary=("<tool_call>", "</tool_call>"),
)
LLAMA3_CALLS = CallSyntax(
    begins=marks("<|python_tag|>"),
    dropped=marks("<|eom_id|>"),
    may_be_bare=True,
    between=";",
    call='{"name": "$name", "parameters": $arguments}',
    separator=None,  # its chat template refuses conversations with several calls in one message
    in_template=("<|python_tag|>",),
    in_vocabulary=("<|python_tag|>", "<|eom_id|>"),
)
_MISTRAL_BEGINS = (
    Mark("[TOOL_CALLS]", "{", r"^\s*\[?\s*$"),
    Mark("[TOOL_CALLS]", "{", r"^\s*(?P<name>[^\s\[\]{}]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*$"),
)
MISTRAL_CALLS = CallSyntax(
    begins=_MISTRAL_BEGINS,
    between=",]",
    call="[TOOL_CALLS]$name[ARGS]$arguments",
    separator="",
    in_template=("[TOOL_CALLS]", "[ARGS]"),
    in_vocabulary=("[TOOL_CALLS]", "[ARGS]"),
)
MISTRAL_JSON_CALLS = CallSyntax(
    begins=_MISTRAL_BEGINS,
    between=",]",
    call='{"name": "$name", "arguments": $arguments}',
    calls="[TOOL_CALLS][$calls]",
    separator=", ",
    in_template=("[TOOL_CALLS]",),
    in_vocabulary=("[TOOL_CALLS]",),
)


def _deepseek(name: str) -> str:
    """Return one of DeepSeek's tokens: their bars and spaces are no ASCII."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_ALL, _END_ALL = _deepseek("tool calls begin"), _deepseek("tool calls end")
_ONE, _END_ONE, _SEP = _deepseek("tool call begin"), _deepseek("tool call end"), _deepseek("tool sep")
_DEEPSEEK_BEGINS = (
    Mark(_ONE, "{", rf"^\s*(function)?\s*{_SEP}\s*(?P<name>[^\s<>{{}}]+)\s*(```json)?\s*$"),
    Mark(_ONE, "{", rf"^\s*(?P<name>[^\s<>{{}}]+)\s*{_SEP}\s*(```json)?\s*$"),
)
DEEPSEEK_V3_CALLS = CallSyntax(
    begins=_DEEPSEEK_BEGINS,
    end=_END_ONE,
    dropped=marks(_ALL, _END_ALL),
    call=f"{_ONE}function{_SEP}$name\n```json\n$arguments\n```{_END_ONE}",
    calls=f"{_ALL}$calls{_END_ALL}",
    separator="\n",
    in_template=(_ALL, "```json"),
)
DEEPSEEK_V31_CALLS = CallSyntax(
    begins=_DEEPSEEK_BEGINS,
    end=_END_ONE,
    dropped=marks(_ALL, _END_ALL),
    call=f"{_ONE}$name{_SEP}$arguments{_END_ONE}",
    calls=f"{_ALL}$calls{_END_ALL}",
    separator="",
    in_template=(_ALL,),
    in_vocabulary=(_ALL, _ONE, _SEP),
)


def _harmony(pattern: str) -> tuple[Mark, ...]:
    """Return the marks of a header: all that comes before a message. The first one's `<|start|>` is the prompt's."""
    return tuple(Mark(opening, "<|message|>", pattern) for opening in ("<|start|>", "<|channel|>"))


GPT_OSS_CALLS = CallSyntax(
    begins=_harmony(r"\bto=functions\.(?P<name>[\w.-]+)"),
    end="<|call|>",
    call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
    separator=None,  # the end of a call ends the text
    needs_descriptions=True,
    in_template=("<|channel|>", "<|message|>", "<|call|>"),
    in_vocabulary=("<|channel|>", "<|message|>", "<|call|>"),
)
GPT_OSS_THOUGHTS = ThoughtSyntax(
    begins=_harmony(r"^(?!.*\bto=functions\.).*\banalysis\b"),  # calls of functions may be there too
    ends=("<|end|>", "<|call|>", "<|return|>"),
    is_anywhere=True,
    dropped=(*_harmony(""), *marks("<|end|>", "<|call|>", "<|return|>")),
    thought="<|channel|>analysis<|message|>$thought<|end|><|start|>assistant",
    answer="<|channel|>final<|message|>$answer",
    template_field="thinking",
    in_template=("<|channel|>", "<|message|>", "<|call|>"),
    in_vocabulary=("<|channel|>", "<|message|>", "<|call|>"),
)
QWEN3_CODER_CALLS = CallSyntax(
    begins=(Mark("<function=", ">", r"^\s*(?P<name>[^\s<>]+)\s*$"),),
    end="</function>",
    dropped=marks("<tool_call>", "</tool_call>"),
    arguments=XmlParameters,
    call="<tool_call>\n<function=$name>\n$arguments\n</function>\n</tool_call>",
    separator="\n",
    in_template=("<function=", "<parameter="),
)
GLM_CALLS = CallSyntax(
    begins=(Mark("<tool_call>", "<", r"^\s*(?P<name>[^\s<>{}]+)\s*$"),),
    end="</tool_call>",
    arguments=GlmParameters,
    call="<tool_call>$name\n$arguments\n</tool_call>",
    separator="\n",
    in_template=("<arg_key>", "<arg_value>"),
    in_vocabulary=("<arg_key>", "<arg_value>"),
)
MINIMAX_CALLS = CallSyntax(
    begins=(Mark('<invoke name="', '">', r"^(?P<name>[^\s<>\"]+)$"),),
    end="</invoke>",
    dropped=marks("<minimax:tool_call>", "</minimax:tool_call>"),
    arguments=MinimaxParameters,
    call='\n<invoke name="$name">\n$arguments\n</invoke>',  # a break between two could begin the end of all
    calls="<minimax:tool_call>$calls\n</minimax:tool_call>",
    separator="",
    in_template=("<minimax:tool_call>",),
    in_vocabulary=("<minimax:tool_call>",),
)
GEMMA4_CALLS = CallSyntax(
    begins=(Mark("<|tool_call>", "{", r"^\s*call:\s*(?P<name>[^\s{}]+)\s*$"),),
    end="<tool_call|>",
    arguments=GemmaArguments,
    call="<|tool_call>call:$name$arguments<tool_call|>",
    separator="",
    in_template=("<|tool_call>", "<tool_call|>"),
    in_vocabulary=("<|tool_call>", "<tool_call|>"),
)
GEMMA4_THOUGHTS = ThoughtSyntax(
    begins=marks("<|channel>thought"),
    ends=("<channel|>",),
    thought="<|channel>thought\n$thought<channel|>",
    in_template=("<|channel>thought", "<channel|>"),
    in_vocabulary=("<|channel>", "<channel|>"),
)
THINK_TAGS = ThoughtSyntax(
    begins=marks("<think>"),
    ends=("</think>",),
    thought="<think>\n$thought</think>\n\n",
    in_template=("</think>",),
    in_vocabulary=("<think>", "</think>"),
)
MISTRAL_THOUGHTS = ThoughtSyntax(
    begins=marks("[THINK]"),
    ends=("[/THINK]",),
    thought="[THINK]$thought[/THINK]",
    in_template=("[THINK]", "[/THINK]"),
    in_vocabulary=("[THINK]", "[/THINK]"),
)

CALL_SYNTAXES: dict[str, CallSyntax] = {
    "gpt_oss": GPT_OSS_CALLS,
    "deepseek_v3": DEEPSEEK_V3_CALLS,
    "deepseek_v31": DEEPSEEK_V31_CALLS,
    "qwen3_coder": QWEN3_CODER_CALLS,
    "glm45": GLM_CALLS,
    "minimax_m2": MINIMAX_CALLS,
    "gemma4": GEMMA4_CALLS,
    "mistral": MISTRAL_CALLS,
    "mistral_json": MISTRAL_JSON_CALLS,
    "hermes": HERMES_CALLS,
    "qwen3": HERMES_CALLS,
    "llama3_json": LLAMA3_CALLS,
}
"""By name. Of several whose signs a model has, the first one is its."""
THOUGHT_SYNTAXES: dict[str, ThoughtSyntax] = {
    "gpt_oss": GPT_OSS_THOUGHTS,
    "mistral": MISTRAL_THOUGHTS,
    "gemma4": GEMMA4_THOUGHTS,
    "deepseek_r1": THINK_TAGS,
    "qwen3": THINK_TAGS,
}
"""Likewise."""

_Syntax = TypeVar("_Syntax", CallSyntax, ThoughtSyntax)


def call_syntax(name: str) -> CallSyntax | None:
    """Return the syntax of the setting `tool_call_parser`; None for `auto` and `none`.

    Raises:
        ConfigError: an unknown name, or `module:attribute` that is no `CallSyntax`.
    """
    return _named("tool_call_parser", name, CALL_SYNTAXES, CallSyntax)


def thought_syntax(name: str) -> ThoughtSyntax | None:
    """Return the syntax of the setting `reasoning_parser`; None for `auto` and `none`.

    Raises:
        ConfigError: an unknown name, or `module:attribute` that is no `ThoughtSyntax`.
    """
    return _named("reasoning_parser", name, THOUGHT_SYNTAXES, ThoughtSyntax)


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Check the two settings before an engine starts.

    Raises:
        ConfigError: as `call_syntax` and `thought_syntax`.
    """
    call_syntax(tool_call_parser)
    thought_syntax(reasoning_parser)


def message_syntax(
    tokenizer: Tokenizer | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> MessageSyntax:
    """Return how a model writes a message.

    Args:
        tokenizer: The model's. Without one there are no chats.
        tool_call_parser: The setting.
        reasoning_parser: The setting.

    Raises:
        ConfigError: as `call_syntax` and `thought_syntax`.
    """
    calls, thoughts = call_syntax(tool_call_parser), thought_syntax(reasoning_parser)
    if tokenizer is None:
        return MessageSyntax()
    if tool_call_parser == "auto":
        calls = _of_model(tokenizer, CALL_SYNTAXES)
    if reasoning_parser == "auto":
        thoughts = _of_model(tokenizer, THOUGHT_SYNTAXES)
    literals = [text for syntax in (calls, thoughts) if syntax is not None for text in syntax.literals()]
    special = {tokenizer.token_text(token_id): token_id for token_id in sorted(tokenizer.special_token_ids)}
    return MessageSyntax(
        thoughts=thoughts,
        calls=calls,
        special_tokens={text: token_id for text, token_id in special.items() if text and uses(literals, text)},
        template_switches=frozenset(name for name in _SWITCHES if tokenizer.template_reads(name)),
    )


def _named(setting: str, name: str, known: Mapping[str, _Syntax], kind: type[_Syntax]) -> _Syntax | None:
    if name in ("auto", "none"):
        return None
    if name in known:
        return known[name]
    module, has_attribute, attribute = name.partition(":")
    if not has_attribute:
        raise ConfigError(
            f"{setting} names an unknown syntax",
            got=name,
            expected=", ".join(["auto", "none", *sorted(known)]),
            hint=f"module:attribute names a {kind.__name__} of your own; see {page('tool_calls')}",
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module makes of it
        raise ConfigError(
            f"{setting} cannot be imported",
            got=f"{name}: {type(error).__name__}: {error}",
            expected=f"module:attribute with a {kind.__name__}",
            hint="the module has to be found on PYTHONPATH, on every node with a replica",
        ) from error
    if not isinstance(found, kind):
        raise ConfigError(
            f"{setting} is not a syntax",
            got=f"{name}, of type {type(found).__name__}",
            expected=f"a {kind.__module__}.{kind.__name__}",
        )
    return found


def _of_model(tokenizer: Tokenizer, known: Mapping[str, _Syntax]) -> _Syntax | None:
    """Return the syntax that the chat template shows, or else the vocabulary: fine-tunes keep tokens they don't use."""
    template = tokenizer.chat_template
    for syntax in known.values():
        if syntax.in_template and all(text in template for text in syntax.in_template):
            return syntax
    for syntax in known.values():
        if syntax.in_vocabulary and tokenizer.has_tokens(*syntax.in_vocabulary):
            return syntax
    return None
