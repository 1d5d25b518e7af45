"""Curves of an MLflow experiment, read through MLflow's client."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.run_logs import Read, RunLog, read_of
from fp8parity_analysis.schema import Status
from fp8parity_analysis.table import UNFINISHED, whole_number

if TYPE_CHECKING:
    from fp8parity_analysis.import_settings import ImportSettings
    from fp8parity_analysis.table import FloatArray, IntArray

_STATUS = {
    "RUNNING": UNFINISHED,
    "SCHEDULED": UNFINISHED,
    "FINISHED": Status.FINISHED.value,
    "FAILED": Status.STOPPED.value,
    "KILLED": Status.STOPPED.value,
}
"""MLflow's run status in our words; an ended run that diverged says so in a tag."""

_STATUS_TAGS = ("status", "fp8.status")
"""Tags that may say `diverged`: anybody's, and the one that `fp8parity mlflow` writes."""


def read_mlflow(experiment: str, settings: ImportSettings) -> Read:
    """Read an MLflow experiment by name or id: arm, seed and replica from tags, parameters or the run's name.

    `BadInputError` when mlflow is not installed or the experiment does not exist.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise BadInputError("reading MLflow needs the extra fp8parity[mlflow]") from error
    try:
        client = MlflowClient(tracking_uri=settings.tracking_uri)
        found = client.get_experiment_by_name(experiment) or client.get_experiment(experiment)
    except MlflowException as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise BadInputError(f"mlflow: experiment {experiment!r} cannot be read ({reason})") from error
    logs: list[RunLog] = []
    token: str | None = None
    while token != "":
        page = client.search_runs([found.experiment_id], max_results=500, page_token=token)
        logs += [_log(client, run, settings) for run in page]
        token = page.token or ""
    return read_of(logs, settings, f"mlflow:{experiment}")


def _log(client: Any, run: Any, settings: ImportSettings) -> RunLog:
    label = f"mlflow run {run.info.run_name!r}"
    names = list(run.data.metrics)
    metrics = {
        name: _points(client.get_metric_history(run.info.run_id, name))
        for name in names
        if settings.is_candidate(name)
    }
    return RunLog(label, _named(run, label, settings) if metrics else None, names, metrics)


def _named(run: Any, label: str, settings: ImportSettings) -> dict[str, Any] | None:
    said = {**run.data.params, **run.data.tags}
    named: dict[str, Any] = {"replica": 0, **(settings.run_named(run.info.run_name or "") or {})}
    named |= {key: said[key] for key in ("arm", "seed", "replica") if said.get(key, "").strip()}
    if not {"arm", "seed"} <= set(named):
        return None
    try:
        named |= {key: whole_number(named[key], key) for key in ("seed", "replica")}
    except BadInputError as error:
        raise BadInputError(f"{label}: {error}") from error
    return {**named, "status": _status(run)}


def _status(run: Any) -> str:
    status = _STATUS[run.info.status]
    diverged = any(run.data.tags.get(tag) == Status.DIVERGED for tag in _STATUS_TAGS)
    return Status.DIVERGED.value if diverged and status != UNFINISHED else status


def _points(history: Any) -> tuple[IntArray, FloatArray]:
    """Return steps and values; a resumed run logs a step again, and the later record counts.

    MLflow's database keeps an infinite value as the largest float.
    """
    latest = {point.step: point.value for point in sorted(history, key=lambda point: point.timestamp)}
    values = np.array(list(latest.values()), dtype=np.float64)
    values = np.where(np.abs(values) >= sys.float_info.max, np.copysign(np.inf, values), values)
    return np.array(list(latest), dtype=np.int64), values
