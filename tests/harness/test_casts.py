"""The casts against independent oracles: ml_dtypes and exact fractions; scales, special values, plans, jitter."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8parity import casts
from fp8parity.casts import BLOCK, GEMMS, OPERANDS, RECIPES, CastPlan, GemmPlan, operands_of
from fp8parity.errors import UsageError

FORMATS: tuple[casts.Format, ...] = ("e4m3fn", "e5m2")
ORACLE = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GRANULARITIES: tuple[casts.Granularity, ...] = ("tensor", "row", "block_1xB", "block_BxB")
ALL_PLANS = [
    CastPlan(f, g, power_of_two=p) for f in FORMATS for g in GRANULARITIES for p in (False, True)
]  # fmt: skip


def plan_id(plan: CastPlan) -> str:
    return str(plan)


def code_values(format: casts.Format) -> list[Fraction]:
    """Every finite value of the format, ascending, from the definition of its fields."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if format == "e4m3fn" else (5, 2, 15)
    values = set()
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if (format == "e4m3fn" and code == 127) or (format == "e5m2" and exponent == 2**exponent_bits - 1):
            continue  # e4m3fn has one NaN code and no infinity; e5m2 keeps its top exponent for both
        fraction = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
        values.add(fraction * Fraction(2) ** (max(exponent, 1) - bias))
    return sorted(values | {-v for v in values})


def nearest_even(value: Fraction, grid: list[Fraction]) -> Fraction:
    """Round to the nearest grid value, ties to the even code, beyond the ends to the end."""
    if value <= grid[0] or value >= grid[-1]:
        return grid[0] if value <= grid[0] else grid[-1]
    above = next(i for i, g in enumerate(grid) if g >= value)
    low, high = grid[above - 1], grid[above]
    if value - low != high - value:
        return low if value - low < high - value else high
    # codes alternate with the grid; zero has code 0, so parity is the distance in codes from zero
    return low if abs(above - 1 - grid.index(Fraction(0))) % 2 == 0 else high


def unscaled(x: Tensor, format: casts.Format) -> Tensor:
    """Cast with scale 1: a full-range element makes max / amax equal 1."""
    plan = CastPlan(format, "tensor")
    codes, scale = casts.quantise(torch.cat([x, torch.tensor([plan.max_value])]), plan)
    assert scale.item() == 1.0
    return codes[:-1]


# --- the format itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_all_256_codes_decode_as_the_oracle_says(format: casts.Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(casts.DTYPES[format])
    ours = casts.dequantise(codes, torch.ones(()), CastPlan(format, "tensor")).numpy()
    oracle = np.arange(256, dtype=np.uint8).view(ORACLE[format]).astype(np.float32)
    np.testing.assert_array_equal(
        ours.view(np.uint32) >> 31, np.arange(256) >> 7
    )  # the sign, of zero and NaN too
    np.testing.assert_array_equal(ours, oracle)
    finite = sorted({Fraction(float(v)) for v in ours[np.isfinite(ours)]})
    assert finite == code_values(format)


@pytest.mark.parametrize("format", FORMATS)
def test_every_finite_code_survives_a_round_trip(format: casts.Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(casts.DTYPES[format])
    values = codes.float()
    finite = values.isfinite()
    again = unscaled(values[finite], format)
    assert torch.equal(again.view(torch.uint8), codes[finite].view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_ties_and_their_neighbours_round_to_the_even_code(format: casts.Format) -> None:
    grid = code_values(format)
    ties = [(a + b) / 2 for a, b in pairwise(grid)]
    exact = np.array([float(t) for t in ties], np.float32)
    points = np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])
    ours = unscaled(torch.from_numpy(points), format).float().tolist()
    expected = [float(nearest_even(Fraction(float(p)), grid)) for p in points]
    assert ours == expected
    oracle = points.astype(ORACLE[format]).astype(np.float32)
    assert ours == oracle.tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_subnormals_and_underflow(format: casts.Format) -> None:
    smallest = min(v for v in code_values(format) if v > 0)
    assert smallest == Fraction(2) ** (-9 if format == "e4m3fn" else -16)
    half = float(smallest) / 2
    points = torch.tensor([half, math.nextafter(half, 1) * (1 + 1e-6), float(smallest), -half])
    assert unscaled(points, format).float().tolist() == [0.0, float(smallest), float(smallest), -0.0]


@pytest.mark.parametrize("format", FORMATS)
def test_what_rounding_of_the_scale_pushes_beyond_the_maximum_saturates(format: casts.Format) -> None:
    # 448 and 57344 are far below the next power of two; the jitter-free scale may still be rounded up by half
    # an ulp, so that amax * scale exceeds the maximum: it must become the maximum, never NaN or infinity
    amax = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 0.5
    plan = CastPlan(format, "row")
    codes, scale = casts.quantise(amax[:, None], plan)
    assert (amax[:, None].double() * scale.double() > plan.max_value).any()
    assert (codes.float() == plan.max_value).all()


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000))
@pytest.mark.parametrize("format", FORMATS)
def test_any_float_rounds_as_exact_fractions_say(format: casts.Format, value: float) -> None:
    grid = code_values(format)
    plan = CastPlan(format, "tensor")
    top = plan.max_value
    clipped = max(-top, min(top, value))  # `unscaled` needs max as amax
    ours = unscaled(torch.tensor([clipped]), format).float().item()
    assert ours == float(nearest_even(Fraction(clipped), grid))


# --- scales ------------------------------------------------------------------------------------------------


def test_the_power_of_two_arithmetic_is_exact_for_every_fp32_exponent() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.float32)
    powers = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-126, 128)))
    assert torch.equal(torch.exp2(exponents), powers)
    assert torch.equal(torch.floor(torch.log2(powers)), exponents)


@settings(max_examples=300, deadline=None)
@given(st.floats(min_value=2.0**-50, max_value=2.0**100, width=32))
@example(448.0)
@example(1.75)
def test_the_scale_is_the_exact_quotient_rounded_once_or_down_to_a_power_of_two(amax: float) -> None:
    scale = casts.scale_of(torch.tensor([amax]), CastPlan("e4m3fn", "tensor")).item()
    exact = 448 / max(Fraction(amax), Fraction(1e-12))
    ulp = float(np.spacing(np.float32(scale)))
    # two float64 roundings (2^-53 each) before the one to float32: half an ulp and a hair
    assert abs(Fraction(scale) - exact) <= Fraction(ulp) / 2 * (1 + Fraction(1, 2**27))
    rounded = casts.scale_of(torch.tensor([amax]), CastPlan("e4m3fn", "tensor", power_of_two=True)).item()
    assert math.frexp(rounded)[0] == 0.5
    # log2 near an integer k is resolved to |k| * 2^-24; only so close below 2^k may the result be 2^k
    slack = 1 + Fraction(64, 2**23)
    assert Fraction(rounded) <= Fraction(scale) * slack < Fraction(rounded) * 2 * slack


def test_scale_shapes_and_groups_with_sizes_that_are_no_multiple_of_the_block() -> None:
    x = torch.randn(2, 131, 300, generator=torch.Generator().manual_seed(1))
    shapes = {"tensor": (), "row": (2, 131, 1), "block_1xB": (2, 131, 3), "block_BxB": (2, 2, 3)}
    for granularity, shape in shapes.items():
        plan = CastPlan("e4m3fn", granularity)  # type: ignore[arg-type]
        scale = casts.scale_of(x, plan)
        assert scale.shape == shape
        assert scale.dtype == torch.float32
        expanded = casts.expand_scale(scale, x.shape, plan).expand(x.shape)
        # every element's scale is that of the amax over its own group, found here by plain slicing
        for b, r, c in ((0, 0, 0), (1, 130, 299), (0, 127, 128), (1, 128, 255)):
            rows, columns = (
                slice(r // 128 * 128, r // 128 * 128 + 128),
                slice(c // 128 * 128, c // 128 * 128 + 128),
            )
            group = {
                "tensor": x,
                "row": x[b, r],
                "block_1xB": x[b, r, columns],
                "block_BxB": x[b, rows, columns],
            }[granularity]
            assert expanded[b, r, c].item() == np.float32(448 / float(group.abs().max()))


@pytest.mark.parametrize("plan", ALL_PLANS, ids=plan_id)
def test_a_transposed_view_gives_what_its_copy_gives(plan: CastPlan) -> None:
    x = torch.randn(200, 140, generator=torch.Generator().manual_seed(2)).t()
    a, b = casts.quantise(x, plan), casts.quantise(x.contiguous(), plan)
    assert torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8))
    assert torch.equal(a[1], b[1])


# --- special values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ALL_PLANS, ids=plan_id)
def test_zeros_stay_zero_and_tiny_values_vanish_without_nan(plan: CastPlan) -> None:
    for x in (
        torch.zeros(130, 130),
        torch.full((130, 130), 1e-30),
        torch.full((130, 130), -1e-30).bfloat16(),
    ):
        codes, scale = casts.quantise(x, plan)
        assert scale.isfinite().all()
        assert (codes.float() == 0).all()
        assert (casts.fake_quantise(x, plan) == 0).all()
    row = torch.randn(130, 130)
    row[5] = 0
    kept = casts.fake_quantise(row, plan)
    assert (kept[5] == 0).all()
    assert kept.isfinite().all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block_1xB", "block_BxB"])
@pytest.mark.parametrize(("form", "limit"), [("e4m3fn", 2.18e-18), ("e5m2", 1.33e-22)])
def test_the_largest_group_that_underflows_whole(
    form: casts.Format, granularity: casts.Granularity, power_of_two: bool, limit: float
) -> None:
    """The documented limits, from both sides: half the smallest subnormal code over the scale of the floored amax."""
    plan = CastPlan(form, granularity, power_of_two=power_of_two)
    limit *= (plan.max_value / 1e-12) / casts.scale_from_amax(torch.zeros(()), plan).item()
    if power_of_two and form == "e4m3fn":
        assert limit == pytest.approx(3.47e-18, rel=0.01)
    assert (casts.fake_quantise(torch.full((4, 130), limit * 0.99), plan) == 0).all()
    assert (casts.fake_quantise(torch.full((4, 130), limit * 1.01), plan) > 0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("plan", ALL_PLANS, ids=plan_id)
def test_one_inf_or_nan_makes_its_group_nan_and_nothing_else(plan: CastPlan, bad: float) -> None:
    x = torch.ones(2 * BLOCK, 2 * BLOCK)
    x[3, 7] = bad
    poisoned = casts.fake_quantise(x, plan).isnan()
    expected = torch.zeros_like(poisoned)
    if plan.granularity == "tensor":
        expected[:] = True
    elif plan.granularity == "row":
        expected[3] = True
    elif plan.granularity == "block_1xB":
        expected[3, :BLOCK] = True
    else:
        expected[:BLOCK, :BLOCK] = True
    assert torch.equal(poisoned, expected)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (3, 0, 5), (2, 3, 0)])
@pytest.mark.parametrize("plan", ALL_PLANS, ids=plan_id)
def test_an_empty_tensor_gives_no_codes(plan: CastPlan, shape: tuple[int, ...]) -> None:
    codes, scale = casts.quantise(torch.empty(shape), plan)
    assert codes.shape == shape
    assert scale.isfinite().all()
    assert casts.dequantise(codes, scale, plan).shape == shape


def test_too_few_axes_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"block_BxB scale needs 2 axes or more, got shape \(4,\)"):
        casts.scale_of(torch.ones(4), CastPlan("e4m3fn", "block_BxB"))
    with pytest.raises(ValueError, match="row scale needs 1 axes"):
        casts.scale_of(torch.ones(()), CastPlan("e4m3fn", "row"))


# --- plans -------------------------------------------------------------------------------------------------


def test_the_table_of_formats_and_granularities() -> None:
    def row(recipe: str) -> list[str]:
        return [f"{gemm} {operand}: {plan}" for gemm, operand, plan in RECIPES[recipe].casts]

    assert row("tensorwise") == [
        "output input: e4m3fn, tensor, fp32 scale",
        "output weight: e4m3fn, tensor, fp32 scale",
        "grad_input grad_output: e5m2, tensor, fp32 scale",
        "grad_input weight: e4m3fn, tensor, fp32 scale",
        "grad_weight grad_output: e5m2, tensor, fp32 scale",
        "grad_weight input: e4m3fn, tensor, fp32 scale",
    ]
    assert set(row("rowwise")) == {
        f"{g} {o}: e4m3fn, row, power-of-two scale" for g in GEMMS for o in OPERANDS[g]
    }
    assert row("rowwise_with_gw_hp") == [
        "output input: e4m3fn, row, power-of-two scale",
        "output weight: e4m3fn, row, power-of-two scale",
        "grad_input grad_output: e4m3fn, row, power-of-two scale",
        "grad_input weight: e4m3fn, tensor, power-of-two scale",
    ]
    for recipe in ("blockwise", "blockwise_requant"):
        kinds = {line.split(": ")[0]: line.split(", ")[1] for line in row(recipe)}
        assert kinds == {
            f"{g} {o}": "block 128x128" if o == "weight" else "block 1x128"
            for g in GEMMS
            for o in OPERANDS[g]
        }
    assert row("blockwise_requant")[-1].endswith("from the dequantised FP8 copy")


def test_operands_have_the_reduced_axis_last() -> None:
    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(5, 3, generator=generator), torch.randn(7, 3, generator=generator)
    go = torch.randn(5, 7, generator=generator)
    expected = {"output": x @ w.t(), "grad_input": go @ w, "grad_weight": go.t() @ x}
    for gemm in GEMMS:
        left, right = operands_of(gemm, x, w, go)
        torch.testing.assert_close(left @ right.t(), expected[gemm])


def test_unknown_recipes_and_half_quantised_gemms_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"precision\.recipe: 'bf16' has no FP8 casts; write one of tensorwise"
    ):
        casts.recipe_plan("bf16")
    with pytest.raises(ValueError, match="one operand in FP8 and one in high precision"):
        GemmPlan("output", CastPlan("e4m3fn", "row"), None)
    with pytest.raises(ValueError, match="output does not read grad_output"):
        RECIPES["rowwise"].output.cast_of("grad_output")


# --- the jittered grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_jitter_moves_every_scale_by_one_constant_and_keeps_the_error_size(recipe: str) -> None:
    # Relative rounding error of e4m3 normals is bounded by 2^-4 on any grid; its rms over a log-uniform
    # significand does not depend on where the grid starts. 40 000 elements: the rms is known to about 1 %.
    plan = casts.recipe_plan(recipe)
    moved = casts.with_jitter(plan, 0.9140625)
    x = torch.exp(torch.randn(200, 200, generator=torch.Generator().manual_seed(5)))
    for (_, _, cast), (_, _, shifted) in zip(plan.casts, moved.casts, strict=True):
        assert torch.equal(casts.scale_of(x, shifted), casts.scale_of(x, cast) * 0.9140625)
        error = [(casts.fake_quantise(x, p, torch.float64) / x.double() - 1) for p in (cast, shifted)]
        rms = [e.square().mean().sqrt().item() for e in error]
        assert rms[1] == pytest.approx(rms[0], rel=0.1)
        assert not torch.equal(error[0], error[1])
        # of this constant; over all of them the correlation has sd 0.3, near 1 it is that of the same grid
        correlation = torch.corrcoef(torch.stack([e.flatten() for e in error]))[0, 1].item()
        assert abs(correlation) < 0.5
        assert (
            casts.quantise(x, shifted)[0].float().abs() <= shifted.max_value * 0.9140625 * (1 + 2**-4)
        ).all()


def test_jitter_keeps_the_ratios_of_power_of_two_scales() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(6)) * torch.logspace(-3, 3, 64)[:, None]
    (_, _, row), *_ = casts.with_jitter(casts.recipe_plan("rowwise"), 0.87).casts
    scale = casts.scale_of(x, row)
    mantissa, _ = torch.frexp(scale / scale[0])
    assert (mantissa == 0.5).all()


@pytest.mark.parametrize("constant", [0.84, 1.0, 2.0, 0.0, math.nan])
def test_jitter_outside_its_range_is_refused(constant: float) -> None:
    with pytest.raises(ValueError, match="is outside"):
        casts.with_jitter(casts.recipe_plan("tensorwise"), constant)
