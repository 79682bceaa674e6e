"""`raypp tune`: measure a model's parts, cut its layers into stages by that, write the configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.errors import ConfigError

_HINT = 'one JSON object a line: {"prompt_tokens": 800, "completion_tokens": 120}, or answers with such a "usage"'


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "tune",
        help="measure a model and balance its stages",
        description="Measure a model's layers, embedding, LM head and sampler on a stage's device, find the layers per "
        "stage for which the slowest stage is fastest, and write a configuration with them.",
    )
    parser.add_argument("--output", metavar="FILE", default="tuned.toml", help="where to write it; - is stdout")
    parser.add_argument("--batch-size", metavar="R", type=int, help="rows of a step; default: the most it may hold")
    parser.add_argument("--context-len", metavar="C", type=int, help="tokens of a row; default: with half the KV cache")
    parser.add_argument(
        "--traffic",
        metavar="FILE",
        help="cut for the prompts of this log: a line per request with the usage of its answer, as JSON; the answers "
        "themselves or the output of `raypp batch` will do",
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="of the sampling; 0 is greedy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    for name in ("batch_size", "context_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is not a size", got=value, expected="1 or more")
    _check_folder(args.output)
    config, context_len = engine_config(args), args.context_len
    if args.traffic is not None:
        traffic = read_traffic(Path(args.traffic))
        config = config.with_settings(prompt_tokens_per_output=round(traffic.prompt_tokens_per_output, 3))
        context_len = context_len or round(traffic.context_len)
    tuning = args.entry_points.tune(
        config,
        num_rows=args.batch_size,
        context_len=context_len,
        temperature=args.temperature,
    )
    described = tuning.describe()
    # With the configuration on stdout, the report must go elsewhere.
    report_to = sys.stderr if args.output == "-" else sys.stdout
    print(json.dumps(described, indent=2) if args.json else "\n".join(_lines(described)), file=report_to)
    if args.output == "-":
        print(tuning.to_toml(), end="")
    else:
        Path(args.output).write_text(tuning.to_toml(), encoding="utf-8")
        if not args.json:
            print(f"written to {args.output}: LLM({args.output!r}), or --config {args.output}")
    return 0


def _check_folder(output: str) -> None:
    if output != "-" and not Path(output).absolute().parent.is_dir():
        raise ConfigError("the configuration cannot be written where it is wanted", got=output, expected="a folder")


def _lines(tuning: dict[str, Any]) -> Iterator[str]:
    measured = tuning["measured"]
    yield f"{tuning['model']}, {tuning['num_stages']} stages; {measured['step']}"
    yield ""
    for layer_ms, number in Counter(measured["layers_ms"]).items():
        yield f"  {'layer':20} {layer_ms:9.3f} ms, {number} of them"
    if measured["sums_ms"]:
        yield f"  {'  of these, sums':20} {measured['sums_ms']:9.3f} ms, estimated, over the members of a stage"
    for name, label in (
        ("embedding_ms", "embedding"),
        ("lm_head_ms", "LM head"),
        ("sampler_ms", "sampler"),
        ("every_stage_ms", "every stage besides"),
    ):
        yield f"  {label:20} {measured[name]:9.3f} ms"
    yield ""
    yield f"  {'layers per stage':>24}  {'ms per stage':>32}  slowest"
    for split in tuning["splits"]:
        layers = " ".join(map(str, split["layers"]))
        times = " ".join(f"{ms:.2f}" for ms in split["stage_ms"])
        yield f"  {split['split']:8}{layers:>16}  {times:>32}  {split['slowest_ms']:.2f}"
    yield ""
    tuned, _, default = tuning["splits"]
    if tuned["layers"] == default["layers"]:
        yield "expected gain: none; the default split is the fastest one"
    else:
        yield f"expected gain over the default split: {tuning['gain_over_default']:+.1%} steps per second"


@dataclass(frozen=True, kw_only=True)
class TrafficMeans:
    """Means over some requests."""

    num_requests: int
    prompt_tokens: float
    """That are computed: those found in a prefix cache are not."""
    output_tokens: float
    context_len: float
    """Tokens before each token of an answer, over all of these."""

    @property
    def prompt_tokens_per_output(self) -> float:
        """Prompt tokens that are computed for every token of an answer."""
        return self.prompt_tokens / self.output_tokens


def read_traffic(path: Path) -> TrafficMeans:
    """Return the means of a log: a line per request, its usage as OpenAI's answers have it, alone or in an answer.

    Lines of the output of a batch file are taken too; those of requests that failed are passed over.

    Raises:
        ConfigError: the file cannot be read, or says nothing of tokens.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the log of traffic cannot be read", got=f"{path}: {error}", expected=_HINT) from error
    usages = list(_usages(path, lines))
    num_output = sum(output for _, _, output in usages)
    if not num_output:
        raise ConfigError("the log of traffic has no token of an answer", got=str(path), expected=_HINT)
    num_attended = sum(output * (prompt + output / 2) for prompt, _, output in usages)
    return TrafficMeans(
        num_requests=len(usages),
        prompt_tokens=sum(prompt - cached for prompt, cached, _ in usages) / len(usages),
        output_tokens=num_output / len(usages),
        context_len=num_attended / num_output,
    )


def _usages(path: Path, lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield prompt tokens, those of them that were cached, and output tokens."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            response = entry.get("response", entry) or {}  # of a batch file; None where the request failed
            body = response.get("body", response) or {}
            usage: Mapping[str, Any] = body.get("usage", body)
            if not usage or "error" in usage:
                continue
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts = int(usage["prompt_tokens"]), int(cached), int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "a line of the log of traffic says nothing of tokens",
                got=f"line {number} of {path}: {line[:80]}",
                expected=_HINT,
            ) from error
        if min(counts) < 0 or counts[1] > counts[0]:
            raise ConfigError(
                "a line of the log of traffic has impossible numbers of tokens",
                got=f"line {number} of {path}: {line[:80]}",
                expected="numbers of at least 0, and no more cached tokens than those of the prompt",
            )
        yield counts
