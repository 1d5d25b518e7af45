"""A run in phases: FP8 up to `precision.switch_at`, BF16 from then on. Every other run is one phase.

Each phase is a training session of its own: it builds the model in its precision, proves that it executes it, and
goes on from the checkpoint that the phase before wrote at its last step, just as a resumed run does. So the steps after
the switch are those of a BF16 run that was handed that very state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L

from fp8parity.callbacks import ProofBeforeTraining
from fp8parity.module import LMModule
from fp8parity.spec import PrecisionSpec, RunSpec


@dataclass(frozen=True)
class Phase:
    """Steps `first_step` to `last_step` (counted from 1) of a run; `spec` is the run's, in the phase's precision."""

    spec: RunSpec
    first_step: int
    last_step: int


def phase_after(spec: RunSpec, done: int) -> Phase:
    """Return the phase that a run is in after `done` optimizer steps."""
    switch, steps = spec.precision.switch_at, spec.train.steps
    if switch is None:
        return Phase(spec, 1, steps)
    if done < switch:
        return Phase(spec, 1, switch)
    tail = spec.model_copy(update={"precision": PrecisionSpec(recipe="bf16")})
    return Phase(tail, switch + 1, steps)


class PhaseLog(L.Callback):
    """Keeps what each phase converted and was proven to execute, across sessions: its state goes into checkpoints."""

    def __init__(self, phase: Phase, proof: ProofBeforeTraining) -> None:
        self.phase = phase
        self.proof = proof
        self.entries: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what the next phase, or a resumed run, must remember."""
        return {"entries": list(self.entries)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's memory."""
        self.entries = list(state_dict["entries"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Enter this phase; stands after the proof."""
        assert isinstance(pl_module, LMModule)
        assert pl_module.built is not None
        assert self.proof.proof is not None
        before = [entry for entry in self.entries if entry["first_step"] < self.phase.first_step]
        entry = {
            "first_step": self.phase.first_step,
            "last_step": self.phase.last_step,
            "recipe": self.phase.spec.precision.recipe,
            "conversion": pl_module.built.record.to_json(),
            "execution": self.proof.proof.to_json(),
        }
        self.entries = [*before, entry]

    def manifest(self) -> dict[str, Any]:
        """Return the manifest's keys: conversion and proof of the first phase, and all `phases`."""
        first = self.entries[0]
        phases = [
            {key: value for key, value in entry.items() if key != "conversion"} for entry in self.entries
        ]
        return {"conversion": first["conversion"], "execution": first["execution"], "phases": phases}
