"""Regular expressions, choices, EBNF and Lark: what each allows, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_texts import allows_text, compiled_within_text, matcher_of, tag_of

from raypp.errors import RequestError

JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LARK = r"""%llguidance {}
start: "%json {" X %json {"type": "string", "minLength": 3} // %json x
X: /"a\/%json"/
"""
LINES = '%llguidance {}\nX: /a\n"#/\nstart: X %json {"const": "b"}'
# A constraint; texts that it allows; texts that it does not.
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": r"[a-z]+/x\d"}, ["ab/x1"], ["x", "ab/x", "ab/x12", "ab/x٣"]),
    ({"regex": "^a|b$"}, ["a", "b"], ["ab", "^a"]),
    ({"regex": r"\\$"}, ["\\"], ["\\\\", "\\$"]),
    ({"regex": r"\$"}, ["$"], ["\\", ""]),
    ({"regex": "é\n[[&&]+"}, ["é\n[&["], ["é\n"]),
    ({"regex": "^"}, [""], ["a"]),
    ({"regex": r"a\\\\"}, ["a\\\\"], ["a\\"]),
    ({"choice": ['a"b', "é\n", "abc", "ab", "<x>", "España"]}, ['a"b', "é\n", "ab", "abc", "<x>", "España"], ["a", ""]),
    ({"json_object": True}, ["{}", '{"é": [1, null]}'], ["[]", '{"a":1}', '{"a": 1}\n']),
    ({"grammar": 'root ::= "a" x\nx ::= "b" | "(" x ")"'}, ["ab", "a((b))"], ["a(b", "a"]),
    ({"grammar": 'root ::= [a-z]+ "x" | "1"{2,3}'}, ["abx", "xx", "11", "111"], ["x", "1", "1111"]),
    (
        {"grammar": 'root ::= "" | "é<b>\\"" # c\n  y\ny ::= [^a\\]\\-<]? .'},
        ["", 'é<b>"z', 'é<b>"bz'],
        ['é<b>"az', "é"],
    ),
    ({"grammar": '# head\nroot ::= (\n "a" | [\\x41-\\u0043\\U0001F600] )* '}, ["", "aABC😀"], ["D"]),
    ({"grammar": 'root ::= "[]" [\\d_-] "\\\\" "\\n" {2}'}, ["[]3\\\n\n", "[]-\\\n\n"], ["[]a\\\n\n", "[]3\\\n"]),
    ({"grammar": 'root ::= "a"{0} "b"{ 0 , 2 }[c]{0,0}'}, ["", "bb"], ["a", "c", "bbb"]),
    ({"grammar": 'root ::= root | "a"'}, ["a"], ["", "aa"]),
    ({"grammar": 'root ::= a-b\na-b ::= "x" c.d\nc.d ::= "é" root | "y"'}, ["xy", "xéxy"], ["x", "xéx"]),
    ({"grammar": JSON}, ['{"a": [1, 2.5, "x\\n"], "b": {}}'], ['{"a": }', '{"a": "\n"}']),
    ({"grammar": LINES}, ['a\n"#"b"'], ['a\n"#"c"']),
    ({"grammar": LARK}, ['%json {"a/%json""abc"'], ['%json {"a/%json""ab"']),
    (tag_of({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}), ["aab"], ["aa"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0])[:60])
def test_a_text_is_allowed_if_the_constraint_means_it(case: tuple[dict[str, Any], list[str], list[str]]) -> None:
    constraint, good, bad = case
    matcher = matcher_of(constraint)
    assert [text for text in good if not allows_text(matcher, text)] == []
    assert [text for text in bad if allows_text(matcher, text)] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "x(?=y)"}, "look-around"),
    ({"regex": r"abc\Z"}, r"regex parse error: unrecognized escape sequence: \\Z in abc\\Z; expected"),
    ({"regex": "a" * 300 + "("}, r"regex parse error: unclosed group: \( in a+\(; expected"),
    ({"regex": r"\b" + "a" * 300}, r"got: at 2\(8\): lookarounds not supported"),
    ({"regex": "\\"}, "escapes nothing"),
    ({"regex": "a\\\\\\"}, "escapes nothing"),
    ({"choice": ["a", "b\ud83d"]}, r"the character \\ud83d, which is half of one"),
    ({"grammar": r'root ::= "\uDE00"'}, "half of one"),
    ({"grammar": r'root ::= "\Uffffffff"'}, "cannot be compiled; got: "),
    (tag_of({"type": "const_string", "value": "\ud800"}), "half of one"),
    ({"regex": "(?:a"}, r"unclosed group: \( in \(\?:a"),
    ({"grammar": "%llguidance {}\nstart: A\nA: /b(?=c)/"}, r"at 3\(4\): .* is not supported: \(\?= in b\(\?=c\); "),
    ({"regex": "[+--]"}, "a difference of characters"),
    ({"grammar": 'root ::= "a'}, "'\"a' in line 1 is no EBNF"),
    ({"grammar": '\nroot ::= "a" (= "b")'}, "in line 2 is no EBNF"),
    ({"grammar": '"a"'}, "where a rule should begin"),
    ({"grammar": "root ::= x"}, "no rule x"),
    ({"grammar": 'rot ::= "a"'}, "no rule root"),
    ({"grammar": 'root ::= "a" | ('}, r"a \( without its \)"),
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "two rules root"),
    ({"grammar": "root ::= []"}, r"\[\] without a character"),
    ({"grammar": 'root ::= * "a"'}, "behind nothing"),
    ({"grammar": 'root ::= "a"{99999}'}, "more than 20,000 times"),
    (
        {"grammar": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(3000)) + 'r3000 ::= root "b"'},
        "levels",
    ),
    ({"grammar": "%llguidance {}\nstart: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000))}, "levels"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    ({"grammar": '%llguidance {}\nstart: %json {"multipleOf": 1000003}'}, "multipleOf 1000003"),
    ({"grammar": '%llguidance {}\nX: /\n"/\nstart: X %json {"multipleOf": 1000003}'}, "multipleOf 1000003"),
    ({"grammar": '%llguidance {}\nstart: <"> %json {"multipleOf": 1000003}'}, "multipleOf 1000003"),
    ({"grammar": '%llguidance {}\nstart: <#> %json {"multipleOf": 1000003}'}, "multipleOf 1000003"),
    (
        {
            "grammar": '%llguidance {}\nX: /\n"/\nstart: r0\n'
            + "".join(f"r{i}: X r{i + 1}\n" for i in range(3000))
            + '""'
        },
        "levels",
    ),
    ({"grammar": "%llguidance {}\nstart: missing"}, r"at 2\(8\): unknown name: \"missing\""),
    ({"grammar": '%llguidance {}\nstart: %json {\n"type": "null"\n} b\nb: missing'}, r"at 5\(4\): unknown name"),
]


@pytest.mark.parametrize(("constraint", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_compiled_is_refused_by_name(constraint: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        matcher_of(constraint)


def test_a_tag_has_the_schemas_of_all_others() -> None:
    with pytest.raises(RequestError, match="uniqueItems, at #"):
        compiled_within_text({"type": "array", "uniqueItems": True})
