"""Looking more than once: declared looks with a split error rate, and an e-process valid at any look."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from fp8parity_analysis.paired import Estimate, paired_t

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.gap import FloatArray

PRIOR_VARIANCE = 1.0
"""Variance g of the normal prior on (gap / sd) in the t e-process."""


def look_alphas(looks: tuple[int, ...], alpha: float, spending: str) -> tuple[float, ...]:
    """Return the one-sided size of each declared look; they add up to at most `alpha` (union bound).

    `bonferroni` gives alpha / L each; `obrien_fleming` the increments of Lan and DeMets' (1983) function
    2 - 2 Phi(z_(alpha/2) / sqrt(fraction of seeds)).
    """
    if spending == "bonferroni":
        return tuple(alpha / len(looks) for _ in looks)
    edge = ndtri(1.0 - alpha / 2.0)
    spent = [2.0 * float(ndtr(-edge / math.sqrt(look / looks[-1]))) for look in looks]
    return tuple(now - before for now, before in zip(spent, [0.0, *spent], strict=False))


def current_look(n_seeds: int, looks: tuple[int, ...]) -> int | None:
    """Return the index of the last declared look that `n_seeds` seeds reach, or None before the first."""
    reached = [index for index, look in enumerate(looks) if look <= n_seeds]
    return reached[-1] if reached else None


def look_sizes(criteria: Criteria, n_seeds: int) -> tuple[int, ...]:
    """Return the numbers of seeds below `n_seeds` at which an arm may be looked at."""
    sizes = range(2, n_seeds) if criteria.anytime else criteria.looks
    return tuple(size for size in sizes if size < n_seeds)


def limits_of(criteria: Criteria, max_seeds: int, *, null_df: int = 0) -> dict[int, float]:
    """Return, for each number of seeds with a verdict, the t that the mean gap must exceed.

    Declared looks have Student's quantile at their own size, with `null_df` further degrees of freedom. Without looks
    every number from 2 to `max_seeds` counts; with `anytime` those at which the e-process can reach 1/alpha.
    """
    every = range(2, max_seeds + 1)
    if criteria.anytime:
        limits = {n: anytime_limit(n, criteria.alpha) for n in every}
        return {n: limit for n, limit in limits.items() if math.isfinite(limit)}
    looks = criteria.looks or tuple(every)
    alphas = (
        look_alphas(looks, criteria.alpha, criteria.spending)
        if criteria.looks
        else (criteria.alpha,) * len(looks)
    )
    return {n: float(stdtrit(n - 1 + null_df, 1.0 - alpha)) for n, alpha in zip(looks, alphas, strict=True)}


def log_e_value(t: FloatArray, n: int, prior_variance: float = PRIOR_VARIANCE) -> FloatArray:
    """Return ln of the t e-process at `n` seeds for t-statistics `t` [R].

    Right-Haar prior on sigma, N(0, g) on gap / sigma (Wang and Ramdas 2023, arXiv 2310.03722):
    -ln(1+ng)/2 + (n/2) [ln(1 + t^2/(n-1)) - ln(1 + t^2/((n-1)(1+ng)))]. Reject at E >= 1/alpha.
    """
    grown = 1.0 + n * prior_variance
    x = np.asarray(t, dtype=np.float64) ** 2 / (n - 1)
    return np.asarray(-0.5 * np.log(grown) + 0.5 * n * (np.log1p(x) - np.log1p(x / grown)), dtype=np.float64)


def anytime_limit(n: int, alpha: float, prior_variance: float = PRIOR_VARIANCE) -> float:
    """Return the t at which the t e-process reaches 1/alpha at `n` seeds (two or more).

    Infinite where it cannot reach it: E is at most (1 + ng)^((n-1)/2), which is its limit for large t.
    """
    grown = 1.0 + n * prior_variance
    power = math.exp((2.0 / n) * (math.log(1.0 / alpha) + 0.5 * math.log(grown)))
    if power >= grown:
        return math.inf
    return math.sqrt((n - 1) * (power - 1.0) / (1.0 - power / grown))


def anytime_t(gap: FloatArray, alpha: float, prior_variance: float = PRIOR_VARIANCE) -> Estimate:
    """Return the confidence sequence at n seeds of `gap` [R, n]: the e-process inverted.

    Its one-sided p-values are 1 / E, so they agree with the bounds and hold at any number of seeds too. Unbounded
    while n is too small.
    """
    n = gap.shape[-1]
    if n < 2:
        return paired_t(gap, alpha)
    plain = replace(paired_t(gap, alpha), tail=partial(_e_tail, n=n, prior_variance=prior_variance))
    limit = anytime_limit(n, alpha, prior_variance)
    if math.isinf(limit):
        infinite = np.full(plain.gap.shape, np.inf)
        return replace(plain, lo=-infinite, hi=infinite)
    half = limit * plain.se
    return replace(plain, lo=plain.gap - half, hi=plain.gap + half)


def _e_tail(distance: FloatArray, se: FloatArray, df: float, *, n: int, prior_variance: float) -> FloatArray:
    """Return min(1, 1 / E) where `distance` is positive, else 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(distance > 0, distance / se, 0.0)
    t = np.where(np.isnan(t), 0.0, t)
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(-log_e_value(np.minimum(t, 1e150), n, prior_variance))
    return np.asarray(np.where(distance > 0, np.minimum(1.0, p), 1.0), dtype=np.float64)
