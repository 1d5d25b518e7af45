"""The signals of an arm beside those of its control, one signal at a time: paired, tested, and watched.

The rule of an early warning is growth: how far a signal has grown since its own past, over what it has grown by in the
BF16 run of the same seed. Attention and head logits grow in any healthy run, so only the pair tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis.tensor_moves import EarlyRule, RuleScore, after_warmup, held, own_past, score_of
from fp8parity_analysis.tensor_panel import natural_key
from fp8parity_analysis.tensor_reduce import level, nanmedian
from fp8parity_analysis.tensor_screen import family_of, own_steps
from fp8parity_analysis.tensor_signals import SIGNAL_STATISTICS, Signal, scaled
from fp8parity_analysis.tensor_tests import adjusted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_panel import FloatArray, IntArray, Panel, Statistic
    from fp8parity_analysis.tensor_screen import Family
    from fp8parity_analysis.tensor_tests import Method

REDUCTIONS = ("level", "drift")

GROWTH_RULES = {
    name: EarlyRule(
        f"{name}_growth",
        f"{statistic.words} growing faster than BF16's"
        if statistic.harm
        else f"{statistic.words} leaving BF16's",
        1.0 if statistic.unit == "nats" else float(np.log(2.0)),
        statistic.unit,
        False,
    )
    for name, statistic in SIGNAL_STATISTICS.items()
}
"""By signal. The limits are conventions: twice BF16's growth, one nat of the log partition function."""


@dataclass(frozen=True)
class PairedSignal:
    """One signal over seeds: `tensors` [L] are its modules, paths are keyed by its name as in `ArmTensors`.

    `raw_test` and `raw_control` [n, L, K] are the values as recorded, a mean over a seed's runs.
    """

    statistic: Statistic
    tensors: tuple[Signal, ...]
    steps: IntArray
    seed_numbers: tuple[int, ...]
    matched: bool
    null_scale: float
    test_paths: dict[str, FloatArray]
    control_paths: dict[str, FloatArray]
    nulls: dict[str, FloatArray]
    raw_test: FloatArray
    raw_control: FloatArray

    @property
    def gaps(self) -> dict[str, FloatArray]:
        """Arm minus BF16 arm of the same seed [n, L, K]."""
        return {name: path - self.control_paths[name] for name, path in self.test_paths.items()}


def paired_signals(arm: ArmTensors) -> tuple[PairedSignal, ...]:
    """Return every signal that the arm recorded, in the order of `SIGNAL_STATISTICS`."""
    panels = [panel.signals for seed in arm.seeds for panel in seed.test if panel.signals]
    recorded = sorted(
        {place for panel in panels for place in panel.places}, key=lambda at: natural_key(at.fqn)
    )
    found = []
    for name, statistic in SIGNAL_STATISTICS.items():
        places = tuple(place for place in recorded if place.name == name)
        if places:
            found.append(_paired(arm, statistic, places))
    return tuple(found)


def _paired(arm: ArmTensors, statistic: Statistic, places: tuple[Signal, ...]) -> PairedSignal:
    name, blank = statistic.name, np.full((len(places), len(arm.steps)), np.nan)

    def raw(panels: Sequence[Panel]) -> FloatArray:
        rows = [panel.signals.at(places, arm.steps) if panel.signals else blank for panel in panels]
        # as for casts: a step counts where every run has it
        return np.asarray(np.mean(rows, axis=0), dtype=np.float64) if rows else blank

    def path(panels: Sequence[Panel]) -> FloatArray:
        rows = [scaled(name, raw([panel])) for panel in panels]
        return np.asarray(np.mean(rows, axis=0), dtype=np.float64) if rows else blank

    pairs = [path([other]) - path([one]) for one, other in arm.null_pairs]
    known = [null for null in pairs if np.isfinite(null).any()]
    return PairedSignal(
        statistic=statistic,
        tensors=places,
        steps=arm.steps,
        seed_numbers=arm.seed_numbers,
        matched=arm.matched,
        null_scale=arm.null_scale,
        test_paths={name: np.stack([path(seed.test) for seed in arm.seeds])},
        control_paths={name: np.stack([path(arm.references(seed)) for seed in arm.seeds])},
        nulls={name: np.stack(known) if known else np.zeros((0, *blank.shape))},
        raw_test=np.stack([raw(seed.test) for seed in arm.seeds]),
        raw_control=np.stack([raw(seed.control) for seed in arm.seeds]),
    )


def signal_families(signals: Sequence[PairedSignal], method: Method = "bh") -> list[list[Family]]:
    """Return the families of each signal; the FDR is held over all signals of one reduction together.

    The head has one module: as a family of its own it would be flagged by luck alone at the rate q.
    """
    found = [
        [
            family_of(
                item, item.statistic, reduction,
                (item.gaps[item.statistic.name], item.nulls[item.statistic.name], np.ones(len(item.tensors))), method,
            )
            for reduction in REDUCTIONS
        ]
        for item in signals
    ]  # fmt: skip
    for at in range(len(REDUCTIONS)):
        q = adjusted(np.concatenate([families[at].screen.p for families in found] or [np.zeros(0)]), method)
        for families in found:
            size = len(families[at].screen.p)
            families[at] = replace(families[at], screen=replace(families[at].screen, q=q[:size]))
            q = q[size:]
    return found


def growth(item: PairedSignal, path: FloatArray, warmup: int) -> FloatArray:
    """Return how far a paired path [L, K] has left its own past in the harmful direction [L, K]."""
    moved = after_warmup(path - own_past(path, item.steps, warmup), item.steps, warmup)
    return np.abs(moved) if item.statistic.harm == 0 else item.statistic.harm * moved


def growth_score(item: PairedSignal, warmup: int, loss_onsets: dict[int, int]) -> RuleScore | None:
    """Score the growth rule on every pair; the null pairs stand for BF16. None where nothing is paired."""
    name = item.statistic.name
    gaps = zip(item.seed_numbers, item.gaps[name], strict=True)
    own = {seed: held(growth(item, path, warmup)) for seed, path in gaps if np.isfinite(path).any()}
    if not own:
        return None
    nulls = [held(growth(item, path, warmup)) for path in item.nulls[name]]
    return score_of(GROWTH_RULES[name], own, nulls, item.steps, loss_onsets)


@dataclass(frozen=True)
class SignalLevels:
    """A signal at the end of the run, by module [L], the median over seeds: as recorded in both arms."""

    statistic: Statistic
    places: tuple[Signal, ...]
    test: FloatArray
    control: FloatArray

    @property
    def distance(self) -> FloatArray:
        """Arm over BF16 on the scale tested [L], NaN where not paired."""
        return scaled(self.statistic.name, self.test) - scaled(self.statistic.name, self.control)


def levels_of(item: PairedSignal) -> SignalLevels:
    """Return the levels of a signal at the end of the run, where each run ended."""

    def at_end(raw: FloatArray) -> FloatArray:
        rows = [level(own_steps(path, item.steps)[0]) for path in raw]
        return nanmedian(np.stack(rows), 0) if rows else np.full(len(item.tensors), np.nan)

    return SignalLevels(item.statistic, item.tensors, at_end(item.raw_test), at_end(item.raw_control))
