"""What a cast to FP8 does to a tensor, in numbers: pure functions of a tensor and a `CastPlan`.

A tensor x [R, C] is an operand as `casts.py` has it: the last axis is the reduced one. A, Z and F are its numbers of
elements, of zeros and of non-finite elements; N = A - Z - F. A scaling group (`CastPlan.granularity`) is *live* when
its amax is positive and finite, *zero* when all its elements are zero, *poisoned* when one of them is not finite: its
scale is then 0 or NaN, its codes are lost, and its finite elements count as lost whole.

    code    = fp8(min(float32(|x|) * scale, max))        q = code / scale, 0 in a poisoned group
    error   = |x - q|                                    per finite element

Counts and values are those of `tensor_schema`:

    zero_count, nonfinite_count      Z and F
    underflow_count                  x is not zero, its code is
    subnormal_count                  the code is not zero and below the format's smallest normal number
    saturated_count                  |x| * scale > max (1 + 2^-20): clamped by more than the rounding of the scale
                                     explains, so never the element that a current scale was computed from
    zero_amax_groups                 zero groups
    amax                             largest finite |x|
    group_amax_min, _median          over live groups (lower median)
    scale_min, scale_max             over live groups; x is multiplied by the scale
    zero_frac                        Z / A
    underflow_, subnormal_, saturated_frac    counts / N
    relative_error                   sum error / sum |x|                           (L1)
    sqnr_db                          10 log10(sum x^2 / sum error^2)               (L2, in dB; NaN if exact)
    lost_l1_frac, lost_l2_frac       norm of the underflowed elements / norm of all finite ones
    dynamic_range_bits               log2(amax / smallest non-zero |x|)
    rms, amax_over_rms               sqrt(sum x^2 / (A - F)), and amax over it

Several casts of one operand, such as those of an accumulation's micro-batches, merge exactly: counts and sums add,
extremes are extremes, the median is the mean of the casts' medians weighted by their live groups. Nothing here waits
for the device: partial sums are device tensors until `finish`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8parity.casts import BLOCK, CastPlan, expand_scale, group_amax, scale_from_amax
from fp8parity.tensor_sums import SATURATION_SLACK, CastSums, assembled, merge, nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CastStats",
    "CastSums",
    "TensorCasts",
    "cast_stats",
    "cast_sums",
    "finish",
    "group_count",
    "merge",
]


@dataclass(frozen=True)
class CastStats:
    """The statistics of one or more casts, as `tensor_schema` names them; NaN where undefined."""

    element_count: int
    group_count: int
    zero_count: int
    nonfinite_count: int
    underflow_count: int
    subnormal_count: int
    saturated_count: int
    zero_amax_groups: int
    amax: float
    group_amax_min: float
    group_amax_median: float
    scale_min: float
    scale_max: float
    zero_frac: float
    underflow_frac: float
    subnormal_frac: float
    saturated_frac: float
    relative_error: float
    sqnr_db: float
    lost_l1_frac: float
    lost_l2_frac: float
    dynamic_range_bits: float
    rms: float
    amax_over_rms: float

    def to_row(self) -> dict[str, Any]:
        """Return the statistics by column."""
        return dict(vars(self))  # all plain numbers: `asdict` would copy each, a hundred times slower


# --- sums of one cast --------------------------------------------------------------------------------------


def group_count(shape: tuple[int, int], plan: CastPlan) -> int:
    """Return the number of scaling groups that hold an element."""
    rows, columns = shape
    if not rows or not columns:
        return 0
    tall, wide = -(-rows // plan.block), -(-columns // plan.block)
    return {"tensor": 1, "row": rows, "block_1xB": rows * wide, "block_BxB": tall * wide}[plan.granularity]


@torch.no_grad()
def cast_sums(x: Tensor, plan: CastPlan, scale: Tensor | None = None) -> CastSums:
    """Return the partial sums of the cast of x [R, C], reduced axis last, any strides.

    `scale` replaces the scale of the present amax, in a shape that broadcasts against that of `casts.scale_of`: for
    casts that keep a scale of their own. `ValueError` unless x has two axes.
    """
    return TensorCasts(x).sums(plan, scale=scale)


def cast_stats(x: Tensor, plan: CastPlan, scale: Tensor | None = None) -> CastStats:
    """Return the statistics of one cast (`cast_sums`); waits for the device once."""
    sums = cast_sums(x, plan, scale)
    return finish(sums.elements, sums.groups, sums.values.tolist())


class TensorCasts:
    """Casts of one tensor x [R, C] under several plans, as it is and transposed, sharing what they have in common."""

    def __init__(self, x: Tensor) -> None:
        if x.ndim != 2:
            raise ValueError(f"statistics need an operand with two axes, got shape {tuple(x.shape)}")
        self.x = x.detach()
        self._done: dict[tuple[CastPlan, bool], CastSums] = {}
        self._fused: Any = None

    @torch.no_grad()
    def sums(self, plan: CastPlan, *, transposed: bool = False, scale: Tensor | None = None) -> CastSums:
        """Return the sums of the cast of x, or of x^T [C, R]."""
        # a tensor and a square have the same groups either way
        turned = transposed and plan.granularity in ("row", "block_1xB")
        if scale is not None:
            return self._sums(plan, transposed, scale)
        if (plan, turned) not in self._done:
            self._done[plan, turned] = self._sums(plan, turned, None)
        return self._done[plan, turned]

    def _sums(self, plan: CastPlan, transposed: bool, scale: Tensor | None) -> CastSums:
        x = self.x.t() if transposed else self.x
        groups = group_count((x.shape[0], x.shape[1]), plan)
        if not x.numel():
            return CastSums(0, 0, nothing(x.device))
        if x.is_cuda and plan.block == BLOCK and _has_triton():
            from fp8parity import tensor_stats_triton as fused

            if self._fused is None:
                self._fused = fused.FusedCasts(self.x)
            return CastSums(x.numel(), groups, self._fused.values(plan, transposed=transposed, scale=scale))
        return CastSums(x.numel(), groups, _values(x, plan, scale))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _square_sum(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return torch.dot(flat, flat)


def _values(x: Tensor, plan: CastPlan, scale: Tensor | None) -> Tensor:
    """Return `CastSums.values` of x [R, C], not empty, by the definitions above and in float64."""
    size = x.to(torch.float32).abs()
    finite = size.isfinite()
    amax = group_amax(size, plan)
    own = scale_from_amax(amax, plan) if scale is None else scale.expand(amax.shape)
    wide = expand_scale(own, x.shape, plan)
    scaled = size * wide
    codes = scaled.clamp(max=plan.max_value).to(plan.dtype).to(torch.float32)
    cast = finite & (size > 0) & expand_scale(amax.isfinite(), x.shape, plan)
    exact = torch.where(finite, size, 0.0).double()
    error = (exact - torch.where(cast, codes.double() / wide.double(), 0.0)).abs()
    under = cast & (codes == 0)
    lost = torch.where(under, exact, 0.0)
    tiny = torch.finfo(plan.dtype).tiny
    sums = (
        (size == 0).sum(),
        (~finite).sum(),
        exact.sum(),
        _square_sum(exact),
        under.sum(),
        (cast & (codes > 0) & (codes < tiny)).sum(),
        (cast & (scaled > plan.max_value * SATURATION_SLACK)).sum(),
        error.sum(),
        _square_sum(error),
        lost.sum(),
        _square_sum(lost),
    )
    smallest = torch.where(exact > 0, exact, math.inf).amin()
    peaks = torch.stack((exact.amax(), -smallest))
    return assembled(torch.stack([value.double() for value in sums]), peaks, amax, own)


# --- from sums to statistics -------------------------------------------------------------------------------


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def finish(elements: int, groups: int, values: Sequence[float]) -> CastStats:
    """Return the statistics of sums that were copied to the host."""
    (
        zero, nonfinite, total, square, under, subnormal, saturated, error_abs, error_square, lost_abs, lost_square,
        zero_groups, live_groups, median, amax, minus_smallest, scale_max, minus_scale_min, minus_group_min,
    ) = values  # fmt: skip
    finite = elements - nonfinite
    nonzero = finite - zero
    rms = math.sqrt(_share(square, finite))
    return CastStats(
        element_count=elements,
        group_count=groups,
        zero_count=int(zero),
        nonfinite_count=int(nonfinite),
        underflow_count=int(under),
        subnormal_count=int(subnormal),
        saturated_count=int(saturated),
        zero_amax_groups=int(zero_groups),
        amax=_finite(amax) if finite else math.nan,
        group_amax_min=_finite(-minus_group_min),
        group_amax_median=_share(median, live_groups),
        scale_min=_finite(-minus_scale_min),
        scale_max=_finite(scale_max),
        zero_frac=_share(zero, elements),
        underflow_frac=_share(under, nonzero),
        subnormal_frac=_share(subnormal, nonzero),
        saturated_frac=_share(saturated, nonzero),
        relative_error=_share(error_abs, total),
        sqnr_db=_decibels(square, error_square),
        lost_l1_frac=_share(lost_abs, total),
        lost_l2_frac=math.sqrt(_share(lost_square, square)),
        dynamic_range_bits=math.log2(amax) - math.log2(-minus_smallest) if nonzero else math.nan,
        rms=rms,
        amax_over_rms=_share(_finite(amax), rms),
    )


def _decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); NaN for an exact cast and without a signal."""
    if not signal or not noise or math.isnan(signal) or math.isnan(noise):
        return math.nan
    return 10 * (math.log10(signal) - math.log10(noise))
