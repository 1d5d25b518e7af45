"""What is done once after an optimizer step, not after each micro-batch of it."""

from __future__ import annotations

from typing import Any

import lightning as L

from fp8parity.module import LMModule, MicroBatch


class AfterStep(L.Callback):
    """Calls `after_step` once after every optimizer step of this session.

    Lightning's own hook fires after every micro-batch, and its step counter stands still in the midst of an
    accumulation. The step of the checkpoint that a session resumes from was done before.
    """

    _done = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin after the step at which the session begins."""
        self._done = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        """Tell a finished optimizer step from one more micro-batch."""
        step = trainer.global_step
        if step == self._done:
            return
        self._done = step
        assert isinstance(pl_module, LMModule)
        self.after_step(trainer, pl_module, step)

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Do what is to be done after `step` (from 1)."""
        raise NotImplementedError
