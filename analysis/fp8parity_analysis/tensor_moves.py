"""Early warnings: rules that a single run can break while it trains, scored against what the BF16 runs do.

Each rule looks at a tensor's own past, not at its pair, so it also sees what moves in both arms. The fixed limit is a
convention. The calibrated one is the largest value that any BF16 run of the study reaches over all tensors and probes,
where that is more: a further run to which FP8 does nothing exceeds it with probability 1 / (b + 1) at most, b being
the number of BF16 runs (exchangeability).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis.tensor_absolute import format_family
from fp8parity_analysis.tensor_onset import Onset, lasting, onset_of, resolution_at
from fp8parity_analysis.tensor_panel import ONE_SCALE
from fp8parity_analysis.tensor_reduce import nanmedian, quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_panel import FloatArray, IntArray, Panel, Tensor

_BASELINE_FRAC, _MIN_BASELINE = 0.25, 5
"""The past that a tensor is measured by: the first quarter of its probes after warm-up, five at least."""
_RANGE_LN: Mapping[str, float] = {
    "e4m3": float(np.log(448.0 * 2.0**6)),
    "e5m2": float(np.log(57344.0 * 2.0**14)),
}
"""ln of largest over smallest normal value: an element that is this much smaller than amax becomes subnormal."""
_USUAL_TIMES = 3.0
_RISE_ONLY_ABOVE = 0.01
"""An underflow share below this has not risen to anything, whatever its logit says."""


@dataclass(frozen=True)
class EarlyRule:
    """A rule and its conventional `limit`; more is worse. `explains` marks rules whose breach makes a candidate."""

    name: str
    words: str
    limit: float
    unit: str
    explains: bool


@dataclass(frozen=True)
class PanelRule(EarlyRule):
    """A rule about casts: `value` turns a panel, warm-up and horizon into how far each tensor has moved [L, K]."""

    value: Callable[[Panel, int, int], FloatArray]


def own_past(paths: FloatArray, steps: IntArray, warmup: int) -> FloatArray:
    """Return the median of each row's first probes after warm-up, `paths` [L, K] to [L, 1]."""
    late = np.flatnonzero(steps > warmup)
    return nanmedian(paths[:, late[: baseline_count(len(late))]], -1)[:, None]


def baseline_count(n_late: int) -> int:
    """Return how many of the probes after warm-up are a tensor's own past."""
    return max(_MIN_BASELINE, round(_BASELINE_FRAC * n_late))


def after_warmup(values: FloatArray, steps: IntArray, warmup: int) -> FloatArray:
    """Return the values [L, K], NaN up to the end of warm-up."""
    return np.where((steps > warmup)[None, :], values, np.nan)


def _baseline(paths: FloatArray, panel: Panel, warmup: int) -> FloatArray:
    return own_past(paths, panel.steps, warmup)


def _after(values: FloatArray, panel: Panel, warmup: int) -> FloatArray:
    return after_warmup(values, panel.steps, warmup)


def _sqnr_drop(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    sqnr = panel.paths["sqnr"]
    return _after(_baseline(sqnr, panel, warmup) - sqnr, panel, warmup)


def _underflow_rise(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    logit = panel.paths["underflow"]
    with np.errstate(invalid="ignore"):
        high = panel.columns["underflow_frac"] >= _RISE_ONLY_ABOVE
    return _after(np.where(high, logit - _baseline(logit, panel, warmup), 0.0), panel, warmup)


def _spread_growth(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    whole = np.array([grain == ONE_SCALE for grain in panel.granularity], dtype=np.bool_)[:, None]
    spread = np.where(whole, panel.paths["spread"], np.nan)
    return _after(spread - _baseline(spread, panel, warmup), panel, warmup)


def _range_crossing(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    """Return ln(amax/rms) extrapolated to the horizon over the ln range of the format, for one scale per tensor.

    With scales from the present tensor amax itself cannot leave the range; what leaves it, at the lower end, is the
    bulk of a tensor whose amax runs away from its rms.
    """
    spread = panel.paths["spread"]
    width = max(4, spread.shape[1] // 4)
    found = np.full(spread.shape, np.nan)
    families = [format_family(str(next((name for name in row if name), ""))) for row in panel.formats]
    limit = np.array([_RANGE_LN.get(family, np.inf) for family in families])
    whole = np.array([grain == ONE_SCALE for grain in panel.granularity], dtype=np.bool_)
    x = panel.steps.astype(np.float64)
    for at in range(width, spread.shape[1]):
        y, span = spread[:, at - width : at + 1], x[at - width : at + 1]
        centred = span - span.mean()
        slope = (y * centred).sum(axis=1) / (centred**2).sum()
        found[:, at] = (spread[:, at] + slope * max(0.0, horizon - x[at])) / limit
    return _after(np.where(whole[:, None], found, np.nan), panel, warmup)


def _saturation(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    return panel.columns["saturated_frac"]


def _scale_changes(panel: Panel, warmup: int, horizon: int) -> FloatArray:
    """Return how often the scale changed by more than a factor of 2, and of three times what is usual, so far.

    Usual is the tensor's largest change in its own past: gradients change by half from probe to probe in any run.
    """
    scale = panel.paths["scale"]
    late = np.flatnonzero(panel.steps > warmup)
    change = np.abs(np.diff(scale, axis=1, prepend=scale[:, :1]))
    usual = quietly(np.nanmax, change[:, late[: baseline_count(len(late))]], axis=1, initial=0.0)
    with np.errstate(invalid="ignore"):
        moved = change > np.fmax(np.log(2.0) + 1e-9, _USUAL_TIMES * usual)[:, None]
    return np.cumsum(moved & (panel.steps > warmup)[None, :], axis=1).astype(np.float64)


RULES: tuple[PanelRule, ...] = (
    PanelRule("saturation", "saturated share above zero", 0.0, "", False, _saturation),
    PanelRule("sqnr_drop", "SQNR below its own past", 3.0, "dB", True, _sqnr_drop),
    PanelRule(
        "underflow_rise",
        "underflow odds over their own past",
        float(np.log(10.0)),
        "ln",
        True,
        _underflow_rise,
    ),
    PanelRule("spread_growth", "amax/rms over its own past", float(np.log(4.0)), "ln", True, _spread_growth),
    PanelRule(
        "range_crossing", "amax/rms heading out of the format's range", 1.0, "", False, _range_crossing
    ),
    PanelRule(
        "scale_changes",
        "scale changes beyond a factor of 2 and what is usual",
        3.0,
        "",
        False,
        _scale_changes,
    ),
)


@dataclass(frozen=True)
class RuleScore:
    """What a rule did over a study's runs of one arm.

    `hits` of `n_runs` runs of the arm break the conventional `limit` in any tensor, `control_hits` of `n_control` BF16
    runs do (null pairs, for a rule about pairs); `calibrated` is the limit that none of these exceeds,
    `calibrated_hits` the arm's runs beyond it and `false_alarms` the bound on that rate, None with no BF16 run. `onset`
    is that of the first tensor by seed; `tensors` counts those that break the limit in any seed.
    """

    rule: EarlyRule
    hits: int
    n_runs: int
    control_hits: int
    n_control: int
    calibrated: float
    calibrated_hits: int
    false_alarms: float | None
    onset: Onset
    tensors: int


@dataclass(frozen=True)
class Move:
    """A tensor that breaks a rule: (seed, step, resolution) in the arm, and in how many seeds the BF16 arm does too.

    `in_control` is None where no BF16 run recorded the cast.
    """

    tensor: Tensor
    rule: EarlyRule
    found: tuple[tuple[int, int, int], ...]
    in_control: int | None
    n_seeds: int
    worst: float


def held(values: FloatArray) -> FloatArray:
    """Return the largest value that lasts, by tensor and first probe; one probe alone is no warning."""
    return lasting(np.where(np.isnan(values), -np.inf, values))


def warnings_of(
    arm: ArmTensors, *, warmup: int, horizon: int, loss_onsets: dict[int, int]
) -> tuple[tuple[RuleScore, ...], tuple[Move, ...]]:
    """Score every rule on every run of an arm and its control; `warmup` and `horizon` in optimizer steps."""
    scored = [_score(rule, arm, (warmup, horizon), loss_onsets) for rule in RULES]
    return tuple(item for item, _ in scored), tuple(move for _, moves in scored for move in moves)


def _score(
    rule: PanelRule, arm: ArmTensors, span: tuple[int, int], loss_onsets: dict[int, int]
) -> tuple[RuleScore, list[Move]]:
    own = {seed.seed: held(rule.value(seed.test[0], *span)) for seed in arm.seeds}
    control = {
        seed.seed: [held(rule.value(panel, *span)) for panel in (*seed.control, *seed.null)]
        for seed in arm.seeds
    }
    idle = [held(rule.value(panel, *span)) for group in arm.idle for panel in group]
    runs = [*(values for group in control.values() for values in group), *idle]
    score = score_of(rule, own, runs, arm.steps, loss_onsets)
    return score, _moves(rule, arm, own, control) if rule.explains else []


def score_of(
    rule: EarlyRule,
    own: Mapping[int, FloatArray],
    runs: Sequence[FloatArray],
    steps: IntArray,
    loss_onsets: dict[int, int],
) -> RuleScore:
    """Score a rule from what lasts in the arm's runs by seed and in BF16 runs, or null pairs: each `held` [L, K']."""
    peaks = [float(values.max()) if values.size else -np.inf for values in runs]
    calibrated = max([rule.limit, *peaks])
    firsts = {seed: _first(values, rule.limit) for seed, values in own.items()}
    by_seed = []
    moved: set[int] = set()
    for seed, first in firsts.items():
        moved.update(np.flatnonzero(first >= 0).tolist())
        if (first >= 0).any():
            at = int(first[first >= 0].min())
            by_seed.append((seed, int(steps[at]), resolution_at(steps, at)))
    return RuleScore(
        rule=rule,
        hits=len(by_seed),
        n_runs=len(own),
        control_hits=sum(peak > rule.limit for peak in peaks),
        n_control=len(runs),
        calibrated=calibrated,
        calibrated_hits=sum(bool((values > calibrated).any()) for values in own.values()),
        false_alarms=max(0.01, 1.0 / (len(runs) + 1)) if runs else None,
        onset=onset_of(by_seed, loss_onsets),
        tensors=len(moved),
    )


def _first(held: FloatArray, limit: float) -> npt.NDArray[np.int64]:
    """Return the first probe of a lasting stay beyond the limit by tensor [L], -1 for none."""
    beyond = held > limit
    if not beyond.shape[-1]:
        return np.full(len(held), -1, dtype=np.int64)
    return np.where(beyond.any(axis=1), beyond.argmax(axis=1), -1).astype(np.int64)


def _moves(
    rule: EarlyRule,
    arm: ArmTensors,
    own: Mapping[int, FloatArray],
    control: Mapping[int, Sequence[FloatArray]],
) -> list[Move]:
    found = []
    compared = any(control.values())
    firsts = {seed: _first(values, rule.limit) for seed, values in own.items()}
    for row, tensor in enumerate(arm.tensors):
        hits = tuple(
            (seed, int(arm.steps[first[row]]), resolution_at(arm.steps, int(first[row])))
            for seed, first in firsts.items()
            if first[row] >= 0
        )
        if hits:
            also = sum(
                any(values.size and values[row].max() > rule.limit for values in control[seed])
                for seed, _, _ in hits
            )
            worst = max(float(own[seed][row].max()) for seed, _, _ in hits)
            found.append(Move(tensor, rule, hits, also if compared else None, len(arm.seeds), worst))
    return found
