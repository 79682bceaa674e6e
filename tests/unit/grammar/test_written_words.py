"""Words of schemas are written as they are, whatever letters they have and however the schema is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_texts import allows_text, matcher_of
from llguidance import LLMatcher

from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.syntax import PLAIN_SYNTAX, MessageSyntax
from raypp.openai_api.syntaxes import CALL_SYNTAXES, THOUGHT_SYNTAXES

HEX_DIGITS = "0123456789abcdefABCDEF"
WORDS = ["".join(f"{chr(code)}{after}" for after in HEX_DIGITS) for code in range(0x80, 0x100)]
LANGUAGES = {
    "Arabic": "العربية كلمة",
    "Chinese": "中文 語言",
    "Czech": "žluťoučký kůň",
    "Danish": "København Ærø",
    "Finnish": "hyvää pöytä",
    "French": "décembre année élève français",
    "German": "größe Übergröße Köln Bäder",
    "Greek": "Ελλάδα λέξη",
    "Hebrew": "שלום מילה",
    "Hindi": "हिन्दी शब्द",
    "Hungarian": "előtt árvíztűrő",
    "Icelandic": "það Ísafjörður",
    "Italian": "città perché",
    "Japanese": "日本語 かな",
    "Korean": "한국어 단어",
    "Norwegian": "fjellvåk blåbær",
    "Polish": "źdźbło Łódź",
    "Portuguese": "coração São década",
    "Romanian": "ușă București",
    "Russian": "Россия ёлка",
    "Spanish": "España Cádiz año",
    "Swedish": "ändå Ålesund",
    "Thai": "ไทย คำ",
    "Turkish": "İğne güç",
    "Ukrainian": "Україна її",
    "Vietnamese": "Đà đến",
    "none": "👍af \\xe9c \\u00e9",
}
WORDS += [word for words in LANGUAGES.values() for word in words.split()]
LISTED = {"enum": WORDS}
CONSTANTS = {"anyOf": [{"const": word} for word in WORDS]}
NAMED = {"type": "object", "properties": {word: {"type": "null"} for word in WORDS}, "additionalProperties": False}
HELLO = [{"role": "user", "content": "hello"}]
THINKING = MessageSyntax(thoughts=THOUGHT_SYNTAXES["deepseek_r1"])


def calls(syntax: str, schema: Any) -> LLMatcher:
    arguments = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    chat = chat_request(tools=[tool], tool_choice="required")
    return grammar_of(chat, MessageSyntax(calls=CALL_SYNTAXES[syntax]))


def answers(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def chat_request(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": HELLO, **fields})


def response_request(schema: Any) -> ChatRequest:
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return parse_body(ResponseRequest, {"input": "hello", "text": {"format": form}}).chat().request


def grammar_of(chat: ChatRequest, syntax: MessageSyntax = PLAIN_SYNTAX) -> LLMatcher:
    constraint = chat.sampling_params(1000, syntax).structured_outputs
    assert constraint is not None
    return matcher_of(constraint)


ASKED: dict[str, tuple[Any, str]] = {
    "structured_outputs": (lambda schema: grammar_of(chat_request(structured_outputs={"json": schema})), "$"),
    "response_format": (lambda schema: grammar_of(chat_request(response_format=answers(schema))), "$"),
    "text.format": (lambda schema: grammar_of(response_request(schema)), "$"),
    "after thoughts": (lambda schema: grammar_of(chat_request(response_format=answers(schema)), THINKING), "$"),
    "text.format after thoughts": (lambda schema: grammar_of(response_request(schema), THINKING), "$"),
    "call": (
        lambda schema: calls("hermes", schema),
        '<tool_call>\n{"name": "f", "arguments": {"x": $}}\n</tool_call>',
    ),
    "call in XML": (
        lambda schema: calls("qwen3_coder", schema),
        "<tool_call>\n<function=f>\n<parameter=x>\n$\n</parameter>\n</function>\n</tool_call>",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("schema", [LISTED, CONSTANTS, NAMED], ids=["enum", "const", "property"])
def test_words_are_written_as_they_are(asked: str, schema: Any) -> None:
    compiled, around = ASKED[asked]
    grammar = compiled(schema)
    bare = asked == "call in XML" and schema is not NAMED
    values = {word: word if bare else json.dumps(word, ensure_ascii=False) for word in WORDS}
    if schema is NAMED:
        values = {word: f"{{{value}: null}}" for word, value in values.items()}
    texts = {word: around.replace("$", value) for word, value in values.items()}
    assert [word for word, text in texts.items() if not allows_text(grammar, text)] == []
    assert not allows_text(grammar, around.replace("$", values["España"].replace("ña", "\u0f1a")))


@pytest.mark.parametrize("asked", [name for name in ASKED if name != "call in XML"])
def test_characters_of_patterns_are_taken_as_they_are(asked: str) -> None:
    compiled, around = ASKED[asked]
    grammar = compiled({"type": "string", "pattern": "^[éa]ña[^ÿ1]$"})
    wanted = {"éñab": True, "añaÿ": False, "aña1": False, "\u0f1aaab": False}
    assert {text: allows_text(grammar, around.replace("$", f'"{text}"')) for text in wanted} == wanted
