from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats

from fp8parity_analysis import trajectory


def generator():
    return np.random.default_rng(7)


def brute_force(test, null):
    """p over all labellings, by the definition."""
    units = np.concatenate([test, null])
    rms = np.sqrt(np.mean(units**2, axis=0))
    n = len(test)

    def statistic(rows, signs):
        return max(sum(s * units[r] / rms for r, s in zip(rows, signs, strict=True)))

    observed = statistic(range(n), (1,) * n)
    every = [
        statistic(rows, signs)
        for rows in combinations(range(len(units)), n)
        for signs in product((1, -1), repeat=n)
    ]
    return np.mean([value >= observed - 1e-9 for value in every])


@pytest.mark.parametrize(("n", "m"), [(1, 8), (2, 6), (3, 4)])
def test_label_permutation_is_the_full_enumeration(n, m):
    rng = np.random.default_rng(n)
    test, null = rng.standard_normal((n, 6)) + 0.8, rng.standard_normal((m, 6))
    result = trajectory.label_permutation(test, null, generator())
    assert result.p == pytest.approx(brute_force(test, null), abs=1e-12)
    assert result.n_units == n + m


def test_sampled_labels_come_near_the_enumeration():
    rng = np.random.default_rng(11)
    test, null = rng.standard_normal((2, 6)) + 0.7, rng.standard_normal((8, 6))
    exact = trajectory.label_permutation(test, null, generator(), draws=10**6).p
    sampled = trajectory.label_permutation(test, null, generator(), draws=150).p
    assert abs(sampled - exact) < 4 * np.sqrt(exact * (1 - exact) / 150) + 1 / 150


def test_one_seed_cannot_beat_its_resolution():
    huge, null = np.full((1, 5), 100.0), np.random.default_rng(0).standard_normal((19, 5))
    assert trajectory.label_permutation(huge, null, generator()).p == 1 / 40
    few = trajectory.label_permutation(huge, null[:8], generator())
    assert few.p == few.smallest_p == 1 / 18
    assert few.first is None


def test_a_sampled_p_value_is_never_zero():
    huge, null = np.full((5, 5), 100.0), np.random.default_rng(0).standard_normal((8, 5))
    assert trajectory.label_permutation(huge, null, generator()).p == 1 / 1000
    assert trajectory.sign_flip(np.full((12, 5), 100.0) + np.arange(5), generator()).p == 1 / 1000


def test_sign_flip_on_one_point_is_scipys_permutation_of_the_t_statistic():
    values = np.random.default_rng(2).normal(0.4, 1.0, (6, 1))
    oracle = scipy.stats.permutation_test(
        (values[:, 0],), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert trajectory.sign_flip(values, generator()).p == pytest.approx(oracle.pvalue, abs=1e-12)


def test_the_first_detection_follows_the_onset():
    rng = np.random.default_rng(3)
    test = 0.1 * rng.standard_normal((6, 20))
    test[:, 12:] += 2.0
    result = trajectory.sign_flip(test, generator())
    assert result.p == 2**-6
    assert result.first == 12
    labelled = trajectory.label_permutation(test, 0.1 * rng.standard_normal((8, 20)), generator())
    assert labelled.first == 12


def test_a_better_arm_is_not_worse_anywhere():
    rng = np.random.default_rng(4)
    test = 0.1 * rng.standard_normal((6, 20)) - 2.0
    assert trajectory.sign_flip(test, generator()).p == 1.0
    assert trajectory.label_permutation(test, 0.1 * rng.standard_normal((8, 20)), generator()).p > 0.5


def test_renaming_seeds_changes_nothing_even_when_labels_are_sampled():
    rng = np.random.default_rng(5)
    test, null = rng.standard_normal((14, 6)) + 0.2, rng.standard_normal((8, 6))
    order = rng.permutation(14)
    assert trajectory.sign_flip(test, generator()) == trajectory.sign_flip(test[order], generator())
    first = trajectory.label_permutation(test, null, generator())
    assert first == trajectory.label_permutation(test[order], null[::-1], generator())


def test_evaluations_without_any_difference_are_harmless():
    rng = np.random.default_rng(6)
    test, null = rng.standard_normal((2, 4)), rng.standard_normal((8, 4))
    padded = [np.concatenate([np.zeros((len(units), 3)), units], axis=1) for units in (test, null)]
    plain = trajectory.label_permutation(test, null, generator()).p
    with_zeros = trajectory.label_permutation(*padded, generator()).p
    assert with_zeros >= plain  # a constant zero can only raise the maximum of other labellings
    six = rng.standard_normal((6, 4))
    zeros = np.concatenate([np.zeros((6, 3)), six], axis=1)
    assert np.isfinite(trajectory.sign_flip(zeros, generator()).p)


def test_burn_in_waits_for_the_spread_of_the_nulls():
    spread = np.concatenate([np.linspace(0, 1, 11), np.ones(19)])
    null = np.stack([spread, -spread])
    assert trajectory.burn_in(null) == 7
    assert trajectory.burn_in(np.ones((2, 5))) == 0
    assert trajectory.burn_in(np.zeros((2, 5))) == 0
