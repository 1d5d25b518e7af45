"""What a gap costs in training tokens, and whether the speed of FP8 pays for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fp8parity_analysis.gap import FloatArray

CHINCHILLA_E = 1.69
CHINCHILLA_A, CHINCHILLA_ALPHA = 406.4, 0.34
CHINCHILLA_B, CHINCHILLA_BETA = 410.7, 0.28
"""Hoffmann et al. (2022), approach 3: L = E + A / N^alpha + B / D^beta, N parameters, D tokens."""


def log_slope(control_log: FloatArray, steps: FloatArray) -> float | None:
    """Return d ln(loss) / d ln(tokens) of the mean control curve `control_log` [K] over its last third.

    Tokens per step are constant, so ln(step) serves. None with fewer than two points or no downward slope.
    """
    last = steps >= steps[-1] * 2.0 / 3.0
    x, y = np.log(steps[last]), control_log[last]
    kept = np.isfinite(x) & np.isfinite(y)
    if kept.sum() < 2:
        return None
    x, y = x[kept] - x[kept].mean(), y[kept]
    slope = float(x @ y / (x @ x))
    return slope if slope < 0 else None


def extra_tokens(gap: float | None, slope: float) -> float | None:
    """Return the share of further tokens that closes `gap`: exp(gap / |slope|) - 1; None when not finite."""
    if gap is None or not math.isfinite(gap):
        return None
    exponent = gap / abs(slope)
    return math.expm1(exponent) if exponent < 100 else None


def chinchilla_extra_tokens(gap: float | None, parameters: float, tokens: float) -> float | None:
    """Return the same under the Chinchilla fit at this size; None when no amount of data closes the gap."""
    if gap is None or not math.isfinite(gap):
        return None
    data_term = CHINCHILLA_B / tokens**CHINCHILLA_BETA
    loss = CHINCHILLA_E + CHINCHILLA_A / parameters**CHINCHILLA_ALPHA + data_term
    left = data_term - math.expm1(gap) * loss if gap < 100 else -1.0
    return (data_term / left) ** (1.0 / CHINCHILLA_BETA) - 1.0 if left > 0 else None


@dataclass(frozen=True)
class Worth:
    """Net speed of FP8 to the same loss, as a share (0.1 = a tenth faster), with interval and answer."""

    net_gain: float | None
    interval: tuple[float | None, float | None]
    answer: str


def worth_it(speedup: float, cost: float | None, bounds: tuple[float | None, float | None]) -> Worth:
    """Return speedup / (1 + cost) - 1, its interval from the cost's `bounds`, and the answer."""

    def net(extra: float | None) -> float | None:
        return None if extra is None or extra <= -1 else speedup / (1.0 + extra) - 1.0

    low, high = net(bounds[1]), net(bounds[0])
    if low is not None and low > 0:
        answer = "yes"
    elif high is not None and high <= 0:
        answer = "no"
    else:
        answer = "unresolved"
    return Worth(net(cost), (low, high), answer)
