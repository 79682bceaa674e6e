"""Each syntax that is known by name: texts as its models write them, in whatever pieces they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.errors import ConfigError
from raypp.openai_api.message_parser import MessageParser
from raypp.openai_api.syntax import begun_in, is_thought, num_thought_tokens
from raypp.openai_api.syntaxes import CALL_SYNTAXES, THOUGHT_SYNTAXES, check_parsers, message_syntax
from raypp.types import CompletionOutput

Message = tuple[str, str, list[tuple[str, str]]]
"""Thought, content, and calls with their arguments."""


def deepseek(name: str) -> str:
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


ALL, END_ALL = deepseek("tool calls begin"), deepseek("tool calls end")
ONE, END_ONE, SEP = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")
START = "<|start|>assistant"
CITY, FULL = '{"city": "Paris"}', '{"city": "M\u00fcnchen \\"}{\\" \U0001f327", "days": [1, {"x": 2}]}'
XML = """<tool_call>
<function=write>
<parameter=path>
a b.py
</parameter>
<parameter=text>
def f():
    return "<x>"  # \u00fc

</parameter>
<parameter=count>
3
</parameter>
<parameter=flags>
{"a": [true, null]}
</parameter>
</function>
</tool_call>"""
XML_ARGUMENTS = (
    '{"path": "a b.py", '
    '"text": "def f():\\n    return \\"<x>\\"  # \u00fc\\n", "count": 3, "flags": {"a": [true, null]}}'
)
GLM = """<tool_call>write
<arg_key>path</arg_key>
<arg_value>a b.py</arg_value>
<arg_key>text</arg_key>
<arg_value>def f():
    return "<x>"  # \u00fc
</arg_value>
<arg_key>count</arg_key>
<arg_value>3</arg_value>
<arg_key>flags</arg_key>
<arg_value>{"a": [true, null]}</arg_value>
</tool_call>"""
GEMMA = """<|tool_call>call:write{path:<|"|>a b.py<|"|>,text:<|"|>def f():
    return "<x>"  # \u00fc
<|"|>,count:3,flags:{a:[true,null]}}<tool_call|>"""
MINIMAX = """<minimax:tool_call>
<invoke name="write">
<parameter name="path">a b.py</parameter>
<parameter name="text">def f():
    return "<x>"  # \u00fc
</parameter>
<parameter name="count">3</parameter>
<parameter name="flags">{"a": [true, null]}</parameter>
</invoke>
</minimax:tool_call>"""
STRINGS = {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}


def v3(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{END_ONE}"


def v31(name: str, arguments: str) -> str:
    return f"{ONE}{name}{SEP}{arguments}{END_ONE}"


def commentary(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


CALLS = [("weather", FULL)]
CASES: dict[str, list[tuple[str, str, Message]]] = {
    # calls' syntax: (thoughts' syntax, text, message)
    "hermes": [
        ("", f'<tool_call>\n{{"name": "weather", "arguments": {FULL}}}\n</tool_call>', ("", "", CALLS)),
        ("", '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', ("", "", [("f", '{"a": 1}')])),
        (
            "",
            f'<tool_call>{{"name": "f", "arguments": {CITY}}}\n<tool_call>'
            '{"name": "g", "arguments": {}}</tool_call>',
            ("", "", [("f", CITY), ("g", "{}")]),
        ),  # the first has no end
        ("", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>Done', ("", "Done", [("f", '{"a": 1')])),
        (
            "",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            ("", "", [("f", '{"a": "</tool_call>"}')]),
        ),
        ("", "<tool_call>{'name': 'f'}</tool_call>", ("", "<tool_call>{'name': 'f'}</tool_call>", [])),
        (
            "qwen3",
            f'<think>\n<tool_call>{{"name": "f", "arguments": {CITY}}}</tool_call>\n</think>\nNo.',
            (f'<tool_call>{{"name": "f", "arguments": {CITY}}}</tool_call>', "No.", []),
        ),
    ],
    "mistral": [
        ("", f"[TOOL_CALLS]weather[ARGS]{FULL}", ("", "", CALLS)),
        ("", f"[TOOL_CALLS]weather{FULL}", ("", "", CALLS)),
        ("", f"[TOOL_CALLS]weather[CALL_ID]Ab3dE6gH9[ARGS]{FULL}", ("", "", CALLS)),
        (
            "",
            f"Let me see.[TOOL_CALLS]f[ARGS]{CITY}[TOOL_CALLS]g[ARGS]{{}}",
            ("", "Let me see.", [("f", CITY), ("g", "{}")]),
        ),
        ("", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {FULL}}}]', ("", "", CALLS)),
        (
            "",
            f'[TOOL_CALLS][{{"name": "f", "arguments": {CITY}, "id": "Ab3dE6gH9"}}, '
            '{"name": "g", "arguments": {}}]',
            ("", "", [("f", CITY), ("g", "{}")]),
        ),
        ("", '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', ("", "", [("f", '{"a": 1}')])),
        ("", '[TOOL_CALLS]f[ARGS]{"a": [1', ("", "", [("f", '{"a": [1')])),
        ("", "[TOOL_CALLS]f[ARGS]none", ("", "[TOOL_CALLS]f[ARGS]none", [])),
        ("", "[TOOL", ("", "[TOOL", [])),
        ("", "a[1] [T] b", ("", "a[1] [T] b", [])),
        ("mistral", f"[THINK]why[/THINK]So.[TOOL_CALLS]f[ARGS]{CITY}", ("why", "So.", [("f", CITY)])),
        ("mistral", "[THINK]never en", ("never en", "", [])),
    ],
    "deepseek_v3": [
        ("", f"{ALL}{v3('weather', FULL)}{END_ALL}", ("", "", CALLS)),
        ("", f"I look.\n\n{ALL}{v3('f', CITY)}\n{v3('g', '{}')}{END_ALL}", ("", "I look.", [("f", CITY), ("g", "{}")])),
        ("deepseek_r1", f"<think>\nso\n</think>\n\n{ALL}{v3('f', CITY)}{END_ALL}Done.", ("so", "Done.", [("f", CITY)])),
        (
            "deepseek_r1",
            f"<think>{ALL}{v3('f', CITY)}{END_ALL}</think>No.",
            (f"{ALL}{v3('f', CITY)}{END_ALL}", "No.", []),
        ),
        ("", f'{ALL}{ONE}function{SEP}f\n```json\n{{"a": [1, 2', ("", "", [("f", '{"a": [1, 2')])),
        (
            "",
            f'{ALL}{ONE}function{SEP}f\n```json\n{{"a": [1\n```{END_ONE}{END_ALL}.',
            ("", ".", [("f", '{"a": [1\n```')]),
        ),
        ("", f"{ALL}{ONE}function{SEP}f\nno{END_ONE}", ("", f"{ONE}function{SEP}f\nno{END_ONE}", [])),
        ("", f"{ALL}{ONE}function{SEP}get", ("", f"{ONE}function{SEP}get", [])),
    ],
    "deepseek_v31": [
        ("", f"{ALL}{v31('weather', FULL)}{END_ALL}", ("", "", CALLS)),
        ("", f"Yes.{ALL}{v31('f', CITY)}{v31('g', '{}')}{END_ALL}", ("", "Yes.", [("f", CITY), ("g", "{}")])),
        (
            "",
            f"{ALL}{v31('f', CITY)}{END_ALL}\nand{ALL}{v31('g', '{}')}{END_ALL}",
            ("", "and", [("f", CITY), ("g", "{}")]),
        ),
    ],
    "gpt_oss": [
        (
            "gpt_oss",
            f"<|channel|>analysis<|message|>Need it.<|end|>{START}{commentary('weather', FULL)}<|call|>",
            ("Need it.", "", CALLS),
        ),
        (
            "gpt_oss",
            f"<|channel|>analysis<|message|>Need it.<|end|>{START} to=functions.f<|channel|>commentary json"
            f"<|message|>{CITY}",
            ("Need it.", "", [("f", CITY)]),
        ),
        (
            "gpt_oss",
            f" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{CITY}<|call|>",
            ("", "", [("f", CITY)]),
        ),
        ("gpt_oss", "<|channel|>final<|message|> It rains.\n<|return|>", ("", "It rains.", [])),
        (
            "gpt_oss",
            f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>"
            f"{START}{commentary('f', CITY)}<|call|>",
            ("a", "I look.", [("f", CITY)]),
        ),
        (
            "gpt_oss",
            f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>final <|constrain|>json<|message|>{CITY}",
            ("a", CITY, []),
        ),
        ("gpt_oss", "<|channel|>analysis<|message|>never en", ("never en", "", [])),
        (
            "gpt_oss",
            f"{commentary('f', CITY)}<|call|>{START}{commentary('g', '{}')}<|call|>",
            ("", "", [("f", CITY), ("g", "{}")]),
        ),
        ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"a": [1', ("", "", [("f", '{"a": [1')])),
        ("gpt_oss", "plain", ("", "plain", [])),
        ("gpt_oss", "<|channel|>analysis to=functions.f code<|message|>{}<|call|>", ("", "", [("f", "{}")])),
    ],
    "qwen3_coder": [
        ("", XML, ("", "", [("write", XML_ARGUMENTS)])),
        ("", f"I write.\n\n{XML}\nDone.", ("", "I write.Done.", [("write", XML_ARGUMENTS)])),
        ("", "<tool_call>\n<function=f>\n</function>\n</tool_call>", ("", "", [("f", "{}")])),
        ("", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ("", "", [("f", '{"a": 1}')])),
        ("", "<tool_call>\n<function=f>\n<parameter=path>\n/tmp/\n<", ("", "", [("f", '{"path": "/tmp/')])),
        ("", "if a <b: f(<function", ("", "if a <b: f(<function", [])),
    ],
    "glm45": [
        ("", GLM, ("", "", [("write", XML_ARGUMENTS)])),
        ("", "".join(GLM.split("\n", 1)).replace(">\n<", "><"), ("", "", [("write", XML_ARGUMENTS)])),  # GLM-4.7
        ("qwen3", f"<think>so</think>\nI write.\n{GLM}", ("so", "I write.", [("write", XML_ARGUMENTS)])),
        ("", f"{GLM}\n<tool_call>f\n</tool_call>", ("", "", [("write", XML_ARGUMENTS), ("f", "{}")])),
        ("", "<tool_call>f</tool_call>", ("", "", [("f", "{}")])),
        ("", "<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>/tmp/<", ("", "", [("f", '{"path": "/tmp/')])),
        ("", "a <tool_call", ("", "a <tool_call", [])),
    ],
    "gemma4": [
        ("", GEMMA, ("", "", [("write", XML_ARGUMENTS)])),
        ("gemma4", f"<|channel>thought\nso<channel|>I write.{GEMMA}", ("so", "I write.", [("write", XML_ARGUMENTS)])),
        ("", f"{GEMMA}<|tool_call>call:f{{}}<tool_call|>", ("", "", [("write", XML_ARGUMENTS), ("f", "{}")])),
        ("", '<|tool_call>call:f{path:<|"|>/tmp/<|', ("", "", [("f", '{"path": "/tmp/')])),
        ("", "<|tool_call>call:f{a:[1,<tool_call|>.", ("", ".", [("f", '{"a": [1, ')])),
        ("", "a <|tool_call>b", ("", "a <|tool_call>b", [])),
    ],
    "minimax_m2": [
        ("", MINIMAX, ("", "", [("write", XML_ARGUMENTS)])),
        ("qwen3", f"<think>so</think>\n\nI write.\n{MINIMAX}", ("so", "I write.", [("write", XML_ARGUMENTS)])),
        (
            "",
            '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n<invoke name="g">\n<parameter name="a">1</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            ("", "", [("f", "{}"), ("g", '{"a": 1}')]),
        ),
        (
            "",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="path">/tmp/',
            ("", "", [("f", '{"path": "/tmp/')]),
        ),
        ("", 'a <invoke name="b', ("", 'a <invoke name="b', [])),
    ],
}
PROMPTED = {"gpt_oss": START}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def read(name: str, thoughts: str, pieces: list[str]) -> Message:
    parser = MessageParser(
        thoughts=THOUGHT_SYNTAXES[thoughts] if thoughts else None,
        calls=CALL_SYNTAXES[name],
        begun=PROMPTED.get(name, ""),
        schemas={"write": STRINGS, "f": STRINGS},
    )
    reasoning, content, calls = "", "", list[list[str]]()
    for index, piece in enumerate(pieces):
        delta = parser.feed(piece, is_last=index == len(pieces) - 1)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert parser.num_calls == len(calls)
    return reasoning, content, [(function, arguments) for function, arguments in calls]


@pytest.mark.parametrize(("name", "thoughts", "text", "message"), FLAT)
def test_recorded_texts_cut_anywhere(name: str, thoughts: str, text: str, message: Message) -> None:
    assert read(name, thoughts, [text]) == message
    assert read(name, thoughts, [*text, ""]) == message
    for cut in range(1, len(text)):
        assert read(name, thoughts, [text[:cut], text[cut:]]) == message, text[:cut]
    if len(text) <= 45:
        for first in range(1, len(text)):
            for second in range(first + 1, len(text)):
                pieces = [text[:first], text[first:second], text[second:]]
                assert read(name, thoughts, pieces) == message, pieces


class Model:
    """What of a tokenizer tells its syntaxes."""

    special_token_ids = frozenset[int]()

    def __init__(self, chat_template: str = "{{ message.content }}", tokens: Sequence[str] = ()) -> None:
        self.chat_template = chat_template
        self._tokens = tokens

    def has_tokens(self, *texts: str) -> bool:
        return set(texts) <= set(self._tokens)

    def template_reads(self, name: str) -> bool:
        return False


def name_of(syntax: object, known: Mapping[str, object]) -> str | None:
    return next((name for name, one in known.items() if one is syntax), None)


TEMPLATES = {
    # excerpts: what each family writes for an assistant's call or thought
    "{{ '<tool_call>\n{\"name\": \"' + tool_call.name }}{{ content.split('</think>') }}": ("hermes", "deepseek_r1"),
    "{{ '<tool_call>\n<function=' + tool_call.name + '>\n' }}{{ '<parameter=' + name }}": ("qwen3_coder", None),
    "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{{ '</think>' }}": (
        "glm45",
        "deepseek_r1",
    ),
    "{{ '<|tool_call>call:' + name + '{' }}{{ '}<tool_call|>' }}{{ '<|channel>thought\n<channel|>' }}": (
        "gemma4",
        "gemma4",
    ),
    "{{ '<minimax:tool_call>' }}{{ '<invoke name=\"' ~ name ~ '\">' }}{{ content.split('</think>') }}": (
        "minimax_m2",
        "deepseek_r1",
    ),
    "{{ '<|python_tag|>' + tool_call.name + '.call(' }}": ("llama3_json", None),
    "{{ '[TOOL_CALLS] [' }}{{ tool_call.function | tojson }}": ("mistral_json", None),
    "{{ '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}{{ '[THINK]' + text + '[/THINK]' }}": (
        "mistral",
        "mistral",
    ),
    f"{{{{ '{ALL}{ONE}' + tool['type'] + '{SEP}' + name + '\\n```json\\n' }}}}{{{{ c.split('</think>') }}}}": (
        "deepseek_v3",
        "deepseek_r1",
    ),
    f"{{{{ '{ALL}{ONE}' + name + '{SEP}' + arguments }}}}{{{{ '<think>' }}}}{{{{ '</think>' }}}}": (
        "deepseek_v31",
        "deepseek_r1",
    ),
    "{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}{{ '<|call|>' }}": (
        "gpt_oss",
        "gpt_oss",
    ),
    "{{ message.content }}": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_tells_the_syntax(template: str) -> None:
    model: Any = Model(template, ["<tool_call>", "</tool_call>"] if TEMPLATES[template][0] else [])
    syntax = message_syntax(model)
    assert (name_of(syntax.calls, CALL_SYNTAXES), name_of(syntax.thoughts, THOUGHT_SYNTAXES)) == TEMPLATES[template]
    named = message_syntax(model, "mistral", "none")
    assert (named.calls, named.thoughts) == (CALL_SYNTAXES["mistral"], None)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (["<|python_tag|>", "<|eom_id|>"], "llama3_json"),
        (["<|python_tag|>", "<|eom_id|>", "<tool_call>", "</tool_call>"], "hermes"),  # taught later
        (["[TOOL_CALLS]"], "mistral_json"),
        ([ALL, ONE, SEP], "deepseek_v31"),
        (["<tool_call>"], None),
    ],
)
def test_else_the_vocabulary_does(tokens: list[str], name: str | None) -> None:
    model: Any = Model(tokens=tokens)
    assert name_of(message_syntax(model).calls, CALL_SYNTAXES) == name
    assert message_syntax(None).calls is None


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_names_that_are_refused(setting: str) -> None:
    for name, words in {
        "hermse": "got: hermse.*deepseek.*gpt_oss.*mistral.*qwen3.*module:attribute",
        "no_such_module:X": "No module named",
        "raypp.openai_api.syntaxes:NOTHING": "no attribute 'NOTHING'",
        "raypp.openai_api.syntaxes:message_syntax": "of type function",
    }.items():
        for check in (partial(message_syntax, None), lambda **names: check_parsers(**DEFAULTS | names)):
            with pytest.raises(ConfigError, match=words):
                check(**{setting: name})


DEFAULTS = {"tool_call_parser": "auto", "reasoning_parser": "auto"}


@pytest.mark.parametrize("name", CASES)
def test_arguments_stream_as_they_come(name: str) -> None:
    text = next(text for _, text, message in CASES[name] if message[2] and len(message[2][0][1]) > 10)
    parser = MessageParser(
        thoughts=None, calls=CALL_SYNTAXES[name], begun=PROMPTED.get(name, ""), schemas={"write": STRINGS}
    )
    news = [parser.feed(char).calls for char in text]
    num_chars = sum(len(call.arguments) for calls in news for call in calls)
    assert sum(map(bool, news)) > num_chars / 4


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "begun"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", ""),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", "<think>"),
        ("deepseek_r1", "<think>a</think>b", "<think>a</think>b", ""),
        ("deepseek_r1", "<think>a</think>b<think>c", "<think>a</think>b<think>c", "<think>"),
        ("mistral", "[INST]a[/INST][THINK]", "", "[THINK]"),
        ("gpt_oss", f"<|start|>user<|message|>a<|end|>{START}", "", START),
        ("gpt_oss", f"<|start|>user<|message|>a<|end|>{START}<|channel|>fin", "", f"{START}<|channel|>fin"),
        ("gpt_oss", f"{START}<|channel|>final<|message|>It", "It", ""),
        ("gpt_oss", f"<|start|>user <|start|> {'a' * 300}", "", ""),
    ],
)
def test_what_a_prompt_has_begun(name: str, prompt: str, continued: str, begun: str) -> None:
    thoughts = THOUGHT_SYNTAXES[name]
    assert begun_in(prompt, thoughts, continued) == begun
    assert is_thought(begun, thoughts) == (begun not in ("", START, f"{START}<|channel|>fin"))


@pytest.mark.parametrize(("name", "thoughts", "text", "message"), [case for case in FLAT if case[2].strip()])
def test_thoughts_are_counted_as_they_are_read(name: str, thoughts: str, text: str, message: Message) -> None:
    """With a token per character, no more than the thought, its marks, and the space around them."""

    class Characters:
        def token_text(self, token_id: int) -> str:
            return chr(token_id)

    tokenizer: Any = Characters()
    answer = CompletionOutput(index=0, text=text, token_ids=[ord(char) for char in text], finish_reason="stop")
    syntax = THOUGHT_SYNTAXES[thoughts] if thoughts else None
    count = num_thought_tokens(tokenizer, syntax, answer, begun=PROMPTED.get(name, ""))
    assert (count > 0) == (message[0] != "")
    assert len(message[0]) <= count <= len(message[0]) + 60
    assert num_thought_tokens(tokenizer, syntax, CompletionOutput(index=0, text="", token_ids=[])) == 0


FRAGMENTS = [
    "a",
    " ",
    "\n",
    "{",
    "}",
    '"',
    ",",
    "]",
    '{"x": 1}',
    '"name": "f"',
    '"arguments": {',
    "<",
    "[",
    "```json\n",
    "f",
    "</",
]


@settings(max_examples=40)
@given(st.data())
def test_any_text_is_read_the_same_in_any_pieces(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CALL_SYNTAXES)))
    thoughts = data.draw(st.sampled_from(["", *THOUGHT_SYNTAXES]))
    literals = [*CALL_SYNTAXES[name].literals(), *(THOUGHT_SYNTAXES[thoughts].literals() if thoughts else ())]
    texts = [text for case in CASES.get(name, []) for text in case[1].split(" ")]
    parts = st.sampled_from([*FRAGMENTS, *texts, *filter(None, literals)])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, thoughts, pieces) == read(name, thoughts, [text]) == read(name, thoughts, [*text, ""])
