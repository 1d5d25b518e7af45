"""Runs of a plain training loop: the example as its reader would use it, and what `start_run` refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from fp8parity.errors import UsageError
from fp8parity.run_log import start_run
from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.mlflow_keys import allowed_key
from fp8parity_analysis.mlflow_mirror import read_contents
from fp8parity_analysis.schema import Status
from fp8parity_analysis.store import read_run, read_runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def test_the_example_ends_in_a_verdict_and_a_report(tmp_path: Path) -> None:
    study = tmp_path / "plain"
    subprocess.run([sys.executable, str(EXAMPLE), str(study)], check=True, capture_output=True, timeout=300)
    judge = subprocess.run(
        [sys.executable, "-m", "fp8parity", "judge", str(study), "--json"], capture_output=True, text=True
    )
    (verdict,) = json.loads(judge.stdout)["verdicts"]
    assert (verdict["recipe"], verdict["n_seeds"]) == ("rowwise", 3)
    assert verdict["outcome"] in ("EQUIVALENT", "INCONCLUSIVE", "WORSE_MARGIN_UNRESOLVED", "NON_INFERIOR")
    subprocess.run([sys.executable, "-m", "fp8parity", "report", str(study)], check=True, capture_output=True)
    assert (study / schema.REPORT_FILE).exists()
    for run in read_runs(study):
        assert run.manifest is not None
        assert len(run.curve) == 40
        parts = sorted((run.path / schema.TENSOR_STATS_DIR).glob(ts.CAST_PARTS))
        casts = pd.concat([pd.read_parquet(path) for path in parts])
        assert sorted(set(casts["step"])) == [10, 20, 30, 40]
        assert set(casts["recipe"]) == {"rowwise"}
        assert set(casts["kind"]) == {ts.WHAT_IF if run.spec["arm"] == "bf16" else ts.TRAINED}
        assert isinstance(run.manifest["alerts"], list)


def _one(study: Path, arm: str, seed: int = 0, replica: int = 0, **given: object) -> Path:
    log = start_run(study, arm=arm, seed=seed, replica=replica, settings={"lr": 0.1}, **given)  # type: ignore[arg-type]
    log.step(1, 64, 3.0, grad_norm=1.0, batch_digest="abc")
    log.evaluate(1, 3.1)
    log.finish(64, notes=("by hand",))
    return log.writer.run_dir


def test_a_run_holds_what_was_logged(tmp_path: Path) -> None:
    run = read_run(_one(tmp_path, "rowwise", init_digest="d0"))
    assert (run.spec["role"], run.spec["spec"]["lr"]) == ("test", 0.1)
    assert run.manifest is not None
    assert (run.manifest["init_digest"], run.manifest["notes"]) == ("d0", ["by hand"])
    assert "alerts" not in run.manifest
    assert list(run.curve["batch_digest"]) == ["abc"]
    assert read_run(_one(tmp_path, "bf16")).spec["role"] == "control"
    null = read_run(_one(tmp_path, "bf16", replica=1))
    assert (null.spec["role"], null.spec["arm"], null.spec["replica_kind"]) == ("null", "bf16_null", "rerun")


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    log = start_run(tmp_path, arm="tensorwise", seed=0)
    log.step(1, 64, float("nan"))
    log.finish(64, status=Status.DIVERGED)
    run = read_run(log.writer.run_dir)
    assert run.manifest is not None
    assert run.manifest["status"] == "diverged"


def test_the_first_criteria_stay(tmp_path: Path) -> None:
    _one(tmp_path, "bf16", criteria=Criteria(margin=0.01))
    before = (tmp_path / schema.STUDY_FILE).read_text()
    _one(tmp_path, "rowwise", criteria=Criteria(margin=0.04))
    assert (tmp_path / schema.STUDY_FILE).read_text() == before


def test_an_unfinished_run_begins_anew_and_a_finished_one_is_refused(tmp_path: Path) -> None:
    log = start_run(tmp_path, arm="bf16", seed=0)
    log.step(1, 64, 3.0)
    log.writer.close()
    assert len(read_run(_one(tmp_path, "bf16")).curve) == 1
    with pytest.raises(UsageError, match="is finished; use another seed or replica"):
        start_run(tmp_path, arm="bf16", seed=0)


def test_a_study_of_our_own_runner_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / schema.STUDY_FILE).write_text('{"recipe_file": "recipes/demo_cpu.yaml"}')
    with pytest.raises(UsageError, match="holds a study of a recipe file; use another directory"):
        start_run(tmp_path, arm="bf16", seed=0)


@pytest.mark.parametrize("arm", ["fp8/rowwise", "/", "", " ", "a\0b", "x" * 201])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path, arm: str) -> None:
    with pytest.raises(UsageError, match="names a folder too"):
        start_run(tmp_path, arm=arm, seed=0)
    assert not list(tmp_path.iterdir())


def test_any_other_name_is_read_again(tmp_path: Path) -> None:
    arms = ["bf16", "..", "row wise", "x" * 200, "fp8[e4m3]=a+b"]
    for arm in arms:
        _one(tmp_path, arm)
    assert sorted(run.spec["arm"] for run in read_runs(tmp_path)) == sorted(arms)


def test_a_loop_is_what_mlflow_takes(tmp_path: Path) -> None:
    settings = {"lr": 1e-3, "model": "llama 1b", "train": "cosine", "optim": {"beta=2": 0.95}}
    for arm in ("bf16", "fp8(e4m3)+gw"):
        log = start_run(tmp_path, arm=arm, seed=0, settings=settings)
        for step in range(1, 4):
            log.step(step, 64 * step, 3.0)
            log.evaluate(step, 4.0 if arm == "bf16" else 4.04, eval_precision="arm")
        log.finish(192)
    _, told = read_contents(tmp_path, read_json(tmp_path / schema.STUDY_FILE))
    wanted = {"recipe": "fp8(e4m3)+gw", "settings.lr": "0.001", "settings.model": "llama 1b", "model": "loop"}
    assert wanted.items() <= told.params.items()
    assert "0.95" in told.params.values()
    assert all(allowed_key(key) == key for key in (*told.params, *told.tags, *told.series))
    assert list(told.series["pair/gap_percent"].values) == pytest.approx([100 * math.log(1.01)] * 3)
    assert (told.tags["fp8.gap_of"], told.series["train/loss"].steps.tolist()) == ("held_out/arm", [1, 2, 3])
