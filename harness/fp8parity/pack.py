"""Text to token file: the readers behind `fp8parity data pack`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fp8parity.data import Tokens, pack_bytes, split_documents, write_tokens
from fp8parity.errors import UsageError
from fp8parity.token_meta import TokenMeta

_BLANK_LINES = re.compile(rb"(?:\r?\n){2,}")
FOLDER_SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet")


def _paragraphs(path: Path) -> Iterator[bytes]:
    """Cut one text into documents at blank lines, so that a single file still has a held-out part."""
    yield from (part.strip() for part in _BLANK_LINES.split(path.read_bytes()) if part.strip())


def _text(value: object, where: str, field: str) -> bytes:
    """Return the text of a row as UTF-8; `UsageError` where there is none, or one that has no UTF-8."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        found = "is null" if value is None else f"holds a {type(value).__name__}"
        raise UsageError(f"{where}: field {field!r} {found}, not text; drop that row or name another --field")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: field {field!r} holds half of a character ({value[error.start]!a}, a lone surrogate); "
            "write the character whole or drop that row"
        ) from error


def _jsonl(path: Path, field: str) -> Iterator[bytes]:
    with path.open(encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}:{number}: no text in field {field!r} ({error}); name it with --field"
                ) from error
            yield _text(text, f"{path}:{number}", field)


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: is no Parquet file ({str(error).splitlines()[0]})") from error
    if field not in file.schema_arrow.names:
        raise UsageError(
            f"{path}: has no column {field!r}; name one of {file.schema_arrow.names} with --field"
        )
    texts = (text for batch in file.iter_batches(columns=[field]) for text in batch.column(0).to_pylist())
    for number, text in enumerate(texts, start=1):
        yield _text(text, f"{path}: row {number}", field)


def documents_of(path: Path, field: str) -> Iterator[bytes]:
    """Yield the documents below `path`: rows, files, or the paragraphs of a single text file."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in FOLDER_SUFFIXES)
        if not files:
            raise UsageError(f"{path}: holds no file ending in {', '.join(FOLDER_SUFFIXES)}")
        for file in files:
            yield from (
                documents_of(file, field) if file.suffix in (".jsonl", ".parquet") else [file.read_bytes()]
            )
    elif not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    elif path.suffix == ".jsonl":
        yield from _jsonl(path, field)
    elif path.suffix == ".parquet":
        yield from _parquet(path, field)
    else:
        yield from _paragraphs(path)


def pack(
    source: Path, out: Path, *, tokenizer: Path | None, field: str, held_out_fraction: float
) -> TokenMeta:
    """Pack `source` into `out`; byte-level without `tokenizer`. `UsageError` names what is missing."""
    if out.suffix != ".bin":
        raise UsageError(f"--out {out}: a token file ends in .bin")
    if not 0 < held_out_fraction < 0.5:
        raise UsageError(f"--held-out-fraction {held_out_fraction}: write a share between 0 and 0.5")
    documents = documents_of(source, field)
    if tokenizer is None:
        return pack_bytes(documents, out, held_out_fraction=held_out_fraction, source=source.name)
    return _pack_tokenized(documents, out, tokenizer, held_out_fraction, source.name)


def _pack_tokenized(
    documents: Iterator[bytes], out: Path, path: Path, fraction: float, source: str
) -> TokenMeta:
    """Encode with a `tokenizer.json`; one id above its highest separates documents: ids may have gaps."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise UsageError(
            "--tokenizer needs the tokenizers extra: pip install 'fp8parity[tokenizers]'"
        ) from error
    if not path.exists():
        raise UsageError(f"--tokenizer {path}: no such file; give a tokenizer.json")
    tokenizer: Any = Tokenizer.from_file(str(path))
    separator = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(document: bytes) -> Tokens:
        ids = tokenizer.encode(document.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.array([*ids, separator], dtype=np.uint32)

    train, held_out = split_documents(documents, fraction)
    if not train or not held_out:
        raise UsageError(
            f"{source}: {len(train)} training and {len(held_out)} held-out documents; both are needed"
        )
    return write_tokens(
        out,
        map(encode, train),
        map(encode, held_out),
        vocab_size=separator + 1,
        tokenizer=path.name,
        tokenizer_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        source=source,
        documents=len(train) + len(held_out),
    )
