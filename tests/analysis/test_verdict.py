import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import simulate
from statsmodels.stats.multitest import multipletests

from fp8parity_analysis import schema
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.verdict import Criteria, Judgement, Verdict, judge, strict_json

STEPS = simulate.BASE.steps


def study(n=5, size=0.0, *, seed=0, arms=("fp8",), replicas=1, kind="const"):
    drawn = simulate.studies(np.random.default_rng(seed), 1, n, kind, size, replicas=replicas)
    control, test = np.exp(drawn.control[0]), np.exp(drawn.test[0])
    tables = [simulate.table(control, test, STEPS, arm=arms[0])]
    for number, arm in enumerate(arms[1:], start=1):
        noise = np.exp(0.0005 * np.random.default_rng([seed, number]).standard_normal((n, 1)))
        more = simulate.table(control, test * noise, STEPS, arm=arm)
        tables.append(more[more.arm == arm])
    return pd.concat(tables, ignore_index=True)


def of(table, **criteria):
    return judge(CurveSet.from_table(table), Criteria(**criteria))


class TestCriteria:
    def test_defaults_are_the_documented_ones(self):
        criteria = Criteria()
        assert (criteria.margin, criteria.confidence, criteria.alpha) == (0.0025, 0.90, 0.05)
        assert (criteria.endpoint, criteria.eval_precision, criteria.null_matched) == (
            "held_out",
            "bf16",
            False,
        )

    def test_digest_changes_with_every_setting_and_is_stable(self):
        changed = [
            Criteria(margin=0.001),
            Criteria(confidence=0.95),
            Criteria(endpoint="final"),
            Criteria(null_matched=True),
            Criteria(noise_sd=0.001),
            Criteria(looks=(3, 5)),
        ]
        digests = {criteria.digest() for criteria in (Criteria(), *changed)}
        assert len(digests) == 7
        assert Criteria().digest() == Criteria().digest()
        assert len(Criteria().digest()) == 64

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"margin": 0.0}, "margin: 0.0 is outside"),
            ({"margin": float("nan")}, "margin: nan is not a finite number"),
            ({"margin": 25}, "0.0025, or 0.25%"),
            ({"margin": 0.25}, "outside (0, 0.05]; write 0.25% if per cent were meant"),
            ({"confidence": 1.0}, "confidence: 1.0"),
            ({"endpoint": "last"}, "endpoint: 'last' is not known; write one of held_out, train, final"),
            ({"eval_precision": "fp8"}, "write one of bf16, arm"),
            ({"noise_sd": -0.1}, "noise_sd: -0.1"),
            ({"looks": (5, 3)}, "must increase"),
            ({"looks": (1, 3)}, "at least 2"),
            ({"looks": (3, 5), "anytime": True}, "keep one of them"),
            ({"tail_fraction": 0.0}, "tail_fraction"),
            ({"speedup": 0}, "speedup"),
            ({"spending": "pocock"}, "spending: 'pocock'"),
        ],
    )
    def test_bad_settings_name_setting_value_and_remedy(self, settings, message):
        with pytest.raises(BadInputError, match=message.replace("(", r"\(")):
            Criteria(**settings)

    def test_json_is_strict(self):
        json.dumps(Criteria(trend=(("a", 1.0),)).to_json(), allow_nan=False)


class TestShape:
    def test_json_has_exactly_the_frozen_keys(self):
        document = of(study(arms=("a", "b"))).to_json()
        json.dumps(document, allow_nan=False)
        assert tuple(document) == schema.JUDGEMENT_KEYS
        assert tuple(document["verdicts"][0]) == schema.VERDICT_KEYS
        assert tuple(document["contrasts"][0]) == schema.CONTRAST_KEYS
        assert document["criteria"]["post_hoc"] is False
        assert document["criteria"]["digest"] == Criteria().digest()

    def test_unbounded_and_unknown_become_null(self):
        document = of(study(n=1)).to_json()["verdicts"][0]
        assert document["interval"] == [None, None]
        assert document["noise_floor"]["pair_gap"]["sd"] is None

    def test_strict_json_knows_every_kind_of_value(self):
        value = {1: (np.float64(0.5), np.int64(3), math.inf, np.nan, Gate.PASS, np.array([True]), None, "x")}
        assert strict_json(value) == {"1": [0.5, 3, None, None, "pass", [True], None, "x"]}

    def test_fields_are_the_schema(self):
        assert tuple(Verdict.__dataclass_fields__) == schema.VERDICT_KEYS

    def test_post_hoc_is_said_in_every_verdict(self):
        judgement = judge(CurveSet.from_table(study(arms=("a", "b"))), Criteria(), post_hoc=True)
        assert all(any("*post hoc*" in text for text in item.warnings) for item in judgement.verdicts)
        assert judgement.to_json()["criteria"]["post_hoc"] is True

    def test_the_same_curves_get_the_same_judgement(self):
        table = study(n=12)
        assert of(table).to_json() == of(table).to_json()


def judgement(*gates, nulls=()):
    template = of(study()).verdicts[0]
    verdicts = tuple(replace(template, recipe=str(at), gate=gate) for at, gate in enumerate(gates))
    return Judgement(Criteria(), verdicts, null_recipes=frozenset(nulls))


class TestGate:
    @pytest.mark.parametrize(
        ("gates", "worst", "code"),
        [
            ((Gate.PASS, Gate.PASS), Gate.PASS, 0),
            ((Gate.PASS, Gate.INCONCLUSIVE), Gate.INCONCLUSIVE, 11),
            ((Gate.FAIL, Gate.INCONCLUSIVE), Gate.FAIL, 10),
            ((Gate.FAIL, Gate.INVALID, Gate.PASS), Gate.INVALID, 12),
            ((), Gate.INVALID, 12),
        ],
    )
    def test_the_worst_gate_counts(self, gates, worst, code):
        study_judgement = judgement(*gates)
        assert (study_judgement.gate, study_judgement.exit_code) == (worst, code)

    def test_an_unsettled_null_arm_does_not_spoil_a_pass(self):
        assert judgement(Gate.PASS, Gate.INCONCLUSIVE, nulls=("1",)).gate is Gate.PASS
        assert judgement(Gate.PASS, Gate.FAIL, nulls=("1",)).gate is Gate.FAIL
        assert judgement(Gate.INCONCLUSIVE, nulls=("0",)).gate is Gate.INCONCLUSIVE


class TestReplicas:
    def test_control_replicas_are_averaged_in_the_pair(self):
        table = study(n=4, replicas=3)
        logs = np.log(table.loss.to_numpy())
        tail = table.step > 1800
        mean = table[tail].assign(log=logs[tail]).groupby(["arm", "seed"]).log.mean()
        told = of(table).verdicts[0]
        assert told.gap == pytest.approx(np.mean(mean["fp8"] - mean["bf16"]), abs=1e-12)
        assert told.noise_floor["control_run"]["df"] == 8

    def test_pooled_variance_knows_how_many_runs_a_gap_averages(self):
        """With r control runs a gap has the variance of a run times 1 + 1/r, not times two."""
        table = study(n=3, replicas=4, seed=3)
        told = of(table, null_matched=True).verdicts[0]
        ends = table[table.step > 1800].assign(log=lambda rows: np.log(rows.loss))
        ends = ends.groupby(["arm", "seed", "replica"]).log.mean()
        control = ends["bf16"].unstack()  # noqa: PD010  # a plain reshape of an index
        gaps = ends["fp8"].droplevel("replica") - control.mean(axis=1)
        null_ss = control.sub(control.mean(axis=1), axis=0).pow(2).to_numpy().sum() * 1.25
        variance = (2 * gaps.var(ddof=1) + null_ss) / (2 + 9)
        half = 1.795884819 * np.sqrt(variance / 3)  # t quantile at 11 df
        assert told.interval[1] - told.gap == pytest.approx(half, rel=1e-8)

    def test_test_replicas_are_averaged_too(self):
        table = study(n=4)
        again = table[table.arm == "fp8"].assign(replica=1, loss=lambda rows: rows.loss * 1.002)
        plain, doubled = of(table).verdicts[0], of(pd.concat([table, again])).verdicts[0]
        assert doubled.gap == pytest.approx(plain.gap + np.log(1.002) / 2, abs=1e-12)
        assert doubled.n_seeds == 4
        assert doubled.noise_floor["test_run"]["df"] == 4
        assert doubled.noise_floor["test_run"]["sd"] == pytest.approx(np.log(1.002) / 2**0.5, rel=1e-9)

    def test_null_runs_join_the_control_only_when_declared(self):
        table = study(n=4, replicas=2)
        table.loc[(table.arm == "bf16") & (table.replica == 1), "arm"] = "bf16_null"
        apart, together = of(table), of(table, null_matched=True)
        assert [item.recipe for item in apart.verdicts] == ["fp8", "bf16_null"]
        alone = of(table[table.arm != "bf16_null"])
        assert apart.verdicts[0].gap == alone.verdicts[0].gap
        assert together.verdicts[0].gap == of(table.replace("bf16_null", "bf16")).verdicts[0].gap
        assert together.verdicts[0].gap != alone.verdicts[0].gap
        assert apart.verdicts[1].gap == together.verdicts[1].gap

    def test_nulls_too_quiet_for_the_gap_are_vetoed(self):
        table = study(n=5, replicas=2)
        first = table[(table.arm == "bf16") & (table.replica == 0)].loss.to_numpy()
        quiet = (table.arm == "bf16") & (table.replica == 1)
        jitter = np.repeat(np.random.default_rng(0).standard_normal(5), 40)
        table.loc[quiet, "loss"] = first * (1 + 1e-6 * jitter)
        told = of(table, null_matched=True).verdicts[0]
        assert told.basis == "paired t over 5 seeds, 4 df"
        assert any("too quiet" in text for text in told.warnings)


class TestNullArm:
    def test_an_exact_repetition_passes(self):
        table = study(n=3, replicas=1)
        copy = table[table.arm == "bf16"].assign(arm="bf16_null")
        told = of(pd.concat([table, copy])).verdicts[1]
        assert (told.outcome, told.gate) == (Outcome.IDENTICAL, Gate.PASS)
        assert any("no run-to-run noise" in reason for reason in told.reasons)

    def test_only_a_null_arm_is_a_study_too(self):
        table = study(n=3)
        table.loc[table.arm == "fp8", "arm"] = "bf16_null"
        told = of(table)
        assert [item.recipe for item in told.verdicts] == ["bf16_null"]

    def test_pairs_of_other_seeds_count_as_nulls(self):
        logs = simulate.runs(np.random.default_rng(1), 1, 8, 2)[0]
        drawn = simulate.studies(np.random.default_rng(0), 1, 3)
        table = simulate.table(np.exp(drawn.control[0]), np.exp(drawn.test[0]), STEPS, null=np.exp(logs))
        told = of(table, null_matched=True).verdicts[0]
        assert told.n_null_pairs == 8
        assert "pooled with 8 df" in told.basis
        assert told.trajectory_p is not None


class TestSequential:
    def test_before_the_first_look_there_is_no_verdict(self):
        told = of(study(n=3, size=0.05), looks=(5, 8)).verdicts[0]
        assert (told.outcome, told.need_seeds) == (Outcome.INCONCLUSIVE, 5)

    def test_between_looks_the_further_seeds_wait(self):
        told = of(study(n=7), looks=(3, 5, 8)).verdicts[0]
        assert told.n_seeds == 5
        assert told.alpha == pytest.approx(0.05 / 3)
        assert any("2 further seeds wait" in reason for reason in told.reasons)

    def test_a_look_costs_width(self):
        plain, looked = of(study(n=5)).verdicts[0], of(study(n=5), looks=(3, 5)).verdicts[0]
        assert looked.interval[0] < plain.interval[0] < plain.interval[1] < looked.interval[1]

    def test_anytime_intervals_are_wider_still(self):
        plain, anytime = of(study(n=8)).verdicts[0], of(study(n=8), anytime=True).verdicts[0]
        assert anytime.interval[1] - anytime.interval[0] > plain.interval[1] - plain.interval[0]
        assert "anytime" in anytime.basis


class TestManyRecipes:
    def test_contrasts_pair_recipes_by_seed(self):
        table = study(n=6, arms=("a", "b"))
        contrast = of(table).contrasts[0]
        tail = table[table.step > 1800].assign(log=lambda rows: np.log(rows.loss))
        ends = tail.groupby(["arm", "seed"]).log.mean()
        difference = ends["a"] - ends["b"]
        assert (contrast.a, contrast.b, contrast.n_seeds) == ("a", "b", 6)
        assert contrast.gap == pytest.approx(difference.mean(), abs=1e-12)
        assert contrast.p == pytest.approx(2 * min(_t_tail(difference), _t_tail(-difference)), rel=1e-9)

    def test_holm_is_stated_and_decides_only_when_declared(self):
        table = study(n=4, size=0.0045, arms=("a", "b", "c"), seed=3)
        stated, corrected = of(table), of(table, correction="holm")
        raw = [item.p_values["worse_than_margin"] for item in stated.evidence]
        adjusted = [item.p_values["holm_recipes_worse_than_margin"] for item in stated.evidence]
        assert adjusted == pytest.approx(multipletests(raw, method="holm")[1])
        assert any(plain < 0.05 <= strict for plain, strict in zip(raw, adjusted, strict=True))
        worse = [[item.outcome is Outcome.WORSE for item in told.verdicts] for told in (stated, corrected)]
        assert worse == [[p < 0.05 for p in raw], [p < 0.05 for p in adjusted]]
        assert all("Holm-adjusted over 3" in " ".join(item.reasons) for item in stated.verdicts)
        assert all("per comparison" in item.reasons[-1] for item in stated.verdicts)

    def test_a_trend_over_the_number_of_layers(self):
        base = study(n=5)
        control = base[base.arm == "bf16"]
        arms = [
            control.assign(arm=f"rowwise-n{count}", loss=control.loss * np.exp(0.004 - 0.001 * count))
            for count in (0, 2, 4)
        ]
        jitter = [
            arm.assign(loss=arm.loss * np.exp(1e-5 * np.random.default_rng(at).standard_normal(len(arm))))
            for at, arm in enumerate(arms)
        ]
        trend = next(item for item in of(pd.concat([control, *jitter])).contrasts if item.a == "trend over n")
        assert trend.b == "rowwise-n0, rowwise-n2, rowwise-n4"
        assert trend.gap == pytest.approx(-0.001, abs=1e-5)
        assert trend.interval[0] < -0.001 < trend.interval[1]

    def test_a_trend_over_the_size_of_the_model(self):
        """The gap falls by 0.1 % per factor e in size; the groups have seeds in common but no data."""
        runs = []
        for group, size in (("0.3m", 3e5), ("1m", 1e6), ("10m", 1e7)):
            drawn = simulate.studies(
                np.random.default_rng(int(size)), 1, 5, "const", -0.001 * np.log(size / 1e7)
            )
            runs += [replace(run, group=group) for run in simulate.curve_set(drawn, 0).runs]
        told = judge(CurveSet(tuple(runs)), Criteria())
        trend = next(item for item in told.contrasts if item.a == "trend over ln(size)")
        assert trend.b == "0.3m/fp8, 1m/fp8, 10m/fp8"
        assert trend.interval[0] < -0.001 < trend.interval[1]
        assert trend.n_seeds == 5
        assert [item.recipe for item in told.verdicts] == ["0.3m/fp8", "1m/fp8", "10m/fp8"]

    def test_hundreds_of_recipes_are_judged_without_thousands_of_contrasts(self):
        told = of(study(n=2, arms=tuple(f"arm{number}" for number in range(60))))
        assert len(told.verdicts) == 60
        assert told.contrasts == ()
        assert all("more than 50 recipes: no pairwise contrasts" in item.warnings for item in told.verdicts)

    def test_a_declared_axis(self):
        table = study(n=5, arms=("x", "y", "z"))
        told = of(table, trend=(("x", 1.0), ("y", 2.0), ("z", 3.0)))
        assert [item.a for item in told.contrasts].count("trend over declared axis") == 1


def _t_tail(values):
    import scipy.stats

    return scipy.stats.ttest_1samp(values, 0.0, alternative="greater").pvalue


class TestEndpoints:
    def test_final_is_the_last_evaluation_and_is_labelled(self):
        table = study(n=3)
        told = of(table, endpoint="final").verdicts[0]
        last = table[table.step == 2000].set_index(["arm", "seed"]).loss
        assert told.gap == pytest.approx(np.mean(np.log(last["fp8"] / last["bf16"])), abs=1e-12)
        assert any("last evaluation alone" in text for text in told.warnings)

    def test_train_is_judged_only_when_declared(self):
        table = study(n=3).assign(split="train")
        with pytest.raises(BadInputError, match="the curves hold train"):
            of(table)
        told = of(table, endpoint="train").verdicts[0]
        assert told.endpoint == "train"
        assert any("training loss" in text for text in told.warnings)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_few_evaluations_give_a_wider_answer_not_a_refusal(self, count):
        table = study(n=5)
        told = of(table[table.step > 2000 - 50 * count], margin=0.01).verdicts[0]
        assert told.outcome is Outcome.EQUIVALENT
        assert any("common evaluations" in text for text in told.warnings)

    def test_the_arms_own_forward_is_a_second_number(self):
        held = study(n=5).assign(eval_precision="bf16")
        arm = held[held.arm == "fp8"].assign(eval_precision="arm", loss=lambda rows: rows.loss * 1.004)
        table = pd.concat([held, arm])
        told = of(table).verdicts[0]
        assert told.eval_precision == "bf16"
        assert any("(arm forward)" in text for text in told.warnings)
        own = of(table, eval_precision="arm").verdicts[0]
        assert own.gap == pytest.approx(told.gap + np.log(1.004), abs=1e-12)

    def test_the_price_in_tokens_is_weighed_against_the_speed(self):
        cheap = of(study(n=8), speedup=1.4).verdicts[0].token_cost
        dear = of(study(n=8, size=0.02), speedup=1.05).verdicts[0].token_cost
        assert (cheap["worth_it"], dear["worth_it"]) == ("yes", "no")
        assert cheap["net_gain_interval"][0] < cheap["net_gain"] < cheap["net_gain_interval"][1]

    def test_nobody_buys_bf16_with_bf16(self):
        table = pd.concat([study(n=5), study(n=5, seed=1, arms=("bf16_null",)).query("arm == 'bf16_null'")])
        judgement = of(table, speedup=1.25)
        priced = {item.recipe: item.token_cost is not None for item in judgement.verdicts}
        assert priced == {"fp8": True, "bf16_null": False}
        null = next(item for item in judgement.verdicts if item.recipe == "bf16_null")
        assert not any("worth it" in reason for reason in null.reasons)

    def test_one_pair_is_promised_nothing_but_a_measure_of_its_noise(self):
        reasons = of(study(n=1)).verdicts[0].reasons
        assert reasons[-1].startswith("next: 4 seeds more (5 in all) measure the noise first")
        assert not any("should settle" in reason for reason in reasons)
