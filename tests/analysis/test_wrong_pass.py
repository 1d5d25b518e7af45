"""Inputs that must never pass: curves cut short, runs missing, controls copied, training that died unseen."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.verdict import Verdict, judge
from fp8parity_analysis.wording import sentence

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


def grown(table: pd.DataFrame, arm: str, gap: np.ndarray) -> pd.DataFrame:
    """Return `table` with `gap` [K] added to the log loss of an arm."""
    rows = table["arm"] == arm
    table.loc[rows, "loss"] *= np.exp(np.tile(gap, int(rows.sum()) // len(gap)))
    return table


def noisy(table: pd.DataFrame, sd: float) -> pd.DataFrame:
    """Return `table` with a constant of its own for each run of the recipe, so that intervals are wide."""
    rng = np.random.default_rng(3)
    rows = table["arm"] == "rowwise"
    table.loc[rows, "loss"] *= np.exp(
        np.repeat(sd * rng.standard_normal(int(rows.sum()) // len(STEPS)), len(STEPS))
    )
    return table


@pytest.mark.parametrize(("start", "untouched"), [(-0.004, Outcome.NON_INFERIOR), (-0.03, Outcome.BETTER)])
def test_nothing_passes_while_its_gap_grows(start: float, untouched: Outcome) -> None:
    rising = start * (2 - STEPS / STEPS[-1])  # a gap that is low enough but has been growing all along
    flat = np.full(len(STEPS), start)
    assert verdict(grown(noisy(curves(), 0.004), "rowwise", flat)).outcome is untouched
    found = verdict(grown(noisy(curves(), 0.004), "rowwise", rising))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "still growing" in found.reasons[0]
    assert found.need_seeds is None
    assert found.reasons[-1].startswith("next: train longer")


def test_seeds_evaluated_in_different_precisions() -> None:
    table = curves()
    table["eval_precision"] = "bf16"
    table.loc[(table["arm"] == "rowwise") & (table["seed"] >= 3), "eval_precision"] = None
    found = verdict(table)
    assert found.gate is Gate.INVALID
    assert "different precisions: bf16 in rowwise seed 0, unstated in rowwise seed 3" in found.reasons[0]


def test_runs_that_somebody_stopped_are_named() -> None:
    table = curves()
    table["status"] = "stopped"
    assert any("stopped before their planned end" in text for text in verdict(table).warnings)


def test_an_own_forward_that_breaks_is_told() -> None:
    table = curves().assign(eval_precision="bf16")
    own = table.assign(eval_precision="arm")
    own.loc[(own["arm"] == "rowwise") & (own["step"] > 1500), "loss"] = np.nan
    found = verdict(pd.concat([table, own], ignore_index=True))
    assert any(
        "not described: held_out (arm forward), which is non-finite" in text for text in found.warnings
    )


def with_nulls(table: pd.DataFrame, sd: float, seed: int = 8) -> pd.DataFrame:
    """Return `table` with one null run per seed: `sd` away from its control, 0 for an exact repetition."""
    rng = np.random.default_rng(seed)
    nulls = table[table["arm"] == "bf16"].assign(arm="bf16_null")
    nulls["loss"] *= np.exp(np.repeat(sd * rng.standard_normal(len(nulls) // len(STEPS)), len(STEPS)))
    return pd.concat([table, nulls], ignore_index=True)


def test_exact_repetitions_are_no_null_pairs() -> None:
    found = verdict(with_nulls(curves(), 0.0), Criteria(null_matched=True))
    assert found.n_null_pairs == 0
    assert found.basis.startswith("paired t")
    assert any("no null pairs" in text for text in found.warnings)
    assert any("5 replicas repeat another run" in text for text in found.warnings)


def test_one_exact_repetition_adds_no_degree_of_freedom() -> None:
    table = with_nulls(curves(), 0.0005)
    same = (table["arm"] == "bf16_null") & (table["seed"] == 2)
    table.loc[same, "loss"] = table.loc[(table["arm"] == "bf16") & (table["seed"] == 2), "loss"].to_numpy()
    found = verdict(table, Criteria(null_matched=True))
    assert found.n_null_pairs == 4
    assert "4 df of null pairs" in found.basis


def test_a_null_replica_that_broke_cannot_lift_the_baseline() -> None:
    table = with_nulls(curves(), 0.0005)
    late = (table["arm"] == "bf16_null") & (table["seed"] == 1) & (table["step"] > 1000)
    table.loc[late, "loss"] *= 1.08
    assert verdict(table, Criteria(null_matched=True)).gate is Gate.INVALID
    assert verdict(table).gate is Gate.PASS  # where nulls are not pooled, they touch nothing


def test_a_copied_replica_does_not_halve_the_stated_noise() -> None:
    table = curves(seeds=1)
    copy = table[table["arm"] == "rowwise"].assign(replica=1)
    alone = verdict(table, Criteria(noise_sd=0.001))
    doubled = verdict(pd.concat([table.assign(replica=0), copy], ignore_index=True), Criteria(noise_sd=0.001))
    assert doubled.interval == alone.interval


@pytest.mark.parametrize("correction", ["per_comparison", "holm"])
def test_a_correction_never_narrows_an_anytime_verdict(correction: str) -> None:
    table = noisy(curves(("rowwise", "tensorwise"), seeds=5), 0.0009)
    criteria = Criteria(anytime=True, correction=correction)  # type: ignore[arg-type]
    judgement = judge(CurveSet.from_table(table), criteria)
    for item, evidence in zip(judgement.verdicts, judgement.evidence, strict=True):
        lo, hi = item.interval
        p = evidence.p_values["equivalent"]
        assert p is not None
        assert lo is not None
        assert hi is not None
        assert (p < 0.05) == (lo > -0.0025 and hi < 0.0025)


def test_contrasts_are_corrected_where_the_verdicts_are() -> None:
    arms = ("a", "b", "c")
    rng = np.random.default_rng(5)
    table = curves(arms)
    for arm, gap in zip(arms, (0.0, 0.0006, 0.0012), strict=True):
        rows = table["arm"] == arm
        table.loc[rows, "loss"] *= np.exp(gap + np.repeat(0.0006 * rng.standard_normal(5), len(STEPS)))
    plain = judge(CurveSet.from_table(table), Criteria()).contrasts
    holm = judge(CurveSet.from_table(table), Criteria(correction="holm")).contrasts
    raw = sorted(item.p for item in plain if item.p is not None)
    assert sorted(item.p for item in holm if item.p is not None)[0] == pytest.approx(min(1.0, 3 * raw[0]))
    assert [item.interval for item in holm] == [item.interval for item in plain]


def test_the_report_says_what_withholds_a_pass() -> None:
    rising = -0.004 * (2 - STEPS / STEPS[-1])
    growing = verdict(grown(noisy(curves(), 0.004), "rowwise", rising))
    assert sentence(growing).startswith(
        "rowwise is not settled: not worse by the margin of 0.25 % here, but the gap"
    )
    early = verdict(curves(seeds=3), Criteria(looks=(5, 8)))
    assert sentence(early) == "rowwise is not settled: the first declared look is still to come."


def test_a_blow_up_that_only_the_own_cadence_shows() -> None:
    """Control every 100 steps, FP8 every 70: what both have ends long before either does."""
    table = curves()
    fp8 = table["arm"] == "rowwise"
    table = table[fp8 | (table["step"] % 100 == 0)].copy()
    fp8 = table["arm"] == "rowwise"
    table.loc[fp8, "step"] = table.loc[fp8, "step"] // 50 * 70
    table = table[table["step"] <= 2030]
    late = (table["arm"] == "rowwise") & (table["step"] > 1400)
    table.loc[late, "loss"] *= 1.3
    found = verdict(table)
    assert found.gate is Gate.INVALID
    assert found.reasons[0] == "the evaluations that all runs share end at step 1400 of 2030"


@pytest.mark.parametrize(
    ("arm", "outcome"), [("rowwise", Outcome.DIVERGED), ("bf16", Outcome.INVALID), (None, Outcome.EQUIVALENT)]
)
def test_training_that_blows_up_after_the_last_evaluation(arm: str | None, outcome: Outcome) -> None:
    table = curves()
    train = table.assign(split="train")
    table = table[table["step"].isin([500, 1000, 1500])]
    train.loc[(train["arm"] == arm) & (train["step"] > 1550), "loss"] *= 1.1
    # the step before the last of them is where a run of two cadences would end early
    train = train[train["step"] < 2000]
    found = verdict(pd.concat([table, train], ignore_index=True))
    assert found.outcome is outcome
    if arm == "rowwise":
        assert "seed 0 from step 1600" in found.reasons[0]
    if arm == "bf16":
        assert (
            "the control's training loss is more than 5% above this arm's from step 1600" in found.reasons[0]
        )


def test_fewer_training_steps_than_chance_could_lift_say_nothing() -> None:
    table = curves()
    train = table.assign(split="train")
    table = table[table["step"].isin([500, 1000, 1500])]
    train = train[(train["step"] < 2000) & (train["step"] % 100 == 0)]
    train.loc[(train["arm"] == "rowwise") & (train["step"] > 1500), "loss"] *= 1.1
    assert verdict(pd.concat([table, train], ignore_index=True)).outcome is Outcome.EQUIVALENT


def test_survivors_are_named_where_every_seed_has_a_null_run() -> None:
    table = with_nulls(curves(), 1e-4)
    found = verdict(table[~((table["arm"] == "rowwise") & (table["seed"] == 4))])
    assert any("seeds 4 have a control but no run of this arm" in text for text in found.warnings)


@pytest.mark.parametrize("what", ["nan", "spikes"])
@pytest.mark.parametrize(("count", "gate"), [(4, Gate.PASS), (5, Gate.INVALID), (16, Gate.INVALID)])
def test_masking_is_for_accidents(what: str, count: int, gate: Gate) -> None:
    """Of 40 evaluations four may be left out."""
    table = curves()
    bad = STEPS[3 : 3 + 2 * count : 2]
    rows = (table["arm"] == "rowwise") & (table["seed"] == 2) & table["step"].isin(bad)
    table.loc[rows, "loss"] *= np.nan if what == "nan" else 1.4
    found = verdict(table)
    # spikes with one good evaluation between two of them make that one a dip, so twice as many stand out
    assert found.gate is (Gate.INVALID if what == "spikes" and count > 2 else gate)
    if found.gate is Gate.INVALID:
        assert "seeds 2: more than 4 of 40 evaluations jump" in found.reasons[0]


def test_one_control_for_all_seeds_and_two_evaluations() -> None:
    table = curves(seeds=4)
    table = table[table["step"].isin([1000, 2000])].copy()
    assert verdict(table).gate is Gate.PASS
    control = table["arm"] == "bf16"
    table.loc[control, "loss"] = np.tile(table.loc[control, "loss"].to_numpy()[:2], 4)
    found = verdict(table)
    assert found.gate is Gate.INVALID
    assert "seeds 0, 1, 2, 3 have the same losses to the last digit" in " ".join(found.reasons)


def test_one_replica_that_blew_up_is_not_averaged_away() -> None:
    table = curves()
    extra = [table[table["arm"] == "rowwise"].assign(replica=replica) for replica in (1, 2, 3)]
    table = pd.concat([table.assign(replica=0), *extra], ignore_index=True)
    rng = np.random.default_rng(3)
    table["loss"] *= np.exp(1e-4 * rng.standard_normal(len(table)))
    assert verdict(table).gate is Gate.PASS
    broken = (table["replica"] == 2) & (table["seed"] == 4) & (table["step"] >= 1050)
    table.loc[broken, "loss"] *= 1.12
    found = verdict(table)
    assert (found.outcome, found.diverged_seeds) == (Outcome.DIVERGED, (4,))
    assert "seed 4 from step 1050" in found.reasons[0]


def test_one_pair_says_that_its_growth_is_unknown() -> None:
    criteria = Criteria(noise_sd=0.0001)
    assert any(
        "whether its gap still grows cannot be tested" in t
        for t in verdict(curves(seeds=1), criteria).warnings
    )
    assert not any("grows" in t for t in verdict(curves(seeds=2), criteria).warnings)
