"""Fill the tables of docs/performance.md, benchmarks/REPORT.md and README.md from benchmarks/results.

python tools/make_performance_tables.py            writes them
python tools/make_performance_tables.py --check    exits 1 if one is not current

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; a page without such lines is left alone. After a
new run change the file names below, or the figures in the file; a further engine in the peers' file gets its column.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated_pages import write_or_check

ROOT = Path(__file__).parents[1]
PAGES = ("docs/performance.md", "benchmarks/REPORT.md", "README.md")
PEERS = ("peers_qwen3-8b_h200x2_2026-11-23.json", "peers_qwen3-8b_h100x2_2026-11-25.json")
LONG_PROMPTS = "long_prompt_h200x2_2026-11-22.json"

CLEARLY = 1.05
"""A figure is bold if every other one of its row is at least so many times as large: runs differ by less."""

_REGION = re.compile(r"<!-- table: ([^\n]*?) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def fill(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its tables as they are now.

    Args:
        page: Its text.
        tables: What makes a table, by name.

    Raises:
        ValueError: A marked region names an unknown table, or has no end.
    """

    def region(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ValueError(f"unknown table {name!r}: name one of {', '.join(sorted(tables))}")
        if "<!-- table:" in match[2]:
            raise ValueError(f"table {name!r} has no end: add a line '<!-- end -->' after it")
        return f"<!-- table: {name} -->\n\n{tables[name]()}\n\n<!-- end -->\n"

    filled, num_filled = _REGION.subn(region, page)
    if num_filled != page.count("<!-- table:"):
        raise ValueError("a table has no end: add a line '<!-- end -->' after it")
    return filled


def _load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return report


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "---|" * len(line) for line in lines)


def _at(figures: Any, path: Sequence[str]) -> list[float]:
    """Return the figure or figures at a path of keys; none if it was not measured."""
    for key in path:
        figures = figures.get(key) if isinstance(figures, dict) else None
    if figures is None:
        return []
    return figures if isinstance(figures, list) else [figures]


def _text(values: Sequence[float]) -> str:
    return " to ".join(f"{value:,}" for value in sorted(values)) or "-"


def _row(title: str, path: Sequence[str], report: Mapping[str, Any], in_brackets: Sequence[str] = ()) -> list[str]:
    """Return a row with one cell per engine; the clearly least is bold."""
    values = {engine: _at(report["figures"].get(engine), path) for engine in report["engines"]}
    cells = []
    for engine, own in values.items():
        others = [value for other, theirs in values.items() if other != engine for value in theirs]
        is_best = bool(own and others) and min(others) >= CLEARLY * max(own)
        cell = f"**{_text(own)}**" if is_best else _text(own)
        if beside := _at(report["figures"].get(engine), in_brackets) if in_brackets else []:
            cell += f" ({_text(beside)})"
        cells.append(cell)
    return [title, *cells]


def _union(report: Mapping[str, Any], key: str) -> list[str]:
    """Return the numbers of requests, or the rates, at which any engine was measured."""
    return sorted({name for figures in report["figures"].values() for name in figures.get(key, {})}, key=int)


def decode() -> str:
    """Return the time per token beside other engines, on every machine."""
    reports = [_load(name) for name in PEERS]
    rows = [
        _row(f"{report['machine'].split(' joined')[0]}, {number} request{'' if number == '1' else 's'}", path, report)
        for report in reports
        for number in _union(report, "decode")
        for path in [("decode", number)]
    ]
    return _table([f"{reports[0]['model']}, decode, ms per token", *reports[0]["engines"].values()], rows)


def peers(name: str) -> str:
    """Return all figures of one machine beside other engines; `name` is the file's."""
    report = _load(name)
    rows = [
        _row(f"{title}, {number} request{'' if number == '1' else 's'}, ms per token", (key, number), report)
        for key, title in (("decode", "decode"), ("decode_sampled", "decode as Qwen3 samples"))
        for number in _union(report, key)
    ]
    rows.append(_row("400 mixed requests at once, s", ("offline",), report))
    for rate in _union(report, "online"):
        at, first = f"mixed traffic, {rate} requests/s", ("online", rate, "first_token")
        rows.append(_row(f"{at}: first token, mean (p99), ms", first, report, ("online", rate, "first_token_p99")))
        rows.append(_row(f"{at}: per token, mean, ms", ("online", rate, "per_token"), report))
        rows.append(_row(f"{at}: whole request, mean, ms", ("online", rate, "whole_request"), report))
    rows.append(_row("first start on the machine, s", ("ready",), report))
    rows.append(_row("with all kernels compiled, s", ("ready_with_compiled_kernels",), report))
    measured = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return _table([f"{report['model']}, {report['machine']}", *report["engines"].values()], measured)


def long_prompts() -> str:
    """Return how soon the first token of one prompt comes on one GPU and on two."""
    report = _load(LONG_PROMPTS)
    rows = []
    for length in report["settings"]["lengths"]:
        key = f"{length} tokens"
        two = report["figures"]["2 stages, default chunks"][key]["ttft_s"]
        ratio = report["figures"][f"ratio, {key}, 2 stages, default chunks"]
        one = report["figures"][ratio["one_stage"]][key]["ttft_s"]
        rows.append([f"{length:,} tokens", f"{1000 * one:,.0f} ms", f"{1000 * two:,.0f} ms", f"{two / one:.2f}"])
    return _table(["one prompt of", "1 GPU", "2 stages on 2 GPUs", "share"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "decode": decode,
    "peers-h200": lambda: peers(PEERS[0]),
    "peers-h100": lambda: peers(PEERS[1]),
    "long-prompts": long_prompts,
}


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {ROOT / name: lambda text: fill(text, TABLES) for name in PAGES}))
