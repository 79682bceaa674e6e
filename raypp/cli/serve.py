"""`raypp serve`: an OpenAI-compatible server on Ray Serve."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config

_SETTINGS = (
    "served_model_name",
    "num_replicas",
    "api_key_file",
    "cors_origins",
    "max_body_bytes",
    "max_queued_requests",
)
_PLACE = ("host", "port", "app_name", "route_prefix")


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "serve",
        help="answer HTTP requests",
        description="Serve OpenAI's API over HTTP, with a page at / that shows the pipeline. Runs until Ctrl-C.",
    )
    add_engine_options(parser)
    door = parser.add_argument_group("HTTP")
    door.add_argument("--host", default="127.0.0.1", metavar="H", help="where to listen; 0.0.0.0 is everywhere")
    door.add_argument("--port", default=8000, metavar="P", type=int)
    door.add_argument("--app-name", default="raypp", metavar="NAME", help="on the cluster")
    door.add_argument(
        "--route-prefix",
        default="/",
        metavar="/PATH",
        help="what paths begin with: applications of a cluster share a port",
    )
    door.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="what requests call the model; may be repeated; default: what --model says",
    )
    door.add_argument("--num-replicas", metavar="N", type=int, help="engines behind the same address")
    door.add_argument("--api-key-file", metavar="FILE", help="keys, one per line, of which requests must bring one")
    door.add_argument(
        "--cors-origin",
        dest="cors_origins",
        metavar="ORIGIN",
        action="append",
        help="a web page of another origin that may call from a browser; may be repeated",
    )
    door.add_argument("--max-body-bytes", metavar="N", type=int, help="larger requests are refused")
    door.add_argument("--max-queued-requests", metavar="N", type=int, help="more waiting ones are refused with 429")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    place = {name: getattr(args, name) for name in _PLACE}
    args.doors.serve(engine_config(args), settings, **place, on_ready=_say_ready)
    return 0


def _say_ready(url: str) -> None:
    print(f"raypp: serving on {url} (Ctrl-C stops)", file=sys.stderr, flush=True)
