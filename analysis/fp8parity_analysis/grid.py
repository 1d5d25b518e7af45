"""Curves on the steps that all runs share: log losses of control, test and replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.arms import Arm, differing, series_of
from fp8parity_analysis.noise import Replicas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import FloatArray, IntArray, RunCurve, Series
    from fp8parity_analysis.gap import BoolArray


def common_steps(series: Sequence[Series]) -> IntArray:
    """Return the steps that all series have; never interpolates."""
    steps = series[0].steps
    for other in series[1:]:
        if not np.array_equal(steps, other.steps):
            steps = np.intersect1d(steps, other.steps, assume_unique=True)
    return steps


@dataclass(frozen=True)
class LogCurves:
    """Log losses of many runs on one grid.

    `values` [N, K], NaN where a run has none; `rows` finds a run's row by `id(run)`.
    """

    values: FloatArray
    rows: Mapping[int, int]

    def of(self, runs: Sequence[RunCurve]) -> FloatArray:
        """Return the curves of `runs` that have one [r, K]."""
        return self.values[[self.rows[id(run)] for run in runs if id(run) in self.rows]]


def log_curves(runs: Sequence[RunCurve], criteria: Criteria, steps: IntArray) -> LogCurves:
    """Return the log losses of `runs` on `steps`; a run that stopped early has NaN from there on."""
    chosen = [(id(run), series) for run in runs if (series := series_of(run, criteria)) is not None]
    losses = np.array([on_grid(series, steps) for _, series in chosen]).reshape(len(chosen), len(steps))
    return LogCurves(gaps.log_loss(losses), {key: row for row, (key, _) in enumerate(chosen)})


def on_grid(series: Series, steps: IntArray) -> FloatArray:
    """Return the losses of `series` at `steps` [K], NaN where it has none."""
    if series.steps is steps or np.array_equal(series.steps, steps):
        return series.loss
    values = np.full(len(steps), np.nan)
    if len(series.steps):
        at = np.minimum(np.searchsorted(series.steps, steps), len(series.steps) - 1)
        found = series.steps[at] == steps
        values[found] = series.loss[at[found]]
    return values


def mean_curves(curves: Sequence[FloatArray]) -> FloatArray:
    """Return the mean curve of each seed's runs [n, K]."""
    return np.array([logs[0] if len(logs) == 1 else logs.mean(axis=0) for logs in curves])


def endpoint_series(run: RunCurve, criteria: Criteria) -> Series:
    """Return the series of the endpoint of a run that has one."""
    series = series_of(run, criteria)
    assert series is not None  # `unusable` refused runs without it
    return series


def distinct(runs: Sequence[RunCurve], criteria: Criteria) -> tuple[RunCurve, ...]:
    """Return the runs without those whose curve repeats an earlier one bit for bit: they are no second measurement."""
    if len(runs) < 2:
        return tuple(runs)
    kept: dict[tuple[bytes, bytes], RunCurve] = {}
    for run in runs:
        series = series_of(run, criteria)
        key = (
            (series.steps.tobytes(), series.loss.tobytes())
            if series is not None
            else (b"", run.label.encode())
        )
        kept.setdefault(key, run)
    return tuple(kept.values())


def control_runs_of(arm: Arm, seed: int, criteria: Criteria) -> tuple[RunCurve, ...]:
    """Return the distinct runs behind the control's mean: null runs too once they are declared as matched."""
    if not criteria.null_matched:
        return distinct(arm.control[seed], criteria)
    extra = [run for run in arm.extra.get(seed, ()) if _usable_null(run, arm.control[seed][0], criteria)]
    return distinct((*arm.control[seed], *extra), criteria)


def repeated_remarks(arm: Arm, seeds: Sequence[int], criteria: Criteria) -> list[str]:
    """Return a remark on replicas that repeat another run of their seed bit for bit."""
    together = [arm.test[seed] for seed in seeds]
    for seed in seeds:
        extra = arm.extra.get(seed, ()) if criteria.null_matched else ()
        together.append((*arm.control[seed], *extra))
    repeated = sum(len(runs) - len(distinct(runs, criteria)) for runs in together)
    if not repeated:
        return []
    return [
        f"{repeated} replicas repeat another run of their seed bit for bit: they count once and show no noise"
    ]


def _usable_null(run: RunCurve, control: RunCurve | None, criteria: Criteria) -> bool:
    series = series_of(run, criteria)
    if run.problems or run.status is None or series is None or not len(series.loss):
        return False
    same = control is None or not differing(control, run)
    reaches = control is None or run.last_step >= control.last_step
    return bool(np.isfinite(series.loss[-1])) and same and reaches


def usable_controls(arm: Arm, criteria: Criteria) -> dict[int, tuple[RunCurve, ...]]:
    """Return control and null runs that may serve as replicas, also of seeds without a test run."""
    together = {}
    for seed in dict.fromkeys([*arm.control, *arm.extra]):
        members = (*arm.control.get(seed, ()), *arm.extra.get(seed, ()))
        first = next(iter(arm.control.get(seed, ())), None)
        usable = tuple(run for run in members if _usable_null(run, first, criteria))
        # nulls that are only described may show that this device repeats itself; pooled ones must carry noise
        together[seed] = distinct(usable, criteria) if criteria.null_matched else usable
    return together


def replicas_of(
    runs: Mapping[int, tuple[RunCurve, ...]], curves: LogCurves, tail_count: int
) -> tuple[Replicas, ...]:
    """Return the complete curves of each seed with their endpoints; incomplete ones are left out."""
    ends = gaps.endpoint(curves.values, tail_count)
    complete: BoolArray = np.asarray(np.isfinite(curves.values).all(axis=1))
    found = []
    for seed, members in runs.items():
        rows = [curves.rows[id(run)] for run in members if id(run) in curves.rows]
        rows = [row for row in rows if complete[row]]
        if rows:
            found.append(Replicas(seed, ends[rows], curves.values[rows]))
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
