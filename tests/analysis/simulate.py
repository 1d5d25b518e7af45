"""Synthetic paired loss curves with a known truth; test support, never imported by the package.

A run of seed s has the log loss

    ln L(t) + seed offset + envelope(t) * (persistent chaos + slow wander) + effect(t);

the seed offset cancels in a pair, the chaos does not. All sds are fractions of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from fp8parity_analysis.curves import CurveSet, RunCurve, Series
from fp8parity_analysis.schema import Role


@dataclass(frozen=True)
class World:
    """How noisy training is. `fast_test`: the noise of the test arm saturates at once, as rounding does."""

    n_steps: int = 2000
    eval_every: int = 50
    seed_sd: float = 0.004
    chaos_sd: float = 0.001
    wander_sd: float = 0.0007
    wander_steps: float = 150.0
    growth_rate: float = 0.03
    first_difference: float = 1e-7
    interaction_sd: float = 0.0
    heavy_frac: float = 0.0
    heavy_factor: float = 5.0
    fast_test: bool = False

    @property
    def steps(self) -> np.ndarray:
        """Evaluation steps [K]."""
        return np.arange(self.eval_every, self.n_steps + 1, self.eval_every)

    @property
    def progress(self) -> np.ndarray:
        """Evaluation steps as a share of the run [K]."""
        return self.steps / self.n_steps


BASE = World()


def base_loss(steps: np.ndarray) -> np.ndarray:
    """A power law from 10.3 to 2.94 nats over 2000 steps."""
    return 2.0 + 8.5 * (1.0 + steps / 15.0) ** -0.45


def envelope(world: World) -> np.ndarray:
    """The share of the chaos that has developed by each evaluation: logistic growth from one ulp."""
    grown = world.first_difference * np.exp(np.minimum(world.growth_rate * world.steps, 700.0))
    return grown / (1.0 + grown)


def effect(kind: str, size: float, world: World = BASE) -> np.ndarray:
    """What the test arm's log loss is raised by at each evaluation [K]."""
    x = world.progress
    shapes = {
        "none": np.zeros_like(x),
        "const": np.ones_like(x),
        "late": np.clip((x - 0.7) / 0.3, 0.0, None),
        "grow": x,
        "shrink": 1.0 - x,
        "bump": ((x > 0.4) & (x < 0.6)).astype(float),
    }
    return size * shapes[kind]


def runs(
    rng: np.random.Generator, n_studies: int, n_seeds: int, n_runs: int, world: World = BASE
) -> np.ndarray:
    """Log losses [R, n, runs, K] of runs that differ by chaos only; runs of a seed share its offset."""
    shape = (n_studies, n_seeds, n_runs)
    steps = world.steps
    memory = np.exp(-world.eval_every / world.wander_steps)
    shocks = rng.standard_normal((*shape, len(steps)))
    shocks[..., 1:] *= np.sqrt(1.0 - memory**2)
    wander = world.wander_sd * lfilter([1.0], [1.0, -memory], shocks, axis=-1)
    chaos = world.chaos_sd * rng.standard_normal((*shape, 1))
    heavy = rng.random((n_studies, n_seeds, 1, 1)) < world.heavy_frac
    scale = np.where(heavy, world.heavy_factor, 1.0)
    offset = world.seed_sd * rng.standard_normal((n_studies, n_seeds, 1, 1))
    shares = np.broadcast_to(envelope(world), (*shape, len(steps))).copy()
    if world.fast_test:
        shares[:, :, -1] = 1.0
    return np.log(base_loss(steps)) + offset + shares * scale * (chaos + wander)


@dataclass(frozen=True)
class Studies:
    """R studies of n seeds: log losses `control` [R, n, r, K] and `test` [R, n, K]."""

    control: np.ndarray
    test: np.ndarray
    world: World

    @property
    def gap(self) -> np.ndarray:
        """Log gap [R, n, K] to the mean of the control runs."""
        return self.test - self.control.mean(axis=2)


def studies(
    rng: np.random.Generator,
    n_studies: int,
    n_seeds: int,
    kind: str = "none",
    size: float = 0.0,
    *,
    replicas: int = 1,
    world: World = BASE,
) -> Studies:
    """R independent studies with a known effect; `replicas` control runs per seed."""
    logs = runs(rng, n_studies, n_seeds, replicas + 1, world)
    interaction = world.interaction_sd * rng.standard_normal((n_studies, n_seeds, 1))
    return Studies(logs[:, :, :-1], logs[:, :, -1] + effect(kind, size, world) + interaction, world)


def null_gaps(rng: np.random.Generator, n_studies: int, n_pairs: int, world: World = BASE) -> np.ndarray:
    """Log gaps [R, m, K] of pairs of control runs, each pair of a seed of its own."""
    logs = runs(rng, n_studies, n_pairs, 2, world)
    return logs[:, :, 1] - logs[:, :, 0]


def table(
    control: np.ndarray,
    test: np.ndarray,
    steps: np.ndarray,
    *,
    arm: str = "fp8",
    null: np.ndarray | None = None,
) -> pd.DataFrame:
    """External table of one study: losses `control` [n, r, K], `test` [n, K], null pairs `null` [m, 2, K]."""
    frames = [
        _rows("bf16", seed, replica, steps, curve)
        for seed, curves in enumerate(control)
        for replica, curve in enumerate(curves)
    ]
    frames += [_rows(arm, seed, 0, steps, curve) for seed, curve in enumerate(test)]
    for extra, (first, second) in enumerate(() if null is None else null):
        seed = len(control) + extra
        frames += [_rows("bf16", seed, 0, steps, first), _rows("bf16_null", seed, 0, steps, second)]
    return pd.concat(frames, ignore_index=True)


def _rows(arm: str, seed: int, replica: int, steps: np.ndarray, loss: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"seed": seed, "arm": arm, "replica": replica, "step": steps, "loss": loss})


def curve_set(study: Studies, index: int, *, null_logs: np.ndarray | None = None) -> CurveSet:
    """Study `index` as curves; `null_logs` [m, 2, K] are null pairs of further seeds."""
    members = []
    for seed in range(study.control.shape[1]):
        for replica, logs in enumerate(study.control[index, seed]):
            members.append(_run("bf16", Role.CONTROL, seed, replica, study.world.steps, logs))
        members.append(_run("fp8", Role.TEST, seed, 0, study.world.steps, study.test[index, seed]))
    for extra, (first, second) in enumerate(() if null_logs is None else null_logs):
        seed = study.control.shape[1] + extra
        members.append(_run("bf16", Role.CONTROL, seed, 0, study.world.steps, first))
        members.append(_run("bf16_null", Role.NULL, seed, 0, study.world.steps, second))
    return CurveSet(tuple(members))


def _run(arm: str, role: Role, seed: int, replica: int, steps: np.ndarray, logs: np.ndarray) -> RunCurve:
    series = Series(steps.astype(np.int64), np.exp(logs))
    label = f"{arm} seed {seed} replica {replica}"
    return RunCurve("", arm, role, seed, replica, label, evals={("held_out", "bf16"): series})
