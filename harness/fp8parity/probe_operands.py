"""The operands of every linear's three GEMMs, taken as the casts read them, and reduced to sums on the spot.

Operands are taken after the autocast: the input and the output's gradient in the compute dtype, the weight as
`weight_cast_source` says. What is counted is what one optimizer step casts: each call of a linear and each micro-batch
once, whatever activation checkpointing recomputes; a weight once, since every micro-batch casts the same one.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8parity.casts import CastPlan, Gemm, Operand, RecipePlan, fake_quantise, recipe_plan
from fp8parity.precision.casts_of import KeepsScale, casts_of
from fp8parity.precision.reference import compute_dtype_of
from fp8parity.tensor_stats import CastSums, TensorCasts, merge
from fp8parity_analysis.tensor_schema import TRAINED, WHAT_IF

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSPOSED: dict[tuple[Gemm, Operand], bool] = {
    ("output", "input"): False,
    ("output", "weight"): False,
    ("grad_input", "grad_output"): False,
    ("grad_input", "weight"): True,
    ("grad_weight", "grad_output"): True,
    ("grad_weight", "input"): True,
}
"""Whether a GEMM reads an operand transposed, so that its reduced axis is the last one (`casts.operands_of`)."""


@dataclass(frozen=True)
class WantedCast:
    """One cast to report. `stored` is the cast whose dequantised result a "dequantised" source reads."""

    gemm: Gemm
    operand: Operand
    recipe: str
    kind: str
    plan: CastPlan
    weight_cast_source: str
    stored: CastPlan | None


def _wanted(plan: RecipePlan, kind: str, source: str) -> list[WantedCast]:
    return [
        WantedCast(gemm, operand, plan.recipe, kind, cast, source, plan.output.left)
        for gemm, operand, cast in plan.casts
    ]


def wanted_casts(linear: nn.Module, what_if: Sequence[str], source: str) -> tuple[WantedCast, ...]:
    """Return the casts that `linear` makes, then those of the recipes `what_if` that it does not make."""
    own = casts_of(linear)
    wanted = _wanted(own.plan, TRAINED, own.weight_cast_source) if own else []
    for recipe in dict.fromkeys(what_if):
        if own is None or recipe != own.plan.recipe:
            wanted += _wanted(recipe_plan(recipe), WHAT_IF, source)
    return tuple(wanted)


@dataclass
class OperandTap:
    """One linear: its wanted casts and the sums so far, by cast."""

    fqn: str
    linear: nn.Linear
    wanted: tuple[WantedCast, ...]
    sums: dict[WantedCast, CastSums] = field(default_factory=dict)

    def add(
        self, operand: Operand, casts: TensorCasts, *, gemms: Sequence[Gemm], source: str | None = None
    ) -> None:
        """Add one tensor [rows, columns] that the casts of `operand` in `gemms` read."""
        dequantised: TensorCasts | None = None
        for want in self.wanted:
            if want.operand != operand or want.gemm not in gemms:
                continue
            if source is not None and want.weight_cast_source != source:
                continue
            read = casts
            if want.plan.source == "dequantised" and want.stored is not None:
                dequantised = dequantised or TensorCasts(fake_quantise(casts.x, want.stored))
                read = dequantised
            turned = TRANSPOSED[want.gemm, operand]
            sums = read.sums(want.plan, transposed=turned, scale=self._scale(want))
            seen = self.sums.get(want)
            self.sums[want] = sums if seen is None else merge(seen, sums)

    def _scale(self, want: WantedCast) -> Tensor | None:
        if want.kind != TRAINED or not isinstance(self.linear, KeepsScale):
            return None
        return self.linear.cast_scale(want.gemm, want.operand)

    def rows(self) -> Iterator[tuple[WantedCast, CastSums]]:
        """Yield the casts of GEMMs that ran: a GEMM of the backward pass ran if it got a gradient."""
        ran = {"output"} | {want.gemm for want in self.sums if want.operand == "grad_output"}
        for want in self.wanted:
            if want in self.sums and want.gemm in ran:
                yield want, self.sums[want]


class OperandTaps:
    """Hooks on linears, attached for one probe. `recomputing` is set during the backward pass."""

    def __init__(self, taps: Sequence[OperandTap]) -> None:
        self.taps = tuple(taps)
        self.recomputing = False
        self._last: tuple[Tensor, int, torch.dtype, TensorCasts] | None = None
        self._weighed: set[str] = set()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put a hook on every linear that has a cast to report; removed at the end, whatever happens."""
        handles = [
            tap.linear.register_forward_hook(self._hook(tap), with_kwargs=True)
            for tap in self.taps
            if tap.wanted
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = None

    def _hook(self, tap: OperandTap) -> Any:
        def took(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            x: Tensor = args[0] if args else kwargs["input"]
            learns = output.requires_grad and tap.linear.weight.requires_grad
            if not self.recomputing:
                dtype = compute_dtype_of(x)
                tap.add(
                    "input", self._input(x, dtype), gemms=("output", "grad_weight") if learns else ("output",)
                )
                self._weigh(tap, dtype)
            if output.requires_grad:
                # what a checkpoint recomputes is thrown away or, with a reentrant one, was not tracked before:
                # either way a gradient comes by once
                gemms: list[Gemm] = ["grad_input"] if x.requires_grad else []
                gemms += ["grad_weight"] if learns else []
                output.register_hook(lambda grad: self._gradient(tap, grad, gemms))

        return took

    def _input(self, x: Tensor, dtype: torch.dtype) -> TensorCasts:
        """Return the casts of an input; linears that read the same one (q, k, v) share them."""
        last = self._last
        if last is not None and last[0] is x and last[1:3] == (x._version, dtype):
            return last[3]
        casts = TensorCasts(x.detach().to(dtype).reshape(-1, x.shape[-1]))
        self._last = (x, x._version, dtype, casts)
        return casts

    def _weigh(self, tap: OperandTap, dtype: torch.dtype) -> None:
        if tap.fqn in self._weighed:
            return
        self._weighed.add(tap.fqn)
        for source in dict.fromkeys(want.weight_cast_source for want in tap.wanted):
            weight = tap.linear.weight.detach()
            weight = weight.to(dtype) if source == "compute" else weight
            tap.add("weight", TensorCasts(weight), gemms=("output", "grad_input"), source=source)

    def _gradient(self, tap: OperandTap, grad: Tensor, gemms: Sequence[Gemm]) -> None:
        with torch.no_grad():
            tap.add("grad_output", TensorCasts(grad.detach().reshape(-1, grad.shape[-1])), gemms=gemms)
