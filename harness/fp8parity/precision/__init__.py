"""Apply a precision recipe to a model, and record what that did."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fp8parity.errors import UsageError
from fp8parity.layer_policy import LayerPlan
from fp8parity.precision.record import ConversionRecord
from fp8parity.spec import PrecisionSpec

__all__ = ["ConversionRecord", "apply", "patch_code_generation"]

Convert = Callable[[nn.Linear, PrecisionSpec], nn.Linear]


def _converter(precision: PrecisionSpec) -> tuple[Convert, tuple[tuple[str, str], ...]]:
    """Return the backend's conversion of one linear and its operand formats per GEMM."""
    if precision.backend == "torchao_float8":
        from fp8parity.precision import torchao_float8

        return torchao_float8.convert, torchao_float8.gemm_dtypes(precision.recipe)
    raise UsageError(f"precision.backend: {precision.backend} is not available in this version; use torchao_float8")


def _check_same_linears(model: nn.Module, plan: LayerPlan) -> None:
    have = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    planned = {d.fqn for d in plan.decisions}
    if have != planned:
        raise UsageError(
            f"precision: the layer plan and the model disagree about the linears: only in the model "
            f"{sorted(have - planned)}, only in the plan {sorted(planned - have)}"
        )


def _replace(model: nn.Module, fqn: str, convert: Convert, precision: PrecisionSpec) -> None:
    parent_name, _, leaf = fqn.rpartition(".")
    parent = model.get_submodule(parent_name)
    linear = model.get_submodule(fqn)
    if type(linear) is not nn.Linear:
        raise UsageError(
            f"precision: {fqn} is a {type(linear).__name__}, not a plain nn.Linear; its own forward would be lost. "
            f"Keep it in BF16: precision.exclude: ['{fqn}']"
        )
    if isinstance(parent, nn.MultiheadAttention):
        raise UsageError(
            f"precision: {fqn} belongs to nn.MultiheadAttention, which never calls it (its weight is read "
            f"directly), so it would stay BF16 in secret. Keep it in BF16: precision.exclude: ['{fqn}']"
        )
    setattr(parent, leaf, _with_state_of(linear, convert(linear, precision)))


def _with_state_of(old: nn.Linear, new: nn.Linear) -> nn.Linear:
    """Carry over what a module swap loses: the training flag and the hooks."""
    new.train(old.training)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, name).update(getattr(old, name))
    for name in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
        getattr(new, name).update(getattr(old, name))
    return new


def apply(model: nn.Module, plan: LayerPlan, precision: PrecisionSpec) -> ConversionRecord:
    """Convert in place the linears that `plan` marks FP8 and return what was done.

    Parameters keep their identity, so weight tying and an existing optimizer survive. Raises `UsageError` when
    plan and model disagree, a layer cannot be converted honestly, or an FP8 recipe converts nothing.
    """
    _check_same_linears(model, plan)
    skipped = tuple((d.fqn, d.reason) for d in plan.decisions if not d.fp8)
    if precision.is_bf16:
        return ConversionRecord("bf16", "none", "compute", (), skipped, 0.0, ())
    convert, dtypes = _converter(precision)
    for fqn in plan.fp8_fqns:
        _replace(model, fqn, convert, precision)
    converted = tuple(fqn for fqn in plan.fp8_fqns if type(model.get_submodule(fqn)) is not nn.Linear)
    if not converted or converted != plan.fp8_fqns:
        raise UsageError(
            f"precision: recipe {precision.recipe} converted {len(converted)} of {len(plan.fp8_fqns)} planned linears"
        )
    return ConversionRecord(
        precision.recipe,
        precision.backend,
        precision.weight_cast_source,
        converted,
        skipped,
        plan.fp8_flop_share,
        dtypes,
    )


def patch_code_generation() -> None:
    """Compile control and FP8 arm with the same code generation (see `torchao_float8.patch_code_generation`)."""
    from fp8parity.precision import torchao_float8

    torchao_float8.patch_code_generation()
