"""What ended a worker that left no result: cause, stage and a reason in one line. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp8parity.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE
from fp8parity.progress import stage_of
from fp8parity_analysis import schema

Cause = Literal[
    "hung",
    "out_of_memory",
    "killed",
    "crashed",
    "terminated",
    "full_disk",
    "usage",
    "not_as_declared",
    "error",
]
"""`killed`: SIGKILL by anybody; `out_of_memory`: the device's or the host's; `crashed`: another fatal signal;
`terminated`: asked to stop (SIGTERM) and resumable; `not_as_declared`: the proof of execution found a difference."""

FULL_DISK = "no space left on the device"
"""What a worker says of a full disk; trying again at once would only fail again."""

FULL_BYTES = 2**20
"""Less free space than this is a full disk, also when the worker could not say so any more."""

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|\bMemoryError\b|can't allocate memory|Cannot allocate memory",
    re.IGNORECASE,
)
_LOG_TAIL_BYTES = 2**16
_REASON_CHARS = 500


@dataclass(frozen=True)
class Fault:
    """Why a worker ended without a result, in which stage, and what it said last."""

    cause: Cause
    stage: str
    reason: str

    @property
    def is_retried(self) -> bool:
        """Whether the infrastructure may be to blame, so that the same again may succeed."""
        return self.cause not in ("usage", "not_as_declared", "full_disk")


def host_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started, here or in this cgroup."""
    found = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    found = max(found, int(value))
    return found


def last_lines(run_dir: Path, start: int) -> list[str]:
    """Return the non-empty lines at the end of a run's log, from byte `start` on."""
    with contextlib.suppress(OSError), (run_dir / schema.LOG_FILE).open("rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(start, handle.tell() - _LOG_TAIL_BYTES))
        text = handle.read().decode("utf-8", errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]
    return []


def _disk_is_full(run_dir: Path) -> bool:
    with contextlib.suppress(OSError):
        found = os.statvfs(run_dir)
        return found.f_bavail * found.f_frsize < FULL_BYTES
    return False


def _cause(run_dir: Path, code: int, said: list[str], *, oom_killed: bool) -> tuple[Cause, str]:
    """Return the cause of a worker's end, and its words where they are not the last ones."""
    last = said[-1] if said else "no output"
    if code == -signal.SIGKILL:
        return ("out_of_memory" if oom_killed else "killed"), last
    if code == EXIT_USAGE:
        return "usage", last
    if code == EXIT_INVALID:
        return "not_as_declared", last
    if FULL_DISK in last or (code != 0 and _disk_is_full(run_dir)):
        return "full_disk", last if FULL_DISK in last else f"{run_dir}: {FULL_DISK}"
    if code in (EXIT_INTERRUPTED, -signal.SIGTERM):
        return "terminated", last
    memory = [line for line in said if _OUT_OF_MEMORY.search(line)]
    if memory:
        return "out_of_memory", memory[-1]
    return ("crashed" if code < 0 else "error"), last


def diagnose(run_dir: Path, code: int, *, log_from: int, oom_kills: int) -> Fault:
    """Return what ended a worker with exit status `code` (negative: that signal) and no result.

    `log_from` is where its words begin in the log, `oom_kills` what `host_oom_kills` said when it started. The
    kernel does not say whom it killed, so a SIGKILL is put down to it when it killed anybody meanwhile.
    """
    stage = stage_of(run_dir)
    said = last_lines(run_dir, log_from)
    oom_killed = code == -signal.SIGKILL and host_oom_kills() > oom_kills
    cause, words = _cause(run_dir, code, said, oom_killed=oom_killed)
    if code < 0:
        with contextlib.suppress(ValueError):
            by = " by the kernel, which ran out of memory" if oom_killed else ""
            words = f"{signal.Signals(-code).name}{by} in stage {stage}; last words: {words}"
    return Fault(cause, stage, words[:_REASON_CHARS])
