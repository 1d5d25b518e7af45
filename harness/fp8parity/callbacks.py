"""What happens between optimizer steps: record, evaluate, guard, checkpoint, report. In that order.

Losses stay on the device and are copied once per flush, so the loop has no host sync per step.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor

from fp8parity.data import BatchPlan
from fp8parity.errors import ExecutionMismatchError, InterruptedRunError
from fp8parity.heldout import bf16_twin, held_out_loss
from fp8parity.module import LMModule, MicroBatch
from fp8parity.proof import ExecutionProof, prove
from fp8parity.schedule import lr_factor
from fp8parity.spec import RunSpec
from fp8parity_analysis import schema
from fp8parity_analysis.store import RunWriter

FLUSH_EVERY = 10
"""Optimizer steps between copies of the losses to the host."""

WARM_STEPS = 20
"""Steps of a session left out of its throughput: compilation, autotuning, cold caches."""

NONFINITE_LIMIT = 8
"""Consecutive non-finite losses after which a run counts as diverged."""


class CurveRecorder(L.Callback):
    """Writes one row per optimizer step, and knows since when the loss is not finite."""

    def __init__(self, writer: RunWriter, spec: RunSpec) -> None:
        self.writer = writer
        self.spec = spec
        self.step = 0
        self.streak = 0
        self.first_nonfinite_step: int | None = None
        self.last_loss = math.nan
        self._loss_sum: Tensor | None = None
        self._pending: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        self._clock = time.perf_counter()
        self._session_steps = 0
        self._steady_seconds = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Training throughput of this session after its first steps, evaluations and checkpoints left out."""
        steady = self._session_steps - WARM_STEPS
        return steady * self.spec.train.tokens_per_step / self._steady_seconds if steady > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must remember."""
        return {"step": self.step, "streak": self.streak, "first_nonfinite_step": self.first_nonfinite_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's memory."""
        self.step = int(state_dict["step"])
        self.streak = int(state_dict["streak"])
        self.first_nonfinite_step = state_dict["first_nonfinite_step"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock after model construction."""
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Add a micro-batch; when it completed an optimizer step, keep the step's row."""
        assert isinstance(pl_module, LMModule)
        loss = pl_module.last_loss
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        now = time.perf_counter()
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": self.step * self.spec.train.tokens_per_step,
            "lr": self.spec.optim.lr * lr_factor(self.step - 1, self.spec.train.steps, self.spec.optim),
            "step_time": now - self._clock,
            "batch_digest": batch[1],
        }
        self._clock = now
        self._session_steps += 1
        if self._session_steps > WARM_STEPS:
            self._steady_seconds += row["step_time"]
        mean = self._loss_sum / self.spec.train.accumulate
        self._pending.append((row, mean, pl_module.last_grad_norm))
        self._loss_sum = None
        if self.step % FLUSH_EVERY == 0 or self.step == self.spec.train.steps:
            self.flush()

    def flush(self) -> None:
        """Copy the pending numbers to the host in one transfer and append their rows."""
        if not self._pending:
            return
        numbers = torch.stack([torch.stack((loss.float(), norm.float())) for _, loss, norm in self._pending])
        rows = []
        for (row, _, _), (loss, norm) in zip(self._pending, numbers.tolist(), strict=True):
            rows.append({**row, "train_loss": loss, "grad_norm": norm})
            self._watch(row["step"], loss)
        self._pending.clear()
        self.writer.append_curve(rows)
        # Writing is not training: the next step's time starts here.
        self._clock = time.perf_counter()

    def _watch(self, step: int, loss: float) -> None:
        self.last_loss = loss
        if math.isfinite(loss):
            self.streak, self.first_nonfinite_step = 0, None
            return
        self.streak += 1
        if self.first_nonfinite_step is None:
            self.first_nonfinite_step = step

    def restart_clock(self) -> None:
        """Leave out of the next step's time what happened since the last one."""
        self._clock = time.perf_counter()


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
        self.proof = prove(
            pl_module.decoder,
            self.spec,
            pl_module.built.plan,
            rows.chunk(self.spec.train.accumulate),
            trainer.precision_plugin.forward_context,
        )
        if self.proof.differences:
            shown = "; ".join(self.proof.differences[:5])
            more = f" (and {len(self.proof.differences) - 5} more)" if len(self.proof.differences) > 5 else ""
            raise ExecutionMismatchError(f"the run would not execute what it declares: {shown}{more}")


class HeldOutEvaluator(L.Callback):
    """Evaluates at declared optimizer steps.

    Lightning's own `val_check_interval` counts micro-batches and would fire in the middle of an accumulation.
    """

    def __init__(self, recorder: CurveRecorder, rows: Tensor) -> None:
        self.recorder = recorder
        self.rows = rows
        self._twin: torch.nn.Module | None = None
        self._done = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build the twin once the parameters are where they stay."""
        assert isinstance(pl_module, LMModule)
        self.rows = self.rows.to(pl_module.device)
        self._done = trainer.global_step
        spec = self.recorder.spec
        self._twin = pl_module.decoder if spec.precision.is_bf16 else bf16_twin(pl_module.decoder, spec)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Evaluate after every `eval_every` optimizer steps and after the last."""
        train = self.recorder.spec.train
        step = trainer.global_step
        if step == self._done or (step % train.eval_every and step != train.steps):
            return
        assert isinstance(pl_module, LMModule)
        self._done = step
        self.recorder.flush()
        self.recorder.writer.append_evals(self._evaluate(trainer, pl_module, step))
        self.recorder.restart_clock()

    def _evaluate(self, trainer: L.Trainer, module: LMModule, step: int) -> list[dict[str, Any]]:
        assert self._twin is not None
        context: Callable[[], Any] = trainer.precision_plugin.forward_context
        rows_per_batch = max(1, self.recorder.spec.train.batch_size // self.recorder.spec.train.accumulate)
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


class NonFiniteGuard(L.Callback):
    """Ends a run that can no longer recover: a result (diverged), not a failure."""

    def __init__(self, recorder: CurveRecorder) -> None:
        self.recorder = recorder
        self.diverged = False

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Stop on non-finite parameters, or on `NONFINITE_LIMIT` non-finite losses in a row."""
        if self.recorder.streak == 0 or self.recorder.step % FLUSH_EVERY:
            return
        if self.recorder.streak >= NONFINITE_LIMIT or not _all_finite(pl_module):
            self.diverged = True
            trainer.should_stop = True


@torch.no_grad()
def _all_finite(module: torch.nn.Module) -> bool:
    return bool(torch.stack([p.isfinite().all() for p in module.parameters()]).all())


class Checkpointer(L.Callback):
    """Saves by rename every `every` optimizer steps, after the rows up to that step are on the disk; keeps two."""

    KEEP = 2

    def __init__(self, recorder: CurveRecorder, directory: Path, every: int) -> None:
        self.recorder = recorder
        self.directory = directory
        self.every = every
        self._done = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do not save again what was just loaded."""
        self._done = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Save when the cadence says so; the last step needs no checkpoint."""
        step = trainer.global_step
        if step != self._done and step % self.every == 0 and step < self.recorder.spec.train.steps:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of the current step."""
        self._done = trainer.global_step
        self.recorder.flush()
        self.directory.mkdir(exist_ok=True)
        target = self.directory / f"step-{trainer.global_step:09d}.ckpt"
        temporary = target.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        for old in checkpoints(self.directory)[: -self.KEEP]:
            old.unlink()
        self.recorder.restart_clock()


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoint files, oldest first."""
    return sorted(directory.glob("step-*.ckpt"))


class StopOnSignal(L.Callback):
    """SIGTERM and Ctrl-C end the run at the next optimizer step, with a checkpoint: run again to resume."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.received: int | None = None
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals from Lightning, which gives back the originals when it ends."""
        self._step = trainer.global_step
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Save and leave, between optimizer steps only."""
        step = trainer.global_step
        if self.received is None or step == self._step or step >= self.checkpointer.recorder.spec.train.steps:
            self._step = step
            return
        self.checkpointer.save(trainer)
        name = signal.Signals(self.received).name
        raise InterruptedRunError(
            f"{name} received: saved at step {step}; run the same command again to resume"
        )


class ProgressLines(L.Callback):
    """One line now and then for a log file: step, loss, speed, time left."""

    def __init__(self, recorder: CurveRecorder, seconds: float = 10.0) -> None:
        self.recorder = recorder
        self.seconds = seconds
        self._last = time.monotonic()
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting where the run starts or resumes."""
        self._last, self._last_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Print when the interval has passed."""
        now = time.monotonic()
        step, train = trainer.global_step, self.recorder.spec.train
        if now - self._last < self.seconds or step == self._last_step:
            return
        rate = (step - self._last_step) / (now - self._last)
        print(
            f"step {step}/{train.steps}  loss {self.recorder.last_loss:.4f}  "
            f"{rate * train.tokens_per_step:,.0f} tokens/s  ETA {(train.steps - step) / rate:.0f} s",
            flush=True,
        )
        self._last, self._last_step = now, step
