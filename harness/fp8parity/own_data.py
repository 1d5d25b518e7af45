"""Data of the user's, packed into the study once: after that they are a token file like any other.

So every rule of token files holds for them: a batch is a pure function of (seed, step), both arms read the same file,
its digest is in every manifest. A function of the user's runs in a process of its own
(`python -m fp8parity.own_data OUT.bin < REQUEST.json`). Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fp8parity import hf_dataset
from fp8parity.data import Tokens, write_tokens
from fp8parity.errors import EXIT_USAGE, UsageError
from fp8parity.own_sources import FOR_USERS_CODE, import_target
from fp8parity.own_spec import HfDataSpec, ImportDataSpec
from fp8parity.spec import OwnDataSpec
from fp8parity.token_meta import TokenMeta, read_meta, side_file

CHUNK = 2**22
"""Tokens checked and written at a time."""

PROTOCOL = (
    "return a 1-D array of whole numbers, an iterable of such arrays, or a mapping with 'train' and 'held_out' of "
    "either"
)


def file_name(spec: OwnDataSpec) -> str:
    """Return the name of the token file in a study: another specification, or source, is another file."""
    digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:8]
    return f"own-{spec.kind}-{digest}.bin"


def token_file(spec: OwnDataSpec, recipe_dir: Path, folder: Path) -> Path:
    """Return the study's token file of these data in `folder`, packing it first when it is not there.

    Raises `UsageError` for tokens that are none, out of range, too few, or not those of `sha256`.
    """
    path = folder / file_name(spec)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(spec, HfDataSpec):
            pack_dataset(spec, recipe_dir, path)
        else:
            _pack_elsewhere(spec, recipe_dir, path)
    actual = read_meta(path).sha256
    if spec.sha256 is not None and spec.sha256 != actual:
        raise UsageError(
            f"data.sha256: the tokens' digest is {actual}, the recipe file expects {spec.sha256[:16]}...; these are "
            "other data"
        )
    return path


# --- packing -----------------------------------------------------------------------------------------------------


def _checked(values: Any, vocab_size: int, origin: str) -> Iterator[Tokens]:
    """Yield one array of token ids in pieces, as unsigned numbers; `UsageError` for anything else.

    An empty document yields nothing, whatever its type: numpy makes floats of `[]`.
    """
    array = np.asarray(values)
    if array.shape == (0,):
        return
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"{origin} gives an array {list(array.shape)} of {array.dtype}; {PROTOCOL}")
    for start in range(0, len(array), CHUNK):
        part = np.asarray(array[start : start + CHUNK])
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"{origin} gives token id {low if low < 0 else high}, and data.vocab_size is {vocab_size}; ids go from "
                f"0 to {vocab_size - 1}"
            )
        yield part.astype(np.uint32)


def _arrays(values: Any, vocab_size: int, origin: str) -> Iterator[Tokens]:
    if isinstance(values, np.ndarray) or hasattr(values, "__array__"):
        yield from _checked(values, vocab_size, origin)
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        for part in values:
            yield from _checked(part, vocab_size, origin)
    else:
        raise UsageError(f"{origin} gives a {type(values).__name__}; {PROTOCOL}")


def _write(path: Path, train: Any, held_out: Any, spec: OwnDataSpec, origin: str) -> TokenMeta:
    """Write the tokens; without a held-out part the end of the training part becomes it.

    The file gets its name last, when its side file says what it is; of what fails nothing stays.
    """
    staged = path.with_name(f"{os.getpid()}-{path.name}")
    try:
        meta = _stage(staged, train, held_out, spec, origin)
        os.replace(side_file(staged), side_file(path))
        os.replace(staged, path)
    except BaseException:
        for left in path.parent.glob(f"{staged.stem}.*"):
            left.unlink(missing_ok=True)
        raise
    return meta


def _stage(staged: Path, train: Any, held_out: Any, spec: OwnDataSpec, origin: str) -> TokenMeta:
    meta = write_tokens(
        staged,
        _arrays(train, spec.vocab_size, origin),
        () if held_out is None else _arrays(held_out, spec.vocab_size, origin),
        vocab_size=spec.vocab_size,
        tokenizer=origin,
        tokenizer_sha256=None,
        source=origin,
        documents=0,
    )
    if held_out is None:
        kept = meta.n_tokens - int(meta.n_tokens * spec.held_out_fraction)
        meta = replace(meta, train_tokens=kept, split="tail")
        side_file(staged).write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8")
    return meta


def pack_dataset(spec: HfDataSpec, recipe_dir: Path, path: Path) -> TokenMeta:
    """Pack the splits of a dataset on disk."""
    train, held_out = hf_dataset.folders(spec, recipe_dir)
    return _write(
        path,
        hf_dataset.rows(train, spec.column, spec.separator),
        None if held_out is None else hf_dataset.rows(held_out, spec.column, spec.separator),
        spec,
        f"dataset {Path(spec.path).name}, column {spec.column}",
    )


def pack_imported(spec: ImportDataSpec, root: Path, path: Path) -> TokenMeta:
    """Call the function and pack what it returns."""
    found = import_target(spec.target, root)(**spec.kwargs)
    train, held_out = found, None
    if isinstance(found, Mapping):
        unknown = sorted(set(found) - {"train", "held_out"})
        if unknown or "train" not in found:
            raise UsageError(f"{spec.target} returns a mapping with {', '.join(map(str, found))}; {PROTOCOL}")
        train, held_out = found["train"], found.get("held_out")
    return _write(path, train, held_out, spec, spec.target)


def _pack_elsewhere(spec: ImportDataSpec, recipe_dir: Path, path: Path) -> None:
    """Pack in a process of its own, so that the launcher imports nothing of the user's."""
    request = {"data": spec.model_dump(mode="json"), "root": str(recipe_dir.resolve())}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        done = subprocess.run(
            [sys.executable, "-m", "fp8parity.own_data", str(path)],
            input=json.dumps(request),
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **FOR_USERS_CODE},
            text=True,
            check=False,
        )
        said.seek(0)
        last = (said.read().strip().splitlines() or ["no output"])[-1]
    if done.returncode == EXIT_USAGE:
        raise UsageError(f"data.{last}" if last.startswith("target: ") else f"data.target: {last}")
    if done.returncode:
        raise UsageError(f"data.target: {spec.target} failed with exit code {done.returncode}: {last}")


def main() -> None:
    """Pack the data of the request on standard input into the file named; exit 64 says what is wrong."""
    request = json.load(sys.stdin)
    try:
        pack_imported(
            ImportDataSpec.model_validate(request["data"]), Path(request["root"]), Path(sys.argv[1])
        )
    except UsageError as error:
        print(error)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
