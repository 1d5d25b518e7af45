"""Curves of many runs in one shape, whether this program trained them or another did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.schema import Role, Status
from fp8parity_analysis.table import sorted_unique, table_runs

if TYPE_CHECKING:
    import pandas as pd

    from fp8parity_analysis.store import RunRecord

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNSTATED_PRECISION = "unstated"
_IN_FORCE = ("device", "compute", "compile", "bf16_gemm", "threads", "split")
_NOT_SHARED = ("precision", "seed", "replica", "replica_kind")


@dataclass(frozen=True)
class Series:
    """A loss by step: `steps` int64 [K], strictly increasing.

    `loss` float64 [K] in nats, may be non-finite.
    """

    steps: IntArray
    loss: FloatArray


@dataclass(frozen=True)
class RunCurve:
    """The curves of one run and everything its pair must share with it.

    `evals` maps (split, eval_precision) to a series; `status` is None while the run is unfinished; `identity`
    holds the dotted settings that a pair must share; `digests` the batch digest by step; `problems` say why
    the run cannot be judged. `rows_to` is the last step of a row that the run wrote without a loss,
    `cells_to` that of any row of its source with an empty place for one, 0 without such rows. `probed` is the
    manifest's, None where something else says what ran.
    """

    group: str
    arm: str
    role: Role
    seed: int
    replica: int
    label: str
    evals: Mapping[tuple[str, str], Series]
    train: Series | None = None
    status: Status | None = Status.FINISHED
    first_nonfinite_step: int | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    parameters: float | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rows_to: int = 0
    cells_to: int = 0
    probed: Mapping[str, Any] | None = None

    @cached_property
    def last_step(self) -> int:
        """The last step that any stream or row of this run has, 0 without any."""
        streams = [*self.evals.values(), *([self.train] if self.train else [])]
        return max([self.rows_to, *(int(stream.steps[-1]) for stream in streams if len(stream.steps))])

    def held_out(self, split: str, precision: str) -> Series | None:
        """Return the series of `split`, preferring `precision`.

        Unstated precision and a control's BF16 also do.
        """
        found = self.evals.get((split, precision)) or self.evals.get((split, UNSTATED_PRECISION))
        if found is None and self.role is not Role.TEST:
            return self.evals.get((split, schema.EVAL_BF16))
        return found


@dataclass(frozen=True)
class CurveSet:
    """All runs of a study; `notes` are remarks about the input that every verdict repeats."""

    runs: tuple[RunCurve, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(run.role is Role.CONTROL for run in self.runs):
            arms = ", ".join(sorted({run.arm for run in self.runs})) or "nothing"
            raise BadInputError(
                f"there is no control run: the arms are {arms}; "
                f"the BF16 arm must be called {schema.CONTROL_ARM!r}"
            )

    @staticmethod
    def from_runs(records: Sequence[RunRecord]) -> CurveSet:
        """Collect stored runs; `BadInputError` when there is no control run."""
        return CurveSet(tuple(run_of_record(record) for record in records))

    @staticmethod
    def from_table(table: pd.DataFrame) -> CurveSet:
        """Collect a table with `schema.EXTERNAL_COLUMNS`.

        `BadInputError` names a missing column, a value that is no number, or a missing control.
        """
        runs, notes = runs_of_table(table)
        return CurveSet(tuple(runs), notes)


def runs_of_table(table: pd.DataFrame) -> tuple[list[RunCurve], tuple[str, ...]]:
    """Return the runs of an external table in order of appearance, and notes; see `CurveSet.from_table`."""
    streams, notes = table_runs(table)
    runs: dict[tuple[str, int, int], RunCurve] = {}
    for stream in streams:
        key = (stream.arm, stream.seed, stream.replica)
        runs[key] = _with_stream(runs.get(key) or _external_run(*key, status=stream.status), stream)
    return list(runs.values()), notes


def _external_run(arm: str, seed: int, replica: int, *, status: Status | None) -> RunCurve:
    roles = {schema.CONTROL_ARM: Role.CONTROL, schema.NULL_ARM: Role.NULL}
    label = f"{arm} seed {seed}" + (f" replica {replica}" if replica else "")
    return RunCurve("", arm, roles.get(arm, Role.TEST), seed, replica, label, evals={}, status=status)


def _with_stream(run: RunCurve, stream: Any) -> RunCurve:
    series = Series(stream.steps, stream.loss)
    problems = run.problems + tuple(f"{run.label}: {text}" for text in stream.problems)
    status = run.status if run.status is not Status.FINISHED else stream.status
    run = replace(
        run,
        problems=problems,
        status=status,
        rows_to=max(run.rows_to, stream.rows_to),
        cells_to=max(run.cells_to, stream.cells_to),
    )
    if not len(series.steps):  # rows without a loss: the run exists and lacks this curve
        return run
    if stream.split == schema.TRAIN:
        return replace(run, train=series)
    evals = {**run.evals, (stream.split, stream.eval_precision or UNSTATED_PRECISION): series}
    return replace(run, evals=evals)


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, value in document.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def run_of_record(record: RunRecord) -> RunCurve:
    """Return the curves of one stored run with the settings that its pair must share."""
    spec, manifest = record.spec, record.manifest
    evals, eval_problems = _eval_series(record)
    train, train_problems = _train_series(record)
    model = (manifest or {}).get("model") or {}
    return RunCurve(
        group=str(spec["group"]),
        arm=str(spec["arm"]),
        role=Role(spec["role"]),
        seed=int(spec["seed"]),
        replica=int(spec["replica"]),
        label=record.run_id,
        evals=evals,
        train=train,
        status=Status(manifest["status"]) if manifest else None,
        first_nonfinite_step=(manifest or {}).get("first_nonfinite_step"),
        tokens=_tokens(record),
        tokens_per_s=_comparable_throughput(manifest or {}),
        parameters=model.get("parameters") if isinstance(model, Mapping) else None,
        identity=_identity(record),
        digests=_digests(record),
        problems=tuple(
            f"{record.run_id}: {text}"
            for text in [*eval_problems, *train_problems, *_manifest_problems(record)]
        ),
        probed=(manifest or {}).get("probed"),
    )


def _manifest_problems(record: RunRecord) -> Iterator[str]:
    """Yield what the manifest says against its own run: another run's, unproven execution, streams cut short."""
    spec, manifest = record.spec, record.manifest
    if manifest is None:
        return
    if manifest.get("run_id") != spec["run_id"]:
        yield f"the manifest is that of run {manifest.get('run_id')}"
    execution = manifest.get("execution")
    if isinstance(execution, Mapping) and not execution.get("proven", True):
        found = "; ".join(map(str, execution.get("differences") or ["no reason recorded"]))
        yield f"what executed is not what was declared: {found}"
    done = manifest.get("steps_done")
    for name, table in (("curve", record.curve), ("evaluations", record.evals)):
        last = int(table["step"].max()) if len(table) else 0
        if (
            isinstance(done, int)
            and last < (done if name == "curve" else 0.98 * done)
            and _was_cut(table, last, done)
        ):
            yield f"the stored {name} end at step {last}, the run did {done} steps"


def _was_cut(table: pd.DataFrame, last: int, done: int) -> bool:
    """Whether more than one usual distance between rows is missing at the end."""
    steps = table["step"].drop_duplicates()
    usual = int(steps.diff().median()) if len(steps) > 1 else 1
    return last + usual <= done


def _comparable_throughput(manifest: Mapping[str, Any]) -> float | None:
    """Return a run's tokens/s, or None where it says nothing about the recipe's speed.

    That is on a CPU, which emulates FP8, and on a device that several runs shared.
    """
    effective = manifest.get("effective") or {}
    if effective.get("device") == "cpu" or effective.get("runs_per_device", 1) != 1:
        return None
    rate = manifest.get("throughput_tokens_per_s")
    return None if rate is None else float(rate)


def _identity(record: RunRecord) -> dict[str, Any]:
    shared: dict[str, Any] = {
        key: value for key, value in record.spec["spec"].items() if key not in _NOT_SHARED
    }
    if isinstance(
        shared.get("fork_from"), Mapping
    ):  # `parent` says which state it is; where it lies may change
        shared["fork_from"] = {key: value for key, value in shared["fork_from"].items() if key != "run"}
    manifest = record.manifest or {}
    outside: dict[str, Any] = {
        key: manifest[key]
        for key in ("data_sha256", schema.DATA_SPLIT, "init_digest", "environment")
        if key in manifest
    }
    effective = manifest.get("effective") or {}
    in_force = {key: effective[key] for key in _IN_FORCE if key in effective}
    return dict(flatten({**shared, **outside, "effective": in_force}))


def _digests(record: RunRecord) -> dict[int, str]:
    rows = record.curve[["step", "batch_digest"]].dropna()
    return dict(
        zip(rows["step"].astype(int).tolist(), rows["batch_digest"].astype(str).tolist(), strict=True)
    )


def _tokens(record: RunRecord) -> int | None:
    if record.manifest and record.manifest.get("tokens") is not None:
        return int(record.manifest["tokens"])
    tokens = record.curve["tokens"].dropna()
    return int(tokens.iloc[-1]) if len(tokens) else None


def _eval_series(record: RunRecord) -> tuple[dict[tuple[str, str], Series], list[str]]:
    series, problems = {}, []
    for key, rows in record.evals.groupby(["split", "eval_precision"], sort=False):
        split, precision = str(key[0]), str(key[1])
        series[(split, precision)], found = _clean(rows["step"], rows["loss"])
        problems += [f"{split}: {text}" for text in found]
    return series, problems


def _train_series(record: RunRecord) -> tuple[Series | None, list[str]]:
    if record.curve.empty:
        return None, []
    series, problems = _clean(record.curve["step"], record.curve["train_loss"])
    return series, [f"train: {text}" for text in problems]


def _clean(steps: pd.Series[Any], loss: pd.Series[Any]) -> tuple[Series, list[str]]:
    ordered, values, problems = sorted_unique(
        steps.to_numpy(dtype=np.int64), loss.to_numpy(dtype=np.float64, na_value=np.nan)
    )
    return Series(ordered, values), problems
