"""Cadence and what-if casts of a probe, as a recipe file writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8parity import matrix
from fp8parity.errors import UsageError
from fp8parity.probe_spec import ProbePlan, ProbeSpec, resolve

WriteRecipe = Callable[..., Path]


def default(steps: int, **spec: Any) -> ProbePlan:
    return resolve(ProbeSpec.model_validate(spec), steps, (), "compute")


@pytest.mark.parametrize(
    ("steps", "due"),
    [
        (60, ()),
        (999, ()),
        (1000, (1000,)),
        (2000, (100, 1000, 2000)),
        (4000, (100, 200, 1000, 2000, 3000, 4000)),
        (20_000, (100, 200, 300, 400, 500, *range(1000, 20_001, 1000))),
    ],
)
def test_default_cadence(steps: int, due: tuple[int, ...]) -> None:
    assert default(steps).due_steps(steps) == due


@pytest.mark.parametrize("steps", [*range(1, 3000, 7), 10_000, 50_000, 100_000])
def test_default_probes_are_at_most_three_in_two_thousand_steps(steps: int) -> None:
    assert len(default(steps).due_steps(steps)) <= 3 * steps / 2000


def test_dense_steps_and_off() -> None:
    plan = default(100, every=40, dense_until=9, dense_every=4)
    assert plan.due_steps(100) == (4, 8, 40, 80)
    for off in (0, False, "off"):
        assert default(10_000, every=off).due_steps(10_000) == ()


def test_bf16_cannot_be_tried() -> None:
    with pytest.raises(ValueError, match="bf16 casts nothing; write FP8 recipes: tensorwise, rowwise"):
        ProbeSpec.model_validate({"what_if": ["bf16"]})


def test_controls_try_the_recipes_they_are_compared_with(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"axes": {"precision.recipe": ["rowwise", "tensorwise"]}}))
    by_role = {run.role: run.probe.what_if for run in plan.runs}
    assert by_role == {"control": ("rowwise", "tensorwise"), "null": ("rowwise", "tensorwise"), "test": ()}
    assert {run.probe.weight_cast_source for run in plan.runs} == {"compute"}


def test_what_if_weights_are_read_as_the_arms_read_them(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"base": {"precision": {"weight_cast_source": "master"}}}))
    assert {run.probe.weight_cast_source for run in plan.runs if run.role == "control"} == {"master"}


def test_a_control_tries_the_recipes_of_its_own_cell_only(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(
        write_recipe(
            {
                "axes": {"precision.recipe": ["rowwise"]},
                "include": [{"precision.recipe": "tensorwise", "optim.lr": 0.1}],
            }
        )
    )
    by_lr = {run.spec.optim.lr: run.probe.what_if for run in plan.runs if run.role == "control"}
    assert by_lr == {0.003: ("rowwise",), 0.1: ("tensorwise",)}


def test_named_recipes_are_tried_on_every_arm(write_recipe: WriteRecipe) -> None:
    plan = matrix.read(write_recipe({"probe": {"every": 5, "what_if": ["blockwise"]}}))
    assert {run.probe.what_if for run in plan.runs} == {("blockwise",)}


def test_a_probe_changes_no_name(write_recipe: WriteRecipe) -> None:
    names = [
        [run.run_id for run in matrix.read(write_recipe(changes)).runs]
        for changes in ({}, {"probe": {"every": 1, "what_if": ["blockwise"]}}, {"probe": {"every": False}})
    ]
    assert names[0] == names[1] == names[2]


def test_mistakes_have_a_place(write_recipe: WriteRecipe) -> None:
    with pytest.raises(UsageError, match=r"recipe.yaml:\d+: probe\.evry"):
        matrix.read(write_recipe({"probe": {"evry": 5}}))
    with pytest.raises(UsageError, match=r"recipe.yaml:\d+: probe\.what_if"):
        matrix.read(write_recipe({"probe": {"what_if": ["fp4"]}}))
