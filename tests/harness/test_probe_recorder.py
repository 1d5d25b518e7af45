"""Probes inside a run: curves that do not notice, files that survive a kill, faults found at their step."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from fp8parity import runner
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.module import LMModule
from fp8parity.probe import GemmProbe
from fp8parity.probe_recorder import recomputing
from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.store import RunWriter, read_run

from .tiny_decoder import decoder, loss_of, rows

LayOut = Callable[..., dict[str, Path]]
FP8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "blockwise_requant")


def changes(probe: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return {
        "base": {"train": {"steps": 8, "eval_every": 8, **train}, "precision": {"backend": "reference"}},
        "axes": {"precision.recipe": list(FP8)},
        "seeds": [0],
        "null": None,
        "probe": {"every": 3, **(probe or {})},
    }


def parts(run_dir: Path, pattern: str) -> pd.DataFrame:
    files = sorted((run_dir / schema.TENSOR_STATS_DIR).glob(pattern))
    for path in files:
        version = pq.read_schema(path).metadata[ts.METADATA_KEY]
        assert int(version) == ts.TENSOR_SCHEMA_VERSION
    return pd.concat([pd.read_parquet(path) for path in files], ignore_index=True)


def casts(run_dir: Path) -> pd.DataFrame:
    return parts(run_dir, ts.CAST_PARTS)


def numbers(run_dir: Path) -> pd.DataFrame:
    run = read_run(run_dir)
    return run.curve.drop(columns="step_time").merge(run.evals, on="step", how="left")


def train(run_dir: Path) -> dict[str, Any]:
    runner.train(run_dir)
    manifest: dict[str, Any] = read_json(run_dir / schema.MANIFEST_FILE)
    return manifest


@pytest.mark.parametrize("arm", ["bf16", *FP8])
@pytest.mark.parametrize(
    "how", [{}, {"accumulate": 2, "activation_checkpointing": True}], ids=["plain", "both"]
)
def test_curves_are_bit_identical_with_and_without(lay_out: LayOut, arm: str, how: dict[str, Any]) -> None:
    on = lay_out(changes({"what_if": ["tensorwise", "blockwise"]}, **how), "on")[f"{arm}-0"]
    off = lay_out(changes({"every": 0}, **how), "off")[f"{arm}-0"]
    assert on.name == off.name  # the same run: the probe is no part of its identity
    train(on)
    manifest = train(off)
    pd.testing.assert_frame_equal(numbers(on), numbers(off), check_exact=True)
    assert not (off / schema.TENSOR_STATS_DIR).exists()
    assert "alerts" not in manifest
    assert sorted(set(casts(on)["step"])) == [3, 6]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_curves_of_torchao_are_bit_identical_too(lay_out: LayOut, recipe: str) -> None:
    runs = []
    for every in (0, 3):
        plan = changes({"every": every}) | {"axes": {"precision.recipe": [recipe]}}
        plan["base"]["precision"] = {"backend": "torchao_float8"}
        runs.append(lay_out(plan, f"every{every}")[f"{recipe}-0"])
        train(runs[-1])
    pd.testing.assert_frame_equal(*(numbers(run) for run in runs), check_exact=True)


def test_rows_have_the_contract(lay_out: LayOut) -> None:
    dirs = lay_out(changes())
    manifest = train(dirs["bf16-0"])
    train(dirs["rowwise-0"])
    control, test = casts(dirs["bf16-0"]), casts(dirs["rowwise-0"])
    assert tuple(control.columns) == tuple(test.columns) == ts.CAST_COLUMNS
    assert set(control["kind"]) == {ts.WHAT_IF}
    assert set(control["recipe"]) == set(FP8)  # by default those of the arms it is compared with
    assert set(test["kind"]) == {ts.TRAINED}
    assert set(test["recipe"]) == {"rowwise"}
    assert set(test["fqn"]) == {name for name in test["fqn"] if name.startswith("blocks.1.")}
    assert list(test["tokens"]) == [64 * step for step in test["step"]]
    for name in ts.COUNT_COLUMNS:
        assert test[name].dtype == "int64"
    for name in ts.VALUE_COLUMNS:
        assert test[name].dtype == "float64"
    signals = parts(dirs["rowwise-0"], ts.SIGNAL_PARTS)
    assert tuple(signals.columns) == ts.SIGNAL_COLUMNS
    assert set(signals["signal"]) == set(ts.SIGNALS)
    assert (manifest["alerts"], manifest["notes"]) == ([], [])
    key = ["step", "fqn", "gemm", "operand", "recipe", "kind"]
    assert not control.duplicated(key).any()


def test_the_probed_state_is_the_one_after_the_step(lay_out: LayOut) -> None:
    """The weight's amax at step k is that of a run that ends after k steps."""
    long, short = lay_out(changes(), "long"), lay_out(changes(), "short")
    train(long["rowwise-0"])
    fqn = "blocks.1.ffn.up_proj"
    kept: list[float] = []
    step_of = LMModule.training_step

    def look(self: LMModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3 and not kept:
            kept.append(self.decoder.get_submodule(fqn).weight.detach().bfloat16().abs().max().item())
        return step_of(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LMModule, "training_step", look)
        train(short["rowwise-0"])
    rows = casts(long["rowwise-0"])
    found = rows[(rows["fqn"] == fqn) & (rows["operand"] == "weight") & (rows["step"] == 3)]
    assert set(found["amax"]) == set(kept)


_KILL_SELF_AFTER_STEP = """
import os, signal
from fp8parity_analysis.store import RunWriter
append = RunWriter.append_tensor_stats
def dying(self, step, casts, signals):
    append(self, step, casts, signals)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
RunWriter.append_tensor_stats = dying
from fp8parity.cli import main
main()
"""


def test_a_killed_run_is_readable_and_resumes_to_the_same_rows(lay_out: LayOut) -> None:
    plan = changes({"every": 2}, steps=14) | {"runtime": {"checkpoint_every": 5}}
    whole, killed = lay_out(plan, "whole")["rowwise-0"], lay_out(plan, "killed")["rowwise-0"]
    train(whole)
    code = [sys.executable, "-c", _KILL_SELF_AFTER_STEP.format(step=8), "train", str(killed)]
    process = subprocess.Popen(code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.wait(timeout=300) == -signal.SIGKILL
    assert sorted(set(casts(killed)["step"])) == [2, 4, 6, 8]
    # something of a later step, as a kill after it would leave, and half a file
    folder = killed / schema.TENSOR_STATS_DIR
    (folder / "part-00010.parquet").write_bytes((folder / "part-00008.parquet").read_bytes())
    (folder / ".part-00012.parquet.tmp").write_bytes(b"PAR1")
    train(killed)
    pd.testing.assert_frame_equal(casts(whole), casts(killed), check_exact=True)
    pd.testing.assert_frame_equal(
        parts(whole, ts.SIGNAL_PARTS), parts(killed, ts.SIGNAL_PARTS), check_exact=True
    )
    pd.testing.assert_frame_equal(numbers(whole), numbers(killed), check_exact=True)


def _planted(
    monkeypatch: pytest.MonkeyPatch, steps: range, fqn: str, change: Callable[[torch.Tensor], Any]
) -> None:
    """Change a linear's weight at the end of these optimizer steps."""
    step_of = LMModule.optimizer_step

    def planted(self: LMModule, *args: Any, **kwargs: Any) -> None:
        step_of(self, *args, **kwargs)
        if self.trainer.global_step + 1 in steps:  # counted when the step returns
            with torch.no_grad():
                change(self.decoder.get_submodule(fqn).weight)

    monkeypatch.setattr(LMModule, "optimizer_step", planted)


def test_a_fault_raises_one_alert_at_its_step_in_log_and_manifest(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fqn = "blocks.1.ffn.down_proj"
    run_dir = lay_out(changes({"every": 1}, steps=12, eval_every=12))["rowwise-0"]
    _planted(monkeypatch, range(7, 99), fqn, lambda weight: weight[3].zero_())
    manifest = train(run_dir)
    rows = casts(run_dir)
    weight = rows[(rows["fqn"] == fqn) & (rows["operand"] == "weight") & (rows["gemm"] == "output")]
    share = 1 / int(weight["group_count"].iloc[0])
    (alert,) = [a for a in manifest["alerts"] if a["rule"] == "zero_amax" and a["operand"] == "weight"]
    assert alert == {
        "step": 7, "rule": "zero_amax", "fqn": fqn, "gemm": "output", "operand": "weight", "value": share, "limit": 0.0,
    }  # fmt: skip
    assert set(alert) == set(ts.ALERT_KEYS)
    line = f"alert: step 7: zero_amax: {fqn}, weight of output: {share:.4g} (limit 0)"
    assert capsys.readouterr().out.count(line) == 1
    assert list(weight[weight["zero_amax_groups"] > 0]["step"]) == list(range(7, 13))


def test_alerts_outlive_a_resume(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    fqn = "blocks.1.ffn.up_proj"
    plan = changes({"every": 1}, steps=14, eval_every=14) | {"runtime": {"checkpoint_every": 3}}
    run_dir = lay_out(plan)["tensorwise-0"]
    append = RunWriter.append_curve

    def full(self: RunWriter, rows: Any) -> None:
        rows = list(rows)
        if rows[-1]["step"] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, rows)

    with monkeypatch.context() as patch:
        _planted(patch, range(10, 11), fqn, lambda weight: weight.mul_(64))
        patch.setattr(RunWriter, "append_curve", full)
        with pytest.raises(InterruptedRunError):
            runner.train(run_dir)
    manifest = train(run_dir)
    jumps = [
        a for a in manifest["alerts"] if (a["rule"], a["fqn"], a["operand"]) == ("scale_jump", fqn, "weight")
    ]
    assert {a["gemm"] for a in jumps} == {"output", "grad_input"}
    assert {a["step"] for a in jumps} == {10}
    assert all(a["value"] == pytest.approx(1 / 64, rel=0.1) for a in jumps)


def test_a_failing_probe_is_said_once_and_training_goes_on(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean, faulty = lay_out(changes({"every": 1}), "clean"), lay_out(changes({"every": 1}), "faulty")
    train(clean["rowwise-0"])
    run = GemmProbe.run

    def failing(self: GemmProbe, step: int, *args: Any) -> Any:
        result = run(self, step, *args)
        if step == 4:
            raise torch.OutOfMemoryError("planted\nsecond line")
        return result

    monkeypatch.setattr(GemmProbe, "run", failing)
    manifest = train(faulty["rowwise-0"])
    words = "tensor statistics end before step 4: OutOfMemoryError: planted"
    assert manifest["notes"] == [words]
    assert manifest["status"] == "finished"
    assert f"error: {words}; training goes on without them" in capsys.readouterr().out
    assert sorted(set(casts(faulty["rowwise-0"])["step"])) == [1, 2, 3]
    pd.testing.assert_frame_equal(numbers(clean["rowwise-0"]), numbers(faulty["rowwise-0"]), check_exact=True)


def test_a_full_disk_is_an_interruption(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out(changes())["rowwise-0"]

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        with pytest.raises(InterruptedRunError, match="no space left on the device"):
            runner.train(run_dir)
    assert not list((run_dir / schema.TENSOR_STATS_DIR).glob("*.parquet"))
    train(run_dir)
    assert sorted(set(casts(run_dir)["step"])) == [3, 6]


def test_a_wrong_probe_in_spec_json_is_named(lay_out: LayOut) -> None:
    run_dir = lay_out(changes())["rowwise-0"]
    document = read_json(run_dir / schema.SPEC_FILE)
    write_json(run_dir / schema.SPEC_FILE, {**document, "probe": {"every": -1}})
    with pytest.raises(
        UsageError, match=r"spec.json: probe.every: Input should be greater than or equal to 0"
    ):
        runner.train(run_dir)


def test_a_spec_json_without_a_probe_is_not_probed(lay_out: LayOut) -> None:
    run_dir = lay_out(changes({"every": 1}))["rowwise-0"]
    document = read_json(run_dir / schema.SPEC_FILE)
    document.pop("probe")
    write_json(run_dir / schema.SPEC_FILE, document)
    assert "alerts" not in train(run_dir)
    assert not (run_dir / schema.TENSOR_STATS_DIR).exists()


def test_recomputing_changes_memory_and_no_number() -> None:
    model = decoder("rowwise")
    plain = GemmProbe(model).run(1, 64, [rows()], loss_of(model))
    with recomputing(model):
        assert model.activation_checkpointing
        assert GemmProbe(model).run(1, 64, [rows()], loss_of(model)) == plain
    assert not model.activation_checkpointing
