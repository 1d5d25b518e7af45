"""What is monitored: the kinds of series, on which scale each is tested, and its share of the false-alarm rate."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8parity_analysis import report_format as fmt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

FALSE_ALARMS_PER_NIGHT = 0.01
"""Probability of an alarm in a night in which nothing changed, over all series together."""

Scale = Literal["linear", "log", "variance"]


@dataclass(frozen=True)
class Kind:
    """A kind of series. `share` of the nightly level; `direction` 1 where a rise is worse, -1 a fall, 0 both.

    `floor` is the smallest step worth a word, on the scale tested; `relative_floor` the same as a share of the
    baseline's plain value. Scales: `log` for losses and speeds; `variance`
    is the cube root of the square, which makes a sample sd normal to a good approximation (Wilson and Hilferty 1931).
    """

    name: str
    share: float
    direction: int
    floor: float
    scale: Scale
    subject: str
    show: Callable[[float], str]
    relative_floor: float = 0.0


def _percent(value: float) -> str:
    return fmt.percent(value, 2)


def _plain_percent(value: float) -> str:
    return fmt.percent(value, 3, signed=False)


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _four(value: float) -> str:
    return f"{value:#.4g}".rstrip(".")


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("gap", 0.40, 1, 0.0005, "linear", "gap of {}", _percent),
        Kind("loss", 0.10, 1, 0.001, "log", "held-out loss of the BF16 control, {}", _loss),
        Kind(
            "noise",
            0.10,
            1,
            0.0,
            "variance",
            "noise floor (sd of a BF16 run within its seed), {}",
            _plain_percent,
            0.10,
        ),
        Kind("speedup", 0.15, -1, 0.02, "log", "throughput of {} over BF16", _ratio),
        Kind("speed", 0.05, -1, 0.02, "log", "BF16 throughput, {}, tokens/s", fmt.count),
        Kind("tensor", 0.20, 0, 0.0, "linear", "{}", _four, 0.10),
    )
}
_TENSOR_RULES: tuple[tuple[str, int, float], ...] = (
    ("sqnr", -1, 1.0),  # decibel
    ("underflow", 1, 0.001),  # share of the elements
    ("saturat", 1, 0.001),
    ("overflow", 1, 0.001),
)
"""Tensor statistics by a part of their last name: which way is worse, smallest step worth a word."""


@dataclass(frozen=True)
class Series:
    """One monitored number, named `kind/what`, such as `gap/rowwise` or `tensor/rowwise/blocks.3.mlp.down/sqnr_db`."""

    name: str

    @property
    def kind(self) -> Kind:
        """The kind; a name that starts with none is a tensor statistic."""
        return KINDS.get(self.name.partition("/")[0], KINDS["tensor"])

    @property
    def what(self) -> str:
        """The name without its kind."""
        return self.name.partition("/")[2] or self.name

    @property
    def title(self) -> str:
        """The series in words."""
        return self.kind.subject.format(self.what)

    def _tensor_rule(self) -> tuple[int, float] | None:
        last = self.name.rpartition("/")[2].lower()
        if self.kind.name != "tensor":
            return None
        return next(((way, floor) for part, way, floor in _TENSOR_RULES if part in last), None)

    @property
    def direction(self) -> int:
        """1 where a rise is worse, -1 where a fall is, 0 where either is."""
        rule = self._tensor_rule()
        return rule[0] if rule else self.kind.direction

    @property
    def floor(self) -> float:
        """The smallest step worth a word, on the scale tested."""
        rule = self._tensor_rule()
        return rule[1] if rule else self.kind.floor

    @property
    def relative_floor(self) -> float:
        """The smallest step worth a word as a share of the baseline, on the scale tested."""
        if self._tensor_rule():
            return 0.0
        share = self.kind.relative_floor
        return (1 + share) ** (2 / 3) - 1 if self.kind.scale == "variance" else share

    def scaled(self, value: float) -> float:
        """Return a value on the scale that is tested; NaN where it has none."""
        if self.kind.scale == "log":
            return math.log(value) if value > 0 else math.nan
        return abs(value) ** (2 / 3) if self.kind.scale == "variance" else value

    def plain(self, value: float) -> float:
        """Return a value back from the scale that is tested."""
        if self.kind.scale == "log":
            return math.exp(value)
        return abs(value) ** 1.5 if self.kind.scale == "variance" else value

    def show(self, value: float) -> str:
        """Return a plain value as text with its unit."""
        decibel = " dB" if self.kind.name == "tensor" and "sqnr_db" in self.name.rpartition("/")[2] else ""
        return self.kind.show(value) + decibel

    def step_words(self, before: float, after: float) -> str:
        """Say a step between two plain values: `gap of rowwise rose by 0.52 %, from +0.01 % to +0.53 %`."""
        verb = "rose" if after > before else "fell"
        if self.kind.scale == "linear":
            by = self.show(abs(after - before)).lstrip("+")
        else:
            by = fmt.percent(abs(after / before - 1), 1, signed=False) if before else "an unknown share"
        return f"{self.title} {verb} by {by}, from {self.show(before)} to {self.show(after)}"


def levels(names: Iterable[str], rate: float = FALSE_ALARMS_PER_NIGHT) -> dict[str, float]:
    """Return the level of each series of one night: weighted Bonferroni, their sum is `rate`.

    A kind has a fixed share of the rate, divided equally among its series, so that two hundred layers do not cost the
    gap its power; the shares of kinds that are absent go to the others in proportion.
    """
    kinds = {name: Series(name).kind for name in names}
    counts = Counter(kind.name for kind in kinds.values())
    total = sum(KINDS[name].share for name in counts)
    return {name: rate * kind.share / total / counts[kind.name] for name, kind in kinds.items()}
