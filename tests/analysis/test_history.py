"""The history file: append-only, tolerant of a killed night, strict about its version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nights as sim
import numpy as np
import pytest

from fp8parity_analysis import history as subject
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.history_findings import assess


def one_night() -> subject.Night:
    return sim.records(sim.simulate(np.random.default_rng(0), 1, sim.World(nights=1)))[0]


def test_a_night_reads_back_as_it_was_written(tmp_path: Path) -> None:
    night = replace(one_night(), crashed={"a": "why"}, finished=("b",), told={"gate": "pass"})
    subject.append_night(tmp_path, night)
    subject.append_night(tmp_path, replace(night, night="2025-01-02"))
    assert subject.read_history(tmp_path).nights == (night, replace(night, night="2025-01-02"))
    assert len((tmp_path / subject.HISTORY_FILE).read_text().splitlines()) == 2


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_a_cut_line_costs_only_its_own_night(tmp_path: Path, keep: int) -> None:
    path = tmp_path / subject.HISTORY_FILE
    night = one_night()
    subject.append_night(tmp_path, night)
    whole = path.read_bytes()
    cut = whole + whole[:keep] if keep > 0 else whole + whole[:-10]
    path.write_bytes(cut)
    assert subject.read_history(tmp_path).nights == (night,)
    subject.append_night(tmp_path, replace(night, night="later"))
    found = subject.read_history(tmp_path)
    assert [item.night for item in found.nights] == [night.night, "later"]
    assert found.broken == (2,)
    assert path.read_bytes().startswith(cut)


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    document = one_night().to_json() | {"schema_version": 99}
    (tmp_path / subject.HISTORY_FILE).write_text(json.dumps(document) + "\n")
    with pytest.raises(BadInputError, match="schema_version 99"):
        subject.read_history(tmp_path)


def test_nights_of_one_day_get_names_of_their_own_and_a_killed_one_is_found(tmp_path: Path) -> None:
    first, path = subject.claim_night(tmp_path, "2025-01-01")
    second, _ = subject.claim_night(tmp_path, "2025-01-01")
    assert (first, second) == ("2025-01-01", "2025-01-01.2")
    assert path.is_dir()
    subject.append_night(tmp_path, replace(one_night(), night=second))
    (killed,) = subject.killed_nights(tmp_path, subject.read_history(tmp_path))
    assert (killed.night, killed.status) == (first, subject.KILLED)


def test_nights_of_earlier_versions_are_read(tmp_path: Path) -> None:
    document = one_night().to_json()
    del document["finished"]
    for item in document["series"].values():
        del item["df"]
    (tmp_path / subject.HISTORY_FILE).write_text(json.dumps(document) + "\n")
    (night,) = subject.read_history(tmp_path).nights
    assert night.finished is None
    assert {item.df for item in night.series.values()} == {None}
    assert assess(subject.History((night,) * 7)).exit_code == 0


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert subject.read_history(tmp_path / "absent") == subject.History()
