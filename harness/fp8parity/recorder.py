"""The curve as it is trained: one row per optimizer step, copied from the device once per flush."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch import Tensor

from fp8parity.module import LMModule, MicroBatch
from fp8parity.schedule import run_lr_factor
from fp8parity.spec import RunSpec
from fp8parity.step_clock import Lap, StepClock, lap_seconds
from fp8parity_analysis.store import RunWriter

FLUSH_EVERY = 10
"""Optimizer steps between copies of the losses to the host."""

WARM_STEPS = 20
"""Steps of a session left out of its throughput: compilation, autotuning, cold caches."""


class CurveRecorder(L.Callback):
    """Writes one row per optimizer step, and knows since when the loss is not finite.

    `constant` are further columns, the same in every row of this session.
    """

    def __init__(
        self, writer: RunWriter, spec: RunSpec, constant: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.writer = writer
        self.spec = spec
        self.constant = constant
        self.step = 0
        self.streak = 0
        self.first_nonfinite_step: int | None = None
        self.last_loss = math.nan
        self._loss_sum: Tensor | None = None
        self._pending: list[tuple[dict[str, Any], Lap, Tensor, Tensor]] = []
        self._clock = StepClock(torch.device("cpu"))
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
        self._clock = StepClock(pl_module.device)

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
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": self.step * self.spec.train.tokens_per_step,
            "lr": self.spec.optim.lr * run_lr_factor(self.step - 1, self.spec),
            "batch_digest": batch[1],
            **self.constant,
        }
        mean = self._loss_sum / self.spec.train.accumulate
        self._pending.append((row, self._clock.lap(), mean, pl_module.last_grad_norm))
        self._loss_sum = None
        if self.step % FLUSH_EVERY == 0 or self.step == self.spec.train.steps:
            self.flush()

    def flush(self) -> None:
        """Copy the pending numbers to the host in one transfer and append their rows."""
        if not self._pending:
            return
        numbers = torch.stack(
            [torch.stack((loss.float(), norm.float())) for _, _, loss, norm in self._pending]
        )
        rows = []
        for (row, lap, _, _), (loss, norm) in zip(self._pending, numbers.tolist(), strict=True):
            rows.append({**row, "step_time": self._took(lap), "train_loss": loss, "grad_norm": norm})
            self._watch(row["step"], loss)
        self._pending.clear()
        self.writer.append_curve(rows)
        # Writing is not training: the next step's time starts here.
        self._clock.restart()

    def _took(self, lap: Lap) -> float:
        seconds = lap_seconds(lap)
        self._session_steps += 1
        if self._session_steps > WARM_STEPS:
            self._steady_seconds += seconds
        return seconds

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
        self._clock.restart()
