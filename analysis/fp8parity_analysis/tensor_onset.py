"""Since when a tensor is off, how long before the loss, and how sure one may be of either.

A paired trajectory leaves the null envelope when its harmful |z| stays above the envelope for `LASTING` probes in a
row. The envelope is simultaneous over all tensors and probes: the largest such |z| of any null pair. With m null pairs
a further one exceeds it with probability 1 / (m + 1) at most (exchangeability), and that is the rate stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis.tensor_reduce import nanmean, robust_change

if TYPE_CHECKING:
    from collections.abc import Sequence

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LASTING = 3
"""Probes in a row that a path must stay outside."""
QUANTILE = 0.99
"""Of the null pairs' largest |z|; with fewer than a hundred null pairs that is the largest of all."""
MIN_SEEDS_FOR_SIGN_TEST = 5
"""Seeds below which no sign test reaches 5 % (its smallest p is 2^-n)."""
_DESCRIPTIVE_SDS = 4.0
"""Own standard deviations that count as outside where no null pair gives an envelope."""


@dataclass(frozen=True)
class Envelope:
    """What counts as outside: |path| > `limit` [L], on the scale tested.

    `false_alarms` bounds the share of null pairs in which any tensor leaves it, None where nothing bounds it.
    """

    limit: FloatArray
    false_alarms: float | None
    n_nulls: int


def lasting(z: FloatArray) -> FloatArray:
    """Return the least of `z` over every `LASTING` probes in a row, at the first of them [..., K - LASTING + 1]."""
    starts = z.shape[-1] - LASTING + 1
    if starts < 1:
        return np.zeros((*z.shape[:-1], 0))
    least = np.asarray(z[..., :starts], dtype=np.float64)
    for later in range(1, LASTING):
        least = np.minimum(least, z[..., later : later + starts])
    return least


def _rms(paths: Sequence[FloatArray]) -> FloatArray:
    squares = np.stack([nanmean(path**2, -1) for path in paths])
    return np.sqrt(nanmean(squares, 0))


def envelope_of(nulls: Sequence[FloatArray], floor: float, scale: float = 1.0) -> Envelope | None:
    """Return the envelope of null paths [L, K_j], None with fewer than two.

    `floor` is the smallest difference worth a word and the least limit; `scale` turns a null's sd into that of a pair.
    Each null is measured by the spread of the others, as the pair will be measured by a spread it had no part in.
    """
    if len(nulls) < 2:
        return None
    least = floor / _DESCRIPTIVE_SDS
    largest = []
    for index, path in enumerate(nulls):
        others = np.fmax(_rms([item for at, item in enumerate(nulls) if at != index]), least)
        held = lasting(np.abs(path) / others[:, None])
        held = held[np.isfinite(held)]
        largest.append(float(held.max()) if held.size else 0.0)
    limit_z = float(np.quantile(largest, QUANTILE, method="higher"))
    sd = np.fmax(_rms(nulls), least)
    false_alarms = max(1.0 - QUANTILE, 1.0 / (len(nulls) + 1))
    return Envelope(np.fmax(scale * limit_z * sd, floor), false_alarms, len(nulls))


def own_envelope(paths: Sequence[FloatArray], floor: float) -> Envelope:
    """Return what is outside by the paths' own probe-to-probe noise: a description, without a false-alarm rate."""
    if not paths:
        return Envelope(np.zeros(0), None, 0)
    noise = nanmean(np.stack([robust_change(path) for path in paths]), 0)
    return Envelope(np.fmax(_DESCRIPTIVE_SDS * noise, floor), None, 0)


def first_outside(path: FloatArray, limit: FloatArray, harm: int) -> IntArray:
    """Return the index of the first probe of `path` [L, K] that begins a lasting stay outside [L]; -1 for none."""
    excess = np.abs(path) if harm == 0 else harm * path
    held = lasting(np.where(np.isnan(excess), -np.inf, excess)) > limit[:, None]
    if not held.shape[-1]:
        return np.full(path.shape[0], -1, dtype=np.int64)
    return np.where(held.any(axis=-1), held.argmax(axis=-1), -1).astype(np.int64)


@dataclass(frozen=True)
class Onset:
    """Median over seeds of the first step outside, and the probe before it, between which the truth lies.

    `step` is None where no seed leaves. `lead` is the median over seeds of the loss's onset minus this one, in steps;
    `ahead` of `compared` seeds leave before their loss does; `p` is the sign test's, None with fewer than five seeds.
    """

    step: int | None
    resolution: int
    n_seeds: int
    lead: float | None = None
    ahead: int = 0
    compared: int = 0
    p: float | None = None

    @property
    def share_ahead(self) -> float:
        """Share of the compared seeds in which the tensor leaves first; zero where none could be compared."""
        return self.ahead / self.compared if self.compared else 0.0


def resolution_at(steps: IntArray, index: int) -> int:
    """Return the steps between a probe and the one before it (before the first: since the start)."""
    return int(steps[index] - (steps[index - 1] if index > 0 else 0))


def onset_of(found: Sequence[tuple[int, int, int]], loss_onsets: dict[int, int]) -> Onset:
    """Return the onset over seeds from (seed, step, resolution) of each that leaves, against the loss's by seed."""
    if not found:
        return Onset(None, 0, 0)
    ranked = sorted((step, resolution) for _, step, resolution in found)
    step, resolution = ranked[(len(ranked) - 1) // 2]  # the lower median: a step that was really probed
    leads = [loss_onsets[seed] - at for seed, at, _ in found if seed in loss_onsets]
    if not leads:
        return Onset(step, resolution, len(found))
    ahead = sum(lead > 0 for lead in leads)
    return Onset(
        step,
        resolution,
        len(found),
        float(np.median(leads)),
        ahead,
        len(leads),
        sign_test_p(ahead, len(leads)),
    )


def sign_test_p(ahead: int, n: int) -> float | None:
    """Return P(at least `ahead` of `n` | either order equally likely); None with fewer than five seeds."""
    if n < MIN_SEEDS_FOR_SIGN_TEST:
        return None
    from scipy.stats import binom

    return float(binom.sf(ahead - 1, n, 0.5))
