"""Options that say how tokens are chosen, each named after its field of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import Any

from raypp.sampling_params import PARAMETERS
from raypp.types import SamplingParams


def add_sampling_options(parser: argparse.ArgumentParser, description: str) -> None:
    """Add the options.

    Args:
        parser: The command's.
        description: What holds where an option is left out.
    """
    group = parser.add_argument_group("sampling", description)
    default = SamplingParams()
    for name, parameter in PARAMETERS.items():
        if parameter.option is None:
            continue
        match parameter.kind:
            case "integer":
                how: dict[str, Any] = {"metavar": "K", "type": int}
            case "number":
                how = {"metavar": "X", "type": float}
            case "flag":
                how = {"action": "store_const", "const": not getattr(default, name)}
            case "biases":
                how = {"metavar": "ID=X", "type": _bias, "action": "append"}
            case "token ids":
                how = {"metavar": "ID", "type": int, "action": "append"}
            case _:
                how = {"metavar": "TEXT", "action": "append"}
        option = parameter.option_name or f"--{name.replace('_', '-')}"
        group.add_argument(option, dest=name, help=parameter.option or None, **how)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, by their names in `SamplingParams`."""
    given = {name: value for name in PARAMETERS if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)
