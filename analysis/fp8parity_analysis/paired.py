"""Inference over seeds, vectorised over replicates: arrays [R, n] of one gap per seed in, arrays [R] out.

The paired t interval is Schuirmann's (1987) two one-sided tests read off one interval; the seed is the unit
of replication. `alpha` is always the size of one one-sided test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.special import fdtri, ndtr, ndtri, stdtr, stdtrit

from fp8parity_analysis.gap import FloatArray, stable_sum

EXACT_FLIPS_UP_TO = 12
"""Sign flips are enumerated up to this many seeds; beyond it the flip test is not offered."""


def upper_tail(distance: FloatArray, se: FloatArray, df: float) -> FloatArray:
    """Return P(T > distance / se), T Student with `df` (normal if infinite); exact at se = 0.

    NaN if df is 0.
    """
    if df <= 0:
        return np.full(np.shape(distance), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = distance / se
    ratio = np.where((se == 0) & (distance == 0), 0.0, ratio)
    return np.asarray(ndtr(-ratio) if np.isinf(df) else stdtr(df, -ratio), dtype=np.float64)


@dataclass(frozen=True)
class Estimate:
    """Mean gap with its interval, one entry per replicate [R].

    `se` NaN and infinite bounds where nothing is known.

    `df` is infinite for a stated noise. `lo` and `hi` bound two one-sided tests of size `alpha` each. `tail` turns
    (distance, se, df) into the one-sided p-value that belongs to these bounds.
    """

    gap: FloatArray
    se: FloatArray
    lo: FloatArray
    hi: FloatArray
    df: float
    alpha: float
    tail: Callable[[FloatArray, FloatArray, float], FloatArray] = field(default=upper_tail, repr=False)

    def p_greater(self, threshold: float = 0.0) -> FloatArray:
        """Return the one-sided p-value of "the gap exceeds `threshold`" [R]."""
        return self.tail(self.gap - threshold, self.se, self.df)

    def p_less(self, threshold: float = 0.0) -> FloatArray:
        """Return the one-sided p-value of "the gap is below `threshold`" [R]."""
        return self.tail(threshold - self.gap, self.se, self.df)

    def p_equivalent(self, margin: float) -> FloatArray:
        """Return the TOST p-value of "the gap lies inside +-margin" [R]: the larger of the two one-sided."""
        return np.maximum(self.p_less(margin), self.p_greater(-margin))


def _mean(values: FloatArray) -> FloatArray:
    return np.asarray(stable_sum(values) / values.shape[-1], dtype=np.float64)


def sum_of_squares(values: FloatArray) -> FloatArray:
    """Return the sum of squared deviations from the mean over the last axis, independent of the order."""
    return stable_sum((values - _mean(values)[..., None]) ** 2)


def _estimate(gap: FloatArray, se: FloatArray, df: float, alpha: float, quantile: float) -> Estimate:
    half = quantile * se
    return Estimate(gap=gap, se=se, lo=gap - half, hi=gap + half, df=df, alpha=alpha)


def paired_t(gap: FloatArray, alpha: float) -> Estimate:
    """Return the paired t interval for `gap` [R, n]; with one seed the bounds are infinite."""
    n = gap.shape[-1]
    if n < 2:
        return unknown(_mean(gap), alpha)
    se = np.sqrt(sum_of_squares(gap) / (n - 1) / n)
    return _estimate(_mean(gap), se, float(n - 1), alpha, float(stdtrit(n - 1, 1.0 - alpha)))


def unknown(gap: FloatArray, alpha: float) -> Estimate:
    """Return an estimate without any measure of its error: unbounded, no degree of freedom."""
    infinite = np.full(gap.shape, np.inf)
    return Estimate(gap=gap, se=np.full(gap.shape, np.nan), lo=-infinite, hi=infinite, df=0.0, alpha=alpha)


def pooled_t(gap: FloatArray, null_ss: FloatArray, null_df: int, alpha: float) -> Estimate:
    """Return the t interval whose variance is pooled with that of null pairs.

    `gap` [R, n]; `null_ss` [R] is the null pairs' sum of squares, scaled to the variance of one gap; the
    variance is [(n-1) s^2 + null_ss] / (n-1+null_df). Valid only if the null carries the noise of a gap.
    """
    n = gap.shape[-1]
    df = n - 1 + null_df
    if df < 1:
        return unknown(_mean(gap), alpha)
    se = np.sqrt((sum_of_squares(gap) + null_ss) / df / n)
    return _estimate(_mean(gap), se, float(df), alpha, float(stdtrit(df, 1.0 - alpha)))


def stated_noise(gap: FloatArray, pair_sd: float, alpha: float, df: float = np.inf) -> Estimate:
    """Return the interval for `gap` [R, n] when the sd of one gap comes from elsewhere.

    Normal where the sd is stated as known, Student's t with `df` where an earlier study estimated it.
    """
    se = np.full(gap.shape[:-1], pair_sd / np.sqrt(gap.shape[-1]))
    quantile = float(ndtri(1.0 - alpha) if np.isinf(df) else stdtrit(df, 1.0 - alpha))
    return _estimate(_mean(gap), se, df, alpha, quantile)


def holm(p_values: npt.ArrayLike) -> FloatArray:
    """Return Holm's (1979) step-down adjusted p-values of `p_values` [k].

    NaN stays NaN and is not counted.
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(p.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return adjusted


@lru_cache(maxsize=16)
def all_signs(n: int) -> FloatArray:
    """Return all 2^n sign patterns [2^n, n], all positive first."""
    return np.array(list(product((1.0, -1.0), repeat=n)))


def sign_flip_p(values: FloatArray) -> float | None:
    """Return the exact one-sided sign-flip p-value of "the mean of `values` [n] is positive".

    None below five seeds, where it cannot reach 5 % (smallest p is 2^-n), and above `EXACT_FLIPS_UP_TO`.
    """
    n = len(values)
    if not 5 <= n <= EXACT_FLIPS_UP_TO:
        return None
    sums = all_signs(n) @ values
    slack = 1e-12 * np.abs(values).sum()
    return float(np.mean(sums >= sums[0] - slack))


def variance_ratio_interval(
    variance: float, df: int, null_variance: float, null_df: int, alpha: float = 0.05
) -> tuple[float, float, float]:
    """Return variance / null_variance with its interval of level 1 - 2 alpha, from the F distribution.

    Infinite when the null has no variance at all; (nan, 0, inf) without degrees of freedom.
    """
    if df < 1 or null_df < 1:
        return float("nan"), 0.0, float("inf")
    if null_variance == 0:
        return (
            (float("inf"), float("inf"), float("inf")) if variance > 0 else (float("nan"), 0.0, float("inf"))
        )
    ratio = variance / null_variance
    low, high = fdtri(df, null_df, 1.0 - alpha), fdtri(df, null_df, alpha)
    return ratio, ratio / float(low), ratio / float(high)
