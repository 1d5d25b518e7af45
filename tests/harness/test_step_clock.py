"""Step times: laps that follow each other, what lies before a restart left out, and no wait for a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp8parity import step_clock
from fp8parity.step_clock import StepClock, lap_seconds


class FakeEvent:
    """An event of a device that passes it long after the host recorded it."""

    device_time = itertools.count(0.0, 250.0)

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.at = next(self.device_time)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None
        assert other.at is not None
        return other.at - self.at


def test_laps_follow_each_other_and_a_restart_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    laps = [clock.lap(), clock.lap()]
    clock.restart()  # from 3 to 10: an evaluation
    laps.append(clock.lap())
    assert [lap_seconds(lap) for lap in laps] == [1.0, 2.0, 4.0]


def test_on_a_gpu_the_device_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_host_clock() -> float:
        raise AssertionError("the host's clock says how fast orders are given")

    monkeypatch.setattr(step_clock.time, "perf_counter", no_host_clock)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = StepClock(torch.device("cuda"))
    first, second = clock.lap(), clock.lap()
    clock.restart()
    third = clock.lap()
    assert [lap_seconds(lap) for lap in (first, second, third)] == [0.25, 0.25, 0.25]
    assert second[1] is not third[0]
