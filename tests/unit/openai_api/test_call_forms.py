"""What forced and strict calls are held to: each syntax's own rendering is taken, and read as what it was made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import raypp
from raypp.api.tokenizer import Tokenizer
from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.syntax import CallSyntax, MessageSyntax, XmlParameters, marks
from raypp.openai_api.syntaxes import CALL_SYNTAXES, THOUGHT_SYNTAXES, message_syntax
from raypp.structured_outputs import source_of

TINY = Path(raypp.__file__).parent / "assets" / "tiny"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
NO_FORM = CallSyntax(begins=marks("<call>"), end="</call>")
ONE, TWO = ("ping", '{"x": "a <b> [c]"}'), ("get.it-2", '{"x": "\u00fc"}')
THOUGHTS = {"gpt_oss": "gpt_oss", "mistral": "mistral", "hermes": "deepseek_r1", "deepseek_v31": "deepseek_r1"}
HELD = [name for name, syntax in CALL_SYNTAXES.items() if syntax.call and syntax.arguments.style]


def tools(strict: bool) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}
        for name, _ in (ONE, TWO)
    ]


@pytest.fixture(scope="module", params=["special", "spelled"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer: with every mark as a special token, or with none."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((TINY / name).read_text())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    added = [token for token in tokenizer["added_tokens"] if token["special"]]
    literals = [t for s in (*CALL_SYNTAXES.values(), *THOUGHT_SYNTAXES.values()) for t in s.literals()]
    marks = [text for text in dict.fromkeys(literals) if text[:1] in "<[" and text[-1:] in ">]" and " " not in text]
    marks = [text for text in marks if "\n" not in text and "$" not in text] + ["<|constrain|>", "[ARGS]"]
    if request.param == "special":
        next_id = max(token["id"] for token in tokenizer["added_tokens"]) + 1
        added += [{**added[0], "id": next_id + i, "content": text} for i, text in enumerate(marks)]
    # Ids of tokens that are left out keep their place.
    others = [token for token in tokenizer["added_tokens"] if not token["special"]]
    added += [{**token, "content": f"<unused {token['id']}>"} for token in others]
    tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def vocabulary(folder: Path, tokenizer: Tokenizer) -> Vocabulary:
    return VocabularySource(str(folder), tokenizer.vocab_size, tuple(tokenizer.eos_token_ids)).load()


class Form:
    """What a request holds texts to."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer, syntax: MessageSyntax, **fields: Any) -> None:
        self._tokenizer = tokenizer
        params = ChatRequest.model_validate({"messages": HELLO, **fields}).sampling_params(1000, syntax)
        assert params.structured_outputs is not None
        self._grammar = compile_constraint(source_of(params.structured_outputs), vocabulary)

    def takes(self, text: str) -> bool:
        [ids] = self._tokenizer.encode([text], add_special_tokens=False)
        [end] = self._tokenizer.eos_token_ids
        try:
            TextGrammar(self._grammar, None).accept([*ids.tolist(), end])
        except RequestError:
            return False
        return True


def read(syntax: MessageSyntax, text: str, begun: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    request = ChatRequest.model_validate({"messages": HELLO, "tools": tools(strict=False)})
    delta = request.parser(syntax, begun=begun).feed(text, is_last=True)
    return delta.reasoning, delta.content, [(call.name or "", call.arguments) for call in delta.calls]


def written_by(calls: CallSyntax, of: list[tuple[str, str]]) -> str:
    """Return these calls as the model writes them."""
    if issubclass(calls.arguments, XmlParameters):
        around = calls.arguments.marks
        line = "\n" if around.has_lines else ""
        before, behind = f"{around.name}x{''.join(around.value)}{line}", line + around.end
        of = [(name, before + json.loads(arguments)["x"] + behind) for name, arguments in of]
    return calls.written(of)


def several(calls: CallSyntax) -> list[tuple[str, str]]:
    return [ONE] if calls.separator is None else [TWO, ONE]


@pytest.mark.parametrize("name", HELD)
def test_forced_calls(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    syntax = message_syntax(tokenizer, name, THOUGHTS.get(name, "none"))
    assert syntax.calls is not None
    written = written_by(syntax.calls, several(syntax.calls))
    form = Form(vocabulary, tokenizer, syntax, tools=tools(strict=False), tool_choice="required")
    assert form.takes(written)
    assert read(syntax, written) == ("", "", several(syntax.calls))
    assert not form.takes("hello")
    assert not form.takes(written.replace("ping", "pong"))
    assert not form.takes(written.replace('"x"', '"y"').replace("=x", "=y").replace("key>x<", "key>y<"))
    if syntax.thoughts is not None:
        thought = syntax.thoughts.thought.replace("$thought", "so\n")
        assert form.takes(thought + written)
        begun = "<|start|>assistant" if name == "gpt_oss" else ""
        assert read(syntax, thought + written, begun) == ("so", "", several(syntax.calls))
    single = Form(
        vocabulary, tokenizer, syntax, tools=tools(strict=False), tool_choice="required", parallel_tool_calls=False
    )
    assert single.takes(written_by(syntax.calls, [ONE]))
    if syntax.calls.separator is not None:
        assert not single.takes(written)


@pytest.mark.parametrize("name", HELD)
def test_strict_functions(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    syntax = message_syntax(tokenizer, name, THOUGHTS.get(name, "none"))
    assert syntax.calls is not None
    form = Form(vocabulary, tokenizer, syntax, tools=tools(strict=True))
    written, free = written_by(syntax.calls, several(syntax.calls)), "hello [a] {b}"
    if syntax.thoughts is not None:
        free = syntax.thoughts.answer.replace("$answer", free)
    assert form.takes(free)
    assert form.takes(written)
    assert not form.takes(written.replace("ping", "pong"))
    if name != "gpt_oss":
        assert form.takes(f"Let me see. {written}")
        assert not form.takes(f"Let me see. {written.replace('ping', 'pong')}")
    if syntax.thoughts is not None:
        assert form.takes(syntax.thoughts.thought.replace("$thought", "so\n") + written)


@pytest.mark.parametrize("name", HELD)
def test_an_answer_or_calls(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    syntax = message_syntax(tokenizer, name, THOUGHTS.get(name, "none"))
    assert syntax.calls is not None
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    form = Form(vocabulary, tokenizer, syntax, tools=tools(strict=False), response_format=answer)
    written = ONE[1] if syntax.thoughts is None else syntax.thoughts.answer.replace("$answer", ONE[1])
    assert form.takes(written)
    assert form.takes(written_by(syntax.calls, [ONE]))
    assert not form.takes("hello")


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tools": tools(strict=True)}, {"response_format": {"type": "json_object"}}]
)
def test_calls_that_can_only_be_read_are_refused_a_form(fields: dict[str, Any]) -> None:
    syntax = MessageSyntax(calls=NO_FORM)
    request = ChatRequest.model_validate({"messages": HELLO, "tools": tools(strict=False), **fields})
    with pytest.raises(RequestError, match="cannot be constrained") as caught:
        request.sampling_params(1000, syntax)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"call": "<call>$name</call>"}, r"\$name and \$arguments"),
        ({"calls": "<calls>"}, r"\$calls, once"),
        ({"calls": "<calls>$calls"}, "two marks, or none"),
    ],
)
def test_what_a_syntax_cannot_write(written: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CallSyntax(begins=(), **written)  # type: ignore[arg-type]


def test_parameters_in_xml_follow_their_schemas(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    syntax = message_syntax(tokenizer, "qwen3_coder")
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "short": {"type": "string", "maxLength": 4},
            "n": {"type": "integer"},
            "l": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["code", "n"],
    }
    functions = [{"name": "f", "parameters": schema}, {"name": "g", "parameters": None}]
    given = [{"type": "function", "function": function} for function in functions]
    form = Form(vocabulary, tokenizer, syntax, tools=given, tool_choice="required")

    def call(**values: str) -> str:
        parameters = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())
        return f"<tool_call>\n<function=f>\n{parameters}\n</function>\n</tool_call>"

    text = call(code='if a < b:\n\tprint("<x>")', short="abcd", n="-3", l='["a", "b"]')
    assert form.takes(text)
    request = ChatRequest.model_validate({"messages": HELLO, "tools": given})
    [read_call] = request.parser(syntax).feed(text, is_last=True).calls
    values = {"code": 'if a < b:\n\tprint("<x>")', "short": "abcd", "n": -3, "l": ["a", "b"]}
    assert json.loads(read_call.arguments) == values
    assert form.takes(call(code="x", n="1"))
    assert form.takes("<tool_call>\n<function=g>\n\n</function>\n</tool_call>")
    for wrong in (
        call(n="1"),
        call(code="x", n="one"),
        call(code="x", short="abcde", n="1"),
        call(code="x", n="\n\n1"),
    ):
        assert not form.takes(wrong)


TEXTS = {"$defs": {"Digit": {"enum": ["1", "2"]}, "Text": {"type": "string", "title": "T"}}}
OPEN = {  # what may be a text, beside the values that its forms could be read as
    "either": {"type": ["string", "integer"]},
    "one of": {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 10}]},
    "values": {"enum": [2, "1"]},
    "nothing of types": {"minLength": 3},
}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({"const": "7"}, {"7": "7"}),
        ({"$ref": "#/$defs/Digit"}, {"2": "2"}),
        ({"$ref": "#/$defs/Text"}, {"12": "12", "null": "null"}),
        ({"allOf": [{"$ref": "#/$defs/Text"}]}, {"12": "12"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"12": "12", "null": None, "nul": "nul"}),
        ({"type": ["string", "null"]}, {"{}": "{}", "null": None}),
        ({"anyOf": [{"$ref": "#/$defs/Digit"}, {"type": "null"}]}, {"1": "1", "null": None}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"1": 1, "null": None}),
        ({"type": "array", "items": {"type": "string"}}, {'["1"]': ["1"]}),
        ({}, {"12": 12, "ab": "ab", '"ab"': "ab"}),
    ],
    ids=str,
)
def test_bare_parameters_are_read_as_their_schema_says(
    tokenizer: Tokenizer, vocabulary: Vocabulary, schema: dict[str, Any], values: dict[str, Any]
) -> None:
    syntax = message_syntax(tokenizer, "qwen3_coder")
    parameters = {**SCHEMA, **TEXTS, "properties": {"x": schema}}
    given = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    form = Form(vocabulary, tokenizer, syntax, tools=given)
    request = ChatRequest.model_validate({"messages": HELLO, "tools": given})
    for written, value in values.items():
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert form.takes(text)
        for cut in range(len(text)):
            parser = request.parser(syntax)
            calls = [*parser.feed(text[:cut], is_last=False).calls, *parser.feed(text[cut:], is_last=True).calls]
            assert json.loads("".join(call.arguments for call in calls)) == {"x": value}


@pytest.mark.parametrize("schema", OPEN.values(), ids=OPEN)
def test_bare_parameters_that_may_be_texts_or_not_are_not_held(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    syntax = message_syntax(tokenizer, "qwen3_coder")
    function = {"name": "f", "parameters": {**SCHEMA, "properties": {"x": schema}}}
    given = [{"type": "function", "function": {**function, "strict": True}}]
    with pytest.raises(RequestError, match="cannot be enforced") as refused:
        ChatRequest.model_validate({"messages": HELLO, "tools": given}).sampling_params(1000, syntax)
    assert "#/properties/x" in str(refused.value)


def test_the_documents_own_syntax_is_one(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    document = (Path(raypp.__file__).parents[1] / "docs" / "tool_calls.md").read_text()
    [code] = re.findall(r"^```python\n# my_syntax.py\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    syntax = MessageSyntax(calls=module["CALLS"])
    text = f"Well.\n<call:ping>{ONE[1]}</call>\n<call:get.it-2>{TWO[1]}</call>"
    assert read(syntax, text) == ("", "Well.", [ONE, TWO])
    assert Form(vocabulary, tokenizer, syntax, tools=tools(strict=True)).takes(text)
    assert Form(vocabulary, tokenizer, syntax, tools=tools(strict=False), tool_choice="required").takes(text[6:])


@pytest.mark.parametrize("others", [{}, True, {"type": "integer"}], ids=json.dumps)
@pytest.mark.parametrize("strict", [True, False])
def test_arguments_keep_to_a_schema_that_allows_further_ones(
    vocabulary: Vocabulary, tokenizer: Tokenizer, others: Any, strict: bool
) -> None:
    tool = tools(strict)[0]
    tool["function"]["parameters"] = SCHEMA | {"additionalProperties": others}
    syntax = message_syntax(tokenizer, "hermes", "none")
    assert syntax.calls is not None
    form = Form(vocabulary, tokenizer, syntax, tools=[tool], tool_choice="required")
    assert form.takes(syntax.calls.written([("ping", '{"x": "a", "y": 1}')]))
    for arguments in ('{"y": 1}', '{"x": 1}', '{"x": "a", "\\u0078": 1}'):
        assert not form.takes(syntax.calls.written([("ping", arguments)])), arguments


@pytest.mark.parametrize("others", [{}, {"type": "string"}], ids=json.dumps)
def test_arguments_that_are_not_json_have_no_further_names_that_are_held_to_a_schema(
    vocabulary: Vocabulary, tokenizer: Tokenizer, others: Any
) -> None:
    syntax = message_syntax(tokenizer, "qwen3_coder", "none")
    tool = tools(strict=True)[0]
    tool["function"]["parameters"] = SCHEMA | {"additionalProperties": others}
    with pytest.raises(RequestError, match=r"it is strict.*names that are not in the schema"):
        Form(vocabulary, tokenizer, syntax, tools=[tool])
