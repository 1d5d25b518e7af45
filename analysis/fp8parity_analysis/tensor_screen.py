"""Every tensor, statistic and reduction of an arm tested against its control: which paired trajectories moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fp8parity_analysis import tensor_reduce as reduce
from fp8parity_analysis.tensor_onset import Envelope, envelope_of, first_outside, own_envelope, resolution_at
from fp8parity_analysis.tensor_panel import STATISTICS
from fp8parity_analysis.tensor_reduce import REDUCTIONS, nanmean, nanmedian
from fp8parity_analysis.tensor_tests import Method, Screen, screen, too_quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_panel import FloatArray, IntArray, Statistic
    from fp8parity_analysis.tensor_signals import Place

JUMP_FLOOR = float(np.log(1.5))
"""Smallest jump worth a word: half as large again as the null's, or as that of its peers."""


class Paired(Protocol):
    """Trajectories [n, L, K] by statistic of an arm, its control, and their difference; [m, L, K] of null pairs.

    `tensors` [L], `steps` [K] and `seed_numbers` [n] name the axes.
    """

    @property
    def tensors(self) -> Sequence[Place]: ...  # noqa: D102
    @property
    def steps(self) -> IntArray: ...  # noqa: D102
    @property
    def seed_numbers(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def matched(self) -> bool: ...  # noqa: D102
    @property
    def null_scale(self) -> float: ...  # noqa: D102
    @property
    def test_paths(self) -> dict[str, FloatArray]: ...  # noqa: D102
    @property
    def control_paths(self) -> dict[str, FloatArray]: ...  # noqa: D102
    @property
    def gaps(self) -> dict[str, FloatArray]: ...  # noqa: D102
    @property
    def nulls(self) -> dict[str, FloatArray]: ...  # noqa: D102


@dataclass(frozen=True)
class Family:
    """One statistic under one reduction over all tensors, tested together. `n_nulls` null pairs were pooled."""

    statistic: Statistic
    reduction: str
    screen: Screen
    n_nulls: int
    quiet: bool = False


def own_steps(paths: FloatArray, steps: IntArray) -> tuple[FloatArray, IntArray]:
    """Return one seed's paths [L, K'] at the probes that it has: a run that ended early is reduced where it ended."""
    probed = ~np.isnan(paths).all(axis=0)
    return paths[:, probed], steps[probed]


def families_of(arm: ArmTensors, method: Method = "bh") -> list[Family]:
    """Return every family of an arm; one is left out when no tensor may be tested in its statistic."""
    found = []
    for statistic in STATISTICS.values():
        testable = arm.testable(statistic.name)
        if np.isnan(testable).all():
            continue
        gaps, nulls = arm.gaps[statistic.name], arm.nulls[statistic.name]
        data = (gaps, nulls, testable)
        found += [
            family_of(arm, statistic, reduction, data, method, _jumps(arm, statistic, gaps, nulls))
            if reduction == "jump"
            else family_of(arm, statistic, reduction, data, method)
            for reduction in REDUCTIONS
        ]
    return found


def family_of(
    arm: Paired,
    statistic: Statistic,
    reduction: str,
    data: tuple[FloatArray, FloatArray, FloatArray],
    method: Method,
    jumps: tuple[FloatArray, FloatArray, float] | None = None,
) -> Family:
    """Test one statistic under one reduction; `data` are gaps [n, L, K], nulls [m, L, K], 1 or NaN by tensor [L].

    `jumps`, which replace level or drift, are as `_jumps` returns them.
    """
    gaps, nulls, testable = data
    share = 0.0
    if jumps is not None:
        values, null_values, share = jumps
        harm, floor = 1, JUMP_FLOOR
    else:
        values = _reduced(gaps, arm.steps, reduction)
        null_values = _reduced(nulls if arm.matched else nulls[:0], arm.steps, reduction)
        harm, floor = statistic.harm, statistic.floor
    values = values * testable
    scale = arm.null_scale
    usable = arm.matched and len(null_values) > 0
    quiet = usable and len(values) > 1 and too_quiet(values, null_values, scale)
    pooled = null_values if usable and not quiet else None
    tested = screen(
        values,
        harm=harm,
        floor=floor,
        nulls=pooled,
        null_scale=scale,
        reference_share=share,
        method=method,
    )
    return Family(statistic, reduction, tested, len(null_values) if pooled is not None else 0, quiet)


def _reduced(paths: FloatArray, steps: IntArray, reduction: str) -> FloatArray:
    """Return level or drift of every unit and tensor, `paths` [n, L, K] to [n, L]."""
    rows = []
    for path in paths:
        own, at = own_steps(path, steps)
        rows.append(reduce.level(own) if reduction == "level" else reduce.drift(own, at))
    return np.stack(rows) if rows else np.zeros((0, paths.shape[1]))


def _jumps(
    arm: ArmTensors, statistic: Statistic, gaps: FloatArray, nulls: FloatArray
) -> tuple[FloatArray, FloatArray, float]:
    """Return ln of each unit's largest jump over what is usual [n, L], the same of the nulls [m, L], and the share.

    Usual is the mean over null pairs where they are matched, whose error the share accounts for; else the median of
    the tensors that play the same part in the same seed, each measured by its own robust noise.
    """
    least = statistic.floor  # a smaller jump is not worth a word, however quiet the path is
    if arm.matched and len(nulls) >= 2:
        unit = np.fmax(nanmean(np.stack([reduce.rms_change(path) for path in nulls]), 0), least)
        usual = _log_jumps(nulls, arm.steps, statistic.harm, unit)
        reference = nanmean(usual, 0)
        return (
            _log_jumps(gaps, arm.steps, statistic.harm, unit) - reference,
            usual - reference,
            1.0 / len(nulls),
        )
    values = _log_jumps(gaps, arm.steps, statistic.harm, None, least)
    parts = np.array([f"{tensor.gemm}/{tensor.operand}" for tensor in arm.tensors])
    for part in np.unique(parts):
        values[:, parts == part] -= nanmedian(values[:, parts == part], 1)[:, None]
    return values, np.zeros((0, len(arm.tensors))), 0.0


def _log_jumps(
    paths: FloatArray, steps: IntArray, harm: int, unit: FloatArray | None, least: float = 0.0
) -> FloatArray:
    rows = []
    for path in paths:
        own, _ = own_steps(path, steps)
        size = unit if unit is not None else np.fmax(reduce.robust_change(own), least)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append(np.maximum(np.log(reduce.jump_size(own, harm) / size), 0.0))
    return np.stack(rows) if rows else np.zeros((0, paths.shape[1]))


def envelope(arm: Paired, statistic: Statistic) -> Envelope:
    """Return what counts as outside for a statistic: by the null pairs, or by the paths' own noise."""
    nulls = arm.nulls[statistic.name]
    found = envelope_of(list(nulls), statistic.floor, float(np.sqrt(arm.null_scale)))
    return found or own_envelope(list(arm.gaps[statistic.name]), statistic.floor)


def departures(arm: Paired, statistic: Statistic, limit: FloatArray) -> list[list[tuple[int, int, int]]]:
    """Return, by tensor [L], (seed, step, resolution) of each seed whose paired path leaves the envelope for good."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in arm.tensors]
    for seed, path in zip(arm.seed_numbers, arm.gaps[statistic.name], strict=True):
        own, steps = own_steps(path, arm.steps)
        for row, at in enumerate(first_outside(own, limit, statistic.harm)):
            if at >= 0:
                found[row].append((seed, int(steps[at]), resolution_at(steps, int(at))))
    return found
