"""CHANGELOG.md has the form of Keep a Changelog, in lines that fit."""

from __future__ import annotations

import re

from repository import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_versions_are_headed_with_their_dates() -> None:
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


def test_a_version_has_each_kind_of_change_once() -> None:
    for version in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert set(kinds) <= set(KINDS)
        assert len(set(kinds)) == len(kinds)


def test_entries_are_short() -> None:
    assert not [line for line in TEXT.splitlines() if len(line) >= 120]
    entries = re.findall(r"^- .*(?:\n  .*)*", TEXT, re.MULTILINE)
    assert not [entry for entry in entries if entry.count("\n") > 2], "details belong into docs/"
