"""Where a gap begins to grow (a least-squares hinge), and whether that is a soft divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.paired import paired_t

if TYPE_CHECKING:
    from fp8parity_analysis.gap import BoolArray, FloatArray

SLOPE_ALPHA = 0.01
"""Size of the one-sided test on the slope of the gap over the last half."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Growth:
    """How the gap moved, one entry per replicate [R].

    `slope` is the mean over seeds in gap per whole run; `p_up` and `p_down` are one-sided over seeds (NaN
    for one seed); `onset` is the hinge's index on the grid; `before` the mean gap up to it;
    `rise` endpoint minus before.
    """

    slope: FloatArray
    p_up: FloatArray
    p_down: FloatArray
    onset: IntArray
    before: FloatArray
    rise: FloatArray

    @property
    def grows(self) -> BoolArray:
        """Whether the slope is positive at the 1 % level."""
        return np.asarray(self.p_up < SLOPE_ALPHA, dtype=np.bool_)

    @property
    def shrinks(self) -> BoolArray:
        """Whether the slope is negative at the 1 % level."""
        return np.asarray(self.p_down < SLOPE_ALPHA, dtype=np.bool_)


def hinge_onset(curve: FloatArray, progress: FloatArray) -> IntArray:
    """Return the grid index of tau in a + b * max(0, t - tau), b > 0, by least squares, for `curve` [..., K].

    Masked points are filled by their predecessor. With fewer than three points the answer is index 0. Sums from
    the end give the fit at every tau at once, in time linear in K.
    """
    n_points = curve.shape[-1]
    if n_points < 3:
        return np.zeros(curve.shape[:-1], dtype=np.int64)
    y = _fill(curve)
    y = y - y.mean(axis=-1, keepdims=True)
    x = progress - progress[-1]
    tau, count = x[1:-1], np.arange(n_points - 1, 1, -1)
    sum_x, sum_xx = _tail_sums(x), _tail_sums(x * x)
    hinge_sum = sum_x - tau * count
    hinge_squares = sum_xx - 2.0 * tau * sum_x + tau**2 * count - hinge_sum**2 / n_points
    product = _tail_sums(x * y) - tau * _tail_sums(y)
    score = product / np.sqrt(np.maximum(hinge_squares, 1e-300))
    return np.asarray(np.argmax(score, axis=-1) + 1, dtype=np.int64)


def _tail_sums(values: FloatArray) -> FloatArray:
    """Return sums over the points from each inner grid point on [..., K-2]."""
    sums: FloatArray = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return sums[..., 1:-1]


def _fill(curve: FloatArray) -> FloatArray:
    missing = np.isnan(curve)
    if not missing.any():
        return curve
    index = np.where(missing, 0, np.arange(curve.shape[-1]))
    np.maximum.accumulate(index, axis=-1, out=index)
    return np.nan_to_num(np.take_along_axis(curve, index, axis=-1), nan=0.0)


def onset_interval(gap: FloatArray, progress: FloatArray) -> tuple[int, int]:
    """Return the range of the onset's index over leave-one-seed-out fits of `gap` [n, K].

    It reaches at least one evaluation each way.

    With fewer than three seeds only the single-evaluation resolution is given.
    """
    n_seeds, n_evals = gap.shape
    fits = [int(hinge_onset(gaps.seed_mean(gap), progress))]
    if n_seeds >= 3:
        kept = [np.delete(gap, seed, axis=0) for seed in range(n_seeds)]
        fits += [int(hinge_onset(gaps.seed_mean(rest), progress)) for rest in kept]
    return max(0, min(min(fits), fits[0] - 1)), min(n_evals - 1, max(max(fits), fits[0] + 1))


def growth_of(
    gap: FloatArray, progress: FloatArray, endpoint_gap: FloatArray, slopes: FloatArray | None = None
) -> Growth:
    """Return how the gap [R, n, K] moves on the grid `progress` [K] (t/T).

    `endpoint_gap` [R] is its mean endpoint; `slopes` [R, n] are each seed's, where they are known already.
    """
    trend = paired_t(gaps.slope(gap, progress) if slopes is None else slopes, SLOPE_ALPHA)
    mean_curve = gaps.seed_mean(gap)
    onset = hinge_onset(mean_curve, progress)
    ahead = np.arange(gap.shape[-1]) <= onset[..., None]
    before = gaps.masked_mean(np.where(ahead, mean_curve, np.nan))
    return Growth(
        slope=trend.gap,
        p_up=trend.p_greater(),
        p_down=trend.p_less(),
        onset=onset,
        before=before,
        rise=endpoint_gap - before,
    )


def soft_divergence(lo: FloatArray, growth: Growth, margin: float) -> BoolArray:
    """Return where a gap above the margin is a soft divergence [R].

    The interval lies above the margin, the slope is significant, the gap before the onset was below the
    margin, and the rise since then exceeds it.
    """
    with np.errstate(invalid="ignore"):
        late = (growth.before < margin) & (growth.rise > margin)
        return np.asarray((lo > margin) & growth.grows & late, dtype=np.bool_)
