"""Curves from an MLflow store that MLflow's own client wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulate

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.schema import Outcome, Status
from fp8parity_analysis.verdict import Criteria, Verdict, judge

STEPS = simulate.BASE.steps
DRAWN = simulate.studies(np.random.default_rng(0), 1, 3, "const", 0.01)
TABLE = simulate.table(np.exp(DRAWN.control[0]), np.exp(DRAWN.test[0]), STEPS)
PLAIN = judge(CurveSet.from_table(TABLE), Criteria()).verdicts[0]

Write = Callable[..., None]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'store.db'}"


@pytest.fixture(scope="module")
def write(uri: str) -> Write:
    """Write the curves as an experiment: `status` and `tags` by arm, one metric or the `metrics` of a run's losses."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)

    def put(
        name: str,
        *,
        status: Mapping[str, str] | None = None,
        tags: Mapping[str, Mapping[str, str]] | None = None,
        metric: str = "val_loss",
        last: Mapping[str, float] | None = None,
    ) -> None:
        experiment = client.create_experiment(name)
        for (arm, seed), rows in TABLE.groupby(["arm", "seed"]):
            told = {"arm": arm, "seed": str(seed), **(tags or {}).get(arm, {})}
            run = client.create_run(experiment, tags=told, run_name=f"run {arm} {seed}").info.run_id
            losses = rows["loss"].to_numpy(copy=True)
            losses[-1] = (last or {}).get(arm, losses[-1])
            points = zip(rows["step"], losses, strict=True)
            client.log_batch(
                run, [Metric(metric, float(loss), int(step), int(step)) for step, loss in points]
            )
            client.set_terminated(run, (status or {}).get(arm, "FINISHED"))

    return put


@pytest.fixture(scope="module")
def study(write: Write) -> str:
    write("study")
    return "mlflow:study"


def verdict(uri: str, experiment: str, **settings: Any) -> Verdict:
    return judge(
        read_curves([experiment], ImportSettings(tracking_uri=uri, **settings)), Criteria()
    ).verdicts[0]


@pytest.mark.parametrize("settings", [{}, {"preset": "nemo"}])
def test_an_experiment_is_judged_like_the_table_of_its_curves(
    uri: str, study: str, settings: dict[str, Any]
) -> None:
    told = verdict(uri, study, **settings)
    assert (told.outcome, told.n_seeds) == (PLAIN.outcome, PLAIN.n_seeds)
    assert told.gap == pytest.approx(PLAIN.gap, abs=1e-12)
    assert told.interval == pytest.approx(PLAIN.interval, abs=1e-12)


def test_a_missing_experiment(uri: str, study: str) -> None:
    with pytest.raises(BadInputError, match="experiment 'other' cannot be read"):
        read_curves(["mlflow:other"], ImportSettings(tracking_uri=uri))


def test_names_give_arm_and_seed_where_tags_do_not(uri: str, study: str) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("named")
    for name in ("bf16_seed0", "fp8_seed0"):
        run = client.create_run(experiment, run_name=name)
        client.log_metric(run.info.run_id, "eval/loss", 2.0 if name[0] == "b" else 2.1, step=1)
        client.set_terminated(run.info.run_id)
    told = verdict(uri, "mlflow:named")
    assert told.outcome is Outcome.INCONCLUSIVE
    assert told.gap == pytest.approx(np.log(2.1 / 2.0))


@pytest.mark.parametrize("status", ["RUNNING", "SCHEDULED"])
def test_runs_that_still_train_are_not_judged(uri: str, write: Write, status: str) -> None:
    write(status, status={"fp8": status})
    told = verdict(uri, f"mlflow:{status}")
    assert told.outcome is Outcome.INVALID
    assert told.reasons[0].startswith("unfinished runs: fp8 seed 0, fp8 seed 1, fp8 seed 2")


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_runs_that_broke_off_are_named(uri: str, write: Write, status: str) -> None:
    write(status, status={"fp8": status})
    curves = read_curves([f"mlflow:{status}"], ImportSettings(tracking_uri=uri))
    assert {run.arm: run.status for run in curves.runs} == {"bf16": Status.FINISHED, "fp8": Status.STOPPED}
    told = judge(curves, Criteria()).verdicts[0]
    assert told.outcome is PLAIN.outcome
    assert any(text.startswith("stopped before their planned end: fp8 seed 0") for text in told.warnings)


def test_a_failed_run_that_says_it_diverged_did(uri: str, write: Write) -> None:
    write("said", status={"fp8": "FAILED"}, tags={"fp8": {"fp8.status": "diverged"}})
    told = verdict(uri, "mlflow:said")
    assert (told.outcome, told.diverged_seeds) == (Outcome.DIVERGED, (0, 1, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_losses_that_are_not_finite_come_back_as_such(uri: str, write: Write, value: float) -> None:
    write(f"last {value}", last={"fp8": value})
    told = verdict(uri, f"mlflow:last {value}")
    assert (told.outcome, told.onset_step) == (Outcome.DIVERGED, int(STEPS[-1]))


def test_replicas_are_0_unless_tagged(uri: str, write: Write) -> None:
    write("tagged", tags={"fp8": {"replica": "1"}, "bf16": {"replica": ""}})
    curves = read_curves(["mlflow:tagged"], ImportSettings(tracking_uri=uri))
    assert {run.arm: run.replica for run in curves.runs} == {"bf16": 0, "fp8": 1}


def test_what_is_no_loss_and_what_is_no_number_is_told(uri: str, write: Write, tmp_path: Path) -> None:
    write("accuracy", metric="val_accuracy")
    with pytest.raises(
        BadInputError, match="mlflow:accuracy: holds no loss .* it logged val_accuracy; .*--tag"
    ):
        read_curves(["mlflow:accuracy"], ImportSettings(tracking_uri=uri))
    write("seedless", tags={"fp8": {"seed": "three"}})
    with pytest.raises(BadInputError, match=r"mlflow run 'run fp8 \d': seed: 'three' is not a whole number"):
        read_curves(["mlflow:seedless"], ImportSettings(tracking_uri=uri))


def test_our_own_mirror_needs_no_tag(uri: str, write: Write) -> None:
    write("mirror", metric="held_out/bf16")
    write("plain")
    assert verdict(uri, "mlflow:mirror").gap == verdict(uri, "mlflow:plain").gap
