"""The screen of tensors: rates by theory and as stated, agreement with scipy, reductions, onsets."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from fp8parity_analysis import tensor_onset as onset
from fp8parity_analysis import tensor_reduce as reduce
from fp8parity_analysis.tensor_tests import FDR, adjusted, screen, too_quiet

SCREENS = 250


@pytest.fixture
def benchmark(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("tensor_fdr")


@pytest.mark.parametrize(("seeds", "nulls"), [(3, 0), (5, 0), (8, 0), (3, 8), (5, 8), (8, 8)])
def test_rates_of_the_screen(benchmark: ModuleType, seeds: int, nulls: int) -> None:
    found = benchmark.rates(seeds, nulls, SCREENS, seed=1)
    assert found.problems() == []


def test_without_effect_the_floor_makes_a_flag_rarer_than_the_rate() -> None:
    rng = np.random.default_rng(0)
    flagged = [screen(rng.normal(0, 1, (4, 60)), harm=1, floor=0.5).flagged().any() for _ in range(200)]
    assert np.mean(flagged) < FDR  # the hypothesis |effect| <= floor is true well inside


def test_plain_screen_is_scipys_t_test() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, (6, 20))
    for harm, alternative in ((1, "greater"), (-1, "less"), (0, "two-sided")):
        wanted = stats.ttest_1samp(values, 0.0, alternative=alternative)
        np.testing.assert_allclose(screen(values, harm=harm).p, wanted.pvalue, rtol=1e-9)
    np.testing.assert_allclose(
        screen(values, harm=1, method="by").q,
        stats.false_discovery_control(screen(values, harm=1).p, method="by"),
    )


def test_pooled_screen_by_hand() -> None:
    values, nulls = np.array([[1.0], [2.0]]), np.array([[0.5], [-1.5], [2.0]])
    found = screen(values, harm=1, nulls=nulls, null_scale=0.5)
    variance = (0.5 + 0.5 * (0.25 + 2.25 + 4.0)) / 4
    assert found.df[0] == 4
    assert found.p[0] == pytest.approx(stats.t.sf(1.5 / math.sqrt(variance / 2), 4))


def test_two_seeds_alone_are_not_tested() -> None:
    assert np.isnan(screen(np.full((2, 3), 5.0), harm=1).p).all()
    assert np.isnan(screen(np.zeros((0, 3)), harm=1).p).all()


def test_counts_that_repeat_by_chance_are_not_certain() -> None:
    values = np.full((3, 1), 0.71)
    assert screen(values, harm=1, floor=0.69).p[0] > 0.01


def test_seeds_that_lack_a_tensor_are_not_counted() -> None:
    values = np.array([[1.0, 1.0], [1.2, np.nan], [0.9, 1.1], [1.1, 0.9]])
    found = screen(values, harm=1)
    assert found.n.tolist() == [4, 3]
    assert found.df.tolist() == [3, 2]


def test_adjusted_keeps_what_is_not_known() -> None:
    q = adjusted(np.array([0.01, np.nan, 0.04]))
    assert np.isnan(q[1])
    np.testing.assert_allclose(q[[0, 2]], [0.02, 0.04])
    assert np.isnan(adjusted(np.full(3, np.nan))).all()


def test_quiet_nulls_are_recognised() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0, 1, (8, 50))
    assert too_quiet(values, rng.normal(0, 0.05, (8, 50)), 1.0)
    assert not too_quiet(values, rng.normal(0, 1, (8, 50)), 1.0)
    assert not too_quiet(np.full((3, 4), np.nan), rng.normal(0, 1, (2, 4)), 1.0)


def test_drift_is_theil_sen() -> None:
    rng = np.random.default_rng(3)
    steps = np.array([1, 2, 5, *range(10, 201, 10)])
    paths = 0.01 * steps + rng.normal(0, 0.1, (5, len(steps)))
    late = steps > (1 + 200) / 2
    wanted = [
        stats.theilslopes(path[late], steps[late]).slope * (steps[late][-1] - steps[late][0])
        for path in paths
    ]
    np.testing.assert_allclose(reduce.drift(paths, steps), wanted)


def test_level_and_jump_by_hand() -> None:
    path = np.zeros((1, 40))
    path[0, 25:] = 3.0
    assert reduce.level(path)[0] == 3.0
    assert reduce.level(path[:, :27])[0] == 2.0  # three probes, one of them before
    assert reduce.jump_size(path)[0] == 3.0
    assert reduce.jump_size(path, -1)[0] == 0.0
    assert np.isnan(reduce.jump_size(path[:, :3])[0])
    assert np.isnan(reduce.drift(path[:, :2], np.array([1, 2]))[0])


def test_first_outside_needs_three_probes() -> None:
    path = np.array([[0, 0, 5, 0, 0, 5, 5, 5, 0], [0, 0, 0, 0, 0, 0, 0, 5, 5]], dtype=float)
    assert onset.first_outside(path, np.full(2, 1.0), 1).tolist() == [5, -1]
    assert onset.first_outside(-path, np.full(2, 1.0), 1).tolist() == [-1, -1]
    assert onset.first_outside(-path, np.full(2, 1.0), 0).tolist() == [5, -1]


@pytest.mark.parametrize("m", [3, 8])
def test_a_further_null_seldom_leaves_the_envelope(m: int) -> None:
    rng = np.random.default_rng(m)
    trials = 400
    left = 0
    for _ in range(trials):
        paths = list(rng.standard_normal((m + 1, 30, 40)))
        envelope = onset.envelope_of(paths[:m], 0.0)
        assert envelope is not None
        left += bool((onset.first_outside(paths[m], envelope.limit, 0) >= 0).any())
        rate = envelope.false_alarms
    assert rate == 1 / (m + 1)
    assert left / trials < rate + 3 * math.sqrt(rate * (1 - rate) / trials)


def test_no_envelope_of_one_null() -> None:
    assert onset.envelope_of([np.zeros((2, 9))], 0.1) is None


def test_sign_test_needs_five_seeds() -> None:
    assert onset.sign_test_p(4, 4) is None
    assert onset.sign_test_p(5, 5) == pytest.approx(2**-5)
    assert onset.sign_test_p(4, 5) == pytest.approx(stats.binomtest(4, 5, alternative="greater").pvalue)


def test_onset_over_seeds() -> None:
    found = onset.onset_of([(0, 120, 10), (1, 140, 20), (2, 130, 10)], {0: 200, 1: 100, 2: 180})
    assert (found.step, found.resolution, found.lead, found.ahead, found.compared) == (130, 10, 50.0, 2, 3)
    assert found.p is None
    assert onset.onset_of([], {}).step is None
