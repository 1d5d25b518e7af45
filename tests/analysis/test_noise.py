import numpy as np
import pytest
import scipy.stats

from fp8parity_analysis import noise


def replicas(seed, *levels):
    endpoint = np.array(levels)
    return noise.Replicas(seed, endpoint, endpoint[:, None] + np.zeros((1, 3)))


def test_spread_within_seeds_pools_their_squares():
    items = [replicas(0, 1.0, 1.2), replicas(1, 5.0, 5.3, 5.6), replicas(2, 9.0)]
    squares, df = noise.within(items)
    assert df == 3
    assert squares == pytest.approx(0.02 + 0.18)


def test_interval_of_a_spread_is_chi_square():
    result = noise.spread(8.0, 4, "test")
    assert result.sd == pytest.approx(2**0.5)
    assert result.interval[0] == pytest.approx((8 / scipy.stats.chi2.ppf(0.95, 4)) ** 0.5, rel=1e-9)
    assert result.interval[1] == pytest.approx((8 / scipy.stats.chi2.ppf(0.05, 4)) ** 0.5, rel=1e-9)
    assert noise.spread(0.0, 0, "none").sd is None


def test_no_run_is_in_two_null_pairs():
    items = [replicas(0, 1.0, 1.1, 1.3, 1.6, 2.0), replicas(1, 3.0), replicas(2, 4.0, 4.5)]
    curves = noise.null_curves(items)
    assert curves[:, 0] == pytest.approx([0.1, 0.3, 0.5])
    assert noise.null_curves([]).shape == (0, 0)


def test_the_floor_recovers_the_noise_it_was_made_of():
    """sds: run 0.1 %, interaction 0.2 %, seeds 0.4 %; each within its 99.9 % chi-square range."""
    rng = np.random.default_rng(0)
    n, r = 400, 3
    seeds = 0.004 * rng.standard_normal((n, 1))
    control = seeds + 0.001 * rng.standard_normal((n, r))
    test = seeds[:, 0] + 0.001 * rng.standard_normal(n) + 0.002 * rng.standard_normal(n)
    items = [replicas(seed, *row) for seed, row in enumerate(control)]
    floor = noise.noise_floor(test - control.mean(axis=1), items, [], 1 + 1 / r, 0.05, critical=None)
    expected = {
        floor.control_run: 0.001,
        floor.pair: (0.001**2 * (1 + 1 / r) + 0.002**2) ** 0.5,
        floor.seeds: (0.004**2 + 0.001**2 / r) ** 0.5,
    }
    for spread, truth in expected.items():
        low, high = scipy.stats.chi2.ppf([0.0005, 0.9995], spread.df) / spread.df
        assert low < spread.variance / truth**2 < high
    assert floor.interaction_sd == pytest.approx(0.002, rel=0.1)
    assert floor.too_quiet


def test_matched_nulls_match_and_silent_ones_do_not():
    rng = np.random.default_rng(1)
    items = [replicas(seed, *(0.001 * rng.standard_normal(2))) for seed in range(20)]
    gaps = 0.001 * 2**0.5 * rng.standard_normal(8)
    assert not noise.noise_floor(gaps, items, [], 2.0, 0.05, critical=None).too_quiet
    silent = [replicas(seed, 1.0, 1.0) for seed in range(20)]
    assert noise.noise_floor(gaps, silent, [], 2.0, 0.05, critical=None).too_quiet
