"""The gap between two loss curves as numbers: endpoint, slope, spikes, non-finite stretches.

The last axis is the step (or evaluation) axis everywhere; the axis before it, where there is one, is the
seed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

BLOW_UP_GAP = 0.05
"""A log gap above this for `BLOW_UP_EVALS` evaluations up to the end is a divergence.

Shorter, it is a spike.
"""
BLOW_UP_EVALS = 3

_EXACT_UP_TO = 64
"""Number of sums up to which each is rounded exactly: a single study, not a simulation of thousands."""

SPIKE_WINDOW = 128
SPIKE_MIN_HISTORY = 64
SPIKE_SDS = 6.0
"""A spike is a loss above mean + 6 sd of the window before it, as in OLMo-core's `SkipStepOptimizer`."""


def log_loss(loss: FloatArray) -> FloatArray:
    """Return ln(loss), NaN where the loss is not finite or not positive."""
    usable = np.isfinite(loss) & (loss > 0)
    return np.log(np.where(usable, loss, np.nan))


def stable_sum(values: FloatArray, axis: int = -1) -> FloatArray:
    """Sum along `axis` so precisely that the order of the terms does not matter.

    Few sums are rounded exactly (`math.fsum`), many are made in twofold precision (Neumaier).
    """
    moved = values.swapaxes(axis, -1)
    if moved.size <= _EXACT_UP_TO * moved.shape[-1]:
        sums = [math.fsum(terms) for terms in moved.reshape(-1, moved.shape[-1]).tolist()]
        return np.array(sums).reshape(moved.shape[:-1])
    moved = np.moveaxis(values, axis, 0)
    total = np.zeros(moved.shape[1:])
    correction = np.zeros(moved.shape[1:])
    for term in moved:
        raised = total + term
        swap = np.abs(total) >= np.abs(term)
        correction += np.where(swap, (total - raised) + term, (term - raised) + total)
        total = raised
    return np.asarray(total + correction, dtype=np.float64)


def tail_count(n_evals: int, fraction: float = 0.10) -> int:
    """Return how many of the last evaluations form the endpoint: max(1, round(fraction * n_evals))."""
    return max(1, min(n_evals, round(fraction * n_evals)))


def endpoint(gap: FloatArray, count: int) -> FloatArray:
    """Return the mean over the last `count` points of `gap` [..., K]; masked (NaN) points are left out."""
    return masked_mean(gap[..., -count:])


def masked_mean(values: FloatArray) -> FloatArray:
    """Return the mean over the last axis without NaN; NaN where nothing is left."""
    plain: FloatArray = np.add.reduce(values, axis=-1) / values.shape[-1]
    if not np.isnan(plain).any():
        return plain
    kept = ~np.isnan(values)
    counts = kept.sum(axis=-1)
    sums = np.where(kept, values, 0.0).sum(axis=-1)
    return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), dtype=np.float64)


def seed_mean(gap: FloatArray) -> FloatArray:
    """Return the mean curve over seeds of `gap` [..., n, K], independent of the seeds' order.

    NaN is left out.
    """
    plain = stable_sum(gap, axis=-2) / gap.shape[-2]
    if not np.isnan(plain).any():
        return np.asarray(plain, dtype=np.float64)
    kept = ~np.isnan(gap)
    counts = kept.sum(axis=-2)
    sums = stable_sum(np.where(kept, gap, 0.0), axis=-2)
    return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), dtype=np.float64)


def slope(gap: FloatArray, progress: FloatArray) -> FloatArray:
    """Return the least-squares slope of `gap` [..., K] on `progress` [K] (t/T) over the last half.

    The unit is gap per whole run. NaN where fewer than two points are left.
    """
    half = progress >= 0.5 * progress[-1]
    y, x = gap[..., half], np.broadcast_to(progress[half], gap[..., half].shape)
    kept = ~np.isnan(y)
    counts = np.maximum(kept.sum(axis=-1, keepdims=True), 1)
    x_centred = np.where(kept, x - np.where(kept, x, 0.0).sum(axis=-1, keepdims=True) / counts, 0.0)
    spread = (x_centred**2).sum(axis=-1)
    product = (x_centred * np.where(kept, y, 0.0)).sum(axis=-1)
    enough = spread > 0
    return np.asarray(np.where(enough, product / np.where(enough, spread, 1.0), np.nan), dtype=np.float64)


def blow_up_starts(gap: FloatArray) -> list[int | None]:
    """Return for each row of `gap` [n, K] where a gap above 5 % begins that lasts three evaluations or more.

    It must last up to the last evaluation; None where there is none.
    """
    with np.errstate(invalid="ignore"):
        high = gap > BLOW_UP_GAP
    if gap.shape[1] < BLOW_UP_EVALS or not high[:, -BLOW_UP_EVALS:].all(axis=1).any():
        return [None] * len(gap)
    starts = [trailing_start(row) for row in high]
    return [start if gap.shape[1] - start >= BLOW_UP_EVALS else None for start in starts]


def trailing_start(flags: BoolArray) -> int:
    """Return where the run of True up to the end begins, len(flags) when the last is False."""
    false_at = np.flatnonzero(~flags)
    return int(false_at[-1]) + 1 if len(false_at) else 0


def transient_gaps(gap: FloatArray) -> BoolArray:
    """Mark single inner points of `gap` [..., K] that stand out by more than 5 % from both neighbours."""
    marks = np.zeros(gap.shape, dtype=np.bool_)
    if gap.shape[-1] < 3:
        return marks
    with np.errstate(invalid="ignore"):
        change = np.diff(gap, axis=-1)
        rise, fall = change[..., :-1], -change[..., 1:]
        marks[..., 1:-1] = (np.minimum(rise, fall) > BLOW_UP_GAP) | (np.maximum(rise, fall) < -BLOW_UP_GAP)
    return marks


def spikes(loss: FloatArray) -> BoolArray:
    """Mark spikes of `loss` [..., T]: above mean + 6 sd of the 128 steps before, or not finite but recovered.

    Steps with fewer than 64 finite values in the window are never marked as finite spikes.
    """
    finite = np.isfinite(loss)
    recovered = ~finite & (np.cumsum(finite[..., ::-1], axis=-1)[..., ::-1] > 0)
    scale = np.max(np.abs(loss), axis=-1, keepdims=True, initial=0.0, where=finite)
    scaled = np.where(finite, loss, 0.0) / np.where(scale > 0, scale, 1.0)
    counts = _window_sums(finite.astype(np.float64))
    usable = np.maximum(counts, 1.0)
    centre = scaled.sum(axis=-1, keepdims=True) / np.maximum(finite.sum(axis=-1, keepdims=True), 1)
    centred = np.where(finite, scaled - centre, 0.0)
    mean = _window_sums(centred) / usable
    variance = np.maximum(_window_sums(centred**2) / usable - mean**2, 1e-18)
    high = centred > mean + SPIKE_SDS * np.sqrt(variance)
    return np.asarray((finite & high & (counts >= SPIKE_MIN_HISTORY)) | recovered, dtype=np.bool_)


def _window_sums(values: FloatArray) -> FloatArray:
    """Return at each step the sum over the `SPIKE_WINDOW` steps before it."""
    n_steps = values.shape[-1]
    sums = np.zeros((*values.shape[:-1], n_steps + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    window = sums[..., :n_steps].copy()
    window[..., SPIKE_WINDOW:] -= sums[..., : max(0, n_steps - SPIKE_WINDOW)]
    return window
