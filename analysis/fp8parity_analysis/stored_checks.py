"""Whether the documents and tables of a run directory hold what their names promise, before anything reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Role, Status
from fp8parity_analysis.table import whole_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_WHOLE_COLUMNS = ("step",)
_NUMBER_COLUMNS = ("tokens", "train_loss", "grad_norm", "lr", "step_time", "loss")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "run_id": ("a name", _is_text),
    "group": ("a text", lambda value: isinstance(value, str)),
    "arm": ("a name", _is_text),
    "role": (f"one of {', '.join(Role)}", lambda value: value in list(Role)),
    "seed": ("a whole number", _is_whole),
    "replica": ("a whole number", _is_whole),
    "spec": ("an object", _is_mapping),
    "name": ("a name", _is_text),
    "recipe_file": ("a path", _is_text),
    "criteria": ("an object", _is_mapping),
    "criteria_at_launch": ("a digest", _is_text),
    "status": (f"one of {', '.join(Status)}", lambda value: value in list(Status)),
}
_OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "steps_done": ("a whole number", _is_whole),
    "first_nonfinite_step": ("a whole number", _is_whole),
    "tokens": ("a number", _is_number),
    "throughput_tokens_per_s": ("a number", _is_number),
    "environment": ("an object", _is_mapping),
    "conversion": ("an object", _is_mapping),
    "execution": ("an object", _is_mapping),
    "effective": ("an object", _is_mapping),
    "model": ("an object", _is_mapping),
    "probed": ("an object", _is_mapping),
}
_SPEC_KEYS = ("run_id", "group", "arm", "role", "seed", "replica", "spec")
_STUDY_KEYS = ("name", "recipe_file", "criteria", "criteria_at_launch")


def check_spec(path: Path, document: Mapping[str, Any]) -> None:
    """Raise `BadInputError` naming the first key of `spec.json` that lacks or is not what it should be."""
    missing = [key for key in schema.SPEC_KEYS if key not in document]
    if missing:
        raise BadInputError(f"{path}: lacks the keys {missing}")
    if document["schema_version"] != schema.SCHEMA_VERSION:
        raise BadInputError(
            f"{path}: schema_version {document['schema_version']}, this program reads {schema.SCHEMA_VERSION}; "
            "use the fp8parity that wrote it"
        )
    _check_values(path, document, {key: _KINDS[key] for key in _SPEC_KEYS})


def check_study(path: Path, document: Mapping[str, Any]) -> None:
    """Raise `BadInputError` naming the first key of `study.json` that lacks or is not what it should be."""
    missing = [key for key in _STUDY_KEYS if key not in document]
    if missing:
        raise BadInputError(f"{path}: lacks the keys {missing}; was it written by fp8parity?")
    _check_values(path, document, {key: _KINDS[key] for key in _STUDY_KEYS})
    runs = document.get("runs", [])
    if not isinstance(runs, list) or not all(map(_is_text, runs)):
        raise BadInputError(f"{path}: runs is {runs!r}, expected a list of names")


def check_manifest(path: Path, document: Mapping[str, Any]) -> None:
    """Raise `BadInputError` naming the first key of a manifest that is not what it should be."""
    if "status" not in document:
        raise BadInputError(f"{path}: lacks the key 'status', so how the run ended is not known")
    given = {key: kind for key, kind in _OPTIONAL.items() if document.get(key) is not None}
    _check_values(path, document, {"status": _KINDS["status"], **given})


def _check_values(
    path: Path, document: Mapping[str, Any], kinds: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    for key, (wanted, holds) in kinds.items():
        if not holds(document[key]):
            raise BadInputError(f"{path}: {key} is {document[key]!r}, expected {wanted}")


def check_table(path: Path, table: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """Return `table` with `columns` as numbers where they are numbers; `BadInputError` names column and row.

    Steps must be whole; other numbers may be missing, NaN or infinite (they become NaN when missing).
    """
    names = list(columns)
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise BadInputError(f"{path}: lacks the columns {missing}")
    changed: dict[str, Any] = {}
    for name in names:
        if name in _WHOLE_COLUMNS:
            changed[name] = _whole(path, name, table[name])
        elif name in _NUMBER_COLUMNS:
            changed[name] = _numbers(path, name, table[name])
    return table.assign(**changed)


def _numbers(path: Path, name: str, column: pd.Series[Any]) -> pd.Series[Any]:
    if pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype):
        return column
    numbers = pd.to_numeric(column, errors="coerce")
    bad = np.flatnonzero((numbers.isna() & column.notna()).to_numpy(dtype=bool))
    bad = np.array([row for row in bad if str(column.iloc[row]).lower() != "nan"], dtype=np.int64)
    if len(bad):
        raise BadInputError(f"{path}: {name} in row {bad[0] + 1} holds {column.iloc[bad[0]]!r}, not a number")
    return numbers.astype("float64")


def _whole(path: Path, name: str, column: pd.Series[Any]) -> pd.Series[Any]:
    numbers, bad = whole_numbers(_numbers(path, name, column))
    if bad is not None:
        raise BadInputError(f"{path}: {name} in row {bad + 1} holds {column.iloc[bad]!r}, not a whole number")
    return pd.Series(numbers, index=column.index)
