from __future__ import annotations

from pathlib import Path

import pytest

from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json


def test_round_trip_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "a": "ü"})
    assert read_json(tmp_path / "a.json") == {"b": [1, 2.5, None], "a": "ü"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"kept": True})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"bad": object()})
    assert read_json(tmp_path / "a.json") == {"kept": True}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list, expected an object")]
)
def test_broken_documents_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadInputError, match=rf"a\.json: {message}"):
        read_json(tmp_path / "a.json")
    with pytest.raises(BadInputError, match=r"b\.json: cannot be read"):
        read_json(tmp_path / "b.json")
