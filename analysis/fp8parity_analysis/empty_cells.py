"""Curves whose last cells are empty: nobody can tell whether the run ended or its loss was not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8parity_analysis.curves import RunCurve, Series
from fp8parity_analysis.health import LENGTH_FRAC, cadence_of
from fp8parity_analysis.schema import TRAIN, Role, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Named = dict[tuple[str, str], Series]


def told(runs: Sequence[RunCurve]) -> list[RunCurve]:
    """Return the runs, those with a problem whose cells are empty to the end where a run of their pair has a loss.

    Held-out curves that end before 98 % of the pair are left to `health.truncated`, which finds them without
    regard to cells. A run that says it diverged needs no guess.
    """
    by_seed: dict[int, list[RunCurve]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    return [
        replace(run, problems=(*run.problems, *_problems(run, by_seed[run.seed])))
        if run.cells_to > 0 and run.status is not Status.DIVERGED
        else run
        for run in runs
    ]


def _problems(run: RunCurve, of_seed: Sequence[RunCurve]) -> Iterator[str]:
    curves = _curves(run)
    others = [other for other in of_seed if other is not run and Role.CONTROL in (run.role, other.role)]
    for key, series in curves.items():
        found = [(_missed(run, series, _curves(other).get(key)), other) for other in others]
        missed, other = max(found, key=lambda item: item[0], default=(0, run))
        split, last = key[0], int(series.steps[-1])
        if missed and (split == TRAIN or last >= LENGTH_FRAC * missed):
            yield (
                f"{run.label}: no {split} loss in its rows after step {last}, {other.label} has one up to step "
                f"{missed}; an empty cell may be a loss that was not finite: write nan there, or leave out all "
                f"rows after step {last}"
            )


def _curves(run: RunCurve) -> Mapping[tuple[str, str], Series]:
    train: Named = {} if run.train is None else {(TRAIN, ""): run.train}
    return {**run.evals, **train}


def _missed(run: RunCurve, series: Series, other: Series | None) -> int:
    """Return the last step at which the other curve has a loss and this one an empty cell it should have filled.

    One usual distance between its evaluations must have passed; 0 when none has.
    """
    if other is None:
        return 0
    due = int(series.steps[-1]) + cadence_of(series.steps)
    reached = other.steps[(other.steps >= due) & (other.steps <= run.cells_to)]
    return int(reached[-1]) if len(reached) else 0
