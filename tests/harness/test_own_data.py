from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8parity.data import open_tokens
from fp8parity.errors import UsageError
from fp8parity.own_data import file_name, pack_imported, token_file
from fp8parity.own_spec import ImportDataSpec

MODULE = """
import numpy as np

def whole(n=100):
    return np.arange(n, dtype=np.int64) % 50

def split():
    return {"train": (whole(n) for n in (30, 20)), "held_out": whole(7)}

def floats():
    return np.zeros(5)

def number():
    return 3

def other():
    return {"train": whole(), "valid": whole()}

def gaps():
    return [[], whole(3), np.array([]), whole(2)]

def negative():
    return [np.array([1, -2])]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_token_bits.py").write_text(MODULE)
    return tmp_path


def spec(name: str = "whole", **values: Any) -> ImportDataSpec:
    values = {"kind": "import", "target": f"own_token_bits:{name}", "vocab_size": 50, **values}
    return ImportDataSpec.model_validate(values)


def test_one_array_is_cut_at_its_end(root: Path) -> None:
    pack_imported(spec(held_out_fraction=0.1), root, root / "a.bin")
    tokens, meta = open_tokens(root / "a.bin")
    assert (meta.n_tokens, meta.train_tokens, meta.split, meta.vocab_size) == (100, 90, "tail", 50)
    assert np.array_equal(tokens, np.arange(100) % 50)


def test_a_mapping_of_iterables_keeps_its_own_parts(root: Path) -> None:
    pack_imported(spec("split"), root, root / "a.bin")
    tokens, meta = open_tokens(root / "a.bin")
    assert (meta.n_tokens, meta.train_tokens, meta.split) == (57, 50, "documents")
    assert np.array_equal(tokens, [*range(30), *range(20), *range(7)])


def test_more_than_65536_ids_are_kept_whole(root: Path) -> None:
    pack_imported(spec(vocab_size=100_000), root, root / "a.bin")
    tokens, meta = open_tokens(root / "a.bin")
    assert meta.dtype == "uint32"
    assert np.array_equal(tokens, np.arange(100) % 50)


def test_empty_documents_are_skipped(root: Path) -> None:
    pack_imported(spec("gaps"), root, root / "a.bin")
    assert np.array_equal(open_tokens(root / "a.bin")[0], [0, 1, 2, 0, 1])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (spec(vocab_size=49), "gives token id 49, and data.vocab_size is 49; ids go from 0 to 48"),
        (spec("negative"), "gives token id -2"),
        (spec("floats"), r"gives an array \[5\] of float64; return a 1-D array"),
        (spec("number"), "gives a int; return a 1-D array"),
        (spec("other"), "returns a mapping with train, valid"),
        (spec("nothing"), "own_token_bits has no 'nothing'"),
    ],
)
def test_what_are_no_tokens_is_said(root: Path, data: ImportDataSpec, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        pack_imported(data, root, root / "a.bin")
    # nor is there a part of it, written before the fault
    assert {path.name for path in root.iterdir()} <= {"own_token_bits.py", "__pycache__"}


def test_a_study_packs_once_in_another_process_and_checks_the_digest(root: Path) -> None:
    path = token_file(spec(), root, root / "data")
    _, meta = open_tokens(path)
    stamp = path.stat().st_mtime_ns
    assert token_file(spec(), root, root / "data") == path
    assert path.stat().st_mtime_ns == stamp
    token_file(spec(sha256=meta.sha256), root, root / "data")
    with pytest.raises(UsageError, match=r"data\.sha256: the tokens' digest is .* these are other data"):
        token_file(spec(sha256="0" * 64), root, root / "data")


def test_what_fails_there_is_said_here(root: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.target: .* failed with exit code 1: TypeError"):
        token_file(spec("whole", kwargs={"m": 1}), root, root / "data")


def test_the_current_folder_brings_no_modules(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("here")
    (here / "only_here_bits.py").write_text("")
    (root / "own_token_bits.py").write_text(MODULE + "\nimport only_here_bits\n")
    monkeypatch.chdir(here)
    with pytest.raises(UsageError, match="ModuleNotFoundError: No module named 'only_here_bits'"):
        token_file(spec(), root, root / "data")


def test_another_source_is_another_file(root: Path) -> None:
    changed = spec().model_copy(update={"sources": {"own_token_bits": "1"}})
    assert file_name(changed) != file_name(spec())
