from __future__ import annotations

import pytest

from fp8parity_analysis import planning
from fp8parity_analysis.power_table import USUAL, USUAL_ALPHA, compute, power_table


def test_ready_made_table_is_what_planning_computes() -> None:
    fresh = compute(USUAL_ALPHA)
    for name in ("half_width", "detectable", "equivalent"):
        ready, computed = getattr(USUAL, name), getattr(fresh, name)
        assert list(ready) == list(computed) == list(range(2, 31))
        # seven printed digits
        assert list(ready.values()) == pytest.approx(list(computed.values()), rel=1e-6)


def test_equivalent_ratio_is_the_power_threshold() -> None:
    for n in (2, 5, 8, 30):
        assert planning.power_equivalent(USUAL.equivalent[n] * 1.0001, n, 1.0) > planning.POWER
        assert planning.power_equivalent(USUAL.equivalent[n] * 0.9999, n, 1.0) < planning.POWER


def test_other_error_rates_are_computed() -> None:
    assert power_table(0.05) is USUAL
    assert power_table(0.025).half_width[5] > USUAL.half_width[5]
