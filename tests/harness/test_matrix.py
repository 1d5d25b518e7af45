from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8parity import matrix
from fp8parity.errors import UsageError
from fp8parity.shapes import linear_shapes
from fp8parity.spec import ModelSpec
from fp8parity.yaml_marks import load
from fp8parity_analysis import schema

from .conftest import WriteRecipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_control_is_shared_by_all_arms(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"axes": {"precision.keep": [2, 4]}}))
    assert Counter(run.role for run in plan.runs) == {"control": 2, "null": 2, "test": 8}
    assert plan.pairs == 8
    assert {run.arm for run in plan.runs if run.role == "test"} == {
        "tensorwise-n2", "tensorwise-n4", "rowwise-n2", "rowwise-n4",
    }  # fmt: skip
    assert {run.arm for run in plan.runs if run.role == "null"} == {schema.NULL_ARM}


def test_pairs_differ_in_precision_only(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"axes": {"optim.lr": [0.001, 0.002]}}))
    controls = {(r.group, r.spec.seed): r.spec for r in plan.runs if r.role == "control"}
    assert len(controls) == 4
    for run in plan.runs:
        control = controls[run.group, run.spec.seed]
        same = {"precision": control.precision, "replica": 0, "replica_kind": "none"}
        assert run.spec.model_copy(update=same) == control
        assert (run.spec.precision != control.precision) == (run.role == "test")


def test_run_ids_are_unique_readable_and_content_addressed(write_recipe: WriteRecipe) -> None:
    first = matrix.read(write_recipe())
    ids = [run.run_id for run in first.runs]
    assert len(set(ids)) == len(ids)
    assert ids[0].startswith("d32l3-s0-bf16-")
    assert [run.run_id for run in matrix.read(write_recipe()).runs] == ids
    assert not set(ids) & {
        r.run_id for r in matrix.read(write_recipe({"base": {"optim": {"lr": 0.01}}})).runs
    }


def test_criteria_and_runtime_do_not_rename_runs(write_recipe: WriteRecipe) -> None:
    ids = [run.run_id for run in matrix.read(write_recipe()).runs]
    changed = write_recipe({"criteria": {"margin": "1%"}, "runtime": {"slots": 7, "checkpoint_every": 3}})
    assert [run.run_id for run in matrix.read(changed).runs] == ids


def test_exclude_and_include(write_recipe: WriteRecipe) -> None:
    changes: dict[str, Any] = {
        "axes": {"precision.keep": [2, 4]},
        "exclude": [{"precision.recipe": "rowwise", "precision.keep": 2}],
        "include": [{"precision.recipe": "rowwise", "precision.keep": 3}],
    }
    arms = {run.arm for run in matrix.read(write_recipe(changes)).runs if run.role == "test"}
    assert arms == {"tensorwise-n2", "tensorwise-n4", "rowwise-n4", "rowwise-n3"}


def test_excluding_everything_is_an_error(write_recipe: WriteRecipe) -> None:
    path = write_recipe({"exclude": [{"precision.recipe": "rowwise"}, {"precision.recipe": "tensorwise"}]})
    with pytest.raises(UsageError, match="exclude: excludes every cell"):
        matrix.read(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"exclude": [{"precision.recipe": "rowise"}]},
            "precision.recipe: 'rowise' is no value of this axis",
        ),
        ({"exclude": [{"optim.lr": 0.1}]}, "exclude.0.optim.lr: is no axis, so this entry excludes nothing"),
        (
            {"null": [{"kind": "rerun", "arm": "test", "seeds": [9]}]},
            "null.0.seeds: seeds [9] have no run of an FP8 arm to repeat",
        ),
        ({"criteria": {"looks": [5, 3]}}, "criteria.looks: (5, 3) must increase"),
        (
            {"criteria": {"margin": 0.7}},
            "criteria.margin: 0.7 is outside (0, 0.05]; write 0.7% if per cent were meant",
        ),
        (
            {"criteria": {"looks": [3, 5], "anytime": True}},
            "criteria.anytime: true and looks are two answers",
        ),
        ({"seeds": [2**32]}, "seeds [4294967296] are beyond 2^32 - 1"),
    ],
)
def test_what_would_change_nothing_or_break_later_has_its_line(
    write_recipe: WriteRecipe, changes: dict[str, Any], said: str
) -> None:
    path = write_recipe(changes)
    with pytest.raises(UsageError) as caught:
        matrix.read(path)
    assert re.search(rf"^{re.escape(str(path))}:\d+: ", str(caught.value))
    assert said in str(caught.value)


def test_null_only_study(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"axes": None, "null": [{"kind": "rerun", "replicas": 3}]}))
    assert Counter(run.role for run in plan.runs) == {"control": 2, "null": 6}
    with pytest.raises(UsageError, match="nothing to compare"):
        matrix.read(write_recipe({"axes": None, "null": None}))


def test_null_arms_may_have_seeds_of_their_own(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"null": [{"kind": "reorder", "seeds": [0, 7]}]}))
    assert {r.spec.seed for r in plan.runs if r.role == "null"} == {0, 7}
    assert {r.spec.seed for r in plan.runs if r.role == "control"} == {0, 1, 7}
    assert {r.spec.seed for r in plan.runs if r.role == "test"} == {0, 1}


def test_replicas_of_the_test_arm(write_recipe: WriteRecipe) -> None:
    changes: dict[str, Any] = {
        "base": {"precision": {"backend": "reference"}},
        "null": [{"kind": "jitter", "arm": "test", "replicas": 2}, {"kind": "reorder"}],
        "axes": {"precision.recipe": ["tensorwise"]},
    }
    plan = matrix.read(write_recipe(changes))
    assert Counter((r.role, r.spec.replica_kind) for r in plan.runs) == {
        ("control", "none"): 2, ("null", "reorder"): 2, ("test", "none"): 2, ("test", "jitter"): 4,
    }  # fmt: skip
    assert plan.pairs == 2
    assert {r.arm for r in plan.runs if r.role == "test"} == {"tensorwise"}
    with pytest.raises(
        UsageError, match="jitter shifts the rounding grid of emulated FP8 casts, but backend torchao"
    ):
        matrix.read(write_recipe({**changes, "base": {}}))


def test_a_backend_of_its_own_needs_no_mention(write_recipe: WriteRecipe) -> None:
    extra = [{"precision.recipe": "blockwise", "precision.backend": "reference"}]
    arms = {r.arm for r in matrix.read(write_recipe({"include": extra})).runs if r.role == "test"}
    assert arms == {"tensorwise", "rowwise", "blockwise"}
    both = {"axes": {"precision.backend": ["torchao_float8", "reference"]}}
    arms = {r.arm for r in matrix.read(write_recipe(both)).runs if r.role == "test"}
    assert "rowwise-backend=reference" in arms


def test_arms_that_differ_in_special_characters_keep_apart(write_recipe: WriteRecipe) -> None:
    patterns = [["blocks.*.ffn.up_proj"], ["blocks.?.ffn.up_proj"]]
    axes = {"precision.recipe": ["rowwise"], "precision.exclude": patterns}
    runs = [r for r in matrix.read(write_recipe({"axes": axes})).runs if r.role == "test"]
    assert len({r.arm for r in runs}) == 2


def test_unknown_combination_of_recipe_and_backend(write_recipe: WriteRecipe) -> None:
    with pytest.raises(
        UsageError, match="torchao_float8 has no recipe blockwise .*write backend: torchao_blockwise"
    ):
        matrix.read(write_recipe({"axes": {"precision.recipe": ["blockwise"]}}))


def test_controls_come_before_their_tests(write_recipe: WriteRecipe) -> None:
    runs = matrix.read(write_recipe()).runs
    for seed in (0, 1):
        roles = [run.role for run in runs if run.spec.seed == seed]
        assert roles == sorted(roles, key=["control", "null", "test"].index)


def test_shape_rule_is_an_error_on_a_cpu_too(write_recipe: WriteRecipe) -> None:
    with pytest.raises(UsageError, match="GEMM output has N = 72, not a multiple of 16"):
        matrix.read(write_recipe({"base": {"model": {"ffn_dim": 72}}}))


def test_missing_token_file_is_named(write_recipe: WriteRecipe) -> None:
    with pytest.raises(UsageError, match=r"base.data.path: .*absent.bin: no such token file; make one with"):
        matrix.read(write_recipe({"base": {"data": {"path": "absent.bin"}}}))


PRESET: dict[str, Any] = {"dim": None, "n_layers": None, "n_heads": None, "n_kv_heads": None, "ffn_dim": None}


@pytest.mark.parametrize(
    ("key", "values", "named"),
    [
        ("fused_qkv", [False, True], {"0.7m-fused_qkv=False", "0.7m-fused_qkv=True"}),
        ("norm_eps", [1e-5, 1e-6], {"0.7m-norm_eps=1e-05", "0.7m-norm_eps=1e-06"}),
        ("n_layers", [4, 6], {"0.7m-n_layers=4", "0.7m-n_layers=6"}),
        ("vocab_size", [None, 288], {"0.7m-vocab_size=None", "0.7m-vocab_size=288"}),
        ("preset", ["0.7m", "4m"], {"0.7m", "4m"}),  # what a preset stands for needs no mention
    ],
)
def test_cells_of_one_preset_keep_apart(
    write_recipe: WriteRecipe, key: str, values: list[Any], named: set[str]
) -> None:
    changes = {"base": {"model": {**PRESET, "preset": "0.7m"}}, "axes": {f"model.{key}": values}}
    plan = matrix.read(write_recipe(changes))
    assert {run.group for run in plan.runs} == named
    places = Counter((r.group, r.arm, r.spec.seed, r.spec.replica) for r in plan.runs)
    assert set(places.values()) == {1}


def test_presets_keep_their_names_beside_another_key(write_recipe: WriteRecipe) -> None:
    include = [{"precision.recipe": "rowwise", "model.preset": "4m", "model.tied_head": True}]
    changes = {"base": {"model": {**PRESET, "preset": "0.7m"}}, "include": include}
    assert {run.group for run in matrix.read(write_recipe(changes)).runs} == {"0.7m", "4m"}


def test_cells_under_one_name_are_refused(write_recipe: WriteRecipe) -> None:
    clash = [["re:q_proj|x,*k_proj"], ["re:q_proj|x", "*k_proj"]]  # the same text once joined by commas
    axes = {"precision.recipe": ["rowwise"], "precision.exclude": clash}
    with pytest.raises(
        UsageError, match=r"axes: two different cells would both be named d32l3, rowwise-exclude="
    ):
        matrix.read(write_recipe({"axes": axes, "base": {"precision": {"keep": 0}}}))


def test_long_lists_of_layers_make_short_names(write_recipe: WriteRecipe) -> None:
    model = ModelSpec.model_validate({"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64})
    layers = [shape.fqn for shape in linear_shapes(model, 64) if shape.fqn.startswith("blocks.")]
    assert len(layers) == 14
    axes = {"precision.recipe": ["rowwise"], "precision.exclude": [[], layers[:2], layers, layers[:-1]]}
    plan = matrix.read(write_recipe({"axes": axes, "base": {"precision": {"keep": 0}}}))
    runs = [r for r in plan.runs if r.role == "test" and r.spec.seed == 0]
    assert [r.arm for r in runs][:2] == [
        "rowwise-exclude=none-e3b0", "rowwise-exclude=blocks.0.attn.q_proj,blocks.0.attn.k_proj",
    ]  # fmt: skip
    assert len({r.arm for r in runs}) == 4
    long = r"rowwise-exclude=blocks\.0\.attn\.q_proj,blocks\.0\.at-[0-9a-f]{8}"
    assert all(re.fullmatch(long, r.arm) for r in runs[2:])
    assert max(len(r.run_id) for r in runs) < 120


def test_names_that_no_directory_can_have_are_refused(write_recipe: WriteRecipe) -> None:
    keys = ("lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm", "min_lr_ratio", "decay_fraction")
    axes = {f"optim.{key}": [0.12345678901234567, 0.1234567890123456] for key in keys}
    path = write_recipe({"axes": {"precision.recipe": ["rowwise"], **axes}, "seeds": [0]})
    with pytest.raises(
        UsageError, match=r"axes: the runs of d32l3-lr=0.1.* named by more than the 255 bytes"
    ):
        matrix.read(path)


def test_reorder_of_one_row_is_no_null(write_recipe: WriteRecipe) -> None:
    path = write_recipe({"base": {"train": {"batch_size": 1}}})
    with pytest.raises(
        UsageError, match=r":\d+: null.0.kind: reorder permutes .*batch_size is 1: .*; write a larger"
    ):
        matrix.read(path)
    matrix.read(write_recipe({"base": {"train": {"batch_size": 1}}, "null": [{"kind": "rerun"}]}))


def test_what_the_control_keeps_has_its_line(write_recipe: WriteRecipe) -> None:
    path = write_recipe({"control": {"precision.recipe": "bf16", "precision.exclude": ["nothing*"]}})
    line = load(path).line(("control", "precision.exclude"))
    with pytest.raises(UsageError, match=rf"recipe.yaml:{line}: control.precision.exclude: .*nothing\*"):
        matrix.read(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    plan = matrix.read(path)
    assert plan.runs
    assert plan.name == path.stem


def test_a_thousand_cells_without_torch(tmp_path: Path, write_recipe: WriteRecipe) -> None:
    path = write_recipe({"axes": {"optim.lr": [0.001 + i / 1e5 for i in range(250)]}, "seeds": [0]})
    code = (
        "import sys; from pathlib import Path; from fp8parity import matrix;"
        f"print(len(matrix.read(Path({str(path)!r})).runs), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1000", "False"]


def test_spec_document_has_the_contract_keys(write_recipe: WriteRecipe) -> None:
    run = matrix.read(write_recipe()).runs[0]
    assert tuple(run.to_json("s", "../x.bin", 3)) == (*schema.SPEC_KEYS, "probe")
    assert yaml.safe_load(yaml.safe_dump(run.to_json("s", "../x.bin", 3)["spec"])) == run.spec.canonical()
