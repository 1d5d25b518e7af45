"""Checkpoints between optimizer steps, and a clean stop on a signal."""

from __future__ import annotations

import os
import pickle
import signal
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fp8parity.after_step import AfterStep
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.module import LMModule
from fp8parity.recorder import CurveRecorder
from fp8parity.spec import RunSpec, TrainSpec
from fp8parity_analysis import schema
from fp8parity_analysis.store import first_missing_step, whole_rows


class Checkpointer(AfterStep):
    """Saves by rename every `every` optimizer steps, after the rows up to that step are on the disk; keeps two.

    With a `share`, a step is left out where saving would take more than that of the time (`affordable`). The step
    `phase_end` is always saved: the next phase of the run (`phases.py`) resumes from it.
    """

    KEEP = 2

    def __init__(
        self,
        recorder: CurveRecorder,
        directory: Path,
        every: int,
        phase_end: int | None = None,
        share: float | None = None,
    ) -> None:
        self.recorder = recorder
        self.directory = directory
        self.every = every
        self.phase_end = phase_end
        self.share = share
        self._began = time.monotonic()
        self._took: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the time from here."""
        super().on_train_start(trainer, pl_module)
        self._began = time.monotonic()

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Save when the cadence says so; the last step needs no checkpoint, nor does one at which a guard stopped.

        Resumed from it, a run that was killed before its manifest would train on where it ended undisturbed.
        """
        if trainer.should_stop or step >= self.recorder.spec.train.steps:
            return
        due = step % self.every == 0 and affordable(self._took, time.monotonic() - self._began, self.share)
        if due or step == self.phase_end:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of the current step."""
        self.recorder.flush()
        began = time.monotonic()
        self.recorder.writer.sync()  # a checkpoint is worth nothing without the rows before it
        write_checkpoint(trainer, self.directory / f"step-{trainer.global_step:09d}.ckpt")
        for old in checkpoints(self.directory)[: -self.KEEP]:
            old.unlink()
        self._took.append(time.monotonic() - began)
        self.recorder.restart_clock()


def affordable(took: Sequence[float], elapsed: float, share: float | None) -> bool:
    """Whether one more checkpoint like the last keeps them within `share` of the `elapsed` seconds; None: any may be.

    The first one is: what it takes is not known before.
    """
    return share is None or not took or sum(took) + took[-1] <= share * elapsed


def write_checkpoint(trainer: L.Trainer, target: Path) -> None:
    """Write a checkpoint of the current step by rename, so that no half of one has its name."""
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_suffix(".tmp")
    try:
        trainer.save_checkpoint(temporary)
        with temporary.open("rb") as handle:
            os.fsync(
                handle.fileno()
            )  # a power cut after the rename must not leave an empty file under its name
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoint files, oldest first."""
    return sorted(directory.glob("step-*.ckpt"))


def newest_usable(run_dir: Path, spec: RunSpec) -> Path | None:
    """Return the newest checkpoint of the run that it can go on from, or None; others are set aside as `.broken`.

    Its every byte must be there, and in the streams every row up to its step: what a power cut took of them is trained
    again, from the checkpoint before or from the start. Raises `UsageError` for another run's checkpoint.
    """
    for path in reversed(checkpoints(run_dir / schema.CHECKPOINT_DIR)):
        if _is_intact(path):
            check_owner(path, spec)
            lacking = lacking_rows(run_dir, spec.train, step_of(path))
            if lacking is None:
                return path
            fault = f"cannot be continued ({lacking})"
        else:
            fault = "is damaged"
        aside = path.with_suffix(".broken")
        os.replace(path, aside)
        print(f"{path.name} {fault}: set aside as {aside.name}", flush=True)
    return None


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint file."""
    return int(path.stem.removeprefix("step-"))


def lacking_rows(run_dir: Path, train: TrainSpec, step: int) -> str | None:
    """Return what the streams lack of the rows up to `step`, or None: each step once, and each evaluation due."""
    missing = first_missing_step((row["step"] for row in whole_rows(run_dir / schema.CURVE_STREAM)), step)
    if missing is not None:
        return f"{schema.CURVE_STREAM} lacks step {missing}"
    evals = whole_rows(run_dir / schema.EVAL_STREAM)
    taken = {(row["step"], row.get("eval_precision")) for row in evals}
    due = range(train.eval_every, step + 1, train.eval_every)
    absent = [at for at in due if not {(at, schema.EVAL_BF16), (at, schema.EVAL_ARM)} <= taken]
    return f"{schema.EVAL_STREAM} lacks step {absent[0]}" if absent else None


def owner_of(path: Path) -> str | None:
    """Return the hash of the specification a checkpoint belongs to, without reading its tensors."""
    document = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    owner = document.get("fp8parity", {}).get("spec_hash")
    return None if owner is None else str(owner)


def check_owner(path: Path, spec: RunSpec) -> None:
    """Refuse another run's checkpoint before anything of this run is touched; `UsageError`."""
    found = owner_of(path)
    if found != spec.hash():
        raise UsageError(
            f"checkpoint: {path.name} belongs to another run specification ({str(found)[:8]}, this run is "
            f"{spec.hash()[:8]}); delete the run's checkpoints folder to train it from the start"
        )


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint is all there: a zip archive with a checksum per entry, and a directory at its end.

    Reading it once takes far less than training it again. The two readers notice different damage to the directory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return False
    except Exception:  # a flipped bit may also read as encryption, an unknown method or a negative size
        return False
    try:
        owner_of(path)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError):
        return False  # of bytes whose checksums are right, so an error of another kind is no damage
    return True


class StopOnSignal(AfterStep):
    """SIGTERM and Ctrl-C end the run at the next optimizer step, with a checkpoint: run again to resume.

    Before the first step there is nothing to save: what goes on then, proof or compilation, is left at once. Stands
    last among the callbacks, and `SignalsBeforeTraining` first.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.received: int | None = None
        self._stepping = False

    def take_signals(self) -> None:
        """Take the signals from Lightning, which gives back the originals when it ends."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on a signal waits for the end of a step."""
        super().on_train_start(trainer, pl_module)
        self._stepping = True
        if self.received is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._stepping:
            raise KeyboardInterrupt  # no handler of ordinary errors on the way takes it for one

    @contextmanager
    def as_interruption(self) -> Iterator[None]:
        """Turn the exit that Lightning makes of a signal before the first step into an `InterruptedRunError`.

        Also of one that came between its own handlers and ours. An exit that somebody's code asks for stays one.
        """
        try:
            yield
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                self.received = self.received or signal.SIGINT
            elif not isinstance(error, SIGTERMException):
                raise
            raise InterruptedRunError(
                f"{self._name} received before the next step: nothing was lost; run the same command again"
            ) from error

    def between_phases(self) -> None:
        """Leave where a signal came too late for the last step of a phase; its checkpoint is written."""
        if self.received is not None:
            raise InterruptedRunError(
                f"{self._name} received between two phases; run the same command again to resume"
            )

    @property
    def _name(self) -> str:
        return signal.Signals(self.received or signal.SIGTERM).name

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        """Save and leave, between optimizer steps only."""
        ends = trainer.should_stop or step >= self.checkpointer.recorder.spec.train.steps
        if self.received is None or ends:
            return
        self.checkpointer.save(trainer)
        raise InterruptedRunError(
            f"{self._name} received: saved at step {step}; run the same command again to resume"
        )


class SignalsBeforeTraining(L.Callback):
    """Lets `stop` take the signals before anything else of a session begins."""

    def __init__(self, stop: StopOnSignal) -> None:
        self.stop = stop

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals from Lightning, whose handlers are younger than any earlier hook."""
        self.stop.take_signals()
