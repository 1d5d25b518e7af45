"""What happens around the steps besides recording and saving: proof, evaluation, guard, progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import lightning as L
import torch
from torch import Tensor

from fp8parity.after_step import AfterStep
from fp8parity.data import BatchPlan
from fp8parity.errors import ExecutionMismatchError
from fp8parity.heldout import bf16_twin, held_out_loss
from fp8parity.module import LMModule, MicroBatch
from fp8parity.own_trace import leaving_no_trace
from fp8parity.progress import Heartbeat
from fp8parity.proof import ExecutionProof, prove
from fp8parity.recorder import FLUSH_EVERY, CurveRecorder
from fp8parity.spec import ModelSpec, RunSpec
from fp8parity.standby import Gate
from fp8parity_analysis import schema

NONFINITE_LIMIT = 8
"""Consecutive non-finite losses after which a run counts as diverged."""


def _no_trace_of(spec: RunSpec, decoder: torch.nn.Module) -> AbstractContextManager[None]:
    """Refuse passes that change anything but gradients, of a model of the user's; ours is known not to."""
    return nullcontext() if isinstance(spec.model, ModelSpec) else leaving_no_trace(decoder)


def _threads(spec: RunSpec) -> Iterator[str]:
    """Yield a difference when the process computes with another number of threads: a model's code may have set it."""
    threads = torch.get_num_threads()
    if threads != spec.train.threads:
        yield (
            f"train.threads: {spec.train.threads} is declared, and torch computes with {threads}; remove "
            "torch.set_num_threads from the model's code, or declare what it sets"
        )


class LifeSigns(L.Callback):
    """Keeps the heartbeat going, so that the launcher can tell a slow run from a hung one; stands first."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._training = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say that the proof follows."""
        self.heartbeat.enter("prove")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: MicroBatch, batch_idx: int
    ) -> None:
        """Say that training has begun, then that it goes on."""
        if self._training:
            self.heartbeat.beat()
        else:
            self.heartbeat.enter("train")
            self._training = True


class StandbyBeforeTraining(L.Callback):
    """Holds a worker that was started ahead of its turn once it is proven and compiled."""

    def __init__(self, gate: Gate, heartbeat: Heartbeat) -> None:
        self.gate = gate
        self.heartbeat = heartbeat

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the slot; whatever takes the time must come after this."""
        self.gate.wait("prove", self.heartbeat)


class ProofBeforeTraining(L.Callback):
    """Refuses to train a run that does not execute what it declares."""

    def __init__(self, spec: RunSpec, plan: BatchPlan) -> None:
        self.spec = spec
        self.plan = plan
        self.proof: ExecutionProof | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prove on the next step's micro-batches; raises `ExecutionMismatchError` naming every difference."""
        assert isinstance(pl_module, LMModule)
        assert pl_module.built is not None
        rows = torch.from_numpy(self.plan.rows(trainer.global_step)).to(pl_module.device)
        with _no_trace_of(self.spec, pl_module.decoder):
            self.proof = prove(
                pl_module.decoder,
                self.spec,
                pl_module.built.plan,
                rows.chunk(self.spec.train.accumulate),
                trainer.precision_plugin.forward_context,
            )
        differences = [*self.proof.differences, *_threads(self.spec)]
        if differences:
            shown = "; ".join(differences[:5])
            more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
            raise ExecutionMismatchError(f"the run would not execute what it declares: {shown}{more}")


class HeldOutEvaluator(AfterStep):
    """Evaluates at declared optimizer steps.

    Lightning's own `val_check_interval` counts micro-batches and would fire in the middle of an accumulation.
    """

    def __init__(self, recorder: CurveRecorder, rows: Tensor) -> None:
        self.recorder = recorder
        self.rows = rows
        self.seconds = 0.0
        self._twin: torch.nn.Module | None = None

    def prepare(self, trainer: L.Trainer, module: LMModule, beat: Callable[[], None]) -> None:
        """Build the twin once the parameters are where they stay; compile what evaluates, where blocks are compiled.

        Otherwise the first evaluation would compile in the midst of training, in the slot's time. Changes nothing;
        calls `beat` after each thing that may take long.
        """
        self.rows = self.rows.to(module.device)
        spec = self.recorder.spec
        self._twin = module.decoder if spec.precision.is_bf16 else bf16_twin(module.decoder, spec)
        if spec.train.compile == "off":
            return
        context: Callable[[], Any] = trainer.precision_plugin.forward_context
        parts = self.rows.split(self._rows_per_batch)
        models = dict.fromkeys((self._twin, module.decoder))
        shapes = {part.shape: part for part in parts}  # the last one may be shorter
        with _no_trace_of(spec, module.decoder):
            for model, part in product(models, shapes.values()):
                held_out_loss(model, part, self._rows_per_batch, context)
                beat()

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Evaluate after every `eval_every` optimizer steps and after the last."""
        train = self.recorder.spec.train
        if step % train.eval_every and step != train.steps:
            return
        self.recorder.flush()
        began = time.perf_counter()
        rows = self._evaluate(trainer, module, step)
        self.seconds += time.perf_counter() - began  # the losses are on the host: nothing is left to wait for
        self.recorder.writer.append_evals(rows)
        self.recorder.restart_clock()

    @property
    def _rows_per_batch(self) -> int:
        train = self.recorder.spec.train
        return max(1, train.batch_size // train.accumulate)

    def _evaluate(self, trainer: L.Trainer, module: LMModule, step: int) -> list[dict[str, Any]]:
        assert self._twin is not None
        context: Callable[[], Any] = trainer.precision_plugin.forward_context
        rows_per_batch = self._rows_per_batch
        in_bf16 = held_out_loss(self._twin, self.rows, rows_per_batch, context)
        own = (
            in_bf16
            if self._twin is module.decoder
            else held_out_loss(module.decoder, self.rows, rows_per_batch, context)
        )
        return [
            {"step": step, "split": schema.HELD_OUT, "eval_precision": name, "loss": loss}
            for name, loss in ((schema.EVAL_BF16, in_bf16), (schema.EVAL_ARM, own))
        ]


class EvaluatorBeforeTraining(L.Callback):
    """Prepares the evaluator while there is no slot to be waited for; stands before `StandbyBeforeTraining`."""

    def __init__(self, evaluator: HeldOutEvaluator, heartbeat: Heartbeat) -> None:
        self.evaluator = evaluator
        self.heartbeat = heartbeat

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare it; the parameters are on their device, the proof has just ended."""
        assert isinstance(pl_module, LMModule)
        self.heartbeat.beat()
        self.evaluator.prepare(trainer, pl_module, self.heartbeat.beat)


class NonFiniteGuard(AfterStep):
    """Ends a run that can no longer recover: a result (diverged), not a failure."""

    def __init__(self, recorder: CurveRecorder) -> None:
        self.recorder = recorder
        self.diverged = False

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Stop on non-finite parameters, or on `NONFINITE_LIMIT` non-finite losses in a row, once they are known."""
        known = step % FLUSH_EVERY == 0 or step == self.recorder.spec.train.steps
        if not known or self.recorder.streak == 0:
            return
        if self.recorder.streak >= NONFINITE_LIMIT or not _all_finite(module):
            self.diverged = True
            trainer.should_stop = True


@torch.no_grad()
def _all_finite(module: torch.nn.Module) -> bool:
    return bool(torch.stack([p.isfinite().all() for p in module.parameters()]).all())


class ProgressLines(AfterStep):
    """One line now and then for a log file: step, loss, speed, time left."""

    def __init__(self, recorder: CurveRecorder, seconds: float = 10.0) -> None:
        self.recorder = recorder
        self.seconds = seconds
        self._last = time.monotonic()
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting where the run starts or resumes."""
        super().on_train_start(trainer, pl_module)
        self._last, self._last_step = time.monotonic(), trainer.global_step

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Print when the interval has passed."""
        now, train = time.monotonic(), self.recorder.spec.train
        if now - self._last < self.seconds:
            return
        rate = (step - self._last_step) / (now - self._last)
        print(
            f"step {step}/{train.steps}  loss {self.recorder.last_loss:.4f}  "
            f"{rate * train.tokens_per_step:,.0f} tokens/s  ETA {(train.steps - step) / rate:.0f} s",
            flush=True,
        )
        self._last, self._last_step = now, step
