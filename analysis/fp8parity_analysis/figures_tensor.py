"""Pictures of tensor statistics: heat maps of layer by probe, and amax curves; arrays in, inline SVG out.

Heat maps are written by hand: a few hundred rows by sixty columns are one path per level, not a rectangle per cell.
Colour is one hue at rising opacity over the page, so that light and dark need no second palette.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fp8parity_analysis.figures import PX, TEXT, style_axes
from fp8parity_analysis.svg import colour, to_svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_ROWS, MAX_COLUMNS = 56, 60
"""More tensors or probes than this share a row or a column, which shows the worst of them."""
OPACITY = (0.14, 0.3, 0.5, 0.74, 1.0)
"""Opacity of levels 1 to 5; level 0 is left blank."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 124, 26, 4, 40
_ROW, _MIN_ROW, _MAX_HEIGHT = 15.0, 4.0, 260.0
_LARGEST = 1e40
"""What bf16 and fp32 can hold lies between its reciprocal and this; anything else has no place on the axis."""
_SPACING = 13.0
"""Least distance of two labels in pixels."""


@dataclass(frozen=True)
class HeatMap:
    """Levels 0 (fine) to 5 by row and probe [R, C], -1 where nothing was recorded.

    `rows` [R] are the labels, `steps` [C] the probes' steps, `marks` maps a row to the rank of its candidate.
    """

    levels: IntArray
    rows: tuple[str, ...]
    steps: IntArray
    marks: Mapping[int, int]


def levels_of(values: FloatArray, edges: Sequence[float]) -> IntArray:
    """Return how many of the rising `edges` each value reaches, -1 for NaN."""
    found = np.searchsorted(np.asarray(edges), np.nan_to_num(values, nan=-np.inf), side="right")
    return np.where(np.isnan(values), -1, found).astype(np.int64)


def _bins(count: int, limit: int) -> list[tuple[int, int]]:
    """Return contiguous ranges, at most `limit`, that cover `count` items."""
    edges = np.unique(np.linspace(0, count, min(count, limit) + 1).astype(int))
    return [(int(a), int(b)) for a, b in pairwise(edges)]


def shrunk(heat: HeatMap) -> HeatMap:
    """Return the map with at most `MAX_ROWS` by `MAX_COLUMNS` cells, each the worst of those it stands for."""
    rows, columns = _bins(len(heat.rows), MAX_ROWS), _bins(len(heat.steps), MAX_COLUMNS)
    levels = np.array(
        [[heat.levels[a:b, c:d].max() for c, d in columns] for a, b in rows], dtype=np.int64
    ).reshape(len(rows), len(columns))
    marks: dict[int, int] = {}
    for index, (a, b) in enumerate(rows):
        ranks = [heat.marks[row] for row in range(a, b) if row in heat.marks]
        if ranks:
            marks[index] = min(ranks)
    names = tuple(heat.rows[a] for a, _ in rows)
    return HeatMap(levels, names, np.array([heat.steps[c] for c, _ in columns], dtype=np.int64), marks)


def heat_map(heat: HeatMap, label: str) -> str:
    """Return the map as inline SVG; `label` is what a screen reader says."""
    heat = shrunk(heat)
    n_rows, n_columns = heat.levels.shape
    height = max(_MIN_ROW, min(_ROW, _MAX_HEIGHT / max(1, n_rows)))
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, n_columns)
    tall = n_rows * height
    box = f"0 0 {_WIDTH} {_TOP + tall + _BOTTOM:.0f}"
    parts = [
        f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}" focusable="false" class="heat">',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{tall:.1f}" class="blank"></rect>',
    ]
    for level in (-1, 1, 2, 3, 4, 5):
        path = _path(heat.levels == level, width, height)
        if path:
            style = "gone" if level < 0 else f"l{level}"
            parts.append(f'<path class="{style}" stroke-width="{height:.1f}" d="{path}"></path>')
    parts += _row_labels(heat, height)
    parts += _step_labels(heat.steps, width, _TOP + tall)
    parts += _mark_labels(heat, height)
    return "".join([*parts, "</svg>"])


def _path(cells: npt.NDArray[np.bool_], width: float, height: float) -> str:
    """Return horizontal strokes over the runs of true cells of every row."""
    pieces = []
    for row, line in enumerate(cells):
        change = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(np.int8), [0]])))
        y = _number(_TOP + (row + 0.5) * height)
        for start, end in zip(change[::2], change[1::2], strict=True):
            pieces.append(f"M{_number(_LEFT + start * width)} {y}h{_number((end - start) * width)}")
    return "".join(pieces)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(name: str) -> str:
    """Return a module's name without a first part that only says that it is a block."""
    _, _, rest = name.partition(".")
    short = rest if rest[:1].isdigit() else name
    return short if len(short) <= 20 else f"{short[:8]}…{short[-11:]}"


def _block(name: str) -> str:
    """Return the number of the block, or the whole name outside of blocks."""
    return next((part for part in name.split(".") if part.isdigit()), name)


def _row_labels(heat: HeatMap, height: float) -> list[str]:
    found: list[str] = []
    last, seen = -1e9, ""
    whole = height >= _SPACING
    for row, name in enumerate(heat.rows):
        y = _TOP + (row + 0.5) * height
        label = _short(name) if whole else f"block {_block(name)}" if _block(name).isdigit() else _short(name)
        if label != seen and y - last >= _SPACING:
            found.append(_text(_LEFT - 6, y, label, "end"))
            last = y
        seen = label
    return found


def _step_labels(steps: IntArray, width: float, bottom: float) -> list[str]:
    if not len(steps):
        return []
    wanted = sorted({round(share * (len(steps) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    found = [_text(_LEFT + (at + 0.5) * width, bottom + 12, f"{steps[at]:,}", "middle") for at in wanted]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*found, _text(middle, bottom + 30, "optimizer step of each probe", "middle")]


def _mark_labels(heat: HeatMap, height: float) -> list[str]:
    found: list[str] = []
    last = -1e9
    for row, rank in sorted(heat.marks.items()):
        y = _TOP + (row + 0.5) * height
        if y - last >= _SPACING:
            found.append(_text(_WIDTH - _RIGHT + 5, y, f"◂{rank}", "start", "mark"))
            last = y
    return found


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}" dominant-baseline="central"{kind}>'
        f"{escape(words)}</text>"
    )


@dataclass(frozen=True)
class AmaxPanel:
    """The amax of one tensor by seed in both arms [n, K], and the step from which it is off."""

    steps: IntArray
    test: FloatArray
    control: FloatArray
    onset: int | None = None


def amax_panel(panel: AmaxPanel, key: str, label: str) -> str:
    """Return the amax curves as SVG, on a logarithmic axis."""
    width, height = _WIDTH, 220
    figure = Figure(figsize=(width * PX, height * PX))
    axes = figure.add_axes((62 / width, 44 / height, (width - 76) / width, (height - 56) / height))
    style_axes(axes)
    if panel.onset is not None:
        axes.axvline(panel.onset, color=colour("muted"), linewidth=1.0, linestyle=(0, (2, 2)))
    drawn = []
    for rows, role, style in ((panel.control, "control", "-"), (panel.test, "test", (0, (4, 2.2)))):
        for row in rows:
            known = (row > 1 / _LARGEST) & (row < _LARGEST)
            if known.any():
                axes.plot(panel.steps[known], row[known], color=colour(role), linewidth=1.5, linestyle=style)
                drawn.append(row[known])
    if drawn:
        axes.set_yscale("log")
        low, high = min(map(np.min, drawn)), max(map(np.max, drawn))
        pad = max(float(high / low), 1.5) ** 0.08
        axes.set_ylim(float(low) / pad, float(high) * pad)
        _log_ticks(axes, float(low) / pad, float(high) * pad)
    axes.set_xlim(0, max(1.0, float(panel.steps[-1]) if len(panel.steps) else 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step", color=colour("muted"), fontsize=TEXT)
    return to_svg(figure, key, label)


def _log_ticks(axes: object, low: float, high: float) -> None:
    """Set about five ticks that are spread evenly on the logarithmic axis, each with two digits."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    whole = _decades(low, high)
    exponents = whole if len(whole) > 2 else list(np.linspace(np.log10(low), np.log10(high), 5)[1:-1])
    ticks = [float(f"{10.0**exponent:.1e}") for exponent in exponents]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _decades(low: float, high: float) -> list[float]:
    whole = list(range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1))
    stride = max(1, -(-len(whole) // 5))
    return [float(exponent) for exponent in whole[::stride]]
