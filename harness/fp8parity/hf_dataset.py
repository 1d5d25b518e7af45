"""Token columns of a dataset that `datasets.save_to_disk` wrote, read with pyarrow: the package is not needed.

The layout: a folder per split with `state.json`, which lists Arrow IPC streams under `_data_files`; a folder with
several splits has `dataset_dict.json` and one such folder per split. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8parity.errors import UsageError
from fp8parity.own_spec import HfDataSpec

STATE, SPLITS = "state.json", "dataset_dict.json"

Array = npt.NDArray[Any]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"data.path: {path} cannot be read ({error}); save the dataset again") from error
    if not isinstance(values, dict):
        raise UsageError(f"data.path: {path} holds no mapping; save the dataset again")
    return values


def split_folder(root: Path, split: str | None, key: str) -> Path:
    """Return the folder of one split of the dataset at `root`; `key` is the recipe's key, for errors."""
    if (root / SPLITS).exists():
        names = [str(name) for name in _read(root / SPLITS).get("splits", [])]
        if split not in names:
            told = "several splits" if split is None else f"no split {split!r}"
            raise UsageError(f"data.{key}: {root} has {told}; name one of {', '.join(names)}")
        return root / split
    if not (root / STATE).exists():
        raise UsageError(
            f"data.path: {root} is no dataset on disk (no {STATE}, no {SPLITS}); write one with "
            "Dataset.save_to_disk"
        )
    if split is not None:
        raise UsageError(f"data.{key}: {root} is a single dataset without splits; leave {key} out")
    return root


def _data_files(folder: Path) -> list[Path]:
    try:
        files = [folder / str(entry["filename"]) for entry in _read(folder / STATE)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"data.path: {folder / STATE} lists no data files; save the dataset again"
        ) from error
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"data.path: {missing[0]} is missing; the dataset is not whole")
    return files


def _stream(path: Path) -> pa.RecordBatchReader:
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path)))
    except (OSError, pa.ArrowInvalid) as error:
        raise UsageError(f"data.path: {path} is no Arrow stream ({error}); save the dataset again") from error


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _check_column(path: Path, schema: pa.Schema, column: str) -> None:
    if column not in schema.names:
        raise UsageError(
            f"data.column: {path} has no column {column!r}; name one of {', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    value = kind.value_type if _is_list(kind) else kind
    if not pa.types.is_integer(value):
        raise UsageError(
            f"data.column: {column!r} holds {kind}, not token ids; tokenise the dataset first, and name the column of "
            "whole numbers or of lists of them"
        )


def folders(spec: HfDataSpec, recipe_dir: Path) -> tuple[Path, Path | None]:
    """Return the folders of the training split and of the held-out split, if one is named."""
    root = recipe_dir / spec.path
    held_out = (
        None if spec.held_out_split is None else split_folder(root, spec.held_out_split, "held_out_split")
    )
    if held_out is not None and spec.held_out_split == spec.split:
        raise UsageError("data.held_out_split: is the training split; held-out tokens must not be trained on")
    return split_folder(root, spec.split, "split"), held_out


def fingerprint(spec: HfDataSpec, recipe_dir: Path) -> str:
    """Return a digest of the dataset's state files, and of its data files' names and sizes.

    The state holds the fingerprint that datasets gives to content and history. Raises `UsageError` beginning with the
    key that is wrong: no dataset, no such split or column, no token ids.
    """
    digest = hashlib.sha256()
    for folder in folders(spec, recipe_dir):
        if folder is None:
            continue
        files = _data_files(folder)
        for path in files[:1]:
            with _stream(path) as stream:
                _check_column(path, stream.schema, spec.column)
        digest.update((folder / STATE).read_bytes())
        digest.update(json.dumps([[path.name, path.stat().st_size] for path in files]).encode())
    return digest.hexdigest()


def rows(folder: Path, column: str, separator: int | None) -> Iterator[Array]:
    """Yield the tokens of one split, record batch by record batch, each 1-D; `separator` follows every row."""
    for path in _data_files(folder):
        with _stream(path) as stream:
            _check_column(path, stream.schema, column)
            for batch in stream:
                yield _flat(batch.column(column), path, separator)


def _flat(values: pa.Array, path: Path, separator: int | None) -> Array:
    if values.null_count:
        raise UsageError(f"data.column: {path} has empty (null) rows; remove them from the dataset")
    if not _is_list(values.type):
        flat: Array = values.to_numpy(zero_copy_only=False)
        return flat if separator is None else _with(separator, flat, np.arange(1, len(flat) + 1))
    tokens: Array = values.flatten().to_numpy(zero_copy_only=False)
    if separator is None:
        return tokens
    lengths = (
        values.value_lengths().to_numpy(zero_copy_only=False)
        if not pa.types.is_fixed_size_list(values.type)
        else np.full(len(values), values.type.list_size)
    )
    return _with(separator, tokens, np.cumsum(lengths))


def _with(separator: int, tokens: Array, at: Array) -> Array:
    """Insert the separator; widened first, since ids of 8 bits may need a separator of more."""
    return np.insert(tokens.astype(np.int64), at, separator)
