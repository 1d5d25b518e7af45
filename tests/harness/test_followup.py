"""The follow-up recipe file: valid, next to the old arm, and refused where it would decide nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8parity import matrix, study
from fp8parity.cli import main
from fp8parity.errors import UsageError
from fp8parity.followup import MAX_LAYERS, layers_of, write_followup
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.tensor_candidates import Reason, candidates_of
from fp8parity_analysis.tensor_health import ArmHealth, TensorHealth
from fp8parity_analysis.tensor_onset import Onset
from fp8parity_analysis.tensor_panel import Tensor
from fp8parity_analysis.tensor_pictures import ArmPictures
from fp8parity_analysis.tensor_signals import Signal

from .conftest import WriteRecipe

OWN_MODEL = Path(__file__).parents[2] / "examples" / "own_model"
LAYER = "blocks.1.ffn.down_proj"


def health_of(recipe: str, *layers: str | Signal, basis: str = "absolute") -> TensorHealth:
    onset = Onset(10, 5, 2)
    reason = Reason("underflow", "large underflow", basis, False, 5, 1.0, 2, 2, onset, None)  # type: ignore[arg-type]
    empty = np.zeros((0, 0))
    pictures = ArmPictures((), np.zeros(0, np.int64), empty, empty, ())
    found = candidates_of(
        (Tensor(layer, "output", "input") if isinstance(layer, str) else layer, reason) for layer in layers
    )
    cast = (Tensor("blocks.1.attn.q_proj", "output", "input"),)
    arm = ArmHealth(recipe, recipe, cast, 4, 2, 0, True, "", found, (), (), (), {}, pictures)
    return TensorHealth((arm,))


def laid_out(write_recipe: WriteRecipe, tmp_path: Path, changes: dict[str, Any] | None = None) -> Path:
    out = tmp_path / "out"
    study.lay_out(matrix.read(write_recipe(changes or {})), out)
    return out


def spec_of(out: Path, arm: str) -> dict[str, Any]:
    specs = [read_json(path) for path in sorted(out.glob("runs/*/spec.json"))]
    return dict(next(spec["spec"] for spec in specs if spec["arm"] == arm))


def test_the_arm_as_it_was_and_without_the_layer(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    out = laid_out(write_recipe, tmp_path)
    spec = spec_of(out, "rowwise")
    target = write_followup(out, health_of("rowwise", LAYER), spec, tmp_path / "new" / "next.yaml")
    plan = matrix.read(target)
    tests = [run for run in plan.runs if run.role == "test"]
    assert plan.name == "tiny-followup"
    assert {run.spec.precision.exclude for run in tests} == {(), (LAYER,)}
    # the old arm is the same run as before, under the same hash; so are control and null arm
    before = {path.parent.name.rpartition("-")[2] for path in out.glob("runs/*/spec.json")}
    assert {run.spec.hash()[:8] for run in plan.runs if run.spec.precision.exclude == ()} <= before
    assert {run.spec.seed for run in plan.runs} == {0, 1}
    assert any(run.role == "null" for run in plan.runs)
    assert sorted(path.name for path in target.parent.iterdir()) == ["next.yaml"]
    assert target.read_text().startswith("# Is the gap of rowwise made in blocks.1.ffn.down_proj?")


def test_an_arm_of_an_axis_keeps_its_own_settings(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    changes = {
        "axes": {"precision.keep": [1, 4], "optim.lr": [0.001, 0.002]},
        "base": {"precision": {"recipe": "rowwise", "exclude": ["blocks.1.attn.*"]}},
    }
    out = laid_out(write_recipe, tmp_path, changes)
    specs = [read_json(path)["spec"] for path in sorted(out.glob("runs/*/spec.json"))]
    spec = next(
        item for item in specs if item["precision"]["keep_first"] == 1 and item["optim"]["lr"] == 0.002
    )
    plan = matrix.read(write_followup(out, health_of("x", LAYER), spec, tmp_path / "next.yaml"))
    tests = [run.spec for run in plan.runs if run.role == "test"]
    assert {run.optim.lr for run in tests} == {0.002}
    assert {run.precision.keep_last for run in tests} == {1}
    assert {run.precision.exclude for run in tests} == {("blocks.1.attn.*",), ("blocks.1.attn.*", LAYER)}


def test_a_follow_up_that_leaves_nothing_in_fp8_is_refused(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    out = laid_out(write_recipe, tmp_path, {"base": {"precision": {"include": [LAYER]}}})
    spec = spec_of(out, "rowwise")
    with pytest.raises(UsageError, match="would be BF16"):
        write_followup(out, health_of("rowwise", LAYER), spec, tmp_path / "next.yaml")
    assert not list(tmp_path.glob("next*"))


def test_without_a_candidate_nothing_is_written(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no layer is a candidate"):
        write_followup(tmp_path, health_of("rowwise"), None, tmp_path / "next.yaml")
    with pytest.raises(UsageError, match="no tensor statistics were recorded"):
        write_followup(tmp_path, TensorHealth(()), None, tmp_path / "next.yaml")


def test_layers_are_distinct_few_and_of_the_leading_kind() -> None:
    names = [f"blocks.{index}.a" for index in range(9)]
    assert layers_of(health_of("x", *names).arms[0]) == tuple(names[:MAX_LAYERS])
    assert layers_of(health_of("x", "a", "a").arms[0]) == ("a",)


def test_the_option_is_on_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "--emit-followup" in capsys.readouterr().out


def test_a_signal_names_the_linears_below_its_module() -> None:
    attention = Signal("blocks.1.attn", "attention_logits_max")
    assert layers_of(health_of("x", attention, basis="signal").arms[0]) == ("blocks.1.attn.*",)
    # a head in BF16 has no cast to hold, and a block without casts none either
    nowhere = (Signal("head", "head_logits_max"), Signal("blocks.0", "block_output_rms"))
    assert layers_of(health_of("x", *nowhere, basis="signal").arms[0]) == ()
    assert layers_of(health_of("x", *nowhere, attention, basis="signal").arms[0]) == ("blocks.1.attn.*",)


def test_a_model_of_ones_own_is_followed_up_beside_its_module(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    shutil.copytree(OWN_MODEL, recipes)
    plan = matrix.read(recipes / "own_model.yaml")
    out = tmp_path / "out"
    study.lay_out(plan, out)
    health, spec = health_of("rowwise", "blocks.1.up"), spec_of(out, "rowwise")
    elsewhere = tmp_path / "new" / "next.yaml"
    with pytest.raises(
        UsageError, match=r"my_model stands beside .*write it there: --emit-followup .*next\.yaml"
    ):
        write_followup(out, health, spec, elsewhere)
    assert not elsewhere.exists()
    again = matrix.read(write_followup(out, health, spec, recipes / "next.yaml"))
    before = {run.spec.hash() for run in plan.runs}
    assert {run.spec.hash() for run in again.runs if run.spec.precision.exclude == ()} <= before
    with pytest.raises(UsageError) as refused:  # the user's file, never the draft it is checked as
        write_followup(out, health_of("rowwise", "blocks.9.up"), spec, recipes / "next.yaml")
    assert "next.yaml:" in str(refused.value)
    assert "draft" not in str(refused.value)
    write_json(out / "study.json", {**read_json(out / "study.json"), "recipe_file": "gone/own_model.yaml"})
    with pytest.raises(UsageError, match=r"'my_model:build' is relative to .*gone/own_model\.yaml.*launched"):
        write_followup(out, health, spec, elsewhere)
