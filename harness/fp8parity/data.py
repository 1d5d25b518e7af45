"""Token files and batches. A batch is a pure function of (seed, step): nothing to save, nothing to get out of step.

A token file is a flat little-endian `.bin` of uint16 or uint32 and a `.json` beside it that says what it is.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8parity.errors import UsageError
from fp8parity.spec import DataSpec
from fp8parity.token_meta import BYTE_VOCAB, FORMAT, SEPARATOR, TokenMeta, check_size, read_meta, side_file

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def open_tokens(
    path: Path, expected: Mapping[str, str | None] = MappingProxyType({})
) -> tuple[Tokens, TokenMeta]:
    """Map a token file into memory and check its digest; `UsageError` when it is not the file that was packed.

    `expected` are further digests that it must have, by where they stand; None for none.
    """
    meta = read_meta(path)
    actual = file_sha256(path)
    for origin, digest in {str(side_file(path)): meta.sha256, **expected}.items():
        if digest is not None and digest != actual:
            raise UsageError(
                f"{path}: sha256 is {actual[:16]}..., but {origin} says {digest[:16]}...; put that file back, pack it "
                "again, or train it as a new study"
            )
    check_size(path, meta)
    if meta.n_tokens == 0:
        raise UsageError(f"{path}: holds no token; give more text to `fp8parity data pack`")
    return np.memmap(path, dtype=np.dtype(meta.dtype).newbyteorder("<"), mode="r"), meta


# --- packing -----------------------------------------------------------------------------------------------------


def _is_held_out(document: bytes, fraction: float) -> bool:
    # By content, so that the split depends neither on the machine's paths nor on the order of documents.
    bucket = int.from_bytes(hashlib.sha256(b"split" + document).digest()[:8], "big")
    return bucket < fraction * 2**64


def split_documents(documents: Iterable[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Drop empty and duplicate documents and return (training, held-out), disjoint by content."""
    seen: set[bytes] = set()
    train: list[bytes] = []
    held_out: list[bytes] = []
    for document in documents:
        key = hashlib.sha256(document).digest()
        if not document or key in seen:
            continue
        seen.add(key)
        (held_out if _is_held_out(document, fraction) else train).append(document)
    return train, held_out


def encode_bytes(document: bytes) -> Tokens:
    """Return one token per byte and the separator."""
    return np.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16), np.uint16(SEPARATOR))


def write_tokens(
    path: Path, train: Iterable[Tokens], held_out: Iterable[Tokens], *, vocab_size: int, **about: Any
) -> TokenMeta:
    """Write the side file of `path`, then `path`, each by rename: a token file that is there has one.

    `about` fills tokenizer, tokenizer_sha256, source, documents. `UsageError` for an id outside of the vocabulary.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    temporary = path.with_name(path.name + ".tmp")
    counts = [0, 0]
    with temporary.open("wb") as handle:
        for part, pieces in enumerate((train, held_out)):
            for tokens in pieces:
                outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
                if len(outside):
                    raise UsageError(
                        f"{path}: a token has the id {outside[0]}, but the vocabulary has {vocab_size} ids; "
                        "the tokenizer contradicts its own vocabulary"
                    )
                handle.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                counts[part] += len(tokens)
    meta = TokenMeta(
        format=FORMAT,
        dtype=dtype,
        vocab_size=vocab_size,
        n_tokens=sum(counts),
        train_tokens=counts[0],
        split="documents",
        sha256=file_sha256(temporary),
        **about,
    )
    side_temporary = side_file(path).with_name(side_file(path).name + ".tmp")
    side_temporary.write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8")
    os.replace(side_temporary, side_file(path))
    os.replace(temporary, path)
    return meta


def pack_bytes(documents: Iterable[bytes], path: Path, *, held_out_fraction: float, source: str) -> TokenMeta:
    """Pack documents byte by byte; `UsageError` when either split would be empty."""
    train, held_out = split_documents(documents, held_out_fraction)
    if not train or not held_out:
        raise UsageError(
            f"{source}: {len(train)} training and {len(held_out)} held-out documents after removing empty and "
            f"duplicate ones; both are needed. Give more documents or another held_out_fraction "
            f"(now {held_out_fraction})"
        )
    return write_tokens(
        path,
        map(encode_bytes, train),
        map(encode_bytes, held_out),
        vocab_size=BYTE_VOCAB,
        tokenizer="bytes",
        tokenizer_sha256=None,
        source=source,
        documents=len(train) + len(held_out),
    )


def _source_roots(scope: str) -> list[Path]:
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])]
    if scope == "environment":
        roots += [Path(p) for p in dict.fromkeys((paths["purelib"], paths["platlib"]))]
    return roots


def python_source_files(scope: str) -> list[Path]:
    """Return the interpreter's `.py` files, sorted by path relative to their root.

    `stdlib` leaves out site-packages below the standard library; `environment` adds the installed packages.
    """
    found: dict[str, Path] = {}
    for root in _source_roots(scope):
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if "site-packages" not in relative.parts and path.is_file():
                found.setdefault(relative.as_posix(), path)
    return [found[name] for name in sorted(found)]


def _limited(documents: Iterable[bytes], max_bytes: float | None) -> Iterator[bytes]:
    total = 0
    for document in documents:
        if max_bytes is not None and total >= max_bytes:
            return
        total += len(document)
        yield document


def pack_python_sources(path: Path, spec: DataSpec) -> TokenMeta:
    """Pack the running interpreter's own sources: a real corpus on every machine, with no download.

    A size limit takes files in order of their content's hash: a sample of the whole library, not its first letters.
    """
    contents = [file.read_bytes() for file in python_source_files(spec.scope)]
    if spec.max_mib is not None:
        contents.sort(key=lambda text: hashlib.sha256(text).digest())
    limit = None if spec.max_mib is None else spec.max_mib * 2**20
    version = sysconfig.get_python_version()
    return pack_bytes(
        _limited(contents, limit),
        path,
        held_out_fraction=spec.held_out_fraction,
        source=f"python-sources ({spec.scope}, Python {version})",
    )


# --- batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPlan:
    """Which rows each optimizer step trains on.

    The training tokens are cut into windows of `context` + 1 tokens; each epoch visits every window once, in an
    order and with an offset drawn from (seed, epoch). `replica` > 0 with `reorder` permutes the rows inside each
    batch, which changes the order of sums and nothing else. A fork starts `batches_before` batches into that order.
    """

    tokens: Tokens
    context: int
    batch_size: int
    seed: int
    reorder_replica: int = 0
    batches_before: int = 0

    @property
    def windows(self) -> int:
        """Number of windows per epoch: one window is given up to the epoch's random offset."""
        return (len(self.tokens) - 1) // self.context - 1

    def _starts(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        epochs, places = np.divmod(positions, self.windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            order, offset = _epoch_order(self.seed, int(epoch), self.windows, self.context)
            chosen = epochs == epoch
            starts[chosen] = offset + order[places[chosen]] * self.context
        return starts

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Return the rows of step `step` (from 0), int64 [batch_size, context + 1]."""
        step += self.batches_before
        first = step * self.batch_size
        starts = self._starts(np.arange(first, first + self.batch_size, dtype=np.int64))
        if self.reorder_replica:
            starts = _generator(self.seed, step, self.reorder_replica).permutation(starts)
        return np.asarray(self.tokens[starts[:, None] + np.arange(self.context + 1)], dtype=np.int64)


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, windows: int, context: int) -> tuple[npt.NDArray[np.int64], int]:
    generator = _generator(seed, epoch)
    offset = int(generator.integers(context))
    return generator.permutation(windows), offset


def batch_digest(rows: npt.NDArray[np.int64]) -> str:
    """Return a 16-hex-digit digest of the rows in any order: a reordered batch is the same batch."""
    each = sorted(
        hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8).digest() for row in rows
    )
    return hashlib.blake2b(b"".join(each), digest_size=8).hexdigest()


def training_tokens(tokens: Tokens, meta: TokenMeta, context: int, batch_size: int) -> Tokens:
    """Return the training part; `UsageError` when it holds less than one batch of windows."""
    train = tokens[: meta.train_tokens]
    windows = (len(train) - 1) // context - 1
    if windows < batch_size:
        raise UsageError(
            f"data: {len(train)} training tokens make {max(windows, 0)} windows of context {context}, fewer than "
            f"batch_size {batch_size}; use a larger corpus, or a smaller context or batch_size"
        )
    return train


def held_out_rows(tokens: Tokens, meta: TokenMeta, context: int, sequences: int) -> npt.NDArray[np.int64]:
    """Return the fixed held-out set, int64 [sequences, context + 1], evenly spaced and not overlapping."""
    held_out = tokens[meta.train_tokens :]
    available = (len(held_out) - 1) // context
    if available < sequences:
        raise UsageError(
            f"data: {len(held_out)} held-out tokens make {max(available, 0)} sequences of context {context}, fewer "
            f"than train.eval_sequences {sequences}; hold out more of it, use a larger corpus, or write fewer sequences"
        )
    starts = (np.arange(sequences, dtype=np.int64) * available // sequences) * context
    return np.asarray(held_out[starts[:, None] + np.arange(context + 1)], dtype=np.int64)
