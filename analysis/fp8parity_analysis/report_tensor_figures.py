"""The pictures of the report's tensor section: which are drawn, in which order, within the size of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis.figures_tensor import AmaxPanel, HeatMap, amax_panel, heat_map, levels_of
from fp8parity_analysis.report_tensor import MAX_ROWS, ranks_of
from fp8parity_analysis.report_tensor_model import Figure, TensorFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_health import ArmHealth, TensorHealth
    from fp8parity_analysis.tensor_panel import IntArray

UNDERFLOW_EDGES = (1e-4, 1e-3, 1e-2, 0.05, 0.25)
LOST_DB_EDGES = (1.0, 2.0, 4.0, 7.0, 12.0)
UNDERFLOW_WORDS = ("below 0.01 %", "0.01–0.1 %", "0.1–1 %", "1–5 %", "5–25 %", "25 % and more")
LOST_DB_WORDS = ("less than 1 dB", "1–2", "2–4", "4–7", "7–12", "12 dB and more")
WORDS = {"underflow": UNDERFLOW_WORDS, "sqnr": LOST_DB_WORDS}
_BUDGET = 1_000_000
"""Bytes of all pictures of the section: the page of a 100-run study stays under 3 MB."""


def figures_of(health: TensorHealth) -> dict[str, TensorFigures]:
    """Return the pictures by recipe: arms with candidates first, until the page is full."""
    found: dict[str, TensorFigures] = {}
    used = 0
    ranked = sorted(enumerate(health.arms, start=1), key=lambda item: not item[1].candidates)
    for index, arm in ranked:
        if used > _BUDGET:
            found[arm.recipe] = TensorFigures(
                (), (), (), "Not drawn: the page is full. report.json has the levels."
            )
            continue
        drawn = _figures(arm, f"t{index}")
        used += sum(len(figure.svg) for figure in (*drawn.amax, *drawn.underflow, *drawn.sqnr))
        found[arm.recipe] = drawn
    return found


def _figures(arm: ArmHealth, key: str) -> TensorFigures:
    pictures = arm.pictures
    onsets = {item.tensor: item.onset.step for item in arm.candidates}
    amax = tuple(
        Figure(
            f"{item.tensor.fqn}, {item.tensor.operand}",
            amax_panel(
                AmaxPanel(pictures.steps, item.test, item.control, onsets.get(item.tensor)),
                f"{key}a{index}",
                f"amax of {item.tensor.fqn}, {item.tensor.operand}, by step: {arm.recipe} and BF16, every seed.",
            ),
        )
        for index, item in enumerate(pictures.amax)
    )
    underflow = levels_of(pictures.underflow, UNDERFLOW_EDGES)
    lost = levels_of(pictures.lost_db, LOST_DB_EDGES)
    return TensorFigures(
        amax,
        _maps(arm, underflow, "Underflow", UNDERFLOW_WORDS),
        _maps(arm, lost, "SQNR lost", LOST_DB_WORDS),
        "What has no map stays below the first step of the scale in every layer and probe.",
    )


def _maps(arm: ArmHealth, levels: IntArray, what: str, words: Sequence[str]) -> tuple[Figure, ...]:
    """Return a map for each GEMM and operand, with the ranks of its candidates."""
    tensors = arm.pictures.tensors
    ranks = {tensor: rank for tensor, rank in ranks_of(arm.candidates).items() if rank <= MAX_ROWS}
    parts: dict[tuple[str, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault((tensor.gemm, tensor.operand), []).append(index)
    found = []
    for (gemm, operand), rows in parts.items():
        cells = levels[rows]
        if not (cells > 0).any():
            continue
        worst = int(cells.max(initial=-1))
        label = (
            f"{what} of {operand} in {gemm}: {len(rows)} layers by {len(arm.pictures.steps)} probes, worst seed. "
            f"Worst: {words[worst] if worst >= 0 else 'not recorded'}."
        )
        heat = HeatMap(
            np.asarray(cells, dtype=np.int64),
            tuple(tensors[row].fqn for row in rows),
            arm.pictures.steps,
            {at: ranks[tensors[row]] for at, row in enumerate(rows) if tensors[row] in ranks},
        )
        found.append(Figure(f"{operand} of {gemm}", heat_map(heat, label)))
    return tuple(found)
