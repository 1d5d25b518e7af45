"""Control and test joined seed by seed: what may be compared, on which steps, and what forbids it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis import health
from fp8parity_analysis.forks import fork_remarks, start_remarks
from fp8parity_analysis.grid import (
    cadence_remarks,
    common_steps,
    control_runs_of,
    distinct,
    endpoint_series,
    log_curves,
    mean_curves,
    poor_grid_remarks,
    repeated_remarks,
    replicas_of,
    usable_controls,
)
from fp8parity_analysis.probed import probed_remarks
from fp8parity_analysis.suspicion import (
    blow_ups,
    broken_replicas,
    differences,
    late_blow_ups,
    left_out,
    lonely_divergence,
    mask_transients,
    mixed_precision,
    spike_counts_of,
    stopped,
    suspicious,
    unusable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8parity_analysis.arms import Arm
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import FloatArray, IntArray, RunCurve
    from fp8parity_analysis.noise import Replicas


@dataclass(frozen=True)
class Pairs:
    """An arm against its control on a common grid.

    `steps` [K]; `gap` and `control_log` [n, K], NaN where masked; `test_runs` and `control_runs` the number
    of runs averaged per seed [n]; `invalid` forbids a verdict; `diverged` maps seed to step; `nulls` hold
    replicas for the noise floor; `spike_counts` [n, 2] are spikes of test and control in the training loss.
    """

    arm: Arm
    seeds: tuple[int, ...]
    steps: IntArray
    gap: FloatArray
    control_log: FloatArray
    test_runs: FloatArray
    control_runs: FloatArray
    control_nulls: tuple[Replicas, ...] = ()
    test_nulls: tuple[Replicas, ...] = ()
    invalid: tuple[str, ...] = ()
    diverged: Mapping[int, int] | None = None
    warnings: tuple[str, ...] = ()
    spike_counts: FloatArray | None = None
    tail_count: int = 1


def build_pairs(arm: Arm, criteria: Criteria) -> Pairs:
    """Join an arm with its control; never raises on what the curves hold, it says so in `invalid`."""
    seeds = tuple(seed for seed in arm.test if seed in arm.control)
    warnings = [
        *fork_remarks(arm, seeds),
        *start_remarks(arm, seeds),
        *left_out(arm),
        *probed_remarks(arm, seeds),
    ]
    if not seeds:
        return _nothing(arm, ("no seed has both a control run and a run of this arm",), warnings)
    invalid = [
        *unusable(arm, seeds, criteria),
        *mixed_precision(arm, seeds, criteria),
        *differences(arm, seeds),
        *lonely_divergence(arm, criteria),
    ]
    if invalid:
        return _nothing(arm, tuple(invalid), warnings, seeds)
    baseline = health.broken_controls(arm.test, arm.control, seeds, criteria)
    if baseline:
        return _nothing(arm, baseline, warnings, seeds)
    diverged = health.diverged_seeds(arm.test, seeds, criteria)
    short = health.truncated(arm.test, arm.control, seeds, diverged, criteria)
    if short and not criteria.allow_prefix:
        return _nothing(arm, short, warnings, seeds)
    warnings += [f"judged on the common prefix: {text}" for text in short]
    warnings += [*stopped(arm, seeds), *repeated_remarks(arm, seeds, criteria)]
    return _joined(arm, seeds, criteria, diverged, warnings)


def _nothing(arm: Arm, invalid: tuple[str, ...], warnings: list[str], seeds: tuple[int, ...] = ()) -> Pairs:
    empty = np.zeros((len(seeds), 0))
    ones = np.ones(len(seeds))
    return Pairs(
        arm, seeds, np.zeros(0, np.int64), empty, empty, ones, ones, invalid=invalid, warnings=tuple(warnings)
    )


def _every_run(arm: Arm, nulls: Mapping[int, tuple[RunCurve, ...]]) -> list[RunCurve]:
    """Return every run of the arm once."""
    members = [run for runs in (arm.control, nulls, arm.test) for seed in runs for run in runs[seed]]
    return list({id(run): run for run in members}.values())


def _joined(
    arm: Arm, seeds: tuple[int, ...], criteria: Criteria, diverged: Mapping[int, int], warnings: list[str]
) -> Pairs:
    control = {seed: control_runs_of(arm, seed, criteria) for seed in seeds}
    test = {seed: distinct(arm.test[seed], criteria) for seed in seeds}
    whole = [run for seed in seeds for run in (*control[seed], *(test[seed] if seed not in diverged else ()))]
    series = [endpoint_series(run, criteria) for run in whole]
    steps = common_steps(series)
    steps = steps[steps >= 0]
    if not len(steps):
        return _nothing(arm, ("the runs have no evaluation step in common",), warnings, seeds)
    longest = max(run.last_step for run in whole)
    if health.ends_early(steps, longest, [item.steps for item in series]):
        text = f"the evaluations that all runs share end at step {int(steps[-1])} of {longest}"
        if not criteria.allow_prefix:
            return _nothing(arm, (text,), warnings, seeds)
        warnings.append(f"judged on the common prefix: {text}")
    warnings += cadence_remarks(whole, criteria, len(steps))
    null_runs = usable_controls(arm, criteria)
    curves = log_curves(_every_run(arm, null_runs), criteria, steps)
    control_logs = [curves.of(control[seed]) for seed in seeds]
    test_logs = [curves.of(test[seed]) for seed in seeds]
    control_mean = mean_curves(control_logs)
    gap = mean_curves(test_logs) - control_mean
    count = 1 if criteria.endpoint == "final" else gaps.tail_count(len(steps), criteria.tail_fraction)
    run_gaps = [logs - mean for logs, mean in zip(test_logs, control_mean, strict=True)]
    late, broken_late = late_blow_ups(control, test, seeds, int(steps[-1]))
    gone = {**late, **blow_ups(run_gaps, seeds, steps), **diverged}
    gap, masked, unstable = mask_transients(gap, seeds, gone)
    return Pairs(
        arm=arm,
        seeds=seeds,
        steps=steps,
        gap=gap,
        control_log=control_mean,
        test_runs=np.array([len(logs) for logs in test_logs], dtype=np.float64),
        control_runs=np.array([len(logs) for logs in control_logs], dtype=np.float64),
        control_nulls=replicas_of(null_runs, curves, count),
        test_nulls=replicas_of({**arm.test, **test}, curves, count),
        invalid=(
            *broken_replicas(control_logs, seeds, steps),
            *broken_late,
            *unstable,
            *suspicious(gap, seeds, steps, count, arm, gone),
        ),
        diverged=gone,
        warnings=(*warnings, *masked, *poor_grid_remarks(len(steps))),
        spike_counts=spike_counts_of(arm, seeds),
        tail_count=count,
    )
