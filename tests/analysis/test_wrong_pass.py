"""Inputs that must never pass: curves cut short, runs missing, controls copied, training that died unseen."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.schema import Gate
from fp8parity_analysis.verdict import Verdict, judge

STEPS = np.arange(50, 2001, 50)


def curves(arms: tuple[str, ...] = ("rowwise",), seeds: int = 5) -> pd.DataFrame:
    """Return five seeds whose gaps are far inside the margin."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        for arm in ("bf16", *arms):
            loss = (2.0 + 8.0 * (1 + STEPS / 15) ** -0.45) * np.exp(
                0.004 * seed + 1e-4 * rng.standard_normal(len(STEPS))
            )
            rows.append(
                pd.DataFrame({"seed": seed, "arm": arm, "step": STEPS, "loss": loss, "split": "held_out"})
            )
    return pd.concat(rows, ignore_index=True)


def verdict(table: pd.DataFrame, criteria: Criteria | None = None) -> Verdict:
    return judge(CurveSet.from_table(table), criteria or Criteria()).verdicts[0]


def test_the_untouched_curves_pass() -> None:
    assert verdict(curves()).gate is Gate.PASS


def with_train(table: pd.DataFrame, nan_from: int | None = None) -> pd.DataFrame:
    train = table.assign(split="train")
    if nan_from is not None:
        bad = (train["arm"] == "rowwise") & (train["step"] >= nan_from)
        train.loc[bad, "loss"] = np.nan
    return pd.concat([table, train], ignore_index=True)


def test_evaluations_that_stop_while_training_goes_on() -> None:
    table = with_train(curves())
    late = (table["arm"] == "rowwise") & (table["split"] == "held_out") & (table["step"] > 1000)
    found = verdict(table[~late])
    assert found.gate is Gate.INVALID
    assert "ends at step 1000 of 2000" in found.reasons[0]


def test_evaluations_that_leave_the_common_grid() -> None:
    table = curves()
    late = (table["arm"] == "rowwise") & (table["step"] > 1000)
    table.loc[late, "step"] += 7
    found = verdict(table)
    assert found.gate is Gate.INVALID
    assert "share end at step 1000 of" in found.reasons[0]


def test_missing_runs_are_named() -> None:
    table = curves()
    found = verdict(table[~((table["arm"] == "rowwise") & (table["seed"] == 4))])
    assert any("seeds 4 have a control but no run of this arm" in text for text in found.warnings)


def test_a_diverged_run_without_a_control_does_not_vanish() -> None:
    table = curves()
    table = table[~((table["arm"] == "bf16") & (table["seed"] == 4))].copy()
    table.loc[(table["seed"] == 4) & (table["step"] >= 500), "loss"] = np.nan
    assert verdict(table).gate is Gate.INVALID


def test_one_control_for_all_seeds() -> None:
    table = curves()
    first = table.loc[(table["arm"] == "bf16") & (table["seed"] == 0), "loss"].to_numpy()
    for seed in range(5):
        table.loc[(table["arm"] == "bf16") & (table["seed"] == seed), "loss"] = first
    found = verdict(table)
    assert found.gate is Gate.INVALID
    assert "have the same curve" in found.reasons[0]


def test_training_that_died_unseen_by_the_evaluations() -> None:
    assert verdict(with_train(curves(), nan_from=1500)).gate is Gate.FAIL


def test_gaps_that_are_exactly_zero_only_at_the_end() -> None:
    table = curves()
    tail = table["step"] > 1700
    table.loc[tail & (table["arm"] == "rowwise"), "loss"] = table.loc[
        tail & (table["arm"] == "bf16"), "loss"
    ].to_numpy()
    assert verdict(table).gate is Gate.INVALID


def test_a_control_that_breaks_at_its_very_end() -> None:
    table = curves()
    table.loc[(table["arm"] == "bf16") & (table["step"] > 1850), "loss"] *= 1.2
    assert verdict(table).gate is Gate.INVALID


@pytest.mark.parametrize("correction", ["per_comparison", "holm"])
def test_no_correction_passes_before_the_first_look(correction: str) -> None:
    table = curves(("rowwise", "tensorwise"), seeds=3)
    criteria = Criteria(looks=(5, 8), correction=correction)  # type: ignore[arg-type]
    assert verdict(table, criteria).gate is Gate.INCONCLUSIVE
