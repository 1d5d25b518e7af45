"""The answer: one verdict per recipe, contrasts between recipes, and the gate that a script acts on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.schema import EXIT_OF_GATE, Gate, Outcome

if TYPE_CHECKING:
    from fp8parity_analysis.curves import CurveSet

__all__ = ["Contrast", "Criteria", "Evidence", "Judgement", "Verdict", "judge", "strict_json"]

_GATE_ORDER = (Gate.PASS, Gate.INCONCLUSIVE, Gate.FAIL, Gate.INVALID)
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Verdict:
    """What the comparison of one recipe with its control concluded.

    Gaps, intervals and margins are fractions of the loss, positive is worse than the control; None stands for
    what is not known. `need_seeds` is the total number of seeds that would settle the question (None: not
    needed, or more than 30). `diverged_seeds` are seed numbers. `alpha` is the size of each one-sided test.
    """

    recipe: str
    outcome: Outcome
    gate: Gate
    gap: float | None
    interval: Bounds
    margin: float
    provisional: bool
    basis: str
    endpoint: str
    eval_precision: str
    alpha: float
    horizon_tokens: int | None
    n_seeds: int
    n_null_pairs: int
    token_cost: Mapping[str, Any] | None
    trajectory_p: float | None
    onset_step: int | None
    diverged_seeds: tuple[int, ...]
    need_seeds: int | None
    noise_floor: Mapping[str, Any]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON values under exactly `schema.VERDICT_KEYS`."""
        return {name: strict_json(getattr(self, name)) for name in schema.VERDICT_KEYS}


@dataclass(frozen=True)
class Contrast:
    """Recipe `a` against recipe `b`, paired by seed: gap = ln loss(a) - ln loss(b), positive is `a` worse.

    Seeds, size and method are the verdicts': with declared looks those of the look that the seeds in common have
    reached (neither interval nor p before the first), with `anytime` the t e-process. `p` is two-sided, adjusted for
    the looks, and per comparison or, where `correction="holm"` was declared, Holm-adjusted over all pairwise
    contrasts; intervals are always per comparison. A trend over an ordered axis is a contrast too: `a` is "trend over
    AXIS", `b` lists the recipes in order, and the gap is the change per unit of the axis.
    """

    a: str
    b: str
    gap: float | None
    interval: Bounds
    p: float | None
    n_seeds: int

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON values under exactly `schema.CONTRAST_KEYS`."""
        return {name: strict_json(getattr(self, name)) for name in schema.CONTRAST_KEYS}


@dataclass(frozen=True)
class Evidence:
    """The numbers behind a verdict, for pictures and tables; fractions of the loss.

    `steps` [K] is the common grid; `gap_by_seed` [n][K] the log gap, None where masked; `endpoint_by_seed`
    [n].
    """

    recipe: str
    seeds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    gap_by_seed: tuple[tuple[float | None, ...], ...] = ()
    endpoint_by_seed: tuple[float | None, ...] = ()
    tail_from_step: int | None = None
    p_values: Mapping[str, float | None] = field(default_factory=dict)
    onset_interval: tuple[int, int] | None = None
    detection_step: int | None = None
    slope_per_run: float | None = None
    leave_one_out: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """All verdicts of a study under one set of criteria, in the order of the recipes; null arms come last."""

    criteria: Criteria
    verdicts: tuple[Verdict, ...]
    contrasts: tuple[Contrast, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    post_hoc: bool = False
    null_recipes: frozenset[str] = frozenset()

    @property
    def gate(self) -> Gate:
        """The worst gate of the study: pass < inconclusive < fail < invalid.

        A null arm beside recipes counts only when it fails or is invalid: it is there to measure noise, and
        a few null pairs are seldom enough for a verdict of their own.
        """
        counted = [verdict.gate for verdict in self.verdicts if self._counts(verdict)]
        return max(counted, key=_GATE_ORDER.index, default=Gate.INVALID)

    def _counts(self, verdict: Verdict) -> bool:
        only_nulls = all(item.recipe in self.null_recipes for item in self.verdicts)
        return (
            only_nulls or verdict.recipe not in self.null_recipes or verdict.gate in (Gate.FAIL, Gate.INVALID)
        )

    @property
    def exit_code(self) -> int:
        """The exit code that belongs to the gate."""
        return EXIT_OF_GATE[self.gate]

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON values under exactly `schema.JUDGEMENT_KEYS`."""
        criteria = self.criteria.to_json() | {"digest": self.criteria.digest(), "post_hoc": self.post_hoc}
        return {
            "schema_version": schema.SCHEMA_VERSION,
            "criteria": criteria,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "contrasts": [contrast.to_json() for contrast in self.contrasts],
        }


def strict_json(value: Any) -> Any:
    """Return `value` as JSON that every reader accepts: no NaN, no infinity, no numpy types, string keys."""
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [strict_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return strict_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def judge(curves: CurveSet, criteria: Criteria, *, post_hoc: bool = False) -> Judgement:
    """Judge every recipe of `curves` against its control.

    Deterministic: permutation tests draw from a generator with a fixed seed. `post_hoc` says that the
    criteria were changed after the runs started. `BadInputError` when the curves hold nothing but control
    runs or not the declared endpoint.
    """
    from fp8parity_analysis.study import judge_study

    return judge_study(curves, criteria, post_hoc=post_hoc)
