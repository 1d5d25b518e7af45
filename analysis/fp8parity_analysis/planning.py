"""How many seeds, and what can be seen with the seeds there are. numpy and scipy only; scipy on first use.

`sd` is always the sd of one gap (a pair), in the unit of `effect` and `margin`; `alpha` is one-sided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

Goal = Literal["worse", "equivalent"]

MAX_SEEDS = 30
DEFAULT_SEEDS = 5
POWER = 0.8
ON_THE_MARGIN = 0.25
"""A gap closer to the margin than this share of it is said to sit on the margin."""


def pair_sd(run_sd: float, replicas_test: int = 1, replicas_control: int = 1) -> float:
    """Return the sd of a gap whose arms average this many runs of sd `run_sd` each, no interaction."""
    return run_sd * math.sqrt(1.0 / replicas_test + 1.0 / replicas_control)


def half_width(n: int, sd: float, *, alpha: float = 0.05, null_pairs: int = 0) -> float:
    """Return the expected half-width of the interval at `n` seeds (t quantile times sd / sqrt(n))."""
    from scipy.special import stdtrit

    df = n - 1 + null_pairs
    return math.inf if df < 1 else float(stdtrit(df, 1.0 - alpha)) * sd / math.sqrt(n)


def power_worse(
    effect: float,
    n: int,
    sd: float,
    *,
    alpha: float = 0.05,
    null_pairs: int = 0,
    critical: float | None = None,
) -> float:
    """Return the chance that a true gap of `effect` is found worse than zero (noncentral t).

    `critical` is the t that must be exceeded, where it is not Student's quantile at `alpha`.
    """
    from scipy.special import stdtrit

    df = n - 1 + null_pairs
    if df < 1:
        return 0.0
    if sd == 0:
        return 1.0 if effect > 0 else 0.0
    if critical is None:
        critical = float(stdtrit(df, 1.0 - alpha))
    return _exceeds(critical, df, effect / sd * math.sqrt(n))


_ROUTINE_UP_TO = 30.0
"""Noncentrality up to which scipy's distribution function is used."""


def _exceeds(critical: float, df: int, noncentrality: float) -> float:
    """Return P(T > critical) for a noncentral T = (Z + noncentrality) / sqrt(chi^2 / df).

    Beyond `_ROUTINE_UP_TO` as the mean over Z of P(chi^2 < df ((Z + noncentrality) / critical)^2), by Gauss-Hermite
    quadrature: Z is small beside the noncentrality there, so the integrand is smooth.
    """
    from scipy.special import chdtr, nctdtr

    if noncentrality <= _ROUTINE_UP_TO:
        return 1.0 - float(nctdtr(df, noncentrality, critical))
    z, weights = _normal_nodes(64)
    shifted = np.maximum(z + noncentrality, 0.0)
    return float(np.sum(weights * chdtr(df, df * (shifted / critical) ** 2)))


@lru_cache(maxsize=1)
def _normal_nodes(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


@lru_cache(maxsize=4)
def _nodes(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1.0) / 2.0, weights / 2.0


def power_equivalent(
    margin: float,
    n: int,
    sd: float,
    *,
    effect: float = 0.0,
    alpha: float = 0.05,
    null_pairs: int = 0,
    critical: float | None = None,
) -> float:
    """Return the chance that TOST finds equivalence within `margin` when the true gap is `effect`.

    Integrates over the distribution of the estimated sd: P(|mean| + q s / sqrt(n) < margin), Gauss-Legendre
    over its probability; q is `critical`, or else Student's quantile at `alpha`.
    """
    from scipy.special import chdtri, ndtr, stdtrit

    df = n - 1 + null_pairs
    if df < 1:
        return 0.0
    if sd == 0:
        return 1.0 if abs(effect) < margin else 0.0
    probability, weights = _nodes(400)
    estimated = sd * np.sqrt(chdtri(df, 1.0 - probability) / df)
    limit = float(stdtrit(df, 1.0 - alpha)) if critical is None else critical
    room = (margin - limit * estimated / math.sqrt(n)) * math.sqrt(n) / sd
    shift = effect * math.sqrt(n) / sd
    inside = np.where(room > 0, ndtr(room - shift) - ndtr(-room - shift), 0.0)
    return float(np.sum(weights * inside))


def seeds_needed(
    effect: float,
    sd: float,
    *,
    goal: Goal = "worse",
    alpha: float = 0.05,
    power: float = POWER,
    null_pairs: int = 0,
    max_seeds: int = MAX_SEEDS,
) -> int | None:
    """Return the fewest seeds with the wanted power, or None above `max_seeds`.

    `goal="worse"`: a true gap of `effect` is found worse than zero. `goal="equivalent"`: `effect` is the
    margin, the true gap is zero.
    """
    smallest = 1 if null_pairs else 2
    for n in range(smallest, max_seeds + 1):
        reached = (power_worse if goal == "worse" else power_equivalent)(
            effect, n, sd, alpha=alpha, null_pairs=null_pairs
        )
        if reached >= power:
            return n
    return None


def detectable_gap(
    n: int,
    sd: float,
    *,
    alpha: float = 0.05,
    power: float = POWER,
    null_pairs: int = 0,
    critical: float | None = None,
) -> float | None:
    """Return the smallest true gap that `n` seeds find worse than zero with the wanted power.

    `critical` is the t that must be exceeded, where it is not Student's quantile at `alpha`. None where no test is
    possible (one seed without null pairs, an infinite `critical`). Bisection, relative precision 1e-9.
    """
    if n - 1 + null_pairs < 1 or critical == math.inf:
        return None
    return sd * _detectable_ratio(n, alpha, power, null_pairs, critical)


@lru_cache(maxsize=256)
def _detectable_ratio(n: int, alpha: float, power: float, null_pairs: int, critical: float | None) -> float:
    """Return the detectable gap in units of the sd."""

    def reached(ratio: float) -> bool:
        return power_worse(ratio, n, 1.0, alpha=alpha, null_pairs=null_pairs, critical=critical) >= power

    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if not reached(middle):
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class SeedAdvice:
    """How many seeds in all would settle the question, or that none up to `MAX_SEEDS` would."""

    seeds: int | None
    on_the_margin: bool


def seeds_to_settle(
    gap: float,
    sd: float,
    df: float,
    n: int,
    margin: float,
    *,
    alpha: float = 0.05,
    null_pairs: int = 0,
    critical: Mapping[int, float] | None = None,
) -> SeedAdvice:
    """Return the smallest n' > n at which the measured gap would be told from the margin.

    (t_(1-alpha) + t_b) s_u / sqrt(n') <= ||gap| - margin|, b = 0.8, or 0.9 when the gap is near zero and both
    sides matter; s_u is the upper 80 % limit of the sd, because at few seeds the sd itself is too optimistic
    half of the time. `critical` gives, in place of t_(1-alpha), the t to exceed at each n' that gets a verdict.
    """
    from scipy.special import chdtri, stdtrit

    upper_sd = sd if math.isinf(df) else sd * math.sqrt(df / float(chdtri(df, 0.8)))
    distance = abs(abs(gap) - margin)
    beta = 0.9 if abs(gap) < margin / 10 else POWER
    totals = range(max(n + 1, 2), MAX_SEEDS + 1)
    for total in totals if critical is None else sorted(total for total in critical if total > n):
        freedom = total - 1 + null_pairs
        limit = float(stdtrit(freedom, 1.0 - alpha)) if critical is None else critical[total]
        if (limit + float(stdtrit(freedom, beta))) * upper_sd / math.sqrt(total) <= distance:
            return SeedAdvice(total, on_the_margin=False)
    return SeedAdvice(None, on_the_margin=distance <= ON_THE_MARGIN * margin)
