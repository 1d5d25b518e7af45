"""Curves on the steps that all runs share: log losses of control, test and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.arms import Arm, differing, series_of
from fp8parity_analysis.noise import Replicas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import FloatArray, IntArray, RunCurve, Series


def common_steps(series: Sequence[Series]) -> IntArray:
    """Return the steps that all series have; never interpolates."""
    steps = series[0].steps
    for other in series[1:]:
        if not np.array_equal(steps, other.steps):
            steps = np.intersect1d(steps, other.steps, assume_unique=True)
    return steps


def on_grid(series: Series, steps: IntArray) -> FloatArray:
    """Return log losses on `steps`, NaN where the run has none (a run that stopped when it diverged)."""
    if len(series.steps) == len(steps) and np.array_equal(series.steps, steps):
        return gaps.log_loss(series.loss)
    values = np.full(len(steps), np.nan)
    at = np.minimum(np.searchsorted(series.steps, steps), len(series.steps) - 1)
    found = series.steps[at] == steps
    values[found] = gaps.log_loss(series.loss[at[found]])
    return values


def endpoint_series(run: RunCurve, criteria: Criteria) -> Series:
    """Return the series of the endpoint of a run that has one."""
    series = series_of(run, criteria)
    assert series is not None  # `unusable` refused runs without it
    return series


def control_runs_of(arm: Arm, seed: int, criteria: Criteria) -> tuple[RunCurve, ...]:
    """Return the runs behind the control's mean: null runs too once they are declared as matched."""
    if not criteria.null_matched:
        return arm.control[seed]
    extra = [run for run in arm.extra.get(seed, ()) if _usable_null(run, arm.control[seed][0], criteria)]
    return (*arm.control[seed], *extra)


def _usable_null(run: RunCurve, control: RunCurve | None, criteria: Criteria) -> bool:
    series = series_of(run, criteria)
    if run.problems or run.status is None or series is None or not len(series.loss):
        return False
    same = control is None or not differing(control, run)
    reaches = control is None or run.last_step >= control.last_step
    return bool(np.isfinite(series.loss[-1])) and same and reaches


def control_replicas(arm: Arm, steps: IntArray, count: int, criteria: Criteria) -> tuple[Replicas, ...]:
    """Return control and null runs of every seed, also of seeds without a test run."""
    seeds = list(dict.fromkeys([*arm.control, *arm.extra]))
    together = {}
    for seed in seeds:
        first = next(iter(arm.control.get(seed, ())), None)
        nulls = [run for run in arm.extra.get(seed, ()) if _usable_null(run, first, criteria)]
        controls = [run for run in arm.control.get(seed, ()) if _usable_null(run, first, criteria)]
        together[seed] = (*controls, *nulls)
    return replicas_of(together, steps, count, criteria)


def replicas_of(
    runs: Mapping[int, tuple[RunCurve, ...]], steps: IntArray, count: int, criteria: Criteria
) -> tuple[Replicas, ...]:
    """Return the complete curves of each seed on `steps`, with their endpoints."""
    found = []
    for seed, members in runs.items():
        logs = [on_grid(series, steps) for run in members if (series := series_of(run, criteria)) is not None]
        kept = [curve for curve in logs if len(curve) and not np.isnan(curve).any()]
        if kept:
            curves = np.array(kept)
            found.append(Replicas(seed, gaps.endpoint(curves, count), curves))
    return tuple(found)


def cadence_remarks(runs: Sequence[RunCurve], criteria: Criteria, common: int) -> list[str]:
    """Return a remark when some runs were evaluated at steps that others lack."""
    longest = max(len(endpoint_series(run, criteria).steps) for run in runs)
    if longest == common:
        return []
    return [f"the runs were evaluated at different steps; {common} common ones of {longest} were used"]


def poor_grid_remarks(n_evals: int) -> list[str]:
    """Return a remark when there are few evaluations; they widen the answer, they do not forbid it."""
    if n_evals >= 8:
        return []
    return [f"only {n_evals} common evaluations: onset and growth of the gap can hardly be seen"]
