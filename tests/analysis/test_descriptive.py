"""Further held-out sets and precisions: described over the verdict's seeds, at its level."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fp8parity_analysis import sequential
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.verdict import Verdict, judge

STEPS = np.arange(100, 2001, 100)


def table(n: int) -> pd.DataFrame:
    draws = np.random.default_rng(3)
    frames = []
    for seed in range(n):
        for arm, precision in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "arm")):
            own = 0.001 * draws.standard_normal() + 0.0002 * draws.standard_normal(len(STEPS))
            loss = np.exp(1 + 8 * (1 + STEPS / 15) ** -0.45 + own)
            place = {"seed": seed, "arm": arm, "eval_precision": precision}
            frames.append(pd.DataFrame({**place, "step": STEPS, "loss": loss}))
    return pd.concat(frames, ignore_index=True)


def ends(curves: pd.DataFrame, n: int) -> np.ndarray:
    tail = curves[curves.step > 1800].assign(log=lambda rows: np.log(rows.loss))
    mean = tail.groupby(["arm", "eval_precision", "seed"]).log.mean()
    return (mean["fp8", "arm"] - mean["bf16", "bf16"]).to_numpy()[:n]


def line(curves: pd.DataFrame, **settings: object) -> str:
    told: Verdict = judge(CurveSet.from_table(curves), Criteria(**settings)).verdicts[0]
    (found,) = [text for text in told.warnings if text.startswith("described only")]
    return found


def stated(gap: float, lo: float, hi: float, n: int, level: str) -> str:
    return (
        f"described only: gap {100 * gap:+.3f} % on held_out (arm forward) from {n} seeds, "
        f"{level} interval {100 * lo:+.3f} % to {100 * hi:+.3f} %"
    )


@pytest.mark.parametrize(
    ("settings", "used", "alpha", "level"),
    [({}, 9, 0.05, "90 %"), ({"looks": (3, 5, 8)}, 8, 0.05 / 3, "96.67 %")],
)
def test_it_has_the_seeds_and_the_level_of_the_verdict(
    settings: dict, used: int, alpha: float, level: str
) -> None:
    curves = table(9)
    values = ends(curves, used)
    lo, hi = stats.ttest_1samp(values, 0.0).confidence_interval(1 - 2 * alpha)
    assert line(curves, **settings) == stated(values.mean(), lo, hi, used, level)


def test_anytime_is_described_by_its_own_interval() -> None:
    curves = table(9)
    values = ends(curves, 9)
    bounds = sequential.anytime_t(values[None], 0.05)
    assert line(curves, anytime=True) == stated(values.mean(), bounds.lo[0], bounds.hi[0], 9, "90 %")
    assert line(table(3), anytime=True).endswith("from 3 seeds")


def test_one_seed_has_a_gap_and_no_interval() -> None:
    assert line(table(1)).endswith("on held_out (arm forward) from 1 seed")
