"""One hostile client beside eight honest ones, for a minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hostile_load import measure

pytestmark = pytest.mark.part("clients")

MOST_REFUSED, MOST_ADMITTED, MOST_GROWTH = 1.5, 1.2, 0.1


def test_a_hostile_client_costs_honest_ones_little(note: Callable[[str], None]) -> None:
    report = measure(60.0)
    refused, admitted = report.ratio("refused", "alone"), report.ratio("admitted", "polite")
    growth = max(report.rss_growth.values())
    note(
        f"hostile client, 60 s: time per token {refused:.2f}x with refused requests (at most {MOST_REFUSED}), "
        f"{admitted:.2f}x of a polite client's with admitted ones (at most {MOST_ADMITTED}); memory {growth:+.1%} "
        f"(at most {MOST_GROWTH:.0%}); {report.num_streams} honest streams ended right, failures: "
        f"{dict(report.failures)}; ms per token {report.ms_per_token}; memory {report.rss_growth}"
    )
    assert not report.failures
    assert refused <= MOST_REFUSED
    assert admitted <= MOST_ADMITTED
    assert growth <= MOST_GROWTH
