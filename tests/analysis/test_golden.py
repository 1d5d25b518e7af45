"""Frozen draws with one right answer each; how they are drawn is in cases.py."""

import cases
import numpy as np
import pandas as pd
import pytest

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.verdict import Criteria, judge

LOOSE = {"margin": 0.005}
EXPECTED = {
    "g01": (LOOSE, Outcome.EQUIVALENT),
    "g02": ({}, Outcome.WORSE),
    "g03": ({"null_matched": True}, Outcome.WORSE),
    "g04": ({}, Outcome.INCONCLUSIVE),
    "g05": ({}, Outcome.DIVERGED),
    "g06": ({}, Outcome.DIVERGED),
    "g07": (LOOSE, Outcome.EQUIVALENT),
    "g08": ({}, Outcome.IDENTICAL),
    "g09": ({}, Outcome.INVALID),
    "g10": ({}, Outcome.INVALID),
    "g11": ({"margin": 0.001}, Outcome.INCONCLUSIVE),
    "g12": (LOOSE, Outcome.EQUIVALENT),
    "g13": ({}, Outcome.BETTER),
    "g14": ({}, Outcome.DIVERGED),
    "g15": ({}, Outcome.INCONCLUSIVE),
    "same_gap": ({}, Outcome.INVALID),
    "two_sets": ({}, Outcome.BETTER),
    "both_nan": ({}, Outcome.INVALID),
    "shrinks": ({}, Outcome.EQUIVALENT),
    "flat_then_nan": ({}, Outcome.DIVERGED),
    "outlier": ({}, Outcome.INCONCLUSIVE),
}


def judged(name, **changes):
    settings, _ = EXPECTED[name]
    return judge(read_curves([cases.GOLD / f"{name}.csv"]), Criteria(**{**settings, **changes}))


def verdict(name, **changes):
    return judged(name, **changes).verdicts[0]


def said(name, **changes):
    told = verdict(name, **changes)
    return " | ".join((*told.reasons, *told.warnings))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_frozen_case_has_its_outcome(name):
    assert verdict(name).outcome is EXPECTED[name][1]


def test_every_drawn_case_is_frozen_and_expected():
    assert set(EXPECTED) == set(cases.DRAWN)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "shrinks"])  # its endpoint is noisy
def test_fresh_draws_get_the_same_outcome(name):
    """Nine of ten further draws; the reference rates are 97 % and more."""
    settings, expected = EXPECTED[name]
    outcomes = [
        judge(CurveSet.from_table(cases.draw(name, seed)), Criteria(**settings)).verdicts[0].outcome
        for seed in range(1, 11)
    ]
    assert sum(outcome is expected for outcome in outcomes) >= 9


def test_one_seed_with_matched_nulls_is_provisional():
    told = verdict("g03")
    assert (told.provisional, told.n_seeds, told.n_null_pairs) == (True, 1, 8)
    assert "assumes matched noise" in said("g03")
    assert "too few pairs to find anything" in said("g03")


def test_one_pair_and_nothing_else_asks_for_seeds_and_names_the_noise_it_could_bear():
    told = verdict("g04")
    assert told.need_seeds == 5
    assert told.interval == (None, None)
    assert "sensitivity: worse than the margin only if the run-to-run sd is below" in said("g04")


def test_one_pair_with_a_stated_noise_is_provisional():
    loud, quiet = verdict("g04", noise_sd=0.005), verdict("g04", noise_sd=0.0005)
    assert (loud.outcome, loud.provisional) == (Outcome.INCONCLUSIVE, True)
    assert (quiet.outcome, quiet.provisional) == (Outcome.WORSE, True)
    assert quiet.interval[1] - quiet.interval[0] == pytest.approx(2 * 1.6448536 * 0.0005 * 2**0.5, rel=1e-6)


def test_soft_divergence_names_its_onset():
    told = verdict("g05")
    assert abs(told.onset_step - 1400) <= 50
    evidence = judged("g05").evidence[0]
    assert evidence.onset_interval[0] <= 1400 <= evidence.onset_interval[1]
    assert "diverged (soft)" in said("g05")


@pytest.mark.parametrize(("name", "step", "seeds"), [("g06", 1250, (1,)), ("g14", 1400, (2,))])
def test_hard_divergence_names_step_and_share(name, step, seeds):
    told = verdict(name)
    assert (told.onset_step, told.diverged_seeds) == (step, seeds)
    assert "1/3 seeds" in said(name)
    assert told.gap is None
    assert told.gate is Gate.FAIL


def test_spikes_are_masked_and_told():
    assert "seed 0: 1 evaluations with a spike and 0 with a non-finite" in said("g07")
    assert "seed 2: 0 evaluations with a spike and 1 with a non-finite" in said("g07")


def test_truncation_names_the_run_and_can_be_allowed_by_declaration():
    assert "fp8 seed 2 ends at step 1500 of 2000" in said("g09")
    allowed = verdict("g09", allow_prefix=True, margin=0.005)
    assert allowed.outcome is Outcome.EQUIVALENT
    assert "holds at step 1500" in said("g09", allow_prefix=True)


def test_a_broken_baseline_says_nothing_about_fp8():
    assert "the baseline diverged" in said("g10")
    assert "not attributable to FP8" in said("both_nan")


def test_two_seeds_on_the_margin_need_no_more_seeds():
    assert verdict("g11").need_seeds is None
    assert "no number of seeds up to 30" in said("g11")


def test_another_cadence_is_met_on_the_common_steps():
    assert "20 common ones of 40" in said("g12")


def test_undeclared_nulls_are_reported_and_not_pooled():
    told = verdict("g15")
    assert told.interval == (None, None)
    assert told.noise_floor["control_run"]["df"] == 8


def test_copied_logs_are_named():
    assert "to the last digit" in said("same_gap")
    assert "never called equivalent" in said("g08")


def test_held_out_sets_that_disagree():
    assert "described only: gap +0.4" in said("two_sets")
    assert "disagree in sign" in said("two_sets")
    assert verdict("two_sets", split="code").gap > 0


def test_a_shrinking_gap_is_said_to_shrink():
    assert "the gap shrinks over the last half" in said("shrinks")


def test_flat_then_nan_is_a_divergence_at_the_nan():
    assert verdict("flat_then_nan").onset_step == 1750


def test_one_outlier_decides_and_leave_one_out_says_so():
    assert "the verdict hangs on single seeds: EQUIVALENT without seed 3" in said("outlier")
    assert judged("outlier").evidence[0].leave_one_out[3] == "EQUIVALENT"


class TestRealCurves:
    """Four seeds on an H200: three to four BF16 runs of the same seed each, one tensorwise FP8 run."""

    TABLE = pd.read_csv(cases.GOLD / "h200.csv")

    def test_the_noise_floor_is_what_was_measured(self):
        floor = judge(CurveSet.from_table(self.TABLE), Criteria()).verdicts[0].noise_floor
        assert floor["control_run"]["sd"] == pytest.approx(0.00145, abs=0.000005)
        assert floor["control_run"]["df"] == 9
        assert floor["between_seeds"]["sd"] == pytest.approx(0.0038, abs=0.00005)

    def test_tensorwise_sits_on_the_margin(self):
        told = judge(CurveSet.from_table(self.TABLE), Criteria()).verdicts[0]
        assert told.outcome is Outcome.INCONCLUSIVE
        assert told.gap == pytest.approx(0.0023, abs=0.00005)
        assert any("sits on the margin" in reason for reason in told.reasons)
        assert told.need_seeds is None

    @pytest.mark.parametrize("margin", [0.0025, 0.005])
    @pytest.mark.parametrize("pair", [(a, b) for a in range(4) for b in range(4) if a != b])
    def test_no_replica_is_worse_than_another(self, margin, pair):
        control, test = pair
        rows = self.TABLE[self.TABLE.arm == "bf16"]
        table = pd.concat(
            [
                rows[rows.replica == control].assign(replica=0),
                rows[rows.replica == test].assign(replica=0, arm="other"),
            ]
        )
        told = judge(CurveSet.from_table(table), Criteria(margin=margin)).verdicts[0]
        assert told.outcome not in (Outcome.WORSE, Outcome.DIVERGED)
        assert np.isfinite(told.gap)

    def test_declared_nulls_are_pooled_with_the_gaps(self):
        told = judge(CurveSet.from_table(self.TABLE), Criteria(null_matched=True)).verdicts[0]
        assert "9 df of null pairs, 12 df" in told.basis
        assert told.n_null_pairs == 5
        assert told.trajectory_p is not None
