"""Forks: an unforked continuation equals the parent, and nothing wrong can be a parent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from fp8parity import fork, matrix, runner, study
from fp8parity.data import batch_digest, open_tokens
from fp8parity.errors import Fp8ParityError, UsageError
from fp8parity.followup import write_followup
from fp8parity.fork_state import digests, load_weights, read_state
from fp8parity.judging import judge_study, write_results
from fp8parity.model import DecoderLM, parameters_digest
from fp8parity.own_spec import HfModelSpec
from fp8parity.plan import plan_document
from fp8parity.study_run import run_study
from fp8parity.token_meta import read_meta
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.mlflow_content import params_of
from fp8parity_analysis.store import read_run

from .conftest import TINY, WriteRecipe, merged
from .test_checkpointing import interrupt_at
from .test_followup import health_of

STEPS, AT, TOKENS_PER_STEP = 12, 6, 64
PARENT: dict[str, Any] = {
    "name": "parents",
    "axes": None,
    "null": None,
    "base": {"train": {"steps": STEPS}},
    "runtime": {"keep_checkpoints": [AT, STEPS]},
}
CONTINUATION: dict[str, Any] = {
    "name": "fork",
    "axes": {"precision.recipe": ["rowwise"]},
    "null": None,
    "base": {
        "train": {"steps": STEPS - AT},
        "fork_from": {"run": "parents/runs/*-s{seed}-bf16-*", "step": AT, "schedule": "continue"},
    },
}
Fork = Callable[..., dict[str, Path]]


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Return a folder with a finished study of two parents, `parents/`, and the last state of each as it was."""
    folder = tmp_path_factory.mktemp("parents")
    recipe = merged(TINY, {"base": {"data": {"path": str(corpus)}}})
    (folder / "parents.yaml").write_text(yaml.safe_dump(merged(recipe, PARENT), sort_keys=False))
    for run_dir in study.lay_out(matrix.read(folder / "parents.yaml"), folder / "parents"):
        assert runner.train(run_dir) == 0
    return folder


@pytest.fixture
def forked(write_recipe: WriteRecipe, tmp_path: Path, parents: Path) -> Fork:
    """Return a function that lays out a fork of the parents and gives its run directories by `arm-seed`."""
    shutil.copytree(parents / "parents", tmp_path / "parents")

    def lay(changes: dict[str, Any] | None = None, out: str = "fork") -> dict[str, Path]:
        plan = matrix.read(write_recipe(merged(CONTINUATION, changes or {})))
        dirs = study.lay_out(plan, tmp_path / out)
        return {f"{run.arm}-{run.spec.seed}": path for run, path in zip(plan.runs, dirs, strict=True)}

    return lay


def parent_of(folder: Path, seed: int) -> Path:
    return next((folder / "parents" / "runs").glob(f"*-s{seed}-bf16-*"))


def numbers(run_dir: Path, since: int = 0, counted_from: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return curve and evaluations after step `since`, steps and tokens counted from `counted_from`."""
    run = read_run(run_dir)
    curve = run.curve[run.curve["step"] > since].drop(columns=["step_time", "precision"], errors="ignore")
    evals = run.evals[run.evals["step"] > since].reset_index(drop=True)
    curve = curve.reset_index(drop=True)
    curve["step"] -= counted_from
    curve["tokens"] -= counted_from * TOKENS_PER_STEP
    evals["step"] -= counted_from
    return curve, evals


def assert_equal_numbers(a: tuple[pd.DataFrame, pd.DataFrame], b: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    assert len(a[0])
    assert len(a[1])
    for left, right in zip(a, b, strict=True):
        pd.testing.assert_frame_equal(left, right, check_exact=True)


def hand_over(checkpoint: Path, run_dir: Path) -> None:
    """Give a run another's checkpoint, with the rows before it, as if its own: the oracle of every continuation."""
    document = torch.load(checkpoint, map_location="cpu", weights_only=False)
    spec = runner.read_order(run_dir).spec
    document["fp8parity"]["spec_hash"] = spec.hash()
    document["callbacks"] = {k: v for k, v in document["callbacks"].items() if "PhaseLog" not in k}
    (run_dir / schema.CHECKPOINT_DIR).mkdir(exist_ok=True)
    torch.save(document, run_dir / schema.CHECKPOINT_DIR / checkpoint.name)
    for stream in (schema.CURVE_STREAM, schema.EVAL_STREAM):
        shutil.copy(checkpoint.parent.parent / stream, run_dir)


def test_an_unforked_continuation_equals_the_parent(forked: Fork, parents: Path) -> None:
    run_dir = forked({"runtime": {"keep_checkpoints": [STEPS - AT]}})["bf16-0"]
    assert runner.train(run_dir) == 0
    parent = parent_of(parents, 0)
    assert_equal_numbers(numbers(run_dir), numbers(parent, since=AT, counted_from=AT))
    ends = [
        digests(read_state(fork.kept_file(path, step)))
        for path, step in ((run_dir, STEPS - AT), (parent, STEPS))
    ]
    assert ends[0] == ends[1]


def test_an_fp8_fork_is_the_fp8_run_that_is_handed_the_parents_state(
    forked: Fork, lay_out: Callable[..., dict[str, Path]], parents: Path
) -> None:
    changes = {"axes": {"precision.recipe": ["rowwise"]}, "base": {"train": {"steps": STEPS}}, "null": None}
    oracle = lay_out(changes, "oracle")["rowwise-0"]
    hand_over(fork.kept_file(parent_of(parents, 0), AT), oracle)
    assert runner.train(oracle) == 0
    run_dir = forked()["rowwise-0"]
    assert runner.train(run_dir) == 0
    assert_equal_numbers(numbers(run_dir), numbers(oracle, since=AT, counted_from=AT))
    assert not numbers(run_dir)[0]["train_loss"].equals(
        numbers(parent_of(parents, 0), AT, AT)[0]["train_loss"]
    )


def test_a_fork_anneals_on_its_own_schedule_and_resumes(
    forked: Fork, monkeypatch: pytest.MonkeyPatch, parents: Path
) -> None:
    anneal = {
        "base": {
            "optim": {"schedule": "wsd", "decay_fraction": 1.0, "min_lr_ratio": 0.0, "warmup_steps": 0},
            "fork_from": {"schedule": "restart"},
            "train": {"steps": 5},
        },
        "runtime": {"checkpoint_every": 2},
    }
    whole, killed = forked(anneal, "whole")["bf16-1"], forked(anneal, "killed")["bf16-1"]
    assert runner.train(whole) == 0
    assert list(numbers(whole)[0]["lr"]) == pytest.approx([0.003, 0.00225, 0.0015, 0.00075, 0.0], abs=1e-12)
    interrupt_at(killed, 3, monkeypatch)
    assert runner.train(killed) == 0
    assert_equal_numbers(numbers(whole), numbers(killed))
    manifests = [read_run(path).manifest or {} for path in (whole, killed)]
    assert [manifest["resumes"] for manifest in manifests] == [0, 1]
    assert manifests[0]["init_digest"] == manifests[1]["init_digest"]
    model = DecoderLM(runner.read_order(whole).spec.model, manifests[0]["model"]["vocab_rows"])
    load_weights(model, read_state(fork.kept_file(parent_of(parents, 1), AT)))
    assert manifests[0]["init_digest"] == parameters_digest(model)


def batches(run_dir: Path, count: int) -> list[str]:
    """Return the digests of the first batches that a run would read."""
    order = runner.read_order(run_dir)
    tokens, meta = open_tokens(order.data_path)
    plan = runner._batch_plan(order.spec, tokens, meta)
    return [batch_digest(plan.rows(step)) for step in range(count)]


def test_one_parent_for_all_seeds_differs_in_the_order_of_data_only(forked: Fork, parents: Path) -> None:
    parent = parent_of(parents, 0)
    dirs = forked({"base": {"fork_from": {"run": f"parents/runs/{parent.name}"}}})
    specs = [runner.read_order(dirs[f"bf16-{seed}"]).spec for seed in (0, 1)]
    assert specs[0].parent == specs[1].parent
    own, other = (batches(dirs[f"bf16-{seed}"], 4) for seed in (0, 1))
    assert "Seeds that share a parent" in " ".join(fork.fork_words(specs))
    assert own == list(numbers(parent, since=AT)[0]["batch_digest"])[:4]
    assert not set(own) & set(other)


def test_a_fork_of_a_fork_goes_on_where_the_first_stood(forked: Fork, tmp_path: Path, parents: Path) -> None:
    first = forked({"base": {"train": {"steps": 3}}, "runtime": {"keep_checkpoints": [3]}}, "first")["bf16-0"]
    runner.train(first)
    state = runner.read_order(first).spec
    assert (state.batches_before, state.schedule_before) == (AT, AT)
    source = {"run": f"first/runs/{first.name}", "step": 3}
    changes = {"seeds": [0], "base": {"train": {"steps": 3}, "fork_from": source}}
    second = forked(changes, "second")["bf16-0"]
    order = runner.read_order(second).spec
    assert (order.batches_before, order.schedule_before) == (AT + 3, AT + 3)
    assert batches(second, 3) == list(numbers(parent_of(parents, 0), since=AT + 3)[0]["batch_digest"])


def test_the_step_is_an_axis_and_the_state_is_in_the_name(forked: Fork, tmp_path: Path) -> None:
    dirs = forked({"axes": {"fork_from.step": [AT, STEPS]}, "seeds": [0]})
    assert len(dirs) == 2  # by arm and seed: the two groups share these keys
    plan = matrix.read(tmp_path / "recipe.yaml")
    assert {run.group for run in plan.runs} == {f"d32l3-step={AT}", f"d32l3-step={STEPS}"}
    assert len({run.run_id for run in plan.runs}) == len(plan.runs) == 4
    moved = tmp_path / "elsewhere"
    (tmp_path / "parents").rename(moved)
    again = forked_again(tmp_path, {"run": "elsewhere/runs/*-s{seed}-bf16-*"})
    assert [run.run_id for run in again.runs] == [
        run.run_id for run in plan.runs
    ]  # where it lies is no identity
    side = fork.side_file(fork.kept_file(next((moved / "runs").glob("*-s0-bf16-*")), AT))
    write_json(side, {**read_json(side), "optimizer_sha256": "0" * 64})
    other = forked_again(tmp_path, {"run": "elsewhere/runs/*-s{seed}-bf16-*"})
    assert sum(a.run_id != b.run_id for a, b in zip(again.runs, other.runs, strict=True)) == 2


def forked_again(folder: Path, changes: dict[str, Any]) -> matrix.Matrix:
    """Read the recipe again with another `fork_from`."""
    path = folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["base"]["fork_from"].update(changes)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return matrix.read(path)


def name_an_fp8_run(folder: Path) -> None:
    path = parent_of(folder, 0) / schema.SPEC_FILE
    document = read_json(path)
    document["spec"]["precision"]["recipe"] = "rowwise"
    write_json(path, document)


def damage(folder: Path) -> None:
    path = fork.kept_file(parent_of(folder, 0), AT)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = fork.kept_file(parent_of(folder, 0), AT)
    path.write_bytes(path.read_bytes()[:100])


def forget_the_document(folder: Path) -> None:
    fork.side_file(fork.kept_file(parent_of(folder, 0), AT)).unlink()


def swap_the_document(folder: Path) -> None:
    one, two = (fork.side_file(fork.kept_file(parent_of(folder, seed), AT)) for seed in (0, 1))
    write_json(one, read_json(two))


def other_data(folder: Path) -> None:
    path = fork.side_file(fork.kept_file(parent_of(folder, 0), AT))
    write_json(path, {**read_json(path), "data_sha256": "f" * 64})


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("plant", "changes", "said"),
    [
        (nothing, {"fork_from": {"run": "absent"}}, "base.fork_from.run: .*absent does not exist; name the dir"),
        (nothing, {"fork_from": {"run": "parents"}}, "is a study directory, not a run; write parents/runs/NAME"),
        (nothing, {"fork_from": {"run": "parents/runs"}}, "parents/runs holds no spec.json"),
        (nothing, {"fork_from": {"run": "parents/runs/x*"}}, "x\\* matches no BF16 control run"),
        (nothing, {"fork_from": {"run": "parents/runs/*"}}, "matches 2 control runs .*write .*{seed}"),
        (nothing, {"fork_from": {"step": 5}}, "base.fork_from.step: .*no kept checkpoint of step 5 \\(it kept 6, 12"),
        (nothing, {"fork_from": {"step": 5}}, "or add it to runtime.keep_checkpoints of the parent's recipe file"),
        (nothing, {"fork_from": {"step": 13}}, "base.fork_from.step: 13 is beyond the 12 steps"),
        (nothing, {"fork_from": {"step": 0}}, "base.fork_from.step: .*greater than or equal to 1"),
        (nothing, {"fork_from": {"schedule": "own"}}, "base.fork_from.schedule: got 'own'; .*restart, continue"),
        (nothing, {"fork_from": {"run": None}}, "base.fork_from.run: is missing"),
        (nothing, {"fork_from": {"parent": "x"}}, "base.fork_from.parent: unknown key"),
        (nothing, {"fork_from": {"run": "parents/runs/[!{seed}]*-s1-bf16-*"}}, "for seed 0, but that run has seed 1"),
        (nothing, {"model": {"dim": 64}}, "base.model.dim: model.dim: 64, but the parent was trained with 32"),
        (nothing, {"train": {"batch_size": 8}}, "base.train.batch_size: .*write batch_size: 4"),
        (nothing, {"train": {"compute": "bf16-true"}}, "base.train.compute: .*write compute: bf16-mixed"),
        (nothing, {"data": {"source": "python-sources", "path": None}}, "base.data.source: data: is source: python-s"),
        (name_an_fp8_run, {}, "is an FP8 run \\(rowwise\\).*name the BF16 control"),
        (damage, {}, "step-000000006.ckpt is damaged.*take another kept step"),
        (cut, {}, "step-000000006.ckpt is damaged"),
        (forget_the_document, {}, "has no kept checkpoint of step 6 \\(it kept 12\\)"),
        (swap_the_document, {}, "belongs to another run or step"),
        (other_data, {}, "base.data.path: the token file's sha256 is .*but the parent"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_parent_is_refused_at_planning(
    forked: Fork, write_recipe: WriteRecipe, tmp_path: Path, plant: Any, changes: dict[str, Any], said: str
) -> None:
    plant(tmp_path)
    path = write_recipe(merged(CONTINUATION, {"base": changes}))
    with pytest.raises(UsageError) as caught:
        matrix.read(path)
    lines = str(caught.value).splitlines()
    assert any(
        re.match(rf"{re.escape(str(path))}:\d+: .*", line) and re.search(said, line) for line in lines
    ), lines


def test_another_kind_of_model_is_no_continuation(forked: Fork, tmp_path: Path) -> None:
    spec = runner.read_order(forked({"seeds": [0]})["bf16-0"]).spec
    other = HfModelSpec(kind="hf", model_type="gpt2")
    found = list(fork.Parents(tmp_path).problems(spec.model_copy(update={"model": other}), 0, None))
    assert ("model", "kind") in [place for place, _ in found]
    assert any("model.kind: hf, but the parent's model is of kind decoder" in text for _, text in found)


def test_a_state_that_changed_after_planning_never_trains(forked: Fork, tmp_path: Path) -> None:
    run_dir = forked()["rowwise-0"]
    kept = [fork.kept_file(parent_of(tmp_path, 0), step) for step in (AT, STEPS)]
    kept[0].write_bytes(kept[1].read_bytes())
    with pytest.raises(UsageError, match="holds other weights than this fork was planned with"):
        runner.train(run_dir)
    kept[0].unlink()
    with pytest.raises(UsageError, match="fork_from.step: .*cannot be read"):
        runner.train(run_dir)
    assert len(read_run(run_dir).curve) == 0


def test_packed_sources_must_be_the_parents(forked: Fork) -> None:
    spec = runner.read_order(forked()["bf16-0"]).spec
    assert spec.parent is not None
    fork.require_same_data(spec, spec.parent.data_sha256)
    with pytest.raises(UsageError, match="data: the token file's sha256 is eeeeeeeeeeeeeeee"):
        fork.require_same_data(spec, "e" * 64)


def test_only_what_is_trained_can_be_kept(write_recipe: WriteRecipe) -> None:
    with pytest.raises(UsageError, match="runtime.keep_checkpoints: no run reaches step 25 .*train.steps 24"):
        matrix.read(write_recipe({"runtime": {"keep_checkpoints": [3, 25]}}))


def test_keeping_renames_no_run_and_leaves_fp8_arms_alone(lay_out: Callable[..., dict[str, Path]]) -> None:
    plain, keeping = lay_out(out="plain"), lay_out({"runtime": {"keep_checkpoints": [3]}}, "keeping")
    assert [path.name for path in plain.values()] == [path.name for path in keeping.values()]
    kept = {
        name for name, path in keeping.items() if "keep_checkpoints" in read_json(path / schema.SPEC_FILE)
    }
    assert kept == {"bf16-0", "bf16-1"}


def test_plan_and_verdict_say_that_the_study_is_forked(forked: Fork, tmp_path: Path, parents: Path) -> None:
    changes = {"base": {"train": {"eval_every": 1, "steps": 4}, "precision": {"switch_at": 2}}}
    dirs = forked(changes)
    document = plan_document(matrix.read(tmp_path / "recipe.yaml"))
    words = "\n".join(document["words"])
    names = [parent_of(parents, seed).name for seed in (0, 1)]
    assert f"Forked from {names[0]} at step {AT} (seed 0); {names[1]} at step {AT} (seed 1)." in words
    assert "Seeds that share a parent" not in words
    assert "rowwise-switch_at=2: FP8 up to step 2 of 4, BF16 from the next step on." in words
    for run_dir in dirs.values():
        assert runner.train(run_dir) == 0
    judgement = judge_study(tmp_path / "fork", {})
    verdict = next(item for item in judgement.verdicts if item.recipe == "rowwise-switch_at=2")
    assert verdict.outcome.value not in ("INVALID", "IDENTICAL"), verdict.reasons
    assert verdict.token_cost is None
    assert verdict.horizon_tokens == 4 * TOKENS_PER_STEP
    told = f"forked: both arms start from step {AT} of the BF16 run {names[0]}, {names[1]}; steps, tokens and gaps"
    assert any(told in warning for warning in verdict.warnings)
    assert not any("all seeds start from one state" in warning for warning in verdict.warnings)
    evidence = next(item for item in judgement.evidence if item.recipe == verdict.recipe)
    assert evidence.steps == (1, 2, 3, 4)  # the forked span and nothing else
    write_results(tmp_path / "fork", judgement)
    params = params_of(read_json(dirs["rowwise-switch_at=2-1"] / schema.SPEC_FILE), many_groups=False)
    assert (params["switch_at"], params["fork_from.step"], params["parent.run_id"]) == (
        "2",
        str(AT),
        names[1],
    )
    page = (tmp_path / "fork" / schema.REPORT_FILE).read_text()
    assert f"{names[1]}, step {AT} (weights " in page
    assert "About training in FP8 from the start" in page
    assert "FP8 up to step 2, BF16 from the next step on" in page


def test_a_follow_up_of_a_fork_finds_the_parent_from_its_own_place(forked: Fork, tmp_path: Path) -> None:
    axes = {"precision.recipe": ["rowwise"], "fork_from.step": [AT, STEPS], "precision.switch_at": [None, 2]}
    run_dir = forked({"axes": axes})["rowwise-0"]
    spec = read_json(run_dir / schema.SPEC_FILE)["spec"]
    target = tmp_path / "new" / "next.yaml"
    write_followup(tmp_path / "fork", health_of("rowwise", "blocks.1.ffn.down_proj"), spec, target)
    runs = matrix.read(target).runs
    assert {run.spec.parent.run_id for run in runs if run.spec.parent and run.spec.seed == 0} == {
        spec["parent"]["run_id"]
    }
    assert run_dir.name.rpartition("-")[2] in {run.run_id.rpartition("-")[2] for run in runs}


def test_a_study_of_parents_is_trained_and_not_judged(
    write_recipe: WriteRecipe, tmp_path: Path, parents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(PARENT)
    plan = matrix.read(path)
    assert not plan.compares
    assert "this study trains parents of forks" in plan_document(plan)["words"][-1]
    shutil.copytree(parents / "parents", tmp_path / "out")
    assert run_study(path, tmp_path / "out", slots=1, any_verdict=False) == 0
    assert f"kept {AT}, {STEPS}" in capsys.readouterr().out.replace("\n", " ")
    fork.kept_file(next((tmp_path / "out" / "runs").glob("*-s1-*")), AT).unlink()
    with pytest.raises(Fp8ParityError, match=f"no checkpoint of step {AT} was kept"):
        run_study(path, tmp_path / "out", slots=1, any_verdict=False)


def test_a_fork_reads_the_split_of_its_parent(tmp_path: Path, corpus: Path) -> None:
    meta = read_meta(corpus)
    run_dir = tmp_path / "parent"
    run_dir.mkdir()
    checkpoint = fork.kept_file(run_dir, 5)
    write_json(run_dir / schema.SPEC_FILE, {})
    study.require_same_split(checkpoint, meta)  # a parent of before says nothing of it
    write_json(run_dir / schema.SPEC_FILE, {schema.DATA_SPLIT: meta.reading})
    study.require_same_split(checkpoint, meta)
    with pytest.raises(
        UsageError, match=r"data: train_tokens is 7, and was \d+ when the parent parent was trained"
    ):
        study.require_same_split(checkpoint, replace(meta, train_tokens=7))
