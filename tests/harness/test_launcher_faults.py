"""The reduced form of benchmarks/launcher_faults.py: real workers, faults planted from outside, the launcher killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8parity import matrix, runner, study

from .conftest import passed_selftest


@pytest.fixture(scope="module")
def faults(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("launcher_faults")


def train_here(recipe: Path, out: Path) -> None:
    for path in study.lay_out(matrix.read(recipe), out):
        runner.train(path)


def test_every_run_ends_in_its_right_state_with_its_own_curve(
    faults: ModuleType, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(faults.RECIPE, "axes", {"precision.recipe": ["rowwise"]})
    # a CI machine may be slow: hangs are tested with stand-in workers in test_launch.py
    monkeypatch.setitem(faults.RECIPE, "runtime", {**faults.RECIPE["runtime"], "hang_after_s": 900.0})
    # one import of torch less: the reference is trained in this process
    monkeypatch.setattr(faults, "train_reference", train_here)
    under_faults = faults.under_faults

    def without_selftest(recipe: Path, out: Path, *rest: Any) -> None:
        passed_selftest(recipe, out)
        under_faults(recipe, out, *rest)

    monkeypatch.setattr(faults, "under_faults", without_selftest)
    counts = {"truncate": 1, "full_disk": 1}
    found = faults.campaign(tmp_path, corpus, seeds=1, counts=counts, kills=[1], diverging=False)
    assert found.wrong == []
    assert found.states == {"finished": 2}
    assert found.identical_curves == 2
    assert found.planted == counts
    assert (found.launcher_kills, found.second_launcher_exit) == (1, 64)


def test_the_faults_of_a_run_are_drawn_once_each(faults: ModuleType) -> None:
    runs = [f"run{i}" for i in range(60)]
    plan = faults.draw_faults(runs, faults.FULL, random.Random(0))
    kinds = [fault["kind"] for drawn in plan.values() for fault in drawn]
    assert {kind: kinds.count(kind) for kind in faults.FULL} == faults.FULL
    assert all(len(drawn) == 1 for drawn in plan.values() if drawn[0]["lasts"])
    assert all(len(drawn) <= 2 for drawn in plan.values())
