"""The `reference` backend: every recipe on any device, emulated with the exact casts of `casts.py`.

The three GEMMs of a linear multiply FP8 codes and scales; nothing else about them is emulated:

    codes, scale = quantise(operand, CastPlan)              for both operands
    result       = (codes_left / scale_left) @ (codes_right / scale_right)^T    summed in float32
    result       -> compute dtype                            rounded once

Accumulation is therefore better than a tensor core's (about 14 bits on Hopper, DeepSeek-V3 section 3.5.2),
and the order of the sum is that of the device's float32 matmul. Float64 inputs are multiplied and summed in
float64. The high-precision operands are saved and cast again in the backward pass, as torchao does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8parity.casts import (
    GEMMS,
    CastPlan,
    GemmPlan,
    RecipePlan,
    dequantise,
    fake_quantise,
    operands_of,
    quantise,
    recipe_plan,
    with_jitter,
)
from fp8parity.errors import UsageError

if TYPE_CHECKING:
    from fp8parity.spec import PrecisionSpec

SCALED_MM = "fp8parity::scaled_mm"
"""Name under which the profiler shows a reference FP8 GEMM, eager and compiled."""


@torch.library.custom_op(SCALED_MM, mutates_args=())
def scaled_mm(
    left: Tensor,
    left_scale: Tensor,
    left_granularity: str,
    right: Tensor,
    right_scale: Tensor,
    right_granularity: str,
    block: int,
    gemm: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply FP8 codes left [P, C], right [Q, C]: (left / scale) @ (right / scale)^T, `out_dtype` [P, Q].

    Sums in float64 if that is `out_dtype`, else in float32. An operator of its own, so that a profile proves
    which GEMMs ran on FP8 codes, also inside a compiled graph; `gemm`, an index into `casts.GEMMS`, only
    labels it there.
    """
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    a = dequantise(left, left_scale, _layout(left, left_granularity, block), dtype)
    b = dequantise(right, right_scale, _layout(right, right_granularity, block), dtype)
    # autocast would round the dequantised operands to bf16
    with torch.autocast(left.device.type, enabled=False):
        return (a @ b.t()).to(out_dtype)


@scaled_mm.register_fake
def _(
    left: Tensor,
    left_scale: Tensor,
    left_granularity: str,
    right: Tensor,
    right_scale: Tensor,
    right_granularity: str,
    block: int,
    gemm: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=out_dtype)


def _layout(codes: Tensor, granularity: str, block: int) -> CastPlan:
    name = "e4m3fn" if codes.dtype == torch.float8_e4m3fn else "e5m2"
    return CastPlan(name, granularity, block=block)  # type: ignore[arg-type]


def multiply(
    plan: GemmPlan, left: Tensor, right: Tensor, out_dtype: torch.dtype, stored: CastPlan | None = None
) -> Tensor:
    """Return `left` [P, C] @ `right` [Q, C]^T in `out_dtype` as `plan` says.

    `stored` is the cast that made the FP8 copy of the right operand's transpose; it is read where the plan's
    source is "dequantised". A GEMM without casts multiplies the operands themselves, summed in float32
    (float64).
    """
    if plan.left is None or plan.right is None:
        dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
        return (left.to(dtype) @ right.to(dtype).t()).to(out_dtype)
    if plan.right.source == "dequantised":
        if stored is None:
            raise ValueError(f"GEMM {plan.gemm}: the cast of the stored FP8 copy is needed")
        right = fake_quantise(right.t(), stored).t()
    left_codes, left_scale = quantise(left, plan.left)
    right_codes, right_scale = quantise(right, plan.right)
    product: Tensor = scaled_mm(
        left_codes,
        left_scale,
        plan.left.granularity,
        right_codes,
        right_scale,
        plan.right.granularity,
        plan.left.block,
        GEMMS.index(plan.gemm),
        out_dtype,
    )
    return product


class ReferenceMatmul(torch.autograd.Function):
    """output, grad_input and grad_weight of a linear without bias, each under its `GemmPlan`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: RecipePlan) -> Tensor:
        """Map x [..., K] and weight [N, K] to [..., N] in x's dtype."""
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        # autocast is switched off by the caller in the forward pass
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((x.shape[:-1].numel(), x.shape[-1]))
        return multiply(plan.output, rows, weight, x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x and weight in their dtypes; that of weight is rounded to x's first."""
        x, weight = ctx.saved_tensors
        plan: RecipePlan = ctx.plan
        tokens = x.shape[:-1].numel()
        rows = x.reshape(tokens, x.shape[-1])
        grad_output = grad_outputs[0].reshape(tokens, weight.shape[0])
        grad_input = grad_weight = None
        # a backward pass started under autocast would otherwise round the operands
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                left, right = operands_of("grad_input", rows, weight, grad_output)
                grad_input = multiply(plan.grad_input, left, right, x.dtype).reshape(x.shape)
            if ctx.needs_input_grad[1]:
                left, right = operands_of("grad_weight", rows, weight, grad_output)
                product = multiply(plan.grad_weight, left, right, x.dtype, stored=plan.output.left)
                grad_weight = product.to(weight.dtype)
        return grad_input, grad_weight, None


def _apply(x: Tensor, weight: Tensor, plan: RecipePlan) -> Tensor:
    output: Tensor = ReferenceMatmul.apply(x, weight, plan)  # type: ignore[no-untyped-call]
    return output


def compute_dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype a linear computes in: that of autocast on x's own device, else x's; float64 stays."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


class ReferenceLinear(nn.Linear):
    """A linear whose three GEMMs are emulated under a `RecipePlan`; made by `convert`.

    `weight_cast_source`: `compute` casts the copy of the weight in the compute dtype, `master` the parameter
    itself.
    """

    plan: RecipePlan
    weight_cast_source: str

    def forward(self, input: Tensor) -> Tensor:
        """Map input [..., in_features] to [..., out_features] in the compute dtype."""
        dtype = compute_dtype_of(input)
        if self.weight.dtype != dtype and not torch.is_autocast_enabled(input.device.type):
            raise RuntimeError(
                f"input is {input.dtype} and weight is {self.weight.dtype} without autocast; "
                "cast one of them, or run under torch.autocast"
            )
        weight = self.weight.to(dtype) if self.weight_cast_source == "compute" else self.weight
        with torch.autocast(input.device.type, enabled=False):
            output = _apply(input.to(dtype), weight, self.plan)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        """Return nn.Linear's text, the recipe and what the weight cast reads."""
        return (
            f"{super().extra_repr()}, recipe={self.plan.recipe}, weight_cast_source={self.weight_cast_source}"
        )


def convert(linear: nn.Linear, precision: PrecisionSpec, jitter: float = 1.0) -> ReferenceLinear:
    """Turn `linear` into a `ReferenceLinear` in place and return it.

    Its parameters, hooks, training flag and identity stay. `jitter` below 1 shifts the rounding grid. Raises
    `UsageError` for a subclass of `nn.Linear` or an instance with its own `forward`, which would be lost,
    and for a recipe without FP8 casts.
    """
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        raise UsageError(
            f"precision: a {type(linear).__name__} with its own forward cannot become FP8: that forward "
            "would be lost; keep the layer in BF16 with precision.exclude"
        )
    plan = recipe_plan(precision.recipe)
    linear.__class__ = ReferenceLinear
    converted: ReferenceLinear = linear  # type: ignore[assignment]
    converted.plan = plan if jitter == 1.0 else with_jitter(plan, jitter)
    converted.weight_cast_source = precision.weight_cast_source
    return converted
