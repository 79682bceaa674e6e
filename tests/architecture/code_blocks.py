"""The fenced code blocks of README.md and docs/*.md, and what can be said of them without running them.

A comment in front of a block says how it is run: `<!-- not run: REASON -->`, or `<!-- run by TEST -->`. Without one,
tests/soak/test_docs_run.py runs it. Whatever the comment, commands are parsed and imports are looked up.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from repository import ROOT

RUN = ("sh", "python")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*)\s*$")
_COMMENT = re.compile(r"^ *<!-- (?:not run: (?P<not_run>.+?)|run by (?P<run_by>[\w/.-]+\w)(?:, .+?)?) -->\s*$")
_HEREDOC = re.compile(r"<<'?(\w+)'?([^\n]*)\n.*?^\1$", re.MULTILINE | re.DOTALL)
_OPERATORS = "();<>|&\n"
_KEYWORDS = {"until", "while", "do", "done", "if", "then", "else", "fi", "!", "{", "}"}
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_UNCHECKED = (
    *("apt-get", "cat", "cd", "chmod", "cp", "curl", "docker", "echo", "export", "git", "gzip", "head", "helm", "jq"),
    *("journalctl", "jupyter", "kill", "kubectl", "lm_eval", "ls", "mkdir", "mv", "nvidia-smi", "openssl", "promtool"),
    *(
        "pytest",
        "ray",
        "rm",
        "seq",
        "sudoedit",
        "set",
        "sleep",
        "source",
        "sudo",
        "systemctl",
        "tail",
        "tar",
        "tee",
        "test",
        "true",
    ),
    *("useradd", "wait", "wc", "which", "install", "printf"),
)
"""Programs whose arguments are not looked at. Any other name is taken for a misspelt one."""
OTHERS_OPTIONS = {"--model", "--model_args", "--profile", "--seconds", "--corpus", "--shm-size", "--clear"}
"""Of lm-eval, Compose, tools/training/train_tiny.py, Docker and venv."""
CLIENTS_OPTIONS = {"--tools", "--system-prompt", "--format"}
"""Of Claude Code and llm-comply."""
OWN_VARIABLES = ("RAYPP_LOG_LEVEL", "RAYPP_SERVICE", "RAYPP_SERVICE_HOST")
"""Those that are no settings; the latter are Kubernetes'."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: The file that it is in.
        line: Of its fence, from 1.
        language: What stands behind the fence.
        text: Its lines, without the fence's indentation.
        not_run: Why it is not run; None when it is.
        run_by: The test that runs it; None: tests/soak/test_docs_run.py.
    """

    document: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    run_by: str | None = None

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def is_run_here(self) -> bool:
        """Whether tests/soak/test_docs_run.py runs it."""
        return self.language in RUN and self.not_run is None and self.run_by is None


def documents() -> list[Path]:
    """Return the documents whose blocks count: README.md and docs/*.md."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(document: Path, text: str | None = None) -> Iterator[Block]:
    """Yield a document's blocks in order; `text` stands for what the file holds."""
    lines = (document.read_text(encoding="utf-8") if text is None else text).splitlines()
    index, before = 0, ""
    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if fence is None:
            before = lines[index]
            index += 1
            continue
        indent, ticks = fence["indent"], fence["ticks"]
        end = next(at for at in range(index + 1, len(lines)) if lines[at].strip() == ticks)
        body = [line.removeprefix(indent) for line in lines[index + 1 : end]]
        comment = _COMMENT.match(before)
        said = comment.groupdict() if comment else {}
        yield Block(document, index + 1, fence["language"], "\n".join(body) + "\n", **said)
        index, before = end + 1, ""


def problems(block: Block) -> list[str]:
    """Return what is wrong with a block: [] when nothing is."""
    if block.run_by is not None and not (ROOT / block.run_by).is_file():
        return [f"there is no test {block.run_by}"]
    if block.not_run is not None and len(block.not_run.split()) < 2:
        return [f"{block.not_run!r} is no reason"]
    try:
        match block.language:
            case "python":
                return _problems_of_python(block)
            case "sh":
                return [problem for command in commands(block.text) for problem in _problems_of(command, block)]
            case "json":
                _check_json(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "yaml":
                list(yaml.safe_load_all(block.text))
            case "text":
                pass
            case "":
                return ["the fence names no language; `text` is one"]
            case other if block.not_run is None:
                return [f"{other} cannot be run; say so: <!-- not run: REASON -->"]
    except (ValueError, SyntaxError, yaml.YAMLError) as error:  # those of JSON and TOML are ValueErrors
        return [f"{type(error).__name__}: {error}"]
    return []


def names_in_text(text: str) -> list[str]:
    """Return the commands, options, variables and metrics between backticks that raypp does not have."""
    from raypp.cli.main import _parser
    from raypp.config.options import VARIABLES
    from raypp.config.other_engines import OF_OTHER_ENGINES, SHORT_OF_OTHER_ENGINES

    groups = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    options = {name: {*parser._option_string_actions} for name, parser in groups[0].choices.items()}
    all_options = {option for of_command in options.values() for option in of_command}
    all_options |= OTHERS_OPTIONS | CLIENTS_OPTIONS | {*SHORT_OF_OTHER_ENGINES}
    all_options |= {f"--{name.replace('_', '-')}" for name in OF_OTHER_ENGINES}
    metrics = (ROOT / "serve_app/metrics.py").read_text()
    found = []
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = span.split()
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[:1] == ["raypp"] and len(words) > 1 and not words[1].startswith("-"):
            found += [span] if words[1] not in options or named - options[words[1]] else []
        elif words and words[0].startswith("--") and named - all_options:
            found.append(span)
        found += [name for name in re.findall(r"RAYPP_[A-Z_]*[A-Z]", span) if name not in {*VARIABLES, *OWN_VARIABLES}]
        series = re.findall(r"(?<!\w)(?:ray_)?(raypp_[a-z_]+?)(?:_total|_bucket)?\b", span)
        found += [name for name in series if f'"{name}"' not in metrics]
    return found


def _check_json(text: str) -> None:
    """Accept one value, or one per line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


def _problems_of_python(block: Block) -> list[str]:
    tree = compile(block.text, block.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [problem for alias in node.names for problem in _missing(alias.name, None, block)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [problem for alias in node.names for problem in _missing(node.module, alias.name, block)]
    return found


def _missing(module: str, name: str | None, block: Block) -> list[str]:
    """Return what an import would lack. Other projects' modules need not be there for a block that is not run."""
    own = module.split(".")[0] in ("raypp", "serve_app")
    if not own:
        lacks = importlib.util.find_spec(module.split(".")[0]) is None
        return [f"there is no module {module}"] if lacks and block.not_run is None else []
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        return [f"import {module}: {error}"]
    if name is None or hasattr(imported, name):
        return []
    if hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{name}"):
        return []
    return [f"{module} has no {name}"]


def commands(text: str) -> list[list[str]]:
    """Return the commands of a shell block as words: without comments, redirections, assignments and keywords.

    Raises:
        ValueError: quotes that do not end.
    """
    text = re.sub(r"^\s*#.*$", "", _HEREDOC.sub(r"\2", text), flags=re.MULTILINE).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    found: list[list[str]] = [[]]
    in_comment = is_file = False
    for token in lexer:
        if token and set(token) <= set(_OPERATORS):
            in_comment = in_comment and "\n" not in token
            is_file = not in_comment and token.rstrip("&")[-1:] in ("<", ">")
            if not is_file and not in_comment:
                found.append([])
            elif is_file and found[-1] and found[-1][-1].isdigit():
                found[-1].pop()  # of 2>file
        elif in_comment or token.startswith("#"):
            in_comment = True
        elif is_file:
            is_file = False
        else:
            found[-1].append(token)
    return [words for raw in found if (words := _without_prefix(raw)) and words[0] != "for"]


def _without_prefix(words: Sequence[str]) -> list[str]:
    start = 0
    while start < len(words) and (words[start] in _KEYWORDS or _ASSIGNMENT.match(words[start])):
        start += 1
    return list(words[start:])


def _problems_of(command: Sequence[str], block: Block) -> list[str]:
    program, arguments = command[0], command[1:]
    if "/" in program and (ROOT / program).is_file():
        return []
    match program.rpartition("/")[2]:
        case "raypp":
            return _problems_of_raypp(arguments)
        case "make":
            targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            named = [word for word in arguments if "=" not in word and not word.startswith("-")]
            return [f"make has no target {name}" for name in named if name not in targets]
        case "python" | "python3":
            return _problems_of_script(arguments, block)
        case "pip":
            return _problems_of_pip(arguments)
        case "serve":
            return _problems_of_serve(arguments)
        case "curl":
            return _problems_of_curl(arguments)
        case known if known in _UNCHECKED:
            return []
    return [f"{program!r} is no program that is known here; is it spelt right?"]


def _problems_of_raypp(arguments: Sequence[str]) -> list[str]:
    from raypp.cli.main import _parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _parser().parse_args(list(arguments))
    except SystemExit as end:
        return [f"raypp {' '.join(arguments)}: {said.getvalue().strip().splitlines()[-1]}"] if end.code else []
    return []


def _problems_of_script(arguments: Sequence[str], block: Block) -> list[str]:
    if arguments[:2] == ["-m", "raypp.batch"]:
        return _problems_of_raypp(["batch", *arguments[2:]])
    if arguments[:1] == ["-m"]:
        return [] if importlib.util.find_spec(arguments[1].split(".")[0]) or block.not_run else [f"no {arguments[1]}"]
    if not arguments or arguments[0].startswith("-"):
        return []
    is_made_here = re.search(rf"> *{re.escape(arguments[0])}\b", block.text)
    return [] if (ROOT / arguments[0]).is_file() or is_made_here else [f"there is no script {arguments[0]}"]


def _problems_of_pip(arguments: Sequence[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [extra for word in arguments for found in re.findall(r"\[(.+?)\]", word) for extra in found.split(",")]
    return [f"raypp has no extra {extra}" for extra in asked if extra not in extras]


def _problems_of_serve(arguments: Sequence[str]) -> list[str]:
    from raypp.errors import ConfigError
    from serve_app.app import split_arguments

    if arguments[:1] == ["deploy"]:
        return [] if (ROOT / arguments[1]).is_file() else [f"there is no {arguments[1]}"]
    if arguments[:1] == ["run"]:
        try:
            split_arguments(dict(word.split("=", 1) for word in arguments[2:]))
        except (ConfigError, ValueError) as error:
            return [f"serve run: {error}"]
    return []


def _problems_of_curl(arguments: Sequence[str]) -> list[str]:
    """Look up routes of a local server in the table of docs/http_api.md, and read bodies."""
    rows = re.findall(r"^\| (`(?:GET|POST) .*?) \|", (ROOT / "docs/http_api.md").read_text(), re.MULTILINE)
    routes = {route for row in rows for route in re.findall(r"(?:`|GET |POST )(/[^\s`{]*)", row)}
    found = []
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("--json", "--data", "-d") and not after.startswith("@"):
            try:
                json.loads(after)
            except json.JSONDecodeError as error:
                found.append(f"the body is no JSON: {error}")
        elif path := re.match(r"^(?:http://)?localhost:\d+(/[^?]*)", word):
            found += [] if path[1] in routes else [f"there is no route {path[1]}"]
    return found
