"""A worker that is started ahead of its turn, prepares, and waits for its slot. Imports no torch.

Launcher and worker share a pipe. One byte means *go*; the end of the pipe means that the launcher is gone, so a worker
that waits can neither outlive it nor begin to train later.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Literal, cast, get_args

from fp8parity.errors import InterruptedRunError
from fp8parity.process import stopping_with
from fp8parity.progress import Heartbeat

Depth = Literal["build", "prove"]
"""The stage after which a worker waits. `build`: imports and the model are ready on the host, no kernel has run on the
device. `prove`: the model is on the device, proven and compiled; all the memory of a run is taken."""

STANDBY = "FP8PARITY_STANDBY"
"""Set by the launcher to `DEPTH:FD`: how far to prepare, and the file descriptor at which to wait."""

GO = b"g"


class Gate:
    """Where a worker waits; open from the start for one that was not started ahead of its turn."""

    def __init__(self, depth: Depth | None = None, descriptor: int = -1) -> None:
        self.depth = depth
        self.waited_seconds = 0.0
        self._descriptor = descriptor

    @classmethod
    def from_environment(cls) -> Gate:
        """Return the gate that the launcher set up; nothing that this process starts sees it."""
        words = os.environ.pop(STANDBY, "")
        depth, _, descriptor = words.partition(":")
        if not words:
            return cls()
        if depth not in get_args(Depth) or not descriptor.isdecimal():
            raise ValueError(f"{STANDBY}={words!r} is not DEPTH:FD; only the launcher sets it")
        return cls(cast(Depth, depth), int(descriptor))

    def wait(self, after: Depth, heartbeat: Heartbeat) -> None:
        """Wait for *go* if `after` is where this worker was told to wait; returns at once everywhere else.

        Raises `InterruptedRunError` when the launcher is gone or a signal asks the worker to stop: there is nothing to
        save yet.
        """
        if after != self.depth:
            return
        self.depth = None
        heartbeat.enter("standby")
        began = time.perf_counter()
        with stopping_with(_interrupt):
            word = os.read(self._descriptor, 1)
        os.close(self._descriptor)
        if word != GO:
            raise InterruptedRunError("the launcher is gone; run the same command again to resume")
        self.waited_seconds = time.perf_counter() - began
        heartbeat.enter(after)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the wait: a handler that only takes note would leave the read waiting."""
    name = signal.Signals(number).name
    raise InterruptedRunError(f"{name} received in standby; run the same command again to resume")
