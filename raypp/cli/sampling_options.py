"""The options that say how to sample: the same for every command that generates."""

from __future__ import annotations

import argparse
from typing import Any

_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")


def add_sampling_options(parser: argparse.ArgumentParser, description: str) -> None:
    """Add the options that `given_sampling` reads.

    Args:
        parser: The command's.
        description: What holds where an option is left out.
    """
    sampling = parser.add_argument_group("sampling", description)
    sampling.add_argument("--max-tokens", metavar="K", type=int, help="the most tokens to generate")
    sampling.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", metavar="P", type=float)
    sampling.add_argument("--top-k", metavar="K", type=int)
    sampling.add_argument("--min-p", metavar="P", type=float)
    sampling.add_argument("--seed", metavar="S", type=int, help="same seed, same text")
    sampling.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the text")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, by their names in `SamplingParams`."""
    return {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
