"""What is measured beside casts, as arrays: logits, block outputs and gradient norms of one run, by module.

A signal is one number per module and probe, and the same quantity in every arm, so an arm's is paired with BF16's of
the same seed directly. It is no cast: it says that something upstream has changed, not which cast changed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp8parity_analysis.tensor_panel import Statistic, Tensor, distinct, natural_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from fp8parity_analysis.tensor_panel import FloatArray, IntArray

SIGNAL_STATISTICS: Mapping[str, Statistic] = {
    item.name: item
    for item in (
        Statistic("attention_logits_max", 1, float(np.log(1.25)), "ln", "largest attention logit"),
        Statistic("head_logits_max", 1, float(np.log(1.25)), "ln", "largest head logit"),
        Statistic("head_logsumexp_mean", 0, 0.25, "nats", "mean logsumexp of the head logits"),
        Statistic("block_output_rms", 1, float(np.log(1.25)), "ln", "rms of the block output"),
        Statistic("grad_norm", 0, float(np.log(1.25)), "ln", "gradient norm"),
    )
}
"""Signals in the order of reports, as they are tested. Gradients may vanish as well as grow, and the log partition
function may run off either way (Wortsman et al., arXiv 2309.14322); the others are harmful where they grow."""


MODULE_SIGNALS = frozenset({"attention_logits_max", "block_output_rms"})
"""Signals of a module that holds linears; the others belong to a linear."""


class Signal(NamedTuple):
    """One signal of one module; `name` is one of `SIGNAL_STATISTICS`."""

    fqn: str
    name: str

    def __str__(self) -> str:
        """Return the name as reports write it."""
        return f"{self.fqn}, {SIGNAL_STATISTICS[self.name].words}"


Place = Tensor | Signal
"""Where a finding is: a cast of a tensor, or a signal of a module."""


@dataclass(frozen=True)
class SignalPanel:
    """The signals of one run: `values` [S, K] as recorded, NaN where not.

    `places` [S] and `steps` [K] name the axes.
    """

    places: tuple[Signal, ...]
    steps: IntArray
    values: FloatArray

    def at(self, places: Sequence[Signal], steps: IntArray) -> FloatArray:
        """Return the values of the given places at the given steps [S', K'], NaN where it lacks them."""
        found = np.full((len(places), len(steps)), np.nan)
        row = {place: index for index, place in enumerate(self.places)}
        _, here, there = np.intersect1d(self.steps, steps, assume_unique=True, return_indices=True)
        for index, place in enumerate(places):
            if place in row:
                found[index, there] = self.values[row[place], here]
        return found


def scaled(name: str, values: FloatArray) -> FloatArray:
    """Return a signal on the scale that it is tested on: natural logarithms, the logsumexp in nats as it is."""
    if SIGNAL_STATISTICS[name].unit == "nats":
        return np.where(np.isfinite(values), values, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values)
    return np.where(np.isfinite(logs), logs, np.nan)


def signals_of(table: pd.DataFrame) -> SignalPanel | None:
    """Return the signals of a run from its rows of `tensor_schema.SIGNAL_COLUMNS`, None without any known one."""
    table = table[table["signal"].isin(list(SIGNAL_STATISTICS))] if len(table) else table
    if not len(table):
        return None
    order = list(SIGNAL_STATISTICS)
    rows, names = distinct(table, ("fqn", "signal"))
    places = [Signal(*name) for name in names]
    ranked = sorted(
        range(len(places)), key=lambda at: (order.index(places[at].name), natural_key(places[at].fqn))
    )
    place = np.empty(len(ranked), dtype=np.int64)
    place[ranked] = np.arange(len(ranked))
    steps, at = np.unique(table["step"].to_numpy(dtype=np.int64), return_inverse=True)
    values = np.full((len(places), len(steps)), np.nan)
    values[place[rows], at] = table["value"].to_numpy(dtype=np.float64, na_value=np.nan)
    return SignalPanel(tuple(places[index] for index in ranked), steps, values)
