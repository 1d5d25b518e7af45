"""Run many runs: slots, a ledger, finished ones skipped, interrupted ones resumed, faults retried. Imports no torch.

Each run is one fresh process (`fp8parity train RUN_DIR`): converting a model patches the compiler for the whole
process, so a control trained after it in the same process would not be the same control.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fp8parity.devices import device_memory, visible_gpus
from fp8parity.errors import EXIT_INTERRUPTED, InterruptedRunError
from fp8parity.faults import Fault
from fp8parity.jobs import Job, RunState, job_of
from fp8parity.ledger import LAUNCHED, STANDBY, STANDBY_LIMITED, STOPPED_EARLY, WITHDRAWN, ledger_line
from fp8parity.memory import PROCESS_BYTES
from fp8parity.process import PARENT_PID, start_ticks, stopping_with
from fp8parity.progress import stage_of
from fp8parity.quiet import QUIET_ENVIRONMENT
from fp8parity.standby import Depth
from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json

MAX_RETRIES = 2
"""How often an infrastructure fault (a crash, a killed or hung worker) is tried again; a diverged run never is."""

HANG_AFTER_S = 900.0
"""Seconds without a sign of life after which a worker counts as hung: longer than compiling or one evaluation takes."""

STANDBY_LEAD_S = 300.0
"""The next worker is started this many seconds before a run is expected to end: starting and compiling take less, and
what a worker in standby holds of a device is not held for hours."""

COMPILE_CACHE_DIR = "compile_cache"
COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables and folders of the compile caches: a study's runs compile each kernel once.

The study's own, since torch's keys know nothing of the patch that every worker applies to the compiler: in torch's
common folder a worker would find code that an unpatched process compiled from the same graph.
"""


POLL_SECONDS = 0.2
GRACE_SECONDS = 60.0

_OUTCOME_OF_CAUSE = {
    "usage": "refused",
    "not_as_declared": "invalid",
    "hung": "hung",
    "full_disk": "interrupted",
    "terminated": "interrupted",
}


def compile_caches(out: Path) -> dict[str, str]:
    """Return the environment that puts compile caches into the study `out`, unless the user has set them."""
    folder = out.resolve() / COMPILE_CACHE_DIR
    return {name: os.environ.get(name) or str(folder / part) for name, part in COMPILE_CACHES.items()}


@dataclass
class Launcher:
    """Runs jobs in slots until none is left; `launch` is the entry point.

    A job's slot is free once its result is on the disk: what its process does after that, seconds on a GPU, is no
    training. Its memory counts until the process ends; on a GPU whose memory is not counted the slot waits for that.

    Jobs start in the order of the queue. One waits while its device has no slot, or too little memory for its
    estimate beside those that run there; alone on a device it always starts. With `depth` the next runs' workers
    start while others train (`standbys`), as far as the memory holds both.
    """

    out: Path
    slots: int
    gpus: Sequence[str]
    on_change: Callable[[list[RunState]], None]
    queue: list[Job] = field(default_factory=list)
    hang_after_s: float = HANG_AFTER_S
    device_bytes: int | None = None
    depth: Depth | None = None
    unwanted: Callable[[], Mapping[str, str]] = dict
    news: bool = True
    standbys: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    stopping: bool = False

    def states(self) -> list[RunState]:
        """Return the state of every run, running ones first."""
        return [job.state() for job in (*self.running, *self.standbys, *self.queue, *self.ended)]

    def _environment(self, job: Job, slot: int) -> dict[str, str]:
        threads = str(job.threads)
        extra = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        sharing = -(-self.slots // max(1, len(self.gpus) or self.slots))
        # what proves itself and compiles beside a run disturbs the clock as another run does
        extra["FP8PARITY_RUNS_PER_DEVICE"] = str(sharing + (self.depth == "prove"))
        extra[PARENT_PID] = str(os.getpid())
        extra |= compile_caches(self.out)
        if self.gpus:
            extra["CUDA_VISIBLE_DEVICES"] = self.gpus[self._device(slot)]
        return {**os.environ, **extra, **QUIET_ENVIRONMENT}

    def _device(self, slot: int) -> int:
        return slot % max(1, len(self.gpus))

    def _drop_unwanted(self) -> None:
        """Take out the runs that nobody needs any more, asked after every end of a run; what trains may finish."""
        if not self.news:
            return
        self.news = False
        unwanted = self.unwanted()
        self._withdraw([job for job in self.standbys if job.run_id in unwanted])
        for job in [job for job in self.queue if job.run_id in unwanted]:
            self.queue.remove(job)
            job.outcome, job.reason = STOPPED_EARLY, unwanted[job.run_id]
            self.ended.append(job)

    def _note_results(self) -> None:
        """Learn which runs have their result although their processes have not ended yet."""
        for job in self.running:
            if not job.outcome:
                job.outcome = _result_of(job.run_dir) or ""
                self.news = self.news or bool(job.outcome)

    def _free_slots(self) -> list[int]:
        held_blindly = bool(self.gpus) and self.device_bytes is None
        taken = {job.slot for job in self.running if held_blindly or not job.outcome}
        return [slot for slot in range(self.slots) if slot not in taken]

    def _on_device(self, jobs: Sequence[Job], slot: int) -> list[Job]:
        return [job for job in jobs if self._device(job.slot) == self._device(slot)]

    def _fits(self, job: Job, slot: int, needed: int) -> bool:
        """Whether the device of `slot` has `needed` bytes for the job beside what the others hold there."""
        others = self._on_device([o for o in (*self.running, *self.standbys) if o is not job], slot)
        held = sum(other.held for other in others)
        return not others or self.device_bytes is None or held + needed <= self.device_bytes

    def _start_what_fits(self) -> None:
        """Fill the free slots: first with what is prepared on their device, then from the queue.

        What is prepared came first: while it does not fit, its device takes nothing from the queue. Only a run whose
        worker failed in standby came before it.
        """
        self._unblock_standbys()
        for slot in self._free_slots():
            head = self.queue[0] if self.queue and self.queue[0].prepared_in_vain else None
            if head is not None and self._fits(head, slot, head.memory) and not self.stopping:
                self._start_head(slot)
                continue
            first = next(iter(self._on_device(self.standbys, slot)), None)
            if first is not None and self._fits(first, slot, first.memory) and not self.stopping:
                self.standbys.remove(first)
                first.go(slot)
                self._began(first, prepared=True)
        while self.queue and not self.stopping:
            job = self.queue[0]
            free = [slot for slot in self._free_slots() if not self._on_device(self.standbys, slot)]
            slots = [slot for slot in free if self._fits(job, slot, job.memory)]
            if not slots:
                return
            self._start_head(slots[0])

    def _start_head(self, slot: int) -> None:
        job = self.queue.pop(0)
        job.start(slot, self._environment(job, slot))
        self._began(job)

    def _unblock_standbys(self) -> None:
        """Leave one worker in standby where nothing trains: two could each wait for the other's memory for ever."""
        for device in range(max(1, len(self.gpus))):
            if not self._on_device(self.running, device):
                self._withdraw(self._on_device(self.standbys, device)[1:])

    def _began(self, job: Job, **facts: Any) -> None:
        self.running.append(job)
        ledger_line(self.out, job.run_id, "started", **self._worker_facts(job), **facts)

    def _worker_facts(self, job: Job) -> dict[str, Any]:
        return {"attempt": job.attempts, "slot": job.slot, "pid": job.pid, "born": start_ticks(job.pid)}

    def _prepare_next(self) -> None:
        """Start the workers of the next runs for the slots whose runs are about to end."""
        if self.depth is None or self.stopping:
            return
        for device in range(max(1, len(self.gpus))):
            ending = [job for job in self._on_device(self.running, device) if job.ends_within(STANDBY_LEAD_S)]
            for _ in range(len(ending) - len(self._on_device(self.standbys, device))):
                self._prepare_one(device)

    def _prepare_one(self, device: int) -> None:
        job = next((job for job in self.queue if not job.prepared_in_vain), None)
        depths: tuple[Depth, ...] = ("prove", "build") if self.depth == "prove" else ("build",)
        for depth in depths if job is not None else ():
            assert job is not None
            needed = job.memory if depth == "prove" else min(job.memory, PROCESS_BYTES)
            if self._fits(job, device, needed):
                self.queue.remove(job)
                job.stand_by(
                    device, self._environment(job, device), depth
                )  # a device's first slot has its number
                self.standbys.append(job)
                ledger_line(self.out, job.run_id, STANDBY, **self._worker_facts(job), depth=depth)
                return

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        """End workers in standby; their runs wait again, in the order in which they came."""
        for job in reversed(jobs):
            job.withdraw()
            self.standbys.remove(job)
            self.queue.insert(0, job)
            ledger_line(self.out, job.run_id, WITHDRAWN, attempt=job.attempts)

    def _free_what_waits_elsewhere(self) -> None:
        """Let a free slot have what is prepared for a device whose slots are all busy, once nothing else waits."""
        if not self.queue and not self.stopping:
            free = self._free_slots()
            fit = [job for job in self.standbys if any(self._fits(job, slot, job.memory) for slot in free)]
            self._withdraw(fit[:1])

    def _reap(self) -> None:
        for job in [*self.running, *self.standbys]:
            if job.poll() is None and not self.stopping and job.silent_seconds() > self.hang_after_s:
                ledger_line(
                    self.out,
                    job.run_id,
                    "hung",
                    attempt=job.attempts,
                    stage=stage_of(job.run_dir),
                    silent_s=round(job.silent_seconds(), 1),
                )
                job.kill_hung()
            code = job.poll()
            if code is not None and self._leaves(job):
                self._settle(job, code)

    def _leaves(self, job: Job) -> bool:
        """Take an ended job from its list; False when it was withdrawn for another one's sake meanwhile."""
        for jobs in (self.running, self.standbys):
            if job in jobs:
                jobs.remove(job)
                return True
        return False

    def _settle(self, job: Job, code: int) -> None:
        """Decide what an exit code means: a result, an interruption, a mistake of the user's, or a fault."""
        self.news = True
        result = _result_of(job.run_dir)
        if result is not None:  # also of a worker that was killed after it had written its manifest
            job.outcome, job.reason = result, ""
            ledger_line(self.out, job.run_id, result, exit_code=code)
            self.ended.append(job)
            return
        fault = job.fault(code, self.hang_after_s)
        job.reason = fault.reason
        self._learn_from(job, fault)
        if self._is_retried(job, fault):
            self._record(job, "retry", code, fault)
            self.queue.insert(0, job)
            return
        stopped = self.stopping and code in (EXIT_INTERRUPTED, -signal.SIGTERM)
        job.outcome = "interrupted" if stopped else _OUTCOME_OF_CAUSE.get(fault.cause, "failed")
        self._record(job, job.outcome, code, fault)
        self.ended.append(job)

    def _learn_from(self, job: Job, fault: Fault) -> None:
        """Prepare no run twice in vain; where memory ran out beside a prepared model, prepare no model again."""
        prepared = [o for o in self._on_device(self.standbys, job.slot) if o.standby == "prove"]
        beside_model = bool(prepared) or job.standby == "prove"
        if job.standby is not None:
            job.standby, job.prepared_in_vain = None, True
        if fault.cause == "out_of_memory" and beside_model and not self.stopping:
            self.depth = "build"
            ledger_line(self.out, "", STANDBY_LIMITED, depth=self.depth, cause=fault.cause)
            self._withdraw(prepared)

    def _is_retried(self, job: Job, fault: Fault) -> bool:
        return fault.is_retried and job.attempts <= MAX_RETRIES and not self.stopping

    def _record(self, job: Job, event: str, code: int, fault: Fault) -> None:
        facts = {"cause": fault.cause, "stage": fault.stage, "attempt": job.attempts}
        ledger_line(self.out, job.run_id, event, exit_code=code, **facts, reason=fault.reason)

    def run(self) -> None:
        """Run everything; on SIGINT or SIGTERM stop the workers cleanly and raise `InterruptedRunError`."""
        try:
            self._run()
        except BaseException:
            self._stop()  # whatever ended the launcher must not leave workers behind
            raise

    def _run(self) -> None:
        with stopping_with(self._note_signal):
            while self.queue or self.running or self.standbys:
                self._note_results()
                self._drop_unwanted()
                self._start_what_fits()
                self._prepare_next()
                self._free_what_waits_elsewhere()
                self._reap()
                self.on_change(self.states())
                if self.stopping:
                    raise InterruptedRunError("stopped; run the same command again to resume")
                time.sleep(POLL_SECONDS)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _stop(self) -> None:
        self.stopping = True
        for job in self.running:
            job.terminate()
        self._withdraw(list(self.standbys))
        deadline = time.monotonic() + GRACE_SECONDS
        while self.running and time.monotonic() < deadline:
            self._reap()
            time.sleep(POLL_SECONDS)
        for job in self.running:
            job.kill()
            words = f"did not stop within {GRACE_SECONDS:.0f} s of being asked"
            self._record(job, "killed", -signal.SIGKILL, Fault("hung", stage_of(job.run_dir), words))


def _result_of(run_dir: Path) -> str | None:
    """Return finished or diverged when the run has its manifest."""
    path = run_dir / schema.MANIFEST_FILE
    if not path.exists():
        return None
    with contextlib.suppress(BadInputError):
        if read_json(path).get("status") == schema.Status.DIVERGED.value:
            return schema.Status.DIVERGED.value
    return schema.Status.FINISHED.value


def launch(
    out: Path,
    run_dirs: Sequence[Path],
    *,
    slots: int,
    use_gpus: bool,
    on_change: Callable[[list[RunState]], None],
    hang_after_s: float = HANG_AFTER_S,
    memory: Mapping[str, int] | None = None,
    standby: Depth | None = None,
    unwanted: Callable[[], Mapping[str, str]] = dict,
) -> list[RunState]:
    """Train the runs that are not finished, `slots` at a time, and return how each of them ended.

    `memory` gives the estimated bytes of runs by id; with it no more runs share a device than its memory holds.
    `standby` is how far the workers of the next runs prepare while others train; None: they start when a slot is free.
    `unwanted` is asked after every end of a run which runs need not be started, by id, with the reason.
    Raises `InterruptedRunError` after a signal.
    """
    pending = [path for path in run_dirs if not (path / schema.MANIFEST_FILE).exists()]
    gpus = visible_gpus() if use_gpus else []
    jobs = [job_of(path, (memory or {}).get(path.name, 0)) for path in pending]
    total = device_memory(gpus) if memory else None
    launcher = Launcher(out, slots, gpus, on_change, jobs, hang_after_s, total, standby, unwanted)
    pid = os.getpid()
    facts = {"pid": pid, "born": start_ticks(pid), "host": socket.gethostname()}
    ledger_line(
        out, "", LAUNCHED, **facts, slots=slots, hang_after_s=hang_after_s, standby=standby, runs=len(pending)
    )
    launcher.run()
    return launcher.states()
