"""Damaged and foreign checkpoints: the one before is used, nothing that was recorded is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8parity import checkpointing, matrix, runner
from fp8parity.callbacks import ProofBeforeTraining
from fp8parity.checkpointing import (
    Checkpointer,
    affordable,
    checkpoints,
    lacking_rows,
    newest_usable,
    step_of,
)
from fp8parity.data import open_tokens, write_tokens
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.module import LMModule
from fp8parity.spec import RunSpec
from fp8parity_analysis import schema
from fp8parity_analysis.store import RunWriter, read_run

from .conftest import WriteRecipe
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


def in_directory(field: int, value: int) -> Callable[[Path], None]:
    """Return a damage to one byte of the last entry's record in the archive's directory."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[data.rfind(b"PK\x01\x02") + field] = value
        path.write_bytes(data)

    return damage


def without_entries(path: Path) -> None:
    """Let the end record say that the archive holds no entry in all: Python's reader does not look there."""
    data = bytearray(path.read_bytes())
    for mark, field in ((b"PK\x06\x06", 32), (b"PK\x05\x06", 10)):
        at = data.rfind(mark)
        if at >= 0:
            data[at + field : at + field + 2] = b"\0\0"
    path.write_bytes(data)


encrypted, unknown_method = in_directory(8, 1), in_directory(10, 99)


def rows_until(run_dir: Path, steps: int, spec: RunSpec) -> None:
    """Write what the streams hold of a run after so many steps, as far as a checkpoint needs it."""
    both = (schema.EVAL_BF16, schema.EVAL_ARM)
    due = [(step, name) for step in range(1, steps + 1) if step % spec.train.eval_every == 0 for name in both]
    for stream, rows in (
        (schema.CURVE_STREAM, [{"step": step} for step in range(1, steps + 1)]),
        (schema.EVAL_STREAM, [{"step": step, "eval_precision": name} for step, name in due]),
    ):
        (run_dir / stream).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def two_saved(tmp_path: Path, write_recipe: WriteRecipe) -> tuple[Path, RunSpec]:
    """Return a run directory with small checkpoints of steps 6 and 9 and their rows, and the run's specification."""
    spec = matrix.read(write_recipe()).runs[0].spec
    run_dir = tmp_path / "run"
    folder = run_dir / schema.CHECKPOINT_DIR
    folder.mkdir(parents=True)
    for step in (6, 9):
        document = {"fp8parity": {"spec_hash": spec.hash()}, "weights": torch.arange(1000 * step)}
        torch.save(document, folder / f"step-{step:09d}.ckpt")
    rows_until(run_dir, 9, spec)
    return run_dir, spec


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, encrypted, unknown_method, without_entries])
def test_damage_is_noticed_wherever_it_lies(
    two_saved: tuple[Path, RunSpec], damage: Callable[[Path], None]
) -> None:
    run_dir, spec = two_saved
    six, nine = checkpoints(run_dir / schema.CHECKPOINT_DIR)
    assert newest_usable(run_dir, spec) == nine
    damage(nine)
    assert newest_usable(run_dir, spec) == six
    assert nine.with_suffix(".broken").exists()


def cut(name: str, rows: int) -> Callable[[Path], None]:
    """Return the loss of a stream's last rows."""

    def lose(run_dir: Path) -> None:
        lines = (run_dir / name).read_text().splitlines(keepends=True)
        (run_dir / name).write_text("".join(lines[:rows]))

    return lose


def zeroed(run_dir: Path) -> None:
    """Leave zeros where the eighth row was, as a file system may that had written its length only."""
    lines = (run_dir / schema.CURVE_STREAM).read_bytes().split(b"\n")
    lines[7] = bytes(len(lines[7]))
    (run_dir / schema.CURVE_STREAM).write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("loss", "lacks", "left"),
    [
        (cut(schema.CURVE_STREAM, 9), None, 9),
        (cut(schema.CURVE_STREAM, 8), "curve.jsonl lacks step 9", 6),
        (cut(schema.CURVE_STREAM, 5), "curve.jsonl lacks step 6", None),
        (zeroed, "curve.jsonl lacks step 8", 6),
        (cut(schema.EVAL_STREAM, 5), "eval.jsonl lacks step 9", 6),
        (cut(schema.EVAL_STREAM, 3), "eval.jsonl lacks step 6", None),
        (lambda run_dir: (run_dir / schema.EVAL_STREAM).unlink(), "eval.jsonl lacks step 3", None),
    ],
)
def test_a_checkpoint_is_used_only_with_every_row_before_it(
    two_saved: tuple[Path, RunSpec],
    capsys: pytest.CaptureFixture[str],
    loss: Callable[[Path], None],
    lacks: str | None,
    left: int | None,
) -> None:
    run_dir, spec = two_saved
    loss(run_dir)
    used = newest_usable(run_dir, spec)
    assert (None if used is None else step_of(used)) == left
    assert (capsys.readouterr().out == "") is (lacks is None)
    assert lacks is None or lacks in {lacking_rows(run_dir, spec.train, step) for step in (6, 9)}


def test_rows_that_a_power_cut_took_are_trained_again(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, hurt = lay_out(CHANGES, "whole")["tensorwise-0"], lay_out(CHANGES, "hurt")["tensorwise-0"]
    runner.train(whole)
    interrupt_at(hurt, 8, monkeypatch)
    cut(schema.CURVE_STREAM, 7)(hurt)
    assert runner.train(hurt) == 0
    said = capsys.readouterr().out
    assert "step-000000008.ckpt cannot be continued (curve.jsonl lacks step 8): set aside as" in said
    assert "resuming from step-000000006.ckpt" in said
    assert_same_numbers(whole, hurt)


def test_rows_are_on_the_disk_before_their_checkpoint(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real, writes = RunWriter.sync, checkpointing.write_checkpoint

    def sync(self: RunWriter) -> None:
        done.append("rows")
        real(self)

    def write(trainer: Any, target: Path) -> None:
        done.append(target.stem)
        writes(trainer, target)

    monkeypatch.setattr(RunWriter, "sync", sync)
    monkeypatch.setattr(checkpointing, "write_checkpoint", write)
    runner.train(lay_out({"base": {"train": {"steps": 5}}, "runtime": {"checkpoint_every": 4}})["bf16-0"])
    assert done == ["rows", "step-000000004"]


@pytest.mark.parametrize("damage", [truncate, unknown_method])
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_interrupts_at_once(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    whole, stopped = lay_out(CHANGES, "whole")["rowwise-0"], lay_out(CHANGES, "stopped")["rowwise-0"]
    runner.train(whole)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]

    def struck(*_: Any) -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception:  # what a compiler does with errors on its way
            return
        raise AssertionError("the proof went on")

    with monkeypatch.context() as patch:
        patch.setattr(ProofBeforeTraining, "on_train_start", struck)
        with pytest.raises(InterruptedRunError, match=f"{number.name} received before the next step"):
            runner.train(stopped)
    assert not checkpoints(stopped / schema.CHECKPOINT_DIR)
    # Lightning leaves SIGINT ignored after one; the process of a run ends here
    signal.signal(signal.SIGTERM, handlers[0])
    signal.signal(signal.SIGINT, handlers[1])
    assert runner.train(stopped) == 0
    assert_same_numbers(whole, stopped)


def test_an_exit_that_the_users_code_asks_for_is_no_signal(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves(*_: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(LMModule, "training_step", leaves)
    with pytest.raises(SystemExit) as caught:
        runner.train(lay_out(CHANGES)["bf16-0"])
    assert caught.value.code == 3


def test_a_signal_after_the_last_step_of_a_phase_interrupts_between_them(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**CHANGES, "base": {"train": {"steps": 12}, "precision": {"switch_at": 6}}}
    whole, stopped = (
        next(path for name, path in lay_out(changes, out).items() if name.startswith("rowwise"))
        for out in ("whole", "stopped")
    )
    runner.train(whole)

    def late(self: Any, trainer: Any, pl_module: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_end", late)
        with pytest.raises(InterruptedRunError, match="SIGTERM received between two phases"):
            runner.train(stopped)
    assert runner.train(stopped) == 0
    assert_same_numbers(whole, stopped)


def test_a_request_for_stacks_requeues_no_slurm_job(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning, told of SLURM, would answer SIGUSR1 with a checkpoint of its own and `scontrol requeue`."""
    for name, value in {"NTASKS": "1", "JOB_ID": "4711", "JOB_NAME": "nightly"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run_dir = lay_out(CHANGES)["bf16-0"]
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    step_of = LMModule.training_step

    def asks(self: LMModule, batch: Any, batch_idx: int) -> Any:
        heard.append(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
        return step_of(self, batch, batch_idx)

    monkeypatch.setattr(LMModule, "training_step", asks)
    try:
        assert runner.train(run_dir) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(heard)
    assert not list(run_dir.glob("hpc_ckpt*"))


def with_other_tokens(corpus: Path, folder: Path) -> tuple[Path, Callable[[], None]]:
    """Return a copy of the corpus and what packs other text of the same length under its name."""
    path = folder / "text.bin"
    for suffix in (".bin", ".json"):
        shutil.copy(corpus.with_suffix(suffix), path.with_suffix(suffix))

    def pack_again() -> None:
        tokens, meta = open_tokens(path)
        parts = tokens[: meta.train_tokens][::-1].copy(), tokens[meta.train_tokens :].copy()
        write_tokens(
            path, parts[:1], parts[1:], vocab_size=meta.vocab_size, tokenizer=meta.tokenizer,
            tokenizer_sha256=meta.tokenizer_sha256, source="other", documents=meta.documents,
        )  # fmt: skip

    return path, pack_again


@pytest.mark.parametrize("begun", [True, False])
def test_a_study_goes_on_with_the_tokens_it_began_with(
    lay_out: LayOut, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    path, pack_again = with_other_tokens(corpus, tmp_path)
    changes = {**CHANGES, "base": {"train": {"steps": 12}, "data": {"path": str(path)}}}
    run_dir = lay_out(changes)["rowwise-0"]
    if begun:
        interrupt_at(run_dir, 5, monkeypatch)
    pack_again()
    with pytest.raises(UsageError, match=r"but spec\.json says .*put that file back"):
        runner.train(run_dir)
    if begun:
        with pytest.raises(
            UsageError, match="of this study was trained on .*put that file back, or use another --out"
        ):
            lay_out(changes)
    else:
        assert runner.train(lay_out(changes)["rowwise-0"]) == 0


def test_a_checkpoint_with_its_parameters_in_another_order_is_refused(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lay_out(CHANGES)["bf16-0"]
    interrupt_at(run_dir, 8, monkeypatch)
    state_dict = LMModule.state_dict

    def turned(self: LMModule, *args: Any, **kwargs: Any) -> Any:
        return dict(reversed(state_dict(self, *args, **kwargs).items()))

    monkeypatch.setattr(LMModule, "state_dict", turned)
    with pytest.raises(UsageError, match=r"model: parameter 0 is model\..* register layers in a fixed order"):
        runner.train(run_dir)
