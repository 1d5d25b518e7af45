"""What the report draws of an arm's tensors, cut down to what fits a page: the arrays behind heat maps and curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis.tensor_absolute import DECLARED_FORMATS, families_of
from fp8parity_analysis.tensor_reduce import quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_panel import FloatArray, IntArray, Panel, Tensor

BEST_SQNR = {"e4m3": 31.5, "e5m2": 25.5}
"""SQNR in dB that each format gives a well-scaled Gaussian: what a heat map counts down from."""
MAX_TRAJECTORIES = 4


@dataclass(frozen=True)
class Trajectory:
    """The amax of one tensor by seed: `test` and `control` [n, K], NaN where not recorded."""

    tensor: Tensor
    test: FloatArray
    control: FloatArray


@dataclass(frozen=True)
class ArmPictures:
    """Worst seed by tensor and probe [L, K]: `underflow` as a share, `lost_db` below the format's best SQNR."""

    tensors: tuple[Tensor, ...]
    steps: IntArray
    underflow: FloatArray
    lost_db: FloatArray
    amax: tuple[Trajectory, ...]


def pictures_of(arm: ArmTensors, candidates: Sequence[Tensor]) -> ArmPictures:
    """Return the arrays of an arm's pictures: the amax of the first candidates, without any of the widest tensors."""
    panels = [panel for seed in arm.seeds for panel in seed.test]
    chosen = _distinct(candidates) or _distinct(_widest(arm))
    return ArmPictures(
        tensors=arm.tensors,
        steps=arm.steps,
        underflow=_worst([panel.columns["underflow_frac"] for panel in panels]),
        lost_db=_worst([_lost_db(panel, arm.recipe) for panel in panels]),
        amax=tuple(_trajectory(arm, tensor) for tensor in chosen),
    )


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the first few operands: one that enters two GEMMs has one amax."""
    found: dict[tuple[str, str], Tensor] = {}
    for tensor in tensors:
        found.setdefault((tensor.fqn, tensor.operand), tensor)
    return list(found.values())[:MAX_TRAJECTORIES]


def _worst(values: Sequence[FloatArray]) -> FloatArray:
    return quietly(np.nanmax, np.stack(values), axis=0) if values else np.zeros((0, 0))


def _lost_db(panel: Panel, recipe: str) -> FloatArray:
    """Return how far each SQNR lies below the best of the format that the recipe declares, or else that is recorded."""
    declared = DECLARED_FORMATS.get(recipe, {})
    families = families_of(panel)
    for row, tensor in enumerate(panel.tensors):
        families[row] = declared.get(tensor.operand) or families[row]
    best = np.full(families.shape, np.nan)
    for name, value in BEST_SQNR.items():
        best[families == name] = value
    return np.asarray(best - panel.columns["sqnr_db"], dtype=np.float64)


def _widest(arm: ArmTensors) -> list[Tensor]:
    """Return the tensors with the largest amax/rms at their widest: where one scale is hardest to find."""
    spread = _worst([panel.columns["amax_over_rms"] for seed in arm.seeds for panel in seed.test])
    peaks = quietly(np.nanmax, spread, axis=1) if spread.size else np.zeros(0)
    ranked = [
        int(row) for row in np.argsort(-np.nan_to_num(peaks, nan=-np.inf, posinf=np.inf), kind="stable")
    ]
    return [arm.tensors[row] for row in ranked[: 2 * MAX_TRAJECTORIES]]


def _trajectory(arm: ArmTensors, tensor: Tensor) -> Trajectory:
    row = arm.tensors.index(tensor)

    def path(panels: Sequence[Panel]) -> FloatArray:
        return panels[0].columns["amax"][row] if panels else np.full(len(arm.steps), np.nan)

    return Trajectory(
        tensor,
        np.stack([path(seed.test) for seed in arm.seeds]),
        np.stack([path(seed.control) for seed in arm.seeds]),
    )
