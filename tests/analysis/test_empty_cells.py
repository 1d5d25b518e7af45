"""Which empty cells at the end of a curve forbid a verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8parity_analysis.curves import RunCurve, Series
from fp8parity_analysis.empty_cells import told
from fp8parity_analysis.schema import Role, Status

KEY = ("held_out", "unstated")


def series(last: int) -> Series:
    steps = np.arange(10, last + 1, 10)
    return Series(steps, np.full(len(steps), 2.0))


def run(role: Role, last: int, *, cells_to: int = 0, seed: int = 0) -> RunCurve:
    return RunCurve("", role.value, role, seed, 0, role.value, {KEY: series(last)}, cells_to=cells_to)


CONTROL = run(Role.CONTROL, 1000)


def problems(test: RunCurve, control: RunCurve = CONTROL) -> list[int]:
    return [len(item.problems) for item in told([control, test])]


@pytest.mark.parametrize(
    ("last", "cells_to", "found"),
    [
        (1000, 1000, 0),
        (990, 0, 0),  # rows that are absent are the length check's
        (990, 995, 0),  # no evaluation was due before its rows end
        (990, 1000, 1),
        (980, 1000, 1),
        (970, 1000, 0),  # more than 2 % short: the length check finds it, and --allow-prefix may allow it
    ],
)
def test_a_curve_with_empty_cells_where_its_control_has_losses(last: int, cells_to: int, found: int) -> None:
    test = run(Role.TEST, last, cells_to=cells_to)
    assert problems(test) == [0, found]


def test_a_control_is_held_to_the_same() -> None:
    assert problems(run(Role.TEST, 1000), run(Role.CONTROL, 990, cells_to=1000)) == [1, 0]


def test_other_seeds_and_other_arms_do_not_count() -> None:
    short = run(Role.TEST, 990, cells_to=1000, seed=1)
    other = run(Role.TEST, 1000, seed=1)
    assert [len(item.problems) for item in told([CONTROL, short, other])] == [0, 0, 0]


def test_a_run_that_says_it_diverged_needs_no_guess() -> None:
    assert problems(replace(run(Role.TEST, 990, cells_to=1000), status=Status.DIVERGED)) == [0, 0]


def test_a_training_loss_that_turned_empty_is_told_wherever_it_did() -> None:
    control = replace(CONTROL, train=series(1000))
    test = replace(run(Role.TEST, 1000, cells_to=1000), train=series(500))
    _, found = told([control, test])
    assert [text.split(":")[0] for text in found.problems] == ["test"]
    assert "no train loss in its rows after step 500, control has one up to step 1000" in found.problems[0]
    assert "write nan there, or leave out all rows after step 500" in found.problems[0]


def test_the_last_step_is_that_of_the_last_row() -> None:
    assert replace(CONTROL, rows_to=1500).last_step == 1500
    assert replace(CONTROL, rows_to=500).last_step == 1000
