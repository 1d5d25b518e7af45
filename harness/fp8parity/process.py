"""One process per run directory, and none that outlives its launcher. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fp8parity.errors import InterruptedRunError

LOCK_FILE = ".lock"

PARENT_PID = "FP8PARITY_PARENT_PID"
"""Set by the launcher to its own process id."""

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its log: the launcher sends it before it kills a hung one."""

WATCH_SECONDS = 5.0
GRACE_SECONDS = 120.0
"""How often a worker looks for its launcher, and how long it may take to save and stop once that is gone."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that a worker saves and stops instead of going on alone.

    One that hangs hears no signal: it is ended after `GRACE_SECONDS`, or it would keep its GPU for ever. The launcher
    may ask for stacks from then on (`STACKS_SIGNAL`).

    Does nothing without a launcher, or where the kernel is not Linux.
    """
    parent = os.environ.get(PARENT_PID)
    if parent is None or not hasattr(os, "sched_getaffinity"):
        return
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we could ask
        raise InterruptedRunError("the launcher is gone; run the same command again to resume")
    threading.Thread(target=_end_after, args=(int(parent),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    time.sleep(GRACE_SECONDS)
    os._exit(InterruptedRunError.exit_code)


@contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector, and keep what was imported out of its later rounds.

    Modules are never freed, yet the collector walks through all of them again and again while more come, and once
    more at the end: a quarter of what a process takes that imports torch, Lightning and the compiler
    (`benchmarks/imports.py`). What else is alive is kept as well, so nothing that is to be freed may exist yet: no
    model, no tensor.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def stopping_with(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` take SIGINT and SIGTERM; afterwards whoever took them before."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def sole_trainer(run_dir: Path, *, patience_seconds: float = 60.0) -> Iterator[None]:
    """Hold a run directory; `InterruptedRunError` when another process still trains it after `patience_seconds`.

    The kernel frees the lock with the process, however it ends.
    """
    with (run_dir / LOCK_FILE).open("w") as handle:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise InterruptedRunError(
                        f"{run_dir}: another process is training this run; stop it, or wait and run again"
                    ) from error
                time.sleep(0.2)
        yield


def start_ticks(pid: int) -> int | None:
    """Return when a living process started, in the kernel's ticks since boot; None when it is gone or unknown.

    Together with the id it names a process for good: ids are used again.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    return None


def age_seconds() -> float | None:
    """Return how long ago this process was started, to a kernel's tick; None where the system does not say."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, started: int | None) -> bool:
    """Whether the process that `start_ticks` described still runs on this machine."""
    if started is not None:
        return start_ticks(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
