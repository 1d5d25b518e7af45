"""BF16 GEMMs on a machine without BF16 instructions: the products a tensor core sums, summed in fp32 by the CPU.

torch's own bf16 kernels on such a CPU are 5 to 30 times slower than its fp32 kernels. `Fp32AccumulateLinear` rounds
the operands to the compute dtype, multiplies and sums in fp32 and rounds the result once. A product of two bf16
values is exact in fp32, so this is the arithmetic of a bf16 tensor core up to the order of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Fp32Accumulate(torch.autograd.Function):
    """output = x w^T, grad_input = g w, grad_weight = g^T x, each summed in fp32 and rounded to x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].float()
        grad_input = (grad @ weight.float()).to(x.dtype)
        grad_weight = (grad.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype)
        return grad_input, grad_weight


class Fp32AccumulateLinear(nn.Linear):
    """A linear that computes in the autocast dtype of its device with fp32 accumulation."""

    def forward(self, input: Tensor) -> Tensor:
        """Map input [..., in_features] to [..., out_features] in the compute dtype."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        # Autocast must not touch the fp32 matrix products inside.
        with torch.autocast(kind, enabled=False):
            output: Tensor = _Fp32Accumulate.apply(input.to(dtype), self.weight.to(dtype))  # type: ignore[no-untyped-call]
            return output if self.bias is None else output + self.bias.to(dtype)


def use_fp32_accumulation(model: nn.Module) -> tuple[str, ...]:
    """Turn every plain `nn.Linear` of the model into a `Fp32AccumulateLinear`, in place; returns their names."""
    changed = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp32AccumulateLinear
            changed.append(name)
    return tuple(changed)
