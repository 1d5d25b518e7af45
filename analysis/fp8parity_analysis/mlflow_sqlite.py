"""Write points straight into the table `metrics` of MLflow's sqlite file, at a sixth of its API's processor time.

MLflow makes dozens of Python objects a point. The table takes the same rows without them, as long as it looks as it
did when this was written and tested: `difference` says what is otherwise, and then the API is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8parity_analysis.mlflow_content import FloatArray, IntArray, Points

TESTED_MAJOR = 3
"""Major version of MLflow whose meaning of the columns is tested: values, NaN and infinity."""
LOCK_SECONDS = 20
"""How long a locked file is waited for, as MLflow itself does: a server may read it meanwhile."""
COLUMNS = {
    "key": ("VARCHAR(250)", True),
    "value": ("FLOAT", True),
    "timestamp": ("BIGINT", True),
    "run_uuid": ("VARCHAR(32)", True),
    "step": ("BIGINT", True),
    "is_nan": ("BOOLEAN", True),
}
"""Columns of `metrics`: type, and whether part of the primary key."""

_INSERT = (
    "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (key, timestamp, step, run_uuid, value, is_nan) DO NOTHING"
)


def is_sqlite(uri: str) -> bool:
    """Tell whether `uri` names a sqlite file, whatever its driver."""
    return uri.partition(":")[0].partition("+")[0] == "sqlite"


def connect(uri: str) -> Any:
    """Return an engine of our own for a sqlite file; it holds no connection between two uses."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    return create_engine(uri, poolclass=NullPool, connect_args={"timeout": LOCK_SECONDS})


def difference(engine: Any, version: str) -> str:
    """Return what about the table, or about MLflow's `version`, is not as tested; empty when all is."""
    if version.partition(".")[0] != str(TESTED_MAJOR):
        return f"MLflow {version} is not {TESTED_MAJOR}.x"
    with engine.connect() as connection:
        told = connection.exec_driver_sql("SELECT name, type, pk FROM pragma_table_info('metrics')").all()
        triggers = connection.exec_driver_sql(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'metrics'"
        ).all()
    found = {name: (kind, pk > 0) for name, kind, pk in told}
    odd = sorted(name for name in found.keys() | COLUMNS if found.get(name) != COLUMNS.get(name))
    if odd:
        return f"its table metrics has other columns: {', '.join(odd)}"
    return f"its table metrics has the trigger {triggers[0][0]}" if triggers else ""


def as_stored(values: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return values and NaN flags as MLflow stores them: NaN as flagged 0, infinity as the largest float64."""
    is_nan = np.isnan(values)
    largest = np.finfo(np.float64).max
    return np.where(is_nan, 0.0, np.clip(values, -largest, largest)), is_nan.astype(np.int64)


def insert(engine: Any, run_id: str, series: Mapping[str, Points]) -> None:
    """Write the points of one run in one transaction, all or none; those that are there already stay as they are.

    MLflow's own part is the caller's: that the run is active, the names valid, and the latest values kept.
    """
    with engine.begin() as connection:
        # The first statement is a write, so the lock is waited for; one that began by reading could not wait.
        for name, points in series.items():
            values, flags = as_stored(points.values)
            columns = (values.tolist(), points.times.tolist(), points.steps.tolist(), flags.tolist())
            rows = [
                (name, value, time, run_id, step, flag)
                for value, time, step, flag in zip(*columns, strict=True)
            ]
            connection.exec_driver_sql(_INSERT, rows)
