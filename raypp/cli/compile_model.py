"""`raypp compile`: start a model once with random weights, so that later starts find all of it compiled and tried."""

from __future__ import annotations

import argparse
import time
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.types import SamplingParams

_PROMPT_TOKENS = (3, 40)
_NUM_TOKENS = 4
_FOLDERS = "~/.triton, ~/.cache/flashinfer and ~/.cache/raypp"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "compile",
        help="compile a model's kernels ahead of time",
        description="Start a model once with random weights, with the options that it will have, and generate a few "
        "tokens. It needs the model's config.json and the GPUs, not its weights. What is compiled and tried is kept in "
        f"{_FOLDERS}: later starts on this machine, or of an image with these folders, take seconds.",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start, generate, print what it took."""
    config = engine_config(args).with_settings(load_format="dummy", skip_tokenizer_init=True)
    began = time.monotonic()
    with args.entry_points.open_llm(config) as llm:
        ready_s = time.monotonic() - began
        prompts = [list(range(1, 1 + count)) for count in _PROMPT_TOKENS]
        llm.generate(prompts, SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True))
        first_s = time.monotonic() - began - ready_s
    print(f"ready after {ready_s:.0f} s, first tokens {first_s:.1f} s later; kept in {_FOLDERS}")
    return 0
