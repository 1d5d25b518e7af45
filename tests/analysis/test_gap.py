import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8parity_analysis import gap

finite = st.floats(-1e6, 1e6, allow_nan=False)


def test_log_loss_is_nan_where_there_is_no_logarithm():
    logs = gap.log_loss(np.array([math.e, 0.0, -1.0, np.inf, -np.inf, np.nan]))
    assert logs[0] == 1.0
    assert np.isnan(logs[1:]).all()


@given(st.lists(finite, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_stable_sum_does_not_depend_on_order_or_sign(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    exact = float(sum(map(Fraction, values)))
    assert gap.stable_sum(np.array([values]))[0] == exact
    assert gap.stable_sum(np.array([shuffled]))[0] == exact
    assert gap.stable_sum(-np.array([values]))[0] == -exact


def test_stable_sum_of_many_is_as_good_as_of_few():
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1000, 7)) * 10.0 ** rng.integers(-8, 8, (1000, 7))
    exact = np.array([math.fsum(row) for row in values])
    assert np.array_equal(gap.stable_sum(values), exact)
    assert np.array_equal(gap.stable_sum(values.T, axis=0), exact)
    plain = np.array([sum(row) for row in values.tolist()])
    assert not np.array_equal(plain, exact)  # the test can fail


@pytest.mark.parametrize(
    ("n", "fraction", "count"), [(40, 0.1, 4), (1, 0.1, 1), (4, 0.1, 1), (20, 0.1, 2), (3, 1.0, 3)]
)
def test_tail_is_the_last_tenth_and_never_empty(n, fraction, count):
    assert gap.tail_count(n, fraction) == count


def test_endpoint_leaves_masked_points_out():
    values = np.array([[9.0, 1.0, np.nan, 3.0], [9.0, np.nan, np.nan, np.nan]])
    assert gap.endpoint(values, 3)[0] == 2.0
    assert np.isnan(gap.endpoint(values, 3)[1])


def test_slope_is_exact_on_a_line_and_sees_only_the_last_half():
    progress = np.arange(1, 41) / 40
    curve = np.where(progress < 0.5, 7.0, 0.3 + 2.0 * progress)
    assert gap.slope(curve[None], progress) == pytest.approx([2.0], abs=1e-12)


def test_slope_skips_masked_points_and_is_unknown_for_one_point():
    progress = np.arange(1, 11) / 10
    curve = 2.0 * progress
    curve[7] = np.nan
    assert gap.slope(curve[None], progress) == pytest.approx([2.0], abs=1e-12)
    assert np.isnan(gap.slope(np.ones((1, 1)), np.ones(1)))


@pytest.mark.parametrize(
    ("flags", "start"), [([True, False, True, True], 2), ([False, False], 2), ([True, True], 0), ([], 0)]
)
def test_trailing_start(flags, start):
    assert gap.trailing_start(np.array(flags, dtype=bool)) == start


def test_blow_up_needs_three_evaluations_up_to_the_last():
    high, low = 0.06, 0.0
    rows = np.array(
        [
            [low, low, high, high, high],
            [low, low, low, high, high],  # only two
            [high, high, high, high, low],  # recovered
            [high, high, high, high, high],
        ]
    )
    assert gap.blow_up_starts(rows) == [2, None, None, 0]
    assert gap.blow_up_starts(rows[:, :2]) == [None] * 4


def test_a_single_jump_that_comes_back_is_transient():
    row = np.zeros((1, 9))
    row[0, 4] = 0.47
    assert gap.transient_gaps(row)[0].tolist() == [False] * 4 + [True] + [False] * 4
    assert gap.transient_gaps(-row)[0, 4]
    row[0, 4:] = 0.47  # a step is not
    assert not gap.transient_gaps(row).any()


def naive_spikes(loss):
    marks = []
    for at, value in enumerate(loss):
        before = loss[max(0, at - 128) : at]
        before = before[np.isfinite(before)]
        if not np.isfinite(value):
            marks.append(bool(np.isfinite(loss[at:]).any()))
        else:
            marks.append(len(before) >= 64 and value > before.mean() + 6 * before.std())
    return marks


def test_spikes_match_a_plain_loop_and_the_planted_ones():
    rng = np.random.default_rng(3)
    loss = 3.0 + 0.05 * rng.standard_normal(600)
    loss[[40, 100, 300, 450]] += 1.0  # at 40 there is too little history
    loss[500] = np.nan
    loss[520] = np.inf
    loss[590:] = np.nan  # to the end: a divergence, not a spike
    marks = gap.spikes(loss)
    assert marks.tolist() == naive_spikes(loss)
    assert np.flatnonzero(marks).tolist() == [100, 300, 450, 500, 520]


def test_spikes_of_many_runs_equal_those_of_each():
    rng = np.random.default_rng(4)
    loss = rng.lognormal(0, 0.3, (3, 400))
    together = gap.spikes(loss)
    assert np.array_equal(together, np.array([gap.spikes(row) for row in loss]))


@pytest.mark.parametrize("constant", [3.0, 1e300, 1e-300])
def test_a_constant_loss_has_no_spikes(constant):
    assert not gap.spikes(np.full(300, constant)).any()
