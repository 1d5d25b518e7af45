"""The statistics of a cast by their definitions, group by group, in float64 NumPy: the oracle of `tensor_stats`."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fp8parity.casts import CastPlan
from fp8parity.tensor_stats import CastStats

Array = npt.NDArray[np.float64]

NUMPY_FORMATS: dict[str, Any] = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def groups_of(shape: tuple[int, ...], plan: CastPlan) -> list[tuple[slice, slice]]:
    rows, columns = shape
    high, wide = {
        "tensor": (max(rows, 1), max(columns, 1)),
        "row": (1, max(columns, 1)),
        "block_1xB": (1, plan.block),
        "block_BxB": (plan.block, plan.block),
    }[plan.granularity]
    return [
        (slice(r, r + high), slice(c, c + wide))
        for r in range(0, rows, high)
        for c in range(0, columns, wide)
    ]


def scale_of_group(amax: float, plan: CastPlan) -> np.float32:
    top = float(ml_dtypes.finfo(NUMPY_FORMATS[plan.format]).max)
    scale = np.float32(top / max(amax, 1e-12))
    if plan.power_of_two:
        scale = np.float32(2.0) ** np.floor(np.log2(scale))
    return np.float32(scale * np.float32(plan.jitter))


def oracle(x: Array, plan: CastPlan, frozen: float | None = None) -> dict[str, float]:
    """Return the statistics of x [R, C] float32, group by group, in float64."""
    code_type = NUMPY_FORMATS[plan.format]
    info = ml_dtypes.finfo(code_type)
    top, tiny = np.float32(info.max), float(info.tiny)
    count = dict.fromkeys(["underflow", "subnormal", "saturated", "zero_groups"], 0)
    lost, errors, live_amax, live_scale = [], [], [], []
    for place in groups_of(x.shape, plan):
        part = np.abs(x[place].astype(np.float32).ravel())
        finite = part[np.isfinite(part)].astype(np.float64)
        if len(finite) < len(part):
            errors.append(finite)
            continue
        amax = float(part.max())
        scale = scale_of_group(amax, plan) if frozen is None else np.float32(frozen)
        scaled = part * scale
        code = np.minimum(scaled, top).astype(code_type).astype(np.float64)
        under = (part > 0) & (code == 0)
        count["underflow"] += int(under.sum())
        count["subnormal"] += int(((code > 0) & (code < tiny)).sum())
        count["saturated"] += int((scaled.astype(np.float64) > float(top) * (1 + 2**-20)).sum())
        count["zero_groups"] += amax == 0
        lost.append(finite[under])
        errors.append(np.abs(finite - code / float(scale)))
        if amax > 0:
            live_amax.append(amax)
            live_scale.append(float(scale))
    size = np.abs(x.astype(np.float64))
    finite_size = size[np.isfinite(size)]
    nonzero = finite_size[finite_size > 0]
    return _ratios(x, count, finite_size, nonzero, _joined(lost), _joined(errors), live_amax, live_scale)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _div(a: float, b: float) -> float:
    return a / b if b else math.nan


def _ratios(
    x: Array, count: dict[str, int], size: Array, nonzero: Array, lost: Array, error: Array,
    amax: list[float], scale: list[float],
) -> dict[str, float]:  # fmt: skip
    square, rms = float((size**2).sum()), math.sqrt(_div(float((size**2).sum()), len(size)))
    noise = float((error**2).sum())
    return {
        "element_count": x.size,
        "zero_count": int((x == 0).sum()),
        "nonfinite_count": x.size - len(size),
        "underflow_count": count["underflow"],
        "subnormal_count": count["subnormal"],
        "saturated_count": count["saturated"],
        "zero_amax_groups": count["zero_groups"],
        "amax": float(size.max()) if len(size) else math.nan,
        "group_amax_min": min(amax, default=math.nan),
        "group_amax_median": sorted(amax)[(len(amax) - 1) // 2] if amax else math.nan,
        "scale_min": min(scale, default=math.nan),
        "scale_max": max(scale, default=math.nan),
        "zero_frac": _div(int((x == 0).sum()), x.size),
        "underflow_frac": _div(count["underflow"], len(nonzero)),
        "subnormal_frac": _div(count["subnormal"], len(nonzero)),
        "saturated_frac": _div(count["saturated"], len(nonzero)),
        "relative_error": _div(float(error.sum()), float(size.sum())),
        "sqnr_db": 10 * math.log10(square / noise) if square and noise else math.nan,
        "lost_l1_frac": _div(float(lost.sum()), float(size.sum())),
        "lost_l2_frac": math.sqrt(_div(float((lost**2).sum()), square)),
        "dynamic_range_bits": math.log2(nonzero.max() / nonzero.min()) if len(nonzero) else math.nan,
        "rms": rms,
        "amax_over_rms": _div(float(size.max()), rms) if len(size) else math.nan,
    }


def assert_same(stats: CastStats, expected: dict[str, float]) -> None:
    """Counts equal; sums of float64 numbers up to the order of the sum (1e-10, a million terms)."""
    found = stats.to_row()
    for name, value in expected.items():
        if name.endswith("_count") or name == "zero_amax_groups":
            assert found[name] == value, name
        else:
            assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-300, nan_ok=True), name
