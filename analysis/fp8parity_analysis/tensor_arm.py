"""The tensor statistics of one arm beside those of its control: paired trajectories by seed, and null trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.tensor_panel import (
    COLUMNS,
    ONE_SCALE,
    SMALLEST_SHARE,
    STATISTICS,
    Panel,
    panel_of,
    tensor_key,
)
from fp8parity_analysis.tensor_reduce import nanmean
from fp8parity_analysis.tensor_signals import signals_of
from fp8parity_analysis.tensor_store import TensorTables, read_tensor_stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fp8parity_analysis.tensor_panel import FloatArray, IntArray, Tensor

WhatIfReader = Callable[["Path"], tuple[dict[str, Panel], tuple[str, ...]]]
_REMEMBERED = 32
"""BF16 runs that are kept while the arms of a study are read one after the other."""
_SHARES = {"underflow": "underflow_frac", "saturated": "saturated_frac"}


@dataclass(frozen=True)
class RunDirs:
    """The run directories of one arm: runs of the arm and control runs by seed, further BF16 runs by seed."""

    test: Mapping[int, Sequence[Path]]
    control: Mapping[int, Sequence[Path]]
    null: Mapping[int, Sequence[Path]]


@dataclass(frozen=True)
class SeedPanels:
    """One seed on the arm's tensors and grid: every run of the arm, every control run, every further BF16 run."""

    seed: int
    test: tuple[Panel, ...]
    control: tuple[Panel, ...]
    null: tuple[Panel, ...]


@dataclass(frozen=True)
class ArmTensors:
    """The trained casts of an arm with the what-if casts of the same recipe in its BF16 runs.

    `tensors` [L] and `steps` [K] (every step at which a run of the arm was probed) are the axes of all arrays below.
    `recipe` is the cast's recipe. `matched` tells whether null pairs were declared to carry the noise of a pair. `idle`
    holds the BF16 runs, by seed, of seeds in which the arm has no run: they give null pairs and pair with nothing.
    """

    recipe: str
    tensors: tuple[Tensor, ...]
    steps: IntArray
    seeds: tuple[SeedPanels, ...]
    matched: bool
    problems: tuple[str, ...] = ()
    idle: tuple[tuple[Panel, ...], ...] = ()

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds of the arm, in the order of the paths."""
        return tuple(seed.seed for seed in self.seeds)

    @cached_property
    def test_paths(self) -> dict[str, FloatArray]:
        """Each statistic of the arm [n, L, K], the mean over a seed's runs; NaN where not recorded."""
        return self._mean_paths([seed.test for seed in self.seeds])

    @cached_property
    def control_paths(self) -> dict[str, FloatArray]:
        """Each statistic of the BF16 arm's what-if casts [n, L, K]; further BF16 runs join where nulls are matched."""
        return self._mean_paths([self.references(seed) for seed in self.seeds])

    @cached_property
    def gaps(self) -> dict[str, FloatArray]:
        """Arm minus BF16 arm of the same seed, by statistic [n, L, K]."""
        return {name: self.test_paths[name] - self.control_paths[name] for name in STATISTICS}

    @property
    def null_pairs(self) -> list[tuple[Panel, Panel]]:
        """Disjoint pairs of runs of one arm and seed, those of seeds without a run of the arm included."""
        groups = [group for seed in self.seeds for group in ((*seed.control, *seed.null), seed.test)]
        return [
            (group[first], group[first + 1])
            for group in (*groups, *self.idle)
            for first in range(0, len(group) - 1, 2)
        ]

    @cached_property
    def nulls(self) -> dict[str, FloatArray]:
        """Differences of the null pairs, by statistic [m, L, K]."""
        paths = [(one.paths, other.paths) for one, other in self.null_pairs]
        shape = (0, len(self.tensors), len(self.steps))
        return {
            name: np.stack([other[name] - one[name] for one, other in paths]) if paths else np.zeros(shape)
            for name in STATISTICS
        }

    @property
    def n_nulls(self) -> int:
        """Number of null pairs."""
        return len(self.nulls["sqnr"])

    @property
    def null_scale(self) -> float:
        """What turns the variance of a null difference into that of a pair: both are means over some runs."""
        paired = [seed for seed in self.seeds if seed.control]
        shares = [1.0 / len(seed.test) + 1.0 / len(self.references(seed)) for seed in paired]
        return float(np.mean(shares)) / 2.0 if shares else 1.0

    def testable(self, statistic: str) -> FloatArray:
        """Return one for tensors that may be tested in this statistic [L], NaN for the others.

        A share must reach `SMALLEST_SHARE` on average over both arms; amax/rms is tested where one scale serves all.
        """
        if statistic == "spread":
            return np.where(self._one_scale, 1.0, np.nan)
        column = _SHARES.get(statistic)
        if column is None:
            return np.ones(len(self.tensors))
        runs = [panel for seed in self.seeds for panel in (*seed.test, *self.references(seed))]
        if not runs:
            return np.full(len(self.tensors), np.nan)
        mean = nanmean(np.stack([nanmean(panel.columns[column], -1) for panel in runs]), 0)
        with np.errstate(invalid="ignore"):
            return np.where(mean >= SMALLEST_SHARE, 1.0, np.nan)

    @property
    def _one_scale(self) -> npt.NDArray[np.bool_]:
        grains = [panel.granularity for seed in self.seeds for panel in seed.test]
        return np.array([ONE_SCALE in column for column in zip(*grains, strict=True)], dtype=np.bool_)

    def references(self, seed: SeedPanels) -> tuple[Panel, ...]:
        """Return the BF16 runs that a seed's runs are compared with: the control, and its nulls where matched."""
        return (*seed.control, *seed.null) if self.matched else seed.control

    def _mean_paths(self, groups: Sequence[Sequence[Panel]]) -> dict[str, FloatArray]:
        shape = (len(self.tensors), len(self.steps))
        found: dict[str, list[FloatArray]] = {name: [] for name in STATISTICS}
        for group in groups:
            paths = [panel.paths for panel in group]
            for name, rows in found.items():
                # a mean over fewer runs at some steps would jump there, so a step counts where every run has it
                rows.append(
                    np.mean([path[name] for path in paths], axis=0) if paths else np.full(shape, np.nan)
                )
        return {name: np.stack(rows) if rows else np.zeros((0, *shape)) for name, rows in found.items()}


def read_arm(
    dirs: RunDirs, *, matched: bool = False, what_if: WhatIfReader | None = None
) -> ArmTensors | None:
    """Read the tensor statistics of an arm; None when none of its runs recorded a cast that training used.

    `what_if` reads a BF16 run (default: `what_if_panels`); arms that share their BF16 runs share one that remembers.
    """
    read = what_if or what_if_panels
    problems: list[str] = []
    trained = {seed: _trained(paths, problems) for seed, paths in dirs.test.items()}
    recipes = [recipe for runs in trained.values() for recipe, _ in runs]
    if not recipes:
        return None
    recipe = max(dict.fromkeys(recipes), key=recipes.count)
    others = sorted(set(recipes) - {recipe})
    if others:
        names = ", ".join(others)
        problems.append(
            f"runs of one arm trained with casts of {recipe} and of {names}: only {recipe} is used"
        )
    tests = {seed: [panel for name, panel in runs if name == recipe] for seed, runs in trained.items()}
    seeds = sorted({*tests, *dirs.control, *dirs.null})
    control = {seed: _what_if(dirs.control.get(seed, ()), recipe, read, problems) for seed in seeds}
    null = {seed: _what_if(dirs.null.get(seed, ()), recipe, read, problems) for seed in seeds}
    return arm_of(recipe, tests, control, null, matched=matched, problems=problems)


def arm_of(
    recipe: str,
    test: Mapping[int, Sequence[Panel]],
    control: Mapping[int, Sequence[Panel]],
    null: Mapping[int, Sequence[Panel]],
    *,
    matched: bool = False,
    problems: Sequence[str] = (),
) -> ArmTensors:
    """Put the panels of an arm's runs, by seed, on one set of tensors and steps: those that the arm itself recorded."""
    panels = [panel for runs in test.values() for panel in runs]
    tensors = tuple(sorted({tensor for panel in panels for tensor in panel.tensors}, key=tensor_key))
    steps = np.unique(np.concatenate([panel.steps for panel in panels]))

    def placed(group: Mapping[int, Sequence[Panel]], seed: int) -> tuple[Panel, ...]:
        return tuple(panel.at(tensors, steps) for panel in group.get(seed, ()))

    seeds = tuple(
        SeedPanels(seed, placed(test, seed), placed(control, seed), placed(null, seed))
        for seed in sorted(test)
        if test[seed]
    )
    paired = {seed.seed for seed in seeds}
    idle = tuple(
        group
        for seed in sorted({*control, *null} - paired)
        if (group := (*placed(control, seed), *placed(null, seed)))
    )
    return ArmTensors(recipe, tensors, steps, seeds, matched, tuple(dict.fromkeys(problems)), idle)


def _trained(paths: Sequence[Path], problems: list[str]) -> list[tuple[str, Panel]]:
    """Return the recipe and the trained casts of each run that recorded any."""
    found = []
    for path in paths:
        tables = read_tensor_stats(path, kind=ts.TRAINED, columns=COLUMNS)
        problems += tables.problems
        if tables.recorded:
            names = tables.casts["recipe"]
            recipe = str(names.iloc[-1])
            if names.nunique() > 1:
                recipe = str(names.value_counts().index[0])
                tables = read_tensor_stats(path, kind=ts.TRAINED, recipe=recipe, columns=COLUMNS)
            found.append((recipe, replace(panel_of(tables), signals=signals_of(tables.signals))))
    return found


def what_if_panels(path: Path) -> tuple[dict[str, Panel], tuple[str, ...]]:
    """Return the what-if casts of a run by recipe, and what could not be read."""
    tables = read_tensor_stats(path, kind=ts.WHAT_IF, columns=COLUMNS)
    casts, signals = tables.casts, signals_of(tables.signals)
    panels = {
        str(recipe): replace(
            panel_of(TensorTables(casts[casts["recipe"] == recipe], tables.signals)), signals=signals
        )
        for recipe in casts["recipe"].unique()
    }
    return panels, tables.problems


def remembering() -> WhatIfReader:
    """Return a reader that keeps the last few runs it read: a panel of 300 tensors and 100 probes takes 4 MB."""
    return lru_cache(maxsize=_REMEMBERED)(what_if_panels)


def _what_if(paths: Sequence[Path], recipe: str, read: WhatIfReader, problems: list[str]) -> list[Panel]:
    found = []
    for path in paths:
        panels, unread = read(path)
        problems += unread
        if recipe in panels:
            found.append(panels[recipe])
    return found
