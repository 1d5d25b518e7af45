from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8parity.data import (
    BatchPlan,
    batch_digest,
    held_out_rows,
    open_tokens,
    pack_bytes,
    pack_python_sources,
    python_source_files,
    split_documents,
    training_tokens,
)
from fp8parity.errors import UsageError
from fp8parity.spec import DataSpec
from fp8parity.token_meta import SEPARATOR, side_file

TOKENS = np.arange(1000, dtype=np.uint16)


def plan(seed: int = 0, reorder: int = 0, context: int = 7, batch: int = 5) -> BatchPlan:
    return BatchPlan(TOKENS, context, batch, seed, reorder)


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    forwards = [plan().rows(step) for step in range(60)]
    backwards = [plan().rows(step) for step in reversed(range(60))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not np.array_equal(plan(0).rows(0), plan(1).rows(0))


def test_rows_are_contiguous_windows() -> None:
    rows = plan().rows(3)
    assert rows.shape == (5, 8)
    assert (np.diff(rows, axis=1) == 1).all()


@settings(max_examples=30, deadline=None)
@given(
    context=st.integers(1, 40),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    length=st.integers(100, 2000),
)
def test_each_epoch_visits_every_window_once(context: int, batch: int, seed: int, length: int) -> None:
    batches = BatchPlan(np.arange(length, dtype=np.uint16), context, batch, seed)
    windows = batches.windows
    steps = -(-2 * windows // batch)
    firsts = np.concatenate([batches.rows(step)[:, 0] for step in range(steps)])
    for epoch in range(2):
        starts = np.sort(firsts[epoch * windows : (epoch + 1) * windows])
        assert (np.diff(starts) == context).all()
        assert 0 <= starts[0] < context


def test_reorder_permutes_rows_and_keeps_the_digest() -> None:
    plain, reordered = plan(), plan(reorder=1)
    changed = 0
    for step in range(20):
        a, b = plain.rows(step), reordered.rows(step)
        assert sorted(map(tuple, a)) == sorted(map(tuple, b))
        assert batch_digest(a) == batch_digest(b)
        changed += not np.array_equal(a, b)
    assert changed >= 15  # a permutation of five rows is the identity once in 120
    assert not all(np.array_equal(plan(reorder=1).rows(s), plan(reorder=2).rows(s)) for s in range(5))


def test_digest_sees_every_token() -> None:
    rows = plan().rows(0)
    for index in np.ndindex(rows.shape):
        other = rows.copy()
        other[index] += 1
        assert batch_digest(other) != batch_digest(rows)
    assert batch_digest(rows[:-1]) != batch_digest(rows)


def test_split_is_by_document_without_duplicates() -> None:
    documents = [b"doc %d" % (i % 300) for i in range(900)] + [b""]
    train, held_out = split_documents(documents, 0.2)
    assert len(train) + len(held_out) == 300
    assert not set(train) & set(held_out)
    assert 0.1 < len(held_out) / 300 < 0.3  # 20 % of 300, six standard deviations are 14 points
    again = split_documents(reversed(documents), 0.2)
    assert (set(again[0]), set(again[1])) == (set(train), set(held_out))


def test_pack_and_open(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    meta = pack_bytes([b"abc %d" % i for i in range(100)], path, held_out_fraction=0.3, source="t")
    tokens, read = open_tokens(path)
    assert read == meta
    train, held_out = tokens[: meta.train_tokens], tokens[meta.train_tokens :]

    def texts(part: np.ndarray) -> set[bytes]:
        return {
            bytes(piece[:-1].astype(np.uint8))
            for piece in np.split(part, np.flatnonzero(part == SEPARATOR) + 1)[:-1]
        }

    assert texts(train) | texts(held_out) == {b"abc %d" % i for i in range(100)}
    assert not texts(train) & texts(held_out)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pack_bytes([b"abc %d" % i for i in range(100)], path, held_out_fraction=0.3, source="t")
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(
        UsageError, match="sha256 is .* but .*x.json says .*; put that file back, pack it again"
    ):
        open_tokens(path)


def test_declared_digest_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pack_bytes([b"abc %d" % i for i in range(100)], path, held_out_fraction=0.3, source="t")
    with pytest.raises(UsageError, match=r"but data.sha256 says 0000"):
        open_tokens(path, {"data.sha256": "0" * 64})


def test_missing_and_broken_side_files(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with pytest.raises(UsageError, match="no such token file; make one with `fp8parity data pack"):
        open_tokens(path)
    path.write_bytes(b"12")
    with pytest.raises(UsageError, match="the side file cannot be read"):
        open_tokens(path)
    side_file(path).write_text(json.dumps({"format": 1}))
    with pytest.raises(UsageError, match="the side file cannot be read"):
        open_tokens(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"dtype": "uint32"},
            r"c.bin: has \d+ bytes, but \d+ tokens of uint32 take \d+ .*put both files back",
        ),
        ({"n_tokens": 10**6}, r"c.bin: has \d+ bytes, but 1000000 tokens of uint16 take 2000000"),
        ({"dtype": "float16"}, "dtype is 'float16', expected uint16 or uint32"),
    ],
)
def test_the_side_file_fits_the_tokens(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "c.bin"
    pack_bytes([b"document %d" % i for i in range(50)], path, held_out_fraction=0.3, source="x")
    document = json.loads(side_file(path).read_text())
    side_file(path).write_text(json.dumps({**document, **change}))
    with pytest.raises(UsageError, match=said):
        open_tokens(path)


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 training and 0 held-out documents"):
        pack_bytes([], tmp_path / "x.bin", held_out_fraction=0.1, source="nothing")


def test_too_short_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pack_bytes([b"abc %d" % i for i in range(100)], path, held_out_fraction=0.3, source="t")
    tokens, meta = open_tokens(path)
    with pytest.raises(UsageError, match=r"fewer than batch_size 64; use a larger corpus"):
        training_tokens(tokens, meta, 64, 64)
    with pytest.raises(
        UsageError, match=r"fewer than train.eval_sequences 64; hold out more of it, use a larger corpus"
    ):
        held_out_rows(tokens, meta, 64, 64)


def test_held_out_rows_do_not_overlap_and_lie_in_the_held_out_part(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pack_bytes([b"abc %d" % i for i in range(400)], path, held_out_fraction=0.3, source="t")
    tokens, meta = open_tokens(path)
    rows = held_out_rows(tokens, meta, 8, 50)
    held_out = tokens[meta.train_tokens :]
    starts = [
        int(i)
        for i in range(0, len(held_out) - 8, 8)
        if any(np.array_equal(held_out[i : i + 9], r) for r in rows)
    ]
    assert len(rows) == 50
    assert len(starts) >= 50


def test_python_sources_are_a_corpus(tmp_path: Path) -> None:
    files = python_source_files("stdlib")
    assert len(files) > 500
    assert not [f for f in files if "site-packages" in f.parts]
    meta = pack_python_sources(tmp_path / "p.bin", DataSpec(max_mib=1))
    assert 0.9 * 2**20 < meta.n_tokens < 3 * 2**20
    assert meta.vocab_size == 257
    again = pack_python_sources(tmp_path / "q.bin", DataSpec(max_mib=1))
    assert again.sha256 == meta.sha256
