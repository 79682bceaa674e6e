"""What a benchmark ends with."""

import json
from pathlib import Path

from report import GrowingReport, make_report

ROOT = Path(__file__).parents[3]


def test_a_report_is_in_its_file_after_every_point(tmp_path, capsys):
    path = tmp_path / "report.json"
    report = GrowingReport("name", {"requests": [1]}, path)
    report.put("a", {"ms": 1})
    assert json.loads(path.read_text())["figures"] == {"a": {"ms": 1}}
    report.put("b", {"ms": 2})
    assert set(json.loads(path.read_text())["figures"]) == {"a", "b"}
    report.print()
    assert not capsys.readouterr().out


def test_without_a_file_it_is_the_last_line(capsys):
    report = GrowingReport("name", {}, None)
    report.note_config({"model": "first"})
    report.note_config({"model": "second"})
    report.put("a", 1)
    report.print()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"benchmark", "commit", "versions", "hardware", "settings", "config", "figures"} == set(said)
    assert said["config"] == {"model": "first"}
    assert said["commit"]


def test_settings_are_json_and_say_nothing_of_the_machines_folders(tmp_path):
    settings = {"out": tmp_path / "a.json", "rates": [2.0, float("inf")], "model": str(ROOT / "benchmarks" / "models")}
    report = make_report("name", settings, {}, {"observability": {"trace": str(tmp_path / "trace.json")}})
    assert report["settings"] == {"out": "a.json", "rates": [2.0, "inf"], "model": "benchmarks/models"}
    assert report["config"] == {"observability": {"trace": "trace.json"}}
