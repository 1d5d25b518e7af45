"""Planted faults: each ranked first, at the right step, with the right origin; a clean study has no candidate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_study import Shape, judged
from tensor_study import (
    E4M3,
    E5M2,
    GEMMS,
    Fault,
    SignalFault,
    TensorShape,
    arm_in_memory,
    healthy,
    write_part,
    write_tensor_study,
)

from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.store import RunRecord
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.tensor_absolute import DECLARED_FORMATS, SQNR_BOUND
from fp8parity_analysis.tensor_arm import RunDirs, read_arm
from fp8parity_analysis.tensor_candidates import Candidate, Reason, candidates_of
from fp8parity_analysis.tensor_health import ArmHealth, arm_health, examine, loss_onsets
from fp8parity_analysis.tensor_moves import RULES
from fp8parity_analysis.tensor_onset import Onset
from fp8parity_analysis.tensor_panel import Tensor
from fp8parity_analysis.tensor_signal_pairs import GROWTH_RULES
from fp8parity_analysis.tensor_signals import Signal
from fp8parity_analysis.verdict import Evidence

LAYER, STEP, BEFORE = "blocks.2.ffn.down_proj", 120, 110


def outlier(x: np.ndarray, since: int) -> np.ndarray:
    x = x.copy()
    x[3, 7] *= 2.0**20
    return x


def growing_pair(x: np.ndarray, since: int) -> np.ndarray:
    x = x.copy()
    x[:, 5:7] *= 1.05**since
    return x


def faint_rows(x: np.ndarray, since: int) -> np.ndarray:
    x = x.copy()
    x[2:] *= 1e-9
    return x


def zero_row(x: np.ndarray, since: int) -> np.ndarray:
    x = x.copy()
    x[4] = 0.0
    return x


def health_of(
    faults: Sequence[Fault], arm: str = "tensorwise", *, matched: bool = False, seeds: int = 3
) -> ArmHealth:
    found = arm_in_memory(TensorShape(faults=tuple(faults), arm=arm), seeds=seeds, matched=matched)
    return arm_health(arm, found, (20, 300), {})


def examined(records: list[RunRecord], *, matched: bool = False) -> ArmHealth:
    judgement = judged(records, criteria=Criteria(null_matched=matched))
    return examine(judgement, StudyRuns.of(records)).arms[0]


def names(candidate: Candidate) -> set[str]:
    return {reason.name for reason in candidate.reasons}


PLANTED = {
    "outlier": (Fault(LAYER, "input", STEP, outlier), "tensorwise", "underflow", "fp8", 120),
    # row 3 is in the first of four micro-batches of 8 rows
    "outlier in micro-batch 1 of 4": (
        Fault(LAYER, "input", STEP, outlier, batches=4), "tensorwise", "underflow", "fp8", 120,
    ),
    "faint rows": (Fault(LAYER, "input", STEP, faint_rows), "tensorwise", "underflow", "fp8", 120),
    "frozen scale": (Fault(LAYER, "input", STEP, frozen=True), "tensorwise", "frozen_scale", "cast", 130),
    "frozen row scales": (Fault(LAYER, "input", STEP, frozen=True), "rowwise", "frozen_scale", "cast", 130),
    "e5m2 for e4m3": (Fault(LAYER, "weight", STEP, format=E5M2), "rowwise", "format", "cast", 120),
    "e4m3 for e5m2": (Fault(LAYER, "grad_output", 1, format=E4M3), "tensorwise", "format", "cast", 1),
    "zero row": (Fault(LAYER, "input", STEP, zero_row), "rowwise", "zero_amax", "fp8", 120),
    "faint rows in both arms": (
        Fault(LAYER, "input", STEP, faint_rows, in_control=True), "tensorwise", "underflow", "both", 120,
    ),
}  # fmt: skip


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_first_at_its_step(name: str, matched: bool) -> None:
    fault, arm, rule, origin, step = PLANTED[name]
    found = health_of([fault], arm, matched=matched).candidates
    first = found[0]
    assert (first.tensor.fqn, first.tensor.operand) == (LAYER, fault.operand)
    assert (first.leading.name, first.basis, first.origin) == (rule, "absolute", origin)
    assert first.onset.step == step
    assert step - first.onset.resolution <= fault.step <= step
    # the operand enters two GEMMs; nothing else is wrong
    assert {item.tensor for item in found} == {
        Tensor(LAYER, gemm, fault.operand) for gemm, pair in GEMMS.items() if fault.operand in pair
    }
    if name == "zero row":
        assert not any("underflow" in reason for item in found for reason in names(item))
    if "micro-batch" in name:
        assert "(25.0 % of the elements)" in first.leading.text  # the other three keep theirs


@pytest.mark.parametrize("matched", [False, True])
def test_a_growing_channel_pair_is_first(matched: bool) -> None:
    found = health_of([Fault(LAYER, "input", STEP, growing_pair)], matched=matched).candidates
    assert {item.tensor.fqn for item in found} == {LAYER}
    assert found[0].basis == "tested"
    assert found[0].origin == "fp8"
    assert {"amax_level", "amax_drift", "spread_level"} <= names(found[0])
    # two channels of 256 overtake the others' amax 10 to 20 steps after they begin to grow
    assert found[0].onset.step is not None
    assert STEP < found[0].onset.step <= STEP + 30


def test_a_channel_pair_that_grows_in_bf16_too_is_a_possible_cause() -> None:
    fault = Fault(LAYER, "input", STEP, growing_pair, in_control=True)
    health = health_of([fault])
    assert {item.tensor.fqn for item in health.candidates} == {LAYER}
    first = health.candidates[0]
    assert (first.basis, first.origin) == ("moved", "both")
    assert first.onset.step is not None
    assert STEP < first.onset.step <= STEP + 60
    score = next(item for item in health.scores if item.rule.name == "spread_growth")
    assert (score.hits, score.control_hits) == (3, 6)
    assert score.calibrated > score.rule.limit  # what BF16 does by itself is no alarm


@pytest.mark.parametrize("matched", [False, True])
def test_attention_logits_that_outgrow_those_of_bf16_are_first(matched: bool) -> None:
    fault = SignalFault("blocks.1.attn", "attention_logits_max", STEP, 1.02)
    arm = arm_in_memory(TensorShape(signal_faults=(fault,)), matched=matched)
    health = arm_health("tensorwise", arm, (20, 300), dict.fromkeys(range(3), 200))
    (first,) = health.candidates
    assert (first.tensor, first.basis, first.origin) == (
        Signal("blocks.1.attn", "attention_logits_max"), "signal", "fp8",
    )  # fmt: skip
    assert {"attention_logits_max_level", "attention_logits_max_drift"} <= names(first)
    assert "blocks.1.attn.* held in BF16" in first.follow_up
    # 1.02 per step is 25 % after 11 steps, and the null envelope is wider than that by a factor of 1.1 at most
    assert first.onset.step is not None
    assert STEP < first.onset.step <= STEP + 20
    assert first.onset.lead == 200 - first.onset.step
    score = next(item for item in health.scores if item.rule.name == "attention_logits_max_growth")
    # twofold growth takes ln 2 / ln 1.02 = 35 steps; probes are 10 apart, and the noise is 2 % of the value
    assert (score.hits, score.control_hits, score.n_control) == (3, 0, 3)
    assert score.onset.step in (STEP + 40, STEP + 50)
    level = next(item for item in health.signals if item.statistic.name == "attention_logits_max")
    assert int(np.nanargmax(level.distance)) == 1


def test_attention_logits_that_grow_in_both_arms_are_no_candidate() -> None:
    fault = SignalFault("blocks.1.attn", "attention_logits_max", STEP, 1.02, in_control=True)
    health = arm_health("tensorwise", arm_in_memory(TensorShape(signal_faults=(fault,))), (20, 300), {})
    assert health.candidates == ()
    assert not any(score.hits for score in health.scores)


def test_a_faulty_cast_comes_before_the_signal_that_it_moves() -> None:
    shape = TensorShape(
        faults=(Fault(LAYER, "input", STEP, growing_pair),),
        signal_faults=(SignalFault("blocks.2", "block_output_rms", STEP - 60, 1.02),),
    )
    found = arm_health("tensorwise", arm_in_memory(shape), (20, 300), {}).candidates
    assert [item.basis for item in found] == ["tested", "tested", "signal"]
    assert found[0].tensor.fqn == LAYER
    assert str(found[2].tensor) == "blocks.2, rms of the block output"
    assert found[2].layers == "blocks.2.*"


def test_null_pairs_of_seeds_without_a_run_of_the_arm_count() -> None:
    shape = TensorShape(steps=tuple(range(10, 301, 10)))
    without, having = (arm_in_memory(shape, seeds=2, matched=True, idle=idle) for idle in (0, 6))
    assert (without.n_nulls, having.n_nulls) == (2, 8)
    assert having.seed_numbers == (0, 1)
    for name, paths in having.nulls.items():
        np.testing.assert_array_equal(paths[:2], without.nulls[name])  # the first are what they were
        np.testing.assert_array_equal(having.gaps[name], without.gaps[name])  # and pair with nothing
    few, many = (arm_health("tensorwise", arm, (20, 300), {}) for arm in (without, having))
    assert [score.n_control for score in few.scores] == [4] * len(RULES) + [2] * len(ts.SIGNALS)
    assert [score.n_control for score in many.scores] == [16] * len(RULES) + [8] * len(ts.SIGNALS)
    assert {score.false_alarms for score in many.scores} == {1 / 17, 1 / 9}
    assert "pooled with 8 matched null pairs" in many.basis


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("in_control", [False, True])
def test_faint_rows_do_not_matter_to_row_scales(in_control: bool, matched: bool) -> None:
    fault = Fault(LAYER, "input", STEP, faint_rows, in_control=in_control)
    assert health_of([fault], "rowwise", matched=matched).candidates == ()


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("arm", ["tensorwise", "rowwise"])
def test_a_clean_study_has_no_candidate(arm: str, matched: bool) -> None:
    health = health_of([], arm, matched=matched)
    assert health.candidates == ()
    assert not health.descriptive
    assert not any(score.hits for score in health.scores)
    assert sum(score.rule in GROWTH_RULES.values() for score in health.scores) == len(ts.SIGNALS)
    assert ("matched null pairs" in health.basis) == matched


def test_one_seed_is_described_and_says_so() -> None:
    health = health_of([Fault(LAYER, "input", STEP, growing_pair)], seeds=1)
    assert health.descriptive
    assert "Descriptive" in health.basis
    assert {item.tensor.fqn for item in health.candidates} == {LAYER}
    assert all(reason.q is None for item in health.candidates for reason in item.reasons)
    assert health_of([], seeds=1).candidates == ()


def test_without_what_if_casts_only_what_needs_no_pair_is_found(tmp_path: Path) -> None:
    shape = TensorShape(faults=(Fault(LAYER, "input", STEP, outlier),))
    records = write_tensor_study(tmp_path, shape)
    for record in records:
        if record.spec["role"] != "test":
            for part in (record.path / schema.TENSOR_STATS_DIR).iterdir():
                part.unlink()
    health = examined(records)
    assert "no what-if casts of tensorwise" in health.basis
    assert health.candidates[0].leading.name == "underflow"
    assert health.candidates[0].origin == "unknown"


def test_zero_rows_everywhere_in_both_arms_are_a_note() -> None:
    linears = ("a", "b")
    faults = tuple(
        Fault(f"blocks.{block}.{name}", "grad_output", 1, zero_row, in_control=True)
        for block, name in itertools.product(range(2), linears)
    )
    shape = TensorShape(2, linears, tuple(range(10, 101, 10)), faults=faults, arm="rowwise")
    health = arm_health("rowwise", arm_in_memory(shape), (0, 100), {})
    assert health.candidates == ()
    assert any("scaling groups of zeros: 4 tensors of grad_output" in note for note in health.notes)


def test_casts_are_held_to_the_recipe_that_the_arm_declares(tmp_path: Path) -> None:
    """Casts of tensorwise, e5m2 gradients among them, in an arm that declares another recipe."""
    arm = arm_in_memory(TensorShape(arm="tensorwise"))
    told = "declared as rowwise, the casts are those of tensorwise"
    health = arm_health("rowwise-n4", arm, (20, 300), {}, declared="rowwise")
    assert told in health.notes
    assert {reason.name for item in health.candidates for reason in item.reasons} >= {"format"}
    assert {item.tensor.operand for item in health.candidates} == {"grad_output"}
    for declared in ("tensorwise", "ours", ""):
        health = arm_health("tensorwise", arm, (20, 300), {}, declared=declared)
        assert (health.candidates, [note for note in health.notes if "declared" in note]) == ((), [])
    records = write_tensor_study(tmp_path, TensorShape())
    for record in records:
        if record.spec["role"] == "test":
            record.spec["spec"]["precision"] = {"recipe": "rowwise"}
    assert told in examined(records).notes


def test_arms_without_statistics_are_named(tmp_path: Path) -> None:
    records = write_tensor_study(
        tmp_path, TensorShape(), Shape(effects={"tensorwise": 0.0, "blockwise": 0.0})
    )
    found = examine(judged(records), StudyRuns.of(records))
    assert [arm.recipe for arm in found.arms] == ["tensorwise"]
    assert found.absent == ("blockwise",)


def test_a_killed_run_is_examined_where_it_ended(tmp_path: Path) -> None:
    records = write_tensor_study(tmp_path, TensorShape(faults=(Fault(LAYER, "input", STEP, outlier),)))
    run = next(record for record in records if record.spec["role"] == "test")
    parts = sorted((run.path / schema.TENSOR_STATS_DIR).iterdir())
    parts[-1].write_bytes(b"PAR1 cut off")
    parts[-2].unlink()
    health = examined(records)
    assert health.candidates[0].leading.name == "underflow"
    assert len(health.problems) == 1


def test_the_loss_begins_where_its_gap_grows() -> None:
    steps = tuple(range(10, 210, 10))
    late = tuple(0.0001 * max(0, step - 100) for step in steps)
    lost = tuple(0.0 if step < 150 else None for step in steps)
    flat = tuple(0.0 for _ in steps)
    evidence = Evidence("x", (0, 1, 2), steps, (late, lost, flat))
    found = loss_onsets(evidence, 0.0025)
    assert found == {0: 100, 1: 150}
    assert loss_onsets(None, 0.0025) == {}


def reason(
    name: str, step: int | None, lead: float | None = None, ahead: int = 0, **changes: object
) -> Reason:
    onset = Onset(step, 10, 3, lead, ahead, 3 if lead is not None else 0)
    values: dict[str, object] = {
        "name": name, "text": name, "basis": "tested", "cast_fault": False, "order": 0, "strength": 1.0, "seeds": 3,
        "of": 3, "onset": onset, "in_bf16": None,
    }  # fmt: skip
    return Reason(**(values | changes))  # type: ignore[arg-type]


def test_candidates_are_ranked_by_kind_then_share_then_lead() -> None:
    made = {
        "late": reason("a_level", 200, -20.0, 0),
        "lead": reason("a_level", 120, 60.0, 2),
        "sure lead": reason("a_level", 130, 50.0, 3),
        "undated": reason("a_level", None),
        "wrong cast": reason("format", 190, basis="absolute", cast_fault=True),
        "blip": reason("underflow", 10, basis="brief", order=5),
    }
    found = candidates_of((Tensor(name, "output", "input"), item) for name, item in made.items())
    order = [item.tensor.fqn for item in found]
    assert order == ["wrong cast", "sure lead", "lead", "late", "undated", "blip"]
    assert "precision.exclude" in found[0].follow_up
    assert "cause" not in found[1].follow_up


def test_declared_formats_are_those_of_the_harness() -> None:
    casts = pytest.importorskip("fp8parity.casts", reason="needs torch")
    assert set(DECLARED_FORMATS) == set(casts.RECIPES)
    for name, plan in casts.RECIPES.items():
        for _, operand, cast in plan.casts:
            assert cast.format.startswith(DECLARED_FORMATS[name][operand]), (name, operand)
    assert SQNR_BOUND["e4m3"] == pytest.approx(24.08, abs=0.01)
    assert SQNR_BOUND["e5m2"] == pytest.approx(18.06, abs=0.01)


# numbers that a foreign writer may store
anything = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(min_value=-5, max_value=2**40)


@st.composite
def wild_casts(draw: st.DrawFn, kind: str) -> pd.DataFrame:
    table = healthy(
        TensorShape(blocks=1, linears=("a", "b"), steps=(1, 2, 3, 4, 5, 6, 7, 8)), "tensorwise", 0, kind
    )
    keep = draw(st.lists(st.integers(0, len(table) - 1), max_size=60))
    table = table.iloc[keep].reset_index(drop=True)
    for name in ts.VALUE_COLUMNS:
        if draw(st.booleans()):
            table[name] = draw(st.lists(anything, min_size=len(table), max_size=len(table)))
    for name in ts.COUNT_COLUMNS:
        if draw(st.booleans()):
            table[name] = draw(st.lists(counts, min_size=len(table), max_size=len(table)))
    if draw(st.booleans()):
        table["format"] = draw(st.sampled_from(["", "e4m3fn", "e5m2fnuz", "fp6"]))
        table["granularity"] = draw(st.sampled_from(["", "tensor", "row"]))
    return table.assign(kind=kind)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.data())
def test_whatever_is_stored_never_raises(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("wild")
    seeds = data.draw(st.integers(1, 3))
    groups: dict[str, dict[int, list[Path]]] = {"test": {}, "control": {}, "null": {}}
    for role, seed in itertools.product(groups, range(seeds)):
        path = root / f"{role}{seed}" / schema.TENSOR_STATS_DIR
        path.mkdir(parents=True)
        groups[role][seed] = [path.parent]
        table = data.draw(wild_casts(ts.TRAINED if role == "test" else ts.WHAT_IF))
        write_part(path / "part-00000.parquet", table)
    arm = read_arm(
        RunDirs(groups["test"], groups["control"], groups["null"]), matched=data.draw(st.booleans())
    )
    if arm is not None:
        losses = {0: 3} if data.draw(st.booleans()) else {}
        health = arm_health("x", arm, (data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))), losses)
        assert all(item.reasons for item in health.candidates)
        assert all(item.when and item.lead_words and item.follow_up for item in health.candidates)
