"""Points written straight into MLflow's sqlite file: the rows of its API, all of a run or none, and when not to."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8parity import cli
from fp8parity_analysis import mlflow_sqlite
from fp8parity_analysis.mlflow_content import Points
from fp8parity_analysis.mlflow_mirror import default_uri, mirror
from fp8parity_analysis.mlflow_sink import MirrorError, Sink
from fp8parity_analysis.mlflow_sqlite import COLUMNS, connect, difference, is_sqlite

from .test_mlflow_mirror import census, write_study

ALL = np.finfo(np.float64)
ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, ALL.max, -ALL.max, ALL.tiny, 5e-324, 0.1, 3.0, -1e300]


@pytest.fixture
def study(tmp_path: Path, empty_store: Path) -> Path:
    return study_in(tmp_path / "out", empty_store)


def study_in(out: Path, empty_store: Path) -> Path:
    write_study(out)
    shutil.copy(empty_store, out / "mlflow.db")
    return out


def sink_in(folder: Path, empty_store: Path) -> Sink:
    """Return an open store with one run `r`."""
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    sink = Sink.open(f"sqlite:///{folder}/mlflow.db", "s", "one")
    sink.make_run("r", "name", 0, {})
    return sink


def stored(database: Path) -> dict[str, list[str]]:
    """Return all points and latest values with their storage classes; runs by name, as their ids are random."""
    names = [name for name in COLUMNS if name != "run_uuid"]
    columns = ", ".join(f"m.{name}, typeof(m.{name})" for name in names)
    with sqlite3.connect(database) as connection:
        return {
            table: sorted(
                map(
                    repr,
                    connection.execute(
                        f"select r.name, {columns} from {table} m join runs r using (run_uuid)"
                    ),
                )
            )
            for table in ("metrics", "latest_metrics")
        }


def some(values: list[float], first: int) -> Points:
    steps = np.arange(first, first + len(values), dtype=np.int64)
    return Points(steps, np.array(values, dtype=np.float64), steps * 10)


def test_rows_are_those_of_the_api(tmp_path: Path, empty_store: Path) -> None:
    """Every odd value in the middle and at the end, several batches, then a part again with more behind it."""
    straight, api = sink_in(tmp_path / "a", empty_store), sink_in(tmp_path / "b", empty_store)
    api.engine = None
    rng = np.random.default_rng(0)
    first = {f"held_out/{i}": some([*ODD, value], 0) for i, value in enumerate(ODD)}
    first["train/loss"] = some(rng.normal(size=1100).tolist(), 1)
    more = {"train/loss": some([*first["train/loss"].values[-20:].tolist(), 1.5, 0.5], 1081)}
    for sink, database in ((straight, tmp_path / "a/mlflow.db"), (api, tmp_path / "b/mlflow.db")):
        for series in (first, more, more):
            sink.write_points("r", series)
        assert len(stored(database)["metrics"]) == len(ODD) * (len(ODD) + 1) + 1102
    assert straight.engine is not None
    assert straight.points_written == api.points_written
    assert stored(tmp_path / "a/mlflow.db") == stored(tmp_path / "b/mlflow.db")


def test_a_table_that_is_not_as_tested_takes_the_api_and_says_so(
    study: Path, tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = study_in(tmp_path / "other", empty_store)
    with sqlite3.connect(other / "mlflow.db") as connection:
        connection.execute("alter table metrics add column unit VARCHAR(9)")
    assert mirror(study).slow_because == ""
    with pytest.raises(SystemExit) as ended:
        cli.main(["mlflow", str(other)])
    assert ended.value.code in (0, None)
    told = f"fp8parity: warning: mlflow at {default_uri(other)}: its table metrics has other columns: unit; its API"
    assert capsys.readouterr().err.startswith(told)
    assert stored(study / "mlflow.db") == stored(other / "mlflow.db")


@pytest.mark.parametrize(
    ("change", "version", "words"),
    [
        ("select 1", "3.14.0", ""),
        ("select 1", "4.0.0", "MLflow 4.0.0 is not 3.x"),
        ("drop table metrics", "3.14.0", "other columns: is_nan, key, run_uuid, step, timestamp, value"),
        ("alter table metrics rename column step to at", "3.14.0", "other columns: at, step"),
        (
            "create trigger guard after insert on metrics begin delete from tags; end",
            "3.14.0",
            "its table metrics has the trigger guard",
        ),
    ],
)
def test_difference(tmp_path: Path, empty_store: Path, change: str, version: str, words: str) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute(change)
    found = difference(connect(f"sqlite:///{tmp_path}/mlflow.db"), version)
    assert found.endswith(words)
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("uri", "answer"),
    [
        ("sqlite:///x.db", True),
        ("sqlite+pysqlite:///x.db", True),
        ("http://sqlite:5000", False),
        ("postgresql://host/sqlite", False),
    ],
)
def test_only_sqlite_files_are_written_straight(uri: str, answer: bool) -> None:
    assert is_sqlite(uri) is answer


def test_names_and_runs_that_mlflow_refuses_are_refused_before_a_row(
    tmp_path: Path, empty_store: Path
) -> None:
    sink = sink_in(tmp_path / "a", empty_store)
    with pytest.raises(MirrorError, match="Invalid value"):
        sink.write_points("r", {"loss?": some([1.0, 2.0], 1)})
    sink.client.delete_run(sink.runs["r"].info.run_id)
    with pytest.raises(MirrorError, match="active"):
        sink.write_points("r", {"loss": some([1.0, 2.0], 1)})
    assert stored(tmp_path / "a/mlflow.db")["metrics"] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from fp8parity_analysis.mlflow_mirror import mirror

inserts = []

@event.listens_for(Engine, "after_cursor_execute")
def note(connection, cursor, statement, *rest):
    if "ON CONFLICT" in statement:
        inserts.append(statement)
        if len(inserts) == 10:  # the control has seven metrics
            os.kill(os.getpid(), signal.SIGKILL)

mirror(Path(sys.argv[1]))
"""


def test_killed_in_the_middle_of_a_run_the_next_copy_completes_it(
    study: Path, tmp_path: Path, empty_store: Path
) -> None:
    """SIGKILL within the second run's transaction, at the third of its metrics."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(study)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    whole = study_in(tmp_path / "whole", empty_store)
    mirror(whole)
    wanted = stored(whole / "mlflow.db")["metrics"]
    left = stored(study / "mlflow.db")["metrics"]
    assert 0 < len(left) < len(wanted)
    assert set(left) < set(wanted)
    again = mirror(study)
    assert again.runs_made == 2  # the third, and the study's summary, which comes last
    assert stored(study / "mlflow.db") == stored(whole / "mlflow.db")
    before = census(study / "mlflow.db")
    assert mirror(study).points_written == 0
    assert census(study / "mlflow.db") == before


def test_a_reader_sees_all_points_of_a_run_or_only_the_newest(study: Path) -> None:
    """A server reads the file all the while; neither of the two fails for the other's lock."""
    seen: set[tuple[str, int]] = set()
    failed: list[Exception] = []
    copied = threading.Event()

    def read() -> None:
        query = "select r.name, count(*) from metrics m join runs r using (run_uuid) group by 1"
        try:
            last = False
            while not last:
                last = copied.is_set()
                with sqlite3.connect(study / "mlflow.db", timeout=20) as connection:
                    seen.update(connection.execute(query))
        except Exception as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        written = mirror(study).points_written
    finally:
        copied.set()
        reader.join()
    assert not failed
    ends: dict[str, int] = {}
    for name, count in seen:
        ends[name] = max(count, ends.get(name, 0))
    assert sum(ends.values()) == written
    newest = {name: 7 if name.endswith("/bf16") else 8 for name in ends}  # metrics: a control has no gap
    assert {(name, count) for name, count in seen if count != ends[name]} <= newest.items()


def test_a_locked_file_is_one_error_and_nothing_half_written(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_sqlite, "LOCK_SECONDS", 0)
    sink = sink_in(tmp_path / "a", empty_store)
    database, run_id = tmp_path / "a/mlflow.db", sink.runs["r"].info.run_id
    series: dict[str, Any] = {"loss": some([1.0, 2.0], 1), "lr": some([1.0], 1)}
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(Exception, match="database is locked"):
        mlflow_sqlite.insert(sink.engine, run_id, series)
    other.execute("rollback")
    assert stored(database)["metrics"] == []
    sink.write_points("r", series)
    assert len(stored(database)["metrics"]) == 3
