"""Alerts: each rule at its limit, once for each tensor, with a memory that survives a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8parity.tensor_alerts import PAST, AlertWatch, lines
from fp8parity_analysis.tensor_schema import ALERT_KEYS, TRAINED, WHAT_IF


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step, "fqn": "a.b", "gemm": "output", "operand": "input", "kind": TRAINED, "saturated_count": 0,
        "saturated_frac": 0.0, "nonfinite_count": 0, "zero_amax_groups": 0, "group_count": 8, "format": "e4m3fn",
        "sqnr_db": 30.0, "scale_min": 8.0, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "values", "value"),
    [
        ("saturation", {"saturated_count": 3, "saturated_frac": 0.03}, 0.03),
        ("nonfinite", {"nonfinite_count": 2}, 2.0),
        ("zero_amax", {"zero_amax_groups": 4, "operand": "weight"}, 0.5),
    ],
)
def test_absolute_rules(rule: str, values: dict[str, Any], value: float) -> None:
    watch, operand = AlertWatch(), values.get("operand", "input")
    assert watch.look([row(1, operand=operand)]) == []
    (alert,) = watch.look([row(2, **values)])
    assert alert.to_json() == {
        "step": 2, "rule": rule, "fqn": "a.b", "gemm": "output", "operand": operand, "value": value, "limit": 0.0,
    }  # fmt: skip
    assert tuple(alert.to_json()) == ALERT_KEYS
    assert watch.look([row(3, **values)]) == []  # once for each tensor
    assert len(watch.look([row(3, fqn="other", **values)])) == 1


@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_zero_rows_are_measured_by_the_largest_share_so_far(operand: str) -> None:
    watch = AlertWatch()

    def look(step: int, zeros: int) -> list[Any]:
        return watch.look([row(step, operand=operand, zero_amax_groups=zeros, group_count=100)])

    for step in range(1, PAST + 1):  # padding, of which a batch may hold any amount
        assert look(step, 5 * step if step < PAST else 100 - 65) == []
    assert look(9, 70) == []  # twice 35 % is the limit itself
    assert look(10, 100) == []  # and now twice 70 %
    other = AlertWatch()
    for step in range(1, PAST + 1):
        assert other.look([row(step, operand=operand)]) == []
    (alert,) = other.look([row(9, operand=operand, zero_amax_groups=5)])
    assert (alert.rule, alert.step, alert.value, alert.limit) == (
        "zero_amax",
        9,
        0.625,
        0.5,
    )  # half of 8 is no alert


def _watch(operand: str = "input", **past: Any) -> AlertWatch:
    """A watch that has seen a tensor at `PAST` probes, with the values of each column in turn."""
    watch = AlertWatch()
    for step in range(1, PAST + 1):
        values = {name: items[(step - 1) % len(items)] for name, items in past.items()}
        assert watch.look([row(step, operand=operand, **values)]) == []
    return watch


def test_sqnr_against_its_own_median() -> None:
    watch = _watch(sqnr_db=[20.0, 10.0])  # too few probes make no median, whatever they hold
    assert watch.look([row(9, sqnr_db=12.0)]) == []  # 3 dB below the median of 15 is the limit itself
    (alert,) = watch.look([row(10, sqnr_db=8.9)])
    assert (alert.rule, alert.step, alert.value, alert.limit) == ("sqnr_drop", 10, 8.9, 9.0)


def test_an_sqnr_above_what_the_format_gives_is_nothing_to_fall_from() -> None:
    """The head's gradient while every token is as likely as any other: few values, rounded almost exactly."""
    for format, best in (("e4m3fn", 31.5), ("e5m2", 25.5)):
        watch = _watch(sqnr_db=[44.0], format=[format])
        assert watch.look([row(9, format=format, sqnr_db=best - 2.9)]) == []
        assert len(watch.look([row(10, format=format, sqnr_db=best - 3.1)])) == 1
    other = _watch(sqnr_db=[31.5])  # e5m2 for e4m3 is what it should see
    assert len(other.look([row(9, format="e5m2", sqnr_db=25.5)])) == 1


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_a_scale_is_measured_by_what_it_usually_does(operand: str) -> None:
    watch = _watch(operand, scale_min=[1.0, 4.0])  # moves fourfold, as inputs do in warm-up
    assert watch.look([row(9, operand=operand, scale_min=1.0)]) == []  # the eighth change
    assert watch.look([row(10, operand=operand, scale_min=math.nan)]) == []  # a tensor of zeros has no scale
    assert watch.look([row(11, operand=operand, scale_min=63.9)]) == []  # 4^3 is the limit
    (alert,) = watch.look([row(12, operand=operand, scale_min=63.9 * 2.0**20)])
    assert (alert.rule, alert.value, alert.step) == ("scale_jump", 2.0**20, 12)
    assert alert.limit == pytest.approx(63.9**3)  # its largest change so far, in ln three times as far


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_without_a_past_no_rule_speaks_that_needs_one(operand: str) -> None:
    watch = AlertWatch()
    for step, value in enumerate((1.0, 2.0**20, 1.0, 2.0**-20), start=1):
        watch.look([row(step, operand=operand, scale_min=value, sqnr_db=30 - 5 * step)])
    assert watch.alerts == []


def test_a_scale_that_stood_still_may_double() -> None:
    for factor in (2.0, 0.5):
        watch = _watch()
        assert watch.look([row(9)]) == []
        assert watch.look([row(10, scale_min=8.0 * factor)]) == []  # one step of a power-of-two scale
        (alert,) = watch.look([row(11, scale_min=8.0 * factor * 8.1)])  # 2^3 after a change by 2
        assert (alert.value, alert.limit) == (pytest.approx(8.1), pytest.approx(8.0))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(0.0, 1.0)), min_size=1, max_size=30), st.booleans())
def test_what_stays_within_half_of_each_limit_raises_none(
    path: list[tuple[float, float]], grad: bool
) -> None:
    # a value within 1.5 dB of 30 is within 3 dB of any median of such values; so is a ratio of scales in [8, 16]
    watch = AlertWatch()
    for step, (noise, octave) in enumerate(path, start=1):
        values = {"sqnr_db": 30.0 + noise, "scale_min": 8.0 * 2.0**octave}
        assert watch.look([row(step, operand="grad_output" if grad else "input", **values)]) == []


def test_what_if_casts_raise_none() -> None:
    assert AlertWatch().look([row(1, kind=WHAT_IF, saturated_count=1, saturated_frac=1.0)]) == []


def test_memory_survives_a_checkpoint() -> None:
    history = [row(step, sqnr_db=20.0) for step in range(1, 10)]
    later = [row(10, sqnr_db=10.0, scale_min=100.0), row(11, zero_amax_groups=8), row(12, scale_min=1e9)]
    whole, first, resumed = AlertWatch(), AlertWatch(), AlertWatch()
    for one in (*history, *later):
        whole.look([one])
    for one in history:
        first.look([one])
    resumed.restore(first.state())
    for one in later:
        resumed.look([one])
    assert resumed.alerts == whole.alerts
    assert resumed.state() == whole.state()
    assert [alert.rule for alert in whole.alerts] == ["sqnr_drop", "scale_jump", "zero_amax"]
    earlier = {
        **first.state(),
        "zero_groups": {("a.b", "output", "input"): 3},
    }  # of a version that counted groups
    del earlier["zeros"]
    AlertWatch().restore(earlier)


def test_many_alerts_are_counted_not_listed() -> None:
    watch = AlertWatch()
    shown = lines(watch.look([row(9, fqn=f"layer.{i}", nonfinite_count=1) for i in range(40)]))
    assert len(shown) == 6
    assert shown[0] == "alert: step 9: nonfinite: layer.0, input of output: 1 (limit 0)"
    assert shown[-1] == "alert: step 9: 35 more alerts, kept in the manifest"
    assert len(watch.alerts) == 40
    assert lines([]) == []
