"""Two stages against one, each at its best size of chunk."""

from long_prompt import print_ratios
from report import GrowingReport


def test_each_side_is_taken_at_its_best(capsys):
    report = GrowingReport("long_prompt", {}, None)
    measured = {1: {4096: {8192: 0.9}, 8192: {8192: 1.0}}, 2: {0: {8192: 0.63}, 1024: {8192: 0.54}}}
    print_ratios(8192, measured, report)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1].rsplit(": ", 2)[-2:] for line in said] == [
        ["0.700x, at most 0.66", "MISSED"],
        ["0.600x, at most 0.66", "ok"],
    ]
    assert all("chunks of 4096 900.0 ms" in line for line in said)
    assert [round(figures["ratio"], 6) for figures in report.figures.values()] == [0.7, 0.6]
