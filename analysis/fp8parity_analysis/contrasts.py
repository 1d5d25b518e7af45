"""Recipes against each other, paired by seed: the ablation's own question, never "one passes, one fails"."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import estimate, paired
from fp8parity_analysis import gap as gaps
from fp8parity_analysis.verdict import Contrast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.gap import FloatArray
    from fp8parity_analysis.judging import Judged
    from fp8parity_analysis.pairing import Pairs

_COUNTED = re.compile(r"^(?P<stem>.*?)[-_]?n(?P<value>\d+)$")
_SIZED = re.compile(r"^(?P<value>\d+(?:\.\d+)?)(?P<unit>[kmb])/(?P<stem>.+)$", re.IGNORECASE)
PAIRWISE_UP_TO = 50
"""With more recipes than this no pairwise contrasts are made: they would be thousands, and nobody's question."""
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


def contrasts_of(judged: Sequence[Judged], criteria: Criteria) -> tuple[Contrast, ...]:
    """Return all contrasts between comparable recipes of one group, then the trends over ordered axes."""
    members = [item for item in judged if comparable(item)]
    if len(members) > PAIRWISE_UP_TO:
        return tuple(_trends(members, criteria))
    pairwise = [_contrast(a, b, criteria) for a, b in combinations(members, 2) if _group(a) == _group(b)]
    return (*_corrected(pairwise, criteria), *_trends(members, criteria))


def _corrected(pairwise: list[Contrast], criteria: Criteria) -> list[Contrast]:
    """Return the contrasts with Holm's p-values over all of them where `correction="holm"` was declared."""
    if criteria.correction != "holm":
        return pairwise
    adjusted = paired.holm([np.nan if item.p is None else item.p for item in pairwise])
    return [
        item if item.p is None else replace(item, p=float(p))
        for item, p in zip(pairwise, adjusted, strict=True)
    ]


def comparable(item: Judged) -> bool:
    """Return whether a recipe has an endpoint that can be compared with another's."""
    pairs = item.pairs
    return not (pairs.arm.null_arm or pairs.invalid or pairs.diverged)


def _group(item: Judged) -> str:
    return next(run.group for runs in item.pairs.arm.test.values() for run in runs)


def _contrast(a: Judged, b: Judged, criteria: Criteria) -> Contrast:
    differences = _endpoint_differences(a.pairs, b.pairs, criteria)
    return contrast_of(a.verdict.recipe, b.verdict.recipe, differences, criteria)


def _endpoint_differences(a: Pairs, b: Pairs, criteria: Criteria) -> FloatArray:
    """Return the difference of the two log gaps at the endpoint, one per common seed; the control cancels."""
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    steps = np.intersect1d(a.steps, b.steps, assume_unique=True)
    if not seeds or not len(steps):
        return np.zeros(0)
    rows = [[pairs.seeds.index(seed) for seed in seeds] for pairs in (a, b)]
    columns = [np.searchsorted(pairs.steps, steps) for pairs in (a, b)]
    difference = a.gap[rows[0]][:, columns[0]] - b.gap[rows[1]][:, columns[1]]
    count = 1 if criteria.endpoint == "final" else gaps.tail_count(len(steps), criteria.tail_fraction)
    return gaps.endpoint(difference, count)


def contrast_of(a: str, b: str, values: FloatArray, criteria: Criteria) -> Contrast:
    """Return the contrast of `values`, one per seed in order: those of the look reached, at the look's size.

    Its two-sided p-value is multiplied by alpha / alpha_look, a Bonferroni procedure with the looks' weights: over all
    looks the chance that it falls below any x is at most x, and it is below 2 alpha where the interval excludes zero.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return Contrast(a, b, None, (None, None), None, 0)
    look = estimate.look_of(len(known), criteria)
    measured = estimate.tested(known[None, : look.n_seeds], look, criteria)
    gap = float(measured.gap[0])
    if look.n_seeds == 1 or look.waiting_for is not None:
        return Contrast(a, b, gap, (None, None), None, look.n_seeds)
    one_sided = float(min(measured.p_greater()[0], measured.p_less()[0]))
    p = min(1.0, 2.0 * one_sided * (criteria.alpha / look.alpha))
    return Contrast(a, b, gap, estimate.interval_of(measured), p, look.n_seeds)


def _trends(members: Sequence[Judged], criteria: Criteria) -> Iterator[Contrast]:
    """Yield trends over the declared axis, over counts that end recipes' names, and over model sizes."""
    by_name = {item.verdict.recipe: item for item in members}
    declared = [(value, by_name[name]) for name, value in criteria.trend if name in by_name]
    if declared:
        yield from _trend("declared axis", declared, criteria)
    for axis, families in (("n", _by_count(members)), ("ln(size)", _by_size(members))):
        for family in families.values():
            yield from _trend(axis, family, criteria)


def _by_count(members: Sequence[Judged]) -> dict[str, list[tuple[float, Judged]]]:
    families: dict[str, list[tuple[float, Judged]]] = {}
    for item in members:
        match = _COUNTED.match(item.verdict.recipe)
        if match:
            families.setdefault(match["stem"], []).append((float(match["value"]), item))
    return families


def _by_size(members: Sequence[Judged]) -> dict[str, list[tuple[float, Judged]]]:
    families: dict[str, list[tuple[float, Judged]]] = {}
    for item in members:
        match = _SIZED.match(item.verdict.recipe)
        if match:
            size = float(match["value"]) * _UNITS[match["unit"].lower()]
            if size > 0:
                families.setdefault(match["stem"], []).append((float(np.log(size)), item))
    return families


def _trend(axis: str, family: Sequence[tuple[float, Judged]], criteria: Criteria) -> Iterator[Contrast]:
    """Yield the mean over seeds of the least-squares slope of the endpoint gap on the axis.

    Three values at least.
    """
    ordered = sorted(family, key=lambda pair: pair[0])
    x = np.array([value for value, _ in ordered])
    seeds = set.intersection(*(set(item.pairs.seeds) for _, item in ordered)) if ordered else set()
    if len(np.unique(x)) < 3 or not seeds:
        return
    ends = np.array([_ends_by_seed(item, sorted(seeds)) for _, item in ordered])
    centred = x - x.mean()
    slopes = centred @ ends / (centred @ centred)
    yield contrast_of(
        f"trend over {axis}", ", ".join(item.verdict.recipe for _, item in ordered), slopes, criteria
    )


def _ends_by_seed(item: Judged, seeds: Sequence[int]) -> FloatArray:
    ends = gaps.endpoint(item.pairs.gap, item.pairs.tail_count)
    return ends[[item.pairs.seeds.index(seed) for seed in seeds]]
