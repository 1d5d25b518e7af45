"""Several recipes against one control: Holm-adjusted p-values, and verdicts where that was declared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import core, paired
from fp8parity_analysis.schema import Gate, Outcome, gate_of

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.judging import Judged

_TESTED = ("worse", "worse_than_margin", "equivalent", "better", "non_inferior")
_GROWING = (Outcome.DIVERGED, Outcome.EQUIVALENT_BUT_GROWING)


def corrected(judged: list[Judged], criteria: Criteria) -> list[Judged]:
    """State Holm-adjusted p-values over the recipes of a study; with `correction="holm"` decide by them.

    Null arms and arms without a p-value are no members of the family. One recipe needs no correction.
    """
    family = [index for index, item in enumerate(judged) if _is_member(item)]
    if len(family) < 2:
        return judged
    adjusted = {name: paired.holm([_p(judged[index], name) for index in family]) for name in _TESTED}
    result = list(judged)
    for place, index in enumerate(family):
        p_values = {name: float(adjusted[name][place]) for name in _TESTED}
        result[index] = _restated(judged[index], p_values, len(family), criteria)
    return result


def _is_member(item: Judged) -> bool:
    return not item.pairs.arm.null_arm and item.evidence.p_values.get("worse") is not None


def _p(item: Judged, name: str) -> float:
    value = item.evidence.p_values.get(name)
    return float("nan") if value is None else value


def _restated(item: Judged, p_values: dict[str, float], size: int, criteria: Criteria) -> Judged:
    verdict = item.verdict
    said = (
        f"Holm-adjusted over {size} recipes: p {p_values['worse']:.3g} for worse than the control, "
        f"{p_values['equivalent']:.3g} for equivalent; "
        "the gaps share their control runs, so they are correlated"
    )
    if criteria.correction == "holm":
        outcome = _never_milder(_outcome_by(p_values, verdict.outcome, verdict.alpha), verdict.outcome)
        if outcome is not verdict.outcome:
            changed = f"{outcome.value} once corrected over {size} recipes; {verdict.outcome.value} by itself"
            verdict = replace(
                verdict, outcome=outcome, gate=gate_of(outcome), reasons=(changed, *verdict.reasons)
            )
        note = "the verdict is corrected over the recipes; the interval is per comparison"
    else:
        note = f"the verdict's error rate of {100 * verdict.alpha:.3g} % per side is per comparison"
    evidence = replace(item.evidence, p_values={**item.evidence.p_values, **_named(p_values)})
    return replace(item, verdict=replace(verdict, reasons=(*verdict.reasons, said, note)), evidence=evidence)


def _named(p_values: dict[str, float]) -> dict[str, float]:
    return {f"holm_recipes_{name}": value for name, value in p_values.items()}


def _never_milder(after: Outcome, before: Outcome) -> Outcome:
    """Return the corrected outcome, unless it claims what the recipe by itself did not.

    A correction only takes claims away: what was open (before a declared look, or growing) stays open, and nothing
    becomes a pass by it.
    """
    opened = before is Outcome.INCONCLUSIVE
    passes = gate_of(after) is Gate.PASS and gate_of(before) is not Gate.PASS
    return before if opened or passes else after


def _outcome_by(p_values: dict[str, float], before: Outcome, alpha: float) -> Outcome:
    """Return the outcome that the adjusted p-values allow; growth was tested within the recipe and stands."""

    def holds(name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([p_values[name] < alpha])

    claims = core.Claims(
        above_margin=holds("worse_than_margin"),
        equivalent=holds("equivalent"),
        below_zero=holds("better"),
        below_margin=holds("non_inferior"),
        above_zero=holds("worse"),
    )
    grows = np.array([before in _GROWING])
    decided: Outcome = core.decide(claims, grows, grows)[0]
    return decided
