from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fp8parity import runner
from fp8parity.callbacks import HeldOutEvaluator
from fp8parity.checkpointing import checkpoints
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.module import LMModule
from fp8parity_analysis import schema
from fp8parity_analysis.store import RunWriter, read_run

LayOut = Callable[..., dict[str, Path]]
SHORT = {"base": {"train": {"steps": 12}}}


def curve_without_time(run_dir: Path) -> pd.DataFrame:
    return read_run(run_dir).curve.drop(columns="step_time")


def assert_same_numbers(a: Path, b: Path) -> None:
    pd.testing.assert_frame_equal(curve_without_time(a), curve_without_time(b), check_exact=True)
    pd.testing.assert_frame_equal(read_run(a).evals, read_run(b).evals, check_exact=True)


@pytest.mark.parametrize("arm", ["bf16", "tensorwise", "rowwise"])
def test_same_spec_twice_is_bit_identical(lay_out: LayOut, arm: str) -> None:
    first, second = lay_out(SHORT, "a"), lay_out(SHORT, "b")
    for dirs in (first, second):
        assert runner.train(dirs[f"{arm}-0"]) == 0
    assert_same_numbers(first[f"{arm}-0"], second[f"{arm}-0"])


def test_arms_share_init_and_batches_and_differ_in_numbers(lay_out: LayOut) -> None:
    dirs = lay_out(SHORT)
    for arm in ("bf16", "bf16_null", "tensorwise", "rowwise"):
        runner.train(dirs[f"{arm}-0"])
    runs = {arm: read_run(dirs[f"{arm}-0"]) for arm in ("bf16", "bf16_null", "tensorwise", "rowwise")}
    control = runs["bf16"]
    assert control.manifest is not None
    for name, run in runs.items():
        assert run.manifest is not None
        assert set(run.manifest) == {*schema.MANIFEST_KEYS, "data_split", "seconds_by_stage"}
        taken = run.manifest["seconds_by_stage"]
        assert set(taken) == {"import", "build", "prove", "train", "evaluate"}
        assert min(taken.values()) > 0
        assert sum(taken.values()) - taken["import"] <= run.manifest["wall_seconds"] + 0.05  # each is rounded
        assert run.manifest["init_digest"] == control.manifest["init_digest"]
        assert list(run.curve["batch_digest"]) == list(control.curve["batch_digest"])
        if name != "bf16":
            assert list(run.curve["train_loss"]) != list(control.curve["train_loss"])
    other_seed = lay_out(SHORT)["bf16-1"]
    runner.train(other_seed)
    other = read_run(other_seed)
    assert other.manifest is not None
    assert other.manifest["init_digest"] != control.manifest["init_digest"]
    assert list(other.curve["batch_digest"]) != list(control.curve["batch_digest"])


def test_conversion_record_names_what_ran_in_fp8(lay_out: LayOut) -> None:
    run_dir = lay_out(SHORT)["rowwise-0"]
    runner.train(run_dir)
    manifest = read_run(run_dir).manifest
    assert manifest is not None
    conversion = manifest["conversion"]
    middle = [f"blocks.1.{name}" for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj")]
    middle += [f"blocks.1.ffn.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert conversion["converted"] == middle
    assert {item["fqn"] for item in conversion["skipped"]} >= {
        "head",
        "blocks.0.attn.q_proj",
        "blocks.2.ffn.down_proj",
    }
    assert conversion["gemm_dtypes"]["grad_input"] == "e4m3 x e4m3"


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_evaluations_happen_at_the_declared_optimizer_steps(lay_out: LayOut, accumulate: int) -> None:
    dirs = lay_out({"base": {"train": {"steps": 10, "eval_every": 4, "accumulate": accumulate}}})
    runner.train(dirs["tensorwise-0"])
    run = read_run(dirs["tensorwise-0"])
    assert list(run.curve["step"]) == list(range(1, 11))
    for precision in (schema.EVAL_BF16, schema.EVAL_ARM):
        rows = run.evals[run.evals["eval_precision"] == precision]
        assert list(rows["step"]) == [4, 8, 10]
    by_precision = run.evals.pivot_table(index="step", columns="eval_precision", values="loss")
    assert (by_precision[schema.EVAL_BF16] != by_precision[schema.EVAL_ARM]).all()


def test_accumulation_trains_on_the_same_rows(lay_out: LayOut) -> None:
    digests, losses = [], []
    for accumulate in (1, 4):
        dirs = lay_out({"base": {"train": {"steps": 3, "accumulate": accumulate}}}, f"acc{accumulate}")
        runner.train(dirs["bf16-0"])
        curve = read_run(dirs["bf16-0"]).curve
        digests.append(list(curve["batch_digest"]))
        losses.append(curve["train_loss"].iloc[0])
    assert digests[0] == digests[1]
    # One forward on equal weights and rows: only the order of fp32 sums over 64 token losses differs, each of
    # relative error below 64 * 2**-24.
    assert losses[0] == pytest.approx(losses[1], rel=64 * 2**-24)


def test_killed_run_resumes_to_the_same_numbers(lay_out: LayOut) -> None:
    """Without accumulation after three flushes, with it after the first; one import of torch serves both."""
    pairs = []
    for accumulate in (1, 4):
        train = {"steps": 36, "accumulate": accumulate}
        changes = {"base": {"train": train}, "runtime": {"checkpoint_every": 7}}
        pairs.append(
            [lay_out(changes, f"{name}{accumulate}")["tensorwise-0"] for name in ("whole", "killed")]
        )
    arguments = [
        word for (_, killed), rows in zip(pairs, ("30", "10"), strict=True) for word in (str(killed), rows)
    ]
    subprocess.run([sys.executable, "-c", _KILLED_AFTER_ROWS, *arguments], check=True, timeout=300)
    for whole, killed in pairs:
        runner.train(whole)
        assert_resumes(whole, killed, 36)


def assert_resumes(whole: Path, killed: Path, steps: int) -> None:
    assert not (killed / schema.MANIFEST_FILE).exists()
    written = read_run(killed).curve
    assert 0 < len(written) < steps
    assert checkpoints(killed / schema.CHECKPOINT_DIR)
    assert runner.train(killed) == 0
    assert_same_numbers(whole, killed)
    assert list(read_run(killed).curve["step"]) == list(range(1, steps + 1))
    manifest = read_run(killed).manifest
    assert manifest is not None
    assert manifest["resumes"] == 1


_KILLED_AFTER_ROWS = """
import os, signal, sys
from fp8parity import runner
from fp8parity.cli import main
from fp8parity_analysis.store import RunWriter

def train_until_killed(run_dir, limit):
    append, seen = RunWriter.append_curve, [0]
    def dying(self, rows):
        rows = list(rows)
        append(self, rows)
        seen[0] += len(rows)
        if seen[0] >= limit:
            os.kill(os.getpid(), signal.SIGKILL)
    RunWriter.append_curve = dying
    main(["train", run_dir])

for run_dir, limit in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    child = os.fork()  # nothing was computed here yet
    if child == 0:
        train_until_killed(run_dir, limit)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
"""


def test_sigterm_saves_and_resumes(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = lay_out(SHORT, "whole")["rowwise-0"], lay_out(SHORT, "stopped")["rowwise-0"]
    runner.train(whole)
    step_of = LMModule.training_step

    def stop_at_step_five(self: LMModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LMModule, "training_step", stop_at_step_five)
        with pytest.raises(
            InterruptedRunError, match="SIGTERM received: saved at step 6; run the same command again"
        ):
            runner.train(stopped)
    assert [p.name for p in checkpoints(stopped / schema.CHECKPOINT_DIR)][-1] == "step-000000006.ckpt"
    assert runner.train(stopped) == 0
    assert_same_numbers(whole, stopped)


def plant_nan_from(monkeypatch: pytest.MonkeyPatch, step: int, steps: int = 10**9) -> None:
    step_of = LMModule.training_step

    def planted(self: LMModule, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step_of(self, batch, batch_idx)
        if step <= self.trainer.global_step + 1 < step + steps:
            self.last_loss = torch.full((), float("nan"))
        return loss

    monkeypatch.setattr(LMModule, "training_step", planted)


def test_nonfinite_losses_end_the_run_as_diverged(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 40}}})["tensorwise-0"]
    plant_nan_from(monkeypatch, 7)
    assert runner.train(run_dir) == 20
    run = read_run(run_dir)
    assert run.manifest is not None
    assert run.manifest["status"] == "diverged"
    assert run.manifest["first_nonfinite_step"] == 7
    assert run.manifest["steps_done"] == 20  # 8 losses in a row are reached at 14, seen at the next flush
    assert run.curve["train_loss"].isna().sum() == 14
    assert runner.train(run_dir) == 20  # a result: asked again, it says the same and trains nothing


class Killed(BaseException):
    """Leaves the disk as SIGKILL at this place would."""


@pytest.mark.parametrize("cadence", [3, 10])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("poison", ["losses", "parameters"])
def test_a_kill_after_the_guard_fired_changes_nothing(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, cadence: int, accumulate: int, poison: str
) -> None:
    changes = {
        "base": {"train": {"steps": 40, "accumulate": accumulate}},
        "runtime": {"checkpoint_every": cadence},
    }
    whole, killed = lay_out(changes, "whole")["tensorwise-0"], lay_out(changes, "killed")["tensorwise-0"]
    if poison == "losses":
        plant_nan_from(monkeypatch, 7)
    else:
        poison_parameters_at(monkeypatch, 7)
    assert runner.train(whole) == 20

    def killed_before_the_manifest(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "finish", killed_before_the_manifest)
        with pytest.raises(Killed):
            runner.train(killed)
    assert runner.train(killed) == 20
    assert_same_numbers(whole, killed)
    ends = [json.loads((path / schema.MANIFEST_FILE).read_text()) for path in (whole, killed)]
    assert ends[0]["steps_done"] == ends[1]["steps_done"] == (20 if poison == "losses" else 10)
    assert ends[0]["first_nonfinite_step"] == ends[1]["first_nonfinite_step"]


def poison_parameters_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    step_of = LMModule.training_step

    def poisoned(self: LMModule, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == step:
            self.decoder.head.weight.data[0, 0] = float("nan")
        return step_of(self, batch, batch_idx)

    monkeypatch.setattr(LMModule, "training_step", poisoned)


def test_nonfinite_parameters_end_the_run(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 40}}})["tensorwise-0"]
    poison_parameters_at(monkeypatch, 7)
    assert runner.train(run_dir) == 20
    manifest = read_run(run_dir).manifest
    assert manifest is not None
    assert (manifest["first_nonfinite_step"], manifest["steps_done"]) == (8, 10)


def test_divergence_at_the_very_end_counts(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 9}}})["tensorwise-0"]
    plant_nan_from(monkeypatch, 2)
    assert runner.train(run_dir) == 20


def test_a_passing_nan_is_no_divergence(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out(SHORT)["tensorwise-0"]
    plant_nan_from(monkeypatch, 4, steps=2)
    assert runner.train(run_dir) == 0
    manifest = read_run(run_dir).manifest
    assert manifest is not None
    assert manifest["status"] == "finished"
    assert manifest["first_nonfinite_step"] is None


def test_full_disk_keeps_what_was_written(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, full = lay_out(SHORT, "whole")["bf16-0"], lay_out(SHORT, "full")["bf16-0"]
    runner.train(whole)
    append = RunWriter.append_curve

    def out_of_space(self: RunWriter, rows: Any) -> None:
        rows = list(rows)
        if rows[-1]["step"] > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "append_curve", out_of_space)
        with pytest.raises(
            InterruptedRunError, match="no space left on the device; what was written is kept"
        ):
            runner.train(full)
    assert list(read_run(full).curve["step"]) == [1, 2, 3, 4, 5, 6]
    assert runner.train(full) == 0
    assert_same_numbers(whole, full)


def test_checkpoint_on_a_full_disk_is_an_interruption(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lay_out(SHORT)["bf16-0"]

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning.pytorch.Trainer.save_checkpoint", fails)
    with pytest.raises(InterruptedRunError, match="free some space|Free some space"):
        runner.train(run_dir)
    assert len(read_run(run_dir).curve) >= 1


def test_checkpoint_of_another_recipe_is_refused(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = lay_out(SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(HeldOutEvaluator, "_evaluate", _interrupt_at(6))
        with pytest.raises(InterruptedRunError):
            runner.train(dirs["tensorwise-0"])
    source = dirs["tensorwise-0"] / schema.CHECKPOINT_DIR
    target = dirs["rowwise-0"] / schema.CHECKPOINT_DIR
    target.mkdir()
    for path in checkpoints(source):
        (target / path.name).write_bytes(path.read_bytes())
    with pytest.raises(
        UsageError, match="belongs to another run specification .*delete the run's checkpoints folder"
    ):
        runner.train(dirs["rowwise-0"])


def _interrupt_at(step: int) -> Any:
    evaluate = HeldOutEvaluator._evaluate

    def wrapped(self: HeldOutEvaluator, trainer: Any, module: LMModule, at: int) -> Any:
        if at >= step:
            raise InterruptedRunError("planted")
        return evaluate(self, trainer, module, at)

    return wrapped


def test_edited_spec_is_refused(lay_out: LayOut) -> None:
    run_dir = lay_out(SHORT)["bf16-0"]
    document = json.loads((run_dir / schema.SPEC_FILE).read_text())
    document["spec"]["optim"]["lr"] = 0.1
    (run_dir / schema.SPEC_FILE).write_text(json.dumps(document))
    with pytest.raises(UsageError, match="do not edit spec.json, change the recipe file"):
        runner.train(run_dir)


def test_other_environment_is_refused(lay_out: LayOut) -> None:
    dirs = lay_out(SHORT)
    runner.train(dirs["bf16-0"])
    path = dirs["bf16-0"].parent.parent / schema.ENVIRONMENT_FILE
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "device": "another"}))
    with pytest.raises(UsageError, match="device: another != .*use another --out directory"):
        runner.train(dirs["rowwise-0"])


def test_a_run_directory_may_stand_alone(lay_out: LayOut, tmp_path: Path) -> None:
    run_dir = lay_out(SHORT)["bf16-0"]
    alone = tmp_path / "elsewhere" / "deep" / run_dir.name
    alone.mkdir(parents=True)
    document = json.loads((run_dir / schema.SPEC_FILE).read_text())
    document["data_path"] = str((run_dir / document["data_path"]).resolve())
    (alone / schema.SPEC_FILE).write_text(json.dumps(document))
    assert runner.train(alone) == 0
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["deep"]
    assert not (tmp_path / schema.ENVIRONMENT_FILE).exists()


def test_cuda_asked_for_and_absent(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_dir = lay_out({"base": {"train": {"device": "cuda"}}})["bf16-0"]
    with pytest.raises(UsageError, match="cuda was asked for, and torch sees no CUDA device"):
        runner.train(run_dir)


@pytest.mark.parametrize("arm", ["bf16", "tensorwise", "rowwise"])
@pytest.mark.parametrize("compute", ["bf16-mixed", "bf16-true"])
def test_compute_modes_train(lay_out: LayOut, arm: str, compute: str) -> None:
    run_dir = lay_out(
        {"base": {"train": {"compute": compute, "steps": 20, "activation_checkpointing": True}}}
    )[f"{arm}-0"]
    runner.train(run_dir)
    loss = read_run(run_dir).curve["train_loss"]
    assert loss.iloc[-5:].mean() < loss.iloc[:3].mean() - 0.3


def test_recorded_gradient_norm_is_before_clipping(lay_out: LayOut) -> None:
    run_dir = lay_out({"base": {"optim": {"clip_norm": 1e-3}, "train": {"steps": 3}}})["bf16-0"]
    runner.train(run_dir)
    assert (read_run(run_dir).curve["grad_norm"] > 1e-2).all()


def test_recorder_counts_steps_not_micro_batches(lay_out: LayOut) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 5, "eval_every": 5, "accumulate": 4}}})["bf16-0"]
    runner.train(run_dir)
    curve = read_run(run_dir).curve
    assert list(curve["tokens"]) == [64 * step for step in range(1, 6)]


def test_how_matmuls_round_is_not_left_to_the_environment() -> None:
    code = (
        "import json, sys, torch; from fp8parity import runner; from fp8parity.spec import RunSpec;"
        "before = torch.backends.cuda.matmul.allow_tf32;"
        "runner._prepare_process(RunSpec.model_validate(json.loads(sys.argv[1])));"
        "print(before, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())"
    )
    spec = {
        "model": {"preset": "0.7m"}, "data": {}, "optim": {"lr": 0.1}, "precision": {"recipe": "bf16"}, "seed": 0,
        "train": {"steps": 2, "batch_size": 2, "context": 8, "eval_every": 1},
    }  # fmt: skip
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(spec)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.split() == ["True", "False", "highest"]
