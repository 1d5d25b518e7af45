from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8parity import matrix, study
from fp8parity.errors import UsageError
from fp8parity.process import LOCK_FILE
from fp8parity_analysis import schema

from .conftest import WriteRecipe

LayOut = Callable[..., dict[str, Path]]


def read(path: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads(path.read_text())
    return document


def test_layout(lay_out: LayOut, tmp_path: Path) -> None:
    dirs = lay_out()
    assert set(dirs) == {
        f"{arm}-{s}" for arm in ("bf16", "bf16_null", "tensorwise", "rowwise") for s in (0, 1)
    }
    document = read(tmp_path / "study" / schema.STUDY_FILE)
    assert document["runs"] == [path.name for path in dirs.values()]
    criteria = study.criteria_from_json(document["criteria"])
    assert document["criteria_digest"] == criteria.digest()
    assert document["criteria_at_launch"] == study.launch_digest(criteria)
    for path in dirs.values():
        spec = read(path / schema.SPEC_FILE)
        assert tuple(spec) == (*schema.SPEC_KEYS, "probe", "data_sha256", "checkpoint_share")
        assert (path / str(spec["data_path"])).resolve().exists()


def test_laying_out_again_changes_nothing(lay_out: LayOut, tmp_path: Path) -> None:
    lay_out()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "study" / schema.RUNS_DIR).rglob("*.json")}
    lay_out()
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_added_seeds_and_arms_extend_the_study(lay_out: LayOut) -> None:
    first = lay_out()
    more = lay_out({"seeds": [0, 1, 2]})
    assert set(first.values()) < set(more.values())


def test_another_recipe_is_refused(lay_out: LayOut) -> None:
    lay_out()
    with pytest.raises(
        UsageError,
        match=r"'tiny' with 8 runs that .* does not describe .*optim.lr is 0.003 there and 0.5 in the.*another --out",
    ):
        lay_out({"base": {"optim": {"lr": 0.5}}})
    with pytest.raises(
        UsageError,
        match=r"holds study 'tiny' with the same runs, .* is called 'other' .*write name: tiny in it",
    ):
        lay_out({"name": "other"})


def test_added_steps_are_refused_with_the_reason(lay_out: LayOut) -> None:
    lay_out()
    with pytest.raises(
        UsageError,
        match=r"train.steps is 24 there and 48 in the file; a longer run has another schedule .*another --out",
    ):
        lay_out({"base": {"train": {"steps": 48}}})


def test_a_directory_of_something_else_is_refused(lay_out: LayOut, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not empty and holds no fp8parity study"):
        lay_out()
    assert [p.name for p in (tmp_path / "study").iterdir()] == ["thesis.tex"]


def test_what_a_failed_packing_left_is_no_other_study(lay_out: LayOut, tmp_path: Path) -> None:
    data = tmp_path / "study" / schema.DATA_DIR
    data.mkdir(parents=True)
    (tmp_path / "study" / study.LOCK_FILE).touch()
    (data / "77-own-import-0123abcd.bin.tmp").touch()
    lay_out()


def test_a_data_folder_of_something_else_is_refused(lay_out: LayOut, tmp_path: Path) -> None:
    (tmp_path / "study" / schema.DATA_DIR).mkdir(parents=True)
    (tmp_path / "study" / schema.DATA_DIR / "measured.csv").write_text("precious")
    with pytest.raises(UsageError, match="is not empty and holds no fp8parity study"):
        lay_out()


def test_other_packages_are_refused_before_anything_starts(lay_out: LayOut, tmp_path: Path) -> None:
    lay_out()
    (tmp_path / "study" / schema.ENVIRONMENT_FILE).write_text(json.dumps({"torch": "1.0", "torchao": "0.0"}))
    with pytest.raises(UsageError, match=r"torch: 1.0 != .*install those, or use another --out"):
        lay_out()


def test_changed_margin_keeps_the_criteria_of_the_launch(lay_out: LayOut, tmp_path: Path) -> None:
    lay_out()
    launched = read(tmp_path / "study" / schema.STUDY_FILE)["criteria_at_launch"]
    lay_out({"criteria": {"margin": "1%"}})
    document = read(tmp_path / "study" / schema.STUDY_FILE)
    assert document["criteria_at_launch"] == launched
    assert document["criteria_digest"] != launched


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"batch_size": 4096},
            "training tokens make .* fewer than train.batch_size 4096; use a larger corpus",
        ),
        (
            {"eval_sequences": 9999},
            "held-out tokens make .* fewer than .* 9999; pack it again with a larger --held-out",
        ),
        ({"context": 65536}, "training tokens make 0 windows of train.context 65536"),
    ],
)
def test_short_corpus_is_refused_before_training(
    lay_out: LayOut, train: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        lay_out({"base": {"train": train}})


def test_python_sources_are_packed_once(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    changes = {"base": {"data": {"source": "python-sources", "path": None, "max_mib": 0.5}}}
    plan = matrix.read(write_recipe(changes))
    study.lay_out(plan, tmp_path / "s")
    (token_file,) = (tmp_path / "s" / schema.DATA_DIR).glob("*.bin")
    before = token_file.stat().st_mtime_ns
    study.lay_out(plan, tmp_path / "s")
    assert token_file.stat().st_mtime_ns == before


def test_lock_keeps_a_second_launcher_out(tmp_path: Path) -> None:
    with (
        study.lock(tmp_path),
        pytest.raises(UsageError, match="another fp8parity run is working"),
        study.lock(tmp_path),
    ):
        pass
    holder = LOCK_FILE
    with study.lock(tmp_path):
        assert read(tmp_path / holder)["pid"] == os.getpid()  # the refused one above has not emptied it
    assert (tmp_path / holder).read_text() == ""


def test_kept_gemms_are_an_ordered_axis(write_recipe: WriteRecipe, lay_out: LayOut, tmp_path: Path) -> None:
    axis = {"axes": {"precision.recipe": ["rowwise"], "precision.keep": [4, 0, 2]}}
    criteria = study.criteria_of(matrix.read(write_recipe(axis)))
    assert criteria.trend == (("rowwise-n0", 0.0), ("rowwise-n2", 2.0), ("rowwise-n4", 4.0))
    assert study.criteria_of(matrix.read(write_recipe())).trend == ()
    lay_out(axis)
    before = read(tmp_path / "study" / schema.STUDY_FILE)
    lay_out({"axes": {"precision.recipe": ["rowwise"], "precision.keep": [4, 0, 2, 3]}})
    after = read(tmp_path / "study" / schema.STUDY_FILE)
    assert before["criteria_at_launch"] == after["criteria_at_launch"]
    assert before["criteria_digest"] != after["criteria_digest"]


def test_criteria_survive_json(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(
        write_recipe({"criteria": {"margin": "0.5%", "looks": [3, 5, 8], "endpoint": "final"}})
    )
    criteria = study.criteria_of(plan)
    assert criteria.burn_in_step == 2
    assert study.criteria_from_json(json.loads(json.dumps(criteria.to_json()))).digest() == criteria.digest()
