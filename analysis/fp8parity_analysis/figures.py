"""The pictures of the report: arrays in, inline SVG out; they know nothing of runs or verdict rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

PX = 1.0 / 72.0
"""Inches per unit of the SVG's viewBox: sizes below are CSS pixels at natural size."""
_PANEL = (460, 300)
TEXT = 12.0
_TAIL_SHARE = 0.015
"""Least width of the mark of the endpoint, in widths of the panel: 6 pixels."""
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
            axes.plot(line.steps, line.values, color=colour(role), linewidth=0.7, alpha=0.18)
    for line in panel.control:
        axes.plot(line.steps, line.values, color=colour("control"), linewidth=1.6)
    for line in panel.test:
        axes.plot(line.steps, line.values, color=colour("test"), linewidth=1.6, linestyle=(0, (4, 2.2)))
    _mark_lost(axes, panel.test, "test")
    _mark_lost(axes, panel.control, "control")
    _limit_loss(axes, panel)
    axes.set_ylabel("loss, nats per token", color=colour("muted"), fontsize=TEXT)
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
    axes.set_ylabel("gap, %", color=colour("muted"), fontsize=TEXT)
    percent_ticks(axes.yaxis, *axes.get_ylim(), 5)
    _steps_axis(axes, [panel.mean])
    return to_svg(figure, key, label)


def _mark_lost(axes: Axes, lines: Sequence[Line], role: str) -> None:
    """Put a cross where a curve goes non-finite and stays so."""
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.values))
        if len(finite) and finite[-1] < len(line.values) - 1:
            at = finite[-1]
            axes.plot([line.steps[at]], [line.values[at]], "X", color=colour(role), markersize=8)


def percent_ticks(axis: Axis, low: float, high: float, n: int) -> None:
    """Set round ticks inside the frame, all with the decimals that the finest of them needs."""
    ticks: list[float] = []
    for steps in ([1, 2.5, 5, 10], [1, 2, 2.5, 5, 10]):  # quarters first: margins are often 0.25 %
        found = MaxNLocator(nbins=n, steps=steps).tick_values(low, high)
        ticks = [round(float(value), 9) for value in found if low <= value <= high]
        if len(ticks) > n // 3:
            break
    digits = max((len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([number(tick, digits) if tick else "0" for tick in ticks]))


def _panel_axes() -> tuple[Figure, Axes]:
    width, height = _PANEL
    figure = Figure(figsize=(width * PX, height * PX))
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
    axes.tick_params(colors=colour("muted"), labelsize=TEXT, length=0, pad=6)
    axes.tick_params(axis="x", length=3, width=0.8, pad=4)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=3))


def _steps_axis(axes: Axes, lines: Sequence[Line]) -> None:
    last = max((float(line.steps[-1]) for line in lines if len(line.steps)), default=1.0)
    axes.set_xlim(0.0, max(last, 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step", color=colour("muted"), fontsize=TEXT)


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
    """Mark the steps whose mean is the endpoint: a bar on the base line, of a visible width for one evaluation."""
    low, high = axes.get_ylim()
    y = low + 0.012 * (high - low)
    last = float(panel.mean.steps[-1]) if len(panel.mean.steps) else 0.0
    start = min(panel.tail_from or 0.0, last * (1 - _TAIL_SHARE))
    axes.plot([start, last], [y, y], color=colour("ink"), linewidth=4, solid_capstyle="butt")
