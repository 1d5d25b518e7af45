"""The main job: lay out, train, judge, report. Imports no torch: training happens in other processes."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from fp8parity import matrix, study
from fp8parity.devices import visible_gpus
from fp8parity.early_stop import EarlyStop
from fp8parity.errors import Fp8ParityError, InterruptedRunError, UsageError
from fp8parity.fork import kept_steps
from fp8parity.jobs import RunState
from fp8parity.launch import launch
from fp8parity.matrix import Matrix
from fp8parity.plan import memory_of, slots_of, standby_of
from fp8parity.screen import live_runs, show_judgement, show_unfinished
from fp8parity.selftest_gate import require_sound_arithmetic
from fp8parity.yaml_marks import load
from fp8parity_analysis import schema


def _words(state: RunState) -> str:
    return f"{state.run_id}: {state.reason.removeprefix('fp8parity: ')}"


def _raise_on_refusal(states: list[RunState]) -> None:
    refused = [s for s in states if s.state == "refused"]
    if refused:
        raise UsageError("\n".join(_words(s) for s in refused))
    interrupted = [s for s in states if s.state == "interrupted"]
    if interrupted:
        raise InterruptedRunError("\n".join(_words(s) for s in interrupted))
    failed = [s for s in states if s.state in ("failed", "hung")]
    if failed and len(failed) == len(states):
        reasons = "\n".join(f"{s.run_id}: {s.reason}" for s in failed[:5])
        raise Fp8ParityError(
            f"every run failed; the log is in each run directory's {schema.LOG_FILE}\n{reasons}"
        )


def _check_mlflow(out: Path, uri: str | None) -> None:
    """Refuse an address that cannot work before anything trains."""
    if uri is not None:
        from fp8parity_analysis.mlflow_follow import target_of

        target_of(out, uri)


_GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""What the drivers of GPUs make; where one is, a missing nvidia-smi means nothing and torch has the last word."""


def _require_gpu(plan: Matrix, out: Path) -> None:
    """Refuse `device: cuda` on a machine without a GPU while runs are to be trained, naming its line in the file."""
    asking = [run for run in plan.runs if run.spec.train.device == "cuda"]
    missing = [
        run for run in asking if not (out / schema.RUNS_DIR / run.run_id / schema.MANIFEST_FILE).exists()
    ]
    if not missing or visible_gpus() or any(node.exists() for node in _GPU_NODES):
        return
    marked = load(plan.recipe_path)
    axis, base = ("axes", "train.device"), ("base", "train", "device")
    key = axis if axis in marked.lines else base
    raise UsageError(
        f"{plan.recipe_path}:{marked.line(key)}: {'.'.join(key)}: cuda, and no GPU is visible here; run it where there "
        "is one, or write cpu, which is another study; nothing was written"
    )


def _mirrored(out: Path, uri: str | None) -> AbstractContextManager[None]:
    if uri is None:
        return nullcontext()
    from fp8parity_analysis.mlflow_follow import followed

    return followed(out, uri, lambda words: print(f"fp8parity: warning: {words}", file=sys.stderr))


def run_study(
    recipe: Path, out: Path, *, slots: int | None, any_verdict: bool, mlflow_uri: str | None = None
) -> int:
    """Train what is missing, judge everything, write the report; return the exit code of the worst gate.

    With `any_verdict` a valid comparison exits 0 whatever it found. A crashed run leaves the others standing and
    makes its own comparison INVALID. A GPU that is asked for must be there before anything is written. With
    `mlflow_uri` a process of its own mirrors the study meanwhile; MLflow's failures are a warning. Raises the errors
    of `matrix.read`, `study.lay_out`, `selftest_gate.require_sound_arithmetic` and `launch.launch`.
    """
    console = Console(emoji=False)  # a name such as a:on:b is a name
    _check_mlflow(out, mlflow_uri)
    plan = matrix.read(recipe)
    _require_gpu(plan, out)
    with study.lock(out):
        run_dirs = study.lay_out(plan, out)
        with _mirrored(out, mlflow_uri):
            states = _train_missing(plan, out, run_dirs, console, slots)
            if not plan.compares:
                show_unfinished(console, states)
                return _report_parents(plan, run_dirs, console)
            code = _judge_and_report(out, console, any_verdict=any_verdict)
            show_unfinished(console, states)
            return code


def _train_missing(
    plan: Matrix, out: Path, run_dirs: list[Path], console: Console, asked: int | None
) -> list[RunState]:
    """Train the runs without a manifest and return how each of them ended; raises when there is nothing to judge."""
    stopper = EarlyStop(plan, study.criteria_of(plan), out)
    unwanted = stopper.unwanted()
    run_dirs = [path for path in run_dirs if path.name not in unwanted]
    done = sum((path / schema.MANIFEST_FILE).exists() for path in run_dirs)
    slots = slots_of(plan, asked)
    words = f"{len(run_dirs)} runs, {done} already finished"
    words += f", {len(unwanted)} not trained ({next(iter(unwanted.values()))})" if unwanted else ""
    console.print(
        f"{plan.name}: {words}" + (f", {slots} at a time" if done < len(run_dirs) else ""), markup=False
    )
    if done == len(run_dirs):
        return []
    specs = [run.spec for run in plan.runs]
    require_sound_arithmetic(out, specs, lambda words: console.print(words, markup=False), slots)
    # who asks for a number of slots gets it; else no more runs go together than memory is estimated to hold
    memory = None if asked or plan.runtime.slots else memory_of(plan)
    with live_runs(console, done) as on_change:
        states = launch(
            out,
            run_dirs,
            slots=slots,
            use_gpus=plan.runs[0].spec.train.device != "cpu",
            on_change=on_change,
            hang_after_s=plan.runtime.hang_after_s,
            memory=memory,
            standby=standby_of(plan, asked),
            unwanted=stopper.unwanted,
        )
    try:
        _raise_on_refusal(states)
    except Fp8ParityError:
        show_unfinished(console, states)
        raise
    return states


def _report_parents(plan: Matrix, run_dirs: list[Path], console: Console) -> int:
    """Say which checkpoints a study of parents has kept; `Fp8ParityError` names the runs that lack one."""
    lacking = []
    for run, run_dir in zip(plan.runs, run_dirs, strict=True):
        wanted = [step for step in plan.runtime.keep_checkpoints if step <= run.spec.train.steps]
        kept = kept_steps(run_dir)
        missing = [step for step in wanted if step not in kept]
        if missing:
            lacking.append(f"{run.run_id}: no checkpoint of step {', '.join(map(str, missing))} was kept")
        console.print(
            f"{run_dir}: kept {', '.join(map(str, kept)) or 'nothing'}", markup=False, highlight=False
        )
    if lacking:
        raise Fp8ParityError("\n".join(lacking) + f"\nthe log is in each run directory's {schema.LOG_FILE}")
    return 0


def _judge_and_report(out: Path, console: Console, *, any_verdict: bool) -> int:
    from fp8parity.judging import judge_study, write_results
    from fp8parity_analysis.schema import Gate

    judgement = judge_study(out, {})
    paths = write_results(out, judgement)
    show_judgement(console, judgement)
    console.print(f"\nreport: {next(p for p in paths if p.suffix == '.html')}", markup=False, highlight=False)
    sys.stdout.flush()
    return 0 if any_verdict and judgement.gate is not Gate.INVALID else judgement.exit_code
