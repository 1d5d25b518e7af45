from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fp8parity.data import open_tokens, write_tokens
from fp8parity.errors import UsageError
from fp8parity.pack import documents_of, pack

TEXTS = [f"document number {i} says something" for i in range(60)]


def write_source(kind: str, folder: Path) -> Path:
    if kind == "folder":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text)
        (folder / "image.png").write_bytes(b"\x89PNG")
        return folder
    path = folder / f"x.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(TEXTS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "\n")
    else:
        pd.DataFrame({"text": TEXTS}).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder"])
def test_every_source_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    path = write_source(kind, source)
    assert sorted(d.decode() for d in documents_of(path, "text")) == sorted(TEXTS)
    meta = pack(path, tmp_path / "o.bin", tokenizer=None, field="text", held_out_fraction=0.2)
    assert meta.documents == 60
    assert 0 < meta.train_tokens < meta.n_tokens


def test_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers extra is not installed")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "document": 1, "number": 2}, "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    meta = pack(
        source, tmp_path / "o.bin", tokenizer=tmp_path / "tokenizer.json", field="text", held_out_fraction=0.2
    )
    tokens, _ = open_tokens(tmp_path / "o.bin")
    assert meta.vocab_size == 4  # three words and the separator
    assert list(np.asarray(tokens[:6])) == [1, 2, 0, 0, 0, 3]
    assert meta.tokenizer_sha256 is not None


def test_ids_with_gaps_stay_what_they_are(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers extra is not installed")
    words = {"[UNK]": 0, "document": 1, "number": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source, out = write_source("jsonl", tmp_path), tmp_path / "o.bin"
    meta = pack(source, out, tokenizer=tmp_path / "tokenizer.json", field="text", held_out_fraction=0.2)
    tokens, _ = open_tokens(out)
    assert (meta.dtype, meta.vocab_size) == ("uint32", 70_002)
    assert list(np.asarray(tokens[:6])) == [1, 70_000, 0, 0, 0, 70_001]


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_id_outside_of_the_vocabulary_is_not_written(tmp_path: Path, wrong: int) -> None:
    about = {"tokenizer": "t", "tokenizer_sha256": None, "source": "s", "documents": 1}
    with pytest.raises(UsageError, match=f"o.bin: a token has the id {wrong}, but the vocabulary has 4 ids"):
        write_tokens(tmp_path / "o.bin", [np.array([0, wrong, 3])], [], vocab_size=4, **about)
    assert not (tmp_path / "o.bin").exists()


def test_lines_that_end_in_crlf_part_at_blank_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("\r\n\r\n".join(TEXTS).encode() + b"\r\n\r\n\r\nof two\r\nlines\r\n")
    assert [d.decode() for d in documents_of(path, "text")] == [*TEXTS, "of two\r\nlines"]


def test_rows_of_bytes_are_text(tmp_path: Path) -> None:
    pd.DataFrame({"text": [b"caf\xc3\xa9", b"two"]}).to_parquet(tmp_path / "p.parquet")
    assert list(documents_of(tmp_path / "p.parquet", "text")) == ["caf\u00e9".encode(), b"two"]


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    pd.DataFrame({"text": ["one", None]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=r"p.parquet: row 2: field 'text' is null, not text"):
        list(documents_of(tmp_path / "p.parquet", "text"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"body": "x"}\n', r"x.jsonl:1: no text in field 'text' .*--field"),
        ("x.jsonl", "not json\n", r"x.jsonl:1: no text in field"),
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": null}\n',
            r"x.jsonl:2: field 'text' is null, not text; drop that row",
        ),
        ("x.jsonl", '{"text": ["a"]}\n', r"x.jsonl:1: field 'text' holds a list, not text"),
        (
            "x.jsonl",
            '{"text": "a\\ud83d"}\n',
            r"x.jsonl:1: .* half of a character \('\\ud83d', a lone surrogate",
        ),
        ("x.parquet", "garbage", "x.parquet: is no Parquet file"),
        ("x.txt", "", "0 training and 0 held-out documents"),
        ("x.txt", "only one paragraph", "both are needed"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        pack(tmp_path / name, tmp_path / "o.bin", tokenizer=None, field="text", held_out_fraction=0.2)
    assert not (tmp_path / "o.bin").exists()


def test_options_are_checked(tmp_path: Path) -> None:
    source = write_source("txt", tmp_path)
    with pytest.raises(UsageError, match=r"--held-out-fraction 0.9: write a share between 0 and 0.5"):
        pack(source, tmp_path / "o.bin", tokenizer=None, field="text", held_out_fraction=0.9)
    with pytest.raises(UsageError, match=r"no such file; give a tokenizer.json"):
        pack(
            source,
            tmp_path / "o.bin",
            tokenizer=tmp_path / "absent.json",
            field="text",
            held_out_fraction=0.2,
        )
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no file ending in .txt"):
        pack(tmp_path / "empty", tmp_path / "o.bin", tokenizer=None, field="text", held_out_fraction=0.2)
    pd.DataFrame({"body": TEXTS}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=r"has no column 'text'; name one of \['body'\]"):
        pack(tmp_path / "p.parquet", tmp_path / "o.bin", tokenizer=None, field="text", held_out_fraction=0.2)
