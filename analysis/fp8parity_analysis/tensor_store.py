"""Reading the tensor statistics of a run directory: whole, cut off by a kill, or partly damaged.

`tensor_schema` names the columns. What cannot be read is said in `problems`, never guessed and never raised: statistics
that explain a verdict must not be what keeps it from being shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CAST_KEY = ["step", "fqn", "gemm", "operand", "recipe", "kind"]
_SIGNAL_KEY = ["step", "signal", "fqn"]
_MAX_PROBLEMS = 5
"""How many damaged files are named before the rest is counted."""


@dataclass(frozen=True)
class TensorTables:
    """`casts` has one row per (step, linear, GEMM, operand, cast), `signals` one per (step, signal, module).

    Both are sorted by step and hold each key once. `problems` say which files could not be used, and why.
    """

    casts: pd.DataFrame
    signals: pd.DataFrame
    problems: tuple[str, ...] = ()

    @property
    def recorded(self) -> bool:
        """Whether any cast was recorded."""
        return len(self.casts) > 0


def read_tensor_stats(
    run_dir: Path,
    *,
    kind: str | None = None,
    recipe: str | None = None,
    columns: Sequence[str] | None = None,
    signals: bool = True,
) -> TensorTables:
    """Read the tensor statistics below `run_dir`; both tables are empty where none were recorded.

    `kind` and `recipe` keep only rows of that kind of cast and that cast's recipe; `columns` names the statistics
    wanted beside the keys (default: all of `tensor_schema`); without `signals` their table stays empty. A row that
    stands twice, as after a resume, counts once: the one in the later part.
    """
    folder = run_dir / schema.TENSOR_STATS_DIR
    problems: list[str] = []
    wanted = (*ts.KEY_COLUMNS, *(columns if columns is not None else (*ts.COUNT_COLUMNS, *ts.VALUE_COLUMNS)))
    casts = _read(folder, ts.CAST_PARTS, wanted, _CAST_KEY, problems, {"kind": kind, "recipe": recipe})
    pattern = ts.SIGNAL_PARTS if signals else "(none)"
    measured = _read(folder, pattern, ts.SIGNAL_COLUMNS, _SIGNAL_KEY, problems, {})
    if len(problems) > _MAX_PROBLEMS:
        more = len(problems) - _MAX_PROBLEMS
        problems = [*problems[:_MAX_PROBLEMS], f"{folder}: {more} more parts cannot be used"]
    return TensorTables(casts, measured, tuple(problems))


def has_tensor_stats(run_dir: Path) -> bool:
    """Return whether the run directory holds any part of tensor statistics, readable or not."""
    return any((run_dir / schema.TENSOR_STATS_DIR).glob(ts.CAST_PARTS))


def _read(
    folder: Path,
    pattern: str,
    columns: Sequence[str],
    key: list[str],
    problems: list[str],
    wanted: dict[str, str | None],
) -> pd.DataFrame:
    parts = []
    for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
        try:
            parts.append(_part(path, columns))
        except (OSError, ValueError, pa.ArrowException) as error:
            problems.append(f"{path}: {_first_line(error)}; this part is left out")
    whole = pa.concat_tables(parts) if parts else _target(tuple(columns)).empty_table()
    for name, value in wanted.items():
        if value is not None:
            chosen = pc.equal(whole[name], value)
            # most runs hold one kind and one recipe, and copying a run's casts takes longer than comparing them
            whole = whole if pc.all(chosen, skip_nulls=False).as_py() else whole.filter(chosen)
    if not whole.num_rows:
        return pd.DataFrame({name: pd.Series(dtype=_dtype(name)) for name in columns})
    table: pd.DataFrame = whole.to_pandas()
    if not _keys_repeat_once_a_step(parts, table, key):
        table = table.drop_duplicates(subset=key, keep="last")
    return table.sort_values("step", kind="stable", ignore_index=True)


def _keys_repeat_once_a_step(parts: Sequence[pa.Table], table: pd.DataFrame, key: list[str]) -> bool:
    """Return whether every part is one step of its own with the same rows, none twice: what a probe writes.

    It takes a tenth of the time of looking for rows that stand twice.
    """
    size, names = parts[0].num_rows, [name for name in key if name != "step"]
    if len(table) != size * len(parts) or not size:
        return False  # a filter left some out, or the parts differ
    steps = table["step"].to_numpy().reshape(len(parts), size)
    if (steps != steps[:, :1]).any() or len(np.unique(steps[:, 0])) < len(parts):
        return False
    same = all(part[name].equals(parts[0][name]) for part in parts[1:] for name in names)
    return same and not table[:size].duplicated(subset=key).any()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _dtype(name: str) -> str:
    return "object" if name in ts.TEXT_COLUMNS else "int64" if name in ts.WHOLE_COLUMNS else "float64"


def _part(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return the wanted columns of one part; `ValueError` says what is wrong with it."""
    # hundreds of small local files: what pyarrow does to find a path's file system, and buffering, only cost
    with pa.OSFile(str(path)) as source, pq.ParquetFile(source, pre_buffer=False) as file:
        table = file.read(columns=list(columns), use_threads=False)
    stated = (table.schema.metadata or {}).get(ts.METADATA_KEY)
    if stated != str(ts.TENSOR_SCHEMA_VERSION).encode():
        seen = "no version" if stated is None else f"version {stated.decode(errors='replace')}"
        raise ValueError(f"states {seen} of the columns, this program reads {ts.TENSOR_SCHEMA_VERSION}")
    present = set(table.column_names)
    missing = [name for name in columns if name not in present]
    if missing:
        raise ValueError(f"lacks the columns {missing}")
    return _typed(table, columns)


def _typed(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return the table with the types of the contract, so that parts join whatever wrote them."""
    target = _target(tuple(columns))
    if table.num_rows and table["step"].null_count:
        raise ValueError("holds a row without its step")
    table = table.replace_schema_metadata(None)
    return table if table.schema.equals(target) else table.select(list(columns)).cast(target)


@lru_cache(maxsize=8)
def _target(columns: tuple[str, ...]) -> pa.Schema:
    return ts.arrow_schema(columns)


def steps_of(table: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the distinct steps of a table in order [K]."""
    return np.unique(table["step"].to_numpy(dtype=np.int64))
