"""Which interval a study has earned: paired t, pooled with matched nulls, stated noise, anytime, or none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from fp8parity_analysis import gap as gaps
from fp8parity_analysis import noise, paired, planning, sequential

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.gap import FloatArray
    from fp8parity_analysis.noise import NoiseFloor
    from fp8parity_analysis.paired import Estimate
    from fp8parity_analysis.pairing import Pairs
    from fp8parity_analysis.verdict import Bounds

MIN_NULLS_FOR_ONE_SEED = 4
"""Degrees of freedom of matched nulls below which one pair gets no interval."""
WANTED_NULLS_FOR_ONE_SEED = 8


@dataclass(frozen=True)
class Look:
    """How many seeds a declared look uses and its one-sided size.

    `waiting_for` is set before the first look.
    """

    n_seeds: int
    alpha: float
    text: str = ""
    waiting_for: int | None = None


@dataclass(frozen=True)
class Basis:
    """How the error of the mean gap is known: in words, and as what reproduces it for a subset of seeds."""

    text: str
    kind: str
    provisional: bool
    alpha: float
    null_ss: float = 0.0
    null_df: int = 0
    pair_sd: float = 0.0
    pair_df: float = np.inf

    def estimate(self, endpoints: FloatArray) -> Estimate:
        """Return the estimate for `endpoints` [R, n] on this basis."""
        if self.kind == "anytime":
            return sequential.anytime_t(endpoints, self.alpha)
        if self.kind == "pooled":
            null_ss = np.full(endpoints.shape[:-1], self.null_ss)
            return paired.pooled_t(endpoints, null_ss, self.null_df, self.alpha)
        if self.kind == "stated":
            return paired.stated_noise(endpoints, self.pair_sd, self.alpha, self.pair_df)
        return paired.paired_t(endpoints, self.alpha)


def look_of(n_seeds: int, criteria: Criteria) -> Look:
    """Return the declared look that `n_seeds` seeds have reached.

    Without declared looks all seeds at full size.
    """
    if not criteria.looks:
        return Look(n_seeds, criteria.alpha)
    index = sequential.current_look(n_seeds, criteria.looks)
    if index is None:
        return Look(n_seeds, criteria.alpha, waiting_for=criteria.looks[0])
    alpha = sequential.look_alphas(criteria.looks, criteria.alpha, criteria.spending)[index]
    used = criteria.looks[index]
    text = f"look {index + 1} of {len(criteria.looks)} (at {used} seeds), one-sided size {alpha:.3g}"
    return Look(used, alpha, text + _beyond(n_seeds - used, last=index + 1 == len(criteria.looks)))


def _beyond(count: int, *, last: bool) -> str:
    """Return what becomes of the seeds beyond a look."""
    if not count:
        return ""
    seeds = f"; {count} further seed{'s' if count > 1 else ''} "
    if last:
        return seeds + f"{'are' if count > 1 else 'is'} not used, since no look is left"
    return seeds + f"wait{'' if count > 1 else 's'} for the next declared look"


def tested(values: FloatArray, look: Look, criteria: Criteria) -> Estimate:
    """Return the estimate of `values` [R, n] at the error rate of a verdict over the same seeds.

    Plain t at the look's size, or with `anytime` the t e-process: what is stated beside verdicts rests on it.
    """
    return (sequential.anytime_t if criteria.anytime else paired.paired_t)(values, look.alpha)


def known(values: FloatArray) -> float | None:
    """Return the first replicate's value of [R], None where it is not finite."""
    value = float(values[0])
    return value if math.isfinite(value) else None


def interval_of(measured: Estimate) -> Bounds:
    """Return the interval of the first replicate; an infinite or unknown bound is None."""
    return known(measured.lo), known(measured.hi)


def critical_t(look: Look, criteria: Criteria) -> float | None:
    """Return the t that the mean gap over a look's seeds must exceed to be found, None where nothing can be.

    Student's quantile at the look's size; with `anytime` where the e-process reaches 1/alpha at just these seeds.
    """
    if look.waiting_for is not None or look.n_seeds < 2:
        return None
    if criteria.anytime:
        return sequential.anytime_limit(look.n_seeds, look.alpha)
    return float(stdtrit(look.n_seeds - 1, 1.0 - look.alpha))


def floor_of(
    pairs: Pairs, endpoints: FloatArray, rows: list[int], criteria: Criteria, look: Look
) -> NoiseFloor:
    """Return the noise floor of the seeds `rows` with endpoints [n], and what a look at them can find."""
    return noise.noise_floor(
        endpoints,
        pairs.control_nulls,
        pairs.test_nulls,
        runs_per_gap(pairs, rows),
        criteria.alpha,
        critical=critical_t(look, criteria),
    )


def runs_per_gap(pairs: Pairs, rows: list[int]) -> float:
    """Return the mean over seeds of 1/r_test + 1/r_control: the variance of a gap in units of a run's."""
    inverse = 1.0 / pairs.test_runs[rows] + 1.0 / pairs.control_runs[rows]
    return float(gaps.stable_sum(inverse)) / len(rows) if len(rows) else 2.0


def null_units(pairs: Pairs) -> FloatArray:
    """Return the disjoint null pairs' curves [m, K], of control and test replicas."""
    curves = [noise.null_curves(replicas) for replicas in (pairs.control_nulls, pairs.test_nulls) if replicas]
    return np.concatenate(curves) if curves else np.zeros((0, len(pairs.steps)))


def basis_of(
    pairs: Pairs, rows: list[int], floor: NoiseFloor, criteria: Criteria, look: Look
) -> tuple[Basis, list[str]]:
    """Return the basis that the declarations allow and the data do not veto, with warnings."""
    n = len(rows)
    if criteria.anytime:
        return _anytime(n, criteria, look)
    warnings: list[str] = []
    if criteria.null_matched and not pairs.arm.null_arm:
        pooled, warnings = _pooled(pairs, rows, floor, look)
        if pooled is not None:
            return pooled, warnings
    if n >= 2:
        text = f"paired t over {n} seeds, {n - 1} df"
        return Basis(text, "paired", provisional=False, alpha=look.alpha), warnings
    if criteria.noise_sd is not None:
        sd = criteria.noise_sd * runs_per_gap(pairs, rows) ** 0.5
        text = f"one pair against a stated run-to-run sd of {100 * criteria.noise_sd:.3g} %"
        df = np.inf if criteria.noise_df is None else float(criteria.noise_df)
        if criteria.noise_df is not None:
            text += f" with {criteria.noise_df} df, from an earlier study"
        basis = Basis(text, "stated", provisional=True, alpha=look.alpha, pair_sd=sd, pair_df=df)
        return basis, warnings
    return Basis("one pair, no measure of its noise", "none", provisional=False, alpha=look.alpha), warnings


def _anytime(n: int, criteria: Criteria, look: Look) -> tuple[Basis, list[str]]:
    """Return the basis that holds at any number of seeds, without whatever would end that.

    An interval for one seed from a stated noise or pooled nulls, followed by the t e-process from two seeds on, would
    be two procedures that spend the whole error rate each.
    """
    warnings = []
    if criteria.null_matched:
        warnings.append("null_matched is declared, but anytime pools no null pairs: nothing was pooled")
    if n >= 2:
        text = f"anytime-valid t e-process over {n} seeds"
        return Basis(text, "anytime", provisional=False, alpha=look.alpha), warnings
    if criteria.noise_sd is not None:
        warnings.append("the stated noise was not used: anytime measures its own, from two seeds on")
    text = "one pair; anytime begins at two seeds"
    return Basis(text, "none", provisional=False, alpha=look.alpha), warnings


def _pooled(pairs: Pairs, rows: list[int], floor: NoiseFloor, look: Look) -> tuple[Basis | None, list[str]]:
    n = len(rows)
    control_ss, control_df = noise.within(pairs.control_nulls)
    test_ss, test_df = noise.within(pairs.test_nulls)
    null_df = control_df + test_df
    if null_df == 0:
        return None, ["null_matched is declared but there are no null pairs: nothing was pooled"]
    if n == 1 and null_df < MIN_NULLS_FOR_ONE_SEED:
        return None, [f"one seed needs at least {MIN_NULLS_FOR_ONE_SEED} null pairs, there are {null_df}"]
    if n > 1 and floor.too_quiet:
        ratio, low, high = floor.ratio
        return None, [
            (
                f"the null pairs are too quiet to be noise-matched (variance ratio {ratio:.2g}, interval {low:.2g} to "
                f"{high:.2g}): not pooled, the plain paired t decides"
            )
        ]
    warnings = ["assumes matched noise: the variance of the null pairs was pooled as declared"]
    if n == 1 and null_df < WANTED_NULLS_FOR_ONE_SEED:
        wanted = WANTED_NULLS_FOR_ONE_SEED
        warnings.append(f"a provisional verdict wants {wanted} or more null pairs, there are {null_df}")
    scaled = (control_ss + test_ss) * runs_per_gap(pairs, rows)
    text = (
        f"t over {n} seed{'s' if n > 1 else ''} pooled with {null_df} df of null pairs, {n - 1 + null_df} df"
    )
    basis = Basis(text, "pooled", provisional=n == 1, alpha=look.alpha, null_ss=scaled, null_df=null_df)
    return basis, warnings


def seed_advice(basis: Basis, estimate: Estimate, n: int, criteria: Criteria) -> planning.SeedAdvice:
    """Return how many seeds would tell the gap from the margin.

    The default number when the noise is not known. With declared looks only those that are still to come count, each
    at its own size.
    """
    if basis.kind == "none" or not np.isfinite(estimate.se).all():
        return planning.SeedAdvice(max(planning.DEFAULT_SEEDS, n + 1), on_the_margin=False)
    sd = float(estimate.se[0]) * n**0.5
    return planning.seeds_to_settle(
        float(estimate.gap[0]),
        sd,
        estimate.df,
        n,
        criteria.margin,
        alpha=basis.alpha,
        null_pairs=basis.null_df,
        critical=sequential.limits_of(criteria, planning.MAX_SEEDS, null_df=basis.null_df)
        if criteria.looks or criteria.anytime
        else None,
    )
