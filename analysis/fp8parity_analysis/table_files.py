"""Curves from CSV and Parquet files: what is read, which columns count, and what an empty cell means."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fp8parity_analysis import schema, wandb_export
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import KNOWN, ImportSettings, words_of
from fp8parity_analysis.run_logs import Read
from fp8parity_analysis.table import CELL, LOSS_CELL, RUN_ROW, loss_numbers, typed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

READABLE = "read are comma- or tab-separated columns in UTF-8, with a header and decimal points"

_HEAD_BYTES = 1 << 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_RAGGED = re.compile(r"Expected (\d+) columns, got (\d+)")


def read_file(path: Path, settings: ImportSettings) -> Read:
    """Return the losses of a table: `seed, arm, step, loss` under any names, or a W&B export.

    `BadInputError` names the file and what in it cannot be read.
    """
    table = read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else read_csv(path, settings)
    if wandb_export.is_export(table.column_names, settings):
        return wandb_export.read_export(table, path, settings)
    return Read(_long(table, path, settings))


def read_csv(path: Path, settings: ImportSettings | None = None) -> pa.Table:
    """Read a CSV or TSV file; `BadInputError` when it is no table or a loss is no number."""
    loss = (settings or ImportSettings()).columns.get("loss", "loss")
    delimiter = _delimiter(path)
    try:
        return _arrow_csv(path, delimiter, loss, pa.float64())
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: its header is not UTF-8; {READABLE}") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = _first_line(error)
        if "conversion error to double" in reason:
            reason = _bad_loss(path, delimiter, loss) or reason
        elif ragged := _RAGGED.search(reason):
            reason = f"a row has {ragged[2]} cells, the header {ragged[1]}{reason[ragged.end() :]}"
        raise BadInputError(f"{path}: {reason}; {READABLE}") from error


def _arrow_csv(path: Path, delimiter: str, loss: str, kind: pa.DataType) -> pa.Table:
    texts = {
        name: pa.dictionary(pa.int32(), pa.string()) for name in ("arm", "split", "eval_precision", "status")
    }
    options = pa.csv.ConvertOptions(
        null_values=[""], strings_can_be_null=True, column_types={**texts, loss: kind}
    )
    parsing = pa.csv.ParseOptions(delimiter=delimiter)
    table = pa.csv.read_csv(path, parse_options=parsing, convert_options=options)
    return table.rename_columns(table.column_names)  # decodes the header: fails where it is no text


def _delimiter(path: Path) -> str:
    """Return what separates the columns by the header; `BadInputError` when the file is no such text."""
    try:
        with pa.input_stream(str(path)) as stream:
            head = stream.read(_HEAD_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"{path}: cannot be read ({_first_line(error)})") from error
    if not head.strip():
        raise BadInputError(f"{path}: the file is empty; {READABLE}")
    if head.startswith(_UTF16_MARKS) or b"\0" in head:
        raise BadInputError(f"{path}: this is not UTF-8 text (UTF-16, or a binary file); {READABLE}")
    header = head.strip().split(b"\n", 1)[0].strip()
    if b"," in header:
        return ","
    if b"\t" in header:
        return "\t"
    if b";" in header:
        raise BadInputError(f"{path}: its columns are separated by semicolons; {READABLE}")
    return ","


def _bad_loss(path: Path, delimiter: str, loss: str) -> str | None:
    """Return which cell of the loss is no number, or None when none is found."""
    texts = _arrow_csv(path, delimiter, loss, pa.string())
    try:
        for name, column in zip(texts.column_names, texts.columns, strict=True):
            if name == loss:
                loss_numbers(column.to_pandas(), name)
    except BadInputError as error:
        return str(error)
    return None


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; `BadInputError` when it is none."""
    try:
        return pa.parquet.ParquetFile(path).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200].rstrip()


def _long(table: pa.Table, path: Path, settings: ImportSettings) -> pd.DataFrame:
    """Return a table of one row per loss, its columns under our names and its cells told apart."""
    ours = _ours(table.column_names, path, settings)
    others = [name for name in table.column_names if name not in ours]
    at = {their: table.column_names.index(their) for their in ours}
    chosen = _without_blank_end(table.select(list(at.values())).rename_columns(list(ours.values())))
    table = table.slice(0, len(chosen))
    frame = chosen.to_pandas()
    if "loss" in ours.values():
        metrics = _metrics(table, [*others, *(their for their, our in ours.items() if our == "grad_norm")])
        frame[CELL] = np.where(_not_logged(chosen["loss"], metrics), RUN_ROW, LOSS_CELL).astype(np.int8)
    frame = _named_by_file(frame, path, settings)
    missing = [name for name in schema.EXTERNAL_COLUMNS if name not in frame.columns]
    if missing:
        raise BadInputError(
            f"{path}: the table lacks the columns {', '.join(missing)}; it has "
            f"{', '.join(table.column_names)}. Map other names with --column {missing[-1]}=THEIRS"
        )
    try:
        return typed(frame)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error


def _ours(names: Sequence[str], path: Path, settings: ImportSettings) -> dict[str, str]:
    """Return {their column: ours} of those that are used; a mapped column wins over one of our name."""
    for our, their in settings.columns.items():
        if their not in names:
            raise BadInputError(
                f"{path}: column {our}={their}: there is no {their!r}; the table has {', '.join(names)}"
            )
    mapped = {their: our for our, their in settings.columns.items()}
    plain = {name: name for name in names if name in KNOWN and name not in settings.columns}
    ours = {**plain, **mapped}
    count = Counter(names)
    for name in ours:
        if count[name] > 1:
            raise BadInputError(
                f"{path}: {count[name]} columns are called {name!r}; keep one, or rename the other"
            )
    return ours


def _without_blank_end(table: pa.Table) -> pa.Table:
    """Return a table without the rows at its end in which no cell is filled, as spreadsheets leave them."""
    if not table.num_columns or not len(table):
        return table
    filled = np.flatnonzero(np.any([pc.is_valid(column).to_numpy() for column in table.columns], axis=0))
    return table.slice(0, int(filled[-1]) + 1 if len(filled) else 0)


def _metrics(table: pa.Table, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    """Return the columns of numbers under `names`."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return {name: columns[name] for name in names if _is_number(columns[name].type)}


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _not_logged(loss: pa.ChunkedArray, metrics: Mapping[str, pa.ChunkedArray]) -> npt.NDArray[np.bool_]:
    """Return the rows [N] that hold another metric instead of a loss.

    pandas writes NaN as an empty cell, so an empty cell is a loss that is not finite, unless its row is there for
    something else: for another loss, or for a column that is itself empty where a loss is given.
    """
    empty = np.asarray(pc.is_null(loss).to_numpy(), dtype=np.bool_)
    if not empty.any():
        return empty
    instead = np.zeros(len(empty), dtype=np.bool_)
    for filled in _taking_turns(empty, metrics):
        instead |= filled
    return np.asarray(empty & instead)


def _taking_turns(
    empty: npt.NDArray[np.bool_], metrics: Mapping[str, pa.ChunkedArray]
) -> Iterator[npt.NDArray[np.bool_]]:
    for name, column in metrics.items():
        filled = pc.is_valid(column).to_numpy()
        if "loss" in words_of(name) or np.any(~filled & ~empty):
            yield filled


def _named_by_file(table: pd.DataFrame, path: Path, settings: ImportSettings) -> pd.DataFrame:
    """Add arm and seed from the file's name when the table has neither."""
    if "arm" in table.columns or "seed" in table.columns:
        return table
    named = settings.run_named(path.stem)
    return table.assign(**named) if named else table
