"""A table of external curves, checked and cut into one stream per run, split and precision."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CELL = "cell"
"""Column by which importers tell rows apart; absent, every row holds a loss."""
LOSS_CELL, RUN_ROW, TABLE_ROW = 0, 1, 2
"""A loss; a row that the run wrote without one; a row of the table in which another run has one."""

UNFINISHED = "unfinished"
"""What the column `status` says of a run that still trains."""

_PRECISIONS = ("", schema.EVAL_BF16, schema.EVAL_ARM)
_STATUSES = ("", UNFINISHED, *(status.value for status in Status))
_LARGEST = 2**53
"""Seeds and steps beyond this are not exact in a float64 column."""


@dataclass(frozen=True)
class Stream:
    """One curve of one run: `steps` [K] strictly increasing, `loss` [K]; `status` is None while the run trains.

    `rows_to` is the last step of a row that the run wrote without a loss, `cells_to` that of any row with an
    empty place for one, 0 without such rows. `problems` forbid judging the run.
    """

    seed: int
    arm: str
    replica: int
    split: str
    eval_precision: str
    status: Status | None
    rows_to: int
    cells_to: int
    steps: IntArray
    loss: FloatArray
    problems: tuple[str, ...]


def table_runs(table: pd.DataFrame) -> tuple[list[Stream], tuple[str, ...]]:
    """Return the streams of a table with `schema.EXTERNAL_COLUMNS`, in order of first appearance, and notes.

    `BadInputError` names the missing column, or the value and row that is no number.
    """
    table = typed(table)
    keys = _Keys.of(table)
    steps, loss = table["step"].to_numpy(), table["loss"].to_numpy()
    cells = table[CELL].to_numpy()
    code, order = keys.ordered(steps)
    edges = np.flatnonzero(np.diff(code, prepend=-1, append=-2))
    spans = sorted(itertools.pairwise(edges), key=lambda span: int(order[span[0] : span[1]].min()))
    streams = [keys.stream(order[start:stop], steps, loss, cells) for start, stop in spans]
    return streams, tuple(_notes(streams))


def typed(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with int64 `seed`, `step`, `replica` (empty: 0), float64 `loss` and int8 `CELL`.

    `BadInputError` names the missing column, or the row (from 1) and what it holds.
    """
    missing = [name for name in schema.EXTERNAL_COLUMNS if name not in table.columns]
    if missing:
        raise BadInputError(
            f"the table lacks the columns {', '.join(missing)}; it has {', '.join(map(str, table.columns))}. "
            "Map other names with --column"
        )
    if table.empty:
        raise BadInputError("the table has no rows")
    zeros = np.zeros(len(table), dtype=np.int64)
    replica = _or_zero(table["replica"]) if "replica" in table.columns else None
    codes, arms = _texts(table, "arm", "")
    if "" in arms and len(empty := np.flatnonzero(codes == arms.index(""))):
        raise BadInputError(f"arm: empty in row {int(empty[0]) + 1}; every row must name its arm")
    for name, allowed in (("eval_precision", _PRECISIONS), ("status", _STATUSES)):
        if name in table.columns:
            _check_texts(name, _texts(table, name, "")[1], allowed)
    return table.assign(
        seed=step_numbers(table["seed"], "seed"),
        replica=zeros if replica is None else step_numbers(replica, "replica"),
        step=step_numbers(table["step"], "step"),
        loss=loss_numbers(table["loss"], "loss"),
        **{CELL: table[CELL].fillna(LOSS_CELL).astype(np.int8) if CELL in table.columns else np.int8(0)},
    )


def _or_zero(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column with 0 in its empty cells; a column that is full is returned as it is."""
    empty = column.isna() | (column == "")
    return column.astype(object).where(~empty, 0) if empty.any() else column


def _notes(streams: list[Stream]) -> Iterator[str]:
    if all(stream.split == schema.TRAIN for stream in streams):
        yield "only training losses were given: they mix batch content into the gap"


def sorted_unique(steps: IntArray, loss: FloatArray) -> tuple[IntArray, FloatArray, list[str]]:
    """Return the curve in order of step without repeated rows, and what is wrong with it.

    A step with two different losses is a problem (a resumed run logged twice), so is a finite loss that is
    not positive; an exact repetition is dropped.
    """
    if len(steps) > 1 and np.any(np.diff(steps) <= 0):
        order = np.argsort(steps, kind="stable")
        steps, loss = steps[order], loss[order]
    problems = []
    again = np.flatnonzero(np.diff(steps) == 0)
    if len(again):
        first, second = loss[again], loss[again + 1]
        differ = ~((first == second) | (np.isnan(first) & np.isnan(second)))
        if differ.any():
            at = int(again[differ][0])
            problems.append(
                f"{int(differ.sum())} steps have two different losses, first step {int(steps[at])} "
                f"({loss[at]:g} and {loss[at + 1]:g}); keep one row per step"
            )
        keep = np.ones(len(steps), dtype=np.bool_)
        keep[again] = False
        steps, loss = steps[keep], loss[keep]
    with np.errstate(invalid="ignore"):
        low = np.flatnonzero(np.isfinite(loss) & (loss <= 0))
    if len(low):
        problems.append(
            f"the loss at step {int(steps[low[0]])} is {loss[low[0]]:g}; a log gap needs positive losses"
        )
    return steps, loss, problems


@dataclass(frozen=True)
class _Keys:
    """What names a stream, as one code per row and the values behind the codes."""

    columns: dict[str, tuple[IntArray, list[Any]]]

    @staticmethod
    def of(table: pd.DataFrame) -> _Keys:
        zeros = np.zeros(len(table), dtype=np.int64)
        columns: dict[str, tuple[IntArray, list[Any]]] = {}
        for name in ("seed", "replica"):
            columns[name] = _factorised(table[name].to_numpy())
        for name, default in (
            ("arm", ""),
            ("split", schema.HELD_OUT),
            ("eval_precision", ""),
            ("status", ""),
        ):
            columns[name] = _texts(table, name, default) if name in table.columns else (zeros, [default])
        return _Keys(columns)

    def ordered(self, steps: IntArray) -> tuple[IntArray, IntArray]:
        """Return the stream's code of each row in stream order, and that order; rows keep order of step."""
        code = np.zeros(len(steps), dtype=np.int64)
        for name in ("seed", "arm", "replica", "split", "eval_precision"):
            codes, values = self.columns[name]
            code = code * len(values) + codes
        in_order = (np.diff(code) > 0) | ((np.diff(code) == 0) & (np.diff(steps) >= 0))
        order = np.arange(len(steps)) if in_order.all() else np.lexsort((steps, code))
        return code[order], order

    def value(self, name: str, row: int) -> Any:
        codes, values = self.columns[name]
        return values[codes[row]]

    def stream(self, rows: IntArray, steps: IntArray, loss: FloatArray, cells: IntArray) -> Stream:
        kinds = cells[rows]
        logged = rows[kinds == LOSS_CELL]
        ordered, values, problems = sorted_unique(steps[logged], loss[logged])
        row = int(rows[0])
        split = str(self.value("split", row))
        return Stream(
            seed=int(self.value("seed", row)),
            arm=str(self.value("arm", row)),
            replica=int(self.value("replica", row)),
            split=split,
            eval_precision=str(self.value("eval_precision", row)),
            status=self._status(rows),
            rows_to=int(steps[rows[kinds == RUN_ROW]].max(initial=0)),
            cells_to=int(steps[rows[kinds != LOSS_CELL]].max(initial=0)),
            steps=ordered,
            loss=values,
            problems=tuple(f"{split}: {text}" for text in problems),
        )

    def _status(self, rows: IntArray) -> Status | None:
        codes, values = self.columns["status"]
        said = [values[code] for code in np.unique(codes[rows]) if values[code]]
        told = next((value for value in said if value != Status.FINISHED), Status.FINISHED)
        return None if told == UNFINISHED else Status(told)


def _check_texts(name: str, values: Sequence[Any], allowed: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in allowed]
    if unknown:
        known = ", ".join(value for value in allowed if value)
        raise BadInputError(f"{name}: {unknown[0]!r} is not known; write one of {known}, or leave it empty")


def _factorised(values: IntArray) -> tuple[IntArray, list[Any]]:
    codes, uniques = pd.factorize(values)
    return codes.astype(np.int64), [int(value) for value in uniques]


def _texts(table: pd.DataFrame, name: str, default: str) -> tuple[IntArray, list[Any]]:
    codes, uniques = pd.factorize(table[name], use_na_sentinel=True)
    spelled = [*(str(value).strip() or default for value in uniques), default]
    values = list(dict.fromkeys(spelled))
    renumber = np.array([values.index(value) for value in spelled], dtype=np.int64)
    return renumber[codes], values  # code -1 (missing) is the last entry: the default


def step_numbers(column: pd.Series[Any], name: str) -> IntArray:
    """Return a column as whole numbers; `BadInputError` names the first row (from 1) that holds none."""
    numbers, bad = whole_numbers(column)
    if bad is not None:
        raise BadInputError(f"{name}: row {bad + 1} holds {_shown(column.iloc[bad])}, not a whole number")
    return numbers


def whole_number(value: Any, name: str) -> int:
    """Return a single value as a whole number; `BadInputError` says what it is instead."""
    numbers, bad = whole_numbers(pd.Series([value]))
    if bad is not None:
        raise BadInputError(f"{name}: {_shown(value)} is not a whole number")
    return int(numbers[0])


def _shown(value: Any) -> str:
    """Return a cell in an error's words."""
    if pd.isna(value):
        return "nothing"
    return repr(value.item() if isinstance(value, np.generic) else value)


def whole_numbers(column: pd.Series[Any]) -> tuple[IntArray, int | None]:
    """Return a column as whole numbers, and the first row (from 0) that holds none; the numbers are void then."""
    if pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans:
        return column.to_numpy(dtype=np.int64), None
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(
            ~(np.isfinite(numbers) & (numbers == np.round(numbers)) & (np.abs(numbers) < _LARGEST))
        )
    if len(bad):
        return np.zeros(0, np.int64), int(bad[0])
    return numbers.astype(np.int64), None


def loss_numbers(column: pd.Series[Any], name: str) -> FloatArray:
    """Return a column as float64, NaN where it is empty; `BadInputError` names the first row that is no number."""
    if pd.api.types.is_float_dtype(column.dtype) or pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    spelled = column.astype(str).str.strip().str.lower().isin(["nan", "", "none"]).to_numpy()
    bad = np.flatnonzero(np.isnan(numbers) & ~spelled & ~column.isna().to_numpy())
    if len(bad):
        value = column.iloc[bad[0]]
        comma = "; write a decimal point" if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", str(value)) else ""
        raise BadInputError(f"{name}: row {int(bad[0]) + 1} holds {value!r}, not a number{comma}")
    return numbers
