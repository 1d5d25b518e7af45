"""Probes while our runner trains: after the steps that the plan names, with what becomes of the rows.

A probe that fails does not end the run: what it would have explained is the run. The failure is one line in the log and
a note in the manifest, the probe stays off from then on, and training goes on as it would have without. A full disk is
what it is anywhere in a run, an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from fp8parity.after_step import AfterStep
from fp8parity.data import BatchPlan
from fp8parity.model import DecoderLM, next_token_loss
from fp8parity.module import LMModule
from fp8parity.probe import GemmProbe, ProbeResult
from fp8parity.probe_spec import ProbePlan
from fp8parity.recorder import CurveRecorder
from fp8parity.spec import ModelSpec
from fp8parity.tensor_alerts import AlertWatch, lines


@contextmanager
def recomputing(decoder: nn.Module) -> Iterator[None]:
    """Let the blocks be recomputed in the backward pass, which changes memory and no number.

    The compiler keeps fewer activations than the uncompiled pass of a probe, which would otherwise need more memory
    than the training that it looks at. A model of the user's is left as it is.
    """
    if not isinstance(decoder, DecoderLM):
        yield
        return
    before = decoder.activation_checkpointing
    decoder.activation_checkpointing = True
    try:
        yield
    finally:
        decoder.activation_checkpointing = before


class ProbeRecorder(AfterStep):
    """Probes the micro-batches of the step just trained, on the parameters that the step left behind."""

    def __init__(self, recorder: CurveRecorder, batches: BatchPlan, plan: ProbePlan) -> None:
        self.recorder = recorder
        self.batches = batches
        self.plan = plan
        self.watch = AlertWatch()
        self.notes: list[str] = []
        self._probe: GemmProbe | None = None

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """Every alert so far, as the manifest keeps it."""
        return [alert.to_json() for alert in self.watch.alerts]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must remember."""
        return {"watch": self.watch.state(), "notes": list(self.notes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's memory."""
        self.watch.restore(state_dict["watch"])
        self.notes = list(state_dict["notes"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the model once it is converted and where it stays."""
        super().on_train_start(trainer, pl_module)
        assert isinstance(pl_module, LMModule)
        model = self.recorder.spec.model
        if not self.notes:
            self._probe = GemmProbe(
                pl_module.decoder,
                what_if=self.plan.what_if,
                weight_cast_source=self.plan.weight_cast_source,
                head=None if isinstance(model, ModelSpec) else model.found.head,
            )

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Probe when the plan says so."""
        if self._probe is None or not self.plan.is_due(step):
            return
        result = self._probed(self._probe, trainer, module, step)
        if result is not None:
            self.recorder.writer.append_tensor_stats(step, result.casts, result.signals)
            for line in lines(self.watch.look(result.casts)):
                print(line, flush=True)
        self.recorder.restart_clock()

    def _probed(
        self, probe: GemmProbe, trainer: L.Trainer, module: LMModule, step: int
    ) -> ProbeResult | None:
        train = self.recorder.spec.train
        # the gradients of the step are spent; kept, they would be there beside those of the probe
        module.zero_grad(set_to_none=True)

        def loss_of(rows: Tensor) -> Tensor:
            with trainer.precision_plugin.forward_context():
                logits = module.decoder(rows[:, :-1])
            return next_token_loss(logits, rows) / train.accumulate

        try:
            rows = torch.from_numpy(self.batches.rows(step - 1)).to(module.device)
            with recomputing(module.decoder) if train.compile == "blocks" else nullcontext():
                return probe.run(step, step * train.tokens_per_step, rows.chunk(train.accumulate), loss_of)
        except Exception as error:
            self._give_up(step, error)
            return None

    def _give_up(self, step: int, error: Exception) -> None:
        self._probe = None
        what = (str(error).splitlines() or [""])[0]
        self.notes.append(f"tensor statistics end before step {step}: {type(error).__name__}: {what}")
        print(f"error: {self.notes[-1]}; training goes on without them", flush=True)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
