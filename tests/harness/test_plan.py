from __future__ import annotations

import cProfile
import math
from pathlib import Path

import pytest

from fp8parity import matrix
from fp8parity.memory import estimate
from fp8parity.plan import REFERENCE_RUN_SD, memory_of, plan_document, slots_of
from fp8parity.token_meta import read_meta
from fp8parity_analysis import planning
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.sequential import limits_of

from .conftest import WriteRecipe


def test_counts_and_cost(write_recipe: WriteRecipe) -> None:
    document = plan_document(matrix.read(write_recipe({"runtime": {"tokens_per_s": 100.0, "slots": 3}})))
    assert (document["runs"], document["pairs"], document["slots"]) == (8, 4, 3)
    assert document["total_tokens"] == 8 * 24 * 4 * 16
    assert document["hours"] == pytest.approx(document["total_tokens"] / 100 / 3600)
    assert "device-hours" in document["words"][0]
    shares = {arm["arm"]: arm["fp8_flop_share"] for arm in document["arms"]}
    assert shares["bf16"] == shares["bf16_null"] == 0
    assert 0 < shares["rowwise"] < 1


def test_order_controls_and_memory(write_recipe: WriteRecipe) -> None:
    document = plan_document(matrix.read(write_recipe({"runtime": {"tokens_per_s": 100.0, "slots": 3}})))
    assert (document["controls"], document["shared_controls"]) == (2, 2)
    assert document["wall_hours"] == pytest.approx(document["hours"] / 3)
    roles = ["bf16_null" if "-reorder" in run else run.split("-")[2] for run in document["order"]]
    assert roles == ["bf16", "bf16_null", "tensorwise", "rowwise"] * 2  # baselines first, seeds breadth-first
    seeds = [run.split("-")[1] for run in document["order"]]
    assert seeds == ["s0"] * 4 + ["s1"] * 4
    arm = document["arms"][0]
    assert arm["memory"]["states"] == 18 * arm["parameters"]
    assert document["memory_bytes"] == max(a["memory"]["total"] for a in document["arms"])
    assert document["errors"] == []
    words = " ".join(document["words"])
    assert "2 BF16 controls, 2 of them shared by several arms" in words
    assert "GiB (an estimate: parameters x 18 bytes" in words
    assert "more steps are other runs" in words
    alone = plan_document(matrix.read(write_recipe({"axes": {"precision.recipe": ["rowwise"]}})))
    assert (alone["controls"], alone["shared_controls"], alone["hours"]) == (2, 0, None)


def calls_for(path: Path) -> int:
    """Return how many functions a plan calls: a measure of its work that no machine changes."""
    profile = cProfile.Profile()
    profile.runcall(lambda: plan_document(matrix.read(path)))
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_of_a_plan_grows_with_its_cells_and_no_faster(write_recipe: WriteRecipe) -> None:
    def cells(count: int) -> Path:
        rates = [1e-4 * (i + 1) for i in range(count)]
        axes = {"precision.recipe": ["rowwise"], "optim.lr": rates}
        return write_recipe({"axes": axes, "seeds": [0]}, f"cells{count}.yaml")

    few, many = calls_for(cells(50)), calls_for(cells(400))
    assert many < 10 * few  # 8 in proportion


def test_memory_follows_what_is_kept(write_recipe: WriteRecipe) -> None:
    def total(**train: object) -> int:
        plan = matrix.read(write_recipe({"base": {"train": train}}))
        rows = matrix.vocab_rows(plan.runs[0].spec, plan.recipe_path.parent)
        return estimate(plan.runs[0].spec, rows).activations

    whole = total()
    assert total(accumulate=2) == whole / 2
    assert total(activation_checkpointing=True) < whole
    assert total(compile="blocks") < whole
    assert total(compute="bf16-true") < whole


def test_slots_come_from_the_command_line_then_the_file_then_the_devices(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpu = {"base": {"train": {"device": "auto"}}}
    plan = matrix.read(write_recipe({**gpu, "runtime": {"slots_per_gpu": 3}}))
    assert (slots_of(plan), slots_of(plan, 5)) == (6, 5)
    assert slots_of(matrix.read(write_recipe({**gpu, "runtime": {"slots": 4, "slots_per_gpu": 3}}))) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # planned where no GPU is: cores are no measure of one
    elsewhere = matrix.read(
        write_recipe({"base": {"train": {"device": "cuda"}}, "runtime": {"slots_per_gpu": 3}})
    )
    assert slots_of(elsewhere) == 3
    words = plan_document(elsewhere)["words"]
    assert "3 at a time on one GPU (this machine has none)" in words[0]
    memory = memory_of(plan)
    assert set(memory) == {run.run_id for run in plan.runs}


@pytest.mark.parametrize(
    ("criteria", "seeds", "judged", "said"),
    [
        ({"looks": [3, 5]}, 4, 3, ", 3 seeds find a gap of "),
        ({"looks": [3, 5], "spending": "obrien_fleming"}, 6, 5, ", 5 seeds find a gap of "),
        ({"looks": [3, 5], "margin": "0.01%"}, 5, 5, "no declared look would do; widen the margin"),
        ({"looks": [3, 5]}, 2, None, "2 seeds cannot be judged: the first declared look is at 3 seeds."),
        ({"anytime": True}, 6, 6, ", 6 seeds find a gap of "),
        (
            {"anytime": True},
            1,
            None,
            "1 seed cannot be judged: the first at which anytime has bounds is at 5 seeds.",
        ),
        ({}, 1, None, "One seed has no variance of its own"),
        ({}, 31, None, "What 31 seeds find is not tabulated: the table ends at 30."),
    ],
)
def test_what_is_found_is_found_at_a_look(
    write_recipe: WriteRecipe, criteria: dict, seeds: int, judged: int | None, said: str
) -> None:
    changes = {"seeds": list(range(seeds)), "criteria": {"noise_sd": "0.1%", **criteria}}
    document = plan_document(matrix.read(write_recipe(changes)))
    found = document["detection"]
    assert (found["seeds"], found["judged_seeds"]) == (seeds, judged)
    assert any(said in line for line in document["words"])
    if judged is None:
        assert found["detectable_gap"] is found["expected_half_width"] is None
        return
    settings = {key: tuple(value) if key == "looks" else value for key, value in criteria.items()}
    limit = limits_of(Criteria(**{**settings, "margin": 0.0025}), 30)[judged]
    sd = 0.001 * math.sqrt(2)
    assert found["expected_half_width"] == pytest.approx(limit * sd / math.sqrt(judged))
    assert planning.power_worse(found["detectable_gap"], judged, sd, critical=limit) == pytest.approx(0.8)


@pytest.mark.parametrize("confidence", [0.90, 0.95])
def test_detection_equals_the_planning_functions(write_recipe: WriteRecipe, confidence: float) -> None:
    changes = {"seeds": [0, 1, 2, 3, 4], "criteria": {"noise_sd": "0.1%", "confidence": confidence}}
    found = plan_document(matrix.read(write_recipe(changes)))["detection"]
    sd, alpha = 0.001 * math.sqrt(2), (1 - confidence) / 2
    assert found["detectable_gap"] == pytest.approx(planning.detectable_gap(5, sd, alpha=alpha), rel=1e-5)
    assert found["expected_half_width"] == pytest.approx(planning.half_width(5, sd, alpha=alpha), rel=1e-5)
    assert found["seeds_for_equivalent"] == planning.seeds_needed(0.0025, sd, goal="equivalent", alpha=alpha)


def test_tokens_read_more_than_once_are_told(write_recipe: WriteRecipe, corpus: Path) -> None:
    held = read_meta(corpus).train_tokens

    def told(steps: int) -> list[str]:
        data = {"source": "bin", "path": str(corpus)}
        recipe = write_recipe({"base": {"data": data, "train": {"steps": steps}}})
        return [words for words in plan_document(matrix.read(recipe))["words"] if "training tokens" in words]

    per_step = matrix.read(write_recipe()).runs[0].spec.train.tokens_per_step
    assert told(held // per_step) == []
    steps = 3 * held // per_step
    read = steps * per_step
    assert told(steps) == [
        f"corpus.bin holds {held:,} training tokens: a run of {read:,} reads them {read / held:.2f} times."
    ]


def test_words_say_what_is_assumed(write_recipe: WriteRecipe) -> None:
    words = " ".join(plan_document(matrix.read(write_recipe()))["words"])
    assert f"{100 * REFERENCE_RUN_SD:.3g} % (measured on an H200" in words
    assert "too wide for EQUIVALENT at a margin of 0.25 %: 8 seeds would do" in words
    one = " ".join(plan_document(matrix.read(write_recipe({"seeds": [0]})))["words"])
    assert "provisional at best" in one
