"""Other held-out sets and the other evaluation precision: described beside the verdict, never deciding it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from fp8parity_analysis import gap as gaps
from fp8parity_analysis import paired
from fp8parity_analysis.criteria import Criteria, EvalPrecision
from fp8parity_analysis.pairing import build_pairs
from fp8parity_analysis.reasons import percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8parity_analysis.judging import Judged
    from fp8parity_analysis.pairing import Pairs

_PRECISIONS: tuple[EvalPrecision, ...] = get_args(EvalPrecision)


def described(item: Judged, criteria: Criteria) -> list[str]:
    """Return one line per further held-out set or precision, and one more when their signs disagree."""
    gap = item.verdict.gap
    if criteria.endpoint == "train" or gap is None:
        return []
    lines, signs = [], {gap > 0}
    for other in _others(item, criteria):
        pairs = build_pairs(item.pairs.arm, other)
        name = f"{other.split} ({other.eval_precision} forward)"
        unusable = _why_not(pairs)
        if unusable:
            lines.append(f"not described: {name}, {unusable}")
            continue
        estimate = paired.paired_t(gaps.endpoint(pairs.gap, pairs.tail_count)[None], criteria.alpha)
        mean, lo, hi = float(estimate.gap[0]), float(estimate.lo[0]), float(estimate.hi[0])
        interval = f", interval {percent(lo)} to {percent(hi)}" if len(pairs.seeds) > 1 else ""
        lines.append(f"described only: gap {percent(mean)} on {name}{interval}")
        signs.add(mean > 0)
    if len(signs) > 1:
        lines.append(
            "the evaluations disagree in sign: better on one, worse on another; only the declared one decides"
        )
    return lines


def _why_not(pairs: Pairs) -> str | None:
    """Return why a further evaluation has no gap to describe; a forward that breaks must not go unsaid."""
    if pairs.diverged:
        where = ", ".join(f"seed {seed} from step {step}" for seed, step in pairs.diverged.items())
        return f"which is non-finite or more than 5 % above the control to its end in {where}"
    return pairs.invalid[0] if pairs.invalid else None


def _others(item: Judged, criteria: Criteria) -> Iterator[Criteria]:
    found = {key for runs in item.pairs.arm.test.values() for run in runs for key in run.evals}
    decided = (criteria.split, item.verdict.eval_precision)
    for split, precision in sorted(found - {decided}):
        stated = next((name for name in _PRECISIONS if name == precision), criteria.eval_precision)
        yield replace(criteria, split=split, eval_precision=stated)
