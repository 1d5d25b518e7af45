"""Once per optimizer step, whatever the micro-batches; not for the step that a session resumes from."""

from __future__ import annotations

from typing import Any, cast

import lightning as L
import pytest

from fp8parity.after_step import AfterStep
from fp8parity.module import LMModule


class Counting(AfterStep):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, trainer: L.Trainer, module: LMModule, step: int) -> None:
        self.steps.append(step)


class Clock:
    """The one thing of a trainer that is looked at."""

    global_step = 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("first", [0, 7])
def test_once_per_step(accumulate: int, first: int) -> None:
    clock, callback, module = Clock(), Counting(), LMModule.__new__(LMModule)
    trainer = cast(Any, clock)
    clock.global_step = first
    callback.on_train_start(trainer, module)
    for batch in range(4 * accumulate):
        clock.global_step = first + (batch + 1) // accumulate  # as Lightning counts, before the hook
        callback.on_train_batch_end(trainer, module, None, cast(Any, None), batch)
    assert callback.steps == [first + i for i in range(1, 5)]


def test_what_is_to_be_done_must_be_said() -> None:
    clock, module = Clock(), LMModule.__new__(LMModule)
    clock.global_step = 1
    with pytest.raises(NotImplementedError):
        AfterStep().on_train_batch_end(cast(Any, clock), module, None, cast(Any, None), 0)
