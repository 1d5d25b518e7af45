"""The side file of a token file: what the tokens are, readable without numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8parity.errors import UsageError

FORMAT = 1
BYTE_VOCAB = 257
"""256 byte values and one separator between documents."""
SEPARATOR = 256


@dataclass(frozen=True)
class TokenMeta:
    """The side file of a token file.

    `train_tokens` is where the held-out tokens begin; `split` says how they were chosen: `documents` (no document
    stands in both) or `tail` (the end of one stream).
    """

    format: int
    dtype: str
    vocab_size: int
    n_tokens: int
    train_tokens: int
    split: str
    tokenizer: str
    tokenizer_sha256: str | None
    sha256: str
    source: str
    documents: int

    @property
    def reading(self) -> dict[str, Any]:
        """How the tokens are read and split, which the digest of the `.bin` does not cover: `data_split` of a run."""
        return {key: getattr(self, key) for key in ("dtype", "vocab_size", "n_tokens", "train_tokens")}

    def unlike(self, reading: Mapping[str, Any] | None) -> str:
        """Return in words how a recorded `reading` differs from this one; empty for None, or when it does not."""
        here = self.reading
        found = [
            f"{key} is {here[key]}, and was {value}"
            for key, value in (reading or {}).items()
            if key in here and here[key] != value
        ]
        return ", ".join(found)


def side_file(path: Path) -> Path:
    """Return the JSON file that belongs to a `.bin`."""
    return path.with_suffix(".json")


def read_meta(path: Path) -> TokenMeta:
    """Read the side file of `path`; `UsageError` says what is missing and how to make it."""
    if not path.exists():
        raise UsageError(
            f"{path}: no such token file; make one with `fp8parity data pack SOURCE --out {path}`"
        )
    try:
        meta = TokenMeta(**json.loads(side_file(path).read_text(encoding="utf-8")))
        _check(meta)
        return meta
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{side_file(path)}: the side file cannot be read ({error}); pack again with `fp8parity data pack`"
        ) from error


_COUNTS = ("format", "vocab_size", "n_tokens", "train_tokens", "documents")
_TEXTS = ("dtype", "split", "tokenizer", "sha256", "source")


_BYTES = {"uint16": 2, "uint32": 4}


def check_size(path: Path, meta: TokenMeta) -> None:
    """Raise `UsageError` when the token file does not hold as many tokens as its side file says."""
    size, wanted = path.stat().st_size, meta.n_tokens * _BYTES[meta.dtype]
    if size != wanted:
        raise UsageError(
            f"{path}: has {size} bytes, but {meta.n_tokens} tokens of {meta.dtype} take {wanted} ({side_file(path)}); "
            "put both files back, or pack again with `fp8parity data pack`"
        )


def _check(meta: TokenMeta) -> None:
    for names, kind, wanted in ((_COUNTS, int, "a whole number"), (_TEXTS, str, "a text")):
        for name in names:
            value = getattr(meta, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected {wanted}")
    if meta.dtype not in _BYTES:
        raise ValueError(f"dtype is {meta.dtype!r}, expected {' or '.join(_BYTES)}")
    if not 0 <= meta.train_tokens <= meta.n_tokens:
        raise ValueError(f"train_tokens {meta.train_tokens} is not within n_tokens {meta.n_tokens}")
