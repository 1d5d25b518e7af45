"""A table of external curves, checked and cut into one stream per run, split and precision."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_PRECISIONS = ("", schema.EVAL_BF16, schema.EVAL_ARM)
_LARGEST = 2**53
"""Seeds and steps beyond this are not exact in a float64 column."""


@dataclass(frozen=True)
class Stream:
    """One curve of one run: `steps` [K] strictly increasing, `loss` [K].

    `problems` forbid judging the run.
    """

    seed: int
    arm: str
    replica: int
    split: str
    eval_precision: str
    status: Status
    steps: IntArray
    loss: FloatArray
    problems: tuple[str, ...]


def table_runs(table: pd.DataFrame) -> tuple[list[Stream], tuple[str, ...]]:
    """Return the streams of a table with `schema.EXTERNAL_COLUMNS`, in order of first appearance, and notes.

    `BadInputError` names the missing column, or the value and row that is no number.
    """
    missing = [name for name in schema.EXTERNAL_COLUMNS if name not in table.columns]
    if missing:
        raise BadInputError(
            f"the table lacks the columns {', '.join(missing)}; it has {', '.join(map(str, table.columns))}. "
            "Map other names with --column"
        )
    if table.empty:
        raise BadInputError("the table has no rows")
    keys = _Keys.of(table)
    steps, loss = _whole(table, "step"), _loss(table)
    code, order = keys.ordered(steps)
    edges = np.flatnonzero(np.diff(code, prepend=-1, append=-2))
    spans = sorted(itertools.pairwise(edges), key=lambda span: int(order[span[0] : span[1]].min()))
    streams = [keys.stream(order[start:stop], steps, loss) for start, stop in spans]
    return streams, tuple(_notes(streams))


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
            columns[name] = _factorised(_whole(table, name)) if name in table.columns else (zeros, [0])
        for name, default in (
            ("arm", ""),
            ("split", schema.HELD_OUT),
            ("eval_precision", ""),
            ("status", ""),
        ):
            columns[name] = _texts(table, name, default) if name in table.columns else (zeros, [default])
        _check_texts("eval_precision", columns["eval_precision"][1], _PRECISIONS)
        _check_texts("status", columns["status"][1], ("", *(status.value for status in Status)))
        codes, arms = columns["arm"]
        if "" in arms and np.any(codes == arms.index("")):
            raise BadInputError("arm: empty in some rows; every row must name its arm")
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

    def stream(self, rows: IntArray, steps: IntArray, loss: FloatArray) -> Stream:
        ordered, values, problems = sorted_unique(steps[rows], loss[rows])
        row = int(rows[0])
        split = str(self.value("split", row))
        return Stream(
            seed=int(self.value("seed", row)),
            arm=str(self.value("arm", row)),
            replica=int(self.value("replica", row)),
            split=split,
            eval_precision=str(self.value("eval_precision", row)),
            status=self._status(rows),
            steps=ordered,
            loss=values,
            problems=tuple(f"{split}: {text}" for text in problems),
        )

    def _status(self, rows: IntArray) -> Status:
        codes, values = self.columns["status"]
        said = [values[code] for code in np.unique(codes[rows]) if values[code]]
        return Status(next((value for value in said if value != Status.FINISHED), Status.FINISHED))


def _check_texts(name: str, values: list[Any], allowed: tuple[str, ...]) -> None:
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


def _whole(table: pd.DataFrame, name: str) -> IntArray:
    """Return a column as whole numbers; `BadInputError` names the first row that holds none."""
    numbers, bad = whole_numbers(table[name])
    if bad is not None:
        raise BadInputError(f"{name}: row {bad + 1} holds {table[name].iloc[bad]!r}, not a whole number")
    return numbers


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


def _loss(table: pd.DataFrame) -> FloatArray:
    column = table["loss"]
    if pd.api.types.is_float_dtype(column.dtype) or pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    spelled = column.astype(str).str.strip().str.lower().isin(["nan", "", "none", "<na>"]).to_numpy()
    bad = np.flatnonzero(np.isnan(numbers) & ~spelled)
    if len(bad):
        raise BadInputError(f"loss: row {int(bad[0]) + 1} holds {column.iloc[bad[0]]!r}, not a number")
    return numbers
