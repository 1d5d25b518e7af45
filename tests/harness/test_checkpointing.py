"""Damaged and foreign checkpoints: the one before is used, nothing that was recorded is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fp8parity import runner
from fp8parity.checkpointing import Checkpointer, affordable, checkpoints, newest_intact
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.module import LMModule
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run

from .test_runner import LayOut, assert_same_numbers

CHANGES = {"base": {"train": {"steps": 12}}, "runtime": {"checkpoint_every": 3}}


def interrupt_at(run_dir: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step_of = LMModule.training_step

    def stopping(self: LMModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LMModule, "training_step", stopping)
        with pytest.raises(InterruptedRunError):
            runner.train(run_dir)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    whole, hurt = lay_out(CHANGES, "whole")["tensorwise-0"], lay_out(CHANGES, "hurt")["tensorwise-0"]
    runner.train(whole)
    interrupt_at(hurt, 8, monkeypatch)
    folder = hurt / schema.CHECKPOINT_DIR
    assert [path.name for path in checkpoints(folder)] == ["step-000000006.ckpt", "step-000000008.ckpt"]
    damage(checkpoints(folder)[-1])
    assert runner.train(hurt) == 0
    assert "step-000000008.ckpt is damaged: set aside as step-000000008.broken" in capsys.readouterr().out
    assert_same_numbers(whole, hurt)


def test_no_intact_checkpoint_starts_from_the_beginning(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, hurt = lay_out(CHANGES, "whole")["rowwise-0"], lay_out(CHANGES, "hurt")["rowwise-0"]
    runner.train(whole)
    interrupt_at(hurt, 8, monkeypatch)
    for path in checkpoints(hurt / schema.CHECKPOINT_DIR):
        empty(path)
    assert newest_intact(hurt / schema.CHECKPOINT_DIR) is None
    assert runner.train(hurt) == 0
    assert_same_numbers(whole, hurt)


def test_a_foreign_checkpoint_is_refused_before_a_row_is_cut(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirs = lay_out(CHANGES)
    ours, theirs = dirs["tensorwise-0"], dirs["rowwise-0"]
    interrupt_at(ours, 8, monkeypatch)
    interrupt_at(theirs, 4, monkeypatch)
    shutil.rmtree(ours / schema.CHECKPOINT_DIR)
    shutil.copytree(theirs / schema.CHECKPOINT_DIR, ours / schema.CHECKPOINT_DIR)
    with pytest.raises(UsageError, match=r"step-000000004\.ckpt belongs to another run specification"):
        runner.train(ours)
    assert list(read_run(ours).curve["step"]) == list(range(1, 9))


@pytest.mark.parametrize(
    ("took", "elapsed", "may"),
    [
        ([], 0.0, True),  # what the first one takes is not known before
        ([1.0], 99.0, False),
        ([1.0], 100.0, True),
        ([1.0, 3.0], 349.0, False),  # the next one is expected to take as long as the last
        ([1.0, 3.0], 350.0, True),
    ],
)
def test_checkpoints_keep_to_their_share(took: list[float], elapsed: float, may: bool) -> None:
    assert affordable(took, elapsed, 0.02) is may
    assert affordable(took, elapsed, None)


def test_the_default_cadence_saves_less_often_where_saving_is_slow(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def saves(self: Checkpointer, trainer: Any) -> None:
        saved.append(trainer.global_step)
        self._took.append(3600.0)  # an hour each

    monkeypatch.setattr(Checkpointer, "save", saves)
    steps = {"base": {"train": {"steps": 12}}}
    runner.train(lay_out({**steps, "runtime": {"checkpoint_every": None}}, "default")["bf16-0"])
    assert saved == [1]  # a tenth of the steps, once
    saved.clear()
    runner.train(lay_out({**steps, "runtime": {"checkpoint_every": 5}}, "named")["bf16-0"])
    assert saved == [5, 10]
