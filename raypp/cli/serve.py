"""`raypp serve`: an OpenAI-compatible server on Ray Serve."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from raypp.cli.engine_options import add_engine_options, add_setting_options, engine_config, given_settings
from raypp.config.http_settings import HttpAddress, HttpSettings, http_settings
from raypp.config.options import ADDRESS_SETTINGS, HTTP_SETTINGS


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
    args.entry_points.serve(
        engine_config(args), settings, address=address, on_ready=_say_ready, read_again=lambda: engine_config(args)
    )
    return 0


def _say_ready(url: str) -> None:
    print(f"raypp: serving on {url} (Ctrl-C stops)", file=sys.stderr, flush=True)
