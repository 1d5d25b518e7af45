"""The operators of a profile as nested events, read from the profiler's raw results.

`torch.profiler.profile.events()` builds every event's shapes, strides and statistics first, seconds for one
step of a small model; here only names, times and autograd numbers are read, and the rest where it is asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, eq=False)
class Event:
    """One operator or named range on a CPU thread; `parent` encloses it on the same thread.

    `sequence` is the autograd sequence number of the node an operator creates (forward) or runs (backward),
    -1 without one; `forward_thread` is the thread of that forward, 0 outside a backward pass.
    """

    name: str
    thread: int
    start_ns: int
    sequence: int
    forward_thread: int
    parent: Event | None
    raw: Any

    @property
    def is_backward(self) -> bool:
        """Whether this is an autograd node being run."""
        return self.sequence >= 0 and self.forward_thread != 0

    @property
    def ancestors(self) -> Iterator[Event]:
        """The enclosing events, innermost first."""
        event = self.parent
        while event is not None:
            yield event
            event = event.parent

    @property
    def backward_node(self) -> Event | None:
        """The innermost autograd node this event runs in."""
        return next((a for a in self.ancestors if a.is_backward), None)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operator's arguments."""
        return [tuple(shape) for shape in self.raw.shapes()]

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the operator's arguments, in C++ spelling."""
        return list(self.raw.dtypes())

    def scalar(self, index: int) -> int:
        """Return one scalar argument."""
        return int(self.raw.concrete_inputs()[index])


def _nested(raw_events: list[Any]) -> list[Event]:
    """Nest the events of each thread by their times; the result is sorted by start."""

    def order(raw: Any) -> tuple[int, int, int]:
        return raw.start_ns(), -raw.duration_ns(), raw.correlation_id()

    events: list[Event] = []
    open_events: dict[int, list[tuple[int, Event]]] = {}
    for raw in sorted(raw_events, key=order):
        thread, start = raw.start_thread_id(), raw.start_ns()
        stack = open_events.setdefault(thread, [])
        while stack and stack[-1][0] <= start and stack[-1][0] < start + raw.duration_ns():
            stack.pop()
        parent = stack[-1][1] if stack else None
        event = Event(raw.name(), thread, start, raw.sequence_nr(), raw.fwd_thread_id(), parent, raw)
        stack.append((start + raw.duration_ns(), event))
        events.append(event)
    return events


def profiled_events(step: Callable[[], object]) -> list[Event]:
    """Run `step` under the profiler and return its operators, in the order they started.

    Operators are dispatched on the CPU whatever the device, so the CPU activity is enough.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    results = profiled.profiler
    assert results is not None
    assert results.kineto_results is not None
    # device 0 is the CPU; a CUDA build may add device events
    return _nested([raw for raw in results.kineto_results.events() if int(raw.device_type()) == 0])
