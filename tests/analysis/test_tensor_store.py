"""Tensor statistics on disk: whole, killed, damaged, of another version, twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensor_study import TensorShape, healthy, write_part, write_parts

from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.tensor_panel import Tensor, panel_of, tensor_key, transformed
from fp8parity_analysis.tensor_store import has_tensor_stats, read_tensor_stats

SHAPE = TensorShape(blocks=1, steps=(1, 5, 10, 20, 30))


@pytest.fixture
def casts() -> pd.DataFrame:
    return healthy(SHAPE, "tensorwise", 0, "run").assign(kind=ts.TRAINED)


def folder(run_dir: Path) -> Path:
    return run_dir / schema.TENSOR_STATS_DIR


def test_nothing_recorded_is_empty_and_no_problem(tmp_path: Path) -> None:
    found = read_tensor_stats(tmp_path)
    assert not found.recorded
    assert not found.problems
    assert list(found.casts.columns) == list(ts.CAST_COLUMNS)
    assert list(found.signals.columns) == list(ts.SIGNAL_COLUMNS)
    assert not has_tensor_stats(tmp_path)
    assert panel_of(found).empty


def test_what_was_written_is_read(tmp_path: Path, casts: pd.DataFrame) -> None:
    write_parts(tmp_path, casts, per_part=2)
    assert len(list(folder(tmp_path).iterdir())) == 3
    found = read_tensor_stats(tmp_path)
    assert found.problems == ()
    key = ["step", "fqn", "gemm", "operand"]
    left = found.casts.sort_values(key, ignore_index=True)
    right = casts[list(ts.CAST_COLUMNS)].sort_values(key, ignore_index=True)
    pd.testing.assert_frame_equal(left, right, check_dtype=False)


def test_kind_and_recipe_are_chosen(tmp_path: Path, casts: pd.DataFrame) -> None:
    other = healthy(SHAPE, "rowwise", 0, "run").assign(kind=ts.WHAT_IF)
    write_parts(tmp_path, pd.concat([casts, other], ignore_index=True))
    assert len(read_tensor_stats(tmp_path).casts) == 2 * len(casts)
    chosen = read_tensor_stats(tmp_path, kind=ts.WHAT_IF, recipe="rowwise", columns=("amax",)).casts
    assert set(chosen["recipe"]) == {"rowwise"}
    assert list(chosen.columns) == [*ts.KEY_COLUMNS, "amax"]
    assert not read_tensor_stats(tmp_path, recipe="blockwise").recorded


def test_the_later_writing_of_a_step_counts(tmp_path: Path, casts: pd.DataFrame) -> None:
    write_parts(tmp_path, casts, per_part=99)
    again = casts[casts["step"] >= 20].assign(amax=7.0)
    write_part(folder(tmp_path) / "part-00001.parquet", again)
    found = read_tensor_stats(tmp_path).casts
    assert len(found) == len(casts)
    assert set(found.loc[found["step"] >= 20, "amax"]) == {7.0}
    assert not (found.loc[found["step"] < 20, "amax"] == 7.0).any()


def test_a_damaged_part_is_said_and_left_out(tmp_path: Path, casts: pd.DataFrame) -> None:
    write_parts(tmp_path, casts, per_part=2)
    broken = folder(tmp_path) / "part-00001.parquet"
    broken.write_bytes(broken.read_bytes()[:400])
    found = read_tensor_stats(tmp_path)
    assert set(found.casts["step"]) == {1, 5, 30}
    assert len(found.problems) == 1
    assert "part-00001.parquet" in found.problems[0]
    assert "left out" in found.problems[0]


@pytest.mark.parametrize("version", [b"2", b"", b"\xff"])
def test_another_version_is_refused_by_name(tmp_path: Path, casts: pd.DataFrame, version: bytes) -> None:
    folder(tmp_path).mkdir()
    write_part(folder(tmp_path) / "part-00000.parquet", casts, version)
    found = read_tensor_stats(tmp_path)
    assert not found.recorded
    assert "this program reads 1" in found.problems[0]


def test_a_foreign_file_and_a_lacking_column_are_said(tmp_path: Path, casts: pd.DataFrame) -> None:
    folder(tmp_path).mkdir()
    pq.write_table(pa.table({"step": [1]}), folder(tmp_path) / "part-00000.parquet")
    (folder(tmp_path) / "part-00001.parquet").mkdir()
    stated = {ts.METADATA_KEY: b"1"}
    pq.write_table(
        pa.table({"step": [1]}).replace_schema_metadata(stated), folder(tmp_path) / "part-00002.parquet"
    )
    (folder(tmp_path) / "part-00003.parquet.tmp").write_bytes(b"half")
    found = read_tensor_stats(tmp_path)
    assert len(found.problems) == 3
    assert "states no version" in found.problems[0]
    assert "lacks the columns" in found.problems[2]


def test_many_damaged_parts_are_counted(tmp_path: Path) -> None:
    folder(tmp_path).mkdir()
    for part in range(20):
        (folder(tmp_path) / f"part-{part:05d}.parquet").write_bytes(b"")
    assert len(read_tensor_stats(tmp_path).problems) == 6


def test_signals_are_read(tmp_path: Path) -> None:
    folder(tmp_path).mkdir()
    rows = pa.table(
        {
            "step": [5, 5],
            "tokens": [1, 1],
            "signal": ["grad_norm"] * 2,
            "fqn": ["a", "a"],
            "value": [1.0, 2.0],
        }
    )
    pq.write_table(
        rows.replace_schema_metadata({ts.METADATA_KEY: b"1"}), folder(tmp_path) / "signals-00000.parquet"
    )
    found = read_tensor_stats(tmp_path)
    assert found.signals["value"].tolist() == [2.0]


def test_a_panel_places_every_number(tmp_path: Path, casts: pd.DataFrame) -> None:
    write_parts(tmp_path, casts.sample(frac=1.0, random_state=1))
    panel = panel_of(read_tensor_stats(tmp_path))
    assert panel.tensors == tuple(sorted(panel.tensors, key=tensor_key))
    assert panel.tensors[0] == Tensor("blocks.0.attn.o_proj", "output", "input")
    row = casts[
        (casts["fqn"] == "blocks.0.ffn.down_proj") & (casts["gemm"] == "grad_input") & (casts["step"] == 20)
    ]
    at = panel.tensors.index(Tensor("blocks.0.ffn.down_proj", "grad_input", "grad_output"))
    wanted = row[row["operand"] == "grad_output"].iloc[0]
    assert panel.columns["amax"][at, 3] == wanted["amax"]
    assert panel.formats[at, 3] == "e5m2"
    moved = panel.at((panel.tensors[at], Tensor("gone", "output", "input")), np.array([20, 25]))
    assert moved.columns["amax"][0, 0] == wanted["amax"]
    assert np.isnan(moved.columns["amax"][0, 1])
    assert np.isnan(moved.columns["amax"][1]).all()
    assert moved.formats[1, 0] == ""


def test_blocks_sort_as_numbers() -> None:
    names = [Tensor(f"blocks.{n}.x", "output", "input") for n in (10, 9, 2)]
    assert [tensor.fqn for tensor in sorted(names, key=tensor_key)] == [
        "blocks.2.x",
        "blocks.9.x",
        "blocks.10.x",
    ]


def test_shares_are_logits_with_half_counts(tmp_path: Path, casts: pd.DataFrame) -> None:
    changed = casts.assign(element_count=100, zero_count=20, nonfinite_count=0, underflow_count=0, amax=0.0)
    write_parts(tmp_path, changed)
    found = transformed(panel_of(read_tensor_stats(tmp_path)))
    np.testing.assert_allclose(found["underflow"], np.log(0.5 / 80.5))
    assert np.isnan(found["amax"]).all()
