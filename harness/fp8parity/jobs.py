"""One run on its way: its worker process, its log, its life signs. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fp8parity import faults, progress
from fp8parity.memory import PROCESS_BYTES
from fp8parity.own_sources import FOR_USERS_CODE
from fp8parity.process import STACKS_SIGNAL
from fp8parity.standby import GO, STANDBY, Depth
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json

STACKS_SECONDS = 0.5
"""What a hung worker gets to write its stacks."""

KILL_SECONDS = 10.0
"""How long the launcher waits for a killed worker: giving a GPU's memory back takes seconds. One that sleeps in the
kernel (a file server that does not answer, a stuck driver) ends when it wakes, maybe never; the other runs go on."""


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


@dataclass(eq=False)
class Job:
    """One run: queued, maybe in standby, then a process in a slot, then ended with an outcome.

    `memory` is what the run takes in bytes, 0 if unknown. `standby` is how far its waiting worker prepares, None once
    it may go on; a run whose worker failed in standby is never prepared again (`prepared_in_vain`).
    """

    run_dir: Path
    steps: int
    threads: int
    memory: int = 0
    attempts: int = 0
    slot: int = -1
    hung: bool = False
    standby: Depth | None = None
    prepared_in_vain: bool = False
    outcome: str = ""
    reason: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _log_from: int = 0
    _oom_kills: int = 0
    _go: int | None = None
    _started: float = 0.0
    _first_step: int = 0
    _signs: tuple[int, ...] = ()
    _last_sign: float = field(default=0.0)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.run_dir.name

    @property
    def pid(self) -> int:
        """The worker's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def held(self) -> int:
        """Bytes that the worker takes on its device: in standby only what it prepares, in a slot all of it."""
        return min(self.memory, PROCESS_BYTES) if self.standby == "build" else self.memory

    def start(self, slot: int, environment: Mapping[str, str]) -> None:
        """Start a worker in `slot`."""
        self._begin(slot, environment, ())

    def stand_by(self, slot: int, environment: Mapping[str, str], depth: Depth) -> None:
        """Start a worker that prepares as far as `depth` on the device of `slot` and waits for `go`."""
        worker_end, self._go = os.pipe()
        self.standby = depth
        try:
            self._begin(slot, {**environment, STANDBY: f"{depth}:{worker_end}"}, (worker_end,))
        finally:
            os.close(worker_end)

    def go(self, slot: int) -> None:
        """Let the waiting worker train, in `slot`; one that has died meanwhile is found out by `poll`."""
        assert self._go is not None
        self.slot, self.standby = slot, None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, GO)
        self._close_pipe()
        self._started = self._last_sign = time.monotonic()

    def withdraw(self) -> None:
        """End a waiting worker, which has nothing to save; its start was no attempt."""
        self.kill()
        self.poll()
        self._let_go()
        self.standby = None
        self.attempts -= 1

    def _let_go(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._go is not None:
            os.close(self._go)
            self._go = None

    def _begin(self, slot: int, environment: Mapping[str, str], descriptors: tuple[int, ...]) -> None:
        self.slot = slot
        self.attempts += 1
        self.hung = False
        progress.forget(self.run_dir)
        self._log = (self.run_dir / schema.LOG_FILE).open("ab")
        self._log_from = self._log.tell()
        self._oom_kills = faults.host_oom_kills()
        row = progress.last_row(self.run_dir / schema.CURVE_STREAM)
        self._first_step = int(row["step"]) if row else 0
        # Its own session, so that Ctrl-C in the terminal reaches the launcher only, which then stops it cleanly.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fp8parity", "train", str(self.run_dir)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, **FOR_USERS_CODE},
            pass_fds=descriptors,
            start_new_session=True,
        )
        self._started = self._last_sign = time.monotonic()
        self._signs = progress.life_signs(self.run_dir)

    def poll(self) -> int | None:
        """Return the worker's exit status, or None while it runs."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            self._let_go()
        return code

    def silent_seconds(self) -> float:
        """Return how long the worker has written nothing, by our own clock; waiting for `go` does not count.

        Nothing is expected of one that was killed for it and has not ended yet.
        """
        if self.hung:
            return 0.0
        signs = progress.life_signs(self.run_dir)
        if self.standby is not None and progress.stage_of(self.run_dir) == "standby":
            self._last_sign = time.monotonic()
        if signs != self._signs:
            self._signs, self._last_sign = signs, time.monotonic()
        return time.monotonic() - self._last_sign

    def ends_within(self, seconds: float) -> bool:
        """Whether the run is expected to end so soon; not before its first steps say how long they take."""
        left = self.state().seconds_left
        return left is not None and left <= seconds

    def terminate(self) -> None:
        """Ask the worker to save and stop."""
        assert self._process is not None
        self._process.terminate()

    def kill(self) -> None:
        """End the worker and what it started, at once; where it has not ended after `KILL_SECONDS`, `poll` tells."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)

    def kill_hung(self) -> None:
        """Have the worker write where it hangs, then end it."""
        self.hung = True
        assert self._process is not None
        self._process.send_signal(STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)
        self.kill()

    def fault(self, code: int, hang_after_s: float) -> faults.Fault:
        """Return what ended the worker, which left no result."""
        if self.hung:
            stage = progress.stage_of(self.run_dir)
            words = (
                f"no sign of life for {hang_after_s:g} s in stage {stage}; killed, its stacks are in the log"
            )
            return faults.Fault("hung", stage, words)
        return faults.diagnose(self.run_dir, code, log_from=self._log_from, oom_kills=self._oom_kills)

    def state(self) -> RunState:
        """Return where the run is."""
        if self.outcome:
            return RunState(self.run_id, self.outcome, self.steps, self.steps, None, None, self.reason)
        if self._process is None or self._process.returncode is not None or self.standby is not None:
            return RunState(self.run_id, "waiting", 0, self.steps, None, None)
        row = progress.last_row(self.run_dir / schema.CURVE_STREAM)
        step = int(row["step"]) if row else 0
        done = step - self._first_step
        elapsed = time.monotonic() - self._started
        left = elapsed / done * (self.steps - step) if done > 0 else None
        loss = row["train_loss"] if row else None
        return RunState(self.run_id, "running" if row else "starting", step, self.steps, loss, left)


def job_of(run_dir: Path, memory: int = 0) -> Job:
    """Return the job of a run directory that was laid out."""
    train: Mapping[str, Any] = read_json(run_dir / schema.SPEC_FILE)["spec"]["train"]
    return Job(run_dir, int(train["steps"]), int(train["threads"]), memory)
