"""The training loop reads no tensor's value between two copies of the losses: on a GPU each such read would wait.

What a CPU can show of it; `tests/gpu/test_no_sync.py` asks the GPU itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from fp8parity import matrix, runner, study
from fp8parity.data import pack_bytes
from fp8parity.recorder import FLUSH_EVERY

READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select}
"""Operators whose result the host must know: `.item()`, `float()`, `bool()`; sizes that depend on values."""


class NoReads(TorchDispatchMode):
    """Lists every operator, and the reads among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if func.overloadpacket in READS:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


class Watched(L.Callback):
    """Watches whole steps, hooks of all other callbacks included, from `first` to `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.mode = NoReads()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.first - 1:
            self.mode.__enter__()
        if trainer.global_step == self.last:
            self.mode.__exit__(None, None, None)


def laid_out(tmp_path: Path, recipe: str) -> Path:
    texts = [b"alpha beta gamma %d " % i * 20 for i in range(400)]
    pack_bytes(texts, tmp_path / "corpus.bin", held_out_fraction=0.1, source="test")
    steps = 3 * FLUSH_EVERY + 1
    document = {
        "name": "reads",
        "base": {
            "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32},
            "data": {"source": "bin", "path": str(tmp_path / "corpus.bin")},
            "optim": {"lr": 0.001, "warmup_steps": 5},
            "train": {
                "steps": steps, "batch_size": 4, "context": 16, "eval_every": steps, "eval_sequences": 4,
                "device": "cpu",
            },
            "precision": {"recipe": "tensorwise", "backend": "torchao_float8"},
        },
        "seeds": [0],
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    dirs = study.lay_out(matrix.read(tmp_path / "recipe.yaml"), tmp_path / "out")
    return next(d for d in dirs if runner.read_order(d).spec.precision.recipe == recipe)


def train(run_dir: Path, monkeypatch: pytest.MonkeyPatch, callback: L.Callback) -> None:
    real = runner._trainer

    def trainer_with(*parts: Any) -> L.Trainer:
        trainer = real(*parts)
        trainer.callbacks.append(callback)
        return trainer

    monkeypatch.setattr(runner, "_trainer", trainer_with)
    assert runner.train(run_dir) == 0


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_steps_between_flushes_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    watched = Watched(FLUSH_EVERY + 1, 2 * FLUSH_EVERY - 1)
    train(laid_out(tmp_path, recipe), monkeypatch, watched)
    assert watched.mode.operators > 100 * (FLUSH_EVERY - 1)
    assert watched.mode.reads == []


def test_a_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(FLUSH_EVERY + 1, 2 * FLUSH_EVERY - 1)
    real = runner.LMModule.training_step

    def reading(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = real(self, batch, batch_idx)
        assert float(loss.detach()) > 0
        return loss

    monkeypatch.setattr(runner.LMModule, "training_step", reading)
    train(laid_out(tmp_path, "bf16"), monkeypatch, watched)
    assert len(watched.mode.reads) == FLUSH_EVERY - 1
