"""Alerts: each rule at its limit, once for each tensor, with a memory that survives a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8parity.tensor_alerts import AlertWatch, lines
from fp8parity_analysis.tensor_schema import ALERT_KEYS, TRAINED, WHAT_IF


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step, "fqn": "a.b", "gemm": "output", "operand": "input", "kind": TRAINED, "saturated_count": 0,
        "saturated_frac": 0.0, "nonfinite_count": 0, "zero_amax_groups": 0, "sqnr_db": 30.0, "scale_min": 8.0, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "values", "value"),
    [
        ("saturation", {"saturated_count": 3, "saturated_frac": 0.03}, 0.03),
        ("nonfinite", {"nonfinite_count": 2}, 2.0),
        ("zero_amax", {"zero_amax_groups": 4}, 4.0),
    ],
)
def test_absolute_rules(rule: str, values: dict[str, Any], value: float) -> None:
    watch = AlertWatch()
    assert watch.look([row(1)]) == []
    (alert,) = watch.look([row(2, **values)])
    assert alert.to_json() == {
        "step": 2, "rule": rule, "fqn": "a.b", "gemm": "output", "operand": "input", "value": value, "limit": 0.0,
    }  # fmt: skip
    assert tuple(alert.to_json()) == ALERT_KEYS
    assert watch.look([row(3, **values)]) == []  # once for each tensor
    assert len(watch.look([row(3, fqn="other", **values)])) == 1


def test_zero_rows_that_gradients_have_from_the_start_are_no_alert() -> None:
    watch = AlertWatch()
    first = row(1, operand="grad_output", zero_amax_groups=4)
    assert watch.look([first]) == []
    assert watch.look([{**first, "step": 2}]) == []
    (alert,) = watch.look([{**first, "step": 3, "zero_amax_groups": 5}])
    assert (alert.rule, alert.value, alert.limit) == ("zero_amax", 5.0, 4.0)


def test_sqnr_against_its_own_median() -> None:
    watch = AlertWatch()
    assert watch.look([row(1, sqnr_db=20.0)]) == []
    assert watch.look([row(2, sqnr_db=10.0)]) == []  # two probes make no median
    assert watch.look([row(3, sqnr_db=20.0)]) == []
    assert watch.look([row(4, sqnr_db=17.0)]) == []  # 3 dB is the limit itself
    (alert,) = watch.look([row(5, sqnr_db=15.4)])
    assert (alert.rule, alert.step, alert.value, alert.limit) == ("sqnr_drop", 5, 15.4, 15.5)


def test_scale_jumps_in_both_directions() -> None:
    watch = AlertWatch()
    assert watch.look([row(1, scale_min=8.0)]) == []
    assert watch.look([row(2, scale_min=16.0)]) == []  # one step of a power-of-two scale
    assert watch.look([row(3, scale_min=math.nan)]) == []  # a tensor of zeros has no scale
    (alert,) = watch.look([row(4, scale_min=4.0)])
    assert (alert.rule, alert.value, alert.limit) == ("scale_jump", 0.25, 0.5)
    other = AlertWatch()
    other.look([row(1, scale_min=8.0)])
    (alert,) = other.look([row(2, scale_min=32.0)])
    assert (alert.value, alert.limit) == (4.0, 2.0)


def test_a_scale_is_measured_by_what_it_usually_does() -> None:
    watch = AlertWatch()
    # eight changes by a factor of 4, then one of almost 64 = 4^3, which is the limit, and one beyond the next
    scales = [2.0 ** (2 * (step % 2)) for step in range(9)]
    for step, scale in enumerate(scales, start=1):
        assert watch.look([row(step, operand="grad_output", scale_min=scale)]) == []
    assert watch.look([row(10, operand="grad_output", scale_min=63.9)]) == []
    (alert,) = watch.look([row(11, operand="grad_output", scale_min=63.9 * 2.0**20)])
    assert (alert.rule, alert.value, alert.step) == ("scale_jump", 2.0**20, 11)
    assert alert.limit == pytest.approx(63.9**3)  # its largest change so far, in ln three times as far
    steady = AlertWatch()
    for step in range(1, 12):
        assert steady.look([row(step, scale_min=8.0)]) == []
    assert steady.look([row(12, scale_min=16.0)]) == []
    (alert,) = steady.look([row(13, scale_min=16.0 * 8.1)])  # 2^3 after a change by 2
    assert alert.limit == pytest.approx(8.0)
    early = AlertWatch()
    for step, scale in enumerate((1.0, 2.0**20, 1.0), start=1):  # no past to measure by
        assert early.look([row(step, operand="grad_output", scale_min=scale)]) == []


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
    history = [row(step, sqnr_db=20.0) for step in range(1, 5)]
    later = [row(5, sqnr_db=10.0, scale_min=100.0), row(6, sqnr_db=10.0, scale_min=1.0, zero_amax_groups=1)]
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


def test_many_alerts_are_counted_not_listed() -> None:
    watch = AlertWatch()
    shown = lines(watch.look([row(9, fqn=f"layer.{i}", nonfinite_count=1) for i in range(40)]))
    assert len(shown) == 6
    assert shown[0] == "alert: step 9: nonfinite: layer.0, input of output: 1 (limit 0)"
    assert shown[-1] == "alert: step 9: 35 more alerts, kept in the manifest"
    assert len(watch.alerts) == 40
    assert lines([]) == []
