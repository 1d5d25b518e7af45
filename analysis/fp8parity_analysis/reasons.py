"""Why a verdict says what it says, in plain words: the conclusion, its basis, its limits, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from scipy.special import ndtri

from fp8parity_analysis.estimate import runs_per_gap
from fp8parity_analysis.forks import is_fork
from fp8parity_analysis.planning import MAX_SEEDS, SeedAdvice
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.secondary import TRAJECTORY_ALPHA
from fp8parity_analysis.wording import OFF_ZERO, level, off_zero

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.divergence import Growth
    from fp8parity_analysis.estimate import Basis, Look
    from fp8parity_analysis.noise import NoiseFloor
    from fp8parity_analysis.paired import Estimate
    from fp8parity_analysis.pairing import Pairs
    from fp8parity_analysis.secondary import Trajectory

_AN_EVENT = (
    "a loss that is non-finite to the end, or more than 5 % above its control over the last evaluations, "
    "is an event and not a number: no mean gap is given and no test is made"
)
INVALID_NEXT = "nothing is concluded about this recipe; repair the comparison and judge again"


@dataclass(frozen=True)
class Finding:
    """Everything that was computed for one arm; arrays have one replicate [1]."""

    pairs: Pairs
    outcome: Outcome
    criteria: Criteria
    look: Look
    basis: Basis
    estimate: Estimate
    growth: Growth
    floor: NoiseFloor
    trajectory: Trajectory
    advice: SeedAdvice
    left_out: Mapping[int, Outcome]
    p_values: Mapping[str, float | None]
    token_cost: Mapping[str, Any] | None
    sign_flip: float | None

    @property
    def gap(self) -> float:
        """The mean gap."""
        return float(self.estimate.gap[0])

    @property
    def withheld(self) -> bool:
        """Whether the interval would pass and only the growth of the gap forbids it."""
        low_enough = float(self.estimate.hi[0]) < self.criteria.margin and self.look.waiting_for is None
        return self.outcome is Outcome.INCONCLUSIVE and low_enough and bool(self.growth.grows[0])


def percent(value: float, digits: int = 3) -> str:
    """Return a fraction of the loss as signed per cent; what rounds to zero has no sign."""
    text = f"{100 * value:+.{digits}f}"
    return f"{text if float(text) else text[1:]} %"


def _unsigned(value: float) -> str:
    return f"{100 * value:.3g} %"


def seeds_text(n: int) -> str:
    """Return `1 seed` or `n seeds`."""
    return "1 seed" if n == 1 else f"{n} seeds"


def of_hard_divergence(pairs: Pairs) -> tuple[str, ...]:
    """Return the reasons for runs that went non-finite or blew up: k of n, no test of significance."""
    diverged = pairs.diverged or {}
    where = ", ".join(f"seed {seed} from step {step}" for seed, step in diverged.items())
    finished = len(pairs.seeds) - len(diverged)
    return (
        f"{len(diverged)}/{len(pairs.seeds)} seeds diverged (hard): {where}; their control runs did not",
        _AN_EVENT,
        f"{seeds_text(finished)} of this arm went on to the end"
        if finished
        else "no seed of this arm reached its end",
        "next: see which layers left their range first, and repeat with the first and last layers in BF16",
    )


def of_identical(pairs: Pairs) -> tuple[str, ...]:
    """Return the reasons for curves that are the same number at every evaluation."""
    same = f"all {len(pairs.steps)} evaluations of {seeds_text(len(pairs.seeds))} equal the control's"
    if pairs.arm.null_arm:
        return (same, "the null arm repeats its control exactly: it shows no run-to-run noise on this device")
    return (same, "FP8 was not switched on, or both logs are the same file; this is never called equivalent")


def of_finding(finding: Finding) -> tuple[str, ...]:
    """Return the reasons of a verdict that rests on an interval."""
    return (
        _conclusion(finding),
        _evidence(finding),
        *_look(finding),
        *_growth(finding),
        *_trajectory(finding),
        *_spikes(finding),
        *_leave_one_out(finding),
        *_sensitivity(finding),
        *_price(finding),
        _not_claimed(finding),
        *_next(finding),
    )


def _conclusion(finding: Finding) -> str:
    if finding.look.waiting_for is not None:
        return "not settled: the first declared look is still to come"
    margin = _unsigned(finding.criteria.margin)
    provisional = " (provisional: one seed)" if finding.basis.provisional else ""
    detectable = float(finding.estimate.lo[0]) > 0 or float(finding.estimate.hi[0]) < 0
    texts = {
        Outcome.EQUIVALENT: f"equivalent: the whole interval lies within the margin of {margin}"
        + ("; the gap is detectable, but too small to matter" if detectable else "; no gap is detectable"),
        Outcome.EQUIVALENT_BUT_GROWING: f"within the margin of {margin} here, but the gap is still growing",
        Outcome.NON_INFERIOR: f"not worse by the margin of {margin}; it may be better by more than that",
        Outcome.BETTER: "better than the control: the whole interval lies below zero",
        Outcome.WORSE: f"worse: the whole interval lies above the margin of {margin}",
        Outcome.DIVERGED: f"diverged (soft): the gap was below the margin of {margin}, then grew beyond it",
        Outcome.WORSE_MARGIN_UNRESOLVED: f"worse than the control; whether by more than {margin} is open",
        Outcome.INCONCLUSIVE: f"not worse by the margin of {margin} here, but the gap is still growing: no pass"
        if finding.withheld
        else f"not settled: the data allow both an acceptable gap and one above {margin}"
        if finding.basis.kind != "none"
        else f"not settled: {finding.basis.text}"
        if finding.criteria.anytime
        else "not settled: one pair says nothing about its own noise",
    }
    if finding.pairs.arm.null_arm:
        texts |= {name: off_zero(name, finding.look.alpha) for name in OFF_ZERO}
    return texts[finding.outcome] + provisional


def _evidence(finding: Finding) -> str:
    n = finding.look.n_seeds
    text = f"gap {percent(finding.gap)} from {seeds_text(n)}"
    if finding.basis.kind != "none":
        lo, hi = float(finding.estimate.lo[0]), float(finding.estimate.hi[0])
        interval = f"{percent(lo)} to {percent(hi)}" if isfinite(lo) else "without bounds at so few seeds"
        text += f", {level(finding.basis.alpha)} interval {interval} ({finding.basis.text})"
    if finding.floor.pair.sd is not None:
        text += f"; sd over seeds {_unsigned(finding.floor.pair.sd)}"
    if finding.floor.detectable_gap is not None:
        text += (
            f", smallest gap that {n} seeds find with 80 % power {_unsigned(finding.floor.detectable_gap)}"
        )
    return text


def _look(finding: Finding) -> Iterator[str]:
    if finding.look.waiting_for is not None:
        yield f"the first declared look is at {finding.look.waiting_for} seeds: no verdict before it"
    if finding.look.text:
        yield finding.look.text


def _growth(finding: Finding) -> Iterator[str]:
    growth, steps = finding.growth, finding.pairs.steps
    slope = float(growth.slope[0])
    if growth.grows[0]:
        yield (
            f"the gap grows over the last half by {percent(slope)} per run length "
            f"(one-sided p {float(growth.p_up[0]):.2g})"
        )
    if growth.shrinks[0]:
        yield (
            f"the gap shrinks over the last half by {percent(-slope)} per run length "
            f"(one-sided p {float(growth.p_down[0]):.2g})"
        )
    if finding.outcome is Outcome.DIVERGED:
        onset = int(steps[int(growth.onset[0])])
        before, rise = percent(float(growth.before[0])), percent(float(growth.rise[0]))
        yield f"it began to grow near step {onset} of {int(steps[-1])}: {before} until there, {rise} since"
    if finding.outcome is Outcome.EQUIVALENT_BUT_GROWING or finding.withheld:
        projected = percent(finding.gap + slope)
        yield f"projection, not a finding: a straight line to twice the horizon gives {projected}"


def _trajectory(finding: Finding) -> Iterator[str]:
    test = finding.trajectory
    if test.p is None:
        return
    if test.smallest_p > TRAJECTORY_ALPHA:
        yield f"trajectory test ({test.kind}): too few pairs to find anything, p is at least {test.smallest_p:.3g}"
        return
    found = "worse than the control somewhere" if test.p <= TRAJECTORY_ALPHA else "no evaluation stands out"
    text = f"trajectory test ({test.kind}): {found}, p {test.p:.3g}"
    if test.first_step is not None:
        text += f", first at step {test.first_step}"
        if finding.outcome in (Outcome.EQUIVALENT, Outcome.NON_INFERIOR, Outcome.BETTER):
            text += "; the endpoint does not show it, so the difference was transient or small"
    yield text


def _spikes(finding: Finding) -> Iterator[str]:
    counts = finding.pairs.spike_counts
    if counts is None or not counts.any():
        return
    test, control = counts.mean(axis=0)
    text = f"spikes in the training loss: {test:.3g} per run in this arm, {control:.3g} in the control"
    p = finding.p_values.get("spikes")
    yield text if p is None else f"{text} (sign flip, p {p:.2g} after Holm over the secondary tests)"


def _leave_one_out(finding: Finding) -> Iterator[str]:
    changed = {seed: outcome for seed, outcome in finding.left_out.items() if outcome is not finding.outcome}
    if not changed:
        return
    if len(changed) == len(finding.left_out) and len(set(changed.values())) == 1:
        yield f"with any one seed fewer the verdict would be {next(iter(changed.values())).value}"
        return
    listed = ", ".join(f"{outcome.value} without seed {seed}" for seed, outcome in changed.items())
    yield f"the verdict hangs on single seeds: {listed}"


def _sensitivity(finding: Finding) -> Iterator[str]:
    """One pair: how quiet the runs would have to be for a pass, or for a fail."""
    if finding.look.n_seeds != 1 or finding.basis.kind == "pooled" or finding.criteria.anytime:
        return
    unit = float(ndtri(1.0 - finding.basis.alpha)) * runs_per_gap(finding.pairs, [0]) ** 0.5
    room = finding.criteria.margin - finding.gap
    claim = "a pass" if room > 0 else "worse than the margin"
    limit = _unsigned(abs(room) / unit)
    yield f"sensitivity: {claim} only if the run-to-run sd is below {limit} of the loss; one pair cannot tell"


def _price(finding: Finding) -> Iterator[str]:
    cost = finding.token_cost
    if not cost or cost["extra_tokens_frac"] is None:
        return
    text = f"closing the gap costs {100 * cost['extra_tokens_frac']:+.1f} % tokens by the control's own slope"
    lo, hi = cost["interval"]
    if lo is not None and hi is not None:
        text += f" ({100 * lo:+.1f} to {100 * hi:+.1f} %)"
    if cost["speedup"] is not None:
        text += f"; at a speed-up of {cost['speedup']:.3g} worth it: {cost['worth_it']}"
    yield text


def _not_claimed(finding: Finding) -> str:
    tokens = [run.tokens for seed in finding.pairs.seeds for run in finding.pairs.arm.control[seed]]
    known = [value for value in tokens if value is not None]
    horizon = f"step {int(finding.pairs.steps[-1])}" + (f" ({min(known):,} tokens)" if known else "")
    horizon += " after the fork" if is_fork(finding.pairs.arm) else ""
    return (
        f"holds at {horizon}, this model, batch size, data and learning rate; "
        "a longer run or a larger model is another question"
    )


def _next(finding: Finding) -> Iterator[str]:
    if finding.look.waiting_for is not None:
        return
    if finding.outcome is Outcome.EQUIVALENT_BUT_GROWING or finding.withheld:
        yield "next: train longer before relying on it"
    elif finding.pairs.arm.null_arm and finding.outcome is Outcome.WORSE:
        yield "next: find what its runs do not share with their controls"  # no layer of it is FP8
    elif finding.outcome in (Outcome.WORSE, Outcome.DIVERGED):
        yield "next: see which layers left their range first, and keep those in BF16"
    elif finding.outcome in (Outcome.INCONCLUSIVE, Outcome.WORSE_MARGIN_UNRESOLVED):
        yield _seeds_next(finding)


def _seeds_next(finding: Finding) -> str:
    n, advice, looks = finding.look.n_seeds, finding.advice, finding.criteria.looks
    if advice.seeds is not None and finding.basis.kind == "none":
        more = seeds_text(advice.seeds - n)
        return f"next: {more} more ({advice.seeds} in all) measure the noise first; what settles it is open till then"
    if advice.seeds is not None:
        return f"next: {seeds_text(advice.seeds - n)} more ({advice.seeds} in all) should settle it"
    if looks and n >= looks[-1]:
        return "no declared look is left: more seeds would not be used; only a study of its own can settle it"
    if advice.on_the_margin:
        return f"more seeds will not settle this: the gap of {percent(finding.gap)} sits on the margin"
    none = "no declared look" if looks else f"no number of seeds up to {MAX_SEEDS}"
    return f"{none} would settle it with this noise; accept a wider margin or average replicas"
