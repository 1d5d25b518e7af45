import numpy as np
import pytest

from fp8parity_analysis import core
from fp8parity_analysis.paired import Estimate
from fp8parity_analysis.schema import Outcome

MARGIN = 0.0025


def decided(lo, hi, *, soft=False, grows=False):
    estimate = Estimate(
        gap=np.array([(lo + hi) / 2]), se=np.ones(1), lo=np.array([lo]), hi=np.array([hi]), df=4.0, alpha=0.05
    )
    claims = core.claims_of(estimate, MARGIN)
    return core.decide(claims, np.array([soft]), np.array([grows]))[0]


@pytest.mark.parametrize(
    ("lo", "hi", "outcome"),
    [
        (0.003, 0.004, Outcome.WORSE),
        (-0.002, 0.002, Outcome.EQUIVALENT),
        (0.001, 0.002, Outcome.EQUIVALENT),  # detectable, within the margin
        (-0.002, -0.001, Outcome.EQUIVALENT),  # precedes BETTER
        (-0.004, -0.001, Outcome.BETTER),
        (-0.004, 0.001, Outcome.NON_INFERIOR),
        (0.001, 0.004, Outcome.WORSE_MARGIN_UNRESOLVED),
        (-0.001, 0.004, Outcome.INCONCLUSIVE),
        (-np.inf, np.inf, Outcome.INCONCLUSIVE),
        (np.nan, np.nan, Outcome.INCONCLUSIVE),
        (MARGIN, 0.004, Outcome.WORSE_MARGIN_UNRESOLVED),  # touching the margin proves nothing
        (0.0, MARGIN, Outcome.INCONCLUSIVE),
    ],
)
def test_outcome_of_an_interval(lo, hi, outcome):
    assert decided(lo, hi) is outcome


def test_growth_decides_only_beside_the_margin():
    assert decided(0.003, 0.004, soft=True, grows=True) is Outcome.DIVERGED
    assert decided(-0.002, 0.002, grows=True) is Outcome.EQUIVALENT_BUT_GROWING
    assert decided(0.001, 0.004, soft=True, grows=True) is Outcome.WORSE_MARGIN_UNRESOLVED
