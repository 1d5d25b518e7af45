from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.store import RunWriter, find_run_dirs, read_run, read_runs, read_stream


def curve_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {
        "step": step, "tokens": step * 8, "train_loss": loss, "grad_norm": 0.5, "lr": 1e-3, "step_time": 0.1,
        "batch_digest": f"{step:016x}",
    }  # fmt: skip


def eval_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "split": "held_out", "eval_precision": "bf16", "loss": loss}


def spec(run_id: str = "r") -> dict[str, Any]:
    values: dict[str, Any] = {"schema_version": schema.SCHEMA_VERSION, "run_id": run_id}
    values |= {"group": "g", "arm": "bf16", "role": "control", "spec": {}}
    return {**dict.fromkeys(schema.SPEC_KEYS, 0), **values}


def manifest() -> dict[str, Any]:
    return {**dict.fromkeys(schema.MANIFEST_KEYS), "status": "finished"}


def begin(run_dir: Path) -> RunWriter:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / schema.SPEC_FILE).write_text(json.dumps(spec(run_dir.name)))
    return RunWriter(run_dir)


def test_finished_and_unfinished_runs_read_alike(tmp_path: Path) -> None:
    writer = begin(tmp_path / "r")
    writer.append_curve([curve_row(1), curve_row(2, math.nan), curve_row(3, math.inf)])
    writer.append_evals([eval_row(3, 2.5)])
    unfinished = read_run(tmp_path / "r")
    assert unfinished.manifest is None
    writer.finish(manifest())
    finished = read_run(tmp_path / "r")
    assert finished.manifest is not None
    assert finished.curve.equals(unfinished.curve)
    assert finished.evals.equals(unfinished.evals)
    assert math.isnan(finished.curve["train_loss"][1])
    assert math.isinf(finished.curve["train_loss"][2])


def test_resuming_cuts_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    writer = begin(tmp_path / "r")
    writer.append_curve([curve_row(step) for step in range(1, 8)])
    writer.append_evals([eval_row(4), eval_row(6)])
    writer.close()
    with (tmp_path / "r" / schema.CURVE_STREAM).open("a") as handle:
        handle.write('{"step": 8, "tok')  # killed in mid-line
    again = RunWriter(tmp_path / "r", resume_step=5)
    again.append_curve([curve_row(6)])
    run = read_run(tmp_path / "r")
    assert list(run.curve["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(run.evals["step"]) == [4]


def test_a_half_written_last_line_is_no_error_and_a_broken_one_is(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert list(read_stream(path, ["step"])["step"]) == [1]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(BadInputError, match=r"s\.jsonl:2: is not JSON"):
        read_stream(path, ["step"])


def test_resuming_keeps_the_rows_before_a_damaged_line(tmp_path: Path) -> None:
    writer = begin(tmp_path / "r")
    writer.append_curve([curve_row(step) for step in range(1, 5)])
    writer.close()
    stream = tmp_path / "r" / schema.CURVE_STREAM
    lines = stream.read_bytes().split(b"\n")
    stream.write_bytes(b"\n".join([lines[0], bytes(20), *lines[2:]]))
    RunWriter(tmp_path / "r", resume_step=1).close()
    assert list(read_run(tmp_path / "r").curve["step"]) == [1]


@pytest.mark.parametrize(
    ("steps", "done", "fault"),
    [
        ([1, 2, 3], 3, None),
        ([1, 2], 3, "2 rows for 3 steps (step 3 is not where"),
        ([1, 3], 3, "2 rows for 3 steps (step 2 is not where"),
        ([1, 3, 2], 3, "3 rows for 3 steps (step 2 is not where"),
        ([1, 2, 3, 3], 3, "4 rows for 3 steps (a step stands twice"),
    ],
)
def test_a_curve_with_gaps_is_a_result_only_where_gaps_are_meant(
    tmp_path: Path, steps: list[int], done: int, fault: str | None
) -> None:
    def finish(name: str, **options: bool) -> Path:
        writer = begin(tmp_path / name)
        writer.append_curve([curve_row(step) for step in steps])
        writer.finish({**manifest(), "steps_done": done}, **options)
        return tmp_path / name / schema.MANIFEST_FILE

    assert finish("loop").exists()  # a loop of somebody's may log every tenth step
    if fault is None:
        assert finish("ours", every_step=True).exists()
        return
    with pytest.raises(BadInputError, match=re.escape(fault)):
        finish("ours", every_step=True)
    assert not (tmp_path / "ours" / schema.MANIFEST_FILE).exists()
    assert not (tmp_path / "ours" / schema.CURVE_FILE).exists()


def test_wrong_columns_and_keys_are_refused(tmp_path: Path) -> None:
    writer = begin(tmp_path / "r")
    row = curve_row(1)
    row["los"] = row.pop("train_loss")
    with pytest.raises(ValueError, match=r"curve.jsonl: a row has keys .*'los'"):
        writer.append_curve([row])
    with pytest.raises(ValueError, match=r"manifest keys differ from the schema in \['status'\]"):
        writer.finish({key: value for key, value in manifest().items() if key != "status"})
    assert not (tmp_path / "r" / schema.MANIFEST_FILE).exists()


def test_runs_are_found_below_a_study_and_in_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        begin(tmp_path / "study" / schema.RUNS_DIR / name).close()
        begin(tmp_path / "plain" / name).close()
    assert [r.run_id for r in read_runs(tmp_path / "study")] == ["a", "b"]
    assert [r.run_id for r in read_runs(tmp_path / "plain")] == ["a", "b"]
    assert find_run_dirs(tmp_path / "plain" / "a") == [tmp_path / "plain" / "a"]


@pytest.mark.parametrize("where", ["", "runs"])
def test_a_run_in_a_folder_of_its_own_is_not_left_out(tmp_path: Path, where: str) -> None:
    for name in ("loop-s0-bf16", "loop-s0-fp8/rowwise"):
        begin(tmp_path / schema.RUNS_DIR / name).close()
    with pytest.raises(BadInputError, match="loop-s0-fp8/rowwise: a run .* move it to .*loop-s0-fp8_rowwise"):
        read_runs(tmp_path / where)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version 99, this program reads 1"),
        ({"run_id": None}, "lacks the keys"),
    ],
)
def test_foreign_specs_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    document = {key: value for key, value in {**spec(), **change}.items() if value is not None}
    (tmp_path / schema.SPEC_FILE).write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=message):
        read_run(tmp_path)


def test_unreadable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a directory"):
        read_runs(tmp_path / "absent")
    with pytest.raises(BadInputError, match=r"holds no run \(no spec.json in it"):
        read_runs(tmp_path)
    writer = begin(tmp_path / "r")
    writer.append_curve([curve_row(1)])
    writer.append_evals([eval_row(1)])
    writer.finish(manifest())
    (tmp_path / "r" / schema.CURVE_FILE).write_bytes(b"PAR1 not really")
    with pytest.raises(BadInputError, match=r"curve.parquet: cannot be read .*; delete .* and run again"):
        read_run(tmp_path / "r")


@given(st.lists(st.floats(), min_size=1, max_size=20), st.integers(0, 25))
def test_any_losses_survive_storage_and_any_cut(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float], cut: int
) -> None:
    run_dir = tmp_path_factory.mktemp("runs") / "r"
    writer = begin(run_dir)
    writer.append_curve([curve_row(i + 1, loss) for i, loss in enumerate(losses)])
    writer.close()
    RunWriter(run_dir, resume_step=cut).close()
    kept = [float(x) for x in read_run(run_dir).curve["train_loss"]]
    assert len(kept) == min(cut, len(losses))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(kept, losses, strict=False))
