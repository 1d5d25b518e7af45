"""Curves from run directories, CSV, Parquet, TensorBoard folders, MLflow experiments and W&B exports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fp8parity_analysis import empty_cells, event_files, schema, store, table_files
from fp8parity_analysis.curves import CurveSet, RunCurve, run_of_record, runs_of_table
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings
from fp8parity_analysis.mlflow_curves import read_mlflow
from fp8parity_analysis.run_logs import Read, RunLog, read_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MLFLOW_PREFIX = "mlflow:"


def read_curves(sources: Sequence[str | Path], settings: ImportSettings | None = None) -> CurveSet:
    """Read curves of any kind into one set.

    A source is a run or study directory, a CSV or Parquet file, a folder with TensorBoard event files, or
    `mlflow:EXPERIMENT`. `BadInputError` names the source that cannot be read and why.
    """
    chosen = settings or ImportSettings()
    if not sources:
        raise BadInputError(
            "no source given; name a run directory, a CSV or Parquet file, or mlflow:EXPERIMENT"
        )
    runs: list[RunCurve] = []
    external: list[Read] = []
    for source in sources:
        found = _read(source, chosen)
        if isinstance(found, Read):
            external.append(found)
        else:
            runs += found
    notes = tuple(note for found in external for note in found.notes)
    if external:
        tables = [found.table for found in external]
        others, remarks = runs_of_table(
            pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
        )
        runs += empty_cells.told(others)
        notes += remarks
    return CurveSet(tuple(runs), notes)


def _read(source: str | Path, settings: ImportSettings) -> Read | list[RunCurve]:
    if str(source).startswith(MLFLOW_PREFIX):
        return read_mlflow(str(source)[len(MLFLOW_PREFIX) :], settings)
    path = Path(source)
    if path.is_dir():
        if event_files.folders(path) and not _holds_runs(path):
            return read_tensorboard(path, settings)
        return [run_of_record(record) for record in store.read_runs(path)]
    if not path.exists():
        raise BadInputError(f"{path}: does not exist")
    return table_files.read_file(path, settings)


def _holds_runs(path: Path) -> bool:
    patterns = (schema.SPEC_FILE, f"{schema.RUNS_DIR}/*/{schema.SPEC_FILE}", f"*/{schema.SPEC_FILE}")
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def read_tensorboard(directory: Path, settings: ImportSettings) -> Read:
    """Read event files below `directory`, one folder a run; without tags the loss-like ones are taken."""
    return read_of(list(_tensorboard_logs(directory, settings)), settings, str(directory))


def _tensorboard_logs(directory: Path, settings: ImportSettings) -> Iterator[RunLog]:
    for folder in event_files.folders(directory):
        scalars = event_files.read_scalars(folder)
        name = folder.relative_to(directory).as_posix() if folder != directory else folder.name
        yield RunLog(
            label=str(folder),
            named=settings.run_named(name) or settings.run_named(folder.name),
            names=list(scalars),
            metrics={tag: points for tag, points in scalars.items() if settings.is_candidate(tag)},
        )
