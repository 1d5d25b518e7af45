"""Proof, before the first step, that the run executes what it declares: each FP8 GEMM counted and its casts compared.

"The FP8 run that was not FP8" is the commonest real failure, so no run trains without this, the control included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8parity.layer_policy import LayerPlan
from fp8parity.model import next_token_loss
from fp8parity.precision.comparison import compare, compare_compiled
from fp8parity.precision.effective import accumulation_differences, effective_differences
from fp8parity.precision.execution import StepCount, count_step, observe
from fp8parity.precision_rules import jitter_of
from fp8parity.spec import RunSpec

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class ExecutionProof:
    """FP8 GEMMs of one micro-batch, and every difference from the declaration; none means proven.

    `train` counts a forward and backward pass uncompiled, `eval` the arm's own evaluation, `as_trained` the pass as
    it trains (compiled where the run is), `compiled_regions` the calls of compiled code in that pass.
    """

    train: int
    eval: int
    as_trained: int
    differences: tuple[str, ...]
    compiled_regions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "differences": list(self.differences), "proven": not self.differences}


def prove(
    model: nn.Module, spec: RunSpec, plan: LayerPlan, micro_batches: Sequence[Tensor], autocast: Autocast
) -> ExecutionProof:
    """Run passes on `micro_batches` (rows int64 [rows, context + 1] of one step) and compare with the declaration.

    Parameters and RNG state are left as they are; gradients are cleared. Draws no random number.
    """

    def loss_of(rows: Tensor) -> Tensor:
        with autocast():
            logits = model(rows[:, :-1])
        return next_token_loss(logits, rows) / len(micro_batches)

    def train_step() -> None:
        loss_of(micro_batches[0]).backward()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            loss_of(micro_batches[0])
        model.train()

    accumulated: list[Tensor] = []

    def accumulate() -> None:
        for rows in micro_batches:
            loss = loss_of(rows)
            loss.backward()
            accumulated.append(loss.detach())

    record = observe(model, train_step, evaluate)
    as_trained = StepCount(record.total("train"), 0)  # what is not compiled trains just as it was observed
    compiled: list[str] = []
    if spec.train.compile != "off":
        train_step()  # compiles; the compiler runs candidate kernels of its own meanwhile, which are no evidence
        as_trained = count_step(train_step)
        compiled = compare_compiled(record, as_trained)
    differences = [
        *compare(record, plan, spec.precision.recipe, checkpointing=spec.train.activation_checkpointing),
        *compiled,
        *_arithmetic(model, spec, plan),
    ]
    if len(micro_batches) > 1:
        losses = [lambda rows=rows: loss_of(rows) for rows in micro_batches]
        found = accumulation_differences(model, accumulate, losses)
        # The gradients of a NaN equal nothing, not even themselves: a diverging run that resumes is the guard's to end.
        differences += found if bool(torch.stack(accumulated).isfinite().all()) else []
    model.zero_grad(set_to_none=True)
    return ExecutionProof(
        record.total("train"),
        record.total("eval"),
        as_trained.fp8_gemms,
        tuple(differences),
        as_trained.compiled_regions,
    )


def _arithmetic(model: nn.Module, spec: RunSpec, plan: LayerPlan) -> list[str]:
    """Return how the converted layers' arithmetic differs from the declared recipe, by value.

    One layer of each class and shape is tried: layers that share both run the same code.
    """
    differences: list[str] = []
    kinds: dict[tuple[type, torch.Size], tuple[str, nn.Linear]] = {}
    for fqn in plan.fp8_fqns:
        layer = model.get_submodule(fqn)
        assert isinstance(layer, nn.Linear)
        kinds.setdefault((type(layer), layer.weight.shape), (fqn, layer))
    for fqn, layer in kinds.values():
        differences += effective_differences(fqn, layer, spec.precision, jitter=jitter_of(spec))
    return differences
