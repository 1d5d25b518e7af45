"""Names that files, tables and scripts share: the frozen contract of the run directory and the verdict.

A change of meaning here raises `SCHEMA_VERSION`; `tests/analysis/test_schema.py` freezes every name.
"""

from __future__ import annotations

from enum import StrEnum

SCHEMA_VERSION = 1

# Files of a run directory.
SPEC_FILE = "spec.json"
MANIFEST_FILE = "manifest.json"
CURVE_STREAM = "curve.jsonl"
CURVE_FILE = "curve.parquet"
EVAL_STREAM = "eval.jsonl"
EVAL_FILE = "eval.parquet"
LOG_FILE = "log.txt"
CHECKPOINT_DIR = "checkpoints"
KEPT_DIR = "kept_checkpoints"
TENSOR_STATS_DIR = "tensor_stats"

# Files of a study (output) directory.
STUDY_FILE = "study.json"
RECIPE_COPY = "recipe.yaml"
ENVIRONMENT_FILE = "environment.json"
LEDGER_FILE = "ledger.jsonl"
RUNS_DIR = "runs"
DATA_DIR = "data"
VERDICTS_FILE = "verdicts.json"
REPORT_FILE = "report.html"

CURVE_COLUMNS = ("step", "tokens", "train_loss", "grad_norm", "lr", "step_time", "batch_digest")
"""One row per optimizer step. `step` counts from 1; `tokens` is cumulative; `train_loss` is the mean loss in
nats per token over the step's whole batch; `grad_norm` is the global L2 norm before clipping; `lr` is the rate
used by this step; `step_time` is wall seconds; `batch_digest` identifies the step's rows in any order."""

CURVE_OPTIONAL_COLUMNS = ("precision",)
"""Columns that a curve may have: `precision` names what each step was trained in (`bf16` or an FP8 recipe), in runs
that change it."""

EVAL_COLUMNS = ("step", "split", "eval_precision", "loss")
"""One row per evaluation: `split` is `held_out`, `eval_precision` is `bf16` or `arm`, `loss` in nats per token."""

EXTERNAL_COLUMNS = ("seed", "arm", "step", "loss")
"""Required columns of curves that another program made."""

EXTERNAL_OPTIONAL_COLUMNS = ("replica", "split", "grad_norm", "eval_precision", "status")

CONTROL_ARM = "bf16"
NULL_ARM = "bf16_null"

HELD_OUT = "held_out"
TRAIN = "train"

EVAL_BF16 = "bf16"
EVAL_ARM = "arm"

SPEC_KEYS = (
    "schema_version",
    "run_id",
    "study",
    "group",
    "arm",
    "role",
    "seed",
    "replica",
    "replica_kind",
    "data_path",
    "checkpoint_every",
    "spec",
)
"""Keys of `spec.json`. `group` names the cell without its precision; `role` is `control`, `test` or `null`;
`data_path` leads from the run directory to the token file; `spec` is the canonical RunSpec, the only part that is
hashed into `run_id`."""

DATA_SPLIT = "data_split"
"""Key of `spec.json` and `manifest.json`: dtype, vocab_size, n_tokens, train_tokens of the token file's side file."""

SPEC_OPTIONAL_KEYS = ("probe", "keep_checkpoints", "parent_checkpoint", "checkpoint_share", DATA_SPLIT)
"""Keys that `spec.json` may hold: `probe` says after which steps tensor statistics are taken, and of which casts;
`keep_checkpoints` of which steps the checkpoint stays; `parent_checkpoint` leads from the run directory to the
checkpoint that a fork starts from; `checkpoint_share` is the most of the training time that checkpoints may take."""

MANIFEST_KEYS = (
    "schema_version",
    "run_id",
    "spec_hash",
    "status",
    "steps_done",
    "first_nonfinite_step",
    "tokens",
    "data_sha256",
    "init_digest",
    "environment",
    "conversion",
    "execution",
    "effective",
    "started_at",
    "finished_at",
    "wall_seconds",
    "resumes",
    "throughput_tokens_per_s",
    "model",
    "notes",
)
"""Keys of `manifest.json`, which is written last, by rename: a directory without it is an unfinished run.
`conversion` lists what was converted and what was skipped and why; `execution` is the proof of what ran (FP8 GEMMs
in training and evaluation, differences from the declaration); `effective` records what was in force
(backend, compute dtype, compile mode); `environment` is the fingerprint of what can change numerics."""

MANIFEST_OPTIONAL_KEYS = ("alerts", "phases", "seconds_by_stage", "probed", DATA_SPLIT)
"""Keys that a manifest may hold: `seconds_by_stage` says where the time of the process that ended the run went (import,
build, prove, standby, train without evaluation, evaluate).
`alerts` lists what was noticed in the tensor statistics (`tensor_schema.ALERT_KEYS`);
absent where none were taken. `phases` lists first and last step, recipe and proof of execution of each phase of a run
that changed its precision; `conversion` and `execution` are then those of the first. `probed` says what the probes of a
loop that is not ours saw: how many there were, of how many linears, which of them cast to FP8 by recipe, which did
not."""


class Status(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    DIVERGED = "diverged"
    STOPPED = "stopped"


class Role(StrEnum):
    """What a run is for in its pair."""

    CONTROL = "control"
    TEST = "test"
    NULL = "null"


class Outcome(StrEnum):
    """What the comparison of one recipe with its control concluded."""

    IDENTICAL = "IDENTICAL"
    INVALID = "INVALID"
    DIVERGED = "DIVERGED"
    WORSE = "WORSE"
    WORSE_MARGIN_UNRESOLVED = "WORSE_MARGIN_UNRESOLVED"
    EQUIVALENT = "EQUIVALENT"
    EQUIVALENT_BUT_GROWING = "EQUIVALENT_BUT_GROWING"
    NON_INFERIOR = "NON_INFERIOR"
    BETTER = "BETTER"
    INCONCLUSIVE = "INCONCLUSIVE"


class Gate(StrEnum):
    """What a script should do about an outcome, from best to worst."""

    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    FAIL = "fail"
    INVALID = "invalid"


GATE_OF_OUTCOME: dict[Outcome, Gate] = {
    Outcome.EQUIVALENT: Gate.PASS,
    Outcome.NON_INFERIOR: Gate.PASS,
    Outcome.BETTER: Gate.PASS,
    Outcome.WORSE: Gate.FAIL,
    Outcome.DIVERGED: Gate.FAIL,
    Outcome.INCONCLUSIVE: Gate.INCONCLUSIVE,
    Outcome.WORSE_MARGIN_UNRESOLVED: Gate.INCONCLUSIVE,
    Outcome.EQUIVALENT_BUT_GROWING: Gate.INCONCLUSIVE,
    Outcome.INVALID: Gate.INVALID,
    Outcome.IDENTICAL: Gate.INVALID,
}
"""Gate of a recipe arm; for a null arm IDENTICAL passes (`gate_of`)."""


def gate_of(outcome: Outcome, *, null_arm: bool = False) -> Gate:
    """Return the gate of an outcome; a null arm that repeats its control exactly is as it should be."""
    if null_arm and outcome is Outcome.IDENTICAL:
        return Gate.PASS
    return GATE_OF_OUTCOME[outcome]


EXIT_OF_GATE: dict[Gate, int] = {Gate.PASS: 0, Gate.FAIL: 10, Gate.INCONCLUSIVE: 11, Gate.INVALID: 12}
"""Exit codes by gate; a study exits with the code of its worst gate."""

VERDICT_KEYS = (
    "recipe",
    "outcome",
    "gate",
    "gap",
    "interval",
    "margin",
    "provisional",
    "basis",
    "endpoint",
    "eval_precision",
    "alpha",
    "horizon_tokens",
    "n_seeds",
    "n_null_pairs",
    "token_cost",
    "trajectory_p",
    "onset_step",
    "diverged_seeds",
    "need_seeds",
    "noise_floor",
    "reasons",
    "warnings",
)
CONTRAST_KEYS = ("a", "b", "gap", "interval", "p", "n_seeds")
JUDGEMENT_KEYS = ("schema_version", "criteria", "verdicts", "contrasts")
