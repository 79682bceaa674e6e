"""The report that is believed is the best one that comes within a moment."""

from __future__ import annotations

import pytest

from raypp.driver.stage_health import BLAME_S, FailureReports, Witness
from raypp.errors import StageDiedError


def _error(stage_index: int) -> StageDiedError:
    return StageDiedError(f"stage {stage_index}", stage_index=stage_index)


@pytest.fixture
def now_s():
    return [50.0]


@pytest.fixture
def reports(now_s):
    return FailureReports(lambda: now_s[0])


def test_a_death_is_believed_at_once(reports):
    assert reports.verdict() is None
    reports.add(_error(2), Witness.DEATH)
    assert reports.verdict().stage_index == 2


def test_what_a_neighbour_noticed_waits_for_the_death(reports, now_s):
    reports.add(_error(0), Witness.NEIGHBOUR)
    assert reports.verdict() is None
    now_s[0] += BLAME_S / 2
    reports.add(_error(1), Witness.DEATH)
    assert reports.verdict().stage_index == 1


def test_a_stage_that_failed_itself_counts_more_than_its_neighbours(reports, now_s):
    reports.add(_error(3), Witness.NEIGHBOUR)
    reports.add(_error(1), Witness.OWN_FAILURE)
    reports.add(_error(0), Witness.OWN_FAILURE)
    assert reports.best.stage_index == 1
    assert reports.verdict() is None
    now_s[0] += BLAME_S
    assert reports.verdict().stage_index == 1, "of equals the first"


def test_without_a_better_one_the_neighbours_word_counts(reports, now_s):
    reports.add(_error(1), Witness.NEIGHBOUR)
    now_s[0] += BLAME_S
    reports.add(_error(2), Witness.NEIGHBOUR)
    assert reports.verdict().stage_index == 1
