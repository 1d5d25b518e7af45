"""W&B's CSV export of a panel: `Step`, `RUN - METRIC`, `RUN - METRIC__MIN`, ..."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.run_logs import Read, RunLog, read_of
from fp8parity_analysis.table import loss_numbers, step_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fp8parity_analysis.import_settings import ImportSettings
    from fp8parity_analysis.table import FloatArray, IntArray

_DASH = " - "
_EXTREMES = ("__MIN", "__MAX")
_STEPS = ("step", "global_step")


def is_export(names: Sequence[str], settings: ImportSettings) -> bool:
    """Whether columns of these names are a W&B export."""
    return "loss" not in names and "loss" not in settings.columns and any(_DASH in name for name in names)


def read_export(table: pa.Table, path: Path, settings: ImportSettings) -> Read:
    """Return the losses of a W&B export; `BadInputError` names what forbids reading it.

    An empty cell says that the run logged nothing at this step, or that somebody's pandas wrote NaN.
    """
    steps_name = _steps_column(table.column_names, path, settings)
    columns = [name for name in table.column_names if _DASH in name and not name.endswith(_EXTREMES)]
    _refuse_repeated([steps_name, *columns], table.column_names, path)
    try:
        steps = step_numbers(table[steps_name].to_pandas(), steps_name)
        logs = [
            _log(table, steps, run, metrics, settings) for run, metrics in _metrics_by_run(columns).items()
        ]
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error
    _refuse_shared_names([log for log in logs if log.metrics], path)
    return read_of([replace(log, label=f"{path}: run {log.label!r}") for log in logs], settings, str(path))


def _steps_column(names: Sequence[str], path: Path, settings: ImportSettings) -> str:
    said = settings.columns.get("step")
    for name in names:
        if name == said or (said is None and _DASH not in name and _is_step(name)):
            return name
    raise BadInputError(
        f"{path}: a W&B export needs a Step column; export the panel over steps, not over time"
    )


def _is_step(name: str) -> bool:
    return name.lower().rpartition("/")[2].lstrip("_") in _STEPS


def _refuse_repeated(used: Sequence[str], names: Sequence[str], path: Path) -> None:
    count = Counter(names)
    for name in used:
        if count[name] > 1:
            run = name.rpartition(_DASH)[0] or name
            raise BadInputError(
                f"{path}: {count[name]} columns are called {name!r}: several runs have the display name {run!r}; "
                f"rename them in W&B (a repetition is {run}_r1) and export again"
            )


def _metrics_by_run(columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {run: {metric: column}}."""
    found: dict[str, dict[str, str]] = {}
    for name in columns:
        run, _, metric = name.rpartition(_DASH)
        found.setdefault(run, {})[metric] = name
    return found


def _log(
    table: pa.Table, steps: IntArray, run: str, metrics: dict[str, str], settings: ImportSettings
) -> RunLog:
    filled = {metric: _filled(table[name]) for metric, name in metrics.items()}
    own = np.any([*filled.values()], axis=0)
    losses = {
        metric: _points(table[name], name, steps, filled[metric])
        for metric, name in metrics.items()
        if settings.is_candidate(metric)
    }
    return RunLog(
        label=run,
        named=settings.run_named(run),
        names=list(metrics),
        metrics=losses,
        rows_to=int(steps[own].max()) if own.any() else 0,
        cells_to=int(steps.max()) if len(steps) else 0,
    )


def _filled(column: Any) -> Any:
    return pc.is_valid(column).to_numpy()


def _points(column: Any, name: str, steps: IntArray, filled: Any) -> tuple[IntArray, FloatArray]:
    losses = loss_numbers(column.to_pandas(), name)
    return steps[filled], losses[filled]


def _refuse_shared_names(logs: Sequence[RunLog], path: Path) -> None:
    """Refuse two display names that mean one arm, seed and replica: their rows would be mixed."""
    owners: dict[tuple[Any, ...], str] = {}
    for log in logs:
        if log.named is None:
            continue
        owner = owners.setdefault(tuple(log.named.values()), log.label)
        if owner != log.label:
            raise BadInputError(
                f"{path}: the runs {owner!r} and {log.label!r} are both {log.named['arm']} seed "
                f"{log.named['seed']} replica {log.named['replica']}; rename one (a repetition is {owner}_r1)"
            )
