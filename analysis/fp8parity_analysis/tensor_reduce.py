"""A paired trajectory of a tensor statistic in three numbers: its level at the end, its drift, its largest jump."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

REDUCTIONS = ("level", "drift", "jump")
TAIL_FRAC, MIN_TAIL = 0.10, 3
"""The level is the mean of the last tenth of the probes, of at least three."""
JUMP_WIDTH = 2
"""w: probes on each side of a jump, which is a change over 2w probes."""


def quietly(function: object, *arguments: object, **options: object) -> FloatArray:
    """Call a NaN-aware reduction; a tensor without any number gives NaN, which needs no warning."""
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(function(*arguments, **options), dtype=np.float64)  # type: ignore[operator]


def nanmean(values: FloatArray, axis: int) -> FloatArray:
    """Return the mean of what is known along an axis, NaN where nothing is."""
    return quietly(np.nanmean, values, axis=axis)


def nanmedian(values: FloatArray, axis: int) -> FloatArray:
    """Return the median of what is known along an axis, NaN where nothing is."""
    if not np.isnan(values).any() and values.size:
        return _median(values, axis)
    return quietly(np.nanmedian, values, axis=axis)


def _median(values: FloatArray, axis: int) -> FloatArray:
    """Return `numpy.median` of values without NaN; without its own search for NaN it takes two thirds of the time."""
    high = values.shape[axis] // 2
    low = high - 1 + values.shape[axis] % 2
    parted = np.partition(values, sorted({low, high}), axis=axis)
    middle: FloatArray = (parted.take(low, axis) + parted.take(high, axis)) / 2.0
    return middle if low != high else np.asarray(parted.take(high, axis), dtype=np.float64)


def tail_count(n_probes: int) -> int:
    """Return how many of `n_probes` probes form the level."""
    return min(n_probes, max(MIN_TAIL, round(TAIL_FRAC * n_probes)))


def level(paths: FloatArray) -> FloatArray:
    """Return the mean of `paths` [L, K] over the tail [L]."""
    n_probes = paths.shape[-1]
    if not n_probes:
        return np.full(paths.shape[:-1], np.nan)
    return nanmean(paths[..., n_probes - tail_count(n_probes) :], -1)


def drift(paths: FloatArray, steps: npt.NDArray[np.int64]) -> FloatArray:
    """Return the change of `paths` [L, K] over the last half of the run [L]: Theil-Sen slope times that half.

    The slope is the median of the slopes between all pairs of probes (Sen 1968; `scipy.stats.theilslopes` computes
    the same for one series). NaN with fewer than three probes there.
    """
    late = steps > (steps[0] + steps[-1]) / 2 if len(steps) else np.zeros(0, np.bool_)
    y, x = paths[..., late], steps[late].astype(np.float64)
    if len(x) < 3:
        return np.full(paths.shape[:-1], np.nan)
    lags = range(1, len(x))
    slopes = np.concatenate([(y[..., lag:] - y[..., :-lag]) / (x[lag:] - x[:-lag]) for lag in lags], axis=-1)
    return np.asarray(nanmedian(slopes, -1) * (x[-1] - x[0]), dtype=np.float64)


def changes(paths: FloatArray, width: int = JUMP_WIDTH) -> FloatArray:
    """Return, at each inner probe, the mean of the next `width` values minus that of the last [L, K - 2 width + 1]."""
    n_probes = paths.shape[-1]
    if n_probes < 2 * width:
        return np.full((*paths.shape[:-1], 0), np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(paths, width, axis=-1).mean(axis=-1)
    return np.asarray(windows[..., width:] - windows[..., :-width], dtype=np.float64)


def jump_size(paths: FloatArray, harm: int = 0) -> FloatArray:
    """Return the largest change over 2w probes of `paths` [L, K] in the harmful direction (0: either) [L]."""
    steps = changes(paths)
    steps = np.abs(steps) if harm == 0 else np.maximum(harm * steps, 0.0)
    if not steps.shape[-1]:
        return np.full(paths.shape[:-1], np.nan)
    return quietly(np.nanmax, steps, axis=-1)


def rms_change(paths: FloatArray) -> FloatArray:
    """Return the rms of the changes of `paths` [L, K] over 2w probes [L]: the unit of a jump under the null."""
    return np.asarray(np.sqrt(nanmean(changes(paths) ** 2, -1)), dtype=np.float64)


def robust_change(paths: FloatArray) -> FloatArray:
    """Return 1.4826 times the median absolute change [L]: the unit of a jump where no replica gives one."""
    steps = np.abs(changes(paths))
    return 1.4826 * nanmedian(steps, -1) if steps.shape[-1] else np.full(paths.shape[:-1], np.nan)
