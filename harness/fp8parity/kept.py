"""Kept checkpoints: named steps of a BF16 control, for good, so that forks can start there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fp8parity.after_step import AfterStep
from fp8parity.checkpointing import write_checkpoint
from fp8parity.data import file_sha256
from fp8parity.fork import kept_file, side_file
from fp8parity.fork_state import StartState, digests, read_state
from fp8parity.module import LMModule
from fp8parity.recorder import CurveRecorder
from fp8parity.spec import ParentState, RunSpec
from fp8parity_analysis.json_files import write_json


class CheckpointKeeper(AfterStep):
    """Writes the checkpoint of each step in `steps` once, with the document that `fork.Parents` reads."""

    def __init__(
        self, recorder: CurveRecorder, run_dir: Path, spec: RunSpec, data_sha256: str, steps: Sequence[int]
    ) -> None:
        self.recorder = recorder
        self.run_dir = run_dir
        self.spec = spec
        self.data_sha256 = data_sha256
        self.steps = frozenset(steps)

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Keep a named step, unless a guard has stopped the run there."""
        if step in self.steps and not trainer.should_stop:
            self.recorder.flush()
            self._keep(trainer, step)
            self.recorder.restart_clock()

    def _keep(self, trainer: L.Trainer, step: int) -> None:
        path = kept_file(self.run_dir, step)
        side_file(path).unlink(missing_ok=True)  # of an earlier attempt: it must not vouch for another file
        write_checkpoint(trainer, path)
        state = read_state(path)
        if not _all_finite(state):
            path.unlink()
            print(f"checkpoint of step {step} not kept: its weights are not finite", flush=True)
            return
        write_json(
            side_file(path), kept_document(path, state, self.spec, self.run_dir.name, self.data_sha256, step)
        )


def kept_document(
    path: Path, state: StartState, spec: RunSpec, run_id: str, data_sha256: str, step: int
) -> dict[str, Any]:
    """Return the document beside a kept checkpoint (`fork.KEPT_KEYS`)."""
    weights, optimizer = digests(state)
    parent = ParentState(
        run_id=run_id,
        spec_hash=spec.hash(),
        data_sha256=data_sha256,
        weights_sha256=weights,
        optimizer_sha256=optimizer,
        batches=spec.batches_before + step,
        schedule_steps=spec.schedule_before + step,
    )
    file = {"step": step, "bytes": os.path.getsize(path), "file_sha256": file_sha256(path)}
    return file | parent.model_dump(mode="json")


def _all_finite(state: StartState) -> bool:
    return all(bool(torch.isfinite(w).all()) for w in state.weights.values() if isinstance(w, torch.Tensor))
