"""Findings about one tensor put together, and tensors put in the order in which to look at them.

A candidate is never called a cause here: what moved first, and whether BF16 moves too, says where to look. The run
with that layer held in BF16 is what decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.tensor_onset import Onset
from fp8parity_analysis.tensor_signals import MODULE_SIGNALS, Place, Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Origin = Literal["cast", "both", "fp8", "unknown"]
Basis = Literal["absolute", "tested", "moved", "signal", "brief", "descriptive"]

ORIGIN_WORDS: dict[Origin, str] = {
    "cast": "the cast is not what the recipe declares",
    "both": "the BF16 arm's tensor does it too: possible cause",
    "fp8": "in the FP8 arm only: possible consequence",
    "unknown": "whether the BF16 arm's tensor does it too is not settled",
}
BASIS_WORDS: dict[Basis, str] = {
    "absolute": "needs no test",
    "tested": "tested over seeds",
    "moved": "early-warning rule",
    "signal": "a signal, tested over seeds",
    "brief": "minor, needs no test",
    "descriptive": "described only",
}
_TIERS: dict[Basis, int] = {
    "absolute": 0, "tested": 1, "moved": 1, "signal": 2, "brief": 3, "descriptive": 4,
}  # fmt: skip
"""A signal comes after the casts: it shows that something upstream changed, and a cast may be what did."""


@dataclass(frozen=True)
class Reason:
    """One finding about one tensor.

    `order` ranks kinds of absolute findings; `strength` compares findings of one kind, in units of the smallest one
    worth a word; `effect` is on the tested scale; `q` the FDR-adjusted p; `seeds` of `of` seeds show it; `in_bf16`
    tells whether the BF16 arm's what-if cast shows it too, None where that is not known.
    """

    name: str
    text: str
    basis: Basis
    cast_fault: bool
    order: int
    strength: float
    seeds: int
    of: int
    onset: Onset
    in_bf16: bool | None
    effect: float | None = None
    q: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A tensor to look at, or a module by its signal, with all that speaks for it.

    `onset` is that of the leading reason.
    """

    tensor: Place
    reasons: tuple[Reason, ...]
    origin: Origin

    @property
    def leading(self) -> Reason:
        """The reason that places it."""
        return self.reasons[0]

    @property
    def basis(self) -> Basis:
        """What the leading reason rests on."""
        return self.leading.basis

    @property
    def onset(self) -> Onset:
        """Since when, by the leading reason."""
        return self.leading.onset

    @property
    def weight(self) -> tuple[float, ...]:
        """What sorts candidates, of one arm or of several: least comes first."""
        return _reason_key(self.leading)

    @property
    def follow_up(self) -> str:
        """The run that would confirm it."""
        first = "check the cast, then run" if self.origin == "cast" else "run"
        return f"{first} again with {self.layers} held in BF16 (precision.exclude)"

    @property
    def layers(self) -> str:
        """The linears to hold in BF16, a pattern for `precision.exclude`: for attention and blocks all below them."""
        whole = isinstance(self.tensor, Signal) and self.tensor.name in MODULE_SIGNALS
        return f"{self.tensor.fqn}.*" if whole else self.tensor.fqn

    @property
    def when(self) -> str:
        """The onset with its resolution: the truth lies between this probe and the one before it."""
        if self.onset.step is None:
            return fmt.NOTHING
        return f"{self.onset.step:,} (after {self.onset.step - self.onset.resolution:,})"

    @property
    def lead_words(self) -> str:
        """How long before the loss, in how many seeds, and the sign test's p where there are seeds enough for one."""
        onset = self.onset
        if onset.lead is None:
            return fmt.NOTHING
        sign = fmt.number(onset.lead, 0)
        tested = "" if onset.p is None else f", p {fmt.p_value(onset.p)}"
        return f"{sign} steps (first in {onset.ahead} of {onset.compared}{tested})"


def candidates_of(reasons: Iterable[tuple[Place, Reason]]) -> tuple[Candidate, ...]:
    """Return one candidate per tensor, its reasons and the candidates themselves in order of weight."""
    by_tensor: dict[Place, list[Reason]] = {}
    for tensor, reason in reasons:
        by_tensor.setdefault(tensor, []).append(reason)
    found = [
        Candidate(tensor, tuple(ordered), _origin(ordered))
        for tensor, items in by_tensor.items()
        for ordered in [sorted(_without_echo(items), key=_reason_key)]
    ]
    return tuple(sorted(found, key=lambda item: (item.weight, -_total(item.reasons))))


def _without_echo(reasons: Sequence[Reason]) -> list[Reason]:
    """Return the reasons without those about the scale that amax gives too: one is the other's reciprocal."""
    names = {reason.name for reason in reasons}
    return [
        reason for reason in reasons if reason.name.replace("scale_", "amax_", 1) not in names - {reason.name}
    ]


def _reason_key(reason: Reason) -> tuple[float, ...]:
    """Return what sorts reasons: tier, kind, share of seeds that lead the loss, lead, onset, strength."""
    onset = reason.onset
    step = float("inf") if onset.step is None else float(onset.step)
    lead = 0.0 if onset.lead is None else onset.lead
    tier = _TIERS[reason.basis]
    kind = reason.order if reason.basis in ("absolute", "brief") else 0
    return (tier, kind, float(onset.step is None), -onset.share_ahead, -lead, step, -reason.strength)


def _total(reasons: Sequence[Reason]) -> float:
    return sum(reason.strength for reason in reasons)


def _origin(reasons: Sequence[Reason]) -> Origin:
    if reasons[0].cast_fault:
        return "cast"
    told = next((reason.in_bf16 for reason in reasons if reason.in_bf16 is not None), None)
    return "unknown" if told is None else "both" if told else "fp8"
