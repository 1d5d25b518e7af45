"""The casts that a linear really makes, read from the layer itself and not from what was asked for.

So a layer whose format was mixed up shows as what it is, and layers that somebody else converted are understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from fp8parity.casts import GEMMS, RECIPES, CastPlan, Format, Gemm, GemmPlan, Operand, RecipePlan, recipe_plan
from fp8parity.errors import UsageError
from fp8parity.precision.reference import ReferenceLinear

if TYPE_CHECKING:
    from torch import Tensor, nn

_FORMATS: dict[torch.dtype, Format] = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class LinearCasts:
    """The casts of a linear's GEMMs, and what its weight cast reads: the `compute` copy or the stored `master`."""

    plan: RecipePlan
    weight_cast_source: str


@runtime_checkable
class KeepsScale(Protocol):
    """A linear whose casts use a scale other than that of the present amax (delayed or frozen scaling)."""

    def cast_scale(self, gemm: Gemm, operand: Operand) -> Tensor | None:
        """Return the scale of the last cast of this operand, None where it is that of the present amax."""
        ...


def casts_of(module: nn.Module) -> LinearCasts | None:
    """Return the casts of a converted linear; None for one that multiplies in high precision.

    Understands `ReferenceLinear`, torchao's `Float8Linear` and its block-scaled prototype, and subclasses of them.
    `UsageError` for FP8 formats that are none of `casts.DTYPES`.
    """
    if isinstance(module, ReferenceLinear):
        return LinearCasts(module.plan, module.weight_cast_source)
    # torchao's own linears, unlike our subclasses, quantise the stored weight
    source = str(getattr(module, "weight_cast_source", "master"))
    names = {base.__name__ for base in type(module).__mro__}
    if "Float8Linear" in names:
        return LinearCasts(_torchao_plan(module.config), source)
    if "Float8BlockwiseLinear" in names:
        return LinearCasts(recipe_plan("blockwise"), source)
    return None


def _torchao_plan(config: Any) -> RecipePlan:
    """Return the casts that a `Float8LinearConfig` describes, under the name of the recipe with the same casts."""

    def cast(name: str) -> CastPlan | None:
        one = getattr(config, f"cast_config_{name}")
        if one.scaling_type.name == "DISABLED":
            return None
        grain = "row" if one.scaling_granularity.name == "AXISWISE" else "tensor"
        if one.target_dtype not in _FORMATS:
            raise UsageError(
                f"precision: a linear casts {name} to {one.target_dtype}, which no recipe here describes (AMD's fnuz "
                "formats are not supported); write backend: reference"
            )
        power_of_two = bool(config.round_scales_to_power_of_2)
        return CastPlan(_FORMATS[one.target_dtype], grain, power_of_two=power_of_two)  # type: ignore[arg-type]

    gemms = {
        "output": GemmPlan("output", cast("input"), cast("weight")),
        "grad_input": GemmPlan("grad_input", cast("grad_output"), cast("weight_for_grad_input")),
        "grad_weight": GemmPlan(
            "grad_weight", cast("grad_output_for_grad_weight"), cast("input_for_grad_weight")
        ),
    }
    known = (name for name, plan in RECIPES.items() if all(plan.gemm(g) == gemms[g] for g in GEMMS))
    return RecipePlan(next(known, "torchao"), **gemms)
