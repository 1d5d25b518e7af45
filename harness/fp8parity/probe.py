"""What every FP8 cast of a model does, seen from a pass beside training that leaves no trace.

`GemmProbe.run` takes a forward and a backward pass of its own, uncompiled, over copies of a step's micro-batches, and
reduces every operand of every linear's three GEMMs to the statistics of `tensor_stats`: as the layer casts it, and as
other recipes would (what-if). Training is bit-identical with and without it: gradients are asked for with
`torch.autograd.grad`, which leaves `.grad` alone; random number generators (torch's, NumPy's, Python's) and buffers are
put back; hooks are attached for the pass and removed. It works in anybody's loop:

    probe = GemmProbe(model, what_if=["tensorwise", "rowwise"])
    result = probe.run(step, tokens, micro_batches, lambda batch: loss_of(model, batch) / len(micro_batches))
    writer.append_tensor_stats(step, result.casts, result.signals)

The device is waited for once, when the numbers are copied to the host.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fp8parity.casts import recipe_plan
from fp8parity.errors import UsageError
from fp8parity.probe_operands import OperandTap, OperandTaps, WantedCast, wanted_casts
from fp8parity.probe_signals import SignalTaps, gradient_norms, head_of, modules_of
from fp8parity.tensor_stats import CastSums, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Batch = TypeVar("Batch")

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class ProbeResult:
    """The rows of one probe: `casts` with `tensor_schema.CAST_COLUMNS`, `signals` with `SIGNAL_COLUMNS`.

    `linears` are the FQNs of every linear of the model, whether it casts or not.
    """

    step: int
    tokens: int
    casts: list[dict[str, Any]]
    signals: list[dict[str, Any]]
    linears: tuple[str, ...]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back what a forward and backward pass may change: random generators, buffers, training flags, `.grad`.

    Parameters are never written. Meanwhile they have no `.grad`, so that a pass that makes one is noticed.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    flags = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # NumPy's legacy generator is the one that code without its own draws from
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    grads = [(p, p.grad) for p in model.parameters()]
    with torch.random.fork_rng([d.index for d in devices if d.index is not None]):
        try:
            for p, _ in grads:
                p.grad = None
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpys)  # noqa: NPY002
            for p, grad in grads:
                p.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module, training in flags.items():
                module.training = training


class GemmProbe:
    """Statistics of all casts of all linears of `model`, which is already converted.

    `what_if` names FP8 recipes to try on the operands too, `weight_cast_source` what their weight casts read
    (`compute`: the copy in the compute dtype; `master`: the stored parameter); `head` is the FQN of the output head,
    found by its usual names when not given. A module that `torch.compile` returned counts as the one inside it. Raises
    `UsageError` for an unknown recipe and for a distributed wrapper (statistics are of this process), `KeyError` for an
    unknown head, `ValueError` without a linear.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        what_if: Sequence[str] = (),
        weight_cast_source: str = "compute",
        head: str | None = None,
    ) -> None:
        for recipe in what_if:
            recipe_plan(recipe)
        self.model = modules_of(model)[""]
        wrapper = next((c.__name__ for c in type(self.model).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise UsageError(
                f"GemmProbe: the model is a {wrapper}, and statistics are of this process alone; pass its .module, and "
                "let loss_of call that"
            )
        self.what_if = tuple(what_if)
        self.weight_cast_source = weight_cast_source
        self.head = head_of(self.model, head)
        # a module under two names is listed once
        self.linears = {n: m for n, m in modules_of(self.model).items() if isinstance(m, nn.Linear)}
        if not self.linears:
            raise ValueError("the model has no nn.Linear, so there is no GEMM to probe")

    def run(
        self, step: int, tokens: int, micro_batches: Sequence[Batch], loss_of: Callable[[Batch], Tensor]
    ) -> ProbeResult:
        """Probe the model as it stands after `step` optimizer steps and `tokens` tokens.

        `loss_of` returns, for one micro-batch, the scalar that training calls `backward` on, autocast included and
        divided by the number of micro-batches if training does so. Cost: an uncompiled forward and backward pass of
        every micro-batch, and two reads of every operand per cast. What it calls without gradient (`torch.no_grad`) is
        not counted. Whatever it raises, the model is as it was: `UsageError` when `loss_of` returns something else or
        calls `backward` itself, `RuntimeError` from torch under a reentrant checkpoint, which supports no such pass
        (`use_reentrant=False`).
        """
        operands = OperandTaps([self._tap(fqn, linear) for fqn, linear in self.linears.items()])
        signals = SignalTaps(self.model, self.head)
        grads: dict[int, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(operands.attached())
            stack.enter_context(signals.attached())
            for batch in micro_batches:
                operands.recomputing = signals.recomputing = False
                loss = self._checked(loss_of(batch))
                # forward hooks that fire from here on belong to activation checkpointing
                operands.recomputing = signals.recomputing = True
                self._add_gradients(grads, loss)
        values = signals.signals.values() | gradient_norms(self.linears, grads).values()
        return _result(step, tokens, operands, values, tuple(self.linears))

    def _checked(self, loss: object) -> Tensor:
        """Return what `loss_of` gave if it is a loss to take gradients of, and nobody has yet."""
        if any(p.grad is not None for p in self.model.parameters()):
            raise UsageError(
                "loss_of: called backward; return the loss before that, the probe takes the gradients"
            )
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        if not isinstance(loss, Tensor):
            what = f"a {type(loss).__name__}"
        elif loss.numel() == 1:
            what = "a tensor without gradient"
        else:
            what = f"a tensor of shape {list(loss.shape)}"
        raise UsageError(
            f"loss_of: returned {what}; return the scalar tensor that training calls backward on, not detached and not "
            "under torch.no_grad"
        )

    def _tap(self, fqn: str, linear: nn.Linear) -> OperandTap:
        return OperandTap(fqn, linear, wanted_casts(linear, self.what_if, self.weight_cast_source))

    def _add_gradients(self, grads: dict[int, Tensor], loss: Tensor) -> None:
        """Add the weights' gradients of one micro-batch to `grads`, by id of the weight: a shared one counts once."""
        weights = {id(m.weight) for m in self.linears.values()}
        # of every parameter, so that the pass goes wherever training's goes: a reentrant checkpoint, which cannot be
        # asked this way, then raises instead of leaving its layers out
        wanted = {id(p): p for p in self.model.parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for key, grad in zip(wanted, found, strict=True):
            if grad is not None and key in weights:
                grads[key] = grads[key] + grad if key in grads else grad


def _result(
    step: int,
    tokens: int,
    operands: OperandTaps,
    signals: dict[tuple[str, str], Tensor],
    linears: tuple[str, ...],
) -> ProbeResult:
    rows = [(tap.fqn, want, sums) for tap in operands.taps for want, sums in tap.rows()]
    numbers = [sums.values for _, _, sums in rows] + [value.reshape(1) for value in signals.values()]
    # the one place that waits for the device
    flat = iter(torch.cat(numbers).tolist() if numbers else [])
    casts = [_cast_row(step, tokens, fqn, want, sums, flat) for fqn, want, sums in rows]
    found = [
        {"step": step, "tokens": tokens, "signal": signal, "fqn": fqn, "value": next(flat)}
        for signal, fqn in signals
    ]
    return ProbeResult(step, tokens, casts, found, linears)


def _cast_row(
    step: int, tokens: int, fqn: str, want: WantedCast, sums: CastSums, flat: Iterator[float]
) -> dict[str, Any]:
    stats = finish(sums.elements, sums.groups, [next(flat) for _ in range(sums.values.numel())])
    return {
        "step": step,
        "tokens": tokens,
        "fqn": fqn,
        "gemm": want.gemm,
        "operand": want.operand,
        "recipe": want.recipe,
        "kind": want.kind,
        "format": want.plan.format,
        "granularity": want.plan.granularity,
        **stats.to_row(),
    }
