"""Faulty backends, planted: each computes a recipe's GEMMs with one mistake that real kernels have made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8parity.casts import (
    GEMMS,
    CastPlan,
    Gemm,
    GemmPlan,
    expand_scale,
    operands_of,
    quantise,
    recipe_plan,
)
from fp8parity.selftest.bounds import Accumulation
from fp8parity.spec import PrecisionSpec

Multiply = Callable[[GemmPlan, Tensor, Tensor], Tensor]
"""left [P, C], right [Q, C] of one GEMM to its result [P, Q] in float32."""


def codes_and_scale(x: Tensor, plan: CastPlan) -> tuple[Tensor, Tensor]:
    codes, scale = quantise(x, plan)
    return codes.float(), expand_scale(scale, codes.shape, plan).expand(codes.shape)


def sound(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    if gemm.left is None or gemm.right is None:
        return left.float() @ right.float().t()
    (a, s), (b, t) = codes_and_scale(left, gemm.left), codes_and_scale(right, gemm.right)
    return (a / s) @ (b / t).t()


def nan_lost(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """Take the amax with a maximum that passes NaN over, and clamp so, as torchao's block-scaled kernels did."""
    return sound(gemm, *(x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) for x in (left, right)))


def nan_spread(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    result = sound(gemm, left, right)
    return result if result.isfinite().all() else torch.full_like(result, math.nan)


class _Gemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: PlantedLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.gemm("output", *layer.forward_operands(x, weight)).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        layer: PlantedLinear = ctx.layer
        both = [operands_of(g, x, weight, grads[0]) for g in ("grad_input", "grad_weight")]
        grad_input = layer.gemm("grad_input", *both[0]).bfloat16()
        grad_weight = layer.gemm("grad_weight", *both[1]).bfloat16().float()
        layer.before_weight_gradient()
        return grad_input, grad_weight, None


class PlantedLinear(nn.Module):
    def __init__(self, weight: Tensor, backend: Planted) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.backend = backend
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            output: Tensor = _Gemms.apply(x, self.weight, self)
            return output

    def forward_operands(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.bfloat16()
        if self.backend.keeps_first_weight:
            self.kept = weight if self.kept is None else self.kept
            weight = self.kept
        return x, weight

    def gemm(self, name: Gemm, left: Tensor, right: Tensor) -> Tensor:
        if name == "grad_input":
            right = right.bfloat16()
        faulty = name in self.backend.gemms
        multiply = self.backend.multiply if faulty else sound
        return multiply(recipe_plan(self.backend.precision.recipe).gemm(name), left, right)

    def before_weight_gradient(self) -> None:
        if self.backend.overwrites_gradient:
            self.weight.grad = None


@dataclass(frozen=True)
class Planted:
    """A backend that multiplies with `multiply` in the GEMMs named; a `GemmUnderTest`."""

    recipe: str
    multiply: Multiply = sound
    gemms: tuple[Gemm, ...] = GEMMS
    keeps_first_weight: bool = False
    overwrites_gradient: bool = False
    multiple: int = 16

    @property
    def precision(self) -> PrecisionSpec:
        return PrecisionSpec(recipe=self.recipe, backend="reference")  # type: ignore[arg-type]

    def accumulation(self, gemm: Gemm) -> Accumulation:
        return "fp32"

    def linear(self, weight: Tensor) -> nn.Module:
        return PlantedLinear(weight, self)


# --- the mistakes ------------------------------------------------------------------------------------------


def _power_of_two(scale: Tensor, how: str) -> Tensor:
    exponent = scale.log2()
    return torch.exp2(exponent.floor() if how == "down" else exponent.ceil())


def scale_rounded(gemm: GemmPlan, left: Tensor, right: Tensor, how: str = "up") -> Tensor:
    """DeepGEMM on Blackwell: fp32 scales handed to a kernel that keeps only their exponent."""
    assert gemm.left is not None
    assert gemm.right is not None
    (a, s), (b, t) = codes_and_scale(left, gemm.left), codes_and_scale(right, gemm.right)
    return (a / _power_of_two(s, how)) @ (b / _power_of_two(t, how)).t()


def scales_exchanged(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """Row scales of the two operands swapped; where the sides differ the kernel reads modulo their length."""
    assert gemm.left is not None
    assert gemm.right is not None
    (a, s), (b, t) = codes_and_scale(left, gemm.left), codes_and_scale(right, gemm.right)
    rows, columns = torch.arange(len(a)) % len(t), torch.arange(len(b)) % len(s)
    return (a / t[rows][:, :1]) @ (b / s[columns][:, :1]).t()


def block_scales_transposed(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """The grid of block scales of the right operand read in the other memory order."""
    assert gemm.left is not None
    assert gemm.right is not None
    a, s = codes_and_scale(left, gemm.left)
    codes, scale = quantise(right, gemm.right)
    misread = expand_scale(scale.t().reshape(scale.shape), codes.shape, gemm.right)
    return (a / s) @ (codes.float() / misread).t()


def tail_skipped(gemm: GemmPlan, left: Tensor, right: Tensor, tile: int = 128) -> Tensor:
    """The loop over the sum runs floor(C / tile) times."""
    rest = left.shape[1] % tile
    if rest in (0, left.shape[1]):
        return sound(gemm, left, right)
    if gemm.left is None or gemm.right is None:
        return left[:, :-rest].float() @ right[:, :-rest].float().t()
    (a, s), (b, t) = codes_and_scale(left, gemm.left), codes_and_scale(right, gemm.right)
    return (a / s)[:, :-rest] @ (b / t)[:, :-rest].t()


def tail_garbage(gemm: GemmPlan, left: Tensor, right: Tensor, tile: int = 128) -> Tensor:
    """The last tile is read to its end, and what lies behind the operands is not zero."""
    behind = -left.shape[1] % tile
    result = sound(gemm, left, right)
    if behind == 0:
        return result
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn((len(x), behind), generator=generator) for x in (left, right))
    return result + a @ b.t()


def tail_nan(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """What lies behind the operands is NaN."""
    result = sound(gemm, left, right)
    return result if left.shape[1] % 128 == 0 else torch.full_like(result, float("nan"))


def formats_exchanged(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """E4M3 where E5M2 is declared for the left operand, and the other way round."""
    assert gemm.left is not None
    other = replace(gemm.left, format="e5m2" if gemm.left.format == "e4m3fn" else "e4m3fn")
    return sound(replace(gemm, left=other), left, right)


def not_clamped(gemm: GemmPlan, left: Tensor, right: Tensor, excess: float = 1.0) -> Tensor:
    """The cast overflows to NaN at the format's maximum; `excess` 2: a power-of-two scale rounded up."""
    assert gemm.left is not None
    assert gemm.right is not None
    values = []
    for x, plan in ((left, gemm.left), (right, gemm.right)):
        _, scale = codes_and_scale(x, plan)
        scaled = x.float() * scale * excess
        codes = scaled.clamp(-plan.max_value, plan.max_value).to(plan.dtype).float()
        codes = codes.where(scaled.abs() < plan.max_value * (1 - 2.0**-20), float("nan"))
        values.append(codes / (scale * excess))
    return values[0] @ values[1].t()


def unquantised(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    return left.float() @ right.float().t()


def scale_forgotten(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    assert gemm.left is not None
    assert gemm.right is not None
    (a, _), (b, t) = codes_and_scale(left, gemm.left), codes_and_scale(right, gemm.right)
    return a @ (b / t).t()


def no_amax_floor(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """max / amax of a group of zeros is infinite, and zero times infinity NaN."""
    if gemm.left is None or gemm.right is None:
        return left.float() @ right.float().t()
    result = sound(gemm, left, right)
    dead = (~left.any(1))[:, None] | (~right.any(1))[None, :]
    return result.where(~dead, float("nan"))


def one_wrong_row(gemm: GemmPlan, left: Tensor, right: Tensor) -> Tensor:
    """One row of the result is the next one's: too few entries for a mean to notice."""
    result = sound(gemm, left, right)
    result[5] = result[6]
    return result
