"""The casts of one run as arrays: a row per tensor, a column per probe, on the scale that a statistic is tested on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.tensor_signals import SignalPanel
    from fp8parity_analysis.tensor_store import TensorTables

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

GEMM_ORDER = ("output", "grad_input", "grad_weight")
OPERAND_ORDER = ("input", "weight", "grad_output")

COLUMNS = (
    "element_count", "group_count", "zero_count", "nonfinite_count", "underflow_count", "saturated_count",
    "zero_amax_groups", "amax", "scale_min", "scale_max", "underflow_frac", "saturated_frac", "sqnr_db", "rms",
    "amax_over_rms",
)  # fmt: skip
"""Statistics that the analysis reads."""


class Tensor(NamedTuple):
    """One operand of one GEMM of one linear; an operand that enters two GEMMs is cast twice, and listed twice."""

    fqn: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        """Return the name as reports write it."""
        return f"{self.fqn}, {self.operand} of {self.gemm}"


def natural_key(fqn: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts `blocks.2` before `blocks.10`."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", fqn) if part
    )


def _place(value: str, order: Sequence[str]) -> int:
    return order.index(value) if value in order else len(order)


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that sorts tensors by GEMM and operand, then by layer."""
    gemm, operand = _place(tensor.gemm, GEMM_ORDER), _place(tensor.operand, OPERAND_ORDER)
    return (gemm, tensor.gemm, operand, tensor.operand, natural_key(tensor.fqn))


@dataclass(frozen=True)
class Panel:
    """The casts of one run under one recipe: `columns` maps a statistic to [L, K], NaN where not recorded.

    `tensors` [L] and `steps` [K] name rows and columns. `formats` holds the format of each cast as text [L, K], empty
    where not recorded; `granularity` [L] is what shares a scale. `signals` are the run's, on their own grid.
    """

    tensors: tuple[Tensor, ...]
    steps: IntArray
    columns: Mapping[str, FloatArray]
    formats: npt.NDArray[np.object_]
    granularity: tuple[str, ...]
    signals: SignalPanel | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self.tensors or not len(self.steps)

    @cached_property
    def paths(self) -> dict[str, FloatArray]:
        """Every statistic of `STATISTICS` [L, K] on the scale it is tested on."""
        return transformed(self)

    def at(self, tensors: Sequence[Tensor], steps: IntArray) -> Panel:
        """Return the panel on the given tensors [L] and steps [K], NaN where it lacks them."""
        row = {tensor: index for index, tensor in enumerate(self.tensors)}
        rows = np.array([row.get(tensor, -1) for tensor in tensors], dtype=np.int64)
        if len(self.steps):
            places = np.clip(np.searchsorted(self.steps, steps), 0, len(self.steps) - 1)
            found = self.steps[places] == steps
        else:
            places, found = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.bool_)
        known = (rows >= 0)[:, None] & found[None, :]
        grid = np.ix_(np.maximum(rows, 0), places)

        def taken(values: npt.NDArray[np.object_] | FloatArray, blank: object) -> npt.NDArray[np.object_]:
            if not values.size:
                return np.full(known.shape, blank)
            return np.where(known, values[grid], np.array(blank, dtype=values.dtype))

        return Panel(
            tuple(tensors),
            steps,
            {name: taken(values, np.nan).astype(np.float64) for name, values in self.columns.items()},
            taken(self.formats, "").astype(object),
            tuple(self.granularity[index] if index >= 0 else "" for index in rows),
            self.signals,
        )


def distinct(table: pd.DataFrame, columns: Sequence[str]) -> tuple[IntArray, list[tuple[str, ...]]]:
    """Return each row's index into the distinct texts of some columns, and these; on whole numbers, which is fast."""
    parts = [pd.factorize(table[name], use_na_sentinel=False) for name in columns]
    key = np.zeros(len(table), dtype=np.int64)
    for codes, names in parts:
        key = key * len(names) + codes
    _, first, rows = np.unique(key, return_index=True, return_inverse=True)
    named = [[str(name) for name in np.asarray(names, dtype=object)[codes[first]]] for codes, names in parts]
    return np.asarray(rows, dtype=np.int64).reshape(-1), list(zip(*named, strict=True))


def _texts(column: pd.Series) -> npt.NDArray[np.object_]:
    """Return a column of few different texts as objects, each text once."""
    codes, names = pd.factorize(column, use_na_sentinel=False)
    return np.asarray(names, dtype=object)[codes]


def panel_of(tables: TensorTables) -> Panel:
    """Return the casts of a run as a panel; the tables must hold one kind and one recipe of cast."""
    casts = tables.casts
    if casts.empty:
        blank = np.zeros((0, 0))
        return Panel((), np.zeros(0, np.int64), dict.fromkeys(COLUMNS, blank), blank.astype(object), ())
    codes, names = distinct(casts, ("fqn", "gemm", "operand"))
    tensors = [Tensor(*name) for name in names]
    order = sorted(range(len(tensors)), key=lambda index: tensor_key(tensors[index]))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = place[codes]
    steps, at = np.unique(casts["step"].to_numpy(dtype=np.int64), return_inverse=True)
    shape = (len(order), len(steps))
    columns = {}
    for name in COLUMNS:
        columns[name] = np.full(shape, np.nan)
        columns[name][rows, at] = casts[name].to_numpy(dtype=np.float64, na_value=np.nan)
    formats = np.full(shape, "", dtype=object)
    formats[rows, at] = _texts(casts["format"])
    grain = np.full(len(order), "", dtype=object)
    grain[rows] = _texts(casts["granularity"])
    return Panel(tuple(tensors[i] for i in order), steps, columns, formats, tuple(map(str, grain)))


@dataclass(frozen=True)
class Statistic:
    """A statistic that is tested.

    `harm` is 1 where a rise over BF16 is worse, -1 where a fall is, 0 where either is. `floor` is the smallest
    difference worth a word on the scale tested (`unit`): smaller ones are no candidates however certain they are.
    """

    name: str
    harm: int
    floor: float
    unit: str
    words: str


STATISTICS: Mapping[str, Statistic] = {
    item.name: item
    for item in (
        Statistic("underflow", 1, float(np.log(2.0)), "logit", "underflow share"),
        Statistic("saturated", 1, float(np.log(2.0)), "logit", "saturated share"),
        Statistic("sqnr", -1, 0.5, "dB", "SQNR"),
        Statistic("amax", 1, float(np.log(1.25)), "ln", "amax"),
        Statistic("rms", 1, float(np.log(1.25)), "ln", "rms"),
        Statistic("scale", -1, float(np.log(1.25)), "ln", "scale"),
        Statistic("spread", 1, float(np.log(1.25)), "ln", "amax/rms"),
    )
}

ONE_SCALE = "tensor"
"""Granularity of a cast with one scale for all; only there is amax/rms of the whole tensor what the cast meets."""

SMALLEST_SHARE = 1e-4
"""A share that both arms keep below this on average is not tested: its logit is the noise of a few elements."""


def _logit(count: FloatArray, total: FloatArray) -> FloatArray:
    """Return ln((k + 1/2) / (N - k + 1/2)); NaN without an element to count."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.log((count + 0.5) / (total - count + 0.5))
    return np.where(np.isfinite(value) & (total > 0), value, np.nan)


def _log(values: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values)
    return np.where(np.isfinite(logs), logs, np.nan)


def transformed(panel: Panel) -> dict[str, FloatArray]:
    """Return every statistic [L, K] on the scale it is tested on: shares as logits with half counts, SQNR in dB.

    The other statistics are natural logarithms. Infinite values, such as the SQNR of a tensor that the cast keeps
    exactly, become NaN: they have no distance to anything.
    """
    column = panel.columns
    total = column["element_count"] - column["zero_count"] - column["nonfinite_count"]
    sqnr = column["sqnr_db"]
    return {
        "underflow": _logit(column["underflow_count"], total),
        "saturated": _logit(column["saturated_count"], total),
        "sqnr": np.where(np.isfinite(sqnr), sqnr, np.nan),
        "amax": _log(column["amax"]),
        "rms": _log(column["rms"]),
        "scale": _log(column["scale_min"]),
        "spread": _log(column["amax_over_rms"]),
    }
