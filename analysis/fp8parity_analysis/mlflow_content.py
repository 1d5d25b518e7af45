"""What a stored run looks like in MLflow: names, parameters, tags and thinned series. Pure; imports no mlflow."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import schema
from fp8parity_analysis.mlflow_gap import TRAINING, gap_percent
from fp8parity_analysis.mlflow_keys import allowed_key
from fp8parity_analysis.schema import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from fp8parity_analysis.store import RunRecord

MAX_POINTS = 2000
"""Points of one metric of one run that are copied; longer curves keep every n-th step and the last."""

GAP_METRIC = "pair/gap_percent"
_CURVES = {
    TRAINING: "train_loss",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/tokens": "tokens",
    "train/step_time": "step_time",
}
_SECTIONS = ("model", "optim", "train", "fork_from", "parent")
_RUNS_OWN = ("seed", "replica", "replica_kind")
_MAX_PARAM = 500
_MAX_DIGEST = 36

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """One metric by step: `steps` int64 [K] ascending, `values` float64 [K] finite, `times` int64 [K] in ms.

    `left_out` counts the points that were not finite.
    """

    steps: IntArray
    values: FloatArray
    times: IntArray
    left_out: int = 0

    def after(self, step: int) -> Points:
        """Return the points beyond `step`."""
        start = int(np.searchsorted(self.steps, step, side="right"))
        return Points(self.steps[start:], self.values[start:], self.times[start:])

    def newest(self) -> Points:
        """Return the one point that MLflow takes for the latest: by step, then time, then value."""
        at = np.lexsort((self.values, self.times, self.steps))[-1:]
        return Points(self.steps[at], self.values[at], self.times[at])

    def digest(self, up_to: int) -> str:
        """Return a digest of the steps and values up to and including step `up_to`."""
        end = int(np.searchsorted(self.steps, up_to, side="right"))
        return hashlib.sha256(self.steps[:end].tobytes() + self.values[:end].tobytes()).hexdigest()[:12]


@dataclass(frozen=True)
class RunContent:
    """Everything of one run that MLflow gets; `status` and times (ms) as MLflow's run info takes them."""

    run_id: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    series: Mapping[str, Points]
    dataset: tuple[str, str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def params_digest(self) -> str:
        """Digest of the parameters, which MLflow never lets change."""
        return hashlib.sha256(json.dumps(dict(self.params), sort_keys=True).encode()).hexdigest()[:12]


def milliseconds(timestamp: str | None) -> int | None:
    """Return an ISO time as milliseconds since the epoch, None for None or text that is none."""
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000) if timestamp else None
    except ValueError:
        return None


def run_name(spec: Mapping[str, Any]) -> str:
    """Return `GROUP/sSEED/ARM`, with `-rN` for replica N."""
    replica = f"-r{spec['replica']}" if spec["replica"] else ""
    return f"{spec['group']}/s{spec['seed']}/{spec['arm']}{replica}"


def params_of(spec: Mapping[str, Any], *, many_groups: bool) -> dict[str, str]:
    """Return the parameters that people filter and group by; `recipe` is spelt as in the verdicts.

    Settings that a loop of one's own states outside of the usual sections are `settings.NAME`.
    """
    run = spec["spec"]
    recipe = f"{spec['group']}/{spec['arm']}" if many_groups else spec["arm"]
    own = {key: spec[key] for key in ("arm", "role", "seed", "replica", "replica_kind")}
    precision = run.get("precision", {})
    chosen = {"recipe": recipe, **own, "model": spec["group"], "precision": precision.get("recipe", "")}
    chosen |= {
        key: precision[key]
        for key in ("keep_first", "keep_last", "unit", "backend", "switch_at")
        if key in precision
    }
    for part in _SECTIONS:
        if isinstance(section := run.get(part), Mapping):
            chosen |= {f"{part}.{key}": value for key, value in section.items()}
    stated = {key: value for key, value in run.items() if key not in _RUNS_OWN}
    chosen |= {f"settings.{key}": value for key, value in stated.items() if not isinstance(value, Mapping)}
    return {allowed_key(key): str(value)[:_MAX_PARAM] for key, value in chosen.items()}


def _kept(rows: int, planned: int, *, ended: bool) -> npt.NDArray[np.bool_]:
    """Return which rows are copied: the choice never changes as a run grows, so a mirror can continue."""
    stride = max(1, -(-planned // (MAX_POINTS - 1)))
    keep: npt.NDArray[np.bool_] = np.arange(1, rows + 1) % stride == 0
    if ended and rows:
        keep[-1] = True
    return keep


def points_of(
    steps: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    clock: tuple[IntArray, IntArray],
    planned: int,
    ended: bool,
) -> Points:
    """Return a metric thinned to at most `MAX_POINTS`, without points that are not finite.

    `clock` gives milliseconds by step; `planned` is the number of rows that the finished run is to have.
    """
    step_array, value_array = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    keep = _kept(len(step_array), planned, ended=ended)
    step_array, value_array = step_array[keep], value_array[keep]
    finite = np.isfinite(value_array)
    kept = step_array[finite]
    times = clock[1][np.clip(np.searchsorted(clock[0], kept), 0, len(clock[1]) - 1)]
    return Points(kept, value_array[finite], times, int(len(finite) - finite.sum()))


def clock_of(curve: pd.DataFrame, start_ms: int) -> tuple[IntArray, IntArray]:
    """Return steps and milliseconds: the start plus the training time so far, so that a repeat gives the same."""
    if not len(curve):
        return np.array([0], dtype=np.int64), np.array([start_ms], dtype=np.int64)
    seconds = np.nan_to_num(curve["step_time"].to_numpy(dtype=np.float64), posinf=0.0, neginf=0.0)
    return curve["step"].to_numpy(dtype=np.int64), start_ms + (seconds.cumsum() * 1000).astype(np.int64)


def series_of(
    record: RunRecord, control: RunRecord | None, start_ms: int, criteria: Mapping[str, Any]
) -> tuple[dict[str, Points], str]:
    """Return every metric of a run and which of them its gap compares, empty without a gap.

    `control` is the BF16 run of its seed, None for a control itself; `criteria` are the study's.
    """
    ended = record.manifest is not None
    steps, evals = _planned(record)
    clock = clock_of(record.curve, start_ms)
    found = {
        name: points_of(
            record.curve["step"].to_numpy(),
            record.curve[column].to_numpy(dtype=np.float64),
            clock=clock,
            planned=steps,
            ended=ended,
        )
        for name, column in _CURVES.items()
    }
    for key, rows in record.evals.groupby(["split", "eval_precision"], sort=False):
        found[allowed_key(f"{key[0]}/{key[1]}")] = points_of(
            rows["step"].to_numpy(), rows["loss"].to_numpy(), clock=clock, planned=evals, ended=ended
        )
    compared = ""
    if control is not None:
        compared, at, gaps = gap_percent(record, control, criteria)
        rows_planned = steps if compared == TRAINING else evals
        found[GAP_METRIC] = points_of(at, gaps, clock=clock, planned=rows_planned, ended=ended)
    kept = {name: points for name, points in found.items() if len(points.steps) or points.left_out}
    return kept, compared if GAP_METRIC in kept else ""


def _planned(record: RunRecord) -> tuple[int, int]:
    """Return how many training rows and evaluations the finished run is to have.

    A loop of one's own need not say: then it is what fits the next doubling of the distance between points, so that a
    growing run is copied afresh only at a doubling.
    """
    train = record.spec["spec"].get("train")
    if isinstance(train, Mapping) and isinstance(train.get("steps"), int):
        steps = int(train["steps"])
        every = train.get("eval_every")
        return steps, max(1, steps // max(1, every if isinstance(every, int) else 1))
    return _doubled(len(record.curve)), _doubled(len(record.evals))


def _doubled(rows: int) -> int:
    most = MAX_POINTS - 1
    return most << math.ceil(math.log2(max(1.0, rows / most)))


def controls(records: Sequence[RunRecord]) -> dict[tuple[str, int], RunRecord]:
    """Return the first control run by (group, seed)."""
    found: dict[tuple[str, int], RunRecord] = {}
    for record in sorted(records, key=lambda item: int(item.spec["replica"])):
        if record.spec["role"] == Role.CONTROL:
            found.setdefault((str(record.spec["group"]), int(record.spec["seed"])), record)
    return found


_STATUS = {"finished": "FINISHED", "diverged": "FAILED", "stopped": "KILLED"}


def content_of(
    record: RunRecord, control: RunRecord | None, study: Mapping[str, Any], verdicts: Mapping[str, Any]
) -> RunContent:
    """Return what MLflow gets of one run; `verdicts` holds the stored verdicts by recipe."""
    spec, manifest = record.spec, record.manifest or {}
    start = milliseconds(study.get("created_at")) or 0
    params = params_of(spec, many_groups=bool(study.get("many_groups")))
    criteria = study.get("criteria") or {}
    series, compared = series_of(record, None if control is record else control, start, criteria)
    tags = {
        "fp8.run_id": record.run_id,
        "fp8.study": str(study.get("name", "")),
        "fp8.pair": f"{spec['group']}/s{spec['seed']}",
        "fp8.status": str(manifest.get("status", "unfinished")),
    }
    if spec["role"] != Role.CONTROL and (verdict := verdicts.get(params["recipe"])):
        tags |= {"fp8.verdict": str(verdict["outcome"]), "fp8.gate": str(verdict["gate"])}
    if compared:
        tags["fp8.gap_of"] = compared
    left_out = {name: points.left_out for name, points in series.items() if points.left_out}
    if left_out:
        tags["fp8.not_finite"] = ", ".join(f"{name}: {count} points" for name, count in left_out.items())
    for key in ("torch", "torchao", "device"):
        if key in (environment := manifest.get("environment") or {}):
            tags[f"fp8.{key}"] = str(environment[key])
    return RunContent(
        run_id=record.run_id,
        name=run_name(spec),
        status=_STATUS.get(str(manifest.get("status")), "RUNNING"),
        start_ms=milliseconds(manifest.get("started_at")) or start,
        end_ms=milliseconds(manifest.get("finished_at")),
        params=params,
        tags=tags,
        series=series,
        dataset=_dataset(record),
        files=_tensor_stats(record),
    )


def _dataset(record: RunRecord) -> tuple[str, str] | None:
    """Return name and digest of the training data once it is known; MLflow takes 36 characters of digest."""
    sha = (record.manifest or {}).get("data_sha256")
    name = str(record.spec["data_path"]).rsplit("/", 1)[-1]
    return (name, str(sha)[:_MAX_DIGEST]) if sha else None


def _tensor_stats(record: RunRecord) -> dict[str, str]:
    """Return the Parquet files of per-layer statistics of an ended run, by the folder they go to."""
    if record.manifest is None:
        return {}
    folder = record.path / schema.TENSOR_STATS_DIR
    return {str(path): schema.TENSOR_STATS_DIR for path in sorted(folder.glob("*.parquet"))}
