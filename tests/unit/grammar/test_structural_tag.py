"""Structural tags as grammars of llguidance: what each documented form allows, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_texts import FIRST, SECOND, allows_tokens, matcher_of, tag_of

from raypp.errors import RequestError

Form = dict[str, Any]
ANY = {"type": "any_text"}
JSON = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
VALUE = '{"a": 1}'


def text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Form, end: Any) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def token(which: int | str) -> Form:
    return {"type": "token", "token": which}


def sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def calls(**more: Any) -> Form:
    tags = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", text("x"), "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags} | more


LETTERS = {"type": "regex", "pattern": "[a-c]+"}
ONE = tag("<b>", text("x"), "</b>")
CASES: list[tuple[str, Form, list[tuple[str | int, ...]], list[tuple[str | int, ...]]]] = [
    ("a text", text('é"\n'), [('é"\n',)], [(), ("é",)]),
    ("free text", ANY, [(), ("a\n中",)], []),
    ("free text without some", {**ANY, "excludes": ["ab", "c"]}, [("ba",)], [("xab",), ("c",)]),
    ("free text of a length", {**ANY, "max_chars": 2}, [("é中",)], [("abc",)]),
    ("a schema", JSON, [(VALUE,)], [('{"a":1}',), ('{"a": 1}x',)]),
    ("what a pattern matches, and more", sequence(LETTERS, text("ab")), [("abab",), ("cab",)], [("ab",), ("abc",)]),
    ("one of some", {"type": "or", "elements": [text("a"), JSON, text("ab")]}, [("a",), ("ab",), (VALUE,)], [("b",)]),
    ("a tag", tag("<t>", ANY, "</t>"), [("<t>a<</t>",)], [("<t>",), ("<t></t></t>",)]),
    ("a tag of two ends", tag("<t>", ANY, ["</t>", "|"]), [("<t>a</t>",), ("<t>a|",)], [("<t>a|</t>",)]),
    (
        "a tag of tokens",
        tag(token(FIRST), ANY, token(SECOND)),
        [(FIRST, "a", SECOND)],
        [("a", SECOND), (FIRST, "a")],
    ),
    (
        "a thought, then JSON",
        sequence({"type": "or", "elements": [sequence(text("<t>"), tag("", ANY, "</t>")), text("")]}, JSON),
        [("<t>" + VALUE + "</t>" + VALUE,), (VALUE,)],
        [("<t>" + VALUE,), ("<t></t>x" + VALUE,)],
    ),
    (
        "calls in free text",
        calls(),
        [(), ("a<f",), (f"a<f=a>{VALUE}</f>b<f=b>x</f>c",)],
        [("<f=",), ("a<f=c>",), ("<f=b>y</f>",), ("<f=a>x</f>",)],
    ),
    ("one call at most", calls(stop_after_first=True), [("a<f=b>x</f>",), ("a",)], [("<f=b>x</f>a",)]),
    ("one call at least", calls(at_least_one=True), [("<f=b>x</f>a<f=b>x</f>",)], [(), ("a<f=b>x</f>",)]),
    ("exactly one", calls(at_least_one=True, stop_after_first=True), [("<f=b>x</f>",)], [(), ("<f=b>x</f>a",)]),
    ("calls, some words not", calls(excludes=["no"]), [("n<f=b>x</f>o",)], [("no",), ("<f=b>x</f>no",)]),
    ("calls in a tag", tag("[", calls(), "]"), [("[a<f=b>x</f>a]",), ("[]",)], [("[<f=b>x",), ("[a]a",)]),
    (
        "calls that tokens begin",
        {"type": "token_triggered_tags", "trigger_tokens": [FIRST], "tags": [tag(token(FIRST), JSON, token(SECOND))]},
        [("a", FIRST, VALUE, SECOND, "a"), ()],
        [(FIRST, "a"), (FIRST, VALUE)],
    ),
    (
        "tags in a row",
        {"type": "tags_with_separator", "tags": [ONE], "separator": ", "},
        [(), ("<b>x</b>, <b>x</b>",)],
        [("<b>x</b>,",), ("<b>x</b><b>x</b>",)],
    ),
    (
        "one tag at least, and at most",
        {
            "type": "tags_with_separator",
            "tags": [ONE],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        [("<b>x</b>",)],
        [(), ("<b>x</b>,<b>x</b>",)],
    ),
    ("maybe", {"type": "optional", "content": JSON}, [(), (VALUE,)], [(VALUE, VALUE)]),
    ("once or more", {"type": "plus", "content": text("ab")}, [("abab",)], [(), ("aba",)]),
    ("any number", sequence({"type": "star", "content": text("ab")}, text("a")), [("a",), ("aba",)], [("ab",)]),
    ("two or three", {"type": "repeat", "min": 2, "max": 3, "content": JSON}, [(VALUE * 2,)], [(VALUE,), (VALUE * 4,)]),
    ("two or more", {"type": "repeat", "min": 2, "max": -1, "content": text("a")}, [("aaaa",)], [("a",)]),
    ("a token but one", {"type": "exclude_token", "exclude_tokens": [FIRST]}, [("a",), (SECOND,)], [(FIRST,), ()]),
    ("tokens but one", {"type": "any_tokens", "exclude_tokens": [FIRST]}, [(), ("a", SECOND)], [("a", FIRST)]),
    (
        "what texts begin",
        {"type": "dispatch", "rules": [["<f>", JSON], ["<g>", text("x")]], "excludes": ["q"]},
        [("a<f>" + VALUE + "b<g>x",)],
        [("<f>x",), ("q",)],
    ),
    (
        "what a text begins, to an end",
        sequence({"type": "dispatch", "rules": [["<f>", text("x")]], "excludes": ["END"]}, text("END")),
        [("END",), ("a<f>xbEND",)],
        [("a",), ("ENDa",)],
    ),
    ("once", {"type": "dispatch", "rules": [["<f>", JSON]], "loop": False}, [("a<f>" + VALUE,)], [(f"<f>{VALUE}a",)]),
    (
        "what a token begins",
        {"type": "token_dispatch", "rules": [[FIRST, JSON]], "exclude_tokens": [SECOND]},
        [("a", FIRST, VALUE, "a")],
        [(SECOND,), (FIRST, "a")],
    ),
    ("EBNF", {"type": "grammar", "grammar": 'root ::= "a" x\nx ::= "b" | "(" x ")"'}, [("a((b))",)], [("a(b",)]),
    (
        "arguments as Qwen3-Coder writes them",
        {
            "type": "json_schema",
            "style": "qwen_xml",
            "json_schema": {
                "type": "object",
                "properties": {"n": {"type": "string"}, "k": {"type": "integer"}},
                "required": ["n"],
            },
        },
        [("<parameter=n>\na < b\n</parameter>\n<parameter=k>\n1\n</parameter>",), ("<parameter=n></parameter>",)],
        [("<parameter=k>1</parameter>",), ("<parameter=n>a</parameter><parameter=k>b</parameter>",)],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_form_allows_what_it_says_and_nothing_else(
    form: Form, good: list[tuple[str | int, ...]], bad: list[tuple[str | int, ...]]
) -> None:
    matcher = matcher_of(tag_of(form))
    assert [parts for parts in good if not allows_tokens(matcher, *parts)] == []
    assert [parts for parts in bad if allows_tokens(matcher, *parts)] == []


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"type": "json_schema", "json_schema": {}, "style": "deepseek_xml"}, "deepseek_xml"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order"),
        ({"type": "haiku"}, "haiku"),
        (sequence(ANY, JSON), "free text"),
        (token("<third>"), "<third>"),
        ({"type": "tag", "begin": "a", "end": "b"}, "content"),
        ({"type": "tag", "begin": "a", "end": "b"}, "tag without 'content'"),
        (text(7), "const_string"),  # type: ignore[arg-type]
        (sequence(3), "of type None"),  # type: ignore[arg-type]
        ({"type": "or", "elements": [3]}, "or with a part of a wrong type"),
        ({"type": "or", "elements": []}, "or: nothing to choose from"),
        ({"type": "regex", "pattern": 3}, "regex with a part of a wrong type"),
        (tag(3, ANY, "x"), "tag with a part of a wrong type"),
        ({**ANY, "excludes": "abc"}, "excludes is 'abc', and has to be a list of texts"),
        ({**ANY, "excludes": ["a", ""]}, "none of them empty"),
        (calls(excludes="abc"), "excludes is 'abc'"),
        (calls(triggers=["<g"]), "begins with no trigger"),
        (calls(triggers=["<f=a"]), "begins with no trigger"),
        (calls(triggers=[], tags=[]), "nothing to choose from"),
        ({"type": "tags_with_separator", "tags": [], "separator": ","}, "nothing to choose from"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(form: Form, named: str) -> None:
    with pytest.raises(RequestError) as refused:
        matcher_of(tag_of(form))
    assert named in str(refused.value)
