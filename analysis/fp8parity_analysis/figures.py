"""The pictures of the report: arrays in, inline SVG out; they know nothing of runs or verdict rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from fp8parity_analysis.report_format import number
from fp8parity_analysis.svg import colour, to_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FloatArray = npt.NDArray[np.float64]

_PX = 1.0 / 72.0
"""Inches per unit of the SVG's viewBox: sizes below are CSS pixels at natural size."""
_PANEL = (460, 300)
_TEXT = 12.0
_HEAD_FRAC = 0.06
"""The first share of a run, whose steep fall would flatten everything after it, may leave the frame."""


@dataclass(frozen=True)
class Line:
    """One curve: `steps` [K] and `values` [K], NaN where nothing is drawn."""

    steps: FloatArray
    values: FloatArray


@dataclass(frozen=True)
class LossPanel:
    """Loss of a recipe and its control, every seed: held-out curves and, behind them, training curves."""

    control: Sequence[Line]
    test: Sequence[Line]
    control_train: Sequence[Line] = ()
    test_train: Sequence[Line] = ()


@dataclass(frozen=True)
class GapPanel:
    """Gap of a recipe in per cent: a line per seed, their mean, the margin, the largest null gap by step."""

    seeds: Sequence[Line]
    mean: Line
    margin: float
    null_limit: Line | None = None
    tail_from: float | None = None
    null_arm: bool = False


def thin(line: Line, limit: int) -> Line:
    """Return at most `limit` points with the lowest and highest of every stretch, so no spike is lost."""
    n = len(line.steps)
    if n <= limit:
        return line
    parts = max(1, limit // 2 - 1)
    width = -(-(n - 2) // parts)
    inner = np.full(parts * width, np.nan)
    inner[: n - 2] = line.values[1:-1]
    blocks = inner.reshape(parts, width)
    starts = 1 + width * np.arange(parts)
    lowest = starts + np.argmin(np.where(np.isnan(blocks), np.inf, blocks), axis=1)
    highest = starts + np.argmax(np.where(np.isnan(blocks), -np.inf, blocks), axis=1)
    rows = np.unique(np.concatenate([[0, n - 1], lowest, highest]))
    rows = rows[rows < n]
    return Line(line.steps[rows], line.values[rows])


def loss_panel(panel: LossPanel, key: str, label: str) -> str:
    """Return the loss curves as SVG."""
    figure, axes = _panel_axes()
    for lines, role in ((panel.control_train, "control"), (panel.test_train, "test")):
        for line in lines:
            axes.plot(line.steps, line.values, color=colour(role), linewidth=0.7, alpha=0.22)
    for line in panel.control:
        axes.plot(line.steps, line.values, color=colour("control"), linewidth=1.6)
    for line in panel.test:
        axes.plot(line.steps, line.values, color=colour("test"), linewidth=1.6, linestyle=(0, (4, 2.2)))
    _mark_lost(axes, panel.test, "test")
    _mark_lost(axes, panel.control, "control")
    _limit_loss(axes, panel)
    axes.set_ylabel("loss, nats per token", color=colour("muted"), fontsize=_TEXT)
    _steps_axis(axes, [*panel.control, *panel.test, *panel.control_train])
    return to_svg(figure, key, label)


def gap_panel(panel: GapPanel, key: str, label: str) -> str:
    """Return the gap curves as SVG; above the zero line the recipe is worse than its control."""
    figure, axes = _panel_axes()
    role = "null" if panel.null_arm else "test"
    axes.axhspan(-panel.margin, panel.margin, color=colour("band"), linewidth=0, zorder=0)
    if panel.null_limit is not None:
        limit = panel.null_limit
        axes.fill_between(
            limit.steps, -limit.values, limit.values, color=colour("nullband"), linewidth=0, zorder=0.5
        )
    for edge in (-panel.margin, panel.margin):
        axes.axhline(edge, color=colour("pass"), linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axes.axhline(0.0, color=colour("ink"), linewidth=0.9, zorder=1)
    for line in panel.seeds:
        axes.plot(line.steps, line.values, color=colour(role), linewidth=0.9, alpha=0.55)
    axes.plot(panel.mean.steps, panel.mean.values, color=colour(role), linewidth=2.4)
    _mark_lost(axes, panel.seeds or [panel.mean], role)
    _limit_gap(axes, panel)
    if panel.tail_from is not None:
        _mark_tail(axes, panel)
    axes.set_ylabel("gap, %", color=colour("muted"), fontsize=_TEXT)
    _percent_ticks(axes.yaxis, *axes.get_ylim(), 5)
    _steps_axis(axes, [panel.mean])
    return to_svg(figure, key, label)


def _mark_lost(axes: Axes, lines: Sequence[Line], role: str) -> None:
    """Put a cross where a curve goes non-finite and stays so."""
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.values))
        if len(finite) and finite[-1] < len(line.values) - 1:
            at = finite[-1]
            axes.plot([line.steps[at]], [line.values[at]], "X", color=colour(role), markersize=8)


def _percent_ticks(axis: Axis, low: float, high: float, n: int) -> None:
    """Set round ticks inside the frame, all with the decimals that the finest of them needs."""
    found = MaxNLocator(nbins=n, steps=[1, 2.5, 5, 10]).tick_values(low, high)
    ticks = [round(float(value), 9) for value in found if low <= value <= high]
    digits = max((len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([number(tick, digits) if tick else "0" for tick in ticks]))


def _panel_axes() -> tuple[Figure, Axes]:
    width, height = _PANEL
    figure = Figure(figsize=(width * _PX, height * _PX))
    axes = figure.add_axes((58 / width, 44 / height, (width - 72) / width, (height - 56) / height))
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Leave only what is read: a base line, light horizontal rules, small ticks in the muted colour."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colour("muted"))
    axes.spines["bottom"].set_linewidth(0.8)
    axes.grid(axis="y", color=colour("line"), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colour("muted"), labelsize=_TEXT, length=0, pad=6)
    axes.tick_params(axis="x", length=3, width=0.8, pad=4)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=3))


def _steps_axis(axes: Axes, lines: Sequence[Line]) -> None:
    last = max((float(line.steps[-1]) for line in lines if len(line.steps)), default=1.0)
    axes.set_xlim(0.0, max(last, 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step", color=colour("muted"), fontsize=_TEXT)


def _after_head(lines: Sequence[Line]) -> FloatArray:
    """Return every finite value after the first share of the longest curve, or all when that leaves none."""
    last = max((float(line.steps[-1]) for line in lines if len(line.steps)), default=0.0)
    late = [line.values[line.steps >= _HEAD_FRAC * last] for line in lines]
    values = np.concatenate(late) if late else np.zeros(0)
    return values[np.isfinite(values)]


def _limit_loss(axes: Axes, panel: LossPanel) -> None:
    """Frame the curves after their head; what goes higher than the start of the control is cut there."""
    values = _after_head([*panel.control, *panel.test])
    if not len(values):
        return
    start = np.concatenate([line.values[:1] for line in (*panel.control, *panel.control_train)] or [values])
    start = start[np.isfinite(start)]
    top = min(float(values.max()), float(start.max()) * 1.1) if len(start) else float(values.max())
    low = float(values.min())
    pad = 0.06 * max(top - low, 0.01 * abs(top), 1e-6)
    axes.set_ylim(low - pad, top + pad)


def _limit_gap(axes: Axes, panel: GapPanel) -> None:
    values = _after_head([*panel.seeds, panel.mean])
    if panel.null_limit is not None:
        nulls = _after_head([panel.null_limit])
        values = np.concatenate([values, nulls, -nulls])
    low = float(values.min()) if len(values) else 0.0
    high = float(values.max()) if len(values) else 0.0
    axes.set_ylim(min(-1.35 * panel.margin, 1.12 * low), max(1.35 * panel.margin, 1.12 * high))


def _mark_tail(axes: Axes, panel: GapPanel) -> None:
    """Mark the steps whose mean is the endpoint: a bar on the base line."""
    low, high = axes.get_ylim()
    y = low + 0.012 * (high - low)
    last = float(panel.mean.steps[-1]) if len(panel.mean.steps) else 0.0
    axes.plot([panel.tail_from or 0.0, last], [y, y], color=colour("ink"), linewidth=4, solid_capstyle="butt")


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
_REACH = 12.0
"""The axis ends at this many margins; an interval that reaches further ends in an arrow."""


def forest(rows: Sequence[ForestRow], margin: float, key: str, label: str, *, narrow: bool) -> str:
    """Return gaps and intervals against the margin band as SVG; `narrow` writes labels above the rows."""
    crowded = len(rows) > _CROWDED
    width, pitch = (400, 46 if crowded else 58) if narrow else (1000, 30 if crowded else 46)
    left, right = (14, 14) if narrow else (220, 226)
    height = pitch * len(rows) + 62
    figure = Figure(figsize=(width * _PX, height * _PX))
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
    _percent_ticks(axes.xaxis, -edge, edge, 5 if narrow else 9)
    axes.set_xlabel("gap, % of the loss (right of 0: worse than BF16)", color=colour("muted"), fontsize=_TEXT)
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
        axes.text(0.0, y - 0.22, _clip(row.label, 24), color=name, fontsize=_TEXT, ha="left", **place)
        axes.text(1.0, y - 0.22, _clip(row.text, 26), color=value, fontsize=_TEXT, ha="right", **place)
        return
    axes.text(-0.02, y, _clip(row.label, 24), color=name, fontsize=_TEXT + 1, ha="right", **place)
    axes.text(1.02, y, _clip(row.text, 32), color=value, fontsize=_TEXT + 1, ha="left", **place)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"
