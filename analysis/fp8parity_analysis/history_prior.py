"""What the null pairs of a nightly predict of its noise, for a device that repeats itself, and the test of a step.

On such a device the nights between two changes of the software are one draw of the noise; the spread of the draws is
then known from the null pairs within a night and from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import fdtr, fdtrc, stdtr

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

BASELINE_LEAST = 5
"""Nights that teach before any is tested, and draws from which on their own spread counts."""
REPEATS_ITSELF = 0.1
"""Draws that vary less than this share of what the null pairs predict come from a device that repeats itself."""
_EXACT_DF = 1e9


@dataclass(frozen=True)
class Prior:
    """What the null pairs predict of the draws of each series on one night, arrays [R, S].

    `sd`: of one draw, NaN if not known; `df`: its degrees of freedom, infinite if it is exact; `variance` [S]: the
    series is itself the cube root of a variance with `df` degrees of freedom per draw, and `sd` is not read.
    """

    sd: FloatArray
    df: FloatArray
    variance: BoolArray


def p_value(
    window: FloatArray, mean: FloatArray, sd: FloatArray, n: FloatArray, k: int, prior: Prior
) -> FloatArray:
    """Return the two-sided p of `window`, the mean of k draws, against `mean` and `sd` of the n draws before it.

    Where there are few draws, or they lie closer together than noise can, the prior stands in for their spread: a t
    with its degrees of freedom. A variance is held against the one before it by an F; means of several cube roots
    are put on the scale of one by Wilson and Hilferty's expectation, 1 - 2 / (9 df). Without a prior, where nothing
    ever varied, every step counts.
    """
    step = window - mean
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(step) / (sd * np.sqrt(1.0 / k + 1.0 / n))
        own = 2.0 * stdtr(np.maximum(n - 1, 1), -np.where((step == 0) & (sd == 0), 0.0, t))
        expected = np.where(prior.variance, np.abs(mean) * np.sqrt(2.0 / (9.0 * prior.df)), prior.sd)
        close = sd < REPEATS_ITSELF * np.nan_to_num(expected)
        n_draws, k_draws = np.where(close, 1.0, n), np.where(close, 1.0, float(k))
        t = np.abs(step) / (expected * np.sqrt(1.0 / k_draws + 1.0 / n_draws))
        predicted = 2.0 * stdtr(np.minimum(prior.df, _EXACT_DF), -t)
        top, bottom = k_draws * prior.df, n_draws * prior.df
        ratio = (window / mean * (1 - 2 / (9 * bottom)) / (1 - 2 / (9 * top))) ** 3
        of_variance = 2.0 * np.minimum(fdtr(top, bottom, ratio), fdtrc(top, bottom, ratio))
    instead = np.where(prior.variance, of_variance, predicted)
    few = (n < BASELINE_LEAST) | close
    return np.asarray(np.where(few & np.isfinite(instead), instead, own), dtype=np.float64)


def pooled(sd: FloatArray, df: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the predicted sds [N, S] with `df` [N, S] degrees of freedom, each pooled with those of the nights before.

    An sd that repeats itself is the same draw and counts once. A night of an earlier version has no degrees of freedom:
    those of the next night that has them, the matrix being the same, or else 1, the most cautious.
    """
    sd_out, df_out = sd.copy(), df.copy()
    for t in reversed(range(len(df) - 1)):
        df_out[t] = np.where(np.isfinite(df_out[t]), df_out[t], df_out[t + 1])
    df_out[np.isnan(df_out)] = 1.0
    squares, total = np.zeros(sd.shape[1:]), np.zeros(sd.shape[1:])
    last = np.full(sd.shape[1:], np.nan)
    for t in range(len(sd)):
        known = np.isfinite(sd[t])
        fresh = known & (sd[t] != last)
        squares = squares + np.where(fresh, df_out[t] * np.nan_to_num(sd[t]) ** 2, 0.0)
        total = total + np.where(fresh, df_out[t], 0.0)
        last = np.where(fresh, sd[t], last)
        sd_out[t] = np.where(known, np.sqrt(squares / np.maximum(total, 1.0)), np.nan)
        df_out[t] = np.where(known, total, df_out[t])
    return sd_out, df_out
