import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import chi2, nct, t
from statsmodels.stats.power import TTestPower

from fp8parity_analysis import planning

RATIOS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6)


@pytest.mark.parametrize("effect", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("n", [2, 5, 12])
def test_power_is_statsmodels(effect, n):
    oracle = TTestPower().power(effect, n, 0.05, alternative="larger")
    assert planning.power_worse(effect * 0.0016, n, 0.0016) == pytest.approx(oracle, abs=1e-8)


@pytest.mark.parametrize("ratio", RATIOS[:-1])  # the oracle's root finder fails at 6
def test_seeds_needed_is_statsmodels(ratio):
    solved = TTestPower().solve_power(ratio, alpha=0.05, power=0.8, alternative="larger")
    assert planning.seeds_needed(ratio, 1.0) == max(2, int(np.ceil(solved)))


@pytest.mark.parametrize(
    ("goal", "nulls", "row"),
    [
        ("worse", 0, (27, 13, 8, 5, 4, 3, 3, 2)),
        ("equivalent", 0, (36, 17, 11, 6, 4, 3, 3, 3)),
        ("worse", 8, (26, 12, 7, 4, 2, 1, 1, 1)),
        ("equivalent", 8, (36, 17, 10, 5, 3, 2, 1, 1)),
    ],
)
def test_the_table_of_seeds(goal, nulls, row):
    needed = [
        planning.seeds_needed(ratio, 1.0, goal=goal, null_pairs=nulls, max_seeds=60) for ratio in RATIOS
    ]
    assert tuple(needed) == row


def test_power_of_tost_is_its_simulation():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40_000, 5)) * 0.0016
    mean, sd = values.mean(axis=1), values.std(axis=1, ddof=1)
    half = 2.131846786 * sd / np.sqrt(5)
    share = np.mean((mean - half > -0.0025) & (mean + half < 0.0025))
    exact = planning.power_equivalent(0.0025, 5, 0.0016)
    assert abs(share - exact) < 4 * np.sqrt(exact * (1 - exact) / 40_000)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.0014), (3, 0.00001), (2, 0.001), (8, 0.05 / 3)])
def test_power_at_a_small_size_is_the_noncentral_t(n, alpha):
    """Beyond a noncentrality of 30 too, where an early look of a split size has its power."""
    gap = planning.detectable_gap(n, 1.0, alpha=alpha)
    for shift in (0.7 * gap, gap, 1.4 * gap):
        oracle = nct.sf(t.ppf(1 - alpha, n - 1), n - 1, shift * np.sqrt(n))
        assert planning.power_worse(shift, n, 1.0, alpha=alpha) == pytest.approx(oracle, abs=1e-8)
    assert planning.power_worse(gap, n, 1.0, alpha=alpha) == pytest.approx(0.8, abs=1e-6)


def test_a_critical_value_stands_for_the_quantile():
    limit = t.ppf(0.95, 4)
    assert planning.detectable_gap(5, 0.0016, critical=limit) == pytest.approx(
        planning.detectable_gap(5, 0.0016), rel=1e-8
    )
    assert planning.detectable_gap(5, 0.0016, critical=2 * limit) > planning.detectable_gap(5, 0.0016)
    assert planning.detectable_gap(5, 0.0016, critical=np.inf) is None


def test_detectable_gap_has_the_power_it_promises():
    gap = planning.detectable_gap(5, 0.0016)
    assert planning.power_worse(gap, 5, 0.0016) == pytest.approx(0.8, abs=1e-6)
    assert planning.detectable_gap(1, 0.0016) is None
    assert planning.detectable_gap(1, 0.0016, null_pairs=8) > 0
    assert planning.detectable_gap(5, 0.0) == 0.0


def test_half_width_and_pair_sd():
    assert planning.half_width(3, 0.0016) == pytest.approx(2.919986 * 0.0016 / 3**0.5, rel=1e-6)
    assert planning.half_width(1, 0.0016) == np.inf
    assert planning.pair_sd(0.00145) == pytest.approx(0.00145 * 2**0.5)
    assert planning.pair_sd(0.001, 1, 3) == pytest.approx(0.001 * (4 / 3) ** 0.5)


def test_too_many_seeds_is_none():
    assert planning.seeds_needed(0.1, 1.0) is None
    assert planning.seeds_needed(0.0025, 0.0) == 2


@pytest.mark.parametrize("noise", ["few", "known"])
def test_seeds_to_settle_allows_for_an_optimistic_sd(noise):
    df = 2 if noise == "few" else np.inf
    needed = planning.seeds_to_settle(0.0, 0.0016, df, 3, 0.0025).seeds
    assert needed == {"few": 18, "known": 6}[noise]
    sd = 0.0016 * np.sqrt(2 / chi2.ppf(0.2, 2)) if noise == "few" else 0.0016
    widths = [(t.ppf(0.95, n - 1) + t.ppf(0.9, n - 1)) * sd / np.sqrt(n) for n in (needed - 1, needed)]
    assert widths[0] > 0.0025 >= widths[1]


def test_a_gap_on_the_margin_is_never_settled():
    advice = planning.seeds_to_settle(0.0023, 0.0016, 7, 8, 0.0025)
    assert advice == planning.SeedAdvice(None, on_the_margin=True)
    far = planning.seeds_to_settle(0.006, 0.02, 7, 8, 0.0025)
    assert far == planning.SeedAdvice(None, on_the_margin=False)


def test_planning_starts_fast_without_pandas_or_scipy():
    code = (
        "import sys, fp8parity_analysis.planning; "
        "print(sorted({'pandas', 'pyarrow', 'scipy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
