"""Broken run directories: whatever is in the files, one line says which value is wrong, and never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_study import Shape, write_study

from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.store import read_runs, read_study
from fp8parity_analysis.verdict import judge

SMALL = Shape(effects={"rowwise": 0.0}, seeds=(0, 1), steps=40, null_arm=False)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("study")
    write_study(root, SMALL)
    return root


@pytest.fixture
def study(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "study"))


def first_run(study: Path) -> Path:
    return sorted(path.parent for path in study.glob(f"*/{schema.SPEC_FILE}"))[0]


def change(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **values}))


def judged(study: Path) -> None:
    judge(CurveSet.from_runs(read_runs(study)), Criteria())


def test_the_untouched_study_is_judged(study: Path) -> None:
    judged(study)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("role", "boss"), ("role", None), ("seed", "one"), ("seed", 1.5), ("seed", True), ("replica", []),
        ("spec", []), ("spec", None), ("run_id", ""), ("arm", 3), ("group", None),
    ],
)  # fmt: skip
def test_a_wrong_value_in_spec_json_is_named(study: Path, key: str, value: Any) -> None:
    change(first_run(study) / schema.SPEC_FILE, **{key: value})
    with pytest.raises(BadInputError, match=rf"spec\.json: {key} is "):
        judged(study)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", "resting"), ("status", None), ("tokens", "many"), ("steps_done", "all"), ("model", 7),
        ("effective", "yes"), ("execution", []), ("environment", "here"), ("throughput_tokens_per_s", "fast"),
        ("first_nonfinite_step", 1.5),
    ],
)  # fmt: skip
def test_a_wrong_value_in_the_manifest_is_named(study: Path, key: str, value: Any) -> None:
    change(first_run(study) / schema.MANIFEST_FILE, **{key: value})
    with pytest.raises(BadInputError, match=rf"manifest\.json: {key} is "):
        judged(study)


def test_a_manifest_without_status_is_named(study: Path) -> None:
    path = first_run(study) / schema.MANIFEST_FILE
    document = json.loads(path.read_text())
    del document["status"]
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=r"lacks the key 'status'"):
        judged(study)


@pytest.mark.parametrize(
    ("column", "value"), [("step", "ten"), ("step", 1.5), ("step", None), ("loss", "low")]
)
def test_a_wrong_value_in_the_evaluations_is_named(study: Path, column: str, value: Any) -> None:
    path = first_run(study) / schema.EVAL_FILE
    table = pd.read_parquet(path)
    table[column] = [value if value is None else str(value), *table[column].astype(str)[1:]]
    table.to_parquet(path)
    with pytest.raises(BadInputError, match=rf"eval\.parquet: {column} in row 1"):
        judged(study)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff\xfe\n", "is not JSON"),
        (b"[1, 2]\n", "holds a list"),
        (b"7\n", "holds a int"),
        (b"{]\n", "is not JSON"),
    ],
)
def test_a_broken_line_of_an_unfinished_run_is_named(study: Path, line: bytes, said: str) -> None:
    run = first_run(study)
    (run / schema.MANIFEST_FILE).unlink()
    stream = run / schema.CURVE_STREAM
    lines = stream.read_bytes().splitlines(keepends=True)
    stream.write_bytes(lines[0] + line + b"".join(lines[1:]))
    with pytest.raises(BadInputError, match=rf"curve\.jsonl:2: {said}"):
        judged(study)


@pytest.mark.parametrize("key", ["criteria", "criteria_at_launch", "name", "recipe_file"])
def test_a_study_file_without_a_key_is_named(tmp_path: Path, key: str) -> None:
    whole = {"name": "s", "recipe_file": "s.yaml", "criteria": {}, "criteria_at_launch": "0", "runs": []}
    (tmp_path / schema.STUDY_FILE).write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
    with pytest.raises(BadInputError, match=rf"study\.json: lacks the keys \['{key}'\]"):
        read_study(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([schema.SPEC_FILE, schema.MANIFEST_FILE]), data=st.data(), value=JSON)
def test_any_value_anywhere_is_judged_or_refused(
    pristine: Path, name: str, data: st.DataObject, value: Any
) -> None:
    path = first_run(pristine) / name
    text = path.read_text()
    document = json.loads(text)
    key = data.draw(st.sampled_from(sorted(document)))
    try:
        path.write_text(json.dumps({**document, key: value}))
        judged(pristine)
    except BadInputError:
        pass
    finally:
        path.write_text(text)
