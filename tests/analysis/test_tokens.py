import numpy as np
import pytest

from fp8parity_analysis import tokens


def test_slope_of_a_power_law_is_its_exponent():
    steps = np.arange(50, 2001, 50.0)
    assert tokens.log_slope(-0.3 * np.log(steps) + 1.0, steps) == pytest.approx(-0.3, rel=1e-12)


def test_only_the_last_third_counts():
    steps = np.arange(50, 2001, 50.0)
    early = np.where(steps < 1300, 5.0, 0.0)
    assert tokens.log_slope(early - 0.3 * np.log(steps), steps) == pytest.approx(-0.3, rel=1e-9)


def test_a_loss_that_does_not_fall_has_no_price():
    steps = np.arange(50, 2001, 50.0)
    assert tokens.log_slope(np.ones(40), steps) is None
    assert tokens.log_slope(np.ones(1), steps[:1]) is None


def test_extra_tokens_invert_the_power_law():
    cost = tokens.extra_tokens(0.0025, -0.1)
    assert (1 + cost) ** -0.1 * np.exp(0.0025) == pytest.approx(1.0, abs=1e-12)
    assert tokens.extra_tokens(None, -0.1) is None
    assert tokens.extra_tokens(np.inf, -0.1) is None
    assert tokens.extra_tokens(900.0, -0.1) is None


@pytest.mark.parametrize(
    ("parameters", "seen", "cost"),
    [(1e8, 2e9, 0.03), (1e9, 20e9, 0.04), (7e9, 2e12, 0.13), (70e9, 15e12, 0.23)],
)
def test_a_quarter_of_a_per_cent_under_chinchilla(parameters, seen, cost):
    assert tokens.chinchilla_extra_tokens(0.0025, parameters, seen) == pytest.approx(cost, abs=0.005)


def test_a_gap_beyond_all_data_has_no_price():
    assert tokens.chinchilla_extra_tokens(0.5, 70e9, 15e12) is None
    assert tokens.chinchilla_extra_tokens(None, 1e9, 1e10) is None
    assert tokens.chinchilla_extra_tokens(0.0, 1e9, 1e10) == 0.0


@pytest.mark.parametrize(
    ("bounds", "answer"),
    [((0.05, 0.15), "yes"), ((0.45, 0.60), "no"), ((0.1, 0.6), "unresolved"), ((0.05, None), "unresolved")],
)
def test_worth_it(bounds, answer):
    worth = tokens.worth_it(1.4, 0.1, bounds)
    assert worth.answer == answer
    assert worth.net_gain == pytest.approx(1.4 / 1.1 - 1)
