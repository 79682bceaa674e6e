"""Arguments of all JSON types, as models of each syntax spell them, with the syntax's own marks inside of texts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.syntax import JsonArguments, XmlParameters
from raypp.openai_api.syntaxes import CALL_SYNTAXES

BARE_SYNTAXES = [name for name, syntax in CALL_SYNTAXES.items() if issubclass(syntax.arguments, XmlParameters)]
JSON_SYNTAXES = [name for name, syntax in CALL_SYNTAXES.items() if syntax.arguments is JsonArguments]
MARKS = sorted(
    {text for syntax in CALL_SYNTAXES.values() for mark in syntax.begins for text in (mark.opening, mark.closing)}
    | {syntax.end for syntax in CALL_SYNTAXES.values()}
    | {"</tool_call>", "</parameter>", "<parameter=x>", "</arg_value>", "}", '"', "\\", "\n", ""}
)
VALUES = {"text": "".join(MARKS), "n": -3, "x": 1.5e-7, "yes": True, "no": False, "none": None, "list": [1, {}, "]"]}


def read(name: str, text: str, cut: int, schema: dict[str, Any] | None = None) -> tuple[str, str, str, bool]:
    """Return content, names, arguments, and whether all calls are whole, of a text in two pieces."""
    parser = MessageParser(thoughts=None, calls=CALL_SYNTAXES[name], schemas={"f": schema or {}})
    deltas = [parser.feed(text[:cut]), parser.feed(text[cut:], is_last=True)]
    calls = [call for delta in deltas for call in delta.calls]
    names = "".join(call.name or "" for call in calls)
    content = "".join(delta.content for delta in deltas)
    return content, names, "".join(call.arguments for call in calls), parser.has_whole_calls


def in_order(name: str, arguments: str, *, name_first: bool) -> list[str]:
    """Return a call in each way that a syntax has: the function's name in the mark, or in an object."""
    syntax = CALL_SYNTAXES[name]
    keys = [f'"name": "f", "arguments": {arguments}', f'"parameters": {arguments}, "name": "f"']
    whole = (
        [f"{syntax.begins[0].opening}{{{keys[not name_first]}}}{syntax.end}"]
        if "{" in syntax.written([("f", "")])
        else []
    )
    return [*whole, syntax.written([("f", arguments)])]


def as_gemma_writes(value: Any) -> str:
    """Return a value as Gemma 4's chat template writes one."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma_writes(of_key)}" for key, of_key in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma_writes, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


of_gemma = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text().filter(lambda text: '<|"' not in text and not text.endswith(("<", "<|"))),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]*", fullmatch=True), values, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), of_gemma, max_size=4), st.data())
def test_values_as_gemma_writes_them(values: dict[str, Any], data: st.DataObject) -> None:
    text = f"<|tool_call>call:f{as_gemma_writes(values)}<tool_call|>"
    cut = data.draw(st.integers(0, len(text)))
    content, names, arguments, is_whole = read("gemma4", text, cut)
    assert (content, names, json.loads(arguments), is_whole) == ("", "f", values, True)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{x: <|"|>a<|"|> , y:[ 1 , 2 ]}', {"x": "a", "y": [1, 2]}),
        (
            '{"x":"a\\n<b>",<|"|>y z<|"|>:None,t:<|"|><tool_call|><|"|>}',
            {"x": "a\n<b>", "y z": None, "t": "<tool_call|>"},
        ),
        ("{x:two words,y:a<b,z:5 apples}", {"x": "two words", "y": "a<b", "z": "5 apples"}),
        ("{a}", None),
        ("{a b}", None),
        ("{:1}", None),
        ('{q:"x}', None),
        ("{x:Oslo,y:-1e3,z:True}", {"x": "Oslo", "y": -1000.0, "z": True}),
        ("{}", {}),
    ],
)
def test_other_ways_in_which_gemma_writes(written: str, arguments: dict[str, Any] | None) -> None:
    text = f"<|tool_call>call:f{written}<tool_call|> bye"
    for cut in range(len(text)):
        content, names, found, is_whole = read("gemma4", text, cut)
        assert (content, names, is_whole) == ("bye", "f", arguments is not None), text[:cut]
        assert arguments is None or json.loads(found) == arguments


def test_a_name_of_white_space_takes_no_time() -> None:
    parser, begun_s = MessageParser(thoughts=None, calls=CALL_SYNTAXES["gemma4"]), time.monotonic()
    for piece in ["<|tool_call>call:f{a", *[" "] * 3000]:
        parser.feed(piece)
    assert time.monotonic() - begun_s < 2.0


@pytest.mark.parametrize("cut", range(60))
def test_what_is_no_argument_of_glm(cut: int) -> None:
    text = "The tag <tool_call>foo<b>x</b> is how models call."
    assert read("glm45", text, min(cut, len(text)))[:2] == (text.replace("tag ", "tag"), "")
    whole = "<tool_call>f<arg_key>b</arg_key><arg_value>1</arg_value></tool_call>"
    text = f"<tool_call>f<arg_key>a</arg_key>1</tool_call> then {whole}"
    assert read("glm45", text, cut)[:3] == ("then", "ff", '{}{"b": 1}')


@pytest.mark.parametrize("name_first", [True, False])
@pytest.mark.parametrize("name", JSON_SYNTAXES)
def test_values_of_all_types_and_own_marks_inside_of_texts(name: str, name_first: bool) -> None:
    for text in in_order(name, json.dumps(VALUES), name_first=name_first):
        for cut in range(0, len(text), 3):
            content, names, arguments, is_whole = read(name, text, cut)
            assert (content, names, json.loads(arguments), is_whole) == ("", "f", VALUES, True), (text, cut)


@pytest.mark.parametrize("name_first", [True, False])
@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ("null", "{}"),
        ("[]", "{}"),
        ('""', "{}"),
        ('"{\\"x\\": 1}"', '{"x": 1}'),
        ('{"x": "a\nb\tc"}', '{"x": "a\\nb\\tc"}'),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral_json"])
def test_other_ways_to_write_an_object(name: str, given: str, arguments: str, name_first: bool) -> None:
    text = in_order(name, given, name_first=name_first)[0]
    for cut in range(len(text)):
        assert read(name, text, cut) == ("", "f", arguments, True), text[:cut]


@pytest.mark.parametrize("written", ["null", "[]", "", " null\n"])
def test_no_arguments_behind_a_mark_with_a_name(written: str) -> None:
    text = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{written}<|call|>"
    for cut in range(len(text)):
        assert read("gpt_oss", text, cut) == ("", "f", "{}", True), text[:cut]


def test_names_that_cannot_be_sent_make_no_call() -> None:
    for name in ("\\ud83d", "a\\x", "a\nb"):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        content, names, _, is_whole = read("hermes", text, 9)
        assert (content, names, is_whole) == (text, "", False) or names == "a\nb"


def as_written(name: str, value: Any) -> str:
    """Return a value as the chat template of a family shows one to the model: only Qwen3-Coder's is Python's."""
    is_json = isinstance(value, dict | list) or (name != "qwen3_coder" and not isinstance(value, str))
    return json.dumps(value) if is_json else str(value)


def call_of(syntax: str, **values: str) -> str:
    around = {
        "qwen3_coder": "<parameter={}>\n{}\n</parameter>",
        "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
        "minimax_m2": '<parameter name="{}">{}</parameter>',
    }[syntax]
    return CALL_SYNTAXES[syntax].written([("f", "\n".join(around.format(*value) for value in values.items()))])


ENDS_IN_TEXTS = (  # what a text cannot hold: the end of a value, and behind it what only stands there
    *(f"</parameter>{mark}" for mark in ("<parameter=", "</function>", '<parametername="', "</invoke>")),
    *(f"</arg_value>{mark}" for mark in ("<arg_key>", "</tool_call>")),
)
pieces = st.lists(st.sampled_from(["a", " ", "\n", "None", "1", "{", *MARKS]), max_size=6).map("".join)
texts = pieces.filter(lambda text: not any(end in "".join(text.split()) for end in ENDS_IN_TEXTS))
of_types: dict[str, st.SearchStrategy[Any]] = {
    "string": texts,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers() | texts | st.booleans()),
    "object": st.dictionaries(texts, st.none() | texts),
}


@pytest.mark.parametrize("name", BARE_SYNTAXES)
@settings(max_examples=150)
@given(st.data())
def test_bare_values_as_models_write_them(name: str, data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(sorted(of_types)), min_size=1, max_size=5))
    values = {f"{kind}_{index}": data.draw(of_types[kind]) for index, kind in enumerate(types)}
    schema = {"properties": {key: {"type": key.partition("_")[0]} for key in values}}
    text = call_of(name, **{key: as_written(name, value) for key, value in values.items()})
    cut = data.draw(st.integers(0, len(text)))
    content, names, arguments, is_whole = read(name, text, cut, schema)
    assert (content, names, json.loads(arguments), is_whole) == ("", "f", values, True)


@pytest.mark.parametrize(
    ("types", "written", "value"),
    [
        (["boolean"], "true", True),
        (["object"], "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
        (["array"], "['a', \"b\"]", ["a", "b"]),
        (["integer"], "three", "three"),
        (["integer"], "{1, 2}", "{1, 2}"),
        (["number"], "NaN", "NaN"),
        (["number"], "1e999", "1e999"),
        (["object"], "{" * 1000, "{" * 1000),
        (["string"], "None", "None"),
        (["string", "null"], "None", None),
        (["string", "null"], " None of them", " None of them"),
        (["string", "integer"], "12", 12),
        (["string", "integer"], "12.5", "12.5"),
        (["string", "integer"], "True", "True"),
        (["string", "boolean"], "False", False),
        (["string", "array"], "(1, 2)", "(1, 2)"),
        (["string", "array"], "[1, 2]", [1, 2]),
    ],
)
@pytest.mark.parametrize("name", BARE_SYNTAXES)
def test_bare_values_have_a_type_of_the_schema(name: str, types: list[str], written: str, value: Any) -> None:
    text = call_of(name, x=written)
    for cut in range(0, len(text), 7):
        _, _, arguments, _ = read(name, text, cut, {"properties": {"x": {"type": types}}})
        assert json.loads(arguments) == {"x": value}
