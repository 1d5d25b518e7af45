"""What is wrong with a cast whatever the noise: findings that need no second seed and no test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from fp8parity_analysis.tensor_onset import LASTING, lasting, resolution_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fp8parity_analysis.tensor_panel import Panel, Tensor

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

_E4M3, _E5M2 = "e4m3", "e5m2"
DECLARED_FORMATS: Mapping[str, Mapping[str, str]] = {
    "tensorwise": {"input": _E4M3, "weight": _E4M3, "grad_output": _E5M2},
    "rowwise": {"input": _E4M3, "weight": _E4M3, "grad_output": _E4M3},
    "rowwise_with_gw_hp": {"input": _E4M3, "weight": _E4M3, "grad_output": _E4M3},
    "blockwise": {"input": _E4M3, "weight": _E4M3, "grad_output": _E4M3},
    "blockwise_requant": {"input": _E4M3, "weight": _E4M3, "grad_output": _E4M3},
}
"""Format of each operand by precision recipe, as the harness casts them. All of these scale by the present tensor."""

SQNR_BOUND = {_E4M3: 20.0 * np.log10(16.0), _E5M2: 20.0 * np.log10(8.0)}
"""SQNR in dB below which a cast lost more than rounding can: a normal number of m mantissa bits is rounded with a
relative error of at most 2^-(m+1), so without underflow, subnormals and saturation SQNR >= 20 log10(2^(m+1))."""

LARGE_UNDERFLOW = 0.05
"""Share of the non-zero elements turned into zero that is called large: a Gaussian whose amax is 64 times its rms loses
0.01 % in e4m3 under one scale (elements below amax / 448 / 1024)."""
_AMAX_FLOOR = 1e-12
"""Smallest amax a scale is computed from (torchao's EPS); below it the scale stands still by design."""
_MOVED, _MOVED_POWER_OF_TWO = 1.01, 2.05
"""Ratio of amax that must change a scale, by bf16's resolution; scales rounded to 2^k may stand for a factor of 2."""


def format_family(name: str) -> str:
    """Return `e4m3` or `e5m2` of a format's name, whatever its variant (`fn`, `fnuz`)."""
    return next((family for family in (_E4M3, _E5M2) if name.startswith(family)), name)


def is_current_scaled(recipe: str) -> bool:
    """Return whether the recipe is known to scale by the present tensor, so that it cannot saturate."""
    return recipe in DECLARED_FORMATS


@dataclass(frozen=True)
class Rule:
    """A rule: `mask` gives, of a panel and a recipe, where it is broken [L, K]; `value` what to quote [L, K].

    `brief` marks rules that a single probe may break harmlessly: a stay of `LASTING` probes counts for more.
    """

    name: str
    words: str
    cast_fault: bool
    brief: bool
    mask: Callable[[Panel, str], BoolArray]
    value: Callable[[Panel], FloatArray]
    worst: int = 1


def _formats(panel: Panel, recipe: str) -> BoolArray:
    declared = DECLARED_FORMATS.get(recipe, {})
    wanted = np.array([declared.get(tensor.operand, "") for tensor in panel.tensors], dtype=object)
    families = families_of(panel)
    known = (families != "") & (wanted != "")[:, None]
    return np.asarray(known & (families != wanted[:, None]), dtype=np.bool_)


def families_of(panel: Panel) -> npt.NDArray[np.object_]:
    """Return `e4m3` or `e5m2` of every cast [L, K], empty where not recorded."""
    codes, names = pd.factorize(panel.formats.ravel(), use_na_sentinel=False)
    families = np.array([format_family(str(name)) for name in names], dtype=object)
    return np.asarray(families[codes].reshape(panel.formats.shape), dtype=object)


def _positive(column: str) -> Callable[[Panel, str], BoolArray]:
    def mask(panel: Panel, recipe: str) -> BoolArray:
        with np.errstate(invalid="ignore"):
            return np.asarray(panel.columns[column] > 0, dtype=np.bool_)

    return mask


def _saturated(panel: Panel, recipe: str) -> BoolArray:
    if not is_current_scaled(recipe):
        return np.zeros(panel.formats.shape, dtype=np.bool_)
    return _positive("saturated_count")(panel, recipe)


def _low_sqnr(panel: Panel, recipe: str) -> BoolArray:
    bound = np.zeros(panel.formats.shape)
    families = families_of(panel)
    for name, value in SQNR_BOUND.items():
        bound[families == name] = value
    with np.errstate(invalid="ignore"):
        return np.asarray(panel.columns["sqnr_db"] < bound, dtype=np.bool_)


def _large_underflow(panel: Panel, recipe: str) -> BoolArray:
    with np.errstate(invalid="ignore"):
        return np.asarray(panel.columns["underflow_frac"] >= LARGE_UNDERFLOW, dtype=np.bool_)


def frozen_scales(panel: Panel) -> BoolArray:
    """Return where a scale stands still although amax moved [L, K]: from the second probe of the standstill on.

    The smallest scale of a tensor belongs to its largest group, so it must follow the tensor's amax.
    """
    scale, other, amax = (panel.columns[name] for name in ("scale_min", "scale_max", "amax"))
    found = np.zeros(scale.shape, dtype=np.bool_)
    if not scale.size:
        return found
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(scale)
        limit = np.where(_all_whole(exponent), _MOVED_POWER_OF_TWO, _MOVED)
        start = np.zeros(len(scale), dtype=np.int64)
        low, high = amax[:, 0].copy(), amax[:, 0].copy()
        for at in range(1, scale.shape[1]):
            same = (scale[:, at] == scale[:, at - 1]) & (other[:, at] == other[:, at - 1])
            start = np.where(same, start, at)
            low = np.where(same, np.fmin(low, amax[:, at]), amax[:, at])
            high = np.where(same, np.fmax(high, amax[:, at]), amax[:, at])
            stuck = (at - start + 1 >= LASTING) & (low > _AMAX_FLOOR) & (high > limit * low)
            for row in np.flatnonzero(stuck):
                found[row, start[row] + 1 : at + 1] = True
    return found


def _all_whole(exponent: FloatArray) -> BoolArray:
    known = np.isfinite(exponent)
    return np.asarray(
        known.any(axis=1) & (~known | (exponent == np.round(exponent))).all(axis=1), dtype=np.bool_
    )


def _column(name: str) -> Callable[[Panel], FloatArray]:
    return lambda panel: panel.columns[name]


RULES: tuple[Rule, ...] = (
    Rule("format", "cast in another format than the recipe declares", True, False, _formats, _column("sqnr_db"), -1),
    Rule("nonfinite", "non-finite elements", False, False, _positive("nonfinite_count"), _column("nonfinite_count")),
    Rule(
        "frozen_scale",
        "scale stands still although amax moved",
        True,
        False,
        lambda panel, _: frozen_scales(panel),
        _column("scale_min"),
    ),
    Rule("saturated", "saturation in a recipe that scales by the present tensor", True, False, _saturated,
         _column("saturated_frac")),
    Rule("sqnr_bound", "SQNR below what rounding alone can cost", False, True, _low_sqnr, _column("sqnr_db"), -1),
    Rule("underflow", "large underflow", False, True, _large_underflow, _column("underflow_frac")),
    Rule("zero_amax", "scaling groups of zeros", False, True, _positive("zero_amax_groups"),
         _column("zero_amax_groups")),
)  # fmt: skip
"""In order of weight: a cast that is not the declared one explains more than what a right cast does to a tensor."""


@dataclass(frozen=True)
class Hit:
    """One rule broken by one tensor in one run: since `step` (the probe before was `resolution` steps earlier).

    `worst` is the value to quote, `share` the share of the probes that break the rule, `lasts` whether `LASTING`
    probes in a row do (or all, when there are fewer).
    """

    tensor: Tensor
    rule: Rule
    step: int
    resolution: int
    worst: float
    share: float
    lasts: bool


def hits_of(panel: Panel, recipe: str) -> list[Hit]:
    """Return every rule that every tensor of a run breaks, in the order of `RULES`."""
    return [hit for rule in RULES for hit in _hits(rule, panel, recipe)]


def _hits(rule: Rule, panel: Panel, recipe: str) -> list[Hit]:
    if panel.empty:
        return []
    mask = rule.mask(panel, recipe)
    probed = np.maximum(1, np.isfinite(panel.columns["element_count"]).sum(axis=1))
    held = lasting(mask.astype(np.float64)) > 0
    values = rule.value(panel)
    found = []
    for row in np.flatnonzero(mask.any(axis=1)):
        broken = np.flatnonzero(mask[row])
        lasts = bool(held[row].any()) or len(broken) == probed[row]
        # a lasting stay dates the finding; what single probes did before it is another matter
        first = int(held[row].argmax()) if rule.brief and held[row].any() else int(broken[0])
        quoted = values[row, broken]
        quoted = quoted[~np.isnan(quoted)]
        worst = float(quoted.max() if rule.worst > 0 else quoted.min()) if len(quoted) else float("nan")
        found.append(
            Hit(
                panel.tensors[row],
                rule,
                int(panel.steps[first]),
                resolution_at(panel.steps, first),
                worst,
                float(len(broken) / probed[row]),
                lasts,
            )
        )
    return found
