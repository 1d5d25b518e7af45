"""Copy runs into MLflow in several processes: its store spends its time in Python, one core at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from fp8parity_analysis.mlflow_sink import MirrorError, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fp8parity_analysis.mlflow_content import RunContent

    CopyRun = Callable[[Sink, RunContent], None]

MAX_WORKERS = 4
"""More processes wait for each other at the lock of a sqlite file."""


def usable_cores() -> int:
    """Return the number of cores of this process, at most `MAX_WORKERS`."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def in_processes(
    store: tuple[str, str, str], shares: Sequence[Sequence[RunContent]], copy: CopyRun
) -> tuple[int, int]:
    """Copy each share in a process of its own; return how many runs were made and points written.

    Each run belongs to one share. The first failure ends all processes and is raised as `MirrorError`; none outlives
    this one, not even after SIGKILL.
    """
    context = multiprocessing.get_context("spawn")
    waiting: dict[Any, Any] = {}
    found = [0, 0]
    try:
        for share in shares:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_copy_share, args=(theirs, store, share, copy), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            waiting[mine] = process
        while waiting:
            for ready in connection.wait(list(waiting)):
                made, written = _answer(ready)
                found = [found[0] + made, found[1] + written]
                waiting.pop(ready).join()
    finally:
        for process in waiting.values():
            process.kill()
            process.join()
    return found[0], found[1]


def _answer(ready: Any) -> tuple[int, int]:
    try:
        answer = ready.recv()
    except EOFError:
        raise MirrorError("a copying process ended without a word; mirror again, it continues") from None
    if isinstance(answer, str):
        raise MirrorError(answer)
    made, written = answer
    return int(made), int(written)


def _copy_share(pipe: Any, store: tuple[str, str, str], share: Sequence[RunContent], copy: CopyRun) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sink = Sink.open(*store)
        for content in share:
            copy(sink, content)
    except Exception as error:
        pipe.send(str(error) or type(error).__name__)
        return
    pipe.send((sink.runs_made, sink.points_written))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
