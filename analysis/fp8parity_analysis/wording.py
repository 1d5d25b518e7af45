"""The plain sentences of the report: one per verdict, one for the study, and what none of them claims."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.sequential import look_alphas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.verdict import Judgement, Verdict

TITLES: Mapping[Outcome, str] = {
    Outcome.IDENTICAL: "Identical",
    Outcome.INVALID: "Invalid",
    Outcome.DIVERGED: "Diverged",
    Outcome.WORSE: "Worse",
    Outcome.WORSE_MARGIN_UNRESOLVED: "Worse, by how much is open",
    Outcome.EQUIVALENT: "Equivalent",
    Outcome.EQUIVALENT_BUT_GROWING: "Equivalent, but growing",
    Outcome.NON_INFERIOR: "Not worse",
    Outcome.BETTER: "Better",
    Outcome.INCONCLUSIVE: "Not settled",
}

OFF_ZERO = (Outcome.WORSE, Outcome.WORSE_MARGIN_UNRESOLVED, Outcome.BETTER)
"""Outcomes that say more of a recipe than of a null arm, which is BF16 itself."""

GATE_WORDS: Mapping[Gate, str] = {
    Gate.PASS: "Pass",
    Gate.FAIL: "Fail",
    Gate.INCONCLUSIVE: "Inconclusive",
    Gate.INVALID: "Invalid",
}

_GATE_CLAUSES: Mapping[Gate, tuple[str, str]] = {
    Gate.PASS: ("passes", "pass"),
    Gate.FAIL: ("fails", "fail"),
    Gate.INCONCLUSIVE: ("is not settled", "are not settled"),
    Gate.INVALID: ("has no valid comparison", "have no valid comparison"),
}


_GATE_ORDER = (Gate.PASS, Gate.INCONCLUSIVE, Gate.FAIL, Gate.INVALID)
_NAMED, _NAMED_WIDTH = 3, 48
"""Up to so many recipes, with names of so many characters in all, are named in the headline."""


DESCRIBED = "described only"
"""How lines about another held-out set or forward begin: notes among the warnings, which warn of nothing."""


def is_note(warning: str) -> bool:
    """Whether a line of a verdict's warnings only describes something beside it."""
    return warning.startswith(DESCRIBED)


def level(alpha: float) -> str:
    """Return the two-sided level of an interval whose one-sided tests have size `alpha`: `90 %`."""
    percent = f"{100 * (1 - 2 * alpha):.4g} %"
    return "above 99.99 %" if percent == "100 %" else percent  # an early look of O'Brien-Fleming type


def levels(alphas: Iterable[float]) -> str:
    """Return the different levels of intervals, the narrowest first: `90 %`, `96.67 % and 98 %`."""
    return _listed(list(dict.fromkeys(level(alpha) for alpha in sorted(alphas, reverse=True))))


def sentence(verdict: Verdict, *, null_arm: bool = False) -> str:
    """Return the verdict as one sentence of plain English about the named recipe."""
    if null_arm and verdict.outcome in OFF_ZERO:
        return f"{verdict.recipe}, BF16 against itself, lies {off_zero(verdict.outcome, verdict.alpha)}."
    subject = f"{verdict.recipe}, BF16 against itself," if null_arm else verdict.recipe
    return f"{subject} {_CLAUSES[verdict.outcome](verdict)}."


def title(outcome: Outcome, *, null_arm: bool = False) -> str:
    """Return the outcome in a word or two."""
    return "Off zero" if null_arm and outcome in OFF_ZERO else TITLES[outcome]


def off_zero(outcome: Outcome, alpha: float) -> str:
    """Return what a null arm whose interval leaves out zero means; `alpha` is the size of its one-sided test."""
    where = "off zero by more than the margin" if outcome is Outcome.WORSE else "off zero"
    return (
        f"{where}: by chance (about 1 null in {round(1 / alpha)} does so on this side), or because its runs differ in "
        "more than noise; distrust gaps of this size here"
    )


def _equivalent(verdict: Verdict) -> str:
    return f"trains like BF16: the whole interval lies within the margin of {fmt.margin(verdict.margin)}"


def _growing(verdict: Verdict) -> str:
    return f"is within the margin of {fmt.margin(verdict.margin)} here, but its gap is still growing"


def _non_inferior(verdict: Verdict) -> str:
    return f"is not worse than BF16 by the margin of {fmt.margin(verdict.margin)[1:]}, and may be better"


def _worse(verdict: Verdict) -> str:
    return f"is worse than BF16 by more than the margin of {fmt.margin(verdict.margin)[1:]}"


def _unresolved(verdict: Verdict) -> str:
    margin = fmt.margin(verdict.margin)[1:]
    return f"is worse than BF16; whether by more than the margin of {margin} is open{_more_seeds(verdict)}"


def _inconclusive(verdict: Verdict) -> str:
    if verdict.n_seeds == 1 and not any(bound is not None for bound in verdict.interval):
        why = "one pair says nothing about its own noise"
        if "anytime" in verdict.basis:
            why = verdict.basis
        need = verdict.need_seeds
        first = f"; {fmt.plural(need, 'seed')} in all measure it first" if need and need > 1 else ""
        return f"is not settled: {why}{first}"
    high = verdict.interval[1]
    if high is not None and high < verdict.margin and verdict.reasons:
        # the interval alone would pass: the first reason says what forbids it
        return f"is not settled: {verdict.reasons[0].removeprefix('not settled: ')}"
    return (
        f"is not settled: {fmt.plural(verdict.n_seeds, 'seed')} allow both a gap within the margin and one "
        f"beyond it{_more_seeds(verdict)}"
    )


def _more_seeds(verdict: Verdict) -> str:
    need = verdict.need_seeds
    return f"; {fmt.plural(need, 'seed')} in all should settle it" if need and need > verdict.n_seeds else ""


def _diverged(verdict: Verdict) -> str:
    lost = len(verdict.diverged_seeds)
    start = "" if verdict.onset_step is None else f", from about step {verdict.onset_step:,}"
    if lost:
        return f"diverged in {lost} of {fmt.plural(verdict.n_seeds, 'seed')}{start}; its controls did not"
    return f"parted from BF16: the gap grew beyond the margin of {fmt.margin(verdict.margin)[1:]}{start}"


def _identical(verdict: Verdict) -> str:
    if verdict.gate is Gate.PASS:
        return "repeats its control to the last digit: it shows no run-to-run noise on this device"
    return "equals its control to the last digit: FP8 was not switched on, or a log was copied"


def _invalid(verdict: Verdict) -> str:
    first = verdict.reasons[0].rstrip(".") if verdict.reasons else "the comparison is not valid"
    return f"cannot be judged: {first}"


_CLAUSES: Mapping[Outcome, Callable[[Verdict], str]] = {
    Outcome.IDENTICAL: _identical,
    Outcome.INVALID: _invalid,
    Outcome.DIVERGED: _diverged,
    Outcome.WORSE: _worse,
    Outcome.WORSE_MARGIN_UNRESOLVED: _unresolved,
    Outcome.EQUIVALENT: _equivalent,
    Outcome.EQUIVALENT_BUT_GROWING: _growing,
    Outcome.NON_INFERIOR: _non_inferior,
    Outcome.BETTER: lambda _: "ends better than BF16: the whole interval lies below zero",
    Outcome.INCONCLUSIVE: _inconclusive,
}


def headline(judgement: Judgement) -> str:
    """Return the study in one sentence: how many recipes pass, fail, or are not settled."""
    judged = [item for item in judgement.verdicts if item.recipe not in judgement.null_recipes]
    noun = "recipe" if judged else "null arm"
    judged = judged or list(judgement.verdicts)
    if not judged:
        return "Nothing was judged."
    counts = Counter(item.gate for item in judged)
    parts = [
        f"{counts[gate]} {_GATE_CLAUSES[gate][counts[gate] > 1]}" for gate in _GATE_ORDER if counts[gate]
    ]
    if len(judged) <= _NAMED and sum(len(item.recipe) for item in judged) <= _NAMED_WIDTH:
        return _named(judged)
    if len(judged) == 1:
        return f"The {noun} {_GATE_CLAUSES[judged[0].gate][0]}."
    if len(parts) == 1:
        gate = judged[0].gate
        if gate is Gate.INCONCLUSIVE:
            return f"None of the {len(judged)} {noun}s is settled."
        everything = f"Both {noun}s" if len(judged) == 2 else f"All {len(judged)} {noun}s"
        return f"{everything} {_GATE_CLAUSES[gate][1]}."
    return f"Of {fmt.plural(len(judged), noun)}, {_listed(parts)}."


def _named(judged: Sequence[Verdict]) -> str:
    """Return the few recipes of a small study by name, grouped by gate, the best first."""
    parts = []
    for gate in _GATE_ORDER:
        names = [item.recipe for item in judged if item.gate is gate]
        if names:
            parts.append(f"{_listed(names)} {_GATE_CLAUSES[gate][len(names) > 1]}")
    return "; ".join(parts) + "."


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


_ENDPOINTS = {
    "held_out": "mean held-out loss over the last {tail} of the run",
    "train": "mean training loss over the last {tail} of the run",
    "final": "held-out loss at the last evaluation",
}
_FORWARDS = {"bf16": ", evaluated in BF16 in every arm", "arm": ", evaluated with each arm's own forward"}


def rule(criteria: Criteria) -> str:
    """Return what was decided before the runs, in one sentence."""
    tail = f"{100 * criteria.tail_fraction:.3g} %"
    forward = "" if criteria.endpoint == "train" else _FORWARDS[criteria.eval_precision]
    return (
        f"The gap is ln(FP8 loss) {fmt.MINUS} ln(BF16 loss), paired by seed; positive is worse. Endpoint: "
        f"{_ENDPOINTS[criteria.endpoint].format(tail=tail)}{forward}. "
        f"Margin: {fmt.margin(criteria.margin)} of the loss. Intervals: {_intervals(criteria)}."
    )


def _intervals(criteria: Criteria) -> str:
    if criteria.anytime:
        return f"{level(criteria.alpha)}, over seeds, at any number of them"
    if not criteria.looks:
        return f"{level(criteria.alpha)}, over seeds"
    alphas = look_alphas(criteria.looks, criteria.alpha, criteria.spending)
    if len(set(alphas)) == 1:
        looks = _listed([str(look) for look in criteria.looks])
        return f"{level(alphas[0])} at each look, over {looks} seeds"
    return _listed(
        [f"{level(alpha)} at {look} seeds" for look, alpha in zip(criteria.looks, alphas, strict=True)]
    )
