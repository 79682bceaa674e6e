"""Every code block of README.md and docs/*.md can be run, or says why not; tests/soak/test_docs_run.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_blocks import Block, blocks_of, commands, documents, names_in_text, problems
from repository import ROOT, name_of


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_code_blocks_of(document: Path) -> None:
    wrong = [f"{block.name}: {problem}" for block in blocks_of(document) for problem in problems(block)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_commands_options_and_metrics_in_the_text_of(document: Path) -> None:
    assert not names_in_text(document.read_text())


def test_names_that_raypp_does_not_have_are_found() -> None:
    right = ("raypp info M --num-stages 2", "--max-model-len", "RAYPP_MAX_MODEL_LEN=1", "ray_raypp_requests_running")
    wrong = ("raypp inform", "raypp info --full-x", "--max-model-length", "RAYPP_MAX_MODEL", "raypp_requests_total")
    assert names_in_text("".join(f"`{name}` " for name in right)) == []
    assert len(names_in_text("".join(f"`{name}` " for name in wrong))) == len(wrong)


def block(language: str, text: str, **said: str) -> Block:
    return Block(ROOT / "README.md", 1, language, text, **said)


def test_blocks_are_found_with_their_comments() -> None:
    text = """
Text
<!-- not run: needs a GPU -->
```sh
raypp info M
```

- in a list
  <!-- run by tests/a.py -->
  ```python
  a = 1
  ```
```json
{}
```
"""
    assert list(blocks_of(ROOT / "a.md", text)) == [
        Block(ROOT / "a.md", 4, "sh", "raypp info M\n", not_run="needs a GPU"),
        Block(ROOT / "a.md", 10, "python", "a = 1\n", run_by="tests/a.py"),
        Block(ROOT / "a.md", 13, "json", "{}\n"),
    ]


def test_a_shell_block_is_read_as_commands() -> None:
    text = """
# another one's
A=1 raypp serve tiny --port 1 &  # a server
until curl -s localhost:8000/health; do sleep 1; done
cat > x.py <<'END'
it's no shell
END
python x.py 2>/dev/null | head -3 && echo \\
  "a; b" > out
"""
    assert commands(text) == [
        ["raypp", "serve", "tiny", "--port", "1"],
        ["curl", "-s", "localhost:8000/health"],
        ["sleep", "1"],
        ["cat"],
        ["python", "x.py"],
        ["head", "-3"],
        ["echo", "a; b"],
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (block("", "a"), "names no language"),
        (block("js", "a"), "cannot be run"),
        (block("sh", "raypp info", not_run="no"), "is no reason"),
        (block("sh", "raypp info", run_by="tests/no.py"), "no test"),
        (block("sh", "raypp info --num-stagess 2"), "--num-stagess"),
        (block("sh", "rayp info"), "spelt"),
        (block("sh", "make everything"), "no target"),
        (block("sh", 'pip install ".[none]"'), "no extra none"),
        (block("sh", "python tools/none.py"), "no script"),
        (block("sh", "serve run serve_app.app:build model=tiny num_stagess=2"), "num_stagess"),
        (block("sh", "curl localhost:8000/v1/none"), "no route"),
        (block("sh", "curl localhost:8000/health --json '{a}'"), "no JSON"),
        (block("sh", "echo 'a"), "quotation"),
        (block("python", "a ="), "SyntaxError"),
        (block("python", "from raypp import None_"), "has no None_"),
        (block("python", "import no_such_module_at_all"), "no module"),
        (block("json", "{...}"), "JSONDecodeError"),
        (block("toml", "a ="), "TOMLDecodeError"),
        (block("yaml", "a: ["), "ParserError"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_found(wrong: Block, said: str) -> None:
    assert any(said in problem for problem in problems(wrong)), problems(wrong)


@pytest.mark.parametrize(
    "right",
    [
        block("js", "await a", not_run="needs Node"),
        block("json", '{"a": 1}\n{"b": 2}'),
        block("python", "import no_such_module_at_all", not_run="needs that module"),
        block("python", "await a"),
        block("text", "whatever [is here"),
    ],
    ids=lambda block: block.text,
)
def test_what_is_right_is_taken(right: Block) -> None:
    assert not problems(right)
