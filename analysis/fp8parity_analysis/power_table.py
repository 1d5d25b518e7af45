"""Seeds, gaps and margins in units of the pair's sd, ready made for the usual error rate, so that `plan` is quick.

`planning.py` computes the same for any error rate; `tests/analysis/test_power_table.py` holds the two together.
Made with: python -m fp8parity_analysis.power_table
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria

USUAL_ALPHA = 0.05
MAX_SEEDS = 30


@dataclass(frozen=True)
class PowerTable:
    """By number of seeds with a verdict (2 to 30 without looks), each divided by the sd of the pair's gap.

    `half_width`: expected half-width of the interval. `detectable`: true gap found worse than zero with 80 % power.
    `equivalent`: smallest margin at which a true gap of zero is found EQUIVALENT with 80 % power.
    """

    half_width: Mapping[int, float]
    detectable: Mapping[int, float]
    equivalent: Mapping[int, float]


def compute(limits: Mapping[int, float]) -> PowerTable:
    """Compute the table with scipy (about a second for 29 numbers of seeds).

    `limits` gives, for each number of seeds with a verdict, the t that a gap must exceed.
    """
    from fp8parity_analysis import planning

    return PowerTable(
        {n: limit / math.sqrt(n) for n, limit in limits.items()},
        {n: planning.detectable_gap(n, 1.0, critical=limit) or 0.0 for n, limit in limits.items()},
        {n: _equivalent_ratio(n, limit) for n, limit in limits.items()},
    )


def _equivalent_ratio(n: int, limit: float) -> float:
    """Return margin / sd with 80 % power for EQUIVALENT at a true gap of zero, by bisection to 1e-7."""
    from fp8parity_analysis import planning

    def reached(ratio: float) -> bool:
        return planning.power_equivalent(ratio, n, 1.0, critical=limit) >= planning.POWER

    low, high = 0.0, 64.0
    while not reached(high):
        low, high = high, 2.0 * high
    while high - low > 1e-7 * high:
        middle = 0.5 * (low + high)
        if not reached(middle):
            low = middle
        else:
            high = middle
    return high


def power_table(criteria: Criteria) -> PowerTable:
    """Return the table of a study's verdicts: at the declared looks, with `anytime`, or at every number of seeds.

    Ready made for the last at one-sided tests of 5 %.
    """
    if criteria.alpha == USUAL_ALPHA and not (criteria.looks or criteria.anytime):
        return USUAL
    from fp8parity_analysis.sequential import limits_of

    return compute(limits_of(criteria, MAX_SEEDS))


def _ready(values: str) -> dict[int, float]:
    return dict(enumerate(map(float, values.split()), start=2))


USUAL = PowerTable(
    _ready(
        """
        4.464497 1.685854 1.176682 0.9533909 0.8226401 0.7344531 0.6698347 0.6198493 0.5796812
        0.5464776 0.5184273 0.4943176 0.4733019 0.4547683 0.4382626 0.423439 0.4100292 0.3978215
        0.3866459 0.3763644 0.3668636 0.3580494 0.3498426 0.3421764 0.334994 0.3282463 0.3218913
        0.3158921 0.3102167
        """
    ),
    _ready(
        """
        5.792801 2.297275 1.649725 1.359418 1.185791 1.066653 0.9781561 0.9089479 0.8528375 0.8061161
        0.7664046 0.7320951 0.7020558 0.6754628 0.6517 0.6302958 0.6108825 0.5931679 0.576917 0.5619379
        0.5480725 0.5351887 0.5231756 0.5119392 0.5013989 0.4914855 0.4821392 0.4733078 0.4649455
        """
    ),
    _ready(
        """
        6.312051 2.65994 1.935469 1.600457 1.397346 1.257135 1.152714 1.070976 1.004696 0.9495155
        0.9026284 0.8621328 0.826689 0.7953209 0.7672986 0.7420632 0.7191795 0.6983019 0.6791519
        0.6615027 0.6451675 0.6299902 0.6158397 0.602605 0.590191 0.5785161 0.5675096 0.5571097
        0.5472628
        """
    ),
)
