"""Which tensors differ over seeds: a t-test per tensor, its variance calibrated by null pairs, and the FDR.

Arrays [n, L] of one number per seed and tensor in, arrays [L] out. The seed is the unit of replication. The variance
of a tensor may be pooled with that of its null pairs (`paired.pooled_t` does the same for the loss); with as few as
three seeds that is what makes a screen of hundreds of tensors find anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr
from scipy.stats import false_discovery_control

from fp8parity_analysis.paired import variance_ratio_interval

FloatArray = npt.NDArray[np.float64]
Method = Literal["bh", "by"]

FDR = 0.10
"""Of the tensors flagged in one family (one statistic, one reduction) this share is false on average."""
MIN_DF = 2
"""Degrees of freedom below which nothing is tested: two seeds alone, or one."""
_SD_OF_FLOOR = 0.1
"""Least standard deviation, as a share of the smallest difference worth a word: counts repeat exactly by chance, and
a variance of zero would make any such repetition certain."""


@dataclass(frozen=True)
class Screen:
    """One family tested over seeds, one entry per tensor [L]; `p` and `q` are NaN where nothing can be tested.

    `effect` is the mean over seeds, `df` the degrees of freedom behind its error, `n` the seeds that have it. `p` is
    that of "the effect exceeds the floor in the harmful direction"; `q` is the FDR-adjusted p.
    """

    effect: FloatArray
    se: FloatArray
    df: FloatArray
    n: FloatArray
    p: FloatArray
    q: FloatArray

    def flagged(self, fdr: float = FDR) -> npt.NDArray[np.bool_]:
        """Return which tensors are flagged at this false discovery rate [L]."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.q <= fdr, dtype=np.bool_)


def _squares(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return mean, sum of squared deviations and count over the known seeds of `values` [n, L]."""
    known = ~np.isnan(values)
    count = known.sum(axis=0).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=0) / count
    squares = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0)
    return mean, squares, count


def null_squares(nulls: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return sum of squares and degrees of freedom [L] of null differences [m, L], whose mean is zero by design."""
    known = ~np.isnan(nulls)
    return np.where(known, nulls**2, 0.0).sum(axis=0), known.sum(axis=0).astype(np.float64)


def screen(
    values: FloatArray,
    *,
    harm: int,
    floor: float = 0.0,
    nulls: FloatArray | None = None,
    null_scale: float = 1.0,
    reference_share: float = 0.0,
    method: Method = "bh",
) -> Screen:
    """Test `values` [n, L] against the floor, tensor by tensor.

    `nulls` [m, L] are matched null differences (None: the plain t), `null_scale` turns their variance into that of one
    value, `reference_share` is the error variance of a subtracted reference in units of that of one value (1/m where
    the mean of m nulls was subtracted). `harm` is the direction tested, 0 for both. The floor is part of the
    hypothesis, |effect| <= floor, so the FDR is that of "differs by more than the floor".
    """
    mean, squares, n = _squares(values)
    df = n - 1
    if nulls is not None and len(nulls):
        more, more_df = null_squares(nulls)
        squares, df = squares + null_scale * more, df + more_df
    with np.errstate(invalid="ignore", divide="ignore"):
        sd = np.maximum(np.sqrt(squares / df), _SD_OF_FLOOR * floor)
        se = sd * np.sqrt(1.0 / n + reference_share)
    p = _p_value(mean, se, df, harm, floor)
    p[(df < MIN_DF) | (n < 1)] = np.nan
    return Screen(mean, se, df, n, p, adjusted(p, method))


def _p_value(mean: FloatArray, se: FloatArray, df: FloatArray, harm: int, floor: float) -> FloatArray:
    """Return P(T > (effect - floor) / se), doubled where both directions are harm."""
    distance = (np.abs(mean) if harm == 0 else harm * mean) - floor
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where((se == 0) & (distance == 0), 0.0, distance / se)
        tail = stdtr(np.maximum(df, 1.0), -ratio)
    return np.minimum(1.0, 2.0 * tail) if harm == 0 else np.asarray(tail, dtype=np.float64)


def adjusted(p: FloatArray, method: Method = "bh") -> FloatArray:
    """Return FDR-adjusted p-values [L]: Benjamini-Hochberg, or Benjamini-Yekutieli for any dependence; NaN stays."""
    q = np.full(p.shape, np.nan)
    known = ~np.isnan(p)
    if known.any():
        q[known] = false_discovery_control(np.clip(p[known], 0.0, 1.0), method=method)
    return q


def too_quiet(values: FloatArray, nulls: FloatArray, null_scale: float, alpha: float = 0.05) -> bool:
    """Return whether the nulls [m, L] vary too little to be the noise of `values` [n, L]: they are then not pooled.

    The ratio is that of the median variances over tensors; its interval is that of a single tensor, because the
    tensors of one run move together and count as little more than one.
    """
    _, squares, n = _squares(values)
    more, more_df = null_squares(nulls)
    with np.errstate(invalid="ignore", divide="ignore"):
        variances, null_variances = squares / (n - 1), null_scale * more / more_df
    both = np.isfinite(variances) & np.isfinite(null_variances) & (n > 1)
    if not both.any():
        return False
    df, null_df = int(np.median(n[both])) - 1, int(np.median(more_df[both]))
    ratio = variance_ratio_interval(
        float(np.median(variances[both])), df, float(np.median(null_variances[both])), null_df, alpha
    )
    return ratio[1] > 1.0
