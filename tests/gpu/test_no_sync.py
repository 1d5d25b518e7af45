"""Between two copies of the losses nothing in the training loop waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from fp8parity import matrix, runner, study
from fp8parity.data import pack_bytes
from fp8parity.recorder import FLUSH_EVERY
from fp8parity_analysis.store import read_run

BACKENDS = {
    "bf16": "torchao_float8",
    "tensorwise": "torchao_float8",
    "rowwise": "torchao_float8",
    "rowwise_with_gw_hp": "torchao_float8",
    "blockwise": "torchao_blockwise",
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Pageable")
"""Calls that wait for the device, and copies from or to memory that is not pinned, which wait in secret."""


class Watch(L.Callback):
    """Makes a wait an error from `first` to `last`, and lists the calls of the steps from there to `profiled`.

    Both stretches lie between two flushes; the losses are copied outside of them.
    """

    def __init__(self, first: int, last: int, profiled: tuple[int, int]) -> None:
        self.strict = (first, last)
        self.profiled = profiled
        self.watched: list[int] = []
        self.seen: list[tuple[int, str]] = []
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step + 1
        strict = self.strict[0] <= step <= self.strict[1]
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        if strict:
            self.watched.append(step)
        if step == self.profiled[0]:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.__enter__()
        if step == self.profiled[1] + 1 and self._profile is not None:
            self._profile.__exit__(None, None, None)
            results = self._profile.profiler
            assert results is not None
            assert results.kineto_results is not None
            self.seen = sorted((e.start_ns(), e.name()) for e in results.kineto_results.events())
            self._profile = None


@pytest.fixture(autouse=True)
def default_mode() -> Any:
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")


def laid_out(tmp_path: Path, recipe: str, **train: Any) -> Path:
    texts = [b"alpha beta gamma %d " % i * 20 for i in range(2000)]
    pack_bytes(texts, tmp_path / "corpus.bin", held_out_fraction=0.1, source="test")
    steps = 4 * FLUSH_EVERY + 1
    document = {
        "name": "sync",
        "base": {
            "model": {"dim": 256, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512},
            "data": {"source": "bin", "path": str(tmp_path / "corpus.bin")},
            "optim": {"lr": 0.001, "warmup_steps": 5},
            "train": {
                "steps": steps, "batch_size": 8, "context": 128, "eval_every": steps, "eval_sequences": 8,
                "device": "cuda", **train,
            },
            "precision": {
                "recipe": recipe if recipe != "bf16" else "tensorwise", "backend": BACKENDS[recipe], "keep": 4,
            },
        },
        "seeds": [0],
        "runtime": {"checkpoint_every": steps},  # a checkpoint copies the losses first: none between the flushes
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    dirs = study.lay_out(matrix.read(tmp_path / "recipe.yaml"), tmp_path / "out")
    return next(d for d in dirs if runner.read_order(d).spec.precision.recipe == recipe)


def train(run_dir: Path, monkeypatch: pytest.MonkeyPatch, callback: L.Callback) -> None:
    """Train as `fp8parity train` does, with one callback more, after all others."""
    real = runner._trainer

    def trainer_with(*parts: Any) -> L.Trainer:
        trainer = real(*parts)
        trainer.callbacks.append(callback)
        return trainer

    monkeypatch.setattr(runner, "_trainer", trainer_with)
    assert runner.train(run_dir) == 0


class Pinned(L.Callback):
    """Notes where the batches lie before they are copied, and that what arrives is on the device."""

    def __init__(self) -> None:
        self.pinned: list[bool] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        real = pl_module.transfer_batch_to_device

        def noted(batch: Any, device: torch.device, index: int) -> Any:
            self.pinned.append(batch[0].is_pinned())
            return real(batch, device, index)

        pl_module.transfer_batch_to_device = noted

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert batch[0].is_cuda


@pytest.mark.parametrize("compile_mode", ["off", "blocks"])
@pytest.mark.parametrize("recipe", list(BACKENDS))
def test_steady_steps_never_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, compile_mode: str
) -> None:
    if recipe in ("rowwise", "rowwise_with_gw_hp") and compile_mode == "off":
        pytest.skip("tensorwise covers torchao's uncompiled path")
    two, three = 2 * FLUSH_EVERY, 3 * FLUSH_EVERY
    watch = Watch(two + 1, three - 1, (three + 1, three + FLUSH_EVERY - 2))
    train(laid_out(tmp_path, recipe, compile=compile_mode), monkeypatch, watch)
    assert watch.watched == list(range(two + 1, three))
    assert any("Memcpy HtoD" in name for _, name in watch.seen)  # the batches, so the profile saw the loop
    launches = [at for at, name in watch.seen if "LaunchKernel" in name]
    waits = [name for at, name in watch.seen if any(wait in name for wait in WAITS) and at < launches[-1]]
    assert waits == []  # the profiler waits once itself, after the last launch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    pinned = Pinned()
    train(laid_out(tmp_path, "bf16", accumulate=accumulate), monkeypatch, pinned)
    assert len(pinned.pinned) >= accumulate * 4 * FLUSH_EVERY
    assert all(pinned.pinned)


def test_step_times_are_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps the device busy while the host is done at once takes the device's time."""
    cycles = 100_000_000  # 50 ms at 2 GHz; no GPU runs at 4

    class Busy(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            torch.cuda._sleep(cycles)

    run_dir = laid_out(tmp_path, "bf16")
    train(run_dir, monkeypatch, Busy())
    # Between two flushes the host is far ahead: by its clock most steps would take a few milliseconds.
    assert read_run(run_dir).curve["step_time"].iloc[FLUSH_EVERY:].min() > cycles / 4e9
