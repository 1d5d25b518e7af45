from __future__ import annotations

import math

import pytest

from fp8parity import matrix
from fp8parity.plan import REFERENCE_RUN_SD, plan_document
from fp8parity_analysis import planning

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


@pytest.mark.parametrize("confidence", [0.90, 0.95])
def test_detection_equals_the_planning_functions(write_recipe: WriteRecipe, confidence: float) -> None:
    changes = {"seeds": [0, 1, 2, 3, 4], "criteria": {"noise_sd": "0.1%", "confidence": confidence}}
    found = plan_document(matrix.read(write_recipe(changes)))["detection"]
    sd, alpha = 0.001 * math.sqrt(2), (1 - confidence) / 2
    assert found["detectable_gap"] == pytest.approx(planning.detectable_gap(5, sd, alpha=alpha), rel=1e-5)
    assert found["expected_half_width"] == pytest.approx(planning.half_width(5, sd, alpha=alpha), rel=1e-5)
    assert found["seeds_for_equivalent"] == planning.seeds_needed(0.0025, sd, goal="equivalent", alpha=alpha)


def test_words_say_what_is_assumed(write_recipe: WriteRecipe) -> None:
    words = " ".join(plan_document(matrix.read(write_recipe()))["words"])
    assert f"{100 * REFERENCE_RUN_SD:.3g} % (measured on an H200" in words
    assert "too wide for EQUIVALENT at a margin of 0.25 %: 8 seeds would do" in words
    one = " ".join(plan_document(matrix.read(write_recipe({"seeds": [0]})))["words"])
    assert "provisional at best" in one
