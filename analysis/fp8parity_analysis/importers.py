"""Curves from run directories, CSV, Parquet, TensorBoard folders, MLflow experiments and W&B exports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fp8parity_analysis import event_files, schema, store
from fp8parity_analysis.curves import CurveSet, RunCurve, run_of_record, runs_of_table
from fp8parity_analysis.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DEFAULT_RUN_PATTERN = (
    r"^(?P<arm>.+?)[-_/. ]*(?:seed|s)[-_=]?(?P<seed>\d+)"
    r"(?:[-_/. ]*(?:replica|rep|r)[-_=]?(?P<replica>\d+))?$"
)
"""How a run's folder, file or display name gives its arm, seed and replica: `bf16_seed0`, `rowwise/seed3_r1`."""

PRESETS: dict[str, dict[str, str]] = {
    "torchtitan": {
        "validation_metrics/loss": schema.HELD_OUT,
        "loss_metrics/global_avg_loss": schema.TRAIN,
    },
    "megatron": {"lm loss validation": schema.HELD_OUT, "lm loss": schema.TRAIN},
    "nemo": {"val_loss": schema.HELD_OUT, "reduced_train_loss": schema.TRAIN},
}
"""Tags of the held-out and the training loss in the logs of known trainers."""

MLFLOW_PREFIX = "mlflow:"
_KNOWN = (*schema.EXTERNAL_COLUMNS, *schema.EXTERNAL_OPTIONAL_COLUMNS)
_HELD_OUT_WORDS = ("val", "eval", "test", "held")
_WANDB_EXTREMES = ("__MIN", "__MAX")


@dataclass(frozen=True)
class ImportSettings:
    """How other people's names map to ours.

    `columns` maps our column to theirs; `tags` maps their metric or tag to a split (`held_out`, `train`, or
    the name of another held-out set); `preset` is a set of tags by trainer; `run_pattern` has the groups
    `arm`, `seed` and optionally `replica`; `tracking_uri` is MLflow's, None for its own default.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    preset: str | None = None
    run_pattern: str = DEFAULT_RUN_PATTERN
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise BadInputError(f"preset: {self.preset!r} is not known; write one of {', '.join(PRESETS)}")
        unknown = [name for name in self.columns if name not in _KNOWN]
        if unknown:
            raise BadInputError(f"column: {unknown[0]!r} is not one of {', '.join(_KNOWN)}")
        try:
            groups = re.compile(self.run_pattern).groupindex
        except re.error as error:
            raise BadInputError(
                f"run pattern: {self.run_pattern!r} is no regular expression ({error})"
            ) from error
        if not {"arm", "seed"} <= set(groups):
            raise BadInputError(
                f"run pattern: {self.run_pattern!r} needs the groups (?P<arm>...) and (?P<seed>...)"
            )

    @property
    def splits(self) -> dict[str, str]:
        """Their tags with our splits, preset first."""
        return {**PRESETS.get(self.preset or "", {}), **self.tags}

    def run_named(self, name: str) -> dict[str, Any] | None:
        """Return arm, seed and replica that a run's name gives, or None."""
        match = re.search(self.run_pattern, name)
        if match is None:
            return None
        found = match.groupdict()
        return {"arm": found["arm"], "seed": int(found["seed"]), "replica": int(found.get("replica") or 0)}

    def split_of(self, tag: str) -> str:
        """Return the split of a tag: as declared, else by the words in its name."""
        declared = self.splits
        if tag in declared:
            return declared[tag]
        words = tag.lower()
        return schema.HELD_OUT if any(word in words for word in _HELD_OUT_WORDS) else schema.TRAIN


def read_curves(sources: Sequence[str | Path], settings: ImportSettings | None = None) -> CurveSet:
    """Read curves of any kind into one set.

    A source is a run or study directory, a CSV or Parquet file, a folder with TensorBoard event files, or
    `mlflow:EXPERIMENT`. `BadInputError` names the source that cannot be read and why.
    """
    chosen = settings or ImportSettings()
    if not sources:
        raise BadInputError(
            "no source given; name a run directory, a CSV or Parquet file, or mlflow:EXPERIMENT"
        )
    runs: list[RunCurve] = []
    tables: list[pd.DataFrame] = []
    for source in sources:
        found = _read(source, chosen)
        if isinstance(found, pd.DataFrame):
            tables.append(found)
        else:
            runs += found
    notes: tuple[str, ...] = ()
    if tables:
        external, notes = runs_of_table(
            pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
        )
        runs += external
    return CurveSet(tuple(runs), notes)


def _read(source: str | Path, settings: ImportSettings) -> pd.DataFrame | list[RunCurve]:
    if str(source).startswith(MLFLOW_PREFIX):
        return read_mlflow(str(source)[len(MLFLOW_PREFIX) :], settings)
    path = Path(source)
    if path.is_dir():
        if event_files.folders(path) and not _holds_runs(path):
            return read_tensorboard(path, settings)
        return [run_of_record(record) for record in store.read_runs(path)]
    if not path.exists():
        raise BadInputError(f"{path}: does not exist")
    return _table_of_file(path, settings)


def _holds_runs(path: Path) -> bool:
    patterns = (schema.SPEC_FILE, f"{schema.RUNS_DIR}/*/{schema.SPEC_FILE}", f"*/{schema.SPEC_FILE}")
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def _table_of_file(path: Path, settings: ImportSettings) -> pd.DataFrame:
    table = read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else read_csv(path, settings)
    if _is_wandb(table.column_names, settings):
        return _from_wandb(table, path, settings)
    theirs = {their: ours for ours, their in settings.columns.items()}
    renamed = table.rename_columns([theirs.get(name, name) for name in table.column_names])
    renamed = renamed.select([name for name in dict.fromkeys(renamed.column_names) if name in _KNOWN])
    if "loss" in renamed.column_names:  # an empty cell is no measurement; NaN is one
        renamed = renamed.filter(pc.is_valid(renamed["loss"]))
    return _named_by_file(renamed.to_pandas(), path, settings)


def _named_by_file(table: pd.DataFrame, path: Path, settings: ImportSettings) -> pd.DataFrame:
    """Add arm and seed from the file's name when the table has neither."""
    if "arm" in table.columns or "seed" in table.columns:
        return table
    named = settings.run_named(path.stem)
    return table.assign(**named) if named else table


def read_csv(path: Path, settings: ImportSettings | None = None) -> pa.Table:
    """Read a CSV file; `BadInputError` when it is no table or a loss is no number."""
    loss = (settings or ImportSettings()).columns.get("loss", "loss")
    texts = {
        name: pa.dictionary(pa.int32(), pa.string()) for name in ("arm", "split", "eval_precision", "status")
    }
    options = pa.csv.ConvertOptions(
        null_values=[""], strings_can_be_null=True, column_types={loss: pa.float64(), **texts}
    )
    try:
        table = pa.csv.read_csv(path, convert_options=options)
        return table.rename_columns(table.column_names)  # decodes the header: fails where it is no text
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read as CSV ({_first_line(error)})") from error


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; `BadInputError` when it is none."""
    try:
        return pa.parquet.ParquetFile(path).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]


def _is_wandb(names: Sequence[str], settings: ImportSettings) -> bool:
    return "loss" not in names and "loss" not in settings.columns and any(" - " in name for name in names)


def _from_wandb(table: pa.Table, path: Path, settings: ImportSettings) -> pd.DataFrame:
    """Turn a W&B export (`Step`, `RUN - METRIC`, `RUN - METRIC__MIN`, ...) into long rows."""
    steps = next(
        (name for name in table.column_names if name.lower().lstrip("_") in ("step", "global_step")), None
    )
    if steps is None:
        raise BadInputError(
            f"{path}: a W&B export needs a Step column; export the panel over steps, not over time"
        )
    parts = []
    for name in table.column_names:
        run, dash, metric = name.rpartition(" - ")
        if not dash or name.endswith(_WANDB_EXTREMES):
            continue
        named = settings.run_named(run)
        if named is None:
            raise BadInputError(_unnamed(f"{path}: run {run!r}", settings))
        kept = table.select([steps, name]).rename_columns(["step", "loss"])
        kept = kept.filter(pc.is_valid(kept["loss"]))
        parts.append(kept.to_pandas().assign(split=settings.split_of(metric), **named))
    return _stacked(parts, str(path))


def _unnamed(what: str, settings: ImportSettings) -> str:
    pattern = settings.run_pattern
    return f"{what} does not name its arm and seed; rename it (bf16_seed0) or give a pattern; it is {pattern}"


def _stacked(parts: Sequence[pd.DataFrame], source: str) -> pd.DataFrame:
    kept = [part for part in parts if len(part)]
    if not kept:
        raise BadInputError(
            f"{source}: holds no loss under the known tags; map them with --tag NAME=held_out"
        )
    return pd.concat(kept, ignore_index=True)


def read_tensorboard(directory: Path, settings: ImportSettings) -> pd.DataFrame:
    """Read event files below `directory`, one folder a run; without tags the loss-like ones are taken."""
    return _stacked(list(_tensorboard_parts(directory, settings)), str(directory))


def _tensorboard_parts(directory: Path, settings: ImportSettings) -> Iterator[pd.DataFrame]:
    for folder in event_files.folders(directory):
        scalars = event_files.read_scalars(folder)
        tags = _chosen(scalars, settings)
        name = folder.relative_to(directory).as_posix() if folder != directory else folder.name
        named = settings.run_named(name) or settings.run_named(folder.name)
        if tags and named is None:
            raise BadInputError(_unnamed(str(folder), settings))
        for tag in tags:
            steps, losses = scalars[tag]
            yield pd.DataFrame({"step": steps, "loss": losses}).assign(
                split=settings.split_of(tag), **(named or {})
            )


def _chosen(available: Mapping[str, Any] | Sequence[str], settings: ImportSettings) -> list[str]:
    """Return the tags to read: those declared, else all that end in the word loss."""
    declared = settings.splits
    if declared:
        return [tag for tag in available if tag in declared]
    return [tag for tag in available if re.split(r"[/_. ]", tag.lower())[-1] == "loss"]


def read_mlflow(experiment: str, settings: ImportSettings) -> pd.DataFrame:
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
        raise BadInputError(
            f"mlflow: experiment {experiment!r} cannot be read ({_first_line(error)})"
        ) from error
    parts: list[pd.DataFrame] = []
    token: str | None = None
    while token != "":
        page = client.search_runs([found.experiment_id], max_results=500, page_token=token)
        for run in page:
            parts += _mlflow_parts(client, run, settings)
        token = page.token or ""
    return _stacked(parts, f"mlflow:{experiment}")


def _mlflow_parts(client: Any, run: Any, settings: ImportSettings) -> Iterator[pd.DataFrame]:
    said = {**run.data.params, **run.data.tags}
    named = settings.run_named(run.info.run_name or "") or {}
    named |= {key: said[key] for key in ("arm", "seed", "replica") if key in said}
    tags = _chosen(list(run.data.metrics), settings)
    if tags and not {"arm", "seed"} <= set(named):
        raise BadInputError(_unnamed(f"mlflow run {run.info.run_name!r}", settings))
    for tag in tags:
        history = sorted(client.get_metric_history(run.info.run_id, tag), key=lambda point: point.timestamp)
        latest = {point.step: point.value for point in history}  # a resumed run logs a step again
        rows = pd.DataFrame({"step": list(latest), "loss": list(latest.values())})
        yield rows.assign(split=settings.split_of(tag), **named)
