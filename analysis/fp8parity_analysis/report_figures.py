"""From stored runs and evidence to the report's pictures, each with a label that says what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import figures, forest
from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.arms import Arm, series_of
from fp8parity_analysis.figures import FloatArray, GapPanel, Line, LossPanel
from fp8parity_analysis.forest import ForestRow
from fp8parity_analysis.report_tables import keys_of
from fp8parity_analysis.schema import Gate
from fp8parity_analysis.wording import title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.curves import RunCurve, Series
    from fp8parity_analysis.study_runs import StudyRuns
    from fp8parity_analysis.verdict import Evidence, Judgement, Verdict

MAX_POINTS, MIN_POINTS = 500, 50
MAX_LOSS_PANELS = 40
"""The loss curves of two recipes look alike; their gaps do not, and are always drawn."""
_POINT_BUDGET = 90_000
"""Points of all curves together, about 12 bytes each: what keeps the page of a 100-run study under 3 MB."""


@dataclass(frozen=True)
class Pictures:
    """Inline SVG by recipe; no entry, or None, where there is nothing to draw.

    `tail_of_one`: the endpoint of every gap drawn is a single evaluation.
    """

    forest_wide: str | None
    forest_narrow: str | None
    loss: Mapping[str, str]
    gap: Mapping[str, str]
    tail_of_one: bool = False


def pictures_of(judgement: Judgement, runs: StudyRuns) -> Pictures:
    """Draw every picture of the report."""
    limit = _points_per_curve(judgement, runs)
    keys = keys_of(judgement)
    verdicts = {verdict.recipe: verdict for verdict in judgement.verdicts}
    loss, gap = {}, {}
    for recipe in loss_recipes(judgement):
        panel = _loss_panel(runs.arms[recipe], judgement, limit) if recipe in runs.arms else None
        if panel and (panel.control or panel.test):
            loss[recipe] = figures.loss_panel(panel, f"{keys[recipe]}l", loss_label(verdicts[recipe]))
    for evidence in judgement.evidence:
        if evidence.steps and evidence.recipe in verdicts:
            drawn = _gap_panel(evidence, judgement, limit)
            null_arm = evidence.recipe in judgement.null_recipes
            label = gap_label(verdicts[evidence.recipe], null_arm=null_arm)
            gap[evidence.recipe] = figures.gap_panel(drawn, f"{keys[evidence.recipe]}g", label)
    ends = [item for item in judgement.evidence if item.recipe in gap]
    alone = bool(ends) and all(item.tail_from_step == item.steps[-1] for item in ends)
    return Pictures(*_forests(judgement), loss, gap, alone)


def loss_recipes(judgement: Judgement) -> list[str]:
    """Return the recipes whose loss is drawn: all, or of very many those first that do not pass."""
    recipes = [item for item in judgement.verdicts if item.recipe not in judgement.null_recipes]
    ranked = sorted(recipes, key=lambda item: item.gate is Gate.PASS)
    return [item.recipe for item in ranked[:MAX_LOSS_PANELS]]


def loss_label(verdict: Verdict) -> str:
    """Return what the loss panel shows, for those who cannot see it."""
    return (
        f"Loss of {verdict.recipe} and of its BF16 control by optimizer step, "
        f"{fmt.plural(verdict.n_seeds, 'seed')}. Outcome: {title(verdict.outcome).lower()}."
    )


def gap_label(verdict: Verdict, *, null_arm: bool = False) -> str:
    """Return what the gap panel shows, for those who cannot see it."""
    digits = fmt.digits_for(verdict.margin)
    ends = "no mean gap is given" if verdict.gap is None else f"ends at {fmt.percent(verdict.gap, digits)}"
    return (
        f"Gap of {verdict.recipe} to BF16 by optimizer step, "
        f"against the margin of {fmt.margin(verdict.margin)}: {ends}. "
        f"Outcome: {title(verdict.outcome, null_arm=null_arm).lower()}."
    )


def forest_label(judgement: Judgement) -> str:
    """Return what the forest plot shows, recipe by recipe."""
    digits = fmt.digits_for(judgement.criteria.margin)
    parts = [
        f"{item.recipe} {fmt.gap(item.gap, item.interval, digits)}, "
        f"{title(item.outcome, null_arm=item.recipe in judgement.null_recipes).lower()}"
        for item in judgement.verdicts
    ]
    return (
        f"Gap and interval of each recipe against the margin of {fmt.margin(judgement.criteria.margin)}: "
        + ("; ".join(parts) + ".")
    )


def _forests(judgement: Judgement) -> tuple[str | None, str | None]:
    if not judgement.verdicts:
        return None, None
    points = {item.recipe: item.endpoint_by_seed for item in judgement.evidence}
    rows = [
        _forest_row(item, points.get(item.recipe, ()), null_arm=item.recipe in judgement.null_recipes)
        for item in judgement.verdicts
    ]
    margin, label = 100 * judgement.criteria.margin, forest_label(judgement)
    wide = forest.forest(rows, margin, "fw", label, narrow=False)
    return wide, forest.forest(rows, margin, "fn", label, narrow=True)


def _forest_row(verdict: Verdict, points: Sequence[float | None], *, null_arm: bool) -> ForestRow:
    digits = fmt.digits_for(verdict.margin)
    low, high = (None if bound is None else 100 * bound for bound in verdict.interval)
    text = fmt.gap(verdict.gap, verdict.interval, digits)
    shown = [100 * value for value in points if value is not None]
    return ForestRow(
        label=verdict.recipe,
        text=title(verdict.outcome, null_arm=null_arm).lower() if verdict.gap is None else text,
        gate=verdict.gate.value,
        gap=None if verdict.gap is None else 100 * verdict.gap,
        low=low,
        high=high,
        points=shown if verdict.gap is not None else (),
        null_arm=null_arm,
    )


def _points_per_curve(judgement: Judgement, runs: StudyRuns) -> int:
    curves = sum(len(item.seeds) + 1 for item in judgement.evidence)
    for arm in runs.arms.values():
        if not arm.null_arm:
            curves += 2 * sum(len(arm.test[seed]) + len(arm.control.get(seed, ())) for seed in arm.test)
    return int(np.clip(_POINT_BUDGET // max(curves, 1), MIN_POINTS, MAX_POINTS))


def _loss_panel(arm: Arm, judgement: Judgement, limit: int) -> LossPanel:
    tests = [run for members in arm.test.values() for run in members]
    controls = [run for seed in arm.test for run in arm.control.get(seed, ())]
    criteria = judgement.criteria

    def held_out(runs: Sequence[RunCurve]) -> list[Line]:
        found = [series_of(run, criteria) for run in runs]
        return [_line(series, limit) for series in found if series is not None and len(series.steps)]

    def train(runs: Sequence[RunCurve]) -> list[Line]:
        return [_line(run.train, limit) for run in runs if run.train is not None and len(run.train.steps)]

    if criteria.endpoint == "train":
        return LossPanel(held_out(controls), held_out(tests))
    return LossPanel(held_out(controls), held_out(tests), train(controls), train(tests))


def _line(series: Series, limit: int) -> Line:
    values = np.where(np.isfinite(series.loss), series.loss, np.nan)
    return figures.thin(Line(series.steps.astype(np.float64), values), limit)


def _gap_panel(evidence: Evidence, judgement: Judgement, limit: int) -> GapPanel:
    steps = np.array(evidence.steps, dtype=np.float64)
    gaps = _array(evidence)
    null_arm = evidence.recipe in judgement.null_recipes
    nulls = None if null_arm else _null_limit(evidence.recipe, judgement)
    return GapPanel(
        seeds=[figures.thin(Line(steps, row), limit) for row in gaps] if len(gaps) > 1 else [],
        mean=figures.thin(Line(steps, _mean(gaps)), limit),
        margin=100 * judgement.criteria.margin,
        null_limit=None if nulls is None else figures.thin(nulls, limit),
        tail_from=evidence.tail_from_step,
        null_arm=null_arm,
    )


def _array(evidence: Evidence) -> FloatArray:
    """Return the gaps in per cent [n, K], NaN where masked."""
    rows = [[np.nan if gap is None else 100 * gap for gap in row] for row in evidence.gap_by_seed]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(evidence.steps))


def _mean(gaps: FloatArray) -> FloatArray:
    """Return the mean over seeds at each step, NaN where a seed is masked: a mean of fewer would jump."""
    return gaps.mean(axis=0) if len(gaps) else np.zeros(0)


def _null_limit(recipe: str, judgement: Judgement) -> Line | None:
    """Return the largest absolute gap of the null pairs of the recipe's group at each step."""
    group = recipe.rpartition("/")[0]
    for evidence in judgement.evidence:
        same = evidence.recipe.rpartition("/")[0] == group
        if evidence.recipe in judgement.null_recipes and same and evidence.steps and evidence.gap_by_seed:
            gaps = np.abs(np.nan_to_num(_array(evidence)))
            return Line(np.array(evidence.steps, dtype=np.float64), gaps.max(axis=0))
    return None
