"""Datasets on disk: `tests/gold/hf_dataset` was written by datasets 5.2.0, the others imitate its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fp8parity.data import open_tokens
from fp8parity.errors import UsageError
from fp8parity.hf_dataset import fingerprint, rows
from fp8parity.own_data import token_file
from fp8parity.own_spec import HfDataSpec

GOLD = Path(__file__).parents[1] / "gold" / "hf_dataset"
ROWS = [[1, 2, 3], [4], [], [5, 6]]


def spec(path: Path | str, **values: Any) -> HfDataSpec:
    return HfDataSpec.model_validate({"kind": "hf", "path": str(path), "vocab_size": 10, **values})


def save(folder: Path, column: pa.Array, name: str = "input_ids") -> Path:
    folder.mkdir(parents=True)
    table = pa.table({name: column, "text": ["t"] * len(column)})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def joined(folder: Path, separator: int | None = None) -> list[int]:
    return [int(x) for part in rows(folder, "input_ids", separator) for x in part]


def test_a_dataset_that_datasets_wrote_is_read() -> None:
    data = spec(GOLD, split="train", held_out_split="test")
    assert len(fingerprint(data, Path())) == 64
    assert joined(GOLD / "train") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert joined(GOLD / "test", separator=0) == [1, 1, 0, 2, 0]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.uint16())], ids=str
)
@pytest.mark.parametrize(
    ("separator", "expected"), [(None, [1, 2, 3, 4, 5, 6]), (0, [1, 2, 3, 0, 4, 0, 0, 5, 6, 0])]
)
def test_lists_are_joined(
    tmp_path: Path, kind: pa.DataType, separator: int | None, expected: list[int]
) -> None:
    assert joined(save(tmp_path / "d", pa.array(ROWS, kind)), separator) == expected


def test_fixed_lists_and_single_numbers(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    assert joined(save(tmp_path / "f", fixed), 0) == [1, 2, 0, 3, 4, 0, 5, 6, 0]
    assert joined(save(tmp_path / "n", pa.array([1, 2, 3])), None) == [1, 2, 3]
    assert joined(save(tmp_path / "m", pa.array([1, 2, 3])), 0) == [1, 0, 2, 0, 3, 0]


def test_a_separator_wider_than_the_ids_is_kept_whole(tmp_path: Path) -> None:
    assert joined(save(tmp_path / "l", pa.array(ROWS, pa.list_(pa.uint8()))), 300) == [
        1, 2, 3, 300, 4, 300, 300, 5, 6, 300
    ]  # fmt: skip
    assert joined(save(tmp_path / "n", pa.array([1, 2], pa.int8())), 300) == [1, 300, 2, 300]


def test_splits_become_the_parts_of_a_token_file(tmp_path: Path) -> None:
    path = token_file(spec(GOLD, split="train", held_out_split="test", separator=0), tmp_path, tmp_path)
    tokens, meta = open_tokens(path)
    assert np.array_equal(tokens[: meta.train_tokens], [1, 2, 3, 0, 4, 5, 0, 6, 7, 8, 9, 0])
    assert np.array_equal(tokens[meta.train_tokens :], [1, 1, 0, 2, 0])
    assert meta.split == "documents"


def test_a_changed_dataset_has_another_fingerprint(tmp_path: Path) -> None:
    folder = save(tmp_path / "d", pa.array(ROWS))
    before = fingerprint(spec(folder), Path())
    (folder / "state.json").write_text((folder / "state.json").read_text().replace('"f"', '"g"'))
    assert fingerprint(spec(folder), Path()) != before


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"path": "nowhere"}, r"data\.path: .*nowhere is no dataset on disk"),
        ({"path": str(GOLD)}, r"data\.split: .* has several splits; name one of train, test"),
        ({"path": str(GOLD), "split": "valid"}, r"data\.split: .* has no split 'valid'; name one of train, test"),
        (
            {"path": str(GOLD), "split": "test", "held_out_split": "test"},
            r"data\.held_out_split: is the training split",
        ),
        ({"split": "train"}, r"data\.split: .* is a single dataset without splits"),
        ({"column": "tokens"}, r"data\.column: .* has no column 'tokens'; name one of input_ids, text"),
        ({"column": "text"}, r"data\.column: 'text' holds string, not token ids; tokenise the dataset first"),
    ],
)  # fmt: skip
def test_what_is_no_token_dataset_is_said(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    folder = save(tmp_path / "d", pa.array(ROWS))
    with pytest.raises(UsageError, match=reason):
        fingerprint(spec(**{"path": folder, **values}), tmp_path)


def test_a_dataset_that_is_not_whole_is_said(tmp_path: Path) -> None:
    folder = save(tmp_path / "d", pa.array(ROWS))
    (folder / "data.arrow").write_bytes(b"not arrow")
    with pytest.raises(UsageError, match="is no Arrow stream"):
        fingerprint(spec(folder), tmp_path)
    (folder / "data.arrow").unlink()
    with pytest.raises(UsageError, match=r"data\.arrow is missing; the dataset is not whole"):
        fingerprint(spec(folder), tmp_path)


def test_a_separator_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="separator 10 is not below vocab_size 10"):
        spec("d", separator=10)
