"""What the decode table's figures say: against the peer, against the aims, engine against engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decode_engines import FORCED_RATE, EngineRun
from decode_point import DecodePoint
from peer import COMPARED, Compared, on_line

_OVER_LINE = 1.15
"""How far a number of requests between those of the table may lie above the line through its points."""
_FORCED_SPEEDUP = {1: 2.2, 16: 2.2, 64: 1.6}
_ADAPTIVE_LOSS = 1.03
_GRAPH_SPEEDUP = {("qwen3-0.6b", 1): 2.0}

_COLUMNS = (
    "requests",
    "ITL, ms",
    "at most",
    "peer",
    "even layers",
    "eager",
    "tok/s",
    "peer",
    "first token of all, ms",
    "device and host per step and stage, ms",
    "",
)

Figures = Mapping[str, Any]


def print_point(run: EngineRun, point: DecodePoint) -> None:
    """Print a point as soon as it is measured."""
    peer = run.compared.peer.get(point.num_requests)
    text = f"  {point.num_requests:4d} requests: ITL {point.itl_ms:7.3f} ms, {point.tokens_per_s:8.0f} tok/s"
    text += f", first token of all {point.first_token_s * 1e3:7.1f} ms"
    if peer is not None:
        text += f"; peer {peer.itl_ms} ms, {peer.tokens_per_s:.0f} tok/s"
    print(text, flush=True)


def print_verdicts(model: str, figures: Mapping[str, Figures]) -> None:
    """Print the model's table as Markdown, with a verdict for everything that there is a figure to compare with."""
    compared, graphs = COMPARED.get(model, Compared()), figures.get(f"{model} graphs")
    if graphs is None:
        return
    itls = itl_by_requests(graphs)
    print(f"\n{model}\n\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    line = {count: itls[count] for count in compared.at_most_ms if count in itls}
    for count in sorted(itls):
        figures_of_point = graphs[f"{count} requests"]
        at_most, peer = compared.at_most_ms.get(count), compared.peer.get(count)
        verdicts = []
        if at_most is not None:
            verdicts.append(_verdict("ITL", itls[count], at_most))
        elif len(line) == len(compared.at_most_ms) and line:
            verdicts.append(_verdict("line", itls[count], _OVER_LINE * on_line(line, count)))
        if peer is not None:
            verdicts.append(_verdict("tok/s", -figures_of_point["tokens_per_s"], -peer.tokens_per_s))
        cells = [str(count), f"{itls[count]:.2f}", _cell(at_most), _cell(peer and peer.itl_ms)]
        cells += [_other(figures, model, part, count) for part in ("even", "eager")]
        cells += [f"{figures_of_point['tokens_per_s']:,.0f}", _cell(peer and peer.tokens_per_s)]
        cells += [f"{figures_of_point['first_token_ms']:.0f}", _stages(figures_of_point), ", ".join(verdicts)]
        print(f"| {' | '.join(cells)} |")
    print()
    for part in ("graphs", "start again"):
        if "num_files_compiled" in (start := figures.get(f"{model} {part}", {})):  # it has started
            cache = "compiled" if start["num_files_compiled"] else "found all kernels"
            print(f"start: {start['start_s']:.1f} s, {cache}; peer {_cell(compared.start_s)} s")
    if (eager := figures.get(f"{model} eager")) is not None:
        for count, itl_ms in itl_by_requests(eager).items():
            if count in itls:
                speedup, at_least = itl_ms / itls[count], _GRAPH_SPEEDUP.get((model, count))
                verdict = "" if at_least is None else _verdict(f"at least {at_least}x", -speedup, -at_least)
                print(f"eager / graphs at {count}: {speedup:.2f}x {verdict}")


def print_speculation(model: str, figures: Mapping[str, Figures]) -> None:
    """Print time per token with speculation against without: of the mean request, and of the slowest."""
    off = figures.get(f"{model} graphs")
    if off is None:
        return
    without, slowest_without = (_by_requests(off, name) for name in ("tpot_ms", "itl_ms"))
    if slowest_without and not without:
        print(f"{model}: the report tells no time per token of the mean request")
    for part in ("fixed drafts", "adaptive drafts", f"adaptive drafts at {FORCED_RATE}"):
        if (on := figures.get(f"{model} {part}")) is None:
            continue
        slowest = itl_by_requests(on)
        for count, tpot_ms in _by_requests(on, "tpot_ms").items():
            if count not in without:
                continue
            speedup, of_slowest = without[count] / tpot_ms, slowest_without[count] / slowest[count]
            verdict = ""
            if part == "adaptive drafts":
                verdict = _verdict("loss", tpot_ms, _ADAPTIVE_LOSS * without[count])
            elif part == "fixed drafts" and count in _FORCED_SPEEDUP:
                verdict = _verdict(f">= {_FORCED_SPEEDUP[count]}x", -speedup, -_FORCED_SPEEDUP[count])
            print(
                f"{model}, {part}, {count}: {tpot_ms:.3f} against {without[count]:.3f} ms, {speedup:.2f}x {verdict}; "
                f"of the slowest request {of_slowest:.2f}x"
            )


def itl_by_requests(figures: Figures) -> dict[int, float]:
    """Return the ITLs of an engine, ms, by the number of requests."""
    return _by_requests(figures, "itl_ms")


def _by_requests(figures: Figures, figure: str) -> dict[int, float]:
    return {
        int(name.removesuffix(" requests")): values[figure]
        for name, values in figures.items()
        if name.endswith(" requests") and figure in values
    }


def _stages(figures_of_point: Figures) -> str:
    return ", ".join(
        f"{stage['forward_us'] / 1e3:.2f} and {stage['host_us'] / 1e3:.2f}"
        for stage in figures_of_point.get("stages", [])
        if {"forward_us", "host_us"} <= set(stage)
    )


def _other(figures: Mapping[str, Figures], model: str, part: str, count: int) -> str:
    itl_ms = itl_by_requests(figures.get(f"{model} {part}", {})).get(count)
    return "-" if itl_ms is None else f"{itl_ms:.2f}"


def _verdict(what: str, value: float, at_most: float) -> str:
    return f"{what} {'ok' if value <= at_most else f'MISSED by {abs(value / at_most - 1):.1%}'}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,g}"
