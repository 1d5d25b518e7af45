from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8parity.schedule import lr_factor
from fp8parity.spec import OptimSpec


def factors(steps: int, **optim: object) -> list[float]:
    spec = OptimSpec.model_validate({"lr": 1.0, **optim})
    return [lr_factor(step, steps, spec) for step in range(steps)]


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    assert factors(10, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_ends_at_the_minimum_and_halves_in_the_middle() -> None:
    values = factors(101, warmup_steps=0, min_lr_ratio=0.2)
    assert values[0] == 1.0
    assert values[50] == pytest.approx(0.6)
    assert values[25] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert values[-1] == pytest.approx(0.2)


def test_wsd_is_flat_and_then_linear() -> None:
    values = factors(100, schedule="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert values[10:81] == [1.0] * 71
    assert values[80:] == pytest.approx([1 - i / 19 for i in range(20)])


def test_constant() -> None:
    assert factors(10, schedule="constant", warmup_steps=2)[2:] == [1.0] * 8


@given(
    steps=st.integers(2, 500), warmup=st.integers(0, 499), schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    low=st.floats(0, 1), fraction=st.floats(0.01, 1),
)  # fmt: skip
def test_always_between_zero_and_the_peak(
    steps: int, warmup: int, schedule: str, low: float, fraction: float
) -> None:
    values = factors(
        steps,
        warmup_steps=min(warmup, steps - 1),
        schedule=schedule,
        min_lr_ratio=low,
        decay_fraction=fraction,
    )
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    after = values[min(warmup, steps - 1) :]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))
