"""Runs of a plain training loop: the example as its reader would use it, and what `start_run` refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8parity.errors import ExecutionMismatchError, UsageError
from fp8parity.judging import judge_study
from fp8parity.run_log import RunLog, start_run
from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.mlflow_keys import allowed_key
from fp8parity_analysis.mlflow_mirror import read_contents
from fp8parity_analysis.schema import Status
from fp8parity_analysis.store import read_run, read_runs
from fp8parity_analysis.verdict import Verdict

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
    assert "FP8 in 2 of 3 linears probed (casts of rowwise); not in lm_head" in verdict["warnings"]
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
    log.evaluate(1, 3.1, eval_precision="bf16")
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


class Probe:
    """A probe of three linears, some of which cast as a recipe does."""

    def __init__(self, step: int, recipes: dict[str, str]) -> None:
        self.step = step
        self.linears = ("layers.0", "layers.1", "lm_head")
        self.signals: list[dict[str, Any]] = []
        self.casts = [
            {
                "step": step, "tokens": step, "fqn": fqn, "gemm": "output", "operand": operand, "recipe": recipe,
                "kind": ts.TRAINED, "format": "e4m3fn", "granularity": "row", **dict.fromkeys(ts.COUNT_COLUMNS, 0),
                **dict.fromkeys(ts.VALUE_COLUMNS, 1.0),
            }
            for fqn, recipe in recipes.items()
            for operand in ("input", "weight")
        ]  # fmt: skip


def _study(
    out: Path, arm: str, recipes: dict[str, str] | None, control: dict[str, str] | None = None
) -> Verdict:
    """Train three seeds whose arm is within a hair of the control, and judge them; `recipes` None probes nothing."""
    for seed in range(3):
        for name, casts in (("bf16", control), (arm, recipes)):
            log = start_run(out, arm=name, seed=seed, criteria=Criteria(eval_precision="arm"))
            for step in range(1, 21):
                log.step(step, step * 10, 3.0 + seed / 10 - 0.01 * step)
                noise = 1e-4 * ((3 * seed + step) % 5) * (name != "bf16")
                log.evaluate(step, 3.0 + seed / 10 - 0.01 * step + noise, eval_precision="arm")
            if casts is not None:
                try:
                    log.probe(Probe(20, casts))
                except ExecutionMismatchError:  # a loop that goes on whatever its log says
                    assert (
                        out / "runs" / log.run_id / schema.TENSOR_STATS_DIR / "part-00020.parquet"
                    ).exists()
            log.finish(200)
    (verdict,) = judge_study(out, {}).verdicts
    return verdict


EVERYWHERE = dict.fromkeys(("layers.0", "layers.1", "lm_head"), "rowwise")


@pytest.mark.parametrize(
    ("arm", "recipes", "warned"),
    [
        ("rowwise", EVERYWHERE, None),
        ("rowwise", None, "that FP8 ran is not proven: no probe was recorded"),
        ("ours", {}, "that FP8 ran is not proven: of 3 linears probed none casts to FP8"),
        (
            "rowwise",
            {"layers.1": "rowwise"},
            "FP8 in 1 of 3 linears probed (casts of rowwise); not in layers.0, lm_head",
        ),
        ("ours", EVERYWHERE, "FP8 in 3 of 3 linears probed (casts of rowwise)"),
        # a torchao configuration that is none of the named recipes may still be somebody's rowwise
        ("rowwise", dict.fromkeys(EVERYWHERE, "torchao"), "FP8 in 3 of 3 linears probed (casts of torchao)"),
    ],
)
def test_a_verdict_says_what_is_known_of_fp8(
    tmp_path: Path, arm: str, recipes: dict[str, str] | None, warned: str | None
) -> None:
    verdict = _study(tmp_path, arm, recipes)
    assert verdict.outcome == "EQUIVALENT"
    assert [text for text in verdict.warnings if "FP8" in text] == ([warned] if warned else [])


@pytest.mark.parametrize(
    ("arm", "recipes", "control", "named"),
    [
        (
            "rowwise",
            {},
            {},
            "arm rowwise: none of the 3 linears casts to FP8, so this trains in BF16; convert",
        ),
        ("Rowwise", {}, {}, "arm Rowwise: none of the 3 linears casts to FP8"),
        (
            "rowwise",
            {"layers.0": "rowwise", "layers.1": "tensorwise"},
            None,
            "arm rowwise: the casts of layers.1 are those of tensorwise; convert with rowwise",
        ),
        ("ours", EVERYWHERE, {"layers.0": "rowwise"}, "arm bf16 is the control, and layers.0 cast to FP8"),
    ],
)
def test_an_arm_that_is_not_what_its_name_says_is_no_comparison(
    tmp_path: Path, arm: str, recipes: dict[str, str], control: dict[str, str] | None, named: str
) -> None:
    verdict = _study(tmp_path, arm, recipes, control)
    assert verdict.outcome == "INVALID"
    assert any(named in text and "what executed is not what was declared" in text for text in verdict.reasons)


def test_the_report_says_which_linears_ran_in_fp8(tmp_path: Path) -> None:
    log = start_run(tmp_path, arm="rowwise", seed=0)
    log.probe(Probe(1, {"layers.0": "rowwise"}))
    log.finish(1)
    manifest = read_run(log.writer.run_dir).manifest
    assert manifest is not None
    assert manifest["conversion"] == {
        "recipe": "rowwise",
        "converted": ["layers.0"],
        "skipped": [{"fqn": fqn, "reason": "no FP8 cast seen by a probe"} for fqn in ("layers.1", "lm_head")],
        "gemm_dtypes": {"output": "e4m3fn x e4m3fn"},
    }
    assert manifest["probed"] == {
        "probes": 1, "linears": 3, "fp8": {"rowwise": ["layers.0"]}, "bf16": ["layers.1", "lm_head"],
    }  # fmt: skip


@pytest.mark.parametrize("key", ["seed", "precision", "replica"])
def test_settings_that_an_argument_says_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match=f"settings: {key} would be replaced"):
        start_run(tmp_path, arm="rowwise", seed=0, settings={"lr": 1, key: 7})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arm", ["BF16", "Bf16", "bf16_null"])
def test_a_name_that_looks_like_the_controls_is_refused(tmp_path: Path, arm: str) -> None:
    with pytest.raises(UsageError, match="the control is arm='bf16'"):
        start_run(tmp_path, arm=arm, seed=0)


class Scalar:
    """What a tensor of one number is to a log that imports no torch."""

    def __float__(self) -> float:
        return 2.5


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda log: log.step(2, 10, 1.0), "RunLog.step: step 2 comes after step 2; record each"),
        (lambda log: log.step(1, 10, 1.0), "step 1 comes after step 2"),
        (
            lambda log: log.evaluate(2, 1.0, eval_precision="fp8"),
            "eval_precision='fp8'; write 'bf16' or 'arm'",
        ),
        (
            lambda log: log.evaluate(2, 1.0, eval_precision="arm"),
            "RunLog.evaluate: step 2 comes after step 2",
        ),
        (lambda log: log.evaluate(-1, 1.0, eval_precision="bf16"), "RunLog.evaluate: step -1 is none"),
    ],
)
def test_rows_that_no_curve_can_have_are_refused(tmp_path: Path, call: Any, named: str) -> None:
    log = start_run(tmp_path, arm="rowwise", seed=0)
    with pytest.raises(UsageError, match="step 0 is none"):
        log.step(0, 0, 1.0)
    log.step(2, 10, Scalar(), grad_norm=math.inf)  # type: ignore[arg-type]
    log.evaluate(2, Scalar(), eval_precision="arm")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=named):
        call(log)
    log.finish(10)
    run = read_run(log.writer.run_dir)
    assert run.curve["train_loss"].tolist() == run.evals["loss"].tolist() == [2.5]


def test_nothing_is_recorded_after_the_end(tmp_path: Path) -> None:
    log = start_run(tmp_path, arm="rowwise", seed=0)
    log.step(1, 10, 1.0)
    log.finish(10)
    calls: list[Any] = [
        lambda one: one.step(2, 20, 1.0), lambda one: one.evaluate(1, 1.0, eval_precision="arm"),
        lambda one: one.probe(Probe(1, {})), lambda one: one.finish(10),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match=r"is finished; what comes after RunLog\.finish"):
            call(log)


def test_a_loop_states_how_it_evaluates(tmp_path: Path) -> None:
    log: RunLog = start_run(tmp_path, arm="rowwise", seed=0)
    with pytest.raises(TypeError, match="eval_precision"):
        log.evaluate(1, 1.0)  # type: ignore[call-arg]
