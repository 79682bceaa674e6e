"""The tables of docs/performance.md and README.md are made from the files of benchmarks/results."""

from __future__ import annotations

from typing import Any

import make_performance_tables as tables
import pytest

REPORT: dict[str, Any] = {
    "model": "M",
    "machine": "two GPUs joined by NVLink",
    "engines": {"raypp": "raypp, 2 stages", "other": "Other 1.0, TP 2", "third": "Third, PP 2"},
    "figures": {
        "raypp": {"decode": {"1": 2.0, "16": 4.0, "64": 5.0}, "offline": [17.1, 16.4]},
        "other": {"decode": {"1": 1.0, "16": [5.0, 6.0]}, "offline": [16.3, 16.1]},
        "third": {"online": {"4": {"first_token": 20, "first_token_p99": 1_500, "whole_request": 900}}},
    },
}


@pytest.fixture(autouse=True)
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_load", lambda name: REPORT)


def test_only_what_lies_between_the_marks_is_written() -> None:
    page = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n"
    filled = tables.fill(page, {"x": lambda: "| new |"})
    assert filled == "a\n<!-- table: x -->\n\n| new |\n\n<!-- end -->\nb\n"
    assert tables.fill(filled, {"x": lambda: "| new |"}) == filled
    assert tables.fill("no marks\n", {}) == "no marks\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: peers -->\n<!-- end -->\n", "unknown table 'peers': name one of x"),
        ("<!-- table: x -->\n", "a table has no end: add a line '<!-- end -->'"),
        ("<!-- table: x -->\n<!-- table: x -->\n<!-- end -->\n", "table 'x' has no end"),
    ],
)
def test_wrong_marks_are_refused(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables.fill(page, {"x": str})


def test_every_engine_has_a_column_and_the_clearly_least_is_bold() -> None:
    assert tables.peers("any").splitlines() == [
        "| M, two GPUs joined by NVLink | raypp, 2 stages | Other 1.0, TP 2 | Third, PP 2 |",
        "|---|---|---|---|",
        "| decode, 1 request, ms per token | 2.0 | **1.0** | - |",
        "| decode, 16 requests, ms per token | **4.0** | 5.0 to 6.0 | - |",
        "| decode, 64 requests, ms per token | 5.0 | - | - |",
        "| 400 mixed requests at once, s | 16.4 to 17.1 | 16.1 to 16.3 | - |",
        "| mixed traffic, 4 requests/s: first token, mean (p99), ms | - | - | 20 (1,500) |",
        "| mixed traffic, 4 requests/s: whole request, mean, ms | - | - | 900 |",
    ]
    assert tables.decode().splitlines()[:3] == [
        "| M, decode, ms per token | raypp, 2 stages | Other 1.0, TP 2 | Third, PP 2 |",
        "|---|---|---|---|",
        "| two GPUs, 1 request | 2.0 | **1.0** | - |",
    ]
