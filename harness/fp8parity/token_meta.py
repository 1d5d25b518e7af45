"""The side file of a token file: what the tokens are, readable without numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


def _check(meta: TokenMeta) -> None:
    for names, kind, wanted in ((_COUNTS, int, "a whole number"), (_TEXTS, str, "a text")):
        for name in names:
            value = getattr(meta, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected {wanted}")
    if not 0 <= meta.train_tokens <= meta.n_tokens:
        raise ValueError(f"train_tokens {meta.train_tokens} is not within n_tokens {meta.n_tokens}")
