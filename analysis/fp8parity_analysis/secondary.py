"""Evidence beside the primary interval: trajectory, spikes, leave-one-seed-out, token cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import core, paired, tokens, trajectory
from fp8parity_analysis import gap as gaps
from fp8parity_analysis.divergence import growth_of, soft_divergence
from fp8parity_analysis.estimate import Basis, null_units
from fp8parity_analysis.forks import is_fork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import IntArray, RunCurve
    from fp8parity_analysis.gap import FloatArray
    from fp8parity_analysis.pairing import Pairs
    from fp8parity_analysis.schema import Outcome

TRAJECTORY_ALPHA = 0.05
_RNG_SEED = 20240607
"""Permutation tests always start from this seed: the same curves give the same verdict."""
_TRAJECTORY_GRID = 1000
LEAVE_ONE_OUT_UP_TO = 30
"""With more seeds no single one decides, and the line is left out."""
_LEAVE_ONE_OUT_CELLS = 2_000_000


@dataclass(frozen=True)
class Trajectory:
    """The trajectory test with the step of first detection; `p` None when it could not be made."""

    p: float | None
    first_step: int | None
    kind: str
    smallest_p: float = 1.0


def trajectory_of(pairs: Pairs, rows: list[int], criteria: Criteria, *, pooled: bool) -> Trajectory:
    """Test whether the arm is worse anywhere: label permutation with matched nulls, else sign flips.

    Evaluations with a masked point in any unit, before `criteria.burn_in_step`, or (with nulls) before the
    nulls' spread has saturated, are not used; of very many, an even selection is.
    """
    test = pairs.gap[rows]
    usable = ~np.isnan(test).any(axis=0) & (pairs.steps >= criteria.burn_in_step)
    null = null_units(pairs)
    if pooled:
        usable[: trajectory.burn_in(null)] = False
    columns = _evenly(np.flatnonzero(usable))
    rng = np.random.default_rng(_RNG_SEED)
    if not len(columns):
        return Trajectory(None, None, "no evaluation after burn-in")
    if pooled:
        scale = np.sqrt(2.0 / (1.0 / pairs.test_runs[rows] + 1.0 / pairs.control_runs[rows]))
        scaled = test[:, columns] * scale[:, None]
        result = trajectory.label_permutation(scaled, null[:, columns], rng, alpha=TRAJECTORY_ALPHA)
    elif len(rows) >= trajectory.SIGN_FLIP_MIN_SEEDS:
        result = trajectory.sign_flip(test[:, columns], rng, alpha=TRAJECTORY_ALPHA)
    else:
        return Trajectory(None, None, "needs 5 seeds, or matched null pairs")
    first = None if result.first is None else int(pairs.steps[columns[result.first]])
    return Trajectory(result.p, first, result.kind, result.smallest_p)


def _evenly(columns: IntArray) -> IntArray:
    """Return at most `_TRAJECTORY_GRID` of the columns at even distance, the last one among them."""
    stride = -(-len(columns) // _TRAJECTORY_GRID)
    return columns if stride <= 1 else columns[::-1][::stride][::-1]


def spike_p(pairs: Pairs, rows: list[int]) -> float | None:
    """Return the sign-flip p-value of more spikes in the test arm, None without training loss."""
    if pairs.spike_counts is None:
        return None
    counts = pairs.spike_counts[rows]
    return paired.sign_flip_p(counts[:, 0] - counts[:, 1])


def secondary_p_values(**p_values: float | None) -> dict[str, float | None]:
    """Return Holm-adjusted p-values of the secondary family; what was not tested stays None."""
    raw = np.array([np.nan if p is None else p for p in p_values.values()], dtype=np.float64)
    adjusted = paired.holm(raw)
    return {
        name: None if np.isnan(value) else float(value)
        for name, value in zip(p_values, adjusted, strict=True)
    }


def leave_one_out(
    gap: FloatArray,
    endpoints: FloatArray,
    seeds: list[int],
    progress: FloatArray,
    basis: Basis,
    margin: float,
) -> dict[int, Outcome]:
    """Return the outcome without each seed in turn, for 3 to 30 seeds: `gap` [n, K], `endpoints` [n]."""
    n = len(seeds)
    if not 3 <= n <= LEAVE_ONE_OUT_UP_TO:
        return {}
    slopes = gaps.slope(gap, progress)
    kept = np.array([[row for row in range(n) if row != left] for left in range(n)])
    together = max(1, _LEAVE_ONE_OUT_CELLS // gap.size)
    outcomes: list[Outcome] = []
    for rows in np.split(kept, range(together, n, together)):
        estimate = basis.estimate(endpoints[rows])
        growth = growth_of(gap[rows], progress, estimate.gap, slopes[rows])
        soft = soft_divergence(estimate.lo, growth, margin)
        outcomes += core.decide(core.claims_of(estimate, margin), soft, growth.grows).tolist()
    return dict(zip(seeds, outcomes, strict=True))


def token_cost(
    pairs: Pairs, rows: list[int], gap: float, bounds: tuple[float | None, float | None], criteria: Criteria
) -> Mapping[str, Any] | None:
    """Return the extra tokens that close the gap, with interval, and whether the speed-up pays for them.

    None when the control's loss does not fall over its last third, so that no price can be given, in forks, whose
    loss falls as their schedule makes it, and for a null arm: nobody buys BF16 with BF16.
    """
    if is_fork(pairs.arm) or pairs.arm.null_arm:
        return None
    mean_control = gaps.seed_mean(pairs.control_log[rows])
    slope = tokens.log_slope(mean_control, pairs.steps.astype(np.float64))
    if slope is None:
        return None
    cost = tokens.extra_tokens(gap, slope)
    interval = (tokens.extra_tokens(bounds[0], slope), tokens.extra_tokens(bounds[1], slope))
    document: dict[str, Any] = {
        "extra_tokens_frac": cost,
        "interval": interval,
        "loss_slope_per_ln_tokens": slope,
        "method": "slope of the control's own loss over the last third of its run",
        "chinchilla": _chinchilla(pairs, rows, gap, bounds),
    }
    return document | _worth(pairs, rows, cost, interval, criteria)


def _chinchilla(
    pairs: Pairs, rows: list[int], gap: float, bounds: tuple[float | None, float | None]
) -> dict[str, Any] | None:
    run = pairs.arm.control[pairs.seeds[rows[0]]][0]
    if not run.parameters or not run.tokens:
        return None
    costs = [tokens.chinchilla_extra_tokens(value, run.parameters, run.tokens) for value in (gap, *bounds)]
    return {
        "extra_tokens_frac": costs[0],
        "interval": costs[1:],
        "parameters": run.parameters,
        "tokens": run.tokens,
        "source": "Hoffmann et al. 2022, approach 3",
    }


def _worth(
    pairs: Pairs,
    rows: list[int],
    cost: float | None,
    interval: tuple[float | None, float | None],
    criteria: Criteria,
) -> dict[str, Any]:
    speedup = criteria.speedup or measured_speedup(pairs, rows)
    if speedup is None:
        return {"speedup": None, "worth_it": None, "net_gain": None, "net_gain_interval": (None, None)}
    worth = tokens.worth_it(speedup, cost, interval)
    return {
        "speedup": speedup,
        "worth_it": worth.answer,
        "net_gain": worth.net_gain,
        "net_gain_interval": worth.interval,
    }


def measured_speedup(pairs: Pairs, rows: list[int]) -> float | None:
    """Return the geometric mean over seeds of test over control throughput, None where not recorded."""
    ratios = []
    for row in rows:
        seed = pairs.seeds[row]
        test, control = _speed(pairs.arm.test[seed]), _speed(pairs.arm.control[seed])
        if test and control:
            ratios.append(test / control)
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def _speed(runs: tuple[RunCurve, ...]) -> float | None:
    speeds = [run.tokens_per_s for run in runs if run.tokens_per_s]
    return float(np.median(speeds)) if speeds else None
