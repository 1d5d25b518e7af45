"""A run directory written by anybody's training loop, for `fp8parity judge` and `report`. Imports no torch.

    log = start_run(Path("out/study"), arm="rowwise", seed=0, settings={"lr": 1e-3, "model": "llama 1b"})
    log.step(step, tokens, loss)                                          # every optimizer step
    log.evaluate(step, held_out_loss)                                     # now and then
    log.probe(probe.run(step, tokens, micro_batches, loss_of))            # optional: `probe.GemmProbe`
    log.finish(tokens)                                                    # at the end, also when the loss blew up

What our own runner checks by itself is the loop's to state here: that both arms begin with the same weights
(`init_digest`), read the same batches (`batch_digest`) and share their settings. What is not stated is not compared.
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
from fp8parity.errors import UsageError
from fp8parity.study import launch_digest
from fp8parity.tensor_alerts import AlertWatch
from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.schema import Role, Status
from fp8parity_analysis.store import RunWriter

GROUP = "loop"
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


@dataclass
class RunLog:
    """One open run; made by `start_run`."""

    writer: RunWriter
    run_id: str
    spec_hash: str
    facts: Mapping[str, Any]
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    steps: int = 0
    watch: AlertWatch | None = None

    def step(
        self, step: int, tokens: int, loss: float, *, grad_norm: float | None = None, lr: float | None = None,
        step_time: float | None = None, batch_digest: str | None = None,
    ) -> None:  # fmt: skip
        """Record an optimizer step, counted from 1; `tokens` is cumulative, `loss` in nats per token."""
        self.steps = step
        row = {
            "step": step, "tokens": tokens, "train_loss": loss, "grad_norm": grad_norm, "lr": lr,
            "step_time": step_time, "batch_digest": batch_digest,
        }  # fmt: skip
        self.writer.append_curve([row])

    def evaluate(self, step: int, loss: float, *, eval_precision: str = schema.EVAL_BF16) -> None:
        """Record a held-out loss in nats per token, of a `bf16` forward or of the `arm`'s own."""
        row = {"step": step, "split": schema.HELD_OUT, "eval_precision": eval_precision, "loss": loss}
        self.writer.append_evals([row])

    def probe(self, result: Probed) -> list[str]:
        """Record a probe and return its alerts as lines for the loop's own log."""
        self.writer.append_tensor_stats(result.step, result.casts, result.signals)
        self.watch = self.watch or AlertWatch()
        return [str(alert) for alert in self.watch.look(result.casts)]

    def finish(self, tokens: int, *, status: Status = Status.FINISHED, notes: tuple[str, ...] = ()) -> None:
        """Close the run: from now on it counts. A run that blew up is a result: `Status.DIVERGED`."""
        now = datetime.now(UTC)
        unknown = dict.fromkeys(schema.MANIFEST_KEYS)
        alerts = {} if self.watch is None else {"alerts": [alert.to_json() for alert in self.watch.alerts]}
        known = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": self.run_id,
            "spec_hash": self.spec_hash,
            "status": status.value,
            "steps_done": self.steps,
            "tokens": tokens,
            "environment": environment.package_versions(),
            "started_at": self.started.isoformat(timespec="seconds"),
            "finished_at": now.isoformat(timespec="seconds"),
            "wall_seconds": round((now - self.started).total_seconds(), 3),
            "resumes": 0,
            "notes": list(notes),
        }
        self.writer.finish({**unknown, **known, **self.facts, **alerts})


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
    Raises `UsageError` for a finished run, for a name that no folder can have, and for a directory that holds a study
    of our own runner.
    """
    _check_name(arm)
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
    return RunLog(writer, run_id, digest, {"init_digest": init_digest} if init_digest else {})


def _check_name(arm: str) -> None:
    """Refuse a recipe name that is no part of a folder's name: a run one folder deeper would not be found."""
    if not arm.strip() or "/" in arm or "\0" in arm or len(arm.encode()) > _MAX_NAME:
        raise UsageError(
            f"arm={arm!r}: names a folder too, so it is not empty, holds no / and at most {_MAX_NAME} bytes; write - "
            "or _ instead of /"
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
