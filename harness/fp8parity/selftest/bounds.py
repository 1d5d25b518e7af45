"""What a sound FP8 GEMM may be wrong by: bounds from the formats and from how products are summed, none fitted.

All errors here are relative to the *typical size* of an entry, T = sqrt(sum_c left_c^2 right_c^2), what a sum of
terms of random sign is in the root mean square. In dB: -20 log10(error / T).

* casts         A normal number is rounded by at most half a step and the error is uniform within it. For Gaussian
                values the noise is 10^-3.152 of the signal in E4M3 (three mantissa bits) and 10^-2.554 in E5M2 (two),
                whatever the scale: integrated over the density, it moves by less than 0.05 dB with the position of
                the scale (tests/harness/test_selftest_bounds.py repeats the integral). Values that come from bf16
                lie on a grid 16 times finer than E4M3's and make ties: 1/128 more noise. Both operands of a GEMM add,
                and an operand that is cast twice counts twice.
* result        Rounding to bf16 leaves at most a step of 2^-7 / sqrt(12) of the entry in the root mean square.
* sum in fp32   `terms` roundings of 2^-24.
* Hopper sum    A Hopper tensor core aligns the 32 products of an instruction and the running sum to the largest and
                keeps about 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2, which reports errors near 2 % at 4096
                terms): each is cut at 2^-13 of the sum. 32 products cut with random signs make sqrt(32 / 3) 2^-13 per
                instruction; the running sum is cut towards zero, 2^-13 / 2 per instruction, always the same way. With
                slow accumulation the sum moves to an fp32 register every 128 terms, with fast accumulation never.
* bf16 split    A bf16 GEMM on a GPU may be cut along the sum and its parts added in bf16
                (`allow_bf16_reduced_precision_reduction`, on by default): up to 16 roundings of the result.
"""

from __future__ import annotations

import math
from typing import Literal

from fp8parity.casts import Format, GemmPlan

Accumulation = Literal["fp32", "promoted", "fast", "bf16_split"]
"""How a GEMM sums: in fp32; on a tensor core with a move to fp32 every 128 terms, or never; bf16 partial sums."""

GAUSSIAN_DB: dict[Format, float] = {"e4m3fn": 31.48, "e5m2": 25.52}
"""SQNR in dB that a cast leaves of Gaussian values under any scale that covers them; the module's text says why."""

OUTPUT_ROUNDING = 2.0**-7 / math.sqrt(12)
"""Root-mean-square rounding error of a bf16 result, at the worst place between two powers of two."""

HALF_STEP = 2.0**-8
"""Largest rounding error of a bf16 result."""

SMALLEST = 2.0**-134
"""Half the step of bf16's subnormal numbers."""

TENSOR_CORE_CUT = 2.0**-13
INSTRUCTION_TERMS = 32
PROMOTION_TERMS = 128
SPLIT_ROUNDINGS = 16
ENTRY_FACTOR = 8.0
"""How many times the root mean square the largest of a million accumulation errors may be."""

ORDERING_DB = 2.0
"""Least distance between E4M3 and E5M2 in one operand of a GEMM; 3.9 dB for Gaussian operands."""


def accumulation_error(terms: int, how: Accumulation) -> float:
    """Return the root-mean-square error of summing `terms` products, as a share of the typical size."""
    if how in ("fp32", "bf16_split"):
        return math.sqrt(terms) * 2.0**-24
    run = terms if how == "fast" else min(terms, PROMOTION_TERMS)
    instructions = -(-run // INSTRUCTION_TERMS)
    return TENSOR_CORE_CUT * math.hypot(math.sqrt(instructions * INSTRUCTION_TERMS / 3), instructions / 2)


def arithmetic_error(terms: int, how: Accumulation) -> float:
    """Return the root-mean-square error of sum and result together, as a share of the typical size."""
    roundings = SPLIT_ROUNDINGS if how == "bf16_split" else 1
    return math.hypot(accumulation_error(terms, how), OUTPUT_ROUNDING * math.sqrt(roundings))


def agreement_bound_db(terms: int, how: Accumulation) -> float:
    """Return the least agreement in dB of a sound GEMM with the exact product of its quantised operands."""
    return -20 * math.log10(arithmetic_error(terms, how))


def entry_slack(terms: int, how: Accumulation) -> float:
    """Return what the largest error of one entry may be beyond the rounding of the result, over the typical size."""
    extra = OUTPUT_ROUNDING * math.sqrt(SPLIT_ROUNDINGS) if how == "bf16_split" else 0.0
    return ENTRY_FACTOR * math.hypot(accumulation_error(terms, how), extra)


def sqnr_bound_db(plan: GemmPlan, terms: int, how: Accumulation, sides: tuple[int, int]) -> float:
    """Return the least SQNR in dB against the unquantised operands, for Gaussian ones.

    `sides` P, Q are those of the result. The mean square over its entries, and over the elements drawn for the
    shorter operand, is known to five standard deviations.
    """
    both = [c for c in (plan.left, plan.right) if c is not None]
    casts = sum(10 ** (-GAUSSIAN_DB[c.format] / 10) * (2 if c.source == "dequantised" else 1) for c in both)
    casts *= 1 + 5 * math.hypot(math.sqrt(2 / (sides[0] * sides[1])), math.sqrt(2 / (min(sides) * terms)))
    return -10 * math.log10(casts + arithmetic_error(terms, how) ** 2)
