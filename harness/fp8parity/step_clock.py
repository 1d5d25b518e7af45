"""How long each step took, without waiting for the device.

A GPU runs behind the host: between two copies of the losses the host may be many steps ahead, so its own clock would
measure how fast it gives orders and the copy would swallow the rest. On a GPU a step therefore ends where the device
passes an event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Mark = float | torch.cuda.Event

Lap = tuple["Mark", "Mark"]
"""Begin and end of one step."""


class StepClock:
    """Laps on `device`; what lies between a lap and a restart belongs to no step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last = self._mark()

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Let the next lap begin here."""
        self._last = self._mark()

    def lap(self) -> Lap:
        """End a lap here and begin the next."""
        begin, self._last = self._last, self._mark()
        return begin, self._last


def lap_seconds(lap: Lap) -> float:
    """Return a lap's length; on a GPU the device must have passed its end (after a copy to the host it has)."""
    begin, end = lap
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert not isinstance(begin, float)
    assert not isinstance(end, float)
    return float(begin.elapsed_time(end)) / 1e3
