import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import nct
from scipy.stats import t as student

from fp8parity_analysis import sequential


@pytest.mark.parametrize("spending", ["bonferroni", "obrien_fleming"])
@pytest.mark.parametrize("looks", [(3,), (3, 5, 8), (2, 4, 6, 8, 10)])
def test_the_looks_together_spend_alpha(looks, spending):
    alphas = sequential.look_alphas(looks, 0.05, spending)
    assert len(alphas) == len(looks)
    assert sum(alphas) == pytest.approx(0.05, abs=1e-12)
    assert min(alphas) > 0


def test_obrien_fleming_saves_its_error_for_the_end():
    first, *_, last = sequential.look_alphas((3, 5, 8), 0.05, "obrien_fleming")
    assert first < 0.002
    assert last > 0.02


@pytest.mark.parametrize(("n", "look"), [(2, None), (3, 0), (4, 0), (5, 1), (8, 2), (30, 2)])
def test_current_look(n, look):
    assert sequential.current_look(n, (3, 5, 8)) == look


@pytest.mark.parametrize(("t", "n"), [(0.0, 2), (1.5, 3), (4.0, 8)])
def test_e_value_is_the_mixed_likelihood_ratio_of_the_t_statistic(t, n):
    """With a right-Haar sigma it is a ratio of t densities, noncentral mixed over N(0, 1) over central."""
    mixed = quad(
        lambda d: nct.pdf(t, n - 1, d * np.sqrt(n)) * np.exp(-d * d / 2) / np.sqrt(2 * np.pi),
        -8,
        8,
        limit=200,
    )[0]
    oracle = np.log(mixed / student.pdf(t, n - 1))
    assert sequential.log_e_value(np.array([t]), n)[0] == pytest.approx(oracle, abs=1e-6)


def test_the_sequence_ends_where_the_e_value_is_one_over_alpha():
    gap = np.random.default_rng(0).normal(0.002, 0.001, (4, 9))
    estimate = sequential.anytime_t(gap, 0.05)
    t = (estimate.gap - estimate.lo) / estimate.se
    assert np.exp(sequential.log_e_value(t, 9)) == pytest.approx(np.full(4, 20.0), rel=1e-9)


def test_few_seeds_bound_nothing():
    estimate = sequential.anytime_t(np.array([[0.001, 0.0012]]), 0.05)
    assert estimate.hi[0] == np.inf
    assert sequential.anytime_t(np.array([[0.001]]), 0.05).hi[0] == np.inf


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_p_values_of_a_confidence_sequence_agree_with_its_bounds(n: int) -> None:
    rng = np.random.default_rng(n)
    gap = 0.003 * rng.standard_normal((500, n)) + 0.003 * rng.standard_normal((500, 1))
    estimate = sequential.anytime_t(gap, 0.05)
    assert np.array_equal(estimate.p_greater() < 0.05, estimate.lo > 0)
    assert np.array_equal(estimate.p_less(0.002) < 0.05, estimate.hi < 0.002)
    assert estimate.p_greater().min() >= (1 + n) ** (-(n - 1) / 2) - 1e-12  # the largest e-value there can be


def test_seeds_without_spread_give_finite_p_values() -> None:
    estimate = sequential.anytime_t(np.full((1, 4), 0.001), 0.05)
    assert np.isfinite(estimate.p_greater()).all()
    assert estimate.p_less()[0] == 1.0
