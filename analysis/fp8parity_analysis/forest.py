"""The forest plot: gap and interval of every recipe against the margin, wide for a screen, narrow for a phone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from fp8parity_analysis.figures import PX, TEXT, percent_ticks, style_axes
from fp8parity_analysis.svg import colour, to_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ForestRow:
    """One recipe of the forest plot; numbers in per cent, None where there is none.

    `gate` chooses marker and colour; `text` is the number written beside it; `points` are the single seeds.
    """

    label: str
    text: str
    gate: str
    gap: float | None
    low: float | None
    high: float | None
    points: Sequence[float] = ()
    null_arm: bool = False


MARKERS = {"pass": "o", "fail": "s", "inconclusive": "D", "invalid": "X"}
"""Outcome by shape as well as by colour."""
_CROWDED = 16
_REACH = 20.0
"""The axis ends at this many margins; an interval that reaches further ends in an arrow."""


def forest(rows: Sequence[ForestRow], margin: float, key: str, label: str, *, narrow: bool) -> str:
    """Return gaps and intervals against the margin band as SVG; `narrow` writes labels above the rows."""
    crowded = len(rows) > _CROWDED
    width, pitch = (400, 46 if crowded else 58) if narrow else (1000, 30 if crowded else 46)
    left, right = (14, 14) if narrow else (220, 226)
    height = pitch * len(rows) + 62
    figure = Figure(figsize=(width * PX, height * PX))
    box = (left / width, 50 / height, (width - left - right) / width, (height - 58) / height)
    axes = figure.add_axes(box)
    style_axes(axes)
    axes.grid(visible=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    edge = _forest_edge(rows, margin)
    axes.set_xlim(-edge, edge)
    spans = [(y - 0.04, y + 0.5) for y in range(len(rows))] if narrow else [(-0.5, len(rows) - 0.5)]
    for span in spans:
        _forest_band(axes, span, margin)
    for y, row in enumerate(rows):
        _forest_row(axes, y, row, edge, narrow=narrow)
    axes.yaxis.set_major_locator(FixedLocator([]))
    percent_ticks(axes.xaxis, -edge, edge, 5 if narrow else 9)
    axes.set_xlabel("gap, % of the loss (right of 0: worse than BF16)", color=colour("muted"), fontsize=TEXT)
    return to_svg(figure, key, label)


def _forest_edge(rows: Sequence[ForestRow], margin: float) -> float:
    found = [abs(v) for row in rows for v in (row.gap, row.low, row.high, *row.points) if v is not None]
    return min(max([1.6 * margin, *(1.08 * value for value in found)]), _REACH * margin)


def _forest_band(axes: Axes, span: tuple[float, float], margin: float) -> None:
    """Draw the margin and the zero line; the narrow plot leaves out the stripes where text stands."""
    axes.fill_betweenx(span, -margin, margin, color=colour("band"), linewidth=0, zorder=0)
    for at in (-margin, margin):
        axes.plot([at, at], span, color=colour("pass"), linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
    axes.plot([0.0, 0.0], span, color=colour("ink"), linewidth=0.9, zorder=1)


def _forest_row(axes: Axes, y: int, row: ForestRow, edge: float, *, narrow: bool) -> None:
    base = y + (0.22 if narrow else 0.0)
    role = "null" if row.null_arm and row.gate not in ("fail", "invalid") else row.gate
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [base, base], color=colour(role), linewidth=2.6, solid_capstyle="butt")
        for bound, mark in ((row.low, "<"), (row.high, ">")):
            if abs(bound) > edge:
                axes.plot(
                    [np.sign(bound) * edge], [base], mark, color=colour(role), markersize=8, clip_on=False
                )
    for point in row.points:
        axes.plot([point], [base + 0.2], "|", color=colour("muted"), markersize=7, markeredgewidth=1.2)
    if row.gap is not None and abs(row.gap) <= edge:
        axes.plot([row.gap], [base], MARKERS[row.gate], color=colour(role), markersize=9)
    _forest_text(axes, y, row, narrow=narrow)


def _forest_text(axes: Axes, y: int, row: ForestRow, *, narrow: bool) -> None:
    """Write name and number: at both sides of the wide plot, above the row of the narrow one."""
    where = axes.get_yaxis_transform()
    name = colour("muted" if row.null_arm else "ink")
    value = name if row.gap is not None or row.null_arm else colour(row.gate)
    # parse_math: a dollar sign in a run's name is a dollar sign
    place: dict[str, Any] = {"transform": where, "va": "center", "parse_math": False}
    if narrow:
        axes.text(0.0, y - 0.22, _clip(row.label, 24), color=name, fontsize=TEXT, ha="left", **place)
        axes.text(1.0, y - 0.22, _clip(row.text, 26), color=value, fontsize=TEXT, ha="right", **place)
        return
    axes.text(-0.02, y, _clip(row.label, 24), color=name, fontsize=TEXT + 1, ha="right", **place)
    axes.text(1.02, y, _clip(row.text, 32), color=value, fontsize=TEXT + 1, ha="left", **place)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"
