"""Alerts on the statistics of the casts that training makes, while it makes them. Imports no torch.

    saturation   elements are clamped at the format's maximum; value: saturated_frac, limit: 0
    nonfinite    an operand holds an infinity or NaN; value: their count, limit: 0
    zero_amax    scaling groups are all zeros; value: their share, limit: 0 for a weight. For inputs and gradients, to
                 which padding, masked labels, dead units and the first position of causal attention give zero rows by
                 construction, half of them or twice the largest share of the earlier probes, whichever is more
    sqnr_drop    the cast's SQNR is 3 dB below the median of its earlier probes, each counted as no more than its format
                 gives a well-scaled Gaussian: a tensor of few values has more for a while; value: SQNR, limit: the
                 median - 3 dB
    scale_jump   the smallest scale changed more than twofold since the last probe, and three times as far, in ln, as in
                 any earlier one; value: the ratio, limit: what it may be

What is measured by a tensor's own past speaks after eight probes of it: while the learning rate warms up, every operand
moves severalfold in any run. A rule speaks once for each tensor and run. These are plain thresholds, a reason
to look and no finding: how often they speak in healthy runs is measured (docs/tensor-health.md), not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fp8parity_analysis.tensor_absolute import format_family
from fp8parity_analysis.tensor_pictures import BEST_SQNR
from fp8parity_analysis.tensor_schema import TRAINED

PAST = 8
"""Earlier probes of a tensor, with a number to compare with, that it is measured by at least."""

SQNR_DROP_DB = 3.0

SCALE_JUMP = 2.0
"""A power-of-two scale that moves by one step is within it."""

JUMP_TIMES = 3.0
"""A jump is so many times as far as the tensor's largest earlier change, in ln."""

ZERO_SHARE = 0.5
ZERO_TIMES = 2.0
"""The share of zero groups of an input or gradient is beyond the first, and beyond so many times the largest yet."""

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
        self._zeros: dict[Tensor, list[float]] = {}
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
        found = [*_absolute(row), *self._zero_amax(tensor, row)]
        found += self._sqnr_drop(tensor, row["sqnr_db"], BEST_SQNR[format_family(row["format"])])
        found += self._scale_jump(tensor, row["scale_min"])
        new = [item for item in found if (item[0], tensor) not in self._said]
        self._said |= {(rule, tensor) for rule, _, _ in new}
        return [Alert(row["step"], rule, *tensor, value, limit) for rule, value, limit in new]

    def _zero_amax(self, tensor: Tensor, row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
        share = row["zero_amax_groups"] / max(row["group_count"], 1)
        count, largest = self._zeros.get(tensor, [0, 0.0])
        self._zeros[tensor] = [count + 1, max(largest, share)]
        limit = 0.0 if tensor[2] == "weight" else max(ZERO_SHARE, ZERO_TIMES * largest)
        if share <= limit or (tensor[2] != "weight" and count < PAST):
            return []
        return [("zero_amax", share, limit)]

    def _sqnr_drop(self, tensor: Tensor, sqnr: float, best: float) -> list[tuple[str, float, float]]:
        found = []
        history = self._sqnr.setdefault(tensor, [])
        if len(history) >= PAST and sqnr < median(history) - SQNR_DROP_DB:
            found.append(("sqnr_drop", sqnr, median(history) - SQNR_DROP_DB))
        if math.isfinite(sqnr):
            history.append(min(sqnr, best))
        return found

    def _scale_jump(self, tensor: Tensor, scale: float) -> list[tuple[str, float, float]]:
        ratio = scale / self._scale.get(tensor, math.nan)
        if math.isfinite(scale) and scale > 0:
            self._scale[tensor] = scale
        if not math.isfinite(ratio) or ratio <= 0:
            return []
        change = abs(math.log(ratio))
        count, largest = self._changes.get(tensor, [0, 0.0])
        self._changes[tensor] = [count + 1, max(largest, change)]
        limit = max(math.log(SCALE_JUMP), JUMP_TIMES * largest)
        if count < PAST or change <= limit:
            return []
        return [("scale_jump", ratio, math.exp(limit if ratio > 1 else -limit))]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must remember."""
        return {
            "alerts": [alert.to_json() for alert in self.alerts],
            "sqnr": {key: list(values) for key, values in self._sqnr.items()},
            "scale": dict(self._scale),
            "changes": {key: list(values) for key, values in self._changes.items()},
            "zeros": {key: list(values) for key, values in self._zeros.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's memory."""
        self.alerts = [Alert(**alert) for alert in state["alerts"]]
        self._sqnr = {key: list(values) for key, values in state["sqnr"].items()}
        self._scale = dict(state["scale"])
        # checkpoints of earlier versions have none: what is usual is then learnt anew
        self._changes = {key: list(values) for key, values in state.get("changes", {}).items()}
        self._zeros = {key: list(values) for key, values in state.get("zeros", {}).items()}
        self._said = {(a.rule, (a.fqn, a.gemm, a.operand)) for a in self.alerts}


def _absolute(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    values = (
        ("saturation", row["saturated_frac"] if row["saturated_count"] else 0.0),
        ("nonfinite", row["nonfinite_count"]),
    )
    return [(rule, float(value), 0.0) for rule, value in values if value > 0]


def lines(alerts: list[Alert]) -> list[str]:
    """Return the log lines of one probe's alerts, at most `SHOWN` and how many more there are."""
    shown = [str(alert) for alert in alerts[:SHOWN]]
    if len(alerts) > SHOWN:
        shown.append(f"alert: step {alerts[0].step}: {len(alerts) - SHOWN} more alerts, kept in the manifest")
    return shown
