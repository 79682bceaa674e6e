"""Options that say how tokens are chosen, each named after its field of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import Any

_FIELDS = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("logprobs", "prompt_logprobs", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "skip_special_tokens",
)


def add_sampling_options(parser: argparse.ArgumentParser, description: str) -> None:
    """Add the options.

    Args:
        parser: The command's.
        description: What holds where an option is left out.
    """
    group = parser.add_argument_group("sampling", description)
    group.add_argument("--n", metavar="N", type=int, help="continuations per prompt")
    group.add_argument("--max-tokens", metavar="K", type=int, help="the most tokens to generate")
    group.add_argument("--min-tokens", metavar="K", type=int, help="tokens before the text may end")
    group.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    group.add_argument("--top-p", metavar="P", type=float)
    group.add_argument("--top-k", metavar="K", type=int)
    group.add_argument("--min-p", metavar="P", type=float)
    group.add_argument("--seed", metavar="S", type=int, help="same seed, same text")
    group.add_argument("--presence-penalty", metavar="X", type=float, help="against tokens that were generated")
    group.add_argument("--frequency-penalty", metavar="X", type=float, help="the same for every time that they were")
    group.add_argument("--repetition-penalty", metavar="X", type=float, help="divides logits of tokens seen; 1 is none")
    group.add_argument(
        "--logit-bias", metavar="ID=X", type=_bias, action="append", help="add X to a token's logit; may be repeated"
    )
    group.add_argument(
        "--allow-token",
        metavar="ID",
        type=int,
        action="append",
        dest="allowed_token_ids",
        help="draw only tokens named like this; may be repeated",
    )
    group.add_argument(
        "--bad-word", metavar="TEXT", action="append", dest="bad_words", help="never complete it; may be repeated"
    )
    group.add_argument(
        "--logprobs",
        metavar="K",
        type=int,
        help="log-probabilities of tokens, and K more; generate: with --json",
    )
    group.add_argument("--prompt-logprobs", metavar="K", type=int, help="the same for the prompt")
    group.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    group.add_argument(
        "--stop-token",
        metavar="ID",
        type=int,
        action="append",
        dest="stop_token_ids",
        help="end with this token; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the text")
    group.add_argument(
        "--include-stop",
        action="store_true",
        default=None,
        dest="include_stop_str_in_output",
        help="keep the stop text in the output",
    )
    group.add_argument(
        "--keep-special-tokens",
        action="store_false",
        default=None,
        dest="skip_special_tokens",
        help="write special tokens, too",
    )


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, by their names in `SamplingParams`."""
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)
