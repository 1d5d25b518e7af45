"""Curves of many runs in one shape, whether this program trained them or another did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fp8parity_analysis.schema import Role, Status
from fp8parity_analysis.store import RunRecord

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNSTATED_PRECISION = "unstated"


@dataclass(frozen=True)
class Series:
    """A loss by step: `steps` int64 [K], strictly increasing; `loss` float64 [K] in nats, may be non-finite."""

    steps: IntArray
    loss: FloatArray


@dataclass(frozen=True)
class RunCurve:
    """The curves of one run and everything its pair must share with it.

    `evals` maps (split, eval_precision) to a series; `status` is None while the run is unfinished; `identity`
    holds the dotted settings that a pair must share; `problems` say why the run cannot be judged.
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
    parameters: int | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    batch_digests: Mapping[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurveSet:
    """All runs of a study; `notes` are remarks about the input that every verdict repeats."""

    runs: tuple[RunCurve, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def from_runs(records: Sequence[RunRecord]) -> CurveSet:
        """Collect stored runs; `BadInputError` when there is no control run."""
        raise NotImplementedError

    @staticmethod
    def from_table(table: pd.DataFrame) -> CurveSet:
        """Collect a table with `schema.EXTERNAL_COLUMNS`; `BadInputError` names a missing or bad column."""
        raise NotImplementedError
