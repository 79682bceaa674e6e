"""Tables of what `mixed_traffic.py` has found, for the report: what requests waited for, and where every second went.

python benchmarks/traffic_page.py mixed.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_WAITS = {"ttft_ms": "first token", "tpot_ms": "per token", "itl_ms": "between tokens", "e2e_ms": "whole request"}


def request_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table: a row per run, mean and 99th percentile of what its requests waited for."""
    columns = ("traffic", "done, s", "tokens in / out a second", *(f"{name}, ms" for name in _WAITS.values()))
    yield from _header(columns)
    for name, of_name in runs.items():
        for run in of_name:
            seconds = run["seconds"]
            rates = f"{run['prompt_tokens'] / seconds:,.0f} / {run['output_tokens'] / seconds:,.0f}"
            waits = [f"{_ms(run[w]['mean'])} ({_ms(run[w]['p99'])})" if w in run else "-" for w in _WAITS]
            yield _row(_plain(name), f"{seconds:.2f}", rates, *waits)


def seconds_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table: a row per stage and kind of step, and for what the stage waited."""
    of_steps = ("number", "s", "ms each (p99)", "decode rows", "prompt tokens", "of the limit", "off by")
    yield from _header(("traffic", "stage", "steps", *of_steps))
    for name, of_name in runs.items():
        for run in of_name:
            yield from _stage_rows(_plain(name), run["steps"])


def _stage_rows(name: str, steps: Mapping[str, Any]) -> Iterator[str]:
    for index, stage in enumerate(steps.get("stages", ())):
        for kind, of in stage["steps"].items():
            yield _row(
                name,
                index,
                kind,
                f"{of['num']:,}",
                f"{of['seconds']:.2f}",
                f"{_ms(of['ms_mean'])} ({_ms(of['ms_p99'])})",
                f"{of['decode_rows']:.1f}",
                f"{of['prompt_tokens']:,.0f}",
                f"{of['share_of_limit']:.0%}",
                _off_by(of),
            )
        yield _row(name, index, "waits beside another", "", f"{stage['waiting_beside_another_s']:.2f}", *[""] * 5)
        yield _row(name, index, "waits with all", "", f"{stage['waiting_with_all_s']:.2f}", *[""] * 5)
        bubble = "" if steps["bubble_fraction"] is None else f"bubble {steps['bubble_fraction']:.2f}"
        found = (f"{steps['num_steps']:,}", f"{steps['seconds']:.2f}", bubble, "", "", f"{stage['share_of_limit']:.0%}")
        yield _row(name, index, "**all**", *found, _off_by(stage))


def _header(columns: Sequence[str]) -> Iterator[str]:
    yield _row(*columns)
    yield "|---" * len(columns) + "|"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _off_by(figures: Mapping[str, Any]) -> str:
    error = figures["prediction_error"]
    return "-" if error is None else f"{error['median']:.0%}"


def _plain(name: str) -> str:
    """Return a name for a column: of one with changes its beginning, and a star."""
    first, *changes = name.split(",")
    return f"{first} \\*" if changes and "=" not in first else name


def main() -> None:
    """Print the tables of every engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON file that `mixed_traffic.py` wrote")
    args = parser.parse_args()
    for settings, found in json.loads(args.report.read_text())["figures"].items():
        print(f"{settings}\n")
        if "traffic" not in found:
            print(found.get("error", "no engine: of a server, there are the times of requests alone"))
            continue
        for table in (request_table(found["traffic"]), seconds_table(found["traffic"])):
            print(*table, "", sep="\n")


if __name__ == "__main__":
    main()
