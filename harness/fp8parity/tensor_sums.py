"""What a cast leaves behind before it is a statistic: partial sums and extremes on the tensor's device, which merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SATURATION_SLACK = 1 + 2.0**-20
"""A scale is rounded to fp32, a power-of-two scale up to a few ulp too high (`scale_from_amax`), and so is the product:
amax itself then lies at most about 2^-21 beyond the format's maximum, which is no overflow."""

SUMS = (
    "zero",
    "nonfinite",
    "abs",
    "square",
    "underflow",
    "subnormal",
    "saturated",
    "error_abs",
    "error_square",
    "lost_abs",
    "lost_square",
    "zero_groups",
    "live_groups",
    "weighted_median",
)
"""Partial sums of one cast that add up over casts."""

PEAKS = ("amax", "minus_smallest", "scale_max", "minus_scale_min", "minus_group_amax_min")
"""Partial results of one cast whose largest counts; -inf where there is none."""


@dataclass(frozen=True)
class CastSums:
    """What is left of one or more casts: `values` float64 [19] holds `SUMS`, then `PEAKS`, on the tensor's device."""

    elements: int
    groups: int
    values: Tensor


def merge(a: CastSums, b: CastSums) -> CastSums:
    """Return the sums of the casts of both."""
    cut = len(SUMS)
    values = torch.cat((a.values[:cut] + b.values[:cut], torch.maximum(a.values[cut:], b.values[cut:])))
    return CastSums(a.elements + b.elements, a.groups + b.groups, values)


def nothing(device: torch.device) -> Tensor:
    """Return `CastSums.values` of a tensor without elements."""
    zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    return torch.cat((zeros, torch.full((len(PEAKS),), -math.inf, dtype=torch.float64, device=device)))


def assembled(sums: Tensor, peaks: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """Return `CastSums.values` from element sums [11], peaks [2] and the amax and scale of each group.

    A poisoned group's amax is not finite.
    """
    flat = amax.reshape(-1).double()
    live = (flat > 0) & flat.isfinite()
    count = live.sum()
    known = torch.where(live, flat, math.inf)
    # sorted, not torch.median: which on CUDA walks one long row with a single block
    median = known.sort().values.index_select(0, ((count - 1) // 2).clamp(min=0).reshape(1))[0]
    scales = scale.reshape(-1).double()
    groups = (
        (flat == 0).sum().double(),
        count.double(),
        torch.where(count > 0, median * count, 0.0),
        torch.where(live, scales, -math.inf).amax(),
        torch.where(live, -scales, -math.inf).amax(),
        -known.amin(),
    )
    tail = torch.stack(groups)
    return torch.cat((sums, tail[:3], peaks, tail[3:]))
