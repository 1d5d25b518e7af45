from __future__ import annotations

import pytest

from fp8parity_analysis import planning
from fp8parity_analysis.criteria import Criteria, Spending
from fp8parity_analysis.power_table import USUAL, USUAL_ALPHA, compute, power_table
from fp8parity_analysis.sequential import anytime_limit, limits_of, look_alphas


def test_ready_made_table_is_what_planning_computes() -> None:
    fresh = compute(limits_of(Criteria(), 30))
    assert Criteria().alpha == USUAL_ALPHA
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
    assert power_table(Criteria()) is USUAL
    strict = power_table(Criteria(confidence=0.95))
    assert strict.half_width[5] == pytest.approx(planning.half_width(5, 1.0, alpha=0.025))


@pytest.mark.parametrize("spending", ["bonferroni", "obrien_fleming"])
def test_declared_looks_have_their_own_sizes(spending: Spending) -> None:
    criteria = Criteria(looks=(2, 5, 8), spending=spending)
    table = power_table(criteria)
    for look, alpha in zip((2, 5, 8), look_alphas((2, 5, 8), 0.05, spending), strict=True):
        assert table.half_width[look] == pytest.approx(planning.half_width(look, 1.0, alpha=alpha))
        assert table.detectable[look] == pytest.approx(planning.detectable_gap(look, 1.0, alpha=alpha))
        margin = table.equivalent[look]
        assert planning.power_equivalent(margin, look, 1.0, alpha=alpha) == pytest.approx(0.8, abs=1e-4)
    assert set(table.half_width) == {2, 5, 8}


def test_anytime_begins_where_its_interval_has_bounds() -> None:
    table = power_table(Criteria(anytime=True))
    assert min(table.half_width) == 5
    for n in (5, 10):
        limit = anytime_limit(n, 0.05)
        assert planning.power_worse(table.detectable[n], n, 1.0, critical=limit) == pytest.approx(0.8)
        assert planning.power_equivalent(table.equivalent[n], n, 1.0, critical=limit) == pytest.approx(
            0.8, abs=1e-4
        )
