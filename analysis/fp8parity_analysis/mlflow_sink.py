"""The writer into MLflow: experiments, runs, batches of metrics, artifacts. Imports mlflow when opened."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import mlflow_sqlite
from fp8parity_analysis.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fp8parity_analysis.mlflow_content import Points

MAX_BATCH = 1000
"""Metrics of one request: MLflow's own limit."""
_MAX_TAGS = 100
_SQLITE = "sqlite:///"

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Environment that keeps MLflow from calling home and from talking; what the user has set wins."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""How long a request may take (s) and how often it is repeated; MLflow's own are 120 s and 7."""


class MirrorError(BadInputError):
    """MLflow cannot be reached or refuses to be written; the message names the address and the cause."""


def require_mlflow() -> None:
    """Raise `BadInputError` with the remedy when mlflow is not installed; imports nothing."""
    from importlib.util import find_spec

    if find_spec("mlflow") is None:
        raise BadInputError("mlflow is not installed; install fp8parity with the extra mlflow")


def check_uri(uri: str) -> str:
    """Return `uri`, or raise `BadInputError` when it is a folder or no address MLflow can write metrics to."""
    scheme = uri.partition(":")[0].partition("+")[0]
    if "://" not in uri or scheme not in ("sqlite", "http", "https", "postgresql", "mysql", "mssql"):
        raise BadInputError(
            f"--uri: {uri!r} is no tracking address; write http://HOST:PORT or sqlite:///PATH/mlflow.db"
        )
    return uri


@contextmanager
def _in_words(uri: str) -> Iterator[None]:
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (MlflowException, SQLAlchemyError, requests.RequestException, OSError) as error:
        raise MirrorError(f"mlflow at {uri}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the innermost cause on one line: MLflow wraps a refused connection four deep."""
    words = " ".join(str(error).split())
    for known in ("Connection refused", "timed out", "readonly database", "Name or service not known"):
        if known in words:
            return known
    return words[:300]


@dataclass
class Sink:
    """One experiment of one tracking store; open with `Sink.open`.

    `engine` writes points straight into a sqlite file; None for other stores, and where `slow_because` says why not.
    """

    uri: str
    client: Any
    experiment_id: str
    tags: dict[str, str]
    engine: Any = None
    slow_because: str = ""
    points_written: int = 0
    runs_made: int = 0
    runs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def open(uri: str, name: str, identity: str) -> Sink:
        """Open or make the experiment of a study; `identity` tells two studies of one name apart.

        Raises `MirrorError`.
        """
        require_mlflow()
        for key, value in {**QUIET, **PATIENCE}.items():
            os.environ.setdefault(key, value)
        from mlflow.tracking import MlflowClient

        with _in_words(uri):
            client = MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, uri, name, identity)
            engine, why = _table(uri)
            sink = Sink(uri, client, experiment.experiment_id, dict(experiment.tags), engine, why)
            sink._find_runs()
        return sink

    def _find_runs(self) -> None:
        token: str | None = None
        while token != "":
            page = self.client.search_runs([self.experiment_id], max_results=500, page_token=token)
            for run in page:
                if key := run.data.tags.get("fp8.run_id"):
                    self.runs.setdefault(key, run)
            token = page.token or ""

    def tags_of(self, key: str) -> dict[str, str]:
        """Return the tags of a mirrored run, empty when there is none."""
        run = self.runs.get(key)
        return dict(run.data.tags) if run else {}

    def make_run(self, key: str, name: str, start_ms: int, params: Mapping[str, str]) -> None:
        """Make a run with its parameters, replacing one of the same key."""
        from mlflow.entities import Param

        with _in_words(self.uri):
            if key in self.runs:
                self.client.delete_run(self.runs.pop(key).info.run_id)
            run = self.client.create_run(
                self.experiment_id, start_time=start_ms, tags={"fp8.run_id": key}, run_name=name
            )
            items = [Param(k, v) for k, v in params.items()]
            for start in range(0, len(items), _MAX_TAGS):
                self.client.log_batch(run.info.run_id, params=items[start : start + _MAX_TAGS])
        self.runs[key] = run
        self.runs_made += 1

    def write_points(self, key: str, series: Mapping[str, Points]) -> None:
        """Write the points of a run; those that are there already are left alone.

        Into a sqlite file only the newest of each metric goes through MLflow's API, which checks the run and the names
        and keeps the latest values; the rest goes straight into the table of points.
        """
        if not series:
            return
        run_id = self.runs[key].info.run_id
        with _in_words(self.uri):
            if self.engine is None:
                self._log(run_id, series)
            else:
                self._log(run_id, {name: points.newest() for name, points in series.items()})
                mlflow_sqlite.insert(self.engine, run_id, series)
        self.points_written += sum(len(points.steps) for points in series.values())

    def _log(self, run_id: str, series: Mapping[str, Points]) -> None:
        """Send points in batches of `MAX_BATCH`; one metric after the other, which a database takes fastest."""
        from mlflow.entities import Metric

        rows = [
            Metric(name, value, time, step)
            for name, points in series.items()
            for value, time, step in zip(
                points.values.tolist(), points.times.tolist(), points.steps.tolist(), strict=True
            )
        ]
        for start in range(0, len(rows), MAX_BATCH):
            # Newest first: MLflow rewrites a metric's latest value at each point that is newer than it.
            batch = rows[start : start + MAX_BATCH][::-1]
            self.client.log_batch(run_id, metrics=batch, synchronous=True)

    def set_tags(self, key: str, tags: Mapping[str, str]) -> None:
        """Set the tags of a run that differ from what it has."""
        from mlflow.entities import RunTag

        run = self.runs[key]
        changed = [RunTag(k, v) for k, v in tags.items() if run.data.tags.get(k) != v]
        with _in_words(self.uri):
            for start in range(0, len(changed), _MAX_TAGS):
                self.client.log_batch(run.info.run_id, tags=changed[start : start + _MAX_TAGS])
        run.data.tags.update({tag.key: tag.value for tag in changed})

    def set_experiment_tags(self, tags: Mapping[str, str]) -> None:
        """Set the tags of the experiment that differ from what it has."""
        with _in_words(self.uri):
            for name, value in tags.items():
                if self.tags.get(name) != value:
                    self.client.set_experiment_tag(self.experiment_id, name, value)
                    self.tags[name] = value

    def end(self, key: str, status: str, end_ms: int | None) -> None:
        """Mark a run as ended once."""
        run = self.runs[key]
        if run.info.status != status:
            with _in_words(self.uri):
                self.client.set_terminated(run.info.run_id, status, end_ms)

    def dataset(self, key: str, name: str, digest: str) -> None:
        """Log the training data of a run by name and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        told = Dataset(name=name, digest=digest, source_type="local", source=name)
        with _in_words(self.uri):
            tag = InputTag(key="mlflow.data.context", value="training")
            self.client.log_inputs(self.runs[key].info.run_id, [DatasetInput(told, [tag])])

    def artifact(self, key: str, path: Path, folder: str | None = None) -> None:
        """Copy a file to a run's artifacts."""
        with _in_words(self.uri):
            self.client.log_artifact(self.runs[key].info.run_id, str(path), folder)


def _table(uri: str) -> tuple[Any, str]:
    """Return the engine for writing points straight into a sqlite file, or None and why that is not done."""
    if not mlflow_sqlite.is_sqlite(uri):
        return None, ""
    from mlflow.version import VERSION

    engine = mlflow_sqlite.connect(uri)
    why = mlflow_sqlite.difference(engine, VERSION)
    if why:
        return None, f"mlflow at {uri}: {why}; its API is used, which takes about six times as long"
    return engine, ""


def artifacts_beside(uri: str) -> Path | None:
    """Return the artifact folder that goes with a sqlite file, None for any other store."""
    return (
        Path(uri.removeprefix(_SQLITE)).resolve().parent / "mlartifacts" if uri.startswith(_SQLITE) else None
    )


def _experiment(client: Any, uri: str, name: str, identity: str) -> Any:
    """Return the study's experiment; one of another study with the same name is left alone."""
    for wanted in (name, f"{name} {identity}"):
        found = client.get_experiment_by_name(wanted)
        if found is None:
            folder = artifacts_beside(uri)
            place = f"{folder.as_uri()}/{wanted}".replace(" ", "_") if folder else None
            made = client.create_experiment(
                wanted, artifact_location=place, tags={"fp8.study_identity": identity}
            )
            return client.get_experiment(made)
        if found.lifecycle_stage == "active" and found.tags.get("fp8.study_identity") == identity:
            return found
    raise MirrorError(
        f"mlflow at {uri}: experiment {name!r} belongs to another study or was deleted; restore or rename it"
    )
