"""One arm judged against its control: pairs in, verdict and evidence out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import core, divergence, estimate, paired, reasons, secondary
from fp8parity_analysis import gap as gaps
from fp8parity_analysis.curves import UNSTATED_PRECISION, CurveSet, FloatArray
from fp8parity_analysis.pairing import Pairs, build_pairs
from fp8parity_analysis.schema import HELD_OUT, TRAIN, Outcome, gate_of
from fp8parity_analysis.verdict import Evidence, Verdict

if TYPE_CHECKING:
    from fp8parity_analysis.arms import Arm
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.paired import Estimate


@dataclass(frozen=True)
class Judged:
    """A verdict with the pairs and rows (seeds used) it came from; `evidence` for pictures and tables."""

    verdict: Verdict
    evidence: Evidence
    pairs: Pairs


def judge_arm(arm: Arm, curves: CurveSet, criteria: Criteria, *, post_hoc: bool = False) -> Judged:
    """Judge one arm: INVALID, DIVERGED (hard) and IDENTICAL come before any test, in this order."""
    pairs = build_pairs(arm, criteria)
    blank = _blank(pairs, curves, criteria, post_hoc=post_hoc)
    if pairs.invalid:
        told = _with(blank, arm, Outcome.INVALID, reasons=(*pairs.invalid, reasons.INVALID_NEXT))
        return Judged(told, _curve_evidence(pairs), pairs)
    if pairs.diverged:
        told = _with(
            blank,
            arm,
            Outcome.DIVERGED,
            onset_step=min(pairs.diverged.values()),
            diverged_seeds=tuple(pairs.diverged),
            reasons=reasons.of_hard_divergence(pairs),
        )
        return Judged(told, _curve_evidence(pairs), pairs)
    if np.all((pairs.gap == 0) | np.isnan(pairs.gap)):
        told = _with(blank, arm, Outcome.IDENTICAL, gap=0.0, reasons=reasons.of_identical(pairs))
        return Judged(told, _curve_evidence(pairs), pairs)
    return _judge_gap(pairs, blank, criteria)


def _blank(pairs: Pairs, curves: CurveSet, criteria: Criteria, *, post_hoc: bool) -> Verdict:
    warnings = [*curves.notes, *pairs.warnings]
    if post_hoc:
        warnings.insert(0, "*post hoc*: the criteria were changed after the runs had started")
    return Verdict(
        recipe=pairs.arm.recipe,
        outcome=Outcome.INVALID,
        gate=gate_of(Outcome.INVALID),
        gap=None,
        interval=(None, None),
        margin=criteria.margin,
        provisional=False,
        basis="none",
        endpoint=criteria.endpoint,
        eval_precision=_precision(pairs, criteria),
        alpha=criteria.alpha,
        horizon_tokens=_horizon(pairs),
        n_seeds=len(pairs.seeds),
        n_null_pairs=_null_pair_count(pairs),
        token_cost=None,
        trajectory_p=None,
        onset_step=None,
        diverged_seeds=(),
        need_seeds=None,
        noise_floor={},
        reasons=(),
        warnings=tuple(warnings),
    )


def _with(verdict: Verdict, arm: Arm, outcome: Outcome, **changes: Any) -> Verdict:
    return replace(verdict, outcome=outcome, gate=gate_of(outcome, null_arm=arm.null_arm), **changes)


def _precision(pairs: Pairs, criteria: Criteria) -> str:
    if criteria.endpoint == TRAIN:
        return "arm"
    runs = [run for members in pairs.arm.test.values() for run in members]
    if runs and all((criteria.split, criteria.eval_precision) not in run.evals for run in runs):
        return UNSTATED_PRECISION
    return criteria.eval_precision


def _horizon(pairs: Pairs) -> int | None:
    runs = [run for seed in pairs.seeds for run in pairs.arm.control[seed]]
    tokens = [run.tokens for run in runs if run.tokens is not None]
    return min(tokens) if tokens and len(tokens) == len(runs) else None


def _null_pair_count(pairs: Pairs) -> int:
    return sum(len(item.curves) // 2 for item in (*pairs.control_nulls, *pairs.test_nulls))


def _curve_evidence(pairs: Pairs) -> Evidence:
    ends = gaps.endpoint(pairs.gap, pairs.tail_count) if pairs.gap.shape[1] else np.zeros(0)
    return Evidence(
        recipe=pairs.arm.recipe,
        seeds=pairs.seeds,
        steps=tuple(pairs.steps.tolist()),
        gap_by_seed=_rows(pairs.gap),
        endpoint_by_seed=tuple(_finite(value) for value in ends.tolist()),
        tail_from_step=int(pairs.steps[-pairs.tail_count]) if len(pairs.steps) else None,
    )


def _rows(values: FloatArray) -> tuple[tuple[float | None, ...], ...]:
    if np.isfinite(values).all():
        return tuple(map(tuple, values.tolist()))
    return tuple(tuple(_finite(value) for value in row) for row in values.tolist())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _judge_gap(pairs: Pairs, blank: Verdict, criteria: Criteria) -> Judged:
    look = estimate.look_of(len(pairs.seeds), criteria)
    rows = list(range(look.n_seeds))
    gap, progress = pairs.gap[rows], _progress(pairs)
    endpoints = gaps.endpoint(gap, pairs.tail_count)
    floor = estimate.floor_of(pairs, endpoints, rows, criteria, look)
    basis, warnings = estimate.basis_of(pairs, rows, floor, criteria, look)
    measured = basis.estimate(endpoints[None])
    growth = divergence.growth_of(gap[None], progress, measured.gap)
    test = secondary.trajectory_of(pairs, rows, criteria, pooled=basis.kind == "pooled")
    seeds = [pairs.seeds[row] for row in rows]
    finding = reasons.Finding(
        pairs=pairs,
        outcome=_outcome(measured, growth, criteria, look),
        criteria=criteria,
        look=look,
        basis=basis,
        estimate=measured,
        growth=growth,
        floor=floor,
        trajectory=test,
        advice=estimate.seed_advice(basis, measured, len(rows), criteria),
        left_out=secondary.leave_one_out(gap, endpoints, seeds, progress, basis, criteria.margin),
        p_values=secondary.secondary_p_values(
            trajectory=test.p, slope=estimate.known(growth.p_up), spikes=secondary.spike_p(pairs, rows)
        ),
        token_cost=secondary.token_cost(
            pairs, rows, float(measured.gap[0]), estimate.interval_of(measured), criteria
        ),
        sign_flip=paired.sign_flip_p(endpoints),
    )
    told = _told(finding, blank, (*warnings, *_label_warnings(criteria, len(rows), basis)))
    return Judged(told, _evidence(finding, gap, endpoints, progress), pairs)


def _outcome(
    measured: Estimate, growth: divergence.Growth, criteria: Criteria, look: estimate.Look
) -> Outcome:
    if look.waiting_for is not None:
        return Outcome.INCONCLUSIVE
    soft = divergence.soft_divergence(measured.lo, growth, criteria.margin)
    decided: Outcome = core.decide(core.claims_of(measured, criteria.margin), soft, growth.grows)[0]
    return decided


def _told(finding: reasons.Finding, blank: Verdict, warnings: tuple[str, ...]) -> Verdict:
    return _with(
        blank,
        finding.pairs.arm,
        finding.outcome,
        gap=estimate.known(finding.estimate.gap),
        interval=estimate.interval_of(finding.estimate),
        provisional=finding.basis.provisional,
        basis=finding.basis.text,
        alpha=finding.basis.alpha,
        n_seeds=finding.look.n_seeds,
        token_cost=finding.token_cost,
        trajectory_p=finding.trajectory.p,
        onset_step=_onset_step(finding),
        need_seeds=_need_seeds(finding),
        noise_floor=finding.floor.to_json(),
        reasons=reasons.of_finding(finding),
        warnings=(*blank.warnings, *warnings),
    )


def _progress(pairs: Pairs) -> FloatArray:
    steps = pairs.steps.astype(np.float64)
    return steps / steps[-1] if steps[-1] > 0 else np.ones(len(steps))


def _label_warnings(criteria: Criteria, n_seeds: int, basis: estimate.Basis) -> list[str]:
    warnings = []
    if n_seeds == 1 and basis.kind != "none":
        warnings.append("one pair: whether its gap still grows cannot be tested; two seeds could")
    if criteria.noise_sd is not None and n_seeds > 1:
        warnings.append("the stated noise was not used: two seeds or more measure their own")
    if criteria.endpoint == TRAIN:
        warnings.append("the endpoint is the training loss: it mixes batch content into the gap")
    if criteria.endpoint == "final":
        warnings.append("the endpoint is the last evaluation alone: noisier than the mean of the tail")
    if criteria.split != HELD_OUT and criteria.endpoint != TRAIN:
        warnings.append(f"the held-out set that decides is {criteria.split!r}")
    return warnings


def _grew(finding: reasons.Finding) -> bool:
    """Whether an onset may be named: only after the endpoint or the trajectory test rejects."""
    late = finding.outcome in (Outcome.DIVERGED, Outcome.WORSE, Outcome.WORSE_MARGIN_UNRESOLVED)
    detected = finding.trajectory.p is not None and finding.trajectory.p <= secondary.TRAJECTORY_ALPHA
    return bool(finding.growth.grows[0]) and (late or detected)


def _onset_step(finding: reasons.Finding) -> int | None:
    return int(finding.pairs.steps[int(finding.growth.onset[0])]) if _grew(finding) else None


def _need_seeds(finding: reasons.Finding) -> int | None:
    if finding.look.waiting_for is not None:
        return finding.look.waiting_for
    if finding.outcome in (Outcome.INCONCLUSIVE, Outcome.WORSE_MARGIN_UNRESOLVED) and not finding.withheld:
        return finding.advice.seeds
    return None


def _evidence(
    finding: reasons.Finding, gap: FloatArray, endpoints: FloatArray, progress: FloatArray
) -> Evidence:
    pairs, measured = finding.pairs, finding.estimate
    onset = None
    if _grew(finding):
        first, last = divergence.onset_interval(gap, progress)
        onset = (int(pairs.steps[first]), int(pairs.steps[last]))
    margin = finding.criteria.margin
    p_values = {
        "worse": estimate.known(measured.p_greater()),
        "worse_than_margin": estimate.known(measured.p_greater(margin)),
        "equivalent": estimate.known(measured.p_equivalent(margin)),
        "better": estimate.known(measured.p_less()),
        "non_inferior": estimate.known(measured.p_less(margin)),
        "sign_flip": finding.sign_flip,
        **{f"holm_{name}": value for name, value in finding.p_values.items()},
    }
    return replace(
        _curve_evidence(pairs),
        p_values=p_values,
        onset_interval=onset,
        detection_step=finding.trajectory.first_step,
        slope_per_run=estimate.known(finding.growth.slope),
        leave_one_out={seed: outcome.value for seed, outcome in finding.left_out.items()},
    )
