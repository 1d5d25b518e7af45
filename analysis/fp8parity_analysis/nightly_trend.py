"""The trend of one series over the nights as an inline SVG."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from fp8parity_analysis.history_findings import changes_between
from fp8parity_analysis.history_series import Series
from fp8parity_analysis.history_steps import State
from fp8parity_analysis.svg import colour, to_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.history import Night
    from fp8parity_analysis.history_findings import Tracked

SHOWN_NIGHTS = 60
_MARKS = {  # state: colour, marker; told by shape, colour repeats it
    State.NEW: ("fail", "s"),
    State.STILL: ("fail", "s"),
    State.FIXED: ("pass", "D"),
    State.BETTER: ("control", "^"),
    State.STILL_BETTER: ("control", "^"),
    State.ADOPTED: ("control", "^"),
    State.LEARNING: ("null", "o"),
    State.GOOD: ("pass", "o"),
}


def trend(tracked: Tracked, name: str, key: str) -> str:
    """Return the last nights of one series: values, the baseline they were held against, changes of versions."""
    from matplotlib.figure import Figure

    j = tracked.names.index(name)
    first = max(0, len(tracked.nights) - SHOWN_NIGHTS)
    nights = range(first, len(tracked.nights))
    series = Series(name)
    factor = 100.0 if series.kind.name in ("gap", "noise") else 1.0
    figure = Figure(figsize=(5.2, 1.9), layout="constrained")
    axes = figure.add_subplot()
    at = dict(zip(nights, places([tracked.nights[t].night for t in nights]), strict=True))
    base = [series.plain(float(tracked.replay.base[0, t, j])) * factor for t in nights]
    axes.plot(list(at.values()), base, color=colour("muted"), linewidth=1, linestyle=(0, (4, 2.5)))
    for t in nights:
        item = tracked.nights[t].series.get(name)
        if item is not None:
            role, marker = _MARKS[State(int(tracked.replay.state[0, t, j]))]
            size = 5.5 if marker != "o" else 3.6
            axes.plot(
                [at[t]], [item.value * factor], marker, color=colour(role), markersize=size, markeredgewidth=0
            )
    for t in nights[1:]:
        height = mark_height(tracked.nights[t - 1], tracked.nights[t])
        if height:
            place = (at[t - 1] + at[t]) / 2
            axes.axvline(place, ymax=height, color=colour("muted"), linewidth=1.2, zorder=0)
    _dress(
        axes,
        list(at.values()),
        [tracked.nights[t].night for t in nights],
        "%" if factor != 1 else _unit(series),
    )
    return to_svg(figure, key, f"{series.title} over the last {len(nights)} nights")


def mark_height(before: Night, after: Night) -> float:
    """Return the height of the mark between two nights as a share of the picture, 0 where nothing changed.

    The commit of a checkout may change every night: alone it has a short mark, so that a version stands out.
    """
    changed = {item.what for item in changes_between(before, after)}
    if not changed:
        return 0.0
    return 0.08 if changed == {"commit"} else 1.0


def places(names: Sequence[str]) -> list[float]:
    """Return where nights lie on the axis, in days: by date, those of one day apart; one apart if a name is no date."""
    try:
        days = [float(date.fromisoformat(name[:10]).toordinal()) for name in names]
    except ValueError:
        return [float(i) for i in range(len(names))]
    return [day + days[:i].count(day) / days.count(day) for i, day in enumerate(days)]


def _unit(series: Series) -> str:
    return {"speed": "tokens/s", "loss": "nats", "speedup": "ratio"}.get(series.kind.name, "")


def _dress(axes: object, at: Sequence[float], names: Sequence[str], unit: str) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

    assert isinstance(axes, Axes)
    span = at[-1] - at[0]
    wanted = [at[0] + span * i / 3 for i in range(4)]
    shown = sorted({min(range(len(at)), key=lambda i: abs(at[i] - place)) for place in wanted})
    axes.set_xticks([at[i] for i in shown], [names[i][5:] for i in shown])
    axes.set_xlim(at[0] - 0.7, at[-1] + 0.7)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    axes.set_ylabel(unit, color=colour("muted"), fontsize=9)
    axes.tick_params(colors=colour("muted"), labelsize=9, length=0)
    axes.grid(axis="y", color=colour("line"), linewidth=0.7)
    for side in axes.spines.values():
        side.set_visible(False)
