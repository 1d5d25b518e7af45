"""Control and test joined seed by seed: what may be compared, on which steps, and what forbids it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis import health
from fp8parity_analysis.noise import Replicas
from fp8parity_analysis.schema import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import FloatArray, IntArray, RunCurve, Series

_SHOWN = 4
"""How many differing keys or runs a message spells out."""
_MIN_EVALS_IDENTICAL = 3


@dataclass(frozen=True)
class Arm:
    """All runs of one arm in one group with its control runs, by seed; `extra` are further control runs (null arm)."""

    recipe: str
    null_arm: bool
    test: Mapping[int, tuple[RunCurve, ...]]
    control: Mapping[int, tuple[RunCurve, ...]]
    extra: Mapping[int, tuple[RunCurve, ...]]


@dataclass(frozen=True)
class Pairs:
    """An arm against its control on a common grid.

    `steps` [K]; `gap` and `control_log` [n, K], NaN where masked; `test_runs` and `control_runs` the number of
    runs averaged per seed [n]; `invalid` forbids a verdict; `diverged` maps seed to step; `nulls` hold replicas
    for the noise floor; `spike_counts` [n, 2] are spikes of test and control in the training loss.
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


def arms_of(runs: Sequence[RunCurve]) -> tuple[Arm, ...]:
    """Return every test arm, then every null arm, with the control runs of its group."""
    groups = list(dict.fromkeys(run.group for run in runs))
    found = []
    for role in (Role.TEST, Role.NULL):
        for group in groups:
            members = [run for run in runs if run.group == group]
            control = _by_seed([run for run in members if run.role is Role.CONTROL])
            nulls = _by_seed([run for run in members if run.role is Role.NULL])
            for name in dict.fromkeys(run.arm for run in members if run.role is role):
                test = _by_seed([run for run in members if run.role is role and run.arm == name])
                recipe = f"{group}/{name}" if len(groups) > 1 else name
                extra = {} if role is Role.NULL else nulls
                found.append(Arm(recipe, role is Role.NULL, test, control, extra))
    return tuple(found)


def _by_seed(runs: Sequence[RunCurve]) -> dict[int, tuple[RunCurve, ...]]:
    seeds: dict[int, list[RunCurve]] = {}
    for run in runs:
        seeds.setdefault(run.seed, []).append(run)
    return {seed: tuple(sorted(seeds[seed], key=lambda run: run.replica)) for seed in sorted(seeds)}


def series_of(run: RunCurve, criteria: Criteria) -> Series | None:
    """Return the series that the endpoint is taken from, or None when the run lacks it."""
    if criteria.endpoint == "train":
        return run.train
    return run.held_out(criteria.split, criteria.eval_precision)


def build_pairs(arm: Arm, criteria: Criteria) -> Pairs:
    """Join an arm with its control; never raises on what the curves hold, it says so in `invalid`."""
    seeds = tuple(seed for seed in arm.test if seed in arm.control)
    warnings = list(_left_out(arm))
    if not seeds:
        return _nothing(arm, ("no seed has both a control run and a run of this arm",), warnings)
    invalid = [*_unusable(arm, seeds, criteria), *_differences(arm, seeds)]
    if invalid:
        return _nothing(arm, tuple(invalid), warnings, seeds)
    baseline = health.broken_controls(arm.test, arm.control, seeds, criteria)
    if baseline:
        return _nothing(arm, baseline, warnings, seeds)
    diverged = health.diverged_seeds(arm.test, seeds, criteria)
    short = health.truncated(arm.test, arm.control, seeds, diverged)
    if short and not criteria.allow_prefix:
        return _nothing(arm, short, warnings, seeds)
    warnings += [f"judged on the common prefix: {text}" for text in short]
    return _joined(arm, seeds, criteria, diverged, warnings)


def _nothing(arm: Arm, invalid: tuple[str, ...], warnings: list[str], seeds: tuple[int, ...] = ()) -> Pairs:
    empty = np.zeros((len(seeds), 0))
    ones = np.ones(len(seeds))
    return Pairs(
        arm, seeds, np.zeros(0, np.int64), empty, empty, ones, ones, invalid=invalid, warnings=tuple(warnings)
    )


def _left_out(arm: Arm) -> Iterator[str]:
    lonely = sorted(set(arm.test) - set(arm.control))
    if lonely:
        yield f"seeds {_listed(lonely)} have no control run and are left out"


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"


def _runs(arm: Arm, seeds: Sequence[int]) -> list[RunCurve]:
    return [run for seed in seeds for run in (*arm.control[seed], *arm.test[seed])]


def _unusable(arm: Arm, seeds: Sequence[int], criteria: Criteria) -> Iterator[str]:
    runs = _runs(arm, seeds)
    unfinished = [run.label for run in runs if run.status is None]
    if unfinished:
        yield f"unfinished runs: {_listed(unfinished)}; run the study again to finish them"
    for run in runs:
        yield from run.problems
    wanted = "training loss" if criteria.endpoint == "train" else f"loss on {criteria.split!r}"
    lacking = [run.label for run in runs if _lacks_curve(series_of(run, criteria))]
    if lacking:
        yield f"no {wanted} ({criteria.eval_precision} forward) in: {_listed(lacking)}"


def _lacks_curve(series: Series | None) -> bool:
    return series is None or len(series.steps) == 0


def _differences(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    for seed in seeds:
        first, *others = arm.control[seed]
        for run in (*others, *arm.test[seed]):
            found = differing(first, run)
            if found:
                yield (
                    f"{first.label} and {run.label} differ in more than precision: {'; '.join(found[:_SHOWN])}"
                    + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
                )


_ABSENT = "(absent)"


def differing(control: RunCurve, test: RunCurve) -> list[str]:
    """Return every shared setting in which two runs differ, as `key: control != test`."""
    keys = dict.fromkeys([*control.identity, *test.identity])
    found = []
    for key in keys:
        left, right = control.identity.get(key, _ABSENT), test.identity.get(key, _ABSENT)
        if left != right:
            found.append(f"{key}: {left} != {right}")
    if control.digests is not test.digests and control.digests != test.digests:
        common = [step for step in control.digests if step in test.digests]
        unequal = [step for step in common if control.digests[step] != test.digests[step]]
        if unequal:
            at = unequal[0]
            found.append(
                f"batch_digest at {len(unequal)} of {len(common)} steps, first step {at}: "
                f"{control.digests[at]} != {test.digests[at]}"
            )
    return found


def _common_steps(series: Sequence[Series]) -> IntArray:
    steps = series[0].steps
    for other in series[1:]:
        if not np.array_equal(steps, other.steps):
            steps = np.intersect1d(steps, other.steps, assume_unique=True)
    return steps


def _on_grid(series: Series, steps: IntArray) -> FloatArray:
    """Return log losses on `steps`, NaN where the run has none (a run that stopped when it diverged)."""
    if len(series.steps) == len(steps) and np.array_equal(series.steps, steps):
        return gaps.log_loss(series.loss)
    values = np.full(len(steps), np.nan)
    at = np.minimum(np.searchsorted(series.steps, steps), len(series.steps) - 1)
    found = series.steps[at] == steps
    values[found] = gaps.log_loss(series.loss[at[found]])
    return values


def _series(run: RunCurve, criteria: Criteria) -> Series:
    series = series_of(run, criteria)
    assert series is not None  # `_unusable` refused runs without it
    return series


def _joined(
    arm: Arm, seeds: tuple[int, ...], criteria: Criteria, diverged: Mapping[int, int], warnings: list[str]
) -> Pairs:
    control = {seed: _control_runs(arm, seed, criteria) for seed in seeds}
    whole = [
        run for seed in seeds for run in (*control[seed], *(arm.test[seed] if seed not in diverged else ()))
    ]
    steps = _common_steps([_series(run, criteria) for run in whole])
    steps = steps[steps >= 0]
    if not len(steps):
        return _nothing(arm, ("the runs have no evaluation step in common",), warnings, seeds)
    warnings += _cadence(whole, criteria, len(steps))
    control_logs = [
        np.array([_on_grid(_series(run, criteria), steps) for run in control[seed]]) for seed in seeds
    ]
    test_logs = [
        np.array([_on_grid(_series(run, criteria), steps) for run in arm.test[seed]]) for seed in seeds
    ]
    control_mean = np.array([logs.mean(axis=0) for logs in control_logs])
    gap = np.array([logs.mean(axis=0) for logs in test_logs]) - control_mean
    count = 1 if criteria.endpoint == "final" else gaps.tail_count(len(steps), criteria.tail_fraction)
    blown = _blow_ups(gap, seeds, steps, diverged)
    gap, masked = _mask_transients(gap, seeds, {**diverged, **blown})
    return Pairs(
        arm=arm,
        seeds=seeds,
        steps=steps,
        gap=gap,
        control_log=control_mean,
        test_runs=np.array([len(logs) for logs in test_logs], dtype=np.float64),
        control_runs=np.array([len(logs) for logs in control_logs], dtype=np.float64),
        control_nulls=_control_replicas(arm, steps, count, criteria),
        test_nulls=_replicas(arm.test, steps, count, criteria),
        invalid=tuple(_suspicious(gap, seeds, steps, count, arm, {**diverged, **blown})),
        diverged={**diverged, **blown},
        warnings=(*warnings, *masked, *_poor_grid(len(steps))),
        spike_counts=_spike_counts(arm, seeds),
        tail_count=count,
    )


def _control_runs(arm: Arm, seed: int, criteria: Criteria) -> tuple[RunCurve, ...]:
    """Return the runs that the control's mean is taken over: null runs too once they are declared as matched."""
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


def _control_replicas(arm: Arm, steps: IntArray, count: int, criteria: Criteria) -> tuple[Replicas, ...]:
    """Return the control runs of every seed, also of seeds without a test run, with null runs of the same seed."""
    seeds = list(dict.fromkeys([*arm.control, *arm.extra]))
    together = {}
    for seed in seeds:
        first = next(iter(arm.control.get(seed, ())), None)
        nulls = [run for run in arm.extra.get(seed, ()) if _usable_null(run, first, criteria)]
        controls = [run for run in arm.control.get(seed, ()) if _usable_null(run, first, criteria)]
        together[seed] = (*controls, *nulls)
    return _replicas(together, steps, count, criteria)


def _replicas(
    runs: Mapping[int, tuple[RunCurve, ...]], steps: IntArray, count: int, criteria: Criteria
) -> tuple[Replicas, ...]:
    found = []
    for seed, members in runs.items():
        logs = [
            _on_grid(series, steps) for run in members if (series := series_of(run, criteria)) is not None
        ]
        kept = [curve for curve in logs if len(curve) and not np.isnan(curve).any()]
        if kept:
            curves = np.array(kept)
            found.append(Replicas(seed, gaps.endpoint(curves, count), curves))
    return tuple(found)


def _blow_ups(
    gap: FloatArray, seeds: Sequence[int], steps: IntArray, diverged: Mapping[int, int]
) -> dict[int, int]:
    starts = {
        seed: gaps.blow_up_start(row) for seed, row in zip(seeds, gap, strict=True) if seed not in diverged
    }
    return {seed: int(steps[start]) for seed, start in starts.items() if start is not None}


def _mask_transients(
    gap: FloatArray, seeds: Sequence[int], diverged: Mapping[int, int]
) -> tuple[FloatArray, list[str]]:
    """Mask single evaluations that jump by more than 5 % and come back, and say how many were masked."""
    kept = gap.copy()
    remarks = []
    for row, seed in enumerate(seeds):
        if seed in diverged:
            continue
        lost = int(np.isnan(gap[row]).sum())
        marks = gaps.transient_gaps(gap[row])
        kept[row, marks] = np.nan
        if lost or marks.any():
            remarks.append(
                f"seed {seed}: {int(marks.sum())} evaluations with a spike and {lost} with a non-finite loss were "
                "masked; the run recovered from them"
            )
    return kept, remarks


def _suspicious(
    gap: FloatArray, seeds: Sequence[int], steps: IntArray, count: int, arm: Arm, diverged: Mapping[int, int]
) -> Iterator[str]:
    """Yield what makes gaps unbelievable: duplicated logs, a seed that equals its control, a control that blew up."""
    live = [row for row, seed in enumerate(seeds) if seed not in diverged]
    for row in live:
        start = gaps.blow_up_start(-gap[row])
        if start is not None:
            yield (
                f"seed {seeds[row]}: the control's loss is more than {gaps.BLOW_UP_GAP:.0%} above this arm's from step "
                f"{int(steps[start])} to the end; the baseline diverged"
            )
    equal = [row for row in live if np.all(gap[row] == 0)]
    if equal and len(equal) < len(live) and not arm.null_arm and len(steps) >= _MIN_EVALS_IDENTICAL:
        yield (
            f"seeds {_listed([seeds[row] for row in equal])} equal their control exactly while others do not: "
            "FP8 was not switched on there, or a log was copied"
        )
    ends = gaps.endpoint(gap[live], count) if live else np.zeros(0)
    lost = [seeds[row] for row, end in zip(live, ends, strict=True) if np.isnan(end)]
    if lost:
        yield f"seeds {_listed(lost)} have no finite loss among the evaluations of the endpoint"
    elif len(ends) > 1 and ends[0] != 0 and np.all(np.abs(ends - ends[0]) <= 1e-9 * abs(ends[0])):
        yield f"the same gap ({ends[0]:.6g}) in all {len(ends)} seeds to the last digit: a log was copied"
    yield from _copied_runs(arm, seeds)


def _copied_runs(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield pairs of seeds whose test runs carry the same curve of at least three points."""
    seen: dict[bytes, tuple[int, str]] = {}
    for seed in seeds:
        for run in arm.test[seed]:
            series = next(iter(run.evals.values()), run.train)
            if series is None or len(series.loss) < _MIN_EVALS_IDENTICAL or np.ptp(series.loss) == 0:
                continue
            owner, label = seen.setdefault(series.loss.tobytes(), (seed, run.label))
            if owner != seed:
                yield f"{label} and {run.label} have the same curve: a log was copied, or the seed had no effect"


def _cadence(runs: Sequence[RunCurve], criteria: Criteria, common: int) -> list[str]:
    longest = max(len(_series(run, criteria).steps) for run in runs)
    if longest == common:
        return []
    return [f"the runs were evaluated at different steps; {common} common ones of {longest} were used"]


def _poor_grid(n_evals: int) -> list[str]:
    if n_evals >= 8:
        return []
    return [f"only {n_evals} common evaluations: onset and growth of the gap can hardly be seen"]


def _spike_counts(arm: Arm, seeds: Sequence[int]) -> FloatArray | None:
    runs = _runs(arm, seeds)
    if any(run.train is None for run in runs):
        return None
    return np.array([[_spikes(arm.test[seed]), _spikes(arm.control[seed])] for seed in seeds])


def _spikes(runs: Sequence[RunCurve]) -> float:
    """Return the mean number of spikes per run in the training loss."""
    return float(np.mean([gaps.spikes(run.train.loss).sum() for run in runs if run.train is not None]))
