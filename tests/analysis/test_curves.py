import copy
import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import simulate

from fp8parity_analysis import schema, store
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Outcome, Role, Status
from fp8parity_analysis.verdict import Criteria, judge

STEPS = np.arange(100, 2001, 100)
ENVIRONMENT = {"torch": "2.13.0", "gpu": "H200", "numerics": 1}
SPEC = {
    "model": {"layers": 4, "width": 128},
    "data": {"name": "text"},
    "optim": {"lr": 0.001},
    "train": {"steps": 2000, "compile": "off"},
    "probe": {"every": 0},
}


def write_run(
    directory,
    arm,
    role,
    seed,
    logs,
    *,
    replica=0,
    group="0.3m",
    spec=None,
    manifest=None,
    finish=True,
    **changes,
):
    """One run directory in the stored format; `changes` alter rows: digests, train losses, evaluation rows."""
    run_id = f"{group}-{arm}-s{seed}-r{replica}"
    path = directory / "runs" / run_id
    writer = store.RunWriter(path)
    full = {
        **copy.deepcopy(SPEC),
        "precision": {"recipe": arm},
        "seed": seed,
        "replica": replica,
        "replica_kind": None,
    }
    full.update(spec or {})
    document = dict.fromkeys(schema.SPEC_KEYS) | {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": run_id,
        "study": "s",
        "group": group,
        "arm": arm,
        "role": role,
        "seed": seed,
        "replica": replica,
        "replica_kind": None,
        "spec": full,
    }
    store.write_json(path / schema.SPEC_FILE, document)
    digests = changes.get("digests", {})
    losses = np.exp(logs)
    train = changes.get("train", losses)
    writer.append_curve(
        {
            "step": int(step),
            "tokens": int(step) * 1000,
            "train_loss": float(loss),
            "grad_norm": 1.0,
            "lr": 0.001,
            "step_time": 0.1,
            "batch_digest": digests.get(int(step), f"d{seed}-{step}"),
        }
        for step, loss in zip(STEPS, train, strict=True)
    )
    writer.append_evals(
        {"step": int(step), "split": "held_out", "eval_precision": "bf16", "loss": float(loss)}
        for step, loss in zip(STEPS, losses, strict=True)
    )
    if not finish:
        writer.close()
        return
    full_manifest = dict.fromkeys(schema.MANIFEST_KEYS)
    full_manifest |= {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": run_id,
        "status": "finished",
        "steps_done": 2000,
        "tokens": 2_000_000,
        "data_sha256": "d0",
        "init_digest": f"i{seed}",
        "environment": ENVIRONMENT,
        "throughput_tokens_per_s": 1000.0 if role == "control" else 1300.0,
        "model": {"parameters": 300_000},
    }
    writer.finish(full_manifest | (manifest or {}))


def write_study(directory, n=4, *, spoil=None, arm="rowwise", group="0.3m"):
    """n pairs; `spoil` maps seed to changes of that seed's test run."""
    world = simulate.World(eval_every=100)
    drawn = simulate.studies(np.random.default_rng(0), 1, n, world=world)
    for seed in range(n):
        write_run(directory, "bf16", "control", seed, drawn.control[0, seed, 0], group=group)
        write_run(
            directory, arm, "test", seed, drawn.test[0, seed], group=group, **(spoil or {}).get(seed, {})
        )
    return drawn


def share_weights(directory, seeds, forked):
    """Let all runs of `seeds` have begun with the first one's weights, as forks if `forked`."""
    for path in sorted(directory.rglob(schema.MANIFEST_FILE)):
        spec_path = path.parent / schema.SPEC_FILE
        document = json.loads(spec_path.read_text())
        if forked:
            document["spec"]["fork_from"] = {"step": 500}
            store.write_json(spec_path, document)
        if document["seed"] in seeds:
            store.write_json(path, {**json.loads(path.read_text()), "init_digest": f"i{seeds[0]}"})


def judged(directory, **criteria):
    return judge(CurveSet.from_runs(store.read_runs(directory)), Criteria(**criteria))


def why(told):
    return " | ".join(told.reasons)


class TestFromRuns:
    def test_stored_runs_are_judged_like_the_table_of_the_same_curves(self, tmp_path):
        drawn = write_study(tmp_path)
        stored = judged(tmp_path).verdicts[0]
        table = simulate.table(np.exp(drawn.control[0]), np.exp(drawn.test[0]), STEPS)
        plain = judge(CurveSet.from_table(table), Criteria()).verdicts[0]
        assert stored.gap == pytest.approx(plain.gap, abs=1e-12)
        assert stored.interval == pytest.approx(plain.interval, abs=1e-12)
        assert stored.outcome is plain.outcome
        assert (stored.recipe, stored.eval_precision, stored.horizon_tokens) == ("rowwise", "bf16", 2_000_000)

    def test_speed_and_size_come_from_the_manifests(self, tmp_path):
        write_study(tmp_path)
        cost = judged(tmp_path).verdicts[0].token_cost
        assert cost["speedup"] == pytest.approx(1.3)
        assert cost["chinchilla"]["parameters"] == 300_000

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"spec": {"optim": {"lr": 0.002}}}, "optim.lr: 0.001 != 0.002"),
            ({"spec": {"compute": "bf16-true"}}, r"compute: \(absent\) != bf16-true"),
            ({"manifest": {"data_sha256": "d1"}}, "data_sha256: d0 != d1"),
            ({"manifest": {"init_digest": "other"}}, "init_digest: i2 != other"),
            (
                {"manifest": {"environment": {**ENVIRONMENT, "torch": "2.12.0"}}},
                "environment.torch: 2.13.0 != 2.12.0",
            ),
            (
                {"digests": {700: "x", 900: "y"}},
                "batch_digest at 2 of 20 steps, first step 700: d2-700 != x",
            ),
        ],
    )
    def test_runs_that_differ_in_more_than_precision_are_invalid(self, tmp_path, change, message):
        write_study(tmp_path, spoil={2: change})
        told = judged(tmp_path).verdicts[0]
        assert told.outcome is Outcome.INVALID
        assert re.search(message, why(told))
        assert "s2" in why(told)

    @pytest.mark.parametrize(
        ("seeds", "forked", "who"),
        [
            ((0, 1, 2, 3), False, "all seeds"),
            ((1, 3), False, "seeds 1, 3"),
            ((2,), False, None),
            ((0, 1, 2, 3), True, None),
        ],
    )
    def test_seeds_that_start_from_the_same_weights_are_told(self, tmp_path, seeds, forked, who):
        """As where a model's builder sets a seed of its own, or weights are loaded; a fork says it in its own words."""
        write_study(tmp_path)
        before = judged(tmp_path).verdicts[0]
        share_weights(tmp_path, seeds, forked)
        told = judged(tmp_path).verdicts[0]
        assert told.outcome is before.outcome
        said = [text for text in told.warnings if "start from the same initial weights" in text]
        assert [text.split(" start")[0] for text in said] == ([] if who is None else [who])

    def test_precision_and_replica_may_differ(self, tmp_path):
        write_study(tmp_path, spoil={1: {"spec": {"precision": {"recipe": "x"}, "replica_kind": "rerun"}}})
        assert judged(tmp_path).verdicts[0].outcome is not Outcome.INVALID

    @pytest.mark.parametrize(
        ("split", "outcome"),
        [({"train_tokens": 9}, Outcome.EQUIVALENT), ({"train_tokens": 8}, Outcome.INVALID)],
    )
    def test_the_split_is_shared_by_pairs_that_recorded_it(self, tmp_path, split, outcome):
        write_study(tmp_path, spoil={1: {"manifest": {"data_split": split}}})
        assert judged(tmp_path).verdicts[0].outcome is Outcome.EQUIVALENT  # the control is of before
        for path in tmp_path.rglob(f"*bf16-s1*/{schema.MANIFEST_FILE}"):
            document = json.loads(path.read_text())
            path.write_text(json.dumps({**document, "data_split": {"train_tokens": 9}}))
        told = judged(tmp_path).verdicts[0]
        assert told.outcome is outcome
        assert outcome is Outcome.EQUIVALENT or "data_split.train_tokens: 9 != 8" in why(told)

    def test_a_parent_may_have_been_moved(self, tmp_path):
        fork = {"fork_from": {"run": "../a", "step": 5}, "parent": {"weights_sha256": "w"}}
        for name, moved, outcome in (
            ("run", {**fork, "fork_from": {"run": "/archive/a", "step": 5}}, Outcome.EQUIVALENT),
            ("step", {**fork, "fork_from": {"run": "../a", "step": 6}}, Outcome.INVALID),
            ("state", {**fork, "parent": {"weights_sha256": "x"}}, Outcome.INVALID),
        ):
            write_study(tmp_path / name, spoil={seed: {"spec": moved} for seed in range(4)})
            for path in (tmp_path / name).rglob(f"*bf16-s*/{schema.SPEC_FILE}"):
                document = json.loads(path.read_text())
                path.write_text(json.dumps({**document, "spec": {**document["spec"], **fork}}))
            assert judged(tmp_path / name).verdicts[0].outcome is outcome

    def test_an_unfinished_run_is_named(self, tmp_path):
        write_study(tmp_path, spoil={3: {"finish": False}})
        told = judged(tmp_path).verdicts[0]
        assert told.outcome is Outcome.INVALID
        first, *others = told.reasons
        assert first == "unfinished runs: 0.3m-rowwise-s3-r0; run the study again to finish them"
        assert not [reason for reason in others if "differ" in reason]

    def test_an_unfinished_control_differs_only_in_what_it_has_stated(self, tmp_path):
        drawn = write_study(tmp_path, n=3)
        shutil.rmtree(tmp_path / schema.RUNS_DIR / "0.3m-bf16-s1-r0")
        changed = {"optim": {"lr": 0.002}}
        write_run(tmp_path, "bf16", "control", 1, drawn.control[0, 1, 0], finish=False, spec=changed)
        said = why(judged(tmp_path).verdicts[0])
        assert "unfinished runs: 0.3m-bf16-s1-r0" in said
        assert "optim.lr: 0.001 != 0.002" in said
        assert "(absent)" not in said

    def test_nan_is_dated_by_the_training_stream(self, tmp_path):
        logs = simulate.studies(np.random.default_rng(1), 1, 1, world=simulate.World(eval_every=100)).test[
            0, 0
        ]
        train = np.exp(np.where(STEPS > 1450, np.nan, logs))
        evals = np.where(STEPS > 1600, np.nan, logs)
        write_study(tmp_path, n=3)
        write_run(tmp_path, "bf16", "control", 9, logs)
        write_run(tmp_path, "rowwise", "test", 9, evals, train=train, manifest={"status": "diverged"})
        told = judged(tmp_path).verdicts[0]
        assert (told.outcome, told.onset_step, told.diverged_seeds) == (Outcome.DIVERGED, 1500, (9,))

    def test_groups_are_paired_apart_and_named(self, tmp_path):
        write_study(tmp_path, n=3, group="0.3m")
        write_study(tmp_path, n=3, group="1m")
        told = judged(tmp_path)
        assert [item.recipe for item in told.verdicts] == ["0.3m/rowwise", "1m/rowwise"]
        assert told.contrasts == ()

    def test_a_null_run_that_differs_is_no_null(self, tmp_path):
        drawn = write_study(tmp_path, n=3)
        for seed in range(3):
            logs = drawn.control[0, seed, 0] + 0.001 * (seed + 1)
            write_run(tmp_path, "bf16_null", "null", seed, logs, replica=1)
        good = judged(tmp_path)
        assert good.verdicts[0].noise_floor["control_run"]["df"] == 3
        logs = drawn.control[0, 0, 0] + 0.001
        write_run(tmp_path, "bf16_null", "null", 0, logs, replica=2, spec={"optim": {"lr": 0.1}})
        bad = judged(tmp_path)
        assert bad.verdicts[0].noise_floor["control_run"]["df"] == 3
        assert bad.verdicts[1].outcome is Outcome.INVALID


def small(**columns):
    return pd.DataFrame(
        {"seed": [0, 0], "arm": ["bf16", "fp8"], "step": [1, 1], "loss": [1.0, 1.1], **columns}
    )


class TestFromTable:
    def test_roles_follow_the_names_of_the_arms(self):
        table = pd.concat([small(), small().assign(arm=["bf16_null", "other"])])
        roles = {run.arm: run.role for run in CurveSet.from_table(table).runs}
        assert roles == {"bf16": Role.CONTROL, "fp8": Role.TEST, "bf16_null": Role.NULL, "other": Role.TEST}

    def test_optional_columns_and_their_defaults(self):
        run = CurveSet.from_table(small()).runs[0]
        assert (run.replica, run.status) == (0, Status.FINISHED)
        assert list(run.evals) == [("held_out", "unstated")]
        told = CurveSet.from_table(
            small(
                replica=[1, 2],
                split=["held_out", "train"],
                eval_precision=["bf16", ""],
                status=["", "diverged"],
            )
        ).runs
        assert list(told[0].evals) == [("held_out", "bf16")]
        assert (told[1].replica, told[1].status) == (2, Status.DIVERGED)
        assert told[1].train is not None

    def test_rows_in_any_order_make_the_same_curves(self):
        table = simulate.table(np.ones((3, 1, 5)), np.full((3, 5), 1.1), np.arange(1, 6))
        table["loss"] += np.arange(len(table)) * 1e-3
        mixed = table.sample(frac=1.0, random_state=3)
        first, second = (
            {
                run.label: run.evals[("held_out", "unstated")].loss.tolist()
                for run in CurveSet.from_table(rows).runs
            }
            for rows in (table, mixed)
        )
        assert first == second

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (small().drop(columns="loss"), "lacks the columns loss"),
            (small(loss=["1.0", "abc"]), "loss: row 2 holds 'abc'"),
            (small(step=[1, 1.5]), "step: row 2 holds"),
            (small(seed=[0, None]), "seed: row 2 holds"),
            (small(arm=["bf16", None]), "arm: empty"),
            (small(arm=["base", "fp8"]), "no control run: the arms are base, fp8"),
            (small(eval_precision=["bf16", "fp4"]), "eval_precision: 'fp4'"),
            (small(status=["ok", ""]), "status: 'ok'"),
            (small().iloc[:0], "no rows"),
        ],
    )
    def test_bad_tables_are_refused_with_the_place(self, table, message):
        with pytest.raises(BadInputError, match=message):
            CurveSet.from_table(table)

    def test_only_controls_is_an_error(self):
        with pytest.raises(BadInputError, match="only control runs"):
            judge(CurveSet.from_table(small(arm=["bf16", "bf16"], replica=[0, 1])), Criteria())

    def test_repeated_rows_are_dropped_and_contradictions_are_invalid(self):
        table = simulate.table(
            np.exp(simulate.runs(np.random.default_rng(0), 1, 3, 1)[0]),
            np.exp(simulate.runs(np.random.default_rng(1), 1, 3, 1)[0][:, 0]),
            simulate.BASE.steps,
        )
        twice = judge(CurveSet.from_table(pd.concat([table, table.iloc[::-1]])), Criteria()).verdicts[0]
        assert twice == judge(CurveSet.from_table(table), Criteria()).verdicts[0]
        second = table[(table.arm == "fp8") & (table.seed == 1)].assign(loss=lambda rows: rows.loss * 1.01)
        told = judge(CurveSet.from_table(pd.concat([table, second])), Criteria()).verdicts[0]
        assert told.outcome is Outcome.INVALID
        assert "40 steps have two different losses, first step 50" in why(told)

    def test_a_loss_without_logarithm_is_invalid(self):
        told = judge(CurveSet.from_table(small(loss=[1.0, -0.5])), Criteria()).verdicts[0]
        assert "the loss at step 1 is -0.5" in why(told)

    def test_a_short_curve_that_says_diverged_is_a_divergence(self):
        table = simulate.table(np.ones((3, 1, 40)), np.full((3, 40), 1.001), simulate.BASE.steps)
        table["loss"] *= 1 + 1e-4 * np.random.default_rng(0).standard_normal(len(table))
        cut = table[~((table.arm == "fp8") & (table.seed == 1) & (table.step > 800))]
        told = judge(CurveSet.from_table(cut), Criteria()).verdicts[0]
        assert told.outcome is Outcome.INVALID
        said = cut.assign(status=np.where((cut.arm == "fp8") & (cut.seed == 1), "diverged", "finished"))
        told = judge(CurveSet.from_table(said), Criteria()).verdicts[0]
        assert (told.outcome, told.onset_step, told.diverged_seeds) == (Outcome.DIVERGED, 800, (1,))

    def test_seeds_without_a_partner_are_left_out_by_name(self):
        table = simulate.table(np.ones((3, 1, 40)), np.full((3, 40), 1.001), simulate.BASE.steps)
        table["loss"] *= 1 + 1e-4 * np.random.default_rng(0).standard_normal(len(table))
        lonely = table[~((table.arm == "bf16") & (table.seed == 2))]
        told = judge(CurveSet.from_table(lonely), Criteria()).verdicts[0]
        assert told.n_seeds == 2
        assert any("seeds 2 have no control run" in text for text in told.warnings)

    def test_one_seed_copied_to_another_is_invalid(self):
        table = simulate.table(np.ones((2, 1, 40)), np.full((2, 40), 1.001), simulate.BASE.steps)
        table["loss"] *= 1 + 1e-4 * np.random.default_rng(0).standard_normal(len(table))
        first = table[(table.arm == "fp8") & (table.seed == 0)].loss.to_numpy()
        table.loc[(table.arm == "fp8") & (table.seed == 1), "loss"] = first
        told = judge(CurveSet.from_table(table), Criteria()).verdicts[0]
        assert told.outcome is Outcome.INVALID
        assert "fp8 seed 0 and fp8 seed 1 have the same curve" in why(told)

    def test_one_seed_equal_to_its_control_is_invalid(self):
        table = simulate.table(np.ones((2, 1, 40)), np.full((2, 40), 1.001), simulate.BASE.steps)
        table["loss"] *= 1 + 1e-4 * np.random.default_rng(0).standard_normal(len(table))
        control = table[(table.arm == "bf16") & (table.seed == 1)].loss.to_numpy()
        table.loc[(table.arm == "fp8") & (table.seed == 1), "loss"] = control
        told = judge(CurveSet.from_table(table), Criteria()).verdicts[0]
        assert told.outcome is Outcome.INVALID
        assert "equal their control exactly" in why(told)

    def test_spikes_in_the_training_loss_are_compared(self):
        held = simulate.table(np.ones((6, 1, 40)), np.full((6, 40), 1.001), simulate.BASE.steps)
        steps = np.arange(1, 301)
        train = simulate.table(np.ones((6, 1, 300)), np.full((6, 300), 1.0), steps).assign(split="train")
        table = pd.concat([held.assign(split="held_out"), train], ignore_index=True)
        table["loss"] *= 1 + 1e-3 * np.random.default_rng(0).standard_normal(len(table))
        table.loc[(table.arm == "fp8") & (table.split == "train") & table.step.isin([150, 200]), "loss"] = 1.5
        judgement = judge(CurveSet.from_table(table), Criteria())
        assert judgement.evidence[0].p_values["holm_spikes"] == 3 * 2**-6
        assert "spikes in the training loss: 2 per run in this arm, 0 in the control" in why(
            judgement.verdicts[0]
        )
