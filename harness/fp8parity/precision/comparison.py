"""Declared against executed: differences between a layer plan and an `ExecutionRecord`, each named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8parity.casts import GEMMS, Gemm, GemmPlan, RecipePlan, recipe_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8parity.layer_policy import LayerPlan
    from fp8parity.precision.execution import ExecutionRecord, LayerExecution, Phase, StepCount

COMPUTE = "bfloat16"
"""What every linear computes in under either value of `train.compute`, unless a forward of its own says otherwise."""


def compare(
    record: ExecutionRecord,
    plan: LayerPlan,
    recipe: str,
    *,
    checkpointing: bool = False,
    fp8_evaluation: bool = True,
) -> list[str]:
    """Return every difference between what was declared and what `record` saw; empty means proven.

    `recipe` is the precision recipe, "bf16" for a control. `checkpointing` says that activations are
    recomputed. `fp8_evaluation` says that the observed evaluation is the arm's own forward, not that of a
    BF16 twin.
    """
    casts = None if recipe == "bf16" else recipe_plan(recipe)
    phases: list[Phase] = ["train"]
    phases += ["eval"] if any(entry.phase == "eval" for entry in record.layers) else []
    differences = list(_order(record, plan))
    for phase in phases:
        observed = {entry.fqn: entry for entry in record.layers if entry.phase == phase}
        differences += _missing(observed, plan, phase)
        fp8 = set(plan.fp8_fqns) if casts is not None and (phase == "train" or fp8_evaluation) else set()
        for fqn, entry in observed.items():
            differences += _layer(entry, casts if fqn in fp8 else None)
    differences += [
        f"{n} FP8 GEMMs ({name}) ran outside every linear in phase {phase}"
        for phase, name, n in record.unattributed
    ]
    if casts is not None and record.total("train") == 0:
        differences.insert(0, f"no FP8 GEMM ran in training: recipe {recipe} is declared, the arm is BF16")
    if checkpointing and not any(entry.recomputed for entry in record.layers):
        differences.append("activation checkpointing is declared, but no linear was recomputed")
    return differences


def compare_compiled(record: ExecutionRecord, executed: StepCount) -> list[str]:
    """Compare the step as it trains, declared compiled, with the uncompiled record's."""
    expected, differences = record.total("train"), []
    if executed.fp8_gemms != expected:
        differences.append(
            f"the compiled step ran {executed.fp8_gemms} FP8 GEMMs, the uncompiled one {expected}"
        )
    if not executed.compiled_regions:
        differences.append(
            "train.compile: blocks is declared, but no compiled code ran (is TORCHDYNAMO_DISABLE or "
            "TORCH_COMPILE_DISABLE set, or the blocks' forward kept from the compiler?); remove that, or write "
            "train.compile: off"
        )
    return differences


def _missing(observed: dict[str, LayerExecution], plan: LayerPlan, phase: Phase) -> list[str]:
    planned = [d.fqn for d in plan.decisions]
    return [
        f"{fqn}: in the layer plan, but no linear of the model" for fqn in planned if fqn not in observed
    ] + [
        f"{fqn}: a linear of the model that the layer plan does not know (phase {phase})"
        for fqn in observed
        if fqn not in planned
    ]


def _order(record: ExecutionRecord, plan: LayerPlan) -> Iterator[str]:
    """Yield a difference when the plan's order, and so its first and last N, is not that of execution."""
    executed = list(record.executed("train"))
    planned = [d.fqn for d in plan.decisions if d.fqn in executed]
    executed = [fqn for fqn in executed if fqn in planned]
    for position, (declared, ran) in enumerate(zip(planned, executed, strict=True)):
        if declared != ran:
            yield (
                f"{ran}: executes at position {position}, where the layer plan has {declared}; the plan's "
                "first and last N are not the first and last that run (registration order?)"
            )
            return


def _layer(entry: LayerExecution, casts: RecipePlan | None) -> list[str]:
    where = "training" if entry.phase == "train" else "evaluation"
    if casts is None:
        ran = sum(n for _, n in entry.fp8)
        if ran:
            return [f"{entry.fqn}: declared BF16, but {ran} FP8 GEMMs ran in {where}"]
        return list(_dtype(entry, where))
    calls = entry.calls + entry.recomputed
    if calls == 0:
        return [f"{entry.fqn}: converted, but its forward was never executed in {where}"]
    differences = [*_dtype(entry, where), *_forward(entry, where)]
    if entry.phase == "train":
        differences += _backward(entry, casts)
    for gemm in GEMMS:
        differences += _formats(entry, gemm, casts.gemm(gemm), where)
    return differences


def _dtype(entry: LayerExecution, where: str) -> Iterator[str]:
    """Yield a difference when a linear computes in another dtype than `train.compute` says (bfloat16 either way)."""
    others = [name for name in entry.computed if name != COMPUTE]
    if others:
        yield (
            f"{entry.fqn}: computes in {' and '.join(others)} in {where}, declared {COMPUTE} (train.compute): is "
            "autocast switched off around it, or its input float64? Let it compute in bfloat16; where another dtype is "
            "meant in every arm, make it a subclass of nn.Linear with a forward of its own, kept out of FP8 by "
            "precision.exclude"
        )


def _forward(entry: LayerExecution, where: str) -> list[str]:
    calls, ran = entry.calls + entry.recomputed, entry.count("output")
    if ran == calls:
        return []
    if ran == 0:
        return [f"{entry.fqn}: GEMM output ran unquantised in {where}: 0 FP8 GEMMs in {calls} forward calls"]
    if ran == entry.calls and entry.recomputed:
        recomputed = f"the {entry.recomputed} recomputations of the backward pass"
        return [
            f"{entry.fqn}: GEMM output ran in FP8 in {entry.calls} forward calls, but not in {recomputed}"
        ]
    return [f"{entry.fqn}: GEMM output ran {ran} times in FP8 in {calls} forward calls of {where}"]


def _backward(entry: LayerExecution, casts: RecipePlan) -> list[str]:
    wanted = {"grad_input": entry.input_wants_grad, "grad_weight": entry.weight_wants_grad}
    differences = []
    for gemm, plan in (("grad_input", casts.grad_input), ("grad_weight", casts.grad_weight)):
        ran = entry.count(plan.gemm)
        expected = entry.calls if plan.is_fp8 and wanted[gemm] else 0
        # a gradient nobody needs may be computed or not (torchao does, the reference does not)
        spare = plan.is_fp8 and not wanted[gemm] and ran == entry.calls
        if ran != expected and not spare:
            differences.append(
                f"{entry.fqn}: GEMM {gemm} ran {ran} times in FP8, expected {expected} for "
                f"{entry.calls} forward calls"
            )
    return differences


def _formats(entry: LayerExecution, gemm: Gemm, plan: GemmPlan, where: str) -> list[str]:
    seen = dict(entry.formats)[gemm]
    if plan.left is None or plan.right is None or not seen:
        return []  # a wrong count says so already
    declared = f"{plan.left.format} x {plan.right.format}"
    return [
        f"{entry.fqn}: GEMM {gemm} multiplied {formats} in {where}, declared {declared}"
        for formats in seen
        if formats != declared
    ]
