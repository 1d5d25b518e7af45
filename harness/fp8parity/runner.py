"""Train one run in this process: from `spec.json` to a manifest, resuming where a killed process left off."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from pydantic import ValidationError

from fp8parity import environment, precision
from fp8parity.callbacks import (
    EvaluatorBeforeTraining,
    HeldOutEvaluator,
    LifeSigns,
    NonFiniteGuard,
    ProgressLines,
    ProofBeforeTraining,
    StandbyBeforeTraining,
)
from fp8parity.checkpointing import (
    Checkpointer,
    SignalsBeforeTraining,
    StopOnSignal,
    checkpoints,
    newest_usable,
    step_of,
)
from fp8parity.data import BatchPlan, Tokens, held_out_rows, open_tokens, training_tokens
from fp8parity.errors import EXIT_DIVERGED, InterruptedRunError, UsageError
from fp8parity.fork import require_same_data
from fp8parity.fork_state import StartState, load_start
from fp8parity.kept import CheckpointKeeper
from fp8parity.module import LMModule, TokenDataModule
from fp8parity.own_spec import origin_of, untagged, with_own_part
from fp8parity.phases import Phase, PhaseLog, phase_after
from fp8parity.probe_recorder import ProbeRecorder
from fp8parity.probe_spec import ProbePlan
from fp8parity.process import age_seconds, end_with_parent, sole_trainer
from fp8parity.progress import Heartbeat
from fp8parity.quiet import be_quiet
from fp8parity.recorder import CurveRecorder
from fp8parity.shapes import parameter_count
from fp8parity.spec import Frozen, ModelSpec, RunSpec
from fp8parity.standby import Gate
from fp8parity.token_meta import TokenMeta, side_file
from fp8parity.version_gates import version_problems
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.store import RunWriter

RUNS_PER_DEVICE = "FP8PARITY_RUNS_PER_DEVICE"
"""Set by the launcher when runs share a device: their throughput is then no measurement of the recipe's."""

logger = logging.getLogger(__name__)

Part = TypeVar("Part", bound=Frozen)


@dataclass(frozen=True)
class RunOrder:
    """A run directory's order: what to train, from which state, on which tokens, how often to save and to probe.

    `recipe_dir` is where the files of a model of the user's are; `checkpoint_share` the most of the time that saving
    may take, None if it may take any; `data_sha256` and `data_split` what the token file was, and how it was read
    and split, when the run was laid out, None if unknown.
    """

    run_dir: Path
    run_id: str
    spec: RunSpec
    data_path: Path
    checkpoint_every: int
    probe: ProbePlan
    keep_checkpoints: tuple[int, ...] = ()
    parent_checkpoint: Path | None = None
    recipe_dir: Path = Path()
    checkpoint_share: float | None = None
    data_sha256: str | None = None
    data_split: Mapping[str, Any] | None = None

    @property
    def study_dir(self) -> Path | None:
        """The study directory, two levels up, or None for a run directory that stands alone."""
        above = self.run_dir.resolve().parent.parent
        return above if (above / schema.STUDY_FILE).exists() else None


def read_order(run_dir: Path) -> RunOrder:
    """Read `spec.json`; `UsageError` when it is missing, broken, or was edited after it was named."""
    document = read_json(run_dir / schema.SPEC_FILE)
    missing = [key for key in schema.SPEC_KEYS if key not in document]
    if missing:
        raise UsageError(f"{run_dir / schema.SPEC_FILE}: lacks the keys {missing}")
    own = document.get("model")
    spec = _validated(run_dir, RunSpec, "spec", with_own_part(document["spec"], own))
    if not str(document["run_id"]).endswith(spec.hash()[:8]):
        raise UsageError(
            f"{run_dir / schema.SPEC_FILE}: run_id {document['run_id']} does not belong to this specification "
            f"(its hash begins {spec.hash()[:8]}); do not edit spec.json, change the recipe file"
        )
    data_path = run_dir / document["data_path"]
    probe = _validated(run_dir, ProbePlan, "probe", document.get("probe", {}))
    parent, share = document.get("parent_checkpoint"), document.get("checkpoint_share")
    return RunOrder(
        run_dir,
        str(document["run_id"]),
        spec,
        data_path,
        int(document["checkpoint_every"]),
        probe,
        tuple(map(int, document.get("keep_checkpoints", ()))),
        None if parent is None else run_dir / parent,
        (run_dir / own["recipe_dir"]).resolve() if own else Path(),
        None if share is None else float(share),
        document.get("data_sha256"),
        document.get(schema.DATA_SPLIT),
    )


def _validated(run_dir: Path, model: type[Part], key: str, values: Any) -> Part:
    """Read one part of `spec.json`; `UsageError` names its first wrong key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (key, *untagged(first["loc"]))))
        raise UsageError(f"{run_dir / schema.SPEC_FILE}: {where}: {first['msg']}") from error


def import_compiler_for(run_dir: Path) -> None:
    """Import the compiler now if the run in `run_dir` compiles; `UsageError` as `read_order`."""
    be_quiet()
    if read_order(run_dir).spec.train.compile == "blocks":
        precision.import_code_generation()


def resolve_device(spec: RunSpec) -> str:
    """Return cpu or cuda; `UsageError` when cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if spec.train.device == "cuda" and not available:
        raise UsageError(
            "train.device: cuda was asked for, and torch sees no CUDA device; write device: auto or cpu"
        )
    return "cuda" if available and spec.train.device != "cpu" else "cpu"


def _prepare_process(spec: RunSpec) -> None:
    """Fix what must be fixed before the first operation: threads, how matmuls round, every global generator.

    The settings are torch's defaults: a variable of the environment can turn TF32 on.
    """
    torch.set_num_threads(spec.train.threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cudnn.allow_tf32 = True
    random.seed(spec.seed)
    np.random.seed(spec.seed)  # noqa: NPY002 -- a library that draws from the global generator draws the same
    torch.manual_seed(spec.seed)


@contextlib.contextmanager
def _disk_full_is_interruption(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InterruptedRunError(
            f"{run_dir}: no space left on the device; what was written is kept. Free some space and run the same "
            "command again: it resumes from the last checkpoint"
        ) from error
    except RuntimeError as error:
        # torch's zip writer reports a full disk as a RuntimeError of its own
        if "No space left" not in str(error) and "file write failed" not in str(error):
            raise
        raise InterruptedRunError(
            f"{run_dir}: a checkpoint could not be written ({error}); free some space and run the same command again"
        ) from error


@dataclass
class _Session:
    """The parts of one training session that outlive Lightning's loop."""

    order: RunOrder
    device: str
    environment: dict[str, str]
    module: LMModule
    data: TokenDataModule
    meta: TokenMeta
    recorder: CurveRecorder
    guard: NonFiniteGuard
    checkpointer: Checkpointer
    evaluator: HeldOutEvaluator
    proof: ProofBeforeTraining
    probe: ProbeRecorder | None
    heartbeat: Heartbeat
    gate: Gate
    resume_from: Path | None
    phase: Phase
    phases: PhaseLog | None
    keeper: CheckpointKeeper | None
    stop: StopOnSignal


def _batch_plan(spec: RunSpec, tokens: Tokens, meta: TokenMeta) -> BatchPlan:
    train = training_tokens(tokens, meta, spec.train.context, spec.train.batch_size)
    reorder = spec.replica if spec.replica_kind == "reorder" else 0
    return BatchPlan(
        train, spec.train.context, spec.train.batch_size, spec.seed, reorder, spec.batches_before
    )


def _session(order: RunOrder, heartbeat: Heartbeat, gate: Gate) -> _Session:
    """Check everything that can be checked before training, then build the parts."""
    spec = order.spec
    start = _start_state(order)
    device = resolve_device(spec)
    found = environment.fingerprint(device)
    problems = version_problems(found, spec, device)
    if problems:
        raise UsageError("\n".join(problems))
    if order.study_dir is not None:
        environment.claim(order.study_dir, found)
    tokens, meta = open_tokens(
        order.data_path, {"data.sha256": spec.data.sha256, schema.SPEC_FILE: order.data_sha256}
    )
    other_split = meta.unlike(order.data_split)
    if other_split:
        raise UsageError(
            f"{side_file(order.data_path)}: {other_split} when this run was laid out; put that file back, or train it "
            "as a new study"
        )
    require_same_data(spec, meta.sha256)
    try:
        vocab_rows = spec.model.resolve_vocab(meta.vocab_size)
    except ValueError as error:
        raise UsageError(f"model.{error}") from error
    plan = _batch_plan(spec, tokens, meta)
    held_out = torch.from_numpy(held_out_rows(tokens, meta, spec.train.context, spec.train.eval_sequences))
    resume_from = newest_usable(order.run_dir, spec)
    done = step_of(resume_from) if resume_from else 0
    phase = phase_after(spec, done)
    switches = spec.precision.switch_at is not None
    columns = {"precision": phase.spec.precision.recipe} if switches else {}
    writer = RunWriter(order.run_dir, resume_step=done, extra_columns=tuple(columns))
    recorder = CurveRecorder(writer, phase.spec, columns)
    proof = ProofBeforeTraining(phase.spec, plan)
    keep = order.keep_checkpoints
    checkpointer = Checkpointer(
        recorder,
        order.run_dir / schema.CHECKPOINT_DIR,
        order.checkpoint_every,
        phase.last_step,
        order.checkpoint_share,
    )
    return _Session(
        order,
        device,
        found,
        LMModule(
            phase.spec,
            vocab_rows,
            lambda: gate.wait("build", heartbeat),
            owner=spec.hash(),
            start=start,
            recipe_dir=order.recipe_dir,
        ),
        TokenDataModule(plan, spec.train.accumulate),
        meta,
        recorder,
        NonFiniteGuard(recorder),
        checkpointer,
        HeldOutEvaluator(recorder, held_out),
        proof,
        ProbeRecorder(recorder, plan, order.probe) if order.probe.due_steps(spec.train.steps) else None,
        heartbeat,
        gate,
        resume_from,
        phase,
        PhaseLog(phase, proof) if switches else None,
        CheckpointKeeper(recorder, order.run_dir, spec, meta.sha256, keep) if keep else None,
        StopOnSignal(checkpointer),
    )


def _start_state(order: RunOrder) -> StartState | None:
    """Return what a fork starts from, checked; also when it resumes, for the digest of its initial weights."""
    if order.spec.parent is None:
        return None
    if order.parent_checkpoint is None:
        raise UsageError(
            f"{order.run_dir / schema.SPEC_FILE}: is a fork without parent_checkpoint; lay it out with fp8parity run"
        )
    return load_start(order.parent_checkpoint, order.spec.parent)


def _trainer(session: _Session) -> L.Trainer:
    spec = session.order.spec
    callbacks: list[L.Callback] = [
        SignalsBeforeTraining(session.stop),
        LifeSigns(session.heartbeat),
        session.proof,
        EvaluatorBeforeTraining(session.evaluator, session.heartbeat),
        StandbyBeforeTraining(session.gate, session.heartbeat),
        session.recorder,
        session.evaluator,
        session.guard,
        *(part for part in (session.phases, session.probe, session.keeper) if part),
        session.checkpointer,
        session.stop,
    ]
    interactive = sys.stderr.isatty()
    if interactive:
        from lightning.pytorch.callbacks import RichProgressBar

        callbacks.append(RichProgressBar())
    else:
        callbacks.append(ProgressLines(session.recorder))
    return L.Trainer(
        accelerator="gpu" if session.device == "cuda" else "cpu",
        devices=1,
        precision=spec.train.compute,
        max_steps=session.phase.last_step,
        accumulate_grad_batches=spec.train.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=interactive,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        # found under SLURM, its own would answer SIGUSR1, which asks for stacks, by requeueing the launcher's job
        plugins=[LightningEnvironment()],
        default_root_dir=session.order.run_dir,
    )


@dataclass
class _Attempt:
    """One process's work on a run: when it began, whether it resumed (None until known), where its time went."""

    started: datetime
    clock: float
    heartbeat: Heartbeat
    imported: float | None = None
    resumed: bool | None = None
    evaluating: float = 0.0

    def seconds_by_stage(self) -> dict[str, float]:
        """Return seconds by stage, in order; `evaluate` is not part of `train` here."""
        found: dict[str, float] = {} if self.imported is None else {"import": self.imported}
        found.update({str(stage): seconds for stage, seconds in self.heartbeat.seconds.items()})
        found["train"] = found.get("train", 0.0) - self.evaluating
        return {stage: round(seconds, 2) for stage, seconds in {**found, "evaluate": self.evaluating}.items()}


def _compile_in_force(session: _Session) -> str:
    """Return `blocks` or `off` as the proof saw it; as declared where an earlier process did the last step."""
    proof = session.proof.proof
    if proof is None:
        return session.order.spec.train.compile
    return "blocks" if proof.compiled_regions else "off"


def _manifest(session: _Session, attempt: _Attempt) -> dict[str, Any]:
    spec, recorder = session.order.spec, session.recorder
    built = session.module.built
    assert built is not None
    status = schema.Status.DIVERGED if session.guard.diverged else schema.Status.FINISHED
    # of two precisions one after the other there is no one speed
    rate = None if session.phases else recorder.tokens_per_second
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": session.order.run_id,
        "spec_hash": spec.hash(),
        "status": status.value,
        "steps_done": recorder.step,
        "first_nonfinite_step": recorder.first_nonfinite_step,
        "tokens": recorder.step * spec.train.tokens_per_step,
        "data_sha256": session.meta.sha256,
        schema.DATA_SPLIT: session.meta.reading,
        "init_digest": built.init_digest,
        "environment": session.environment,
        "conversion": built.record.to_json(),
        "execution": session.proof.proof.to_json() if session.proof.proof else None,
        **(session.phases.manifest() if session.phases else {}),
        "effective": {
            "device": session.device,
            "compute": spec.train.compute,
            "compile": _compile_in_force(session),
            "bf16_gemm": spec.train.bf16_gemm,
            "threads": torch.get_num_threads(),
            "runs_per_device": int(os.environ.get(RUNS_PER_DEVICE, "1")),
            "data_source": session.meta.source,
            "split": session.meta.split,
            **environment.provenance(),
        },
        "started_at": attempt.started.isoformat(timespec="seconds"),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": round(time.perf_counter() - attempt.clock - session.gate.waited_seconds, 3),
        "seconds_by_stage": attempt.seconds_by_stage(),
        "resumes": int(bool(attempt.resumed)),
        "throughput_tokens_per_s": None if rate is None else round(rate, 1),
        "model": {
            "label": spec.model.label,
            "parameters": parameter_count(spec.model, session.module.vocab_rows),
            "vocab_rows": session.module.vocab_rows,
            **({} if isinstance(spec.model, ModelSpec) else origin_of(spec.model)),
        },
        "notes": session.probe.notes if session.probe else [],
        **({"alerts": session.probe.alerts} if session.probe else {}),
    }


def _ended(run_dir: Path) -> int | None:
    """Return the exit code of a run that has its manifest, or None."""
    path = run_dir / schema.MANIFEST_FILE
    if not path.exists():
        return None
    return EXIT_DIVERGED if read_json(path)["status"] == schema.Status.DIVERGED.value else 0


def _train_session(order: RunOrder, gate: Gate) -> None:
    """Train from the last checkpoint to the end, phase by phase, and write the manifest."""
    attempt = _Attempt(datetime.now(UTC), time.perf_counter(), Heartbeat(order.run_dir), age_seconds())
    while not _train_phase(order, gate, attempt):
        # The next phase builds a model of its own, and both together may not fit the device. It compiles as a process
        # does that resumes here: without the sizes that the compiler saw in this phase.
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for old in checkpoints(order.run_dir / schema.CHECKPOINT_DIR):
        old.unlink()  # a finished run never resumes


def _train_phase(order: RunOrder, gate: Gate, attempt: _Attempt) -> bool:
    """Train from the last checkpoint to the end of its phase; return whether the run has ended with it."""
    heartbeat = attempt.heartbeat
    heartbeat.enter("build")
    session = _session(order, heartbeat, gate)
    if attempt.resumed is None:
        attempt.resumed = session.resume_from is not None
    try:
        if session.resume_from:
            print(f"resuming from {session.resume_from.name}", flush=True)
        with session.stop.as_interruption():
            _trainer(session).fit(
                session.module, session.data, ckpt_path=session.resume_from, weights_only=False
            )
        session.recorder.flush()
        attempt.evaluating += session.evaluator.seconds
        ended = session.guard.diverged or session.recorder.step >= order.spec.train.steps
        if not ended:
            session.stop.between_phases()
        if ended:
            heartbeat.enter("finish")
            session.recorder.writer.finish(_manifest(session, attempt), every_step=True)
    finally:
        session.recorder.writer.close()
    return ended


def train(run_dir: Path) -> int:
    """Train the run in `run_dir` to its end and return its exit code: 0 finished, 20 diverged.

    Does nothing when the manifest is already there. Raises `UsageError` before training when something does not
    fit, `ExecutionMismatchError` when the run would not execute what it declares, `InterruptedRunError` on a signal,
    a full disk, or another process at the same run (run again to resume).
    """
    be_quiet()
    order = read_order(run_dir)
    end_with_parent()
    gate = Gate.from_environment()
    with _disk_full_is_interruption(run_dir), sole_trainer(run_dir):
        code = _ended(run_dir)
        if code is None:
            _prepare_process(order.spec)
            _train_session(order, gate)
            code = _ended(run_dir)
    assert code is not None
    return code
