"""One-way, repeatable copy of a study directory into MLflow. The disk stays the truth; a second copy adds nothing.

A run carries the tag `fp8.mirrored`: per metric the last step that was copied and a digest of everything up to it.
A mirror therefore continues where the last one ended, and a run that was trained again from an earlier step (a
resume on a GPU does not repeat itself) is copied afresh; the old copy goes to MLflow's trash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import schema, store
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.mlflow_content import RunContent, content_of, controls
from fp8parity_analysis.mlflow_keys import allowed_key
from fp8parity_analysis.mlflow_sink import Sink, check_uri, require_mlflow
from fp8parity_analysis.mlflow_view import VIEW_TAG, view_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fp8parity_analysis.store import RunRecord

STATE_TAG = "fp8.mirrored"
SUMMARY_RUN = "study"
SUMMARY_FILES = (
    schema.RECIPE_COPY,
    schema.REPORT_FILE,
    schema.VERDICTS_FILE,
    "summary.md",
    schema.STUDY_FILE,
    schema.ENVIRONMENT_FILE,
)
_LOCK = ".mlflow.lock"
_NOTE = 7900


@dataclass(frozen=True)
class MirrorResult:
    """Where a study was copied to, and how much of it was new; `slow_because` says why points took the long way."""

    uri: str
    experiment_id: str
    runs: int
    runs_made: int
    points_written: int
    slow_because: str = ""


def default_uri(study_dir: Path) -> str:
    """Return the address of the sqlite file in the study directory."""
    return f"sqlite:///{(study_dir / 'mlflow.db').resolve()}"


def mirror(study_dir: Path, uri: str | None = None) -> MirrorResult:
    """Copy what is new in a study directory, finished or not, into MLflow.

    Raises `BadInputError` when mlflow is missing or the directory is no study, `MirrorError` when the store cannot be
    written. What was written until then stays and is continued by the next call.
    """
    require_mlflow()
    study = read_json(study_dir / schema.STUDY_FILE)
    target = check_uri(uri or default_uri(study_dir))
    with _alone(study_dir):
        sink = Sink.open(target, str(study["name"]), str(study["created_at"]).replace(":", ""))
        sink.set_experiment_tags(
            {VIEW_TAG: view_state(), "mlflow.experimentKind": "custom_model_development"}
        )
        contents = read_contents(study_dir, study)
        for content in contents:
            mirror_run(sink, content)
        _mirror_summary(sink, study_dir, study)
    return MirrorResult(
        target, sink.experiment_id, len(contents), sink.runs_made, sink.points_written, sink.slow_because
    )


@contextmanager
def _alone(study_dir: Path) -> Iterator[None]:
    """Hold the study for one mirror, so that two never make the same run; a read-only study needs no lock."""
    try:
        handle = (study_dir / _LOCK).open("w")
    except OSError:
        yield
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadInputError(f"{study_dir}: another mirror is at work; wait for it") from error
        yield


def read_contents(study_dir: Path, study: Mapping[str, Any]) -> list[RunContent]:
    """Return what MLflow gets of every run that has begun, oldest first."""
    records = store.read_runs(study_dir)
    groups = {record.spec["group"] for record in records}
    facts = {**study, "many_groups": len(groups) > 1}
    verdicts = {item["recipe"]: item for item in _verdicts(study_dir)}
    control = controls(records)
    begun = [record for record in records if record.manifest or len(record.curve) or len(record.evals)]
    return [content_of(record, control.get(_pair(record)), facts, verdicts) for record in begun]


def _pair(record: RunRecord) -> tuple[str, int]:
    return str(record.spec["group"]), int(record.spec["seed"])


def _verdicts(study_dir: Path) -> list[dict[str, Any]]:
    path = study_dir / schema.VERDICTS_FILE
    return list(read_json(path)["verdicts"]) if path.exists() else []


def _state(sink: Sink, key: str) -> dict[str, Any]:
    try:
        state = json.loads(sink.tags_of(key).get(STATE_TAG, "{}"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _stale(content: RunContent, state: Mapping[str, Any]) -> bool:
    """Tell whether what was copied is no longer what the disk holds."""
    if state.get("params", content.params_digest) != content.params_digest:
        return True
    return any(
        name not in content.series or content.series[name].digest(int(step)) != digest
        for name, (step, digest) in state.get("metrics", {}).items()
    )


def _last(done: Mapping[str, Any], name: str) -> int:
    return int(done.get(name, [-1])[0])


def mirror_run(sink: Sink, content: RunContent) -> None:
    """Copy what is new of one run: points first, then the tag that says so, then how it ended."""
    key, state = content.run_id, _state(sink, content.run_id)
    if key not in sink.runs or _stale(content, state):
        sink.make_run(key, content.name, content.start_ms, content.params)
        state = {}
    done: dict[str, Any] = state.get("metrics", {})
    new = {name: points.after(_last(done, name)) for name, points in content.series.items()}
    sink.write_points(key, {name: points for name, points in new.items() if len(points.steps)})
    if content.dataset and state.get("dataset") != list(content.dataset):
        sink.dataset(key, *content.dataset)
    files = {Path(path).name: _sha(Path(path)) for path in content.files}
    for path, folder in content.files.items():
        if state.get("files", {}).get(Path(path).name) != files[Path(path).name]:
            sink.artifact(key, Path(path), folder)
    ends = {name: int(points.steps[-1]) for name, points in content.series.items() if len(points.steps)}
    told = {
        "params": content.params_digest,
        "metrics": {name: [end, content.series[name].digest(end)] for name, end in ends.items()},
        "dataset": list(content.dataset) if content.dataset else None,
        "files": files,
    }
    sink.set_tags(key, {**content.tags, STATE_TAG: json.dumps(told, separators=(",", ":"))})
    if content.end_ms:
        sink.end(key, content.status, content.end_ms)


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _mirror_summary(sink: Sink, study_dir: Path, study: Mapping[str, Any]) -> None:
    """Keep the files of the whole study on one run of their own, uploaded again only when they changed."""
    key = f"study:{study['created_at']}"
    if key not in sink.runs:
        from fp8parity_analysis.mlflow_content import milliseconds

        start = milliseconds(study.get("created_at")) or 0
        sink.make_run(key, SUMMARY_RUN, start, {"recipe": SUMMARY_RUN})
    state: dict[str, str] = _state(sink, key)
    present = {name: study_dir / name for name in SUMMARY_FILES if (study_dir / name).exists()}
    now = {name: _sha(path) for name, path in present.items()}
    for name, path in present.items():
        if state.get(name) != now[name]:
            sink.artifact(key, path)
    verdicts = {
        allowed_key(f"fp8.verdict.{item['recipe']}"): str(item["outcome"]) for item in _verdicts(study_dir)
    }
    note = (study_dir / "summary.md").read_text(encoding="utf-8")[:_NOTE] if "summary.md" in now else ""
    sink.set_tags(
        key,
        {
            "fp8.study": str(study["name"]),
            **verdicts,
            **({"mlflow.note.content": note} if note else {}),
            STATE_TAG: json.dumps(now, separators=(",", ":")),
        },
    )
    sink.end(key, "FINISHED", None)
