import numpy as np
import pytest
import ruptures

from fp8parity_analysis import core, divergence
from fp8parity_analysis.schema import Outcome

PROGRESS = np.arange(1, 41) / 40


@pytest.mark.parametrize("at", [5, 17, 27, 35])
def test_hinge_finds_the_exact_corner_of_a_ramp(at):
    curve = 0.001 + 0.4 * np.maximum(0.0, PROGRESS - PROGRESS[at])
    assert divergence.hinge_onset(curve, PROGRESS) == at


def test_hinge_ignores_a_falling_corner():
    falling = -np.maximum(0.0, PROGRESS - 0.5)
    rising = np.maximum(0.0, PROGRESS - 0.5)
    assert divergence.hinge_onset(rising, PROGRESS) == 19
    assert divergence.hinge_onset(falling, PROGRESS) != 19


def test_hinge_is_the_least_squares_fit():
    rng = np.random.default_rng(0)
    curve = 0.3 * np.maximum(0.0, PROGRESS - 0.6) + 0.02 * rng.standard_normal(40)
    errors = []
    for at in range(1, 39):
        design = np.stack([np.ones(40), np.maximum(0.0, PROGRESS - PROGRESS[at])], axis=1)
        coefficients, residuals, *_ = np.linalg.lstsq(design, curve, rcond=None)
        errors.append(residuals[0] if coefficients[1] > 0 else np.inf)
    assert divergence.hinge_onset(curve, PROGRESS) == 1 + int(np.argmin(errors))


def test_hinge_agrees_with_ruptures_continuous_linear_model():
    rng = np.random.default_rng(1)
    curve = 0.5 * np.maximum(0.0, PROGRESS - 0.7) + 0.002 * rng.standard_normal(40)
    oracle = ruptures.Dynp(model="clinear", min_size=2, jump=1).fit(curve[:, None]).predict(n_bkps=1)[0]
    assert abs(int(divergence.hinge_onset(curve, PROGRESS)) - oracle) <= 1


def test_masked_points_do_not_move_the_corner():
    curve = np.maximum(0.0, PROGRESS - PROGRESS[20])
    curve[[3, 4]] = np.nan
    assert divergence.hinge_onset(curve, PROGRESS) == 20
    assert divergence.hinge_onset(np.full(2, 1.0), PROGRESS[:2]) == 0


def test_onset_interval_spans_the_seeds_and_one_evaluation():
    corners = (20, 24, 28)
    gap = np.array([np.maximum(0.0, PROGRESS - PROGRESS[at]) for at in corners])
    first, last = divergence.onset_interval(gap, PROGRESS)
    assert first <= 22
    assert last >= 25
    same = np.tile(gap[0], (3, 1))
    assert divergence.onset_interval(same, PROGRESS) == (19, 21)
    assert divergence.onset_interval(same[:1], PROGRESS) == (19, 21)


def ramp(start, size, n=4, noise=1e-4):
    rng = np.random.default_rng(5)
    shape = size * np.clip((PROGRESS - start) / (1 - start), 0, None)
    return shape + noise * rng.standard_normal((1, n, 40))


def outcome(gap, margin=0.0025):
    return core.judge_gaps(gap, PROGRESS, margin=margin).outcomes[0]


def test_a_late_rise_is_a_soft_divergence_and_a_constant_gap_is_not():
    assert outcome(ramp(0.7, 0.03)) is Outcome.DIVERGED
    assert outcome(ramp(0.7, 0.0) + 0.03) is Outcome.WORSE


def test_a_rise_from_above_the_margin_is_worse_not_diverged():
    assert outcome(ramp(0.7, 0.03) + 0.004) is Outcome.WORSE


def test_a_rise_smaller_than_the_margin_is_worse_not_diverged():
    result = core.judge_gaps(ramp(0.7, 0.0026) + 0.0022, PROGRESS, margin=0.0025)
    assert result.growth.grows[0]
    assert result.growth.before[0] < 0.0025
    assert result.outcomes[0] is Outcome.WORSE


def test_a_small_rise_within_the_margin_is_growing():
    assert outcome(ramp(0.5, 0.002, noise=2e-5)) is Outcome.EQUIVALENT_BUT_GROWING


def test_growth_needs_two_seeds():
    growth = divergence.growth_of(ramp(0.7, 0.03, n=1), PROGRESS, np.zeros(1))
    assert not growth.grows[0]
    assert not growth.shrinks[0]
