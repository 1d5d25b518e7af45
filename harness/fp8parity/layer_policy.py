"""Which linears run in FP8 and which stay in BF16, resolved to names before anything is converted.

Order is execution order, never registration order: "first and last N" is a statement about the network's ends.
torchao's filter sees one layer at a time and cannot express it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8parity.errors import UsageError
from fp8parity.precision_rules import FP8_GEMMS
from fp8parity.shapes import LinearShape
from fp8parity.spec import PrecisionSpec


@dataclass(frozen=True)
class LayerDecision:
    """One linear: converted to FP8 or not, and why."""

    fqn: str
    fp8: bool
    reason: str


@dataclass(frozen=True)
class LayerPlan:
    """The decision for every linear in execution order.

    `fp8_flop_share` is FP8's share of the FLOPs of all linears' three GEMMs, those of a converted linear that its
    recipe keeps in high precision not among them.
    """

    decisions: tuple[LayerDecision, ...]
    fp8_flop_share: float

    @property
    def fp8_fqns(self) -> tuple[str, ...]:
        """Names of the linears that run in FP8, in execution order."""
        return tuple(d.fqn for d in self.decisions if d.fp8)


def _matches(pattern: str, fqn: str) -> bool:
    if pattern.startswith("re:"):
        return re.search(pattern[3:], fqn) is not None
    return fnmatchcase(fqn, pattern)


def _check_patterns(name: str, patterns: Sequence[str], fqns: Sequence[str]) -> None:
    for pattern in patterns:
        try:
            hit = any(_matches(pattern, fqn) for fqn in fqns)
        except re.error as error:
            raise UsageError(f"precision.{name}: {pattern!r} is no regular expression ({error})") from error
        if not hit:
            raise UsageError(
                f"precision.{name}: {pattern!r} matches none of the {len(fqns)} linears "
                f"({fqns[0]} ... {fqns[-1]}); write a glob such as 'blocks.*.ffn.down_proj' or 're:REGEX'"
            )


_UNIT_OF: dict[str, Callable[[LinearShape], int]] = {
    "gemm": lambda shape: shape.group,
    "linear": lambda shape: shape.order,
    # the head is no block; it takes the place after the last one when it is counted, as each linear outside blocks does
    "block": lambda shape: -1 - shape.order if shape.block is None else shape.block,
}


def _counts(shape: LinearShape, precision: PrecisionSpec) -> bool:
    return shape.runs and (precision.convert_head or not shape.is_head)


def _edge_reasons(shapes: Sequence[LinearShape], precision: PrecisionSpec) -> dict[str, str]:
    """Return why each linear near an end stays in BF16, by FQN."""
    unit_of = _UNIT_OF[precision.unit]
    units = list(dict.fromkeys(unit_of(s) for s in shapes if _counts(s, precision)))
    first = set(units[: precision.keep_first])
    last = set(units[max(0, len(units) - precision.keep_last) :])
    reasons: dict[str, str] = {}
    for shape in shapes:
        if not shape.runs:
            reasons[shape.fqn] = "its own forward is never called"
        elif shape.is_head and not precision.convert_head:
            reasons[shape.fqn] = "output head"
        elif unit_of(shape) in first:
            reasons[shape.fqn] = f"among the first {precision.keep_first} ({precision.unit})"
        elif unit_of(shape) in last:
            reasons[shape.fqn] = f"among the last {precision.keep_last} ({precision.unit})"
    return reasons


def _reason(shape: LinearShape, precision: PrecisionSpec, edges: dict[str, str]) -> str | None:
    if precision.is_bf16:
        return "control"
    if shape.fqn in edges:
        return edges[shape.fqn]
    if precision.include and not any(_matches(p, shape.fqn) for p in precision.include):
        return "not in precision.include"
    return next((f"precision.exclude {p!r}" for p in precision.exclude if _matches(p, shape.fqn)), None)


def resolve(shapes: Sequence[LinearShape], precision: PrecisionSpec) -> LayerPlan:
    """Return the plan for `shapes` (any order; execution order is `LinearShape.order`).

    Raises `UsageError` when a pattern matches nothing, or when an FP8 recipe leaves no linear in FP8.
    """
    ordered = sorted(shapes, key=lambda s: s.order)
    if not precision.is_bf16 and not any(s.runs for s in ordered):
        raise UsageError(
            f"precision.recipe: {precision.recipe} has nothing to put in FP8: the model calls the forward of none of "
            f"its {len(ordered)} nn.Linear; let it call them (not F.linear with their weights), or leave only bf16"
        )
    fqns = [s.fqn for s in ordered]
    _check_patterns("include", precision.include, fqns)
    _check_patterns("exclude", precision.exclude, fqns)
    edges = {} if precision.is_bf16 else _edge_reasons(ordered, precision)
    reasons = [_reason(shape, precision, edges) for shape in ordered]
    decisions = tuple(
        LayerDecision(shape.fqn, why is None, why or precision.recipe)
        for shape, why in zip(ordered, reasons, strict=True)
    )
    if not precision.is_bf16 and not any(d.fp8 for d in decisions):
        raise UsageError(_nothing_left(ordered, precision))
    # each of a linear's three GEMMs takes 2 M K N
    flops = [s.k * s.n if s.runs else 0 for s in ordered]
    converted = sum(f for f, d in zip(flops, decisions, strict=True) if d.fp8)
    share = FP8_GEMMS[precision.recipe] / 3 * converted / sum(flops) if converted else 0.0
    return LayerPlan(decisions, share)


def _nothing_left(shapes: Sequence[LinearShape], precision: PrecisionSpec) -> str:
    unit_of = _UNIT_OF[precision.unit]
    n_units = len({unit_of(s) for s in shapes if _counts(s, precision)})
    return (
        f"precision.keep_first {precision.keep_first}, keep_last {precision.keep_last} (unit: {precision.unit}), "
        f"include and exclude leave none of {n_units} {precision.unit}s in FP8: the arm would be BF16; "
        f"keep fewer, or use a deeper model"
    )
