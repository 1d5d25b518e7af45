"""The MLflow mirror: layout, idempotency, continuation, and every way in which a store can be out of order."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8parity_analysis import mlflow_sink, schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.mlflow_content import MAX_POINTS, Points, _doubled, clock_of, points_of, run_name
from fp8parity_analysis.mlflow_follow import Follower, followed, target_of
from fp8parity_analysis.mlflow_keys import allowed_key
from fp8parity_analysis.mlflow_mirror import MirrorResult, default_uri, mirror, read_contents
from fp8parity_analysis.mlflow_sink import MirrorError
from fp8parity_analysis.mlflow_view import VIEW_TAG, view_state
from fp8parity_analysis.store import RunWriter

STEPS = 30
ARMS = (("bf16", "control", 0), ("bf16_null", "null", 1), ("rowwise-n4", "test", 0))


def rows(first: int, last: int, shift: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "tokens": step * 64,
            "train_loss": 5 / math.sqrt(step) + shift,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "step_time": 0.01,
            "batch_digest": f"d{step}",
        }
        for step in range(first, last + 1)
    ]


def evals(first: int, last: int, shift: float) -> list[dict[str, Any]]:
    return [
        {"step": step, "split": "held_out", "eval_precision": kind, "loss": 4.0 + shift}
        for step in range(first, last + 1)
        if step % 10 == 0
        for kind in ("bf16", "arm")
    ]


def manifest(run_id: str, status: str = "finished") -> dict[str, Any]:
    told = {
        "run_id": run_id,
        "status": status,
        "steps_done": STEPS,
        "tokens": STEPS * 64,
        "data_sha256": "ab" * 32,
        "environment": {"torch": "2.13.0"},
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:01:00+00:00",
    }
    return {key: told.get(key) for key in schema.MANIFEST_KEYS}


def spec(run_id: str, arm: str, role: str, seed: int, replica: int) -> dict[str, Any]:
    train = {"steps": STEPS, "eval_every": 10}
    precision = {"recipe": arm.partition("-")[0], "keep_first": 4, "keep_last": 4}
    told = {"run_id": run_id, "arm": arm, "role": role, "seed": seed, "replica": replica, "group": "25m"}
    told |= {"schema_version": 1, "study": "s", "replica_kind": "none", "data_path": "../../data/text.bin"}
    return {**told, "checkpoint_every": 10, "spec": {"train": train, "precision": precision, "seed": seed}}


def write_study(out: Path, *, until: int = STEPS, seeds: int = 1) -> Path:
    """Write a study whose runs have come to step `until`; they are finished at `STEPS`."""
    names = []
    for seed in range(seeds):
        for arm, role, replica in ARMS:
            name = f"25m-s{seed}-{arm}-r{replica}"
            names.append(name)
            folder = out / schema.RUNS_DIR / name
            shutil.rmtree(folder, ignore_errors=True)
            writer = RunWriter(folder)
            write_json(folder / schema.SPEC_FILE, spec(name, arm, role, seed, replica))
            shift = 0.04 if role == "test" else 0.0
            writer.append_curve(rows(1, until, shift))
            writer.append_evals(evals(1, until, shift))
            if until == STEPS:
                writer.finish(manifest(name))
            writer.close()
    study = {"name": "s", "created_at": "2026-01-01T00:00:00+00:00", "runs": names}
    write_json(out / schema.STUDY_FILE, study)
    (out / schema.RECIPE_COPY).write_text("name: s\n")
    return out


def write_verdicts(out: Path, outcome: str = "WORSE") -> None:
    verdicts = [{"recipe": "rowwise-n4", "outcome": outcome, "gate": "fail"}]
    write_json(out / schema.VERDICTS_FILE, {"verdicts": verdicts})


def census(database: Path) -> dict[str, list[Any]]:
    """Return everything that MLflow stored, table by table."""
    with sqlite3.connect(database) as connection:
        tables = ("experiments", "runs", "metrics", "params", "tags", "datasets", "inputs", "experiment_tags")
        return {name: sorted(map(repr, connection.execute(f"select * from {name}"))) for name in tables}


def runs_of(out: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(out))
    experiment = client.get_experiment_by_name("s")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def history(out: Path, run: Any, metric: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=default_uri(out))
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


@pytest.fixture
def study(tmp_path: Path, empty_store: Path) -> Path:
    out = write_study(tmp_path / "out")
    shutil.copy(empty_store, out / "mlflow.db")
    return out


def test_layout(study: Path) -> None:
    write_verdicts(study)
    stats = study / "runs" / "25m-s0-rowwise-n4-r0" / schema.TENSOR_STATS_DIR
    stats.mkdir()
    (stats / "part-0.parquet").write_bytes(b"parquet")
    mirror(study)
    runs = runs_of(study)
    assert set(runs) == {"25m/s0/bf16", "25m/s0/bf16_null-r1", "25m/s0/rowwise-n4", "study"}
    fp8 = runs["25m/s0/rowwise-n4"]
    assert fp8.info.status == "FINISHED"
    wanted = {"recipe": "rowwise-n4", "precision": "rowwise", "seed": "0", "keep_first": "4", "model": "25m"}
    assert wanted.items() <= fp8.data.params.items()
    tags = {"fp8.verdict": "WORSE", "fp8.gate": "fail", "fp8.pair": "25m/s0", "fp8.study": "s"}
    assert tags.items() <= fp8.data.tags.items()
    assert "mlflow.parentRunId" not in fp8.data.tags
    assert "fp8.verdict" not in runs["25m/s0/bf16"].data.tags
    assert fp8.inputs.dataset_inputs[0].dataset.digest == ("ab" * 32)[:36]
    assert [step for step, _ in history(study, fp8, "train/loss")] == list(range(1, STEPS + 1))
    gaps = history(study, fp8, "pair/gap_percent")
    assert gaps == [(step, pytest.approx(100 * math.log(4.04 / 4.0))) for step in (10, 20, 30)]
    assert "pair/gap_percent" not in runs["25m/s0/bf16"].data.metrics
    stored = {path.name for path in (study / "mlartifacts").rglob("*") if path.is_file()}
    assert stored == {"recipe.yaml", "verdicts.json", "study.json", "part-0.parquet"}


def test_names_that_mlflow_refuses_as_keys(study: Path) -> None:
    names = ["rowwise-weight_cast_source=master", "fp8(e4m3)+x", "fp8[e4m3]+x", "a/../b", "\u03b2" * 300]
    verdicts = [{"recipe": name, "outcome": name[:9], "gate": "fail"} for name in names]
    write_json(study / schema.VERDICTS_FILE, {"verdicts": verdicts})
    mirror(study)
    tags = runs_of(study)["study"].data.tags
    assert [tags[allowed_key(f"fp8.verdict.{name}")] for name in names] == [name[:9] for name in names]


@given(st.text(max_size=300))
@example("..")
@example("../x=1")
@example("/root")
@example("a//b/")
@example("line\n")
def test_any_name_becomes_a_key_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param, _validate_tag

    key = allowed_key(name)
    _validate_tag(key, "")
    _validate_tag(allowed_key(f"fp8.verdict.{name}"), "")
    _validate_param(key, "")
    _validate_metric_name(key)
    assert allowed_key(key) == key


def test_names_stay_apart_and_usual_ones_as_they_are() -> None:
    assert allowed_key("fp8.verdict.25m/rowwise-n4") == "fp8.verdict.25m/rowwise-n4"
    assert len({allowed_key(name) for name in ("a=b", "a+b", "a_b", "a" * 300, "a" * 301)}) == 5


def test_runs_are_copied_though_the_summary_fails(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise MirrorError("refused")

    monkeypatch.setattr("fp8parity_analysis.mlflow_mirror._mirror_summary", refused)
    with pytest.raises(MirrorError, match="refused"):
        mirror(study)
    assert set(runs_of(study)) >= {"25m/s0/bf16", "25m/s0/rowwise-n4"}


@pytest.mark.parametrize(
    ("criteria", "kept", "compared", "shift"),
    [
        ({}, ("bf16", "arm"), "held_out/bf16", 0.04),
        ({"eval_precision": "arm"}, ("bf16", "arm"), "held_out/arm", 0.08),
        ({}, ("arm",), "held_out/arm", 0.08),
        ({"eval_precision": "arm"}, ("bf16",), "held_out/bf16", 0.04),
        ({"endpoint": "train"}, ("bf16", "arm"), "train/loss", 0.02),
        ({}, (), "train/loss", 0.02),
    ],
)
def test_the_gap_is_that_of_the_endpoint(
    tmp_path: Path, criteria: dict[str, str], kept: tuple[str, ...], compared: str, shift: float
) -> None:
    for name, role in (("bf16", "control"), ("rowwise", "test")):
        writer = RunWriter(tmp_path / name)
        write_json(tmp_path / name / schema.SPEC_FILE, spec(name, name, role, 0, 0))
        by = {"bf16": 0.04, "arm": 0.08} if role == "test" else {}
        writer.append_curve({**row, "train_loss": 4.02 if by else 4.0} for row in rows(1, STEPS, 0.0))
        told = [row for row in evals(1, STEPS, 0.0) if row["eval_precision"] in kept]
        writer.append_evals(
            {**row, "loss": row["loss"] + by.get(row["eval_precision"], 0.0)}
            for row in told
            # a control need not be evaluated in its own forward: it is BF16 anyway
            if by or row["eval_precision"] == kept[0]
        )
        writer.finish(manifest(name))
    study = {"name": "s", "created_at": "2026-01-01T00:00:00+00:00", "criteria": criteria}
    bf16, rowwise = read_contents(tmp_path, study)
    points = rowwise.series["pair/gap_percent"]
    assert points.steps.tolist() == (list(range(1, STEPS + 1)) if compared == "train/loss" else [10, 20, 30])
    assert points.values == pytest.approx(100 * math.log((4.0 + shift) / 4.0))
    assert rowwise.tags["fp8.gap_of"] == compared
    assert "fp8.gap_of" not in bf16.tags


def test_twice_adds_nothing(study: Path) -> None:
    write_verdicts(study)
    first = mirror(study)
    before = census(study / "mlflow.db")
    again = mirror(study)
    assert (first.runs_made, first.points_written) == (4, 3 * (5 * STEPS + 6) + 6)
    assert (again.runs_made, again.points_written) == (0, 0)
    assert census(study / "mlflow.db") == before
    write_verdicts(study, "EQUIVALENT")
    assert mirror(study).points_written == 0
    assert runs_of(study)["25m/s0/rowwise-n4"].data.tags["fp8.verdict"] == "EQUIVALENT"


def test_unfinished_runs_are_continued(study: Path) -> None:
    write_study(study, until=12)
    mirror(study)
    assert {run.info.status for name, run in runs_of(study).items() if name != "study"} == {"RUNNING"}
    write_study(study)
    again = mirror(study)
    assert (again.runs_made, again.points_written) == (0, 3 * (5 * (STEPS - 12) + 4) + 4)
    run = runs_of(study)["25m/s0/rowwise-n4"]
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(study, run, "train/loss")] == list(range(1, STEPS + 1))


def test_a_run_trained_again_from_an_earlier_step_is_copied_afresh(study: Path) -> None:
    write_study(study, until=20)
    mirror(study)
    folder = study / "runs" / "25m-s0-rowwise-n4-r0"
    writer = RunWriter(folder, resume_step=10)
    writer.append_curve(rows(11, STEPS, 0.07))
    writer.append_evals(evals(11, STEPS, 0.07))
    writer.close()
    assert mirror(study).runs_made == 1
    run = runs_of(study)["25m/s0/rowwise-n4"]
    assert dict(history(study, run, "train/loss"))[15] == pytest.approx(5 / math.sqrt(15) + 0.07)
    assert len(history(study, run, "train/loss")) == STEPS


def test_a_mirror_cut_off_before_its_mark_adds_no_point_twice(study: Path) -> None:
    mirror(study)
    before = census(study / "mlflow.db")["metrics"]
    with sqlite3.connect(study / "mlflow.db") as connection:
        connection.execute("delete from tags where key = 'fp8.mirrored'")
    mirror(study)
    assert census(study / "mlflow.db")["metrics"] == before


def test_diverged_run_without_infinities(study: Path) -> None:
    folder = study / "runs" / "25m-s0-rowwise-n4-r0"
    shutil.rmtree(folder)
    writer = RunWriter(folder)
    write_json(folder / schema.SPEC_FILE, spec(folder.name, "rowwise-n4", "test", 0, 0))
    curve = rows(1, 20, 0.0)
    curve[18]["train_loss"], curve[19]["train_loss"] = math.inf, math.nan
    writer.append_curve(curve)
    writer.finish(manifest(folder.name, "diverged"))
    mirror(study)
    run = runs_of(study)["25m/s0/rowwise-n4"]
    assert run.info.status == "FAILED"
    assert run.data.tags["fp8.not_finite"].startswith("train/loss: 2 points, pair/gap_percent: ")
    assert len(history(study, run, "train/loss")) == 18
    assert mirror(study).points_written == 0


def test_another_study_of_that_name_gets_its_own_experiment(study: Path, tmp_path: Path) -> None:
    other = write_study(tmp_path / "other")
    told = read_json(other / schema.STUDY_FILE)
    write_json(other / schema.STUDY_FILE, {**told, "created_at": "2026-02-02T00:00:00+00:00"})
    assert mirror(study).experiment_id != mirror(other, default_uri(study)).experiment_id


@pytest.mark.parametrize("count", [1, 1999, 2000, 2001, 100_000])
def test_thinning_keeps_the_last_and_never_changes_its_mind(count: int) -> None:
    steps = np.arange(1, count + 1)
    clock = (steps.astype(np.int64), steps.astype(np.int64))
    whole = points_of(steps, steps * 1.0, clock=clock, planned=count, ended=True)
    assert len(whole.steps) <= MAX_POINTS
    assert whole.steps[-1] == count
    part = points_of(steps[: count // 2], steps[: count // 2], clock=clock, planned=count, ended=False)
    assert part.steps.tolist() == whole.steps[: len(part.steps)].tolist()


@pytest.mark.parametrize("count", [0, 1, 1999, 2000, 3998, 3999, 100_000])
def test_a_loop_that_states_no_steps_is_thinned_too(count: int) -> None:
    steps = np.arange(1, count + 1)
    clock = (np.arange(count + 1), np.arange(count + 1))
    planned = _doubled(count)
    kept = points_of(steps, steps * 1.0, clock=clock, planned=planned, ended=True).steps
    assert min(count, MAX_POINTS // 2) <= len(kept) <= MAX_POINTS
    assert _doubled(count - 1) in (planned, planned // 2)  # the distance between points only ever doubles


def test_clock_is_the_same_each_time() -> None:
    import pandas as pd

    steps, times = clock_of(pd.DataFrame(rows(1, 3, 0.0)), 1000)
    assert (steps.tolist(), times.tolist()) == ([1, 2, 3], [1010, 1020, 1030])


def test_the_newest_point_is_the_latest_of_mlflow() -> None:
    points = Points(np.array([1, 7, 7, 7]), np.array([9.0, 8.0, 3.0, 4.0]), np.array([50, 10, 20, 20]))
    newest = points.newest()
    assert [vars(newest)[name].tolist() for name in ("steps", "values", "times")] == [[7], [4.0], [20]]


def test_names() -> None:
    assert run_name(spec("x", "bf16_null", "null", 3, 2)) == "25m/s3/bf16_null-r2"


def test_view_fits_a_tag() -> None:
    assert len(view_state()) < 5000
    keys = json.loads(view_state())["groupBy"]["groupByKeys"]
    assert keys[0] == {"mode": "param", "groupByData": "recipe"}
    assert VIEW_TAG.startswith("mlflow.sharedViewState.")


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "ftp://host"])
def test_addresses_that_cannot_work(tmp_path: Path, uri: str) -> None:
    with pytest.raises(BadInputError, match="write http://HOST:PORT or sqlite:///PATH"):
        target_of(tmp_path, uri)


def test_missing_mlflow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match="install fp8parity with the extra mlflow"):
        mirror(tmp_path)


def test_no_study(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"study\.json: cannot be read"):
        mirror(tmp_path)


@pytest.fixture
def dead_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def hanging_server() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for one in held:
            one.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def test_dead_port_is_one_line(study: Path, dead_port: str, impatient: None) -> None:
    with pytest.raises(MirrorError, match=f"mlflow at {dead_port}: Connection refused"):
        mirror(study, dead_port)


def test_hanging_server_times_out(study: Path, hanging_server: str, impatient: None) -> None:
    with pytest.raises(MirrorError, match="timed out"):
        mirror(study, hanging_server)


def test_failure_and_recovery_are_said_once() -> None:
    said: list[str] = []
    outcomes = iter([MirrorError("down"), ValueError("odd"), "", "slow", "slow"])

    def copy() -> MirrorResult:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return MirrorResult("", "", 0, 0, 0, outcome)

    calls = iter([False, False, False, False, True])
    assert Follower(copy, said.append).follow(lambda seconds: next(calls))
    assert said == ["the mirror is behind: down", "the mirror has caught up", "slow"]


def test_read_only_store_fails_in_words_and_catches_up_later(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror(study)
    shutil.rmtree(study / "runs")
    write_study(study, seeds=2)
    # A root user writes to read-only files, so sqlite itself is told.
    monkeypatch.setattr(mlflow_sink, "check_uri", lambda uri: uri)
    store = study / "mlflow.db"
    monkeypatch.chdir(study.parent)  # MLflow makes folders named like such an address where it stands
    read_only = f"sqlite:///file:{store}?mode=ro&uri=true"
    said: list[str] = []
    follower = Follower(lambda: mirror(study, read_only), said.append)
    assert not follower.step()
    assert not follower.step()
    assert len(said) == 1
    assert "readonly database" in said[0]
    follower.copy = lambda: mirror(study)
    assert follower.step()
    assert said[1:] == ["the mirror has caught up"]
    assert len(runs_of(study)) == 7


@pytest.mark.parametrize("kind", ["dead_port", "hanging_server"])
def test_a_run_beside_a_broken_server_is_bit_identical_and_warned_once(
    study: Path, kind: str, impatient: None, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue(kind)
    before = {path: path.read_bytes() for path in (study / "runs").rglob("*") if path.is_file()}
    warnings: list[str] = []
    with followed(study, uri, warnings.append, grace=20):
        pass
    assert {path: path.read_bytes() for path in (study / "runs").rglob("*") if path.is_file()} == before
    assert len(warnings) == 1
    assert f"training was not affected. Catch up with: fp8parity mlflow {study} --uri {uri}" in warnings[0]
    assert mirror(study).points_written > 0


def test_a_body_that_fails_keeps_its_own_error(study: Path) -> None:
    with pytest.raises(KeyError, match="mine"), followed(study, "local", print, grace=60) as _:
        raise KeyError("mine")


def test_follower_ends_with_its_launcher(study: Path) -> None:
    code = "import sys; from fp8parity_analysis.mlflow_follow import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(study), default_uri(study)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert len(runs_of(study)) == 4
