"""The `raypp` command: picks the command, turns errors into one message and an exit code.

Exit codes: 0 done; 1 the answer is no (info: it does not fit; doctor: there is a problem); 2 a mistake that the
message explains; 130 Ctrl-C. A traceback is a bug of raypp.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, takewhile
from typing import Any

import shtab

from raypp import __version__
from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.cli import batch, compile_model, doctor, generate, info, serve, tune
from raypp.config.engine_config import EngineConfig
from raypp.config.env import log_to_stderr, warn_of_unknown_variables
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.config.names import OF_THE_SERVER
from raypp.config.options import ADDRESS_SETTINGS, ENGINE_SETTINGS, HTTP_SETTINGS
from raypp.config.other_engines import OF_OTHER_ENGINES, SHORT_OF_OTHER_ENGINES
from raypp.errors import ConfigError, RayppError, install, nearest_name
from raypp.types import SamplingParams

_EXIT_USER_ERROR = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
_OF_REQUESTS = {field.name for field in fields(SamplingParams)}
_OF_SERVE = {setting.option for setting in (*ADDRESS_SETTINGS, *HTTP_SETTINGS)}
_OPTIONS = {
    setting.key: setting.option for setting in chain(ADDRESS_SETTINGS, HTTP_SETTINGS, *ENGINE_SETTINGS.values())
}


def _describe_engine(config: EngineConfig, machines: Any = None) -> dict[str, Any]:
    from raypp.api.launch import load_tokenizer
    from raypp.models.registry import resolve_config_path
    from raypp.openai_api.syntaxes import check_parsers
    from raypp.plan.fit import describe_fit

    check_parsers(config.model.tool_call_parser, config.model.reasoning_parser)
    if machines is None:  # else folders are others, too
        config.observability.check_trace_folder()
    description = describe_fit(config, machines)
    path = resolve_config_path(config.model.model, config.model.revision)
    if machines is None and any(path.glob("*.safetensors")):  # else it may be a model's config.json alone
        load_tokenizer(config)
    return description


def _tune_engine(config: EngineConfig, **options: Any) -> Any:
    from raypp.actors.engine_actors import tune_engine  # imports ray

    return tune_engine(config, **options)


def _serve(
    config: EngineConfig,
    settings: HttpSettings,
    *,
    address: HttpAddress,
    on_ready: Callable[[str], None],
    read_again: Callable[[], EngineConfig],
) -> None:
    try:
        from serve_app.run import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the server needs packages that are not installed", got=error, hint=install("serve")
        ) from error
    run_server(config, settings, address=address, on_ready=on_ready, read_again=read_again)


@dataclass(frozen=True)
class EntryPoints:
    """What the commands reach the engine through."""

    open_llm: Callable[[EngineConfig], Any] = LLM
    open_async_llm: Callable[[EngineConfig], Awaitable[AsyncLLM]] = AsyncLLM.create
    describe: Callable[..., dict[str, Any]] = _describe_engine
    tune: Callable[..., Any] = _tune_engine
    serve: Callable[..., None] = _serve


def main(argv: Sequence[str] | None = None, *, entry_points: EntryPoints | None = None) -> int:
    """Run a command and return the exit code.

    Args:
        argv: The arguments; None takes the process's.
        entry_points: What the commands reach the engine through; None for the real one.
    """
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help()
            return 0
        args = parser.parse_args(argv)
        args.entry_points = entry_points or EntryPoints()
        log_to_stderr()
        warn_of_unknown_variables()
        code: int = args.run(args)
        sys.stdout.flush()
    except RayppError as error:
        print(_explain(error), file=sys.stderr)
        return _EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("raypp: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # e.g. `raypp generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has nowhere to go
        return _EXIT_BROKEN_PIPE
    return code


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviations: what is short for one option today would be ambiguous with the next one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command's arguments; of an option that it does not have, say the nearest one."""
        args = sys.argv[1:] if args is None else args
        is_command = self._subparsers is None
        self._check_options(args if is_command else takewhile(lambda arg: arg.startswith("-"), args))
        return super().parse_known_args(args, namespace)

    def _check_options(self, args: Iterable[str]) -> None:
        for arg in takewhile(lambda arg: arg != "--", args):
            name = arg.partition("=")[0]
            is_option = name.startswith("--") or (name.startswith("-") and name[1:2].isalpha())
            if is_option and " " not in arg and name not in self._option_string_actions:
                if name == "--model":
                    self.error("unknown option --model: the model stands behind the command, as in raypp serve MODEL")
                self.error(f"unknown option {name}; {self._advice(name)}")

    def _advice(self, name: str) -> str:
        nearest = nearest_name(name, self._option_string_actions)
        if self._subparsers is not None and nearest is None:
            return "options stand behind the command, as in raypp serve MODEL --num-stages 2"
        setting = SHORT_OF_OTHER_ENGINES.get(name, name.lstrip("-").replace("-", "_"))
        if setting in OF_THE_SERVER:
            return f"it is an option of raypp serve, not of {self.prog}"
        if setting in _OPTIONS:
            return f"{setting} is {_OPTIONS[setting]}"
        own = OF_OTHER_ENGINES.get(setting)
        option = None if own is None or own.setting is None else _OPTIONS[own.setting]
        if own is not None and (option is None or option in self._option_string_actions):
            return own.text(option)
        if own is not None and option in _OF_SERVE:
            return f"with raypp serve, {own.text(option)}"
        if (of_requests := f"--{setting.replace('_', '-')}") in self._option_string_actions:
            return f"did you mean {of_requests}?"
        if setting in _OF_REQUESTS:
            return f"each request has its own: the field {setting} of its body"
        return f"did you mean {nearest}?" if nearest else f"{self.prog} --help lists those that there are"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="raypp", description="Pipeline-parallel inference on Ray.")
    parser.add_argument("--version", action="version", version=f"raypp {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help="print the completion script of a shell, and end")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generate.add_parser(commands)
    batch.add_parser(commands)
    info.add_parser(commands)
    tune.add_parser(commands)
    compile_model.add_parser(commands)
    serve.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def _explain(error: RayppError) -> str:
    lines = [f"raypp: {error.message}"]
    for name in ("got", "expected", "hint"):
        value = getattr(error, name)
        if value is not None:
            lines.append(f"  {name}: {value}")
    return "\n".join(lines)
