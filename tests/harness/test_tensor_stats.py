"""Statistics of casts against every code of both formats, and against an oracle of its own in float64 NumPy."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8parity.casts import RECIPES, CastPlan, Format
from fp8parity.tensor_stats import TensorCasts, cast_stats, cast_sums, finish, merge

from .cast_oracle import NUMPY_FORMATS, Array, assert_same, groups_of, oracle

PLANS = sorted({plan for recipe in RECIPES.values() for _, _, plan in recipe.casts}, key=str)
SMALL_BLOCKS = [
    CastPlan("e4m3fn", "block_1xB", block=4),
    CastPlan("e4m3fn", "block_BxB", block=4),
    CastPlan("e5m2", "block_1xB", block=8, power_of_two=True),
    CastPlan("e5m2", "row"),
    CastPlan("e4m3fn", "row", power_of_two=True, jitter=0.9),
]


def spread(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return numbers over many binades, with rows and columns of different size, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp(3 * torch.randn(rows, columns, generator=generator))
    x = x * 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.05, 0.0, x)


@pytest.mark.parametrize("plan", [*PLANS, *SMALL_BLOCKS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (128, 128), (130, 257), (3, 300), (260, 2)])
def test_oracle_for_every_plan_shape_and_dtype(
    plan: CastPlan, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = spread(*shape).to(dtype)
    assert_same(cast_stats(x, plan), oracle(x.float().numpy(), plan))
    assert_same(cast_stats(x.t(), plan), oracle(x.t().float().numpy(), plan))


def _degenerate() -> dict[str, torch.Tensor]:
    x = spread(9, 12)
    one_inf, one_nan, zero_row = x.clone(), x.clone(), x.clone()
    one_inf[2, 3], one_nan[4, 5] = -math.inf, math.nan
    zero_row[3] = 0
    return {
        "zeros": torch.zeros(5, 6),
        "one inf": one_inf,
        "one nan": one_nan,
        "all nan": torch.full((3, 4), math.nan),
        "no rows": torch.zeros(0, 6),
        "no columns": torch.zeros(6, 0),
        "zero row": zero_row,
        "tiny": x * 1e-14,
        "below the floor": x * 1e-30,
        "subnormal fp32": x * 1e-41,
        "huge": x.sign() * 3e38,
        "constant": torch.full((4, 4), -3.0),
    }


@pytest.mark.parametrize("plan", [*PLANS, *SMALL_BLOCKS], ids=str)
@pytest.mark.parametrize("name", list(_degenerate()))
def test_degenerate_input(plan: CastPlan, name: str) -> None:
    x = _degenerate()[name]
    stats = cast_stats(x, plan)
    assert_same(stats, oracle(x.numpy(), plan))
    assert stats.group_count == len(groups_of(x.shape, plan)) if x.numel() else stats.group_count == 0


def all_codes(name: Format) -> Array:
    """Return every finite non-negative code as a number, in order."""
    codes = np.arange(128, dtype=np.uint8).view(NUMPY_FORMATS[name]).astype(np.float64)
    return np.sort(codes[np.isfinite(codes)])


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_every_code_casts_exactly(name: Format) -> None:
    codes = all_codes(name)  # with amax at the format's maximum the scale is 1
    x = torch.from_numpy(np.concatenate((codes, -codes))).float()[None, :]
    stats = cast_stats(x, CastPlan(name, "tensor"))
    below_normal = {"e4m3fn": 7, "e5m2": 3}[name]
    assert (stats.scale_min, stats.scale_max) == (1.0, 1.0)
    assert (stats.zero_count, stats.underflow_count, stats.saturated_count) == (2, 0, 0)
    assert stats.subnormal_count == 2 * below_normal
    assert (stats.relative_error, stats.lost_l1_frac, stats.lost_l2_frac) == (0, 0, 0)
    assert math.isnan(stats.sqnr_db)
    bits = {"e4m3fn": math.log2(448) + 9, "e5m2": math.log2(57344) + 16}[name]
    assert stats.dynamic_range_bits == pytest.approx(bits, rel=1e-15)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_every_midpoint_and_its_neighbours(name: Format) -> None:
    codes = all_codes(name)
    middle = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    for shifted in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e6))):
        x = np.concatenate((shifted, [codes[-1]])).astype(np.float32)[None, :]
        stats = cast_stats(torch.from_numpy(x), CastPlan(name, "tensor"))
        half = codes[1] / 2  # a tie goes to the even code, zero
        tiny = float(ml_dtypes.finfo(NUMPY_FORMATS[name]).tiny)
        assert stats.underflow_count == int((x <= half).sum())
        assert stats.subnormal_count == int(((x > half) & (x < tiny - half)).sum())
        assert_same(stats, oracle(x, CastPlan(name, "tensor")))


def test_a_current_scale_never_saturates_and_a_stale_one_does() -> None:
    x = spread(40, 70)
    for plan in PLANS:
        assert cast_stats(x, plan).saturated_count == 0
    plan = CastPlan("e4m3fn", "tensor")
    stale = 448 / float(x.abs().max()) * 2**6
    stats = cast_stats(x, plan, torch.tensor(stale))
    assert stats.saturated_count == int((x.abs() * np.float32(stale) > 448 * (1 + 2**-20)).sum()) > 0
    assert (stats.scale_min, stats.scale_max) == (float(np.float32(stale)),) * 2
    assert_same(stats, oracle(x.numpy(), plan, stale))


def test_one_outlier_raises_underflow_and_keeps_sqnr() -> None:
    x = torch.full((16, 16), 2.0**-5)
    clean = cast_stats(x, CastPlan("e4m3fn", "tensor"))
    x[3, 4] *= 2.0**20
    stats = cast_stats(x, CastPlan("e4m3fn", "tensor"))
    assert clean.underflow_count == 0
    assert stats.underflow_count == 255
    assert stats.sqnr_db > 80  # the outlier holds all the energy: SQNR alone sees nothing
    assert stats.lost_l1_frac == pytest.approx(255 / (255 + 2**20), rel=1e-12)
    assert cast_stats(x, CastPlan("e4m3fn", "row", power_of_two=True)).underflow_count == 15


def test_most_rows_tiny_underflow_tensorwise_and_not_rowwise() -> None:
    x = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1, (64, 32))).float()
    x[8:] *= 1e-9
    assert cast_stats(x, CastPlan("e4m3fn", "tensor")).underflow_count == 56 * 32
    rowwise = cast_stats(x, CastPlan("e4m3fn", "row", power_of_two=True))
    assert (rowwise.underflow_count, rowwise.zero_amax_groups) == (0, 0)


def test_a_zero_row_is_zero_amax_and_no_underflow() -> None:
    x = torch.ones(8, 16)
    x[5] = 0
    stats = cast_stats(x, CastPlan("e4m3fn", "row", power_of_two=True))
    assert (stats.zero_amax_groups, stats.zero_count, stats.underflow_count) == (1, 16, 0)
    assert stats.scale_max == stats.scale_min == 256


def test_a_format_mix_up_costs_a_mantissa_bit() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(256, 256))).float()
    right, wrong = cast_stats(x, CastPlan("e4m3fn", "tensor")), cast_stats(x, CastPlan("e5m2", "tensor"))
    assert right.sqnr_db - wrong.sqnr_db == pytest.approx(6.02, abs=0.3)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_merge_is_what_the_casts_were_one_by_one(plan: CastPlan) -> None:
    parts = [spread(rows, 140, seed) for seed, rows in enumerate((30, 7, 130, 1))]
    sums = cast_sums(parts[0], plan)
    for part in parts[1:]:
        sums = merge(sums, cast_sums(part, plan))
    found = finish(sums.elements, sums.groups, sums.values.tolist()).to_row()
    alone = [oracle(part.numpy(), plan) for part in parts]
    for name in ("element_count", "zero_count", "underflow_count", "subnormal_count", "zero_amax_groups"):
        assert found[name] == sum(one[name] for one in alone)
    assert found["amax"] == max(one["amax"] for one in alone)
    assert found["scale_max"] == max(one["scale_max"] for one in alone)
    assert found["scale_min"] == min(one["scale_min"] for one in alone)
    assert found["group_amax_min"] == min(one["group_amax_min"] for one in alone)
    live = [
        len(groups_of(part.shape, plan)) - one["zero_amax_groups"]
        for part, one in zip(parts, alone, strict=True)
    ]
    weighted = sum(n * one["group_amax_median"] for n, one in zip(live, alone, strict=True)) / sum(live)
    assert found["group_amax_median"] == pytest.approx(weighted, rel=1e-12)
    signal = sum((part.double() ** 2).sum().item() for part in parts)
    noise = sum(
        (part.double() ** 2).sum().item() / 10 ** (one["sqnr_db"] / 10)
        for part, one in zip(parts, alone, strict=True)
    )
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-9)


def test_an_outlier_in_one_of_four_micro_batches_is_kept() -> None:
    plan = CastPlan("e4m3fn", "tensor")
    parts = [torch.full((4, 4), 2.0**-5) for _ in range(4)]
    parts[0][1, 1] *= 2.0**20
    sums = cast_sums(parts[0], plan)
    for part in parts[1:]:
        sums = merge(sums, cast_sums(part, plan))
    stats = finish(sums.elements, sums.groups, sums.values.tolist())
    assert stats.amax == 2.0**15
    assert stats.underflow_count == 15  # each micro-batch has a scale of its own
    assert (stats.scale_min, stats.scale_max) == (448 / 2**15, 448 * 2**5)


def test_shared_work_gives_the_same_numbers() -> None:
    x = spread(50, 260).bfloat16()
    casts = TensorCasts(x)
    for plan in PLANS:
        for transposed in (False, True):
            turned = x.t() if transposed else x
            found = casts.sums(plan, transposed=transposed)
            assert_same(
                finish(found.elements, found.groups, found.values.tolist()),
                oracle(turned.float().numpy(), plan),
            )


def test_operands_need_two_axes() -> None:
    with pytest.raises(ValueError, match="two axes, got shape \\(3,\\)"):
        cast_stats(torch.zeros(3), PLANS[0])
