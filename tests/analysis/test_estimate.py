"""Which seeds, at which size, on which basis: declared looks and intervals that hold at any number of seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import brentq

from fp8parity_analysis import estimate, sequential
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.verdict import Verdict, judge
from fp8parity_analysis.wording import sentence

LOOKS = (3, 5, 8)
STEPS = np.arange(100, 2001, 100)


def table(n: int, rng: int = 0, gap: float = 0.0, replicas: int = 1, sd: float = 0.001) -> pd.DataFrame:
    draws = np.random.default_rng(rng)
    frames = []
    for seed in range(n):
        for arm, count in (("bf16", replicas), ("fp8", 1)):
            for replica in range(count):
                own = sd * draws.standard_normal() + 0.0002 * draws.standard_normal(len(STEPS))
                loss = np.exp(1 + 8 * (1 + STEPS / 15) ** -0.45 + own + gap * (arm == "fp8"))
                place = {"seed": seed, "arm": arm, "replica": replica}
                frames.append(pd.DataFrame({**place, "step": STEPS, "loss": loss}))
    return pd.concat(frames, ignore_index=True)


def verdict(curves: pd.DataFrame, **settings: object) -> Verdict:
    return judge(CurveSet.from_table(curves), Criteria(**settings)).verdicts[0]


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (3, None),
        (4, "1 further seed waits for the next declared look"),
        (7, "2 further seeds wait for the next declared look"),
        (8, None),
        (9, "1 further seed is not used, since no look is left"),
        (11, "3 further seeds are not used, since no look is left"),
    ],
)
def test_what_becomes_of_further_seeds_is_said(n: int, said: str | None) -> None:
    text = estimate.look_of(n, Criteria(looks=LOOKS)).text
    assert text.partition("; ")[2] == (said or "")


@pytest.mark.parametrize("spending", ["bonferroni", "obrien_fleming"])
@pytest.mark.parametrize(("n", "index"), [(4, 0), (9, 2)])
def test_the_gap_that_is_found_is_the_one_of_the_look(spending: str, n: int, index: int) -> None:
    criteria = Criteria(looks=LOOKS, spending=spending)
    alpha = sequential.look_alphas(LOOKS, 0.05, spending)[index]
    told = verdict(table(n), looks=LOOKS, spending=spending)
    used = LOOKS[index]
    ratio = told.noise_floor["detectable_gap"] / told.noise_floor["pair_gap"]["sd"]
    limit = stats.t.ppf(1 - alpha, used - 1)
    assert estimate.critical_t(estimate.look_of(n, criteria), criteria) == pytest.approx(limit, rel=1e-9)
    assert stats.nct.sf(limit, used - 1, ratio * np.sqrt(used)) == pytest.approx(0.8, abs=1e-6)
    assert ratio > verdict(table(used)).noise_floor["detectable_gap"] / told.noise_floor["pair_gap"]["sd"]


@pytest.mark.parametrize("n", [5, 8])
def test_the_gap_that_anytime_finds_is_that_of_the_e_process(n: int) -> None:
    floor = verdict(table(n), anytime=True).noise_floor
    limit = brentq(lambda t: sequential.log_e_value(np.array([t]), n)[0] - np.log(20), 0.5, 100)
    power = stats.nct.sf(limit, n - 1, floor["detectable_gap"] / floor["pair_gap"]["sd"] * np.sqrt(n))
    assert power == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(("n", "settings"), [(4, {"anytime": True}), (3, {"looks": (5, 8)})])
def test_where_nothing_can_be_found_no_gap_is_stated(n: int, settings: dict) -> None:
    told = verdict(table(n), **settings)
    assert told.noise_floor["detectable_gap"] is None
    assert not any("80 % power" in text for text in told.reasons)


@pytest.mark.parametrize("gap", [0.0, 0.01])
@pytest.mark.parametrize("settings", [{"noise_sd": 0.0001}, {"noise_sd": 0.0001, "noise_df": 8}])
def test_anytime_begins_at_two_seeds_whatever_noise_is_stated(gap: float, settings: dict) -> None:
    """A fixed-sample interval at one seed, then the e-process, would spend the error rate twice."""
    curves = table(1, gap=gap, sd=0.00005)
    assert verdict(curves, **settings).outcome is not Outcome.INCONCLUSIVE
    told = verdict(curves, anytime=True, **settings)
    assert (told.outcome, told.interval, told.provisional) == (Outcome.INCONCLUSIVE, (None, None), False)
    assert told.reasons[0] == "not settled: one pair; anytime begins at two seeds"
    assert "anytime begins at two seeds" in sentence(told)
    assert any("stated noise was not used" in text for text in told.warnings)
    assert not any("sensitivity" in text for text in told.reasons)


def test_anytime_pools_no_nulls_and_says_so() -> None:
    for n in (1, 5):
        curves = table(n, gap=0.01, replicas=9)
        assert "pooled" in verdict(curves, null_matched=True).basis
        told = verdict(curves, null_matched=True, anytime=True)
        assert "pooled" not in told.basis
        assert any("anytime pools no null pairs" in text for text in told.warnings)
    assert told.basis == "anytime-valid t e-process over 5 seeds"


def test_an_anytime_interval_without_bounds_is_said_in_words() -> None:
    told = verdict(table(3, gap=0.01), anytime=True)
    assert told.interval == (None, None)
    assert "90 % interval without bounds at so few seeds" in told.reasons[1]
    assert not any("inf" in text.split() for text in told.reasons)


def unsettled(n: int, spread: float = 0.0014, **settings: object) -> Verdict:
    """A gap of 0.1 % with a margin of 0.3 %, too noisy for so few seeds: the test arm is moved by `spread`."""
    curves = table(n, gap=0.001, sd=0.0)
    moved = spread * np.array([0.0, 1.0, -1.0, 0.5])[curves.seed] * (curves.arm == "fp8")
    return verdict(curves.assign(loss=curves.loss * np.exp(moved)), margin=0.003, **settings)


def test_only_looks_to_come_are_advised() -> None:
    assert unsettled(3).need_seeds not in (None, *LOOKS)
    told = unsettled(3, looks=(3, 5, 8, 20))
    assert told.outcome is Outcome.INCONCLUSIVE
    assert told.need_seeds in (5, 8, 20)


def test_after_the_last_look_no_seeds_are_advised() -> None:
    told = unsettled(4, looks=(2, 3))
    assert (told.outcome, told.need_seeds) == (Outcome.INCONCLUSIVE, None)
    assert told.reasons[-1].startswith("no declared look is left: more seeds would not be used")


def test_looks_that_cannot_settle_it_are_named_as_such() -> None:
    told = unsettled(3, looks=(3, 4))
    assert (told.outcome, told.need_seeds) == (Outcome.INCONCLUSIVE, None)
    assert told.reasons[-1].startswith("no declared look would settle it")


def test_anytime_advises_the_seeds_that_its_own_interval_needs() -> None:
    told = unsettled(3, spread=0.0012, anytime=True)
    sd = told.noise_floor["pair_gap"]["sd"] * np.sqrt(2 / stats.chi2.ppf(0.2, 2))
    room = 0.003 - told.gap

    def needed(n: int) -> float:
        return (sequential.anytime_limit(n, 0.05) + stats.t.ppf(0.8, n - 1)) * sd / np.sqrt(n)

    assert needed(told.need_seeds) <= room < needed(told.need_seeds - 1)
