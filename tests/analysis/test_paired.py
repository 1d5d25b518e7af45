import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from fp8parity_analysis import paired

RNG = np.random.default_rng(20)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30])
def test_interval_and_p_values_are_scipys(n):
    values = RNG.normal(0.001, 0.002, n)
    estimate = paired.paired_t(values[None], 0.05)
    oracle = scipy.stats.ttest_1samp(values, 0.0, alternative="greater")
    lo, hi = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    assert estimate.lo[0] == pytest.approx(lo, rel=1e-12)
    assert estimate.hi[0] == pytest.approx(hi, rel=1e-12)
    assert estimate.p_greater()[0] == pytest.approx(oracle.pvalue, rel=1e-10)
    assert estimate.df == n - 1


@pytest.mark.parametrize("margin", [0.0005, 0.0025, 0.01])
def test_tost_is_statsmodels_on_log_losses(margin):
    control = RNG.normal(1.0, 0.004, 6)
    test = control + RNG.normal(0.0003, 0.0016, 6)
    oracle = ttost_paired(test, control, -margin, margin)[0]
    estimate = paired.paired_t((test - control)[None], 0.05)
    assert estimate.p_equivalent(margin)[0] == pytest.approx(oracle, abs=1e-12)
    inside = bool(estimate.lo[0] > -margin and estimate.hi[0] < margin)
    assert inside == (oracle < 0.05)


def test_equal_values_have_exact_p_values():
    estimate = paired.paired_t(np.array([[0.002] * 3, [0.0] * 3]), 0.05)
    assert estimate.p_greater().tolist() == [0.0, 0.5]
    assert estimate.p_less(0.002).tolist() == [0.5, 0.0]
    assert estimate.lo.tolist() == [0.002, 0.0]


def test_one_seed_knows_nothing_of_its_error():
    estimate = paired.paired_t(np.array([[0.01]]), 0.05)
    assert (estimate.gap[0], estimate.lo[0], estimate.hi[0]) == (0.01, -np.inf, np.inf)
    assert np.isnan(estimate.p_greater()[0])


def test_pooling_follows_the_formula():
    gaps, null = RNG.normal(0.001, 0.002, 4), RNG.normal(0, 0.002, 9)
    estimate = paired.pooled_t(gaps[None], np.array([np.sum(null**2)]), 9, 0.05)
    variance = (3 * gaps.var(ddof=1) + np.sum(null**2)) / 12
    half = scipy.stats.t.ppf(0.95, 12) * np.sqrt(variance / 4)
    assert estimate.df == 12
    assert estimate.hi[0] == pytest.approx(gaps.mean() + half, rel=1e-12)


def test_one_seed_with_nulls_is_a_t_on_the_nulls_alone():
    null = RNG.normal(0, 0.002, 8)
    estimate = paired.pooled_t(np.array([[0.01]]), np.array([np.sum(null**2)]), 8, 0.05)
    t = 0.01 / np.sqrt(np.mean(null**2))
    assert estimate.p_greater()[0] == pytest.approx(scipy.stats.t.sf(t, 8), rel=1e-12)


def test_stated_noise_is_a_normal_interval():
    estimate = paired.stated_noise(np.array([[0.001, 0.003]]), 0.002, 0.05)
    half = scipy.stats.norm.ppf(0.95) * 0.002 / np.sqrt(2)
    assert estimate.lo[0] == pytest.approx(0.002 - half, rel=1e-12)
    assert estimate.p_greater()[0] == pytest.approx(scipy.stats.norm.sf(np.sqrt(2)), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_holm_is_statsmodels(size, monkeypatch):
    # statsmodels collects garbage at every call, which takes a second in a process that has run a thousand tests
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    for p_values in RNG.uniform(0, 0.2, (20, size)):
        oracle = multipletests(p_values, method="holm")[1]
        assert paired.holm(p_values) == pytest.approx(oracle, abs=1e-12)


def test_holm_does_not_count_what_was_not_tested():
    adjusted = paired.holm([0.01, np.nan, 0.04])
    assert adjusted[[0, 2]].tolist() == [0.02, 0.04]
    assert np.isnan(adjusted[1])


@pytest.mark.parametrize("n", [5, 6, 8])
def test_sign_flip_is_scipys_exact_permutation(n):
    values = RNG.normal(0.001, 0.002, n)
    oracle = scipy.stats.permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert paired.sign_flip_p(values) == pytest.approx(oracle.pvalue, abs=1e-12)


def test_sign_flip_is_not_offered_where_it_cannot_reject():
    assert paired.sign_flip_p(np.ones(4)) is None
    assert paired.sign_flip_p(np.ones(5)) == 2**-5


def test_variance_ratio_interval_is_the_f_distribution():
    ratio, low, high = paired.variance_ratio_interval(4.0, 3, 2.0, 9)
    assert ratio == 2.0
    assert low == pytest.approx(2.0 / scipy.stats.f.ppf(0.95, 3, 9), rel=1e-9)
    assert high == pytest.approx(2.0 / scipy.stats.f.ppf(0.05, 3, 9), rel=1e-9)
    assert 1 / low * 2 == pytest.approx(3.863, abs=1e-3)  # table value of F(3, 9)


def test_a_silent_null_can_never_match():
    assert paired.variance_ratio_interval(1.0, 3, 0.0, 9)[0] == np.inf
    assert np.isnan(paired.variance_ratio_interval(1.0, 0, 1.0, 9)[0])


def test_replicates_do_not_see_each_other():
    values = RNG.normal(0, 1, (50, 5))
    together = paired.paired_t(values, 0.05)
    alone = [paired.paired_t(row[None], 0.05) for row in values]
    assert np.array_equal(together.lo, np.concatenate([item.lo for item in alone]))


def test_noise_of_an_earlier_study_widens_by_its_degrees_of_freedom() -> None:
    gap = np.array([[0.001]])
    known, measured = paired.stated_noise(gap, 0.002, 0.05), paired.stated_noise(gap, 0.002, 0.05, df=6.0)
    assert measured.hi[0] - 0.001 == pytest.approx(0.002 * scipy.stats.t.ppf(0.95, 6), rel=1e-12)
    assert known.hi[0] - 0.001 == pytest.approx(0.002 * scipy.stats.norm.ppf(0.95), rel=1e-12)
    assert measured.p_greater()[0] == pytest.approx(scipy.stats.t.sf(0.5, 6), rel=1e-10)
