"""What is decided before the run: margin, error rate, endpoint and how evidence may be combined."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.gap import BLOW_UP_GAP

Endpoint = Literal["held_out", "train", "final"]
EvalPrecision = Literal["bf16", "arm"]
Spending = Literal["bonferroni", "obrien_fleming"]
Correction = Literal["per_comparison", "holm"]
EarlyStop = Literal["fail"]

_LATER = ("noise_df", "early_stop")
_CHOICES: dict[str, tuple[str, ...]] = {
    "endpoint": ("held_out", "train", "final"),
    "eval_precision": ("bf16", "arm"),
    "spending": ("bonferroni", "obrien_fleming"),
    "correction": ("per_comparison", "holm"),
}


@dataclass(frozen=True)
class Criteria:
    """The rules of a comparison, fixed before it starts; fractions of the loss unless said otherwise.

    margin            largest gap that counts as equal (0.0025 = 0.25 %)
    confidence        of the two-sided interval; each one-sided test has size (1 - confidence) / 2
    endpoint          `held_out` and `train`: mean over the last `tail_fraction`; `final`: the last evaluation
    eval_precision    whose forward gave the held-out loss: `bf16` in every arm, or the `arm`'s own
    split             the held-out set that decides; others are described only
    null_matched      declares that the null pairs carry the noise of an FP8 pair, so their variance is pooled
    noise_sd          sd of one run around the mean of its own seed, known from an earlier study; used where
                      a single pair has no noise estimate of its own
    noise_df          degrees of freedom behind `noise_sd` where an earlier study measured it; None: taken as exact
    looks             numbers of seeds at which the study is looked at; empty: one look
    spending          how the error rate is split over the looks
    anytime           intervals that hold at any number of seeds (t e-process) instead of declared looks
    correction        `holm` also corrects the verdicts over the recipes of a study
    tail_fraction     last share of the common evaluations that forms the endpoint
    speedup           measured throughput of FP8 over BF16, against which a token cost is weighed
    burn_in_step      first step that the trajectory test uses (at least the end of warm-up)
    allow_prefix      judge a shorter run on the common prefix, labelled with its last step
    early_stop        `fail`: an arm that has failed at a declared look gets no further seeds; None: all are trained
    trend             ordered values of recipes, as pairs (recipe, value), for the trend over an axis
    """

    margin: float = 0.0025
    confidence: float = 0.90
    endpoint: Endpoint = "held_out"
    eval_precision: EvalPrecision = "bf16"
    split: str = schema.HELD_OUT
    null_matched: bool = False
    noise_sd: float | None = None
    looks: tuple[int, ...] = ()
    spending: Spending = "bonferroni"
    anytime: bool = False
    correction: Correction = "per_comparison"
    tail_fraction: float = 0.10
    speedup: float | None = None
    burn_in_step: int = 0
    allow_prefix: bool = False
    trend: tuple[tuple[str, float], ...] = ()
    noise_df: int | None = None
    early_stop: EarlyStop | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        _check_margin(self.margin)
        _check_range("confidence", self.confidence, 0.5, 1.0, "0.90 (two one-sided tests of 5 %)")
        _check_range("tail_fraction", self.tail_fraction, 0.0, 1.0, "0.10 for the last tenth", closed=True)
        if self.noise_sd is not None:
            _check_range("noise_sd", self.noise_sd, 0.0, 0.5, "a fraction of the loss such as 0.0015")
        if self.noise_df is not None and self.noise_sd is None:
            raise BadInputError("noise_df: says how well noise_sd is known; give noise_sd too")
        if self.noise_df is not None:
            _check_range(
                "noise_df",
                self.noise_df,
                0,
                2**31,
                "the df of an earlier study's noise floor",
            )
        if self.speedup is not None:
            _check_range("speedup", self.speedup, 0.0, 1000.0, "a ratio of throughputs such as 1.3")
        _check_looks(self.looks)
        if self.anytime and self.looks:
            raise BadInputError("anytime: true and looks are two answers to one question; keep one of them")
        if self.early_stop is not None:
            _check_early_stop(self)

    @property
    def alpha(self) -> float:
        """Size of each one-sided test before any split over looks."""
        return round((1.0 - self.confidence) / 2.0, 12)

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        # what came later counts only once it is used, so that the digests of earlier studies stay what they were
        used = {
            name: value for name, value in asdict(self).items() if name not in _LATER or value is not None
        }
        canonical = json.dumps(used, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values (tuples become lists)."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return document


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadInputError(f"{name}: {value!r} is not known; write one of {', '.join(choices)}")


def _check_range(
    name: str, value: object, low: float, high: float, remedy: str, *, closed: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInputError(f"{name}: {value!r} is not a finite number; write {remedy}")
    if not (low < value < high or (closed and value == high)):
        end = "]" if closed else ")"
        raise BadInputError(f"{name}: {value!r} is outside ({low:g}, {high:g}{end}; write {remedy}")


def _check_margin(margin: object) -> None:
    """Refuse margins that mean nothing: a gap beyond 5 % to the end of a run is a divergence under any margin."""
    remedy = "a fraction of the loss such as 0.0025, or 0.25%"
    if isinstance(margin, int | float) and BLOW_UP_GAP < margin <= 100 * BLOW_UP_GAP:
        remedy = f"{margin:g}% if per cent were meant; a gap above {BLOW_UP_GAP:.0%} is a divergence anyway"
    _check_range("margin", margin, 0.0, BLOW_UP_GAP, remedy, closed=True)


def _check_early_stop(criteria: Criteria) -> None:
    """Refuse to stop by a rule whose error rates would not be the stated ones."""
    _check_choice("early_stop", criteria.early_stop, ("fail",))
    if not criteria.looks and not criteria.anytime:
        raise BadInputError(
            "early_stop: fail needs the looks at which an arm may fail, declared before the run: write looks, such as "
            "(3, 5, 8), or anytime: true; a test after every seed has no error rate"
        )
    if criteria.correction == "holm":
        raise BadInputError(
            "early_stop: fail cannot go with correction: holm, whose verdict on an arm depends on arms that are not "
            "trained yet; write correction: per_comparison, or leave early_stop out"
        )
    if criteria.null_matched:
        raise BadInputError(
            "early_stop: fail cannot go with null_matched: true, since null runs after the look would change the "
            "variance that the look was decided with; leave one of them out"
        )


def _check_looks(looks: tuple[int, ...]) -> None:
    if any(isinstance(look, bool) or not isinstance(look, int) or look < 2 for look in looks):
        raise BadInputError(f"looks: {looks!r} must be numbers of seeds of at least 2, such as (3, 5, 8)")
    if any(later <= earlier for earlier, later in itertools.pairwise(looks)):
        raise BadInputError(f"looks: {looks!r} must increase, such as (3, 5, 8)")
