"""Which combinations of recipe, backend and compute mode exist: decided without torch, before training."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fp8parity.errors import UsageError

if TYPE_CHECKING:
    from fp8parity.spec import PrecisionSpec, RunSpec, TrainSpec

BACKEND_RECIPES: dict[str, tuple[str, ...]] = {
    "torchao_float8": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "torchao_blockwise": ("blockwise",),
    "reference": ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "blockwise_requant"),
}
"""What each backend executes; `reference` emulates all, the others run a kernel's own arithmetic."""

FP8_GEMMS: dict[str, int] = {
    "bf16": 0,
    "tensorwise": 3,
    "rowwise": 3,
    "rowwise_with_gw_hp": 2,
    "blockwise": 3,
    "blockwise_requant": 3,
}
"""How many of a converted linear's three GEMMs each recipe multiplies in FP8: `casts.RECIPES`, which needs torch."""

JITTER_RANGE = (0.85, 1.0)
"""Half-open range of the grid constant of a jittered replica; below 1, so that nothing new saturates."""

Problem = tuple[tuple[str, str], str]
"""((section, key), message) of a recipe file."""


def backend_problem(precision: PrecisionSpec) -> Problem | None:
    """Return what is wrong with recipe and backend together, with the backends that do have the recipe."""
    if precision.is_bf16 or precision.recipe in BACKEND_RECIPES[precision.backend]:
        return None
    others = [name for name, recipes in BACKEND_RECIPES.items() if precision.recipe in recipes]
    return ("precision", "backend"), (
        f"precision.backend: {precision.backend} has no recipe {precision.recipe} (it has "
        f"{', '.join(BACKEND_RECIPES[precision.backend])}); write backend: {' or '.join(others)}"
    )


def compute_problems(precision: PrecisionSpec, train: TrainSpec) -> list[Problem]:
    """Return what is wrong with the precision under this compute mode and device."""
    problems: list[Problem] = []
    if precision.is_bf16:
        return problems
    if precision.weight_cast_source == "master" and train.compute == "bf16-true":
        text = (
            "precision.weight_cast_source: master, but train.compute: bf16-true keeps no fp32 master weight; "
            "write weight_cast_source: compute, or compute: bf16-mixed"
        )
        problems.append((("precision", "weight_cast_source"), text))
    if precision.backend == "torchao_blockwise" and train.device == "cpu":
        text = (
            "precision.backend: torchao_blockwise needs an NVIDIA GPU of compute capability 9.0, but "
            "train.device is cpu; write backend: reference to emulate the recipe"
        )
        problems.append((("precision", "backend"), text))
    return problems


def jitter_problem(spec: RunSpec) -> Problem | None:
    """Return why a jittered replica is impossible here: only the emulated casts have a grid to shift."""
    if spec.replica_kind != "jitter":
        return None
    if not spec.precision.is_bf16 and spec.precision.backend == "reference":
        return None
    what = (
        "recipe bf16 has no cast"
        if spec.precision.is_bf16
        else f"backend {spec.precision.backend} has kernels"
    )
    return ("precision", "backend"), (
        f"replica_kind: jitter shifts the rounding grid of emulated FP8 casts, but {what}; "
        "write backend: reference in the FP8 arm, or use replica_kind: reorder (rerun on a GPU)"
    )


def switch_problem(spec: RunSpec) -> Problem | None:
    """Return why the switch to BF16 would never come."""
    switch, steps = spec.precision.switch_at, spec.train.steps
    if switch is None or switch < steps:
        return None
    return ("precision", "switch_at"), (
        f"precision.switch_at: {switch} is not below train.steps {steps}, so no step would be BF16; write fewer steps "
        "in FP8, or leave switch_at out"
    )


def rule_problems(spec: RunSpec) -> list[Problem]:
    """Return every combination in `spec` that no backend executes as declared; empty means legal."""
    first = [backend_problem(spec.precision), jitter_problem(spec), switch_problem(spec)]
    return [p for p in first if p is not None] + compute_problems(spec.precision, spec.train)


def require_backend(precision: PrecisionSpec) -> None:
    """Raise `UsageError` unless the backend has the recipe."""
    problem = backend_problem(precision)
    if problem is not None:
        raise UsageError(problem[1])


def jitter_constant(seed: int, replica: int) -> float:
    """Return the grid constant of a replica: uniform in [0.85, 1), a pure function of seed and replica.

    Replica 0 is the original and gets 1. One constant serves every cast of the run (`casts.with_jitter`).
    """
    if replica == 0:
        return 1.0
    digest = hashlib.sha256(f"rounding-grid jitter/{seed}/{replica}".encode()).digest()
    low, high = JITTER_RANGE
    return low + (high - low) * (int.from_bytes(digest[:6]) / 2**48)


def jitter_of(spec: RunSpec) -> float:
    """Return the grid constant of a run: 1 unless it is a jittered replica."""
    return jitter_constant(spec.seed, spec.replica) if spec.replica_kind == "jitter" else 1.0
