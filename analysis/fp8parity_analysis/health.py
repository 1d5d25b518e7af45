"""Whether runs lived: diverged arms, broken baselines and runs that ended early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.arms import series_of
from fp8parity_analysis.curves import IntArray, RunCurve, Series
from fp8parity_analysis.schema import Status

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria

LENGTH_FRAC = 0.98
"""A run that ends before this share of the longest one, without having diverged, is truncated."""

LASTING_STEPS = 8
"""Training losses that are non-finite up to the last one: as many as end a run of ours."""

Runs = Mapping[int, tuple[RunCurve, ...]]


def nonfinite_from(run: RunCurve, criteria: Criteria) -> int | None:
    """Return the step from which the run's loss is non-finite to its end, or None.

    The training stream gives the step where it exists and agrees; a run whose status is `diverged` but whose
    logged losses are finite diverged at the first non-finite step of its manifest, or at its last logged
    step.
    """
    chosen = run.held_out(criteria.split, criteria.eval_precision)
    by_eval, by_train = _stretch(chosen), _stretch(run.train)
    if by_train is not None and (
        by_eval is not None or _silent_after(chosen, by_train) or _is_lasting(run.train, by_train)
    ):
        return by_train if by_eval is None else min(by_train, by_eval)
    if by_eval is not None:
        return by_eval
    if run.status is Status.DIVERGED:
        return run.first_nonfinite_step or run.last_step
    return None


def _stretch(series: Series | None) -> int | None:
    if series is None or not len(series.loss) or math.isfinite(series.loss[-1]):
        return None
    start = gaps.trailing_start(~np.isfinite(series.loss))
    return int(series.steps[start]) if start < len(series.loss) else None


def _is_lasting(series: Series | None, step: int) -> bool:
    """Whether the stretch from `step` to the end is too long to be a last stray value.

    A stack that skips non-finite steps keeps its parameters, and so its evaluations, finite for ever.
    """
    return series is not None and int(np.count_nonzero(series.steps >= step)) >= LASTING_STEPS


def _silent_after(series: Series | None, step: int) -> bool:
    """Whether no evaluation at or after `step` shows a finite loss."""
    if series is None:
        return True
    return not np.any(np.isfinite(series.loss[series.steps >= step]))


def diverged_seeds(test: Runs, seeds: Sequence[int], criteria: Criteria) -> dict[int, int]:
    """Return the seeds with a run that went non-finite and stayed so, with the earliest such step."""
    found = {}
    for seed in seeds:
        steps = [step for run in test[seed] if (step := nonfinite_from(run, criteria)) is not None]
        if steps:
            found[seed] = min(steps)
    return found


def broken_controls(test: Runs, control: Runs, seeds: Sequence[int], criteria: Criteria) -> tuple[str, ...]:
    """Return why the baseline cannot be compared with: control runs that are non-finite at their end."""
    broken = {
        seed: step
        for seed in seeds
        for run in control[seed]
        if (step := nonfinite_from(run, criteria)) is not None
    }
    if not broken:
        return ()
    listed = ", ".join(f"seed {seed} from step {step}" for seed, step in broken.items())
    both = [seed for seed in diverged_seeds(test, seeds, criteria) if seed in broken]
    text = (
        f"the baseline diverged: the control is non-finite to its end ({listed}); nothing is said about FP8"
    )
    if both:
        text += f"; both arms diverged in seeds {', '.join(map(str, both))}: not attributable to FP8"
    return (text,)


def truncated(
    test: Runs, control: Runs, seeds: Sequence[int], diverged: Mapping[int, int], criteria: Criteria
) -> tuple[str, ...]:
    """Return the runs whose endpoint series ends before 98 % of the longest run and one evaluation short of it.

    The longest run counts every stream: a run that trained on without being evaluated is judged on a prefix too.
    """
    runs = [run for seed in seeds for run in (*control[seed], *(test[seed] if seed not in diverged else ()))]
    longest = max(run.last_step for run in runs)
    ends = [(run, _steps_of(series_of(run, criteria))) for run in runs]
    return tuple(
        f"{run.label} ends at step {int(steps[-1]) if len(steps) else 0} of {longest}"
        for run, steps in ends
        if ends_early(steps, longest)
    )


def _steps_of(series: Series | None) -> IntArray:
    return np.zeros(0, np.int64) if series is None else series.steps


def ends_early(steps: IntArray, longest: int, own: Sequence[IntArray] = ()) -> bool:
    """Return whether evaluations at `steps` [K] end 2 % of a run and one usual distance before it does.

    `own` are each run's steps, which show that distance where `steps` are only those in common: of runs of two cadences
    they lie farther apart than any run's own.
    """
    last = int(steps[-1]) if len(steps) else 0
    if last >= LENGTH_FRAC * longest:
        return False
    return last + max(map(cadence_of, own or (steps,))) <= longest


def cadence_of(steps: IntArray) -> int:
    """Return the usual distance of evaluations at `steps` [K]; 1 where there are fewer than two."""
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1
