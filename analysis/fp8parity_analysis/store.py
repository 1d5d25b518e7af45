"""One directory per run: append while running, Parquet and a manifest at the end. The disk is the truth.

`RunWriter` needs no torch and no Lightning, so any training loop can write a run that `judge` and `report` read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd

from fp8parity_analysis import schema, tensor_schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.stored_checks import check_manifest, check_spec, check_study, check_table


def read_stream(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """Read a JSON-lines stream into a table; a last line cut off by a kill is dropped, any other is an error."""
    names = list(columns)
    if not path.exists():
        return pd.DataFrame(columns=names)
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):  # no newline followed: the writer was killed in mid-line
                break
            raise BadInputError(f"{path}:{number}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadInputError(f"{path}:{number}: holds a {type(row).__name__}, expected an object")
        rows.append({name: row.get(name) for name in names})
    return check_table(path, pd.DataFrame(rows, columns=names), names)


class _Stream:
    """An append-only JSON-lines file that can be cut back to a step."""

    def __init__(self, path: Path, columns: tuple[str, ...], resume_step: int) -> None:
        self.path = path
        self._columns = columns
        self._cut(resume_step)
        self._handle: IO[str] = path.open("a", encoding="utf-8")

    def _cut(self, resume_step: int) -> None:
        if not self.path.exists():
            return
        kept = [row for row in whole_rows(self.path) if row["step"] <= resume_step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in kept)
            handle.flush()
            os.fsync(handle.fileno())  # these rows were safe: a power cut now must not lose them
        os.replace(temporary, self.path)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if set(row) != set(self._columns):
                raise ValueError(
                    f"{self.path.name}: a row has keys {sorted(row)}, expected {sorted(self._columns)}"
                )
            self._handle.write(json.dumps({name: row[name] for name in self._columns}) + "\n")
        self._handle.flush()

    def sync(self) -> None:
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        self._handle.close()


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a stream up to its first damaged line: what a kill or a power cut has left whole.

    A row has a whole number as its `step`. A stream that is not there has none.
    """
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def first_missing_step(steps: Iterable[int], last: int) -> int | None:
    """Return the first of the steps 1 to `last` that does not stand at its place in `steps`; None if all do."""
    found = iter(steps)
    return next((step for step in range(1, last + 1) if next(found, None) != step), None)


def _write_part(path: Path, rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> None:
    import pyarrow as pa  # takes a moment, and most that import this module read no Parquet
    import pyarrow.parquet as pq

    version = str(tensor_schema.TENSOR_SCHEMA_VERSION).encode()
    stated = tensor_schema.arrow_schema(columns).with_metadata({tensor_schema.METADATA_KEY: version})
    table = pa.Table.from_pylist([dict(row) for row in rows], stated)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary)
    os.replace(temporary, path)


def _cut_parts(folder: Path, resume_step: int) -> None:
    """Delete the parts of steps beyond the one training continues from: it takes them again."""
    for pattern in (tensor_schema.CAST_PARTS, tensor_schema.SIGNAL_PARTS):
        for path in folder.glob(pattern):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) > resume_step:
                path.unlink()


class RunWriter:
    """Writes the curves and tensor statistics of one run: `append_*` while it trains, `finish` once at its end.

    `resume_step` is the optimizer step training continues from: later rows, left by a killed process, are cut
    off first, so no step stands twice; so is what follows a damaged line (`whole_rows` says what is left). Rows must
    carry exactly the columns of `schema.CURVE_COLUMNS` (and `extra_columns`, of `schema.CURVE_OPTIONAL_COLUMNS`) or
    `schema.EVAL_COLUMNS`. Losses may be NaN or infinite.
    Errors: `OSError` when the disk is full or read-only.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0, extra_columns: tuple[str, ...] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._curve_columns = (*schema.CURVE_COLUMNS, *extra_columns)
        self._curve = _Stream(run_dir / schema.CURVE_STREAM, self._curve_columns, resume_step)
        self._evals = _Stream(run_dir / schema.EVAL_STREAM, schema.EVAL_COLUMNS, resume_step)
        _cut_parts(run_dir / schema.TENSOR_STATS_DIR, resume_step)

    def append_curve(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append and flush rows of `schema.CURVE_COLUMNS`, one per optimizer step."""
        self._curve.append(rows)

    def append_evals(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append and flush rows of `schema.EVAL_COLUMNS`."""
        self._evals.append(rows)

    def append_tensor_stats(
        self, step: int, casts: Iterable[Mapping[str, Any]], signals: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Write the tensor statistics of one step: rows of `tensor_schema.CAST_COLUMNS` and `SIGNAL_COLUMNS`.

        Each table is one file, written whole and renamed, which replaces what an earlier training of the step left.
        """
        folder = self.run_dir / schema.TENSOR_STATS_DIR
        folder.mkdir(exist_ok=True)
        # signals first: where a part of casts is, nothing of its step is missing
        _write_part(folder / f"signals-{step:05d}.parquet", signals, tensor_schema.SIGNAL_COLUMNS)
        _write_part(folder / f"part-{step:05d}.parquet", casts, tensor_schema.CAST_COLUMNS)

    def sync(self) -> None:
        """Have the rows on the disk, not in the kernel's memory only: before a checkpoint that continues them."""
        self._curve.sync()
        self._evals.sync()

    def finish(self, manifest: Mapping[str, Any], *, every_step: bool = False) -> None:
        """Write the Parquet files, then the manifest by rename: after it the run counts as ended.

        With `every_step` the curve must hold each step from 1 to the manifest's `steps_done` once, in order;
        `BadInputError` otherwise, before anything is written.
        """
        missing = sorted(set(schema.MANIFEST_KEYS) ^ (set(manifest) - set(schema.MANIFEST_OPTIONAL_KEYS)))
        if missing:
            raise ValueError(f"manifest keys differ from the schema in {missing}")
        self.close()
        curve = read_stream(self.run_dir / schema.CURVE_STREAM, self._curve_columns)
        evals = read_stream(self.run_dir / schema.EVAL_STREAM, schema.EVAL_COLUMNS)
        if every_step:
            _require_every_step(self.run_dir / schema.CURVE_STREAM, curve, int(manifest["steps_done"]))
        for table, target in ((curve, schema.CURVE_FILE), (evals, schema.EVAL_FILE)):
            temporary = self.run_dir / (target + ".tmp")
            table.to_parquet(temporary, index=False)
            os.replace(temporary, self.run_dir / target)
        write_json(self.run_dir / schema.MANIFEST_FILE, manifest)

    def close(self) -> None:
        """Close the streams; the run stays resumable."""
        self._curve.close()
        self._evals.close()


def _require_every_step(path: Path, curve: pd.DataFrame, last: int) -> None:
    missing = first_missing_step(curve["step"], last)
    if missing is not None or len(curve) != last:
        where = "a step stands twice" if missing is None else f"step {missing} is not where it should be"
        raise BadInputError(
            f"{path}: holds {len(curve)} rows for {last} steps ({where}), so this is no result; run again: it begins "
            "before the gap"
        )


@dataclass(frozen=True)
class RunRecord:
    """One stored run. `spec` is `spec.json`; `manifest` is None while the run is unfinished.

    `curve` has `schema.CURVE_COLUMNS`, `evals` has `schema.EVAL_COLUMNS`.
    """

    path: Path
    spec: dict[str, Any]
    manifest: dict[str, Any] | None
    curve: pd.DataFrame
    evals: pd.DataFrame

    @property
    def run_id(self) -> str:
        """The run's content-addressed name."""
        return str(self.spec["run_id"])


def _table(
    run_dir: Path, parquet: str, stream: str, columns: tuple[str, ...], *, finished: bool
) -> pd.DataFrame:
    if not finished:
        return read_stream(run_dir / stream, columns)
    path = run_dir / parquet
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); delete {run_dir} and run again") from error
    return check_table(path, table, columns)


def read_run(run_dir: Path) -> RunRecord:
    """Read one run directory, finished or not; `BadInputError` names the file that is missing or broken."""
    spec = read_json(run_dir / schema.SPEC_FILE)
    check_spec(run_dir / schema.SPEC_FILE, spec)
    finished = (run_dir / schema.MANIFEST_FILE).exists()
    manifest = read_json(run_dir / schema.MANIFEST_FILE) if finished else None
    if manifest is not None:
        check_manifest(run_dir / schema.MANIFEST_FILE, manifest)
    return RunRecord(
        path=run_dir,
        spec=spec,
        manifest=manifest,
        curve=_table(
            run_dir, schema.CURVE_FILE, schema.CURVE_STREAM, schema.CURVE_COLUMNS, finished=finished
        ),
        evals=_table(run_dir, schema.EVAL_FILE, schema.EVAL_STREAM, schema.EVAL_COLUMNS, finished=finished),
    )


def _refuse_deeper(folder: Path) -> None:
    """Refuse runs below a folder of `runs` that is none itself, as a recipe name with a slash leaves them."""
    if folder.name != schema.RUNS_DIR:
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not (child / schema.SPEC_FILE).exists():
            deeper = next(child.rglob(schema.SPEC_FILE), None)
            if deeper is not None:
                flat = "_".join(deeper.parent.relative_to(folder).parts)
                raise BadInputError(
                    f"{deeper.parent}: a run in a folder of its own would not be judged; move it to {folder / flat}"
                )


def find_run_dirs(directory: Path) -> list[Path]:
    """Return the run directories at or below `directory` (itself, its `runs/*`, or its children), sorted.

    `BadInputError` when there is none, and when a study has a run deeper than that, which would go unjudged.
    """
    if not directory.is_dir():
        raise BadInputError(f"{directory}: is not a directory")
    if (directory / schema.SPEC_FILE).exists():
        return [directory]
    for pattern in (f"{schema.RUNS_DIR}/*/{schema.SPEC_FILE}", f"*/{schema.SPEC_FILE}"):
        found = sorted(path.parent for path in directory.glob(pattern))
        if found:
            _refuse_deeper(found[0].parent)
            return found
    raise BadInputError(
        f"{directory}: holds no run (no {schema.SPEC_FILE} in it, in {schema.RUNS_DIR}/* or in its folders)"
    )


def read_study(directory: Path) -> dict[str, Any]:
    """Read `study.json`; `BadInputError` names the key that is missing or no object."""
    path = directory / schema.STUDY_FILE
    document = read_json(path)
    check_study(path, document)
    return document


def read_runs(directory: Path) -> list[RunRecord]:
    """Read every run at or below `directory`, in order of path."""
    return [read_run(path) for path in find_run_dirs(directory)]
