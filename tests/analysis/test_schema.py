"""The contract, frozen: a change here breaks somebody's script, so it must be made on purpose."""

from __future__ import annotations

import pytest

from fp8parity_analysis import schema
from fp8parity_analysis.schema import EXIT_OF_GATE, GATE_OF_OUTCOME, Gate, Outcome, gate_of


def test_version() -> None:
    assert schema.SCHEMA_VERSION == 1


def test_run_directory() -> None:
    assert schema.SPEC_KEYS == (
        "schema_version", "run_id", "study", "group", "arm", "role", "seed", "replica", "replica_kind",
        "data_path", "checkpoint_every", "spec",
    )  # fmt: skip
    assert schema.MANIFEST_KEYS == (
        "schema_version", "run_id", "spec_hash", "status", "steps_done", "first_nonfinite_step", "tokens",
        "data_sha256", "init_digest", "environment", "conversion", "execution", "effective", "started_at",
        "finished_at",
        "wall_seconds", "resumes", "throughput_tokens_per_s", "model", "notes",
    )  # fmt: skip
    assert schema.SPEC_OPTIONAL_KEYS == (
        "probe",
        "keep_checkpoints",
        "parent_checkpoint",
        "checkpoint_share",
        "data_split",
    )
    assert schema.MANIFEST_OPTIONAL_KEYS == ("alerts", "phases", "seconds_by_stage", "probed", "data_split")
    assert schema.CURVE_OPTIONAL_COLUMNS == ("precision",)
    assert schema.CURVE_COLUMNS == (
        "step", "tokens", "train_loss", "grad_norm", "lr", "step_time", "batch_digest",
    )  # fmt: skip
    assert schema.EVAL_COLUMNS == ("step", "split", "eval_precision", "loss")
    files = (
        schema.SPEC_FILE,
        schema.MANIFEST_FILE,
        schema.CURVE_FILE,
        schema.EVAL_FILE,
        schema.VERDICTS_FILE,
    )
    assert files == ("spec.json", "manifest.json", "curve.parquet", "eval.parquet", "verdicts.json")


def test_external_curves() -> None:
    assert schema.EXTERNAL_COLUMNS == ("seed", "arm", "step", "loss")
    assert schema.EXTERNAL_OPTIONAL_COLUMNS == ("replica", "split", "grad_norm", "eval_precision", "status")
    assert (schema.CONTROL_ARM, schema.NULL_ARM) == ("bf16", "bf16_null")
    assert [s.value for s in schema.Status] == ["finished", "diverged", "stopped"]


def test_verdict_document() -> None:
    assert schema.JUDGEMENT_KEYS == ("schema_version", "criteria", "verdicts", "contrasts")
    assert schema.CONTRAST_KEYS == ("a", "b", "gap", "interval", "p", "n_seeds")
    assert schema.VERDICT_KEYS == (
        "recipe", "outcome", "gate", "gap", "interval", "margin", "provisional", "basis", "endpoint",
        "eval_precision", "alpha", "horizon_tokens", "n_seeds", "n_null_pairs", "token_cost", "trajectory_p",
        "onset_step", "diverged_seeds", "need_seeds", "noise_floor", "reasons", "warnings",
    )  # fmt: skip


def test_every_outcome_has_a_gate_and_every_gate_an_exit_code() -> None:
    assert set(GATE_OF_OUTCOME) == set(Outcome)
    assert EXIT_OF_GATE == {Gate.PASS: 0, Gate.FAIL: 10, Gate.INCONCLUSIVE: 11, Gate.INVALID: 12}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_identical_is_different_for_a_null_arm(outcome: Outcome) -> None:
    same = gate_of(outcome, null_arm=True) is gate_of(outcome)
    assert same != (outcome is Outcome.IDENTICAL)
