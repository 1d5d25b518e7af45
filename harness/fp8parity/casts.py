"""Which cast each operand of each GEMM gets under a recipe, and the exact arithmetic of those casts.

A linear layer of tokens M, in_features K and out_features N has three GEMMs, each written `left @ right^T`
with the reduced (contraction) axis last in both operands:

    output      [M, N] = input       [M, K] @ (weight   [N, K])^T      reduced over K
    grad_input  [M, K] = grad_output [M, N] @ (weight^T [K, N])^T      reduced over N
    grad_weight [N, K] = grad_output^T [N, M] @ (input^T [K, M])^T     reduced over M

Every function here takes an operand in that form: its last axis is the reduced one. The scale is the factor
a tensor is multiplied by before the cast (torchao's direction):

    scale = float32(max / clamp(amax, 1e-12))   in float64, per scaling group; may be rounded down to 2^k
    codes = fp8(clamp(float32(x) * scale, -max, max))        q(x) = codes / scale

as `torchao.float8.float8_utils` (`amax_to_scale`, `to_fp8_saturated`) and the kernels of
`torchao.prototype.blockwise_fp8_training` compute it. What comes of special values, for every recipe:

    all zeros           zeros; the scale is max / 1e-12, never infinite
    amax below 1e-12    the floor takes bits: such a group is cast as if its amax were 1e-12, and what lies at or below
                        half the smallest subnormal number over that scale is zero: 2^-10 1e-12 / 448 = 2.2e-18 in E4M3
                        (2^-10 / 2^48 = 3.5e-18 with power-of-two scales), 2^-17 1e-12 / 57344 = 1.3e-22 in E5M2
    one inf or NaN      NaN throughout its scaling group (the scale is 0 or NaN), never a finite number
    no elements         no codes; a group without elements has amax 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8parity.errors import UsageError
from fp8parity.precision_rules import JITTER_RANGE

Format = Literal["e4m3fn", "e5m2"]
Granularity = Literal["tensor", "row", "block_1xB", "block_BxB"]
Source = Literal["high_precision", "dequantised"]
Gemm = Literal["output", "grad_input", "grad_weight"]
Operand = Literal["input", "weight", "grad_output"]

AMAX_FLOOR = 1e-12
"""Smallest amax a scale is computed from: `EPS` of torchao's float8_utils and of its blockwise kernels."""

BLOCK = 128
"""Side of a block in the block-scaled recipes (DeepSeek-V3, arXiv 2412.19437, 3.3.2; torchao's kernels)."""

GEMMS: tuple[Gemm, ...] = ("output", "grad_input", "grad_weight")
OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""Left and right operand of each GEMM."""

DTYPES: dict[Format, torch.dtype] = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class CastPlan:
    """One cast to FP8: format, what shares a scale, how the scale is rounded, and what is cast.

    `row` scales each row along the reduced axis; `block_1xB` each run of `block` elements along it;
    `block_BxB` each square. `source` "dequantised" casts the dequantised FP8 copy that the output GEMM used,
    not the high-precision tensor. `jitter` multiplies the rounded scale: 1 except in a jittered null replica.
    """

    format: Format
    granularity: Granularity
    power_of_two: bool = False
    block: int = BLOCK
    source: Source = "high_precision"
    jitter: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the codes."""
        return DTYPES[self.format]

    @property
    def max_value(self) -> float:
        """Largest finite value of the format: 448 or 57344."""
        return torch.finfo(self.dtype).max

    def __str__(self) -> str:
        """Return the plan in a few words, as error messages and the documentation show it."""
        size = {"block_1xB": f"block 1x{self.block}", "block_BxB": f"block {self.block}x{self.block}"}
        parts = [self.format, size.get(self.granularity, self.granularity)]
        parts.append("power-of-two scale" if self.power_of_two else "fp32 scale")
        if self.source == "dequantised":
            parts.append("from the dequantised FP8 copy")
        return ", ".join(parts)


@dataclass(frozen=True)
class GemmPlan:
    """The casts of one GEMM's two operands; None twice means that this GEMM stays in high precision."""

    gemm: Gemm
    left: CastPlan | None
    right: CastPlan | None

    def __post_init__(self) -> None:
        if (self.left is None) != (self.right is None):
            raise ValueError(f"GEMM {self.gemm}: one operand in FP8 and one in high precision has no kernel")

    @property
    def is_fp8(self) -> bool:
        """Whether the GEMM multiplies FP8 operands."""
        return self.left is not None

    def cast_of(self, operand: Operand) -> CastPlan | None:
        """Return the cast of `operand`; `ValueError` if the GEMM does not read it."""
        left, right = OPERANDS[self.gemm]
        if operand not in (left, right):
            raise ValueError(f"GEMM {self.gemm} does not read {operand}")
        return self.left if operand == left else self.right


@dataclass(frozen=True)
class RecipePlan:
    """The casts of a recipe's three GEMMs."""

    recipe: str
    output: GemmPlan
    grad_input: GemmPlan
    grad_weight: GemmPlan

    def gemm(self, name: Gemm) -> GemmPlan:
        """Return the plan of one GEMM by name."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}[name]

    @property
    def casts(self) -> tuple[tuple[Gemm, Operand, CastPlan], ...]:
        """Every cast of the recipe with the GEMM and operand it belongs to."""
        rows = [(g, o, self.gemm(g).cast_of(o)) for g in GEMMS for o in OPERANDS[g]]
        return tuple((g, o, plan) for g, o, plan in rows if plan is not None)


def _recipe(
    name: str,
    output: tuple[CastPlan, CastPlan],
    grad_input: tuple[CastPlan, CastPlan],
    grad_weight: tuple[CastPlan | None, CastPlan | None],
) -> RecipePlan:
    return RecipePlan(
        name,
        GemmPlan("output", *output),
        GemmPlan("grad_input", *grad_input),
        GemmPlan("grad_weight", *grad_weight),
    )


def _recipes() -> dict[str, RecipePlan]:
    tensor, gradient = CastPlan("e4m3fn", "tensor"), CastPlan("e5m2", "tensor")
    row = CastPlan("e4m3fn", "row", power_of_two=True)
    whole_weight = CastPlan("e4m3fn", "tensor", power_of_two=True)
    tile, square = CastPlan("e4m3fn", "block_1xB"), CastPlan("e4m3fn", "block_BxB")
    again = replace(tile, source="dequantised")
    plans = (
        _recipe("tensorwise", (tensor, tensor), (gradient, tensor), (gradient, tensor)),
        _recipe("rowwise", (row, row), (row, row), (row, row)),
        _recipe("rowwise_with_gw_hp", (row, row), (row, whole_weight), (None, None)),
        _recipe("blockwise", (tile, square), (tile, square), (tile, tile)),
        # DeepSeek-V3 stores the 1x128 FP8 activations of the forward pass; for the weight gradient they are
        # read out, dequantised, transposed and quantised again into 128x1 tiles (section 3.5.2 of its report)
        _recipe("blockwise_requant", (tile, square), (tile, square), (tile, again)),
    )
    return {plan.recipe: plan for plan in plans}


RECIPES: dict[str, RecipePlan] = _recipes()
"""Every FP8 recipe by name."""


def recipe_plan(recipe: str) -> RecipePlan:
    """Return the casts of `recipe`; `UsageError` names the known ones."""
    if recipe not in RECIPES:
        raise UsageError(f"precision.recipe: {recipe!r} has no FP8 casts; write one of {', '.join(RECIPES)}")
    return RECIPES[recipe]


def with_jitter(plan: RecipePlan, constant: float) -> RecipePlan:
    """Return `plan` on a shifted rounding grid: every scale is multiplied by `constant` after its rounding.

    The replica rounds as coarsely as the original but elsewhere: a null of equal noise. The errors of the two are
    uncorrelated on the average over constants, not for each: E4M3's correlation has mean 0 and standard deviation 0.3,
    from -0.45 to above 0.9 as the constant nears 1. Power-of-two recipes keep what their rule is for: with one constant
    for all casts the ratio of any two scales is still a power of two, so forward and backward round a large value
    alike. `ValueError` unless 0.85 <= constant < 1: above 1 amax would saturate, and a power of two shifts
    no grid.
    """
    low, high = JITTER_RANGE
    if not low <= constant < high:
        raise ValueError(f"jitter constant {constant} is outside [{low}, {high})")

    def shifted(cast: CastPlan | None) -> CastPlan | None:
        return None if cast is None else replace(cast, jitter=constant)

    def moved(gemm: GemmPlan) -> GemmPlan:
        return replace(gemm, left=shifted(gemm.left), right=shifted(gemm.right))

    return RecipePlan(plan.recipe, moved(plan.output), moved(plan.grad_input), moved(plan.grad_weight))


def operands_of(gemm: Gemm, input: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two operands of `gemm` as views with the reduced axis last.

    `input` [M, K], `weight` [N, K], `grad_output` [M, N]; the result is `left @ right^T`.
    """
    if gemm == "output":
        return input, weight
    if gemm == "grad_input":
        return grad_output, weight.t()
    return grad_output.t(), input.t()


def _padded(x: Tensor, missing: tuple[int, ...]) -> Tensor:
    return F.pad(x, missing) if any(missing) else x


def group_amax(x: Tensor, plan: CastPlan) -> Tensor:
    """Return the amax of every scaling group in x's dtype, in the shape documented at `scale_of`."""
    size, block = x.abs(), plan.block
    if plan.granularity == "tensor":
        return size.amax() if x.numel() else size.new_zeros(())
    if plan.granularity == "row":
        return size.amax(-1, keepdim=True) if x.shape[-1] else size.new_zeros((*x.shape[:-1], 1))
    # zeros fill the last, incomplete block: they never raise an amax
    columns = -(-x.shape[-1] // block)
    padded = _padded(size, (0, columns * block - x.shape[-1]))
    tiles = padded.reshape(*x.shape[:-1], columns, block).amax(-1)
    if plan.granularity == "block_1xB":
        return tiles
    rows = -(-x.shape[-2] // block)
    padded = _padded(tiles, (0, 0, 0, rows * block - x.shape[-2]))
    return padded.reshape(*x.shape[:-2], rows, block, columns).amax(-2)


def scale_of(x: Tensor, plan: CastPlan) -> Tensor:
    """Return the fp32 scale of every scaling group of `x` [..., R, C], C the reduced axis.

    Shapes: tensor []; row [..., R, 1]; block_1xB [..., R, ceil(C/B)]; block_BxB [..., ceil(R/B), ceil(C/B)].
    Sizes need not be multiples of the block. `ValueError` if `x` has too few axes for the granularity.
    """
    needed = {"tensor": 0, "row": 1, "block_1xB": 1, "block_BxB": 2}[plan.granularity]
    if x.ndim < needed:
        raise ValueError(
            f"a {plan.granularity} scale needs {needed} axes or more, got shape {tuple(x.shape)}"
        )
    return scale_from_amax(group_amax(x, plan), plan)


def scale_from_amax(amax: Tensor, plan: CastPlan) -> Tensor:
    """Return the fp32 scale that belongs to each amax (any shape, as `group_amax` gives them)."""
    # float64, and Python scalar over tensor, as torchao: the same two roundings
    scale = (plan.max_value / amax.to(torch.float64).clamp(min=AMAX_FLOOR)).to(torch.float32)
    if plan.power_of_two:
        # log2 in fp32 as torchao: a few ulp below 2^k it rounds up, which the clamp of the cast absorbs
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale if plan.jitter == 1.0 else scale * plan.jitter


def expand_scale(scale: Tensor, shape: torch.Size, plan: CastPlan) -> Tensor:
    """Return `scale` in a shape that broadcasts against a tensor of `shape`."""
    if plan.granularity in ("tensor", "row"):
        return scale
    wide = scale.repeat_interleave(plan.block, -1)[..., : shape[-1]]
    if plan.granularity == "block_1xB":
        return wide
    return wide.repeat_interleave(plan.block, -2)[..., : shape[-2], :]


def quantise(x: Tensor, plan: CastPlan) -> tuple[Tensor, Tensor]:
    """Return the FP8 codes, in the shape of `x`, and the scales (`scale_of`) of `x` [..., R, C]."""
    if plan.granularity.startswith("block"):
        x = x.contiguous()  # a transposed operand meets a scale per block twice as fast
    scale = scale_of(x, plan)
    scaled = x.to(torch.float32) * expand_scale(scale, x.shape, plan)
    # the explicit clamp: torch's own cast of e5m2 does not saturate
    return scaled.clamp(-plan.max_value, plan.max_value).to(plan.dtype), scale


def dequantise(codes: Tensor, scale: Tensor, plan: CastPlan, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `codes / scale` in `dtype` (float32 or float64); the division is rounded once in that type."""
    return codes.to(dtype) / expand_scale(scale, codes.shape, plan).to(dtype)


def fake_quantise(x: Tensor, plan: CastPlan, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what FP8 keeps of `x`: cast and back, in `dtype`."""
    codes, scale = quantise(x, plan)
    return dequantise(codes, scale, plan, dtype)
