"""A whole study: every arm judged, corrected over recipes, and compared with each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8parity_analysis.arms import arms_of, series_of
from fp8parity_analysis.contrasts import PAIRWISE_UP_TO, comparable, contrasts_of
from fp8parity_analysis.descriptive import described
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.judging import Judged, judge_arm
from fp8parity_analysis.multiplicity import corrected
from fp8parity_analysis.verdict import Judgement

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import CurveSet


def judge_study(curves: CurveSet, criteria: Criteria, *, post_hoc: bool) -> Judgement:
    """Judge every arm of `curves`; see `verdict.judge`."""
    arms = arms_of(curves.runs)
    if not arms:
        raise BadInputError("there are only control runs: nothing to compare with them")
    _check_endpoint(curves, criteria)
    judged = [judge_arm(arm, curves, criteria, post_hoc=post_hoc) for arm in arms]
    judged = corrected([_described(item, criteria) for item in judged], criteria)
    if sum(map(comparable, judged)) > PAIRWISE_UP_TO:
        judged = [
            _warned(item, [f"more than {PAIRWISE_UP_TO} recipes: no pairwise contrasts"]) for item in judged
        ]
    return Judgement(
        criteria=criteria,
        verdicts=tuple(item.verdict for item in judged),
        contrasts=contrasts_of(judged, criteria),
        evidence=tuple(item.evidence for item in judged),
        post_hoc=post_hoc,
        null_recipes=frozenset(arm.recipe for arm in arms if arm.null_arm),
    )


def _described(item: Judged, criteria: Criteria) -> Judged:
    return _warned(item, described(item, criteria))


def _warned(item: Judged, remarks: list[str]) -> Judged:
    if not remarks:
        return item
    return replace(item, verdict=replace(item.verdict, warnings=(*item.verdict.warnings, *remarks)))


def _check_endpoint(curves: CurveSet, criteria: Criteria) -> None:
    if any(series_of(run, criteria) is not None for run in curves.runs):
        return
    splits = sorted({f"{split} ({precision})" for run in curves.runs for split, precision in run.evals})
    found = ", ".join(splits + (["train"] if any(run.train for run in curves.runs) else [])) or "no curve"
    wanted = "train" if criteria.endpoint == "train" else f"{criteria.split} ({criteria.eval_precision})"
    raise BadInputError(
        f"no run has the endpoint {wanted}; the curves hold {found}: choose with endpoint and split"
    )
