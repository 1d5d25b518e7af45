from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8parity import matrix, study
from fp8parity.data import file_sha256
from fp8parity.errors import UsageError
from fp8parity.process import LOCK_FILE
from fp8parity.token_meta import read_meta, side_file
from fp8parity.yaml_marks import load
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
        assert tuple(spec) == (
            *schema.SPEC_KEYS,
            "probe",
            "data_sha256",
            schema.DATA_SPLIT,
            "checkpoint_share",
        )
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


ROWWISE: dict[str, object] = {"precision.recipe": ["rowwise"]}
NAMED = (
    "because precision.keep_first varies in the file and not there, precision.keep_last varies in the file"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {**ROWWISE, "precision.keep": [4, 2]}}, f"arm rowwise would be named rowwise-n4, {NAMED}"),
        (
            {"include": [{"precision.recipe": "rowwise", "precision.keep": 2}]},
            f"arm rowwise would be named rowwise-n4, {NAMED}",
        ),
        (
            {"axes": {**ROWWISE, "optim.lr": [0.003, 0.01]}},
            "group d32l3 would be named d32l3-lr=0.003, because optim.lr varies in the file and not there; names say",
        ),
        (
            {"null": [{"kind": "rerun"}, {"kind": "reorder"}]},
            "replica 1 is a reorder there and a rerun in the file: replicas are numbered .* at the end, or use",
        ),
        ({"seeds": [0]}, "no run of arm .*, seed 1 any more; what a study holds stays in its file"),
        ({"axes": {"precision.recipe": ["tensorwise"]}}, "no run of arm rowwise, seed 0 any more"),
    ],
)
def test_a_refused_change_says_what_changed(
    lay_out: LayOut, changes: dict[str, object], message: str
) -> None:
    lay_out({"axes": ROWWISE})
    with pytest.raises(UsageError, match=rf"{message}.*another --out directory$"):
        lay_out({"axes": ROWWISE, **changes})


def test_seeds_recipes_and_null_entries_at_the_end_are_taken(lay_out: LayOut) -> None:
    first = lay_out({"axes": ROWWISE})
    more = lay_out({"seeds": [0, 1, 2], "null": [{"kind": "reorder"}, {"kind": "rerun"}]})
    assert set(first.values()) < set(more.values()) | {*(Path(p) for p in first.values())}
    assert {"tensorwise-0", "rowwise-2"} <= set(more)


@pytest.mark.parametrize("criteria", [{"looks": [3, 5]}, {"anytime": True}])
def test_looks_take_no_seed_below_those_they_took(lay_out: LayOut, criteria: dict[str, object]) -> None:
    lay_out({"seeds": [5, 6, 7], "criteria": criteria})
    with pytest.raises(
        UsageError,
        match=r"recipe.yaml: seeds: seed 0, 4 is new and below seed 7 .*; number new seeds from 8 up, or use",
    ):
        lay_out({"seeds": [5, 6, 7, 4, 0, 8], "criteria": criteria})
    more = lay_out({"seeds": [8, 5, 6, 7], "criteria": criteria})
    assert "rowwise-8" in more
    axes = {"precision.recipe": ["tensorwise", "rowwise", "rowwise_with_gw_hp"]}
    assert "rowwise_with_gw_hp-5" in lay_out({"seeds": [5, 6, 7, 8], "criteria": criteria, "axes": axes})


def test_without_looks_any_seed_is_taken(lay_out: LayOut) -> None:
    lay_out({"seeds": [5, 6]})
    assert "rowwise-0" in lay_out({"seeds": [0, 5, 6]})


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


def test_a_study_file_that_was_never_finished_is_no_other_study(lay_out: LayOut, tmp_path: Path) -> None:
    out = tmp_path / "study"
    out.mkdir()
    (out / "study.json.123.tmp").write_text("{")
    lay_out()
    assert not list(out.glob("*.tmp"))
    (out / schema.STUDY_FILE).unlink()
    with pytest.raises(UsageError, match="is not empty and holds no fp8parity study"):
        lay_out()


def test_a_finished_run_keeps_its_specification(lay_out: LayOut) -> None:
    finished, waiting = list(lay_out().values())[:2]
    (finished / schema.MANIFEST_FILE).write_text("{}")
    before = read(finished / schema.SPEC_FILE)
    lay_out({"probe": {"every": 5}})
    assert read(finished / schema.SPEC_FILE) == before
    assert read(waiting / schema.SPEC_FILE)["probe"] != before["probe"]


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
    ("train", "key", "message"),
    [
        ({"batch_size": 4096}, "batch_size", "training tokens make .* fewer than train.batch_size 4096; use a larger"),
        ({"eval_sequences": 9999}, "eval_sequences", "held-out tokens make .* 9999; pack it again with a larger --h"),
        ({"context": 65536}, "context", "training tokens make 0 windows of train.context 65536"),
    ],
)  # fmt: skip
def test_short_corpus_is_refused_before_training(
    write_recipe: WriteRecipe, train: dict[str, int], key: str, message: str
) -> None:
    recipe = write_recipe({"base": {"train": train}})
    line = load(recipe).line(("base", "train", key))
    with pytest.raises(
        UsageError, match=rf"recipe.yaml:{line}: base.train.{key}: .*corpus.bin: \d+ {message}"
    ):
        matrix.read(recipe)


def test_packed_data_that_are_too_short_are_refused_too(lay_out: LayOut) -> None:
    sources = {"source": "python-sources", "path": None, "max_mib": 0.1, "held_out_fraction": 0.3}
    with pytest.raises(UsageError, match=r"train.batch_size: .*python-sources.*bin: .* fewer than"):
        lay_out({"base": {"data": sources, "train": {"batch_size": 40960}}})


def test_python_sources_are_packed_once(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    changes = {"base": {"data": {"source": "python-sources", "path": None, "max_mib": 0.5}}}
    plan = matrix.read(write_recipe(changes))
    study.lay_out(plan, tmp_path / "s")
    (token_file,) = (tmp_path / "s" / schema.DATA_DIR).glob("*.bin")
    before = token_file.stat().st_mtime_ns
    study.lay_out(plan, tmp_path / "s")
    assert token_file.stat().st_mtime_ns == before
    packed = token_file.read_bytes()
    for lost in (side_file(token_file).unlink, lambda: side_file(token_file).write_text("")):
        lost()  # killed between the two renames, or a power cut after them
        study.lay_out(plan, tmp_path / "s")
        assert read_meta(token_file).sha256 == file_sha256(token_file)
        assert token_file.read_bytes() == packed


def move_the_split(corpus: Path, folder: Path) -> Path:
    """Copy the corpus into `folder` and return it; `edit_split` of it leaves the .bin as it is."""
    for path in (corpus, side_file(corpus)):
        shutil.copy(path, folder / f"own-{path.name}")
    return folder / f"own-{corpus.name}"


def edit_split(token_file: Path) -> None:
    document = json.loads(side_file(token_file).read_text())
    side_file(token_file).write_text(json.dumps({**document, "train_tokens": document["n_tokens"] // 2}))


@pytest.mark.parametrize("begun", [schema.CURVE_STREAM, schema.MANIFEST_FILE])
def test_the_split_is_that_of_the_runs_begun(
    lay_out: LayOut, corpus: Path, tmp_path: Path, begun: str
) -> None:
    own = move_the_split(corpus, tmp_path)
    changes = {"base": {"data": {"path": own.name}}}
    run_dir = lay_out(changes)["bf16-0"]
    spec = read(run_dir / schema.SPEC_FILE)
    assert spec[schema.DATA_SPLIT] == read_meta(own).reading
    (run_dir / begun).write_text(json.dumps(spec) + "\n")
    edit_split(own)
    with pytest.raises(
        UsageError, match=r"own-corpus.json: train_tokens is \d+, and was \d+ when d32l3-s0-bf16-\w+ of"
    ):
        lay_out(changes)
    older = {key: value for key, value in spec.items() if key != schema.DATA_SPLIT}
    for name in (begun, schema.SPEC_FILE):
        (run_dir / name).write_text(json.dumps(older))
    lay_out(changes)  # a run of before has no record of it


def test_a_worker_reads_the_split_it_was_laid_out_with(lay_out: LayOut, corpus: Path, tmp_path: Path) -> None:
    from fp8parity import runner

    own = move_the_split(corpus, tmp_path)
    run_dir = lay_out({"base": {"data": {"path": own.name}}})["bf16-0"]
    edit_split(own)
    with pytest.raises(
        UsageError, match=r"own-corpus.json: train_tokens is \d+, and was \d+ when this run was laid"
    ):
        runner.train(run_dir)


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
