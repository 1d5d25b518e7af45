"""The exact result of a GEMM under a recipe, in float64, and the distance of a real result from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8parity.casts import Gemm, RecipePlan, fake_quantise
from fp8parity.precision.effective import agreement_db, typical_size
from fp8parity.selftest.bounds import HALF_STEP, SMALLEST
from fp8parity.selftest.operands import Operands

WORST = 1e6
"""Reported in place of any larger or undefined ratio: JSON has no infinity."""


def quantised_pair(plan: RecipePlan, gemm: Gemm, operands: Operands) -> tuple[Tensor, Tensor]:
    """Return what the GEMM multiplies, left [P, C] and right [Q, C], cast and back in float64."""
    left, right = operands.pair(gemm)
    own = plan.gemm(gemm)
    if own.left is None or own.right is None:
        return left.double(), right.double()
    if own.right.source == "dequantised":
        assert plan.output.left is not None
        right = fake_quantise(right.t(), plan.output.left).t()
    return fake_quantise(left, own.left, torch.float64), fake_quantise(right, own.right, torch.float64)


@dataclass(frozen=True)
class Distance:
    """`db`: -10 log10 of the mean square error over the typical size; `worst`: largest error over its allowance."""

    db: float
    worst: float
    finite: bool


def distance(actual: Tensor, left: Tensor, right: Tensor, slack: float) -> Distance:
    """Return how far `actual` [P, Q] is from left [P, C] @ right [Q, C]^T in float64.

    An entry is allowed half a bf16 step of its value and `slack` of its typical size (`bounds.entry_slack`).
    """
    expected, size = left @ right.t(), typical_size(left, right)
    finite = bool(actual.isfinite().all())
    error = (actual.double() - expected).abs()
    allowed = HALF_STEP * expected.abs() + slack * size + SMALLEST * (size > 0)
    ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=WORST).max().item()
    db = agreement_db(actual, expected, size)
    return Distance(db if math.isfinite(db) else 0.0, min(ratio, WORST), finite)


def gap(a: Tensor, b: Tensor, size: Tensor) -> float:
    """Return the largest difference of two results over the typical size; 0: bit-equal."""
    different = (a != b) & ~(a.isnan() & b.isnan())
    if not different.any():
        return 0.0
    tiny = torch.finfo(torch.float64).tiny
    worst = (
        ((a.double() - b.double()).abs() / size.clamp(min=tiny))[different].nan_to_num(nan=WORST).max().item()
    )
    return min(worst, WORST)
