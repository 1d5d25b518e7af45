"""What is tested: anything that turns a weight into a module whose forward and backward are the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fp8parity.casts import Gemm, recipe_plan
from fp8parity.layer_policy import LayerDecision, LayerPlan
from fp8parity.precision import apply
from fp8parity.selftest.bounds import Accumulation
from fp8parity.selftest.operands import Operands
from fp8parity.spec import PrecisionSpec

Results = dict[Gemm, Tensor]
"""output [M, N], grad_input [M, K], grad_weight [N, K]."""


class GemmUnderTest(Protocol):
    """A recipe on a backend. A test plants a faulty one by implementing these four members."""

    @property
    def precision(self) -> PrecisionSpec:
        """The recipe it claims to execute, its backend, and what its weight cast reads."""
        ...

    @property
    def multiple(self) -> int:
        """What M, K and N must be multiples of: 16 or 128."""
        ...

    def accumulation(self, gemm: Gemm) -> Accumulation:
        """Return how this GEMM sums."""
        ...

    def linear(self, weight: Tensor) -> nn.Module:
        """Return a module that maps [M, K] to [M, N], with an fp32 parameter `weight` [N, K] equal to `weight`."""
        ...


@dataclass(frozen=True)
class Converted:
    """The linear that training uses: `precision.apply` on an nn.Linear of this device."""

    precision: PrecisionSpec
    device: torch.device
    compiled: bool = False

    @property
    def multiple(self) -> int:
        """128 for torchao's block-scaled kernels, 16 elsewhere."""
        return 128 if self.precision.backend == "torchao_blockwise" else 16

    def accumulation(self, gemm: Gemm) -> Accumulation:
        """Return how this GEMM sums; torchao uses fast accumulation in `output` only."""
        if self.precision.backend == "reference":
            return "fp32" if recipe_plan(self.precision.recipe).gemm(gemm).is_fp8 else self._high_precision()
        if not recipe_plan(self.precision.recipe).gemm(gemm).is_fp8:
            return self._high_precision()
        if self.device.type == "cpu":
            return "fp32"
        fast = gemm == "output" and self.precision.backend == "torchao_float8"
        return "fast" if fast else "promoted"

    def _high_precision(self) -> Accumulation:
        return "fp32" if self.device.type == "cpu" else "bf16_split"

    def linear(self, weight: Tensor) -> nn.Module:
        """Return the converted linear; draws no random number. Raises what `precision.apply` raises."""
        rows, columns = weight.shape
        with torch.random.fork_rng(devices=[]):  # nn.Linear draws a weight that is replaced
            layer = nn.Linear(columns, rows, bias=False).to(self.device)
        with torch.no_grad():
            layer.weight.copy_(weight)
        model = nn.Sequential(layer)
        apply(model, LayerPlan((LayerDecision("0", True, ""),), 1.0), self.precision)
        converted = model[0]
        if self.compiled:
            converted.compile()
        return converted


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the module's weight parameter."""
    return dict(module.named_parameters())["weight"]


def run(module: nn.Module, operands: Operands, wrap: Callable[..., Tensor] | None = None) -> Results:
    """Run forward and backward on input and grad_output under bf16 autocast; gradients do not accumulate.

    `wrap(module, x)` calls the module in another way, such as under activation checkpointing.
    """
    weight = weight_of(module)
    weight.grad = None
    x = operands.input.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        output = module(x) if wrap is None else wrap(module, x)
    output.backward(operands.grad_output.to(output.dtype))
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad.detach().clone() for t in (x, weight)]
    return {"output": output.detach(), "grad_input": gradients[0], "grad_weight": gradients[1]}
