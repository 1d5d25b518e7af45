"""Our runner against a bare loop of the same model and optimizer: both train in turns, in one process."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
import yaml

import gpu_timing as timing
from fp8parity import matrix, module, runner, study
from fp8parity.data import write_tokens
from fp8parity.recorder import CurveRecorder
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
from throughput_arms import ModelCase, Setting, free, random_rows, recipe_document, train_step


class Turns(L.Callback):
    """Lets the runner and a bare loop of the very same model and optimizer train in turns.

    A segment is `length` steps, a multiple of the recorder's flush, with the device idle at both ends; the bare
    loop's follow each other while Lightning waits in this callback. The first round is warm-up.
    """

    def __init__(self, case: ModelCase, setting: Setting, started: float) -> None:
        self.device = setting.device
        self.length = setting.segment
        self.rows = itertools.cycle(random_rows(case, self.device))
        self.started = started
        self.first_step_s = 0.0
        self.ms: dict[str, list[float]] = {"runner": [], "bare": []}
        self.peak: dict[str, float] = {}
        self._clock: float | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change sides after each segment."""
        if trainer.global_step == 1:
            timing.synchronise(self.device)
            self.first_step_s = time.perf_counter() - self.started
        if trainer.global_step % self.length:
            return
        if self._clock is not None:
            self._end("runner")
        self._begin()
        for _ in range(self.length):
            self._bare_step(trainer, pl_module)
        self._end("bare")
        for callback in trainer.callbacks:
            if isinstance(callback, CurveRecorder):
                callback.restart_clock()  # what it records is then the runner's own speed
        self._begin()

    def share(self) -> float:
        """Return the bare loop's time over the runner's, each segment against its two neighbours."""
        bare, ours = self.ms["bare"][1:], self.ms["runner"][1:]
        return statistics.median(
            (a + b) / 2 / ms for (a, b), ms in zip(itertools.pairwise(bare), ours, strict=True)
        )

    def _bare_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, module.LMModule)
        clip = pl_module.spec.optim.clip_norm
        train_step(pl_module.decoder, trainer.optimizers[0], next(self.rows), self.device, clip)

    def _begin(self) -> None:
        timing.synchronise(self.device)
        timing.reset_peak(self.device)
        self._clock = time.perf_counter()

    def _end(self, side: str) -> None:
        timing.synchronise(self.device)
        assert self._clock is not None
        self.ms[side].append((time.perf_counter() - self._clock) * 1e3 / self.length)
        self.peak[side] = timing.peak_gib(self.device) or 0.0


def random_corpus(path: Path, case: ModelCase) -> None:
    """Write a token file of random tokens, long enough for the batches and the held-out set."""
    generator = np.random.default_rng(0)
    sizes = (8 * case.batch * (case.context + 1), 2 * case.batch * (case.context + 1))
    train, held_out = (generator.integers(case.vocab, size=size).astype(np.uint16) for size in sizes)
    about = {"tokenizer": "none", "tokenizer_sha256": None, "source": "random tokens", "documents": 2}
    write_tokens(path, [train], [held_out], vocab_size=case.vocab, **about)


def lay_out(folder: Path, case: ModelCase, recipe: str, setting: Setting) -> Path:
    """Lay out a study as `fp8parity run` does and return the directory of its run under `recipe`."""
    # The last step evaluates, so one more than the segments need; rounds + warm-up.
    steps = setting.segment * (setting.rounds + 2) + 1
    random_corpus(folder / "corpus.bin", case)
    path = folder / "recipe.yaml"
    # A study needs a test arm; a study of a recipe has the control as well.
    arm = recipe if recipe != "bf16" else "tensorwise"
    document = recipe_document(case, arm, setting, steps, str(folder / "corpus.bin"))
    path.write_text(
        yaml.safe_dump({**document, "runtime": {"checkpoint_every": 10 * steps}}), encoding="utf-8"
    )
    dirs = study.lay_out(matrix.read(path), folder / "out")
    return next(d for d in dirs if runner.read_order(d).spec.precision.recipe == recipe)


@dataclass(frozen=True)
class RunnerTimes:
    """Medians of both sides, the share of the bare loop's speed, and what the run itself recorded."""

    share_of_bare: float
    runner_ms: float
    bare_ms: float
    first_step_s: float
    peak_gib: dict[str, float]
    recorded_tokens_per_s: float | None
    rounds_ms: dict[str, list[float]]


@contextlib.contextmanager
def joined_by(callback: L.Callback) -> Iterator[None]:
    """Let `callback` take part in what the runner trains, after all of its own."""
    real = runner._trainer

    def trainer_with(*parts: Any) -> L.Trainer:
        trainer = real(*parts)
        trainer.callbacks.append(callback)
        return trainer

    runner._trainer = trainer_with
    try:
        yield
    finally:
        runner._trainer = real


def measure(case: ModelCase, recipe: str, setting: Setting) -> RunnerTimes:
    """Train as `fp8parity train` does, with a bare loop in turns."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = lay_out(Path(folder), case, recipe, setting)
        turns = Turns(case, setting, time.perf_counter())
        try:
            with joined_by(turns):
                runner.train(run_dir)
        finally:
            torch.set_num_threads(threads)
            free()
        rate = read_json(run_dir / schema.MANIFEST_FILE)["throughput_tokens_per_s"]
    ours, bare = (statistics.median(turns.ms[side][1:]) for side in ("runner", "bare"))
    return RunnerTimes(turns.share(), ours, bare, turns.first_step_s, turns.peak, rate, turns.ms)
