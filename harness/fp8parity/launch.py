"""Run many runs: slots, a ledger, finished ones skipped, interrupted ones resumed, faults retried. Imports no torch.

Each run is one fresh process (`fp8parity train RUN_DIR`): converting a model patches the compiler for the whole
process, so a control trained after it in the same process would not be the same control.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fp8parity.devices import visible_gpus
from fp8parity.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE, InterruptedRunError
from fp8parity.process import PARENT_PID
from fp8parity.progress import last_row
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json

MAX_RETRIES = 2
"""How often an infrastructure fault (a crash, a killed worker) is tried again; a diverged run never is."""

FULL_DISK = "no space left on the device"
"""What a worker says of a full disk; trying again at once would only fail again."""

COMPILE_CACHE_DIR = "compile_cache"
COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables and folders of the compile caches: a study's runs compile each kernel once.

The study's own, since torch's keys know nothing of the patch that every worker applies to the compiler: in torch's
common folder a worker would find code that an unpatched process compiled from the same graph.
"""

POLL_SECONDS = 0.2
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class RunState:
    """What the disk and the launcher know about one run."""

    run_id: str
    state: str
    step: int
    steps: int
    loss: float | None
    seconds_left: float | None
    reason: str = ""


@dataclass
class _Job:
    """One run on its way: queued, then a process in a slot."""

    run_dir: Path
    steps: int
    threads: int
    attempts: int = 0
    process: subprocess.Popen[bytes] | None = None
    slot: int = -1
    started: float = 0.0
    first_step: int = 0
    log: IO[bytes] | None = None
    outcome: str = ""
    reason: str = ""

    @property
    def run_id(self) -> str:
        return self.run_dir.name


def ledger_line(out: Path, run_id: str, event: str, **facts: Any) -> None:
    """Append one line to the study's ledger."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_id": run_id,
        "event": event,
        **facts,
    }
    with (out / schema.LEDGER_FILE).open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")


def _last_words(run_dir: Path) -> str:
    """Return the last line of a run's log: the reason, if the process could still say one."""
    with contextlib.suppress(OSError):
        lines = (run_dir / schema.LOG_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1].strip()[:500]
    return "no output"


@dataclass
class Launcher:
    """Runs jobs in slots until none is left; `launch` is the entry point."""

    out: Path
    slots: int
    gpus: Sequence[str]
    on_change: Callable[[list[RunState]], None]
    queue: list[_Job] = field(default_factory=list)
    running: list[_Job] = field(default_factory=list)
    ended: list[_Job] = field(default_factory=list)
    stopping: bool = False

    def states(self) -> list[RunState]:
        """Return the state of every run, running ones first."""
        return [
            *(_running_state(job) for job in self.running),
            *(RunState(job.run_id, "waiting", 0, job.steps, None, None) for job in self.queue),
            *(
                RunState(job.run_id, job.outcome, job.steps, job.steps, None, None, job.reason)
                for job in self.ended
            ),
        ]

    def _environment(self, job: _Job) -> dict[str, str]:
        threads = str(job.threads)
        extra = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        sharing = -(-self.slots // max(1, len(self.gpus) or self.slots))
        extra["FP8PARITY_RUNS_PER_DEVICE"] = str(sharing)
        extra[PARENT_PID] = str(os.getpid())
        caches = self.out.resolve() / COMPILE_CACHE_DIR
        extra |= {
            name: os.environ.get(name) or str(caches / folder) for name, folder in COMPILE_CACHES.items()
        }
        if self.gpus:
            extra["CUDA_VISIBLE_DEVICES"] = self.gpus[job.slot % len(self.gpus)]
        return {**os.environ, **extra, "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}

    def _start(self, job: _Job) -> None:
        taken = {other.slot for other in self.running}
        job.slot = next(i for i in range(self.slots) if i not in taken)
        job.attempts += 1
        job.log = (job.run_dir / schema.LOG_FILE).open("ab")
        row = last_row(job.run_dir / schema.CURVE_STREAM)
        job.first_step = int(row["step"]) if row else 0
        # Its own session, so that Ctrl-C in the terminal reaches the launcher only, which then stops it cleanly.
        job.process = subprocess.Popen(
            [sys.executable, "-m", "fp8parity", "train", str(job.run_dir)],
            stdout=job.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment(job),
            start_new_session=True,
        )
        job.started = time.monotonic()
        self.running.append(job)
        ledger_line(self.out, job.run_id, "started", attempt=job.attempts, slot=job.slot, pid=job.process.pid)

    def _reap(self) -> None:
        for job in list(self.running):
            assert job.process is not None
            code = job.process.poll()
            if code is None:
                continue
            self.running.remove(job)
            if job.log:
                job.log.close()
            self._settle(job, code)

    def _settle(self, job: _Job, code: int) -> None:
        """Decide what an exit code means: a result, an interruption, a mistake of the user's, or a fault."""
        finished = (job.run_dir / schema.MANIFEST_FILE).exists()
        job.reason = "" if finished else _last_words(job.run_dir)
        if finished and code in (0, EXIT_DIVERGED):
            job.outcome = "finished" if code == 0 else "diverged"
        elif code in (EXIT_INTERRUPTED, -signal.SIGTERM) and self.stopping:
            job.outcome = "interrupted"
        elif code in (EXIT_USAGE, EXIT_INVALID):
            job.outcome = "refused" if code == EXIT_USAGE else "invalid"
        elif job.attempts <= MAX_RETRIES and not self.stopping and FULL_DISK not in job.reason:
            ledger_line(self.out, job.run_id, "retry", exit_code=code, reason=job.reason)
            self.queue.insert(0, job)
            return
        else:
            job.outcome = "interrupted" if code == EXIT_INTERRUPTED else "failed"
        ledger_line(self.out, job.run_id, job.outcome, exit_code=code, reason=job.reason)
        self.ended.append(job)

    def run(self) -> None:
        """Run everything; on SIGINT or SIGTERM stop the workers cleanly and raise `InterruptedRunError`."""
        try:
            self._run()
        except BaseException:
            self._stop()  # whatever ended the launcher must not leave workers behind
            raise

    def _run(self) -> None:
        with self._signals():
            while self.queue or self.running:
                while self.queue and len(self.running) < self.slots and not self.stopping:
                    self._start(self.queue.pop(0))
                self._reap()
                self.on_change(self.states())
                if self.stopping:
                    raise InterruptedRunError("stopped; run the same command again to resume")
                time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        for job in self.running:
            assert job.process is not None
            job.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while self.running and time.monotonic() < deadline:
            self._reap()
            time.sleep(POLL_SECONDS)
        for job in self.running:
            assert job.process is not None
            job.process.kill()
            job.process.wait()
            ledger_line(self.out, job.run_id, "killed", reason=f"did not stop within {GRACE_SECONDS:.0f} s")


def _running_state(job: _Job) -> RunState:
    row = last_row(job.run_dir / schema.CURVE_STREAM)
    step = int(row["step"]) if row else 0
    done = step - job.first_step
    elapsed = time.monotonic() - job.started
    left = elapsed / done * (job.steps - step) if done > 0 else None
    return RunState(
        job.run_id,
        "running" if row else "starting",
        step,
        job.steps,
        row["train_loss"] if row else None,
        left,
    )


def _job(run_dir: Path) -> _Job:
    train: Mapping[str, Any] = read_json(run_dir / schema.SPEC_FILE)["spec"]["train"]
    return _Job(run_dir, int(train["steps"]), int(train["threads"]))


def launch(
    out: Path,
    run_dirs: Sequence[Path],
    *,
    slots: int,
    use_gpus: bool,
    on_change: Callable[[list[RunState]], None],
) -> list[RunState]:
    """Train the runs that are not finished, `slots` at a time, and return how each of them ended.

    Raises `InterruptedRunError` after a signal or when a run was interrupted from outside.
    """
    pending = [path for path in run_dirs if not (path / schema.MANIFEST_FILE).exists()]
    launcher = Launcher(
        out, slots, visible_gpus() if use_gpus else [], on_change, [_job(path) for path in pending]
    )
    launcher.run()
    return launcher.states()
