"""Apply a precision recipe to a model, and record what that did."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8parity.casts import GEMMS, GemmPlan, recipe_plan
from fp8parity.errors import UsageError
from fp8parity.precision.record import ConversionRecord
from fp8parity.precision_rules import require_backend
from fp8parity.spec import PrecisionSpec

if TYPE_CHECKING:
    from fp8parity.layer_policy import LayerPlan

__all__ = ["ConversionRecord", "apply", "gemm_dtypes", "patch_code_generation"]

Convert = Callable[[nn.Linear, PrecisionSpec], nn.Linear]


def _converter(precision: PrecisionSpec, jitter: float) -> Convert:
    """Return the backend's conversion of one linear; `UsageError` for a recipe or jitter it lacks."""
    require_backend(precision)
    if precision.backend == "reference":
        from fp8parity.precision import reference

        return partial(reference.convert, jitter=jitter)
    if jitter != 1.0:
        raise UsageError(
            f"replica_kind: jitter needs emulated casts, backend {precision.backend} has kernels; "
            "write precision.backend: reference"
        )
    if precision.backend == "torchao_blockwise":
        from fp8parity.precision import torchao_blockwise

        return torchao_blockwise.convert
    from fp8parity.precision import torchao_float8

    return torchao_float8.convert


def gemm_dtypes(recipe: str) -> tuple[tuple[str, str], ...]:
    """Return the operand formats of the recipe's three GEMMs, `a x b`, or that one is not quantised."""
    plan = recipe_plan(recipe)

    def formats(gemm: GemmPlan) -> str:
        if gemm.left is None or gemm.right is None:
            return "high precision"
        return f"{gemm.left.format} x {gemm.right.format}".replace("fn", "")

    return tuple((name, formats(plan.gemm(name))) for name in GEMMS)


def _check_same_linears(model: nn.Module, plan: LayerPlan) -> None:
    have = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    planned = {d.fqn for d in plan.decisions}
    if have != planned:
        raise UsageError(
            f"precision: the layer plan and the model disagree about the linears: only in the model "
            f"{sorted(have - planned)}, only in the plan {sorted(planned - have)}"
        )


def _refusal(linear: nn.Module, parent: nn.Module) -> str | None:
    """Return why a linear cannot be converted honestly, or None."""
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return f"is a {type(linear).__name__} with its own forward, which would be lost"
    if isinstance(parent, nn.MultiheadAttention):
        return (
            "belongs to nn.MultiheadAttention, which never calls it (its weight is read directly), so it "
            "would stay BF16 in secret"
        )
    if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        return (
            "belongs to nn.TransformerEncoderLayer, whose evaluation takes a fused path around it and would "
            "stay BF16 in secret (torch.backends.mha.set_fastpath_enabled(False) turns that path off)"
        )
    return None


def _check_convertible(model: nn.Module, fqns: tuple[str, ...]) -> None:
    """Raise `UsageError` for the first linear that must not be converted, before anything is."""
    for fqn in fqns:
        reason = _refusal(model.get_submodule(fqn), model.get_submodule(fqn.rpartition(".")[0]))
        if reason is not None:
            raise UsageError(f"precision: {fqn} {reason}. Keep it in BF16: precision.exclude: ['{fqn}']")


def _replace(model: nn.Module, fqn: str, convert: Convert, precision: PrecisionSpec) -> None:
    parent_name, _, leaf = fqn.rpartition(".")
    linear = model.get_submodule(fqn)
    assert isinstance(linear, nn.Linear)
    try:
        converted = convert(linear, precision)
    except UsageError as error:
        raise UsageError(f"{error} (layer {fqn})") from error
    setattr(model.get_submodule(parent_name), leaf, _with_state_of(linear, converted))


def _with_state_of(old: nn.Linear, new: nn.Linear) -> nn.Linear:
    """Carry over what a module swap loses: the training flag and the hooks."""
    new.train(old.training)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, name).update(getattr(old, name))
    for name in (
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    ):
        getattr(new, name).update(getattr(old, name))
    new._is_full_backward_hook = old._is_full_backward_hook  # without it torch skips the backward hooks
    return new


def apply(
    model: nn.Module, plan: LayerPlan, precision: PrecisionSpec, *, jitter: float = 1.0
) -> ConversionRecord:
    """Convert in place the linears that `plan` marks FP8 and return what was done.

    Parameters keep their identity, so weight tying and an existing optimizer survive. `jitter` is the grid
    constant of a jittered replica (`precision_rules.jitter_of`). Raises `UsageError` when plan and model
    disagree, a layer cannot be converted honestly, the backend lacks the recipe, or an FP8 recipe converts
    nothing.
    """
    _check_same_linears(model, plan)
    skipped = tuple((d.fqn, d.reason) for d in plan.decisions if not d.fp8)
    if precision.is_bf16:
        return ConversionRecord("bf16", "none", "compute", (), skipped, 0.0, ())
    convert = _converter(precision, jitter)
    _check_convertible(model, plan.fp8_fqns)
    for fqn in plan.fp8_fqns:
        _replace(model, fqn, convert, precision)
    converted = tuple(fqn for fqn in plan.fp8_fqns if type(model.get_submodule(fqn)) is not nn.Linear)
    if not converted or converted != plan.fp8_fqns:
        raise UsageError(
            f"precision: recipe {precision.recipe} converted {len(converted)} of {len(plan.fp8_fqns)} linears"
        )
    return ConversionRecord(
        precision.recipe,
        precision.backend,
        precision.weight_cast_source,
        converted,
        skipped,
        plan.fp8_flop_share,
        gemm_dtypes(precision.recipe),
        _notes(precision, jitter),
    )


def _notes(precision: PrecisionSpec, jitter: float) -> tuple[str, ...]:
    notes = {
        "reference": ("emulated: exact casts, products summed in float32",),
        "torchao_blockwise": ("torchao prototype", "autotune: fixed (one tile per quantisation kernel)"),
        "torchao_float8": (),
    }[precision.backend]
    return notes if jitter == 1.0 else (*notes, f"rounding grid shifted by {jitter!r}")


def import_code_generation() -> None:
    """Import the compiler and what `patch_code_generation` needs: a fifth of all that a worker imports."""
    for name in ("torch._inductor.compile_fx", "fp8parity.precision.torchao_float8"):
        importlib.import_module(name)


def patch_code_generation() -> None:
    """Compile both arms with the same code generation (see `torchao_float8.patch_code_generation`)."""
    from fp8parity.precision import torchao_float8

    torchao_float8.patch_code_generation()
