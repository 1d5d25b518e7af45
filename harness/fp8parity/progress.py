"""Life signs of a run on the disk: written by the worker, read by the launcher and `status`. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

from fp8parity_analysis import schema

HEARTBEAT_FILE = "heartbeat.json"
BEAT_SECONDS = 1.0
"""A step touches the file only when the last touch is older: free on a local disk, cheap on a network one."""

TAIL_BYTES = 4096

Stage = Literal["import", "build", "prove", "standby", "train", "finish"]
"""Where a worker is: starting Python and its imports; checking and building the model; proving what will execute;
prepared and waiting for its slot; training and evaluating; writing the results. `import` has no file: the launcher
removes the one of an earlier try."""


class Heartbeat:
    """Tells the launcher that a worker lives and where it is. A full disk is left to those who must write.

    `seconds` is what each stage took that has ended, or was entered again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / HEARTBEAT_FILE
        self.seconds: dict[Stage, float] = {}
        self._last = 0.0
        self._stage: Stage | None = None
        self._entered = 0.0

    def enter(self, stage: Stage) -> None:
        """Write the stage, by rename, so that a reader never sees half a file."""
        now = time.monotonic()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._entered
        self._stage, self._entered = stage, now
        temporary = self.path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"stage": stage, "pid": os.getpid()}) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
        self._last = time.monotonic()

    def beat(self) -> None:
        """Renew the file's time, at most once in `BEAT_SECONDS`."""
        now = time.monotonic()
        if now - self._last >= BEAT_SECONDS:
            self._last = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


def stage_of(run_dir: Path) -> str:
    """Return the stage of a run's last worker."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((run_dir / HEARTBEAT_FILE).read_text(encoding="utf-8"))["stage"])
    return "import"


def forget(run_dir: Path) -> None:
    """Remove the life signs of an earlier worker."""
    (run_dir / HEARTBEAT_FILE).unlink(missing_ok=True)


def life_signs(run_dir: Path) -> tuple[int, ...]:
    """Return the times (ns) of what a living worker writes; the same tuple again means it wrote nothing."""
    names = (HEARTBEAT_FILE, schema.CURVE_STREAM, schema.EVAL_STREAM, schema.LOG_FILE)
    times = []
    for name in names:
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def last_rows(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return the complete rows in the last `TAIL_BYTES` of a JSON-lines stream, the `most` last, oldest first."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            start = max(0, handle.tell() - TAIL_BYTES)
            handle.seek(start)
            lines = handle.read().split(b"\n")[:-1]
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    for line in reversed(lines[1:] if start else lines):  # the first may be cut
        if len(rows) == most:
            break
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows[::-1]


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the last complete row of a JSON-lines stream, reading only its end."""
    rows = last_rows(path, 1)
    return rows[-1] if rows else None
