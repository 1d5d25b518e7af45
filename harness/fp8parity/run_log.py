"""A run directory written by anybody's training loop, for `fp8parity judge` and `report`. Imports no torch.

    log = start_run(Path("out/study"), arm="rowwise", seed=0, settings={"lr": 1e-3, "model": "llama 1b"})
    log.step(step, tokens, loss)                                          # every optimizer step
    log.evaluate(step, held_out_loss, eval_precision="arm")               # now and then
    log.probe(probe.run(step, tokens, micro_batches, loss_of))            # optional: `probe.GemmProbe`
    log.finish(tokens)                                                    # at the end, also when the loss blew up

What our own runner checks by itself is the loop's to state here: that both arms begin with the same weights
(`init_digest`), read the same batches (`batch_digest`) and share their settings. What is not stated is not compared.
That FP8 ran is known by probes alone; a verdict without any says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fp8parity import environment
from fp8parity.errors import ExecutionMismatchError, UsageError
from fp8parity.probed_casts import ProbedCasts
from fp8parity.study import launch_digest
from fp8parity.tensor_alerts import AlertWatch
from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.schema import Role, Status
from fp8parity_analysis.store import RunWriter

GROUP = "loop"
_OWN_KEYS = ("precision", "seed", "replica")
"""Settings of a run's spec that `start_run` writes itself."""
_MAX_NAME = 200
"""Bytes of a recipe's name: with the seed and the replica it fits the 255 of a folder's name."""


class Probed(Protocol):
    """What `probe.GemmProbe.run` returns."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def casts(self) -> list[dict[str, Any]]: ...  # noqa: D102
    @property
    def signals(self) -> list[dict[str, Any]]: ...  # noqa: D102
    @property
    def linears(self) -> tuple[str, ...]: ...  # noqa: D102


@dataclass
class RunLog:
    """One open run; made by `start_run`. Every method raises `UsageError` once the run is finished."""

    writer: RunWriter
    run_id: str
    spec_hash: str
    facts: Mapping[str, Any]
    probed: ProbedCasts
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    steps: int = 0
    watch: AlertWatch | None = None
    finished: bool = False
    _evaluated: dict[str, int] = field(default_factory=dict)

    def step(
        self, step: int, tokens: int, loss: float, *, grad_norm: float | None = None, lr: float | None = None,
        step_time: float | None = None, batch_digest: str | None = None,
    ) -> None:  # fmt: skip
        """Record an optimizer step, counted from 1; `tokens` is cumulative, `loss` in nats per token.

        A tensor of one number does for a number, at the price of waiting for its device. Raises `UsageError` for a step
        that does not follow the last one.
        """
        self._require_open()
        if step <= self.steps:
            after = f"comes after step {self.steps}" if self.steps else "is none"
            raise UsageError(
                f"RunLog.step: step {step} {after}; record each optimizer step once, counted from 1"
            )
        row = {
            "step": int(step), "tokens": int(tokens), "train_loss": float(loss), "grad_norm": _number(grad_norm),
            "lr": _number(lr), "step_time": _number(step_time), "batch_digest": batch_digest,
        }  # fmt: skip
        self.writer.append_curve([row])
        self.steps = int(step)

    def evaluate(self, step: int, loss: float, *, eval_precision: str) -> None:
        """Record a held-out loss in nats per token after `step` optimizer steps.

        `eval_precision` says of what forward pass: `bf16`, or `arm`, the arm's own, which a converted model in its
        training loop does. The criteria's `eval_precision` names the one that decides.
        """
        self._require_open()
        if eval_precision not in (schema.EVAL_BF16, schema.EVAL_ARM):
            raise UsageError(
                f"RunLog.evaluate: eval_precision={eval_precision!r}; write {schema.EVAL_BF16!r} or "
                f"{schema.EVAL_ARM!r} (the arm's own forward pass)"
            )
        last = self._evaluated.get(eval_precision, -1)
        if step <= last:
            raise UsageError(
                f"RunLog.evaluate: step {step} {f'comes after step {last}' if last >= 0 else 'is none'}; record one "
                "held-out loss of a precision at each step, in order"
            )
        row = {
            "step": int(step), "split": schema.HELD_OUT, "eval_precision": eval_precision, "loss": float(loss),
        }  # fmt: skip
        self.writer.append_evals([row])
        self._evaluated[eval_precision] = int(step)

    def probe(self, result: Probed) -> list[str]:
        """Record a probe and return its alerts as lines for the loop's own log.

        Raises `ExecutionMismatchError` when the casts are not what the arm's name says: an FP8 recipe's without any FP8
        cast, or with those of another recipe, or a control with some.
        """
        self._require_open()
        self.writer.append_tensor_stats(result.step, result.casts, result.signals)
        self.probed.add(result.linears, result.casts)
        difference = self.probed.difference()
        if difference:
            raise ExecutionMismatchError(difference)
        self.watch = self.watch or AlertWatch()
        return [str(alert) for alert in self.watch.look(result.casts)]

    def _require_open(self) -> None:
        if self.finished:
            raise UsageError(f"{self.run_id}: is finished; what comes after RunLog.finish belongs to no run")

    def finish(self, tokens: int, *, status: Status = Status.FINISHED, notes: tuple[str, ...] = ()) -> None:
        """Close the run: from now on it counts. A run that blew up is a result: `Status.DIVERGED`."""
        self._require_open()
        now = datetime.now(UTC)
        difference = self.probed.difference()
        unknown = dict.fromkeys(schema.MANIFEST_KEYS)
        alerts = {} if self.watch is None else {"alerts": [alert.to_json() for alert in self.watch.alerts]}
        known = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": self.run_id,
            "spec_hash": self.spec_hash,
            "status": status.value,
            "steps_done": self.steps,
            "tokens": int(tokens),
            "conversion": self.probed.conversion(),
            # probes can speak against what was declared; they do not prove every GEMM, as our own runner does
            "execution": {"proven": False, "differences": [difference]} if difference else None,
            "probed": self.probed.to_json(),
            "environment": environment.package_versions(),
            "started_at": self.started.isoformat(timespec="seconds"),
            "finished_at": now.isoformat(timespec="seconds"),
            "wall_seconds": round((now - self.started).total_seconds(), 3),
            "resumes": 0,
            "notes": list(notes),
        }
        self.writer.finish({**unknown, **known, **self.facts, **alerts})
        self.finished = True


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def start_run(
    study_dir: Path,
    *,
    arm: str,
    seed: int,
    replica: int = 0,
    settings: Mapping[str, Any] | None = None,
    init_digest: str | None = None,
    criteria: Criteria | None = None,
) -> RunLog:
    """Begin a run of `study_dir` and return its log; a run begun before is written anew.

    `arm` is `bf16` for the control, else the recipe's name, which becomes part of a folder's. A replica above 0 of
    `bf16` is a null run. `settings` are what the two arms of a pair must share, as JSON; `init_digest` identifies the
    initial weights. The first run of a study writes its `criteria` (default: `Criteria()`); later ones keep them.
    Raises `UsageError` for a finished run, for a name that no folder can have or that only looks like the control's,
    for settings that are said by an argument, and for a directory that holds a study of our own runner.
    """
    _check_name(arm)
    taken = [key for key in _OWN_KEYS if key in (settings or {})]
    if taken:
        raise UsageError(
            f"settings: {', '.join(taken)} would be replaced by what arm, seed and replica say; leave out or rename"
        )
    _claim(study_dir, criteria or Criteria())
    null = arm == schema.CONTROL_ARM and replica > 0
    role = Role.NULL if null else Role.CONTROL if arm == schema.CONTROL_ARM else Role.TEST
    spec = {**(settings or {}), "precision": {"recipe": arm}, "seed": seed, "replica": replica}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    run_id = f"{GROUP}-s{seed}-{arm}" + (f"-r{replica}" if replica else "")
    run_dir = study_dir / schema.RUNS_DIR / run_id
    if (run_dir / schema.MANIFEST_FILE).exists():
        raise UsageError(
            f"{run_dir}: is finished; use another seed or replica, or delete it to train it again"
        )
    document = {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": run_id,
        "study": study_dir.resolve().name,
        "group": GROUP,
        "arm": schema.NULL_ARM if null else arm,
        "role": role.value,
        "seed": seed,
        "replica": replica,
        "replica_kind": "rerun" if replica else "none",
        "data_path": "",
        "checkpoint_every": 0,
        "spec": spec,
    }
    writer = RunWriter(run_dir)
    write_json(run_dir / schema.SPEC_FILE, document)
    return RunLog(
        writer, run_id, digest, {"init_digest": init_digest} if init_digest else {}, ProbedCasts(arm)
    )


def _check_name(arm: str) -> None:
    """Refuse a recipe name that is no part of a folder's name: a run one folder deeper would not be found."""
    if not arm.strip() or "/" in arm or "\0" in arm or len(arm.encode()) > _MAX_NAME:
        raise UsageError(
            f"arm={arm!r}: names a folder too, so it is not empty, holds no / and at most {_MAX_NAME} bytes; write - "
            "or _ instead of /"
        )
    if arm != schema.CONTROL_ARM and arm.strip().lower() in (schema.CONTROL_ARM, schema.NULL_ARM):
        raise UsageError(
            f"arm={arm!r}: would be judged as a recipe; the control is arm={schema.CONTROL_ARM!r}, a run of it to "
            "measure noise has a replica above 0"
        )


def _claim(study_dir: Path, criteria: Criteria) -> None:
    """Write the study file unless it is there."""
    path = study_dir / schema.STUDY_FILE
    if path.exists():
        if read_json(path).get("recipe_file") != GROUP:
            raise UsageError(f"{study_dir}: holds a study of a recipe file; use another directory")
        return
    study_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "schema_version": schema.SCHEMA_VERSION,
            "name": study_dir.resolve().name,
            "description": "",
            "recipe_file": GROUP,
            "criteria": criteria.to_json(),
            "criteria_digest": criteria.digest(),
            "criteria_at_launch": launch_digest(criteria),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": [],
        },
    )
