"""Simulated nights with the noise measured on an H200; test support, never imported by the package.

A BF16 or FP8 run ends 0.145 % (sd) away from the mean of its own seed and arm. The seeds are the same every night, so
what seeds and recipes have of their own is the same every night and cancels against the history; throughput varies
by 1 % (sd) from night to night, a layer's SQNR by 0.05 dB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fp8parity_analysis.history import Cell, Check, Night, Observation
from fp8parity_analysis.history_prior import pooled
from fp8parity_analysis.history_series import Series, levels
from fp8parity_analysis.history_steps import Replay, replay

RECIPES = ("tensorwise", "rowwise")


@dataclass(frozen=True)
class World:
    """A standing matrix: two recipes, `seeds` seeds, `controls` BF16 runs per seed."""

    seeds: int = 3
    controls: int = 2
    nights: int = 30
    layers: int = 3
    run_sd: float = 0.00145
    speed_sd: float = 0.01
    sqnr_sd: float = 0.05


@dataclass(frozen=True)
class Simulated:
    """Plain values [R, N, S] under `names` [S], and the sd that the null pairs predict [R, N, S]."""

    names: tuple[str, ...]
    values: np.ndarray
    predicted: np.ndarray
    df: int

    def column(self, name: str) -> int:
        return self.names.index(name)

    def shifted(self, name: str, from_night: int, by: float, *, times: float = 1.0) -> Simulated:
        """Return the same nights with one series moved from night `from_night` (counted from 1) on."""
        values = self.values.copy()
        j = self.column(name)
        values[:, from_night - 1 :, j] = values[:, from_night - 1 :, j] * times + by
        return replace(self, values=values)

    def repeated(self, redraws: tuple[int, ...]) -> Simulated:
        """Return a device that repeats itself: the noise is drawn anew on nights `redraws` (from 1) only.

        Throughput is measured anew every night all the same.
        """
        drawn = np.array(
            [max(r for r in (1, *redraws) if r <= t + 1) - 1 for t in range(self.values.shape[1])]
        )
        held = np.array([not name.startswith("speed") for name in self.names])
        values = np.where(held, self.values[:, drawn], self.values)
        return replace(self, values=values, predicted=self.predicted[:, drawn])


def simulate(rng: np.random.Generator, replicates: int, world: World = World()) -> Simulated:
    shape = (replicates, world.nights)
    control = world.run_sd * rng.standard_normal((*shape, world.seeds, world.controls))
    control_mean = control.mean(-1)
    within = ((control - control_mean[..., None]) ** 2).sum((-1, -2)) / (world.seeds * (world.controls - 1))
    sd = np.sqrt(within)
    found = {
        "noise/25m": sd,
        "loss/25m": 0.71 * np.exp(control_mean.mean(-1)),
        "speed/25m": 300_000 * np.exp(world.speed_sd * rng.standard_normal(shape)),
    }
    predicted = {"loss/25m": sd / np.sqrt(world.seeds * world.controls)}
    for recipe in RECIPES:
        test = world.run_sd * rng.standard_normal((*shape, world.seeds))
        interaction = 0.001 * rng.standard_normal((replicates, 1))
        found[f"gap/{recipe}"] = (test - control_mean).mean(-1) + interaction
        predicted[f"gap/{recipe}"] = sd * np.sqrt((1 + 1 / world.controls) / world.seeds)
        found[f"speedup/{recipe}"] = 1.25 * np.exp(world.speed_sd * rng.standard_normal(shape))
        for layer in range(world.layers):
            name = f"tensor/{recipe}/blocks.{layer}.mlp.down/weight/sqnr_db"
            found[name] = 31.0 + world.sqnr_sd * rng.standard_normal(shape)
    nothing = np.full(shape, np.nan)
    names = tuple(found)
    return Simulated(
        names,
        np.stack([found[name] for name in names], -1),
        np.stack([predicted.get(name, nothing) for name in names], -1),
        world.seeds * (world.controls - 1),
    )


def scaled(simulated: Simulated) -> np.ndarray:
    """Return the values on the scales that are tested."""
    columns = []
    for j, name in enumerate(simulated.names):
        plain, scale = simulated.values[..., j], Series(name).kind.scale
        columns.append(
            np.log(plain) if scale == "log" else plain ** (2 / 3) if scale == "variance" else plain
        )
    return np.stack(columns, -1)


def replayed(simulated: Simulated, *, floors: bool = True) -> Replay:
    """Run the step detection over all histories at once, with the levels and directions of the real nightly."""
    series = [Series(name) for name in simulated.names]
    level = levels(simulated.names)
    alpha = np.tile([level[name] for name in simulated.names], (simulated.values.shape[1], 1))
    direction = np.array([float(item.direction) for item in series])
    floor = np.array([item.floor if floors else 0.0 for item in series])
    share = np.array([item.relative_floor if floors else 0.0 for item in series])
    priors = [pooled(sd, np.full(sd.shape, float(simulated.df))) for sd in simulated.predicted]
    return replay(
        scaled(simulated),
        alpha,
        direction,
        floor,
        relative_floor=share,
        predicted=np.stack([sd for sd, _ in priors]),
        df=np.stack([df for _, df in priors]),
        variance=np.array([item.kind.scale == "variance" for item in series]),
    )


FACTS = {
    "torch": "2.13.0",
    "torchao": "0.18.0",
    "lightning": "2.6.4",
    "triton": "3.7.0",
    "CUDA": "13.0",
    "driver": "580.95",
    "device": "NVIDIA H200",
    "fp8parity": "0.1.0",
    "commit": "1111111",
    "recipe sha256": "aaaaaaaa",
    "criteria digest": "cccccccc",
}


def records(simulated: Simulated, history: int = 0) -> list[Night]:
    """Return one simulated history as the lines of a history file."""
    nights = []
    for t in range(simulated.values.shape[1]):
        series = {}
        for j, name in enumerate(simulated.names):
            se = simulated.predicted[history, t, j]
            series[name] = Observation(
                float(simulated.values[history, t, j]),
                float(se) if np.isfinite(se) else None,
                simulated.df if name.startswith(("gap/", "noise/", "loss/")) else None,
            )
        cells = tuple(
            Cell(r, "EQUIVALENT", "pass", series[f"gap/{r}"].value, (-0.002, 0.002), 3) for r in RECIPES
        )
        checks = {f"execution/{r}": Check(True, "proven, 84 FP8 GEMMs") for r in RECIPES}
        nights.append(
            Night(
                night=f"2025-01-{t + 1:02d}",
                status="judged",
                time=f"2025-01-{t + 1:02d}T02:00:00+00:00",
                margin=0.005,
                facts=FACTS,
                cells=cells,
                series=series,
                checks=checks,
            )
        )
    return nights
