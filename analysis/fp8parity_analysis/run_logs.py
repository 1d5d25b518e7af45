"""Runs that logged named metrics (TensorBoard, MLflow, W&B): which metric is the loss, and the table of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fp8parity_analysis import schema
from fp8parity_analysis.arms import listed
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings, is_usual
from fp8parity_analysis.table import CELL, LOSS_CELL, RUN_ROW, TABLE_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.table import FloatArray, IntArray


@dataclass(frozen=True)
class Read:
    """What a source holds: a table with `schema.EXTERNAL_COLUMNS`, and remarks on how it was read."""

    table: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunLog:
    """What one run logged.

    `label` names it in errors; `named` has arm, seed and what else is known of it (None: its name says
    nothing); `names` are all its metrics; `metrics` maps those that may be a loss to steps [K] and values
    [K]. `rows_to` is the last step at which it logged anything, `cells_to` the last step at which its source
    has a place for its loss, 0 where a source cannot tell.
    """

    label: str
    named: Mapping[str, Any] | None
    names: Sequence[str]
    metrics: Mapping[str, tuple[IntArray, FloatArray]] = field(default_factory=dict)
    rows_to: int = 0
    cells_to: int = 0


def read_of(logs: Sequence[RunLog], settings: ImportSettings, source: str) -> Read:
    """Return the losses of the runs as a table, one metric a split.

    `BadInputError` when no metric is recognisably a loss, when several may be, or when a run is not named.
    """
    names = list(dict.fromkeys(name for log in logs for name in log.names))
    candidates = [name for name in names if any(name in log.metrics for log in logs)]
    if not candidates:
        found = f"it logged {listed(names)}" if names else "it logged nothing"
        raise BadInputError(
            f"{source}: holds no loss under the known tags; {found}; map one with --tag NAME=held_out"
        )
    by_split: dict[str, list[str]] = {}
    for tag in candidates:
        by_split.setdefault(settings.split_of(tag), []).append(tag)
    kept, notes = [], []
    for split, tags in by_split.items():
        chosen = _chosen(split, tags, logs, source)
        kept += chosen
        if len(chosen) < len(tags):
            left_out = listed([tag for tag in tags if tag not in chosen])
            notes.append(f"{source}: the {split} loss is {', '.join(chosen)}; {left_out} is left out")
    parts = [part for log in logs for part in _parts(log, kept, settings)]
    return Read(pd.concat(parts, ignore_index=True), tuple(notes))


def _chosen(split: str, tags: list[str], logs: Sequence[RunLog], source: str) -> list[str]:
    """Return the tags that are the loss of a split: one in every run.

    A metric with one point a run is a summary of another that has more; of the others the one with the usual
    name counts.
    """
    several = [log for log in logs if sum(tag in log.metrics for tag in tags) > 1]
    if not several:
        return tags
    points = {tag: max(len(log.metrics[tag][0]) for log in logs if tag in log.metrics) for tag in tags}
    streams = [tag for tag in tags if points[tag] > 1] or tags
    if len(streams) == 1:
        return streams
    usual = [tag for tag in streams if is_usual(tag)]
    if len(usual) == 1:
        return usual
    raise BadInputError(
        f"{source}: {several[0].label} has several metrics that may be the {split} loss: "
        f"{', '.join(streams)}; choose one with --tag {(usual or streams)[0]}={split}"
    )


def _parts(log: RunLog, kept: Sequence[str], settings: ImportSettings) -> Iterator[pd.DataFrame]:
    if not log.metrics:
        return
    if log.named is None:
        raise BadInputError(unnamed(log.label, settings))
    tags = [tag for tag in kept if tag in log.metrics]
    for tag in tags:
        yield _rows(log, *log.metrics[tag]).assign(split=settings.split_of(tag), **log.named)
    if not tags:  # its losses are called otherwise: it must not vanish from the comparison
        yield _rows(log, np.zeros(0, np.int64), np.zeros(0)).assign(split=schema.HELD_OUT, **log.named)


def _rows(log: RunLog, steps: IntArray, losses: FloatArray) -> pd.DataFrame:
    """Return the losses and, after them, where the run and its source end; without any losses at least that."""
    last = int(steps.max()) if len(steps) else -1
    ends = [(step, kind) for step, kind in _ends(log) if step > last]
    return pd.DataFrame(
        {
            "step": np.concatenate([steps, np.array([step for step, _ in ends], dtype=np.int64)]),
            "loss": np.concatenate([losses, np.full(len(ends), np.nan)]),
            CELL: np.array([*[LOSS_CELL] * len(steps), *(kind for _, kind in ends)], dtype=np.int8),
        }
    )


def _ends(log: RunLog) -> tuple[tuple[int, int], ...]:
    return (log.rows_to, RUN_ROW), (log.cells_to, TABLE_ROW)


def unnamed(what: str, settings: ImportSettings) -> str:
    """Return why a run whose name says nothing cannot be read."""
    pattern = settings.run_pattern
    return f"{what} does not name its arm and seed; rename it (bf16_seed0) or give a pattern; it is {pattern}"
