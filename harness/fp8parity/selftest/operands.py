"""Made-up operands of a linear's three GEMMs: shapes, draws, and the cases that break kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8parity.casts import GEMMS, Gemm, operands_of

Shape = tuple[int, int, int]
"""Tokens M, in_features K, out_features N."""

SQUARE: Shape = (256, 256, 256)
"""Two blocks each way, so that scales applied to the wrong axis still fit and show as wrong numbers."""

ODD: Shape = (144, 2064, 272)
"""16 times 9, 129 and 17: each of the three sums ends in an incomplete tile of 32, 64 and 128."""

_ROTATED: dict[int, tuple[Shape, ...]] = {
    16: ((16, 48, 16384), (32, 80, 2064), (64, 144, 4112), (128, 1024, 176)),
    128: ((128, 384, 16384),),
}


def shapes(multiple: int, *, quick: bool) -> list[Shape]:
    """Return the shapes for sizes that must be multiples of 16 or 128, the square one first.

    Each triple comes in three rotations, so that every GEMM sums over every length in it.
    """
    if quick:
        return [SQUARE, ODD] if multiple == 16 else [SQUARE]
    rotations = [(t[i], t[(i + 1) % 3], t[(i + 2) % 3]) for t in _ROTATED[multiple] for i in range(3)]
    return [SQUARE, ODD, *rotations] if multiple == 16 else [SQUARE, *rotations]


def reduced(shape: Shape, gemm: Gemm) -> int:
    """Return the number of terms of each sum of a GEMM."""
    m, k, n = shape
    return {"output": k, "grad_input": n, "grad_weight": m}[gemm]


@dataclass(frozen=True)
class Operands:
    """input [M, K], weight [N, K] and grad_output [M, N]: what the casts read, in bf16."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor

    @property
    def shape(self) -> Shape:
        """Tokens M, in_features K, out_features N."""
        return self.input.shape[0], self.input.shape[1], self.weight.shape[0]

    def pair(self, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Return left [P, C] and right [Q, C] of one GEMM, the reduced axis last."""
        return operands_of(gemm, self.input, self.weight, self.grad_output)


def gaussian(shape: Shape, device: torch.device, seed: int) -> Operands:
    """Draw standard normal operands on the CPU, so that every device gets the same, and move them."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=generator) for size in ((m, k), (n, k), (m, n))]
    return Operands(*(x.to(torch.bfloat16).to(device) for x in drawn))


def mapped(operands: Operands, change: Callable[[Tensor], Tensor], *names: str) -> Operands:
    """Return the operands with `change` applied to copies of those named."""
    return replace(operands, **{name: change(getattr(operands, name).clone()) for name in names})


def _scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def _one_outlier(x: Tensor) -> Tensor:
    x[x.shape[0] // 3, x.shape[1] // 5] = 1024.0
    return x


def _zero_rows(x: Tensor) -> Tensor:
    """Empty rows, columns and a block of 1x128: groups without an amax under every granularity."""
    x[:8], x[:, 16:24], x[32:48, :128] = 0, 0, 0
    return x


def _near_maximum(x: Tensor) -> Tensor:
    return x.sign() * (x.abs() / 8).clamp(0.25, 0.99) * torch.finfo(torch.bfloat16).max


def _powers_of_two(operands: Operands) -> Operands:
    """Spread rows and columns of every operand over 2^-8 to 2^8 each, so that every granularity shows."""
    generator = torch.Generator().manual_seed(17)

    def spread(x: Tensor) -> Tensor:
        for size in ((x.shape[0], 1), (1, x.shape[1])):
            exponents = torch.randint(-8, 9, size, generator=generator).to(x.device)
            x = x * torch.exp2(exponents.float()).to(x.dtype)
        return x

    return mapped(operands, spread, "input", "weight", "grad_output")


def special_cases(base: Operands, *, quick: bool) -> list[tuple[str, Operands]]:
    """Return (case, operands) for the values that casts go wrong at; `base` is Gaussian.

    The factors keep every result within bf16: 2^-50 is 9e-16, below the amax floor of 1e-12; 2^-70 underflows E4M3.
    """
    both = ("input", "grad_output")
    cases = [
        ("sizes over 2^32", _powers_of_two(base)),
        ("one outlier", mapped(base, _one_outlier, *both)),
        ("zero rows", mapped(base, _zero_rows, "input", "weight", "grad_output")),
        ("zeros: input", mapped(base, torch.zeros_like, "input")),
        ("zeros: grad_output", mapped(base, torch.zeros_like, "grad_output")),
        ("tiny 1e-15", mapped(base, _scaled(2.0**-50), *both)),
    ]
    if quick:
        return cases
    small = mapped(base, _scaled(2.0**-60), "weight", "grad_output")
    return [
        *cases,
        ("zeros: weight", mapped(base, torch.zeros_like, "weight")),
        ("at the amax floor", mapped(base, _scaled(2.0**-42), *both)),
        ("below the amax floor", mapped(base, _scaled(2.0**-70), "grad_output")),
        ("huge 2^60", mapped(small, _scaled(2.0**60), "input")),
        ("near bf16's maximum", mapped(small, _near_maximum, "input")),
    ]


def non_finite_cases(base: Operands, *, quick: bool) -> list[tuple[str, Operands]]:
    """Return (case, operands) with one NaN, and unless `quick` one inf, in one operand each."""

    def placed(value: float) -> Callable[[Tensor], Tensor]:
        def place(x: Tensor) -> Tensor:
            x[x.shape[0] // 3, x.shape[1] // 5] = value
            return x

        return place

    values = (math.nan,) if quick else (math.nan, math.inf)
    names = ("input", "weight", "grad_output")
    return [(f"one {value}: {name}", mapped(base, placed(value), name)) for value in values for name in names]


def wide_rows(base: Operands, gemm: Gemm) -> Operands:
    """Return operands whose left rows fall from 1 to 2^-24: within E5M2's range, beyond E4M3's, under one scale."""

    def fall(x: Tensor) -> Tensor:
        exponents = torch.linspace(0, -24, x.shape[0], device=x.device).round()
        return x * torch.exp2(exponents)[:, None].to(x.dtype)

    if gemm == "grad_weight":
        return mapped(base, lambda x: fall(x.t()).t().contiguous(), "grad_output")
    return mapped(base, fall, "input" if gemm == "output" else "grad_output")


def padded(operands: Operands, gemm: Gemm, multiple: int) -> Operands:
    """Return the same problem with the sum of `gemm` filled up with zeros to a multiple; the result is unchanged."""
    m, k, n = operands.shape
    missing = {g: -reduced((m, k, n), g) % multiple if g == gemm else 0 for g in GEMMS}
    dk, dn, dm = missing["output"], missing["grad_input"], missing["grad_weight"]
    pad = torch.nn.functional.pad
    return Operands(
        pad(operands.input, (0, dk, 0, dm)),
        pad(operands.weight, (0, dk, 0, dn)),
        pad(operands.grad_output, (0, dn, 0, dm)),
    )
