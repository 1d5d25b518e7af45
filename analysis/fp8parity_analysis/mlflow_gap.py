"""The gap of a run to the control of its seed, step by step, as MLflow gets it. Pure; imports no mlflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.schema import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from fp8parity_analysis.store import RunRecord

TRAINING = "train/loss"


def gap_percent(
    record: RunRecord, control: RunRecord, criteria: Mapping[str, Any]
) -> tuple[str, npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the metric compared, the common steps [K] and 100 * ln(run's loss / BF16 loss) [K].

    The metric is the endpoint of the study's `criteria` where both runs have it, else another held-out loss that both
    have, else the training loss.
    """
    for name, split, precision in _candidates(criteria):
        mine, theirs = _held_out(record, split, precision), _held_out(control, split, precision)
        if len(mine) and len(theirs):
            return name, *_gaps(mine, theirs)
    return TRAINING, *_gaps(_training(record), _training(control))


def _candidates(criteria: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (metric, split, precision) of the held-out losses to try, the study's own endpoint first."""
    usual = Criteria()
    if criteria.get("endpoint", usual.endpoint) == "train":
        return
    own = str(criteria.get("split", usual.split))
    precision = str(criteria.get("eval_precision", usual.eval_precision))
    for split in dict.fromkeys((own, schema.HELD_OUT)):
        for forward in dict.fromkeys((precision, schema.EVAL_BF16, schema.EVAL_ARM)):
            yield f"{split}/{forward}", split, forward


def _held_out(record: RunRecord, split: str, precision: str) -> pd.DataFrame:
    """Return step and loss; a control's own forward is BF16 under either name, as for the judge."""
    rows = record.evals[record.evals["split"] == split]
    names = [precision] if record.spec["role"] == Role.TEST else [precision, schema.EVAL_BF16]
    for name in names:
        found = rows[rows["eval_precision"] == name]
        if len(found):
            return found[["step", "loss"]]
    return rows[["step", "loss"]].iloc[:0]


def _training(record: RunRecord) -> pd.DataFrame:
    return record.curve[["step", "train_loss"]].rename(columns={"train_loss": "loss"})


def _gaps(mine: pd.DataFrame, theirs: pd.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    joined = mine.merge(theirs, on="step", suffixes=("_run", "_control")).sort_values("step")
    run, control = (joined[f"loss_{side}"].to_numpy(dtype=np.float64) for side in ("run", "control"))
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = 100 * np.log(run / control)
    return joined["step"].to_numpy(dtype=np.int64), gaps
