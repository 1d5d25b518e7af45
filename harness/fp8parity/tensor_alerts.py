"""Alerts on the statistics of the casts that training makes, while it makes them. Imports no torch.

    saturation   elements are clamped at the format's maximum; value: saturated_frac, limit: 0
    nonfinite    an operand holds an infinity or NaN; value: their count, limit: 0
    zero_amax    scaling groups are all zeros; value: how many, limit: 0, for a gradient what its first probe had:
                 the first position of causal attention and masked labels make zero rows there by construction
    sqnr_drop    the cast's SQNR is 3 dB below the median of its earlier probes; value: SQNR, limit: the median - 3 dB
    scale_jump   the smallest scale changed more than twofold since the last probe; value: the ratio, limit: 2 or 1/2.
                 From eight changes on also three times as far, in ln, as in any earlier one; a gradient's scale, which
                 does that in any run, is not looked at before

A rule speaks once for each tensor and run. These are plain thresholds, a reason to look and no finding: how often they
speak in healthy runs is measured on synthetic ones (`benchmarks/early_warning.py`), not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fp8parity_analysis.tensor_schema import TRAINED

SQNR_DROP_DB = 3.0
SQNR_HISTORY = 3
"""Earlier probes a median takes at least."""

SCALE_JUMP = 2.0
"""A power-of-two scale that moves by one step is within it."""

USUAL_TIMES = 3.0
CHANGES = 8
"""A jump is measured by the tensor's largest earlier change, of so many at least."""

SHOWN = 5
"""Alerts of one probe that are printed; all are kept."""

Tensor = tuple[str, str, str]


@dataclass(frozen=True)
class Alert:
    """One alert, with the keys of `tensor_schema.ALERT_KEYS`."""

    step: int
    rule: str
    fqn: str
    gemm: str
    operand: str
    value: float
    limit: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the line for the log."""
        return (
            f"alert: step {self.step}: {self.rule}: {self.fqn}, {self.operand} of {self.gemm}: "
            f"{self.value:.4g} (limit {self.limit:.4g})"
        )


class AlertWatch:
    """Looks at the rows of each probe and remembers what it needs of them; its state goes into a checkpoint."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._sqnr: dict[Tensor, list[float]] = {}
        self._scale: dict[Tensor, float] = {}
        self._changes: dict[Tensor, list[float]] = {}
        self._zero_groups: dict[Tensor, int] = {}
        self._said: set[tuple[str, Tensor]] = set()

    def look(self, rows: Iterable[Mapping[str, Any]]) -> list[Alert]:
        """Return the new alerts of one probe's rows of `tensor_schema.CAST_COLUMNS`; what-if casts raise none."""
        new: list[Alert] = []
        for row in rows:
            if row["kind"] == TRAINED:
                new += self._look(row)
        self.alerts += new
        return new

    def _look(self, row: Mapping[str, Any]) -> list[Alert]:
        tensor = (row["fqn"], row["gemm"], row["operand"])
        found = [*_absolute(row, self._zero_limit(tensor, row))]
        found += self._sqnr_drop(tensor, row["sqnr_db"])
        found += self._scale_jump(tensor, row["scale_min"])
        new = [item for item in found if (item[0], tensor) not in self._said]
        self._said |= {(rule, tensor) for rule, _, _ in new}
        return [Alert(row["step"], rule, *tensor, value, limit) for rule, value, limit in new]

    def _zero_limit(self, tensor: Tensor, row: Mapping[str, Any]) -> int:
        if row["operand"] != "grad_output":
            return 0
        return self._zero_groups.setdefault(tensor, int(row["zero_amax_groups"]))

    def _sqnr_drop(self, tensor: Tensor, sqnr: float) -> list[tuple[str, float, float]]:
        found = []
        history = self._sqnr.setdefault(tensor, [])
        if len(history) >= SQNR_HISTORY and sqnr < median(history) - SQNR_DROP_DB:
            found.append(("sqnr_drop", sqnr, median(history) - SQNR_DROP_DB))
        if math.isfinite(sqnr):
            history.append(sqnr)
        return found

    def _scale_jump(self, tensor: Tensor, scale: float) -> list[tuple[str, float, float]]:
        ratio = scale / self._scale.get(tensor, math.nan)
        if math.isfinite(scale) and scale > 0:
            self._scale[tensor] = scale
        if not math.isfinite(ratio) or ratio <= 0:
            return []
        change, limit = abs(math.log(ratio)), math.log(SCALE_JUMP)
        count, largest = self._changes.get(tensor, [0, 0.0])
        self._changes[tensor] = [count + 1, max(largest, change)]
        if count >= CHANGES:
            limit = max(limit, USUAL_TIMES * largest)
        elif tensor[2] == "grad_output":
            return []
        if change <= limit:
            return []
        return [("scale_jump", ratio, math.exp(limit if ratio > 1 else -limit))]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must remember."""
        return {
            "alerts": [alert.to_json() for alert in self.alerts],
            "sqnr": {key: list(values) for key, values in self._sqnr.items()},
            "scale": dict(self._scale),
            "changes": {key: list(values) for key, values in self._changes.items()},
            "zero_groups": dict(self._zero_groups),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's memory."""
        self.alerts = [Alert(**alert) for alert in state["alerts"]]
        self._sqnr = {key: list(values) for key, values in state["sqnr"].items()}
        self._scale = dict(state["scale"])
        # checkpoints of earlier versions have none: what is usual is then learnt anew
        self._changes = {key: list(values) for key, values in state.get("changes", {}).items()}
        self._zero_groups = dict(state["zero_groups"])
        self._said = {(a.rule, (a.fqn, a.gemm, a.operand)) for a in self.alerts}


def _absolute(row: Mapping[str, Any], zero_limit: int) -> list[tuple[str, float, float]]:
    values = (
        ("saturation", row["saturated_frac"] if row["saturated_count"] else 0.0, 0),
        ("nonfinite", row["nonfinite_count"], 0),
        ("zero_amax", row["zero_amax_groups"], zero_limit),
    )
    return [(rule, float(value), float(limit)) for rule, value, limit in values if value > limit]


def lines(alerts: list[Alert]) -> list[str]:
    """Return the log lines of one probe's alerts, at most `SHOWN` and how many more there are."""
    shown = [str(alert) for alert in alerts[:SHOWN]]
    if len(alerts) > SHOWN:
        shown.append(f"alert: step {alerts[0].step}: {len(alerts) - SHOWN} more alerts, kept in the manifest")
    return shown
