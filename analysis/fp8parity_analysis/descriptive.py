"""Other held-out sets and the other evaluation precision: described beside the verdict, never deciding it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from fp8parity_analysis import estimate
from fp8parity_analysis import gap as gaps
from fp8parity_analysis.criteria import Criteria, EvalPrecision
from fp8parity_analysis.pairing import build_pairs
from fp8parity_analysis.reasons import percent, seeds_text
from fp8parity_analysis.wording import DESCRIBED, level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8parity_analysis.judging import Judged
    from fp8parity_analysis.pairing import Pairs

_PRECISIONS: tuple[EvalPrecision, ...] = get_args(EvalPrecision)


def described(item: Judged, criteria: Criteria) -> list[str]:
    """Return one line per further held-out set or precision, and one more when their signs disagree.

    Each is described over the seeds that the verdict used, at its level.
    """
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
        look = estimate.look_of(len(item.pairs.seeds), criteria)
        used = set(item.pairs.seeds[: look.n_seeds])
        rows = [row for row, seed in enumerate(pairs.seeds) if seed in used]
        ends = gaps.endpoint(pairs.gap[rows], pairs.tail_count)
        measured = estimate.tested(ends[None], look, criteria)
        mean, lo, hi = float(measured.gap[0]), float(measured.lo[0]), float(measured.hi[0])
        interval = f", {level(look.alpha)} interval {percent(lo)} to {percent(hi)}" if np.isfinite(lo) else ""
        lines.append(f"{DESCRIBED}: gap {percent(mean)} on {name} from {seeds_text(len(rows))}{interval}")
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
