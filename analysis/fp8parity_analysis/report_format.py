"""How the report writes numbers: per cent with a true minus, the unit said once, counts people can read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def digits_for(margin: float) -> int:
    """Return the decimals of a per cent that resolve a tenth of the margin; at least two."""
    return max(2, math.ceil(-math.log10(100.0 * margin)) + 1) if margin > 0 else 3


def number(value: float, digits: int, *, signed: bool = True) -> str:
    """Return a number with a true minus sign; what rounds to zero carries no sign."""
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0.0:
        return text.lstrip("+-")
    return text.replace("-", MINUS)


def percent(value: float | None, digits: int, *, signed: bool = True) -> str:
    """Return a fraction as per cent, a dash for what is not known."""
    return NOTHING if value is None else f"{number(100 * value, digits, signed=signed)} %"


def interval(bounds: Sequence[float | None], digits: int, *, signed: bool = True) -> str:
    """Return `[lo, hi]` in per cent without the unit; empty when neither bound is known."""
    lo, hi = bounds
    if lo is None and hi is None:
        return ""
    words = [NOTHING if bound is None else number(100 * bound, digits, signed=signed) for bound in (lo, hi)]
    return f"[{words[0]}, {words[1]}]"


def gap(value: float | None, bounds: Sequence[float | None], digits: int) -> str:
    """Return `+0.12 % [−0.05, +0.29]`: the unit is said once."""
    if value is None:
        return NOTHING
    return f"{percent(value, digits)} {interval(bounds, digits)}".rstrip()


def margin(value: float) -> str:
    """Return the margin as `±0.25 %`, without trailing zeros."""
    return f"±{100 * value:.6g} %"


def p_value(value: float | None) -> str:
    """Return a p-value to two digits."""
    if value is None:
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def count(value: float | None) -> str:
    """Return a whole number with thousands separated."""
    return NOTHING if value is None else f"{round(value):,}"


def short_count(value: float) -> str:
    """Return `0.51 M`, `8.03 B` for large counts."""
    for size, unit in _UNITS:
        if value >= size / 2:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return wall time as `50 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plural(n: int, noun: str) -> str:
    """Return `1 seed`, `3 seeds`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def ranges(values: Sequence[int]) -> str:
    """Return sorted whole numbers as `0–3, 7`."""
    spans: list[list[int]] = []
    for value in sorted(set(values)):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
