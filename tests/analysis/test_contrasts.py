"""Recipes against each other: the verdicts' seeds, size and method, by hand and by rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fp8parity_analysis import sequential
from fp8parity_analysis.contrasts import contrast_of
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.verdict import Judgement, judge

LOOKS = (3, 5, 8)
STEPS = np.arange(100, 2001, 100)


def curves(seeds: dict[str, int], rng: int = 0, gap: float = 0.0) -> pd.DataFrame:
    """A table of `bf16` and of arms with so many seeds each; the first arm is worse by `gap`."""
    draws = np.random.default_rng(rng)
    frames = []
    for number, (arm, count) in enumerate({"bf16": max(seeds.values()), **seeds}.items()):
        for seed in range(count):
            own = 0.001 * draws.standard_normal() + 0.0002 * draws.standard_normal(len(STEPS))
            loss = np.exp(1 + 8 * (1 + STEPS / 15) ** -0.45 + own + gap * (number == 1))
            frames.append(pd.DataFrame({"seed": seed, "arm": arm, "step": STEPS, "loss": loss}))
    return pd.concat(frames, ignore_index=True)


def of(table: pd.DataFrame, **settings: object) -> Judgement:
    return judge(CurveSet.from_table(table), Criteria(**settings))


def differences(table: pd.DataFrame, n: int) -> np.ndarray:
    """The difference of arms a and b at the endpoint, for the first n seeds [n]."""
    tail = table[table.step > 1800].assign(log=lambda rows: np.log(rows.loss))
    ends = tail.groupby(["arm", "seed"]).log.mean()
    return (ends["a"] - ends["b"]).to_numpy()[:n]


@pytest.mark.parametrize(("seeds", "used", "spending"), [(9, 8, "bonferroni"), (7, 5, "obrien_fleming")])
def test_with_declared_looks_a_contrast_is_the_difference_of_the_verdicts(
    seeds: int, used: int, spending: str
) -> None:
    table = curves({"a": seeds, "b": seeds}, gap=0.002)
    told = of(table, looks=LOOKS, spending=spending)
    (contrast,) = told.contrasts
    a, b = told.verdicts
    assert contrast.n_seeds == a.n_seeds == b.n_seeds == used
    assert contrast.gap == pytest.approx(a.gap - b.gap, abs=1e-15)
    alpha = sequential.look_alphas(LOOKS, 0.05, spending)[LOOKS.index(used)]
    assert a.alpha == pytest.approx(alpha)
    test = stats.ttest_1samp(differences(table, used), 0.0)
    assert contrast.interval == pytest.approx(tuple(test.confidence_interval(1 - 2 * alpha)), abs=1e-12)
    assert contrast.p == pytest.approx(min(1.0, test.pvalue * 0.05 / alpha), rel=1e-9)


def test_without_looks_nothing_is_adjusted() -> None:
    table = curves({"a": 7, "b": 7})
    test = stats.ttest_1samp(differences(table, 7), 0.0)
    (contrast,) = of(table).contrasts
    assert contrast.p == pytest.approx(test.pvalue, rel=1e-9)
    assert contrast.interval == pytest.approx(tuple(test.confidence_interval(0.9)), abs=1e-12)


def test_before_the_first_look_a_contrast_waits() -> None:
    table = curves({"a": 3, "b": 3}, gap=0.05)
    (contrast,) = of(table, looks=(5, 8)).contrasts
    assert (contrast.interval, contrast.p, contrast.n_seeds) == ((None, None), None, 3)
    assert contrast.gap == pytest.approx(0.05, abs=0.01)


def test_the_seeds_in_common_decide_which_look_it_is() -> None:
    table = curves({"a": 8, "b": 5})
    told = of(table, looks=LOOKS)
    assert [item.n_seeds for item in told.verdicts] == [8, 5]
    assert told.contrasts[0].n_seeds == 5
    one_fewer = of(curves({"a": 8, "b": 2}), looks=LOOKS)
    assert one_fewer.contrasts[0].interval == (None, None)


def test_holm_takes_the_p_values_of_the_look() -> None:
    table = curves({"a": 6, "b": 6, "c": 6}, gap=0.003)
    stated = of(table, looks=LOOKS)
    corrected = of(table, looks=LOOKS, correction="holm")
    raw = np.array([item.p for item in stated.contrasts])
    order = np.argsort(raw)
    holm = np.minimum(1.0, np.maximum.accumulate(raw[order] * [3, 2, 1]))
    assert np.array([item.p for item in corrected.contrasts])[order] == pytest.approx(holm)


def test_anytime_contrasts_are_the_e_process_of_the_differences() -> None:
    table = curves({"a": 8, "b": 8}, gap=0.004)
    (contrast,) = of(table, anytime=True).contrasts
    values = differences(table, 8)[None]
    bounds = sequential.anytime_t(values, 0.05)
    t = values.mean() / (values.std(ddof=1) / np.sqrt(8))
    assert contrast.interval == pytest.approx((bounds.lo[0], bounds.hi[0]), abs=1e-12)
    assert contrast.p == pytest.approx(min(1.0, 2 * np.exp(-sequential.log_e_value(np.array([t]), 8)[0])))
    (early,) = of(curves({"a": 3, "b": 3}, gap=0.05), anytime=True).contrasts
    assert early.interval == (None, None)
    assert early.p >= 0.5  # E at three seeds is at most 4, whatever they show


@pytest.mark.parametrize(
    ("settings", "used"), [({}, 6), ({"looks": LOOKS}, 5), ({"anytime": True}, 6), ({"looks": (7,)}, None)]
)
def test_a_trend_uses_the_seeds_of_the_look_too(settings: dict, used: int | None) -> None:
    axis = (("a", 1.0), ("b", 2.0), ("c", 3.0))
    told = of(curves({"a": 6, "b": 6, "c": 6}), trend=axis, **settings)
    trend = next(item for item in told.contrasts if item.a == "trend over declared axis")
    assert trend.n_seeds == (used or 6)
    assert (trend.p is None) == (trend.interval == (None, None)) == (used is None)
    if used:
        assert trend.gap == pytest.approx((told.verdicts[2].gap - told.verdicts[0].gap) / 2, abs=1e-12)


SEQUENTIAL = (
    (Criteria(looks=LOOKS), LOOKS),
    (Criteria(looks=LOOKS, spending="obrien_fleming"), LOOKS),
    (Criteria(anytime=True), tuple(range(2, 11))),
)


@pytest.mark.parametrize(("criteria", "sizes"), SEQUENTIAL)
def test_looking_again_and_again_finds_no_more_than_the_stated_share(
    criteria: Criteria, sizes: tuple[int, ...]
) -> None:
    """No difference at all: binomial limits at 99.9 % for p below 5 %, and for a 90 % interval without zero."""
    studies = 1500
    values = np.random.default_rng(20).standard_normal((studies, max(sizes)))
    p_hits = interval_hits = 0
    for row in values:
        looked = [contrast_of("a", "b", row[:size], criteria) for size in sizes]
        p_hits += any(item.p < 0.05 for item in looked if item.p is not None)
        excludes = [
            item.interval[0] > 0 or item.interval[1] < 0 for item in looked if item.interval[0] is not None
        ]
        interval_hits += any(excludes)
    assert p_hits <= stats.binom.ppf(0.999, studies, 0.05)
    assert interval_hits <= stats.binom.ppf(0.999, studies, 0.10)


@pytest.mark.parametrize("criteria", [Criteria(), *(criteria for criteria, _ in SEQUENTIAL)])
def test_p_and_interval_agree_and_a_large_difference_is_found(criteria: Criteria) -> None:
    draws = np.random.default_rng(21)
    found = []
    for shift in np.repeat([0.0, 1.0, 2.0, 6.0], 40):
        contrast = contrast_of("a", "b", draws.standard_normal(8) + shift, criteria)
        lo, hi = contrast.interval
        assert (contrast.p < 2 * criteria.alpha) == (lo > 0 or hi < 0)
        found.append(contrast.p < 0.05)
    assert np.mean(found[-40:]) > 0.9
    wider = replace(criteria, confidence=0.95)
    values = draws.standard_normal(8)
    lo, hi = contrast_of("a", "b", values, wider).interval
    assert lo < contrast_of("a", "b", values, criteria).interval[0]
