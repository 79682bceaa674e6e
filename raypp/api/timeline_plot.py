"""A timeline as a picture, by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from raypp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from raypp.api.timeline import Timeline

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's bright scheme: told apart by colour-blind readers, too."""

_WIDTH_INCHES = 10.0
_LANE_INCHES = 0.45
_DPI = 110


def plot_timeline(timeline: Timeline, axes: Axes | None = None) -> Axes:
    """Draw a timeline; see `Timeline.plot`."""
    if axes is None:
        axes = _new_axes(timeline.num_stages)
    start_us = min(forward.start_us for forward in timeline.forwards)
    for cohort in sorted({forward.cohort for forward in timeline.forwards}):
        for has_prefill in (False, True):
            bars = [f for f in timeline.forwards if f.cohort == cohort and (f.num_tokens > f.num_rows) == has_prefill]
            axes.barh(
                [f.stage_index for f in bars],
                [(f.end_us - f.start_us) / 1e3 for f in bars],
                left=[(f.start_us - start_us) / 1e3 for f in bars],
                height=0.8,
                color=_COLOURS[cohort % len(_COLOURS)],
                hatch="///" if has_prefill else None,
                edgecolor="white",
                linewidth=0.3,
                label=_label(cohort, has_prefill=has_prefill) if bars else None,
            )
    axes.set_yticks(range(timeline.num_stages), [f"stage {index}" for index in range(timeline.num_stages)])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(str(timeline).replace(" (", "\n(", 1), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return axes


def timeline_png(timeline: Timeline) -> bytes:
    """Return the picture as PNG."""
    figure: Any = plot_timeline(timeline).figure
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, bbox_inches="tight")
    return file.getvalue()


def _label(cohort: int, *, has_prefill: bool) -> str:
    name = "prefill only" if cohort < 0 else f"cohort {cohort}"
    return f"{name}, with prefill" if has_prefill and cohort >= 0 else name


def _new_axes(num_stages: int) -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib", hint='pip install "raypp[notebook]"') from error
    # Not pyplot: that keeps every figure, and in a notebook shows it a second time.
    figure = Figure(figsize=(_WIDTH_INCHES, 0.9 + _LANE_INCHES * num_stages))
    axes: Axes = figure.add_subplot()
    return axes
