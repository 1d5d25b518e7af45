"""The bounds of the selftest, against the integrals and simulations they were derived from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8parity.casts import CastPlan, Format, GemmPlan, fake_quantise
from fp8parity.selftest.bounds import (
    GAUSSIAN_DB,
    OUTPUT_ROUNDING,
    TENSOR_CORE_CUT,
    Accumulation,
    accumulation_error,
    agreement_bound_db,
    sqnr_bound_db,
)

MANTISSA = {"e4m3fn": 3, "e5m2": 2}
SMALLEST_EXPONENT = {"e4m3fn": -6, "e5m2": -14}


def noise_share(fmt: Format, sd: float) -> float:
    """Return noise over signal of N(0, sd^2) rounded to `fmt`, integrated over the density."""
    z = np.linspace(1e-6, 6, 400_001)
    x = z * sd
    exponent = np.maximum(np.floor(np.log2(x)), SMALLEST_EXPONENT[fmt])
    step = 2.0 ** (exponent - MANTISSA[fmt])
    error = x - np.round(x / step) * step
    weight = np.exp(-z * z / 2)
    return float((error**2 * weight).sum() / (x**2 * weight).sum())


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_gaussian_noise_does_not_depend_on_the_scale(fmt: Format) -> None:
    found = [-10 * math.log10(noise_share(fmt, 2.0**t)) for t in np.arange(4, 6, 0.05)]
    assert max(found) - min(found) < 0.05
    assert GAUSSIAN_DB[fmt] <= min(found) < GAUSSIAN_DB[fmt] + 0.05


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_gaussian_noise_of_the_exact_cast(fmt: Format) -> None:
    x = torch.randn((2000, 1000), generator=torch.Generator().manual_seed(0)).bfloat16()
    noise = x.double() - fake_quantise(x, CastPlan(fmt, "row"), torch.float64)
    db = -10 * math.log10((noise.square().sum() / x.double().square().sum()).item())
    assert GAUSSIAN_DB[fmt] - 0.02 < db < GAUSSIAN_DB[fmt] + 0.1


def test_rounding_of_a_bf16_result() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (x.bfloat16().double() - x).square().mean().sqrt().item()
    assert 0.7 * OUTPUT_ROUNDING < error < OUTPUT_ROUNDING


def hopper_sum(left: torch.Tensor, right: torch.Tensor, promote: int) -> torch.Tensor:
    """Sum products of rows as the model of the module's text: 32 at a time, cut at 2^-13 of the largest, to zero."""
    total = torch.zeros(len(left), dtype=torch.float64)
    run = torch.zeros_like(total)
    for start in range(0, left.shape[1], 32):
        products = left[:, start : start + 32] * right[:, start : start + 32]
        terms = torch.cat([run[:, None], products], 1)
        exponent = terms.abs().amax(1, keepdim=True).clamp(min=1e-30).log2().floor()
        cut = TENSOR_CORE_CUT * torch.exp2(exponent)
        run = ((terms / cut).trunc() * cut).sum(1)
        if (start + 32) % promote == 0:
            total, run = total + run, torch.zeros_like(run)
    return total + run


@pytest.mark.parametrize(("how", "promote"), [("promoted", 128), ("fast", 1 << 20)])
@pytest.mark.parametrize("terms", [128, 1024, 16384])
def test_a_simulated_tensor_core_stays_within_its_bound(how: Accumulation, promote: int, terms: int) -> None:
    generator = torch.Generator().manual_seed(terms)
    a, b = (torch.randn((200, terms), generator=generator, dtype=torch.float64) for _ in range(2))
    size = (a.square() * b.square()).sum(1).sqrt()
    error = ((hopper_sum(a, b, promote) - (a * b).sum(1)) / size).square().mean().sqrt().item()
    bound = accumulation_error(terms, how)
    assert bound / 8 < error < bound


def test_bounds_as_documented() -> None:
    assert agreement_bound_db(256, "fp32") == pytest.approx(52.9, abs=0.05)
    assert agreement_bound_db(4096, "promoted") == pytest.approx(52.4, abs=0.05)
    assert agreement_bound_db(4096, "fast") == pytest.approx(40.6, abs=0.05)
    assert agreement_bound_db(16384, "fast") == pytest.approx(29.7, abs=0.05)
    assert agreement_bound_db(256, "bf16_split") == pytest.approx(40.9, abs=0.05)


def test_sqnr_of_a_gemm_adds_both_operands() -> None:
    fine, coarse = CastPlan("e4m3fn", "row"), CastPlan("e5m2", "tensor")
    forward, backward = GemmPlan("output", fine, fine), GemmPlan("grad_input", coarse, fine)
    big = (100_000, 100_000)
    assert sqnr_bound_db(forward, 4096, "fp32", big) == pytest.approx(28.45, abs=0.02)
    assert sqnr_bound_db(backward, 4096, "fp32", big) == pytest.approx(24.53, abs=0.02)
    assert sqnr_bound_db(forward, 16, "fp32", (16, 48)) < 27.6  # few elements: their noise is known less well
