"""`raypp serve`: an OpenAI-compatible server on Ray Serve."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from raypp.cli.engine_options import add_engine_options, add_setting_options, engine_config, given_settings
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings, http_settings
from raypp.config.options import ADDRESS_SETTINGS, HTTP_SETTINGS
from raypp.plan.fit import CUT, advised_config, names_cut


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "serve",
        help="answer HTTP requests",
        description="Serve OpenAI's API over HTTP, with a page at / that shows the pipeline. Runs until Ctrl-C. "
        "SIGHUP reads the file of --config again.",
    )
    add_setting_options(parser.add_argument_group("address", HttpAddress.__doc__), ADDRESS_SETTINGS)
    add_engine_options(parser)
    add_setting_options(parser.add_argument_group("HTTP settings", HttpSettings.__doc__), HTTP_SETTINGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    settings = http_settings(HttpSettings, given_settings(args, HTTP_SETTINGS))
    address = http_settings(HttpAddress, given_settings(args, ADDRESS_SETTINGS))
    has_one_engine = settings.num_replicas == 1 and settings.max_replicas is None

    config = engine_config(args)
    advised = _advised(config) if has_one_engine else config
    taken = {} if advised is config else {name: getattr(advised.parallel, name) for name in CUT}

    def read_again() -> EngineConfig:
        """Return the file's configuration, with what was advised at first: GPUs are in use by now."""
        config = engine_config(args)
        return config if names_cut(config) else config.with_settings(**taken)

    args.entry_points.serve(advised, settings, address=address, on_ready=_say_ready, read_again=read_again)
    return 0


def _advised(config: EngineConfig) -> EngineConfig:
    """Return the configuration, with the stages and members that `raypp info` advises if it says of neither."""
    advised = advised_config(config)
    if advised is not config:
        parallel = advised.parallel
        _say(
            f"num_stages={parallel.num_stages}, tensor_parallel_size={parallel.tensor_parallel_size}, as `raypp info` "
            "advises for this machine's GPUs; --num-stages says otherwise"
        )
    return advised


def _say_ready(url: str) -> None:
    _say(f"serving on {url} (Ctrl-C stops)")


def _say(text: str) -> None:
    print(f"raypp: {text}", file=sys.stderr, flush=True)
