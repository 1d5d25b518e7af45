"""The decision, vectorised over replicates: log gaps [R, n, K] in, outcomes [R] out; `judge` has R = 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.divergence import Growth, growth_of, soft_divergence
from fp8parity_analysis.paired import Estimate, paired_t
from fp8parity_analysis.schema import Outcome

if TYPE_CHECKING:
    from fp8parity_analysis.gap import BoolArray, FloatArray

OutcomeArray = npt.NDArray[np.object_]

_OUTCOMES = np.array(list(Outcome), dtype=object)
_CODE = {outcome: code for code, outcome in enumerate(Outcome)}


@dataclass(frozen=True)
class Claims:
    """What the interval (or corrected p-values) lets one say, one entry per replicate [R]."""

    above_margin: BoolArray
    equivalent: BoolArray
    below_zero: BoolArray
    below_margin: BoolArray
    above_zero: BoolArray


def claims_of(estimate: Estimate, margin: float) -> Claims:
    """Read the claims off the interval: each is a one-sided test of size alpha."""
    lo, hi = estimate.lo, estimate.hi
    return Claims(
        above_margin=lo > margin,
        equivalent=(lo > -margin) & (hi < margin),
        below_zero=hi < 0,
        below_margin=hi < margin,
        above_zero=lo > 0,
    )


def decide(claims: Claims, soft: BoolArray, grows: BoolArray) -> OutcomeArray:
    """Return outcomes [R] in order of precedence.

    Above the margin (DIVERGED if it grew there, else WORSE), equivalent (BUT_GROWING if the slope is
    significant), better, non-inferior, above zero but margin unresolved, inconclusive. Nothing passes while the gap
    grows: what would be better or non-inferior is inconclusive then.
    """
    rules = [
        (claims.above_margin & soft, Outcome.DIVERGED),
        (claims.above_margin, Outcome.WORSE),
        (claims.equivalent & grows, Outcome.EQUIVALENT_BUT_GROWING),
        (claims.equivalent, Outcome.EQUIVALENT),
        (claims.below_zero & ~grows, Outcome.BETTER),
        (claims.below_margin & ~grows, Outcome.NON_INFERIOR),
        (claims.above_zero, Outcome.WORSE_MARGIN_UNRESOLVED),
    ]
    codes = np.full(claims.above_margin.shape, _CODE[Outcome.INCONCLUSIVE])
    for condition, outcome in reversed(rules):
        codes[condition] = _CODE[outcome]
    return np.asarray(_OUTCOMES[codes], dtype=object)


@dataclass(frozen=True)
class CoreResult:
    """Outcomes [R] with the endpoints [R, n], the estimate and the growth behind them."""

    outcomes: OutcomeArray
    endpoints: FloatArray
    estimate: Estimate
    growth: Growth


def judge_gaps(
    gap: FloatArray, progress: FloatArray, *, margin: float, alpha: float = 0.05, tail_fraction: float = 0.10
) -> CoreResult:
    """Judge log gaps [R, n, K] on the grid `progress` [K] (t/T) by the plain paired t."""
    endpoints = gaps.endpoint(gap, gaps.tail_count(gap.shape[-1], tail_fraction))
    estimate = paired_t(endpoints, alpha)
    growth = growth_of(gap, progress, estimate.gap)
    soft = soft_divergence(estimate.lo, growth, margin)
    return CoreResult(decide(claims_of(estimate, margin), soft, growth.grows), endpoints, estimate, growth)
