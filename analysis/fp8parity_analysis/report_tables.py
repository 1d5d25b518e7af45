"""Tables of the report that come from the judgement alone: grid, contrasts, noise floor, token cost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.estimate import look_of
from fp8parity_analysis.report_model import Grid, GridBlock, GridCell, GridRow, Table
from fp8parity_analysis.wording import TITLES, level, levels

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.verdict import Contrast, Judgement, Verdict

MAX_CONTRASTS = 60
_KEPT = re.compile(r"-n(\d+(?:_\d+)?)(?=-|$)")


def keys_of(judgement: Judgement) -> dict[str, str]:
    """Return a short, safe anchor for every recipe: names come from outside, anchors do not."""
    return {verdict.recipe: f"r{index}" for index, verdict in enumerate(judgement.verdicts, start=1)}


def place_of(recipe: str) -> tuple[str, str, str]:
    """Return (model, recipe without its count, kept GEMMs at each end) as the matrix spells names."""
    model, _, arm = recipe.rpartition("/")
    kept = _KEPT.search(arm)
    return model, _KEPT.sub("", arm, count=1), kept[1].replace("_", " + ") if kept else ""


def grid_of(judgement: Judgement) -> Grid | None:
    """Return recipe by kept GEMMs by model; None when the study has neither axis."""
    verdicts = [item for item in judgement.verdicts if item.recipe not in judgement.null_recipes]
    places = {place_of(item.recipe): item for item in verdicts}
    models = list(dict.fromkeys(model for model, _, _ in places))
    kept = sorted({n for _, _, n in places}, key=_numeric)
    recipes = list(dict.fromkeys(recipe for _, recipe, _ in places))
    lanes = len(models) * len(kept) * len(recipes)
    if (len(models) < 2 and len(kept) < 2) or 2 * len(verdicts) <= lanes:
        return None  # one axis only, or names that fill no more than half of a grid
    keys = keys_of(judgement)
    digits = fmt.digits_for(judgement.criteria.margin)

    def row(label: str, wanted: Sequence[tuple[str, str, str]]) -> GridRow:
        found = [places.get(place) for place in wanted]
        return GridRow(label, tuple(_cell(item, keys, digits) if item else None for item in found))

    if len(kept) > 1:
        blocks = tuple(
            GridBlock(model if len(models) > 1 else "", rows)
            for model in models
            if (rows := tuple(row(name, [(model, name, n) for n in kept]) for name in recipes))
        )
        columns, corner = tuple(_kept_name(n) for n in kept), "kept in BF16 at each end"
    else:
        rows = tuple(row(name, [(model, name, kept[0]) for model in models]) for name in recipes)
        blocks, columns, corner = (GridBlock("", rows),), tuple(models), "model"
    caption = f"Gap in % of the loss with its interval; margin {fmt.margin(judgement.criteria.margin)}"
    return Grid(caption, corner, columns, blocks)


def _numeric(kept: str) -> tuple[int, ...]:
    return tuple(int(part) for part in kept.split(" + ")) if kept else (-1,)


def _kept_name(kept: str) -> str:
    return f"N = {kept}" if kept else "not stated"


def _cell(verdict: Verdict, keys: Mapping[str, str], digits: int) -> GridCell:
    gap = fmt.NOTHING if verdict.gap is None else fmt.number(100 * verdict.gap, digits)
    bounds = fmt.interval(verdict.interval, digits)
    return GridCell(keys[verdict.recipe], verdict.gate.value, TITLES[verdict.outcome], gap, bounds)


def contrasts_table(judgement: Judgement) -> Table | None:
    """Return recipes against each other, paired by seed; None without a contrast."""
    if not judgement.contrasts:
        return None
    digits = fmt.digits_for(judgement.criteria.margin)
    shown, notes = _shown(judgement.contrasts), []
    if len(shown) < len(judgement.contrasts):
        notes.append(
            f"Shown are the {len(shown)} with the smallest p of {len(judgement.contrasts):,}; "
            "the others are in report.json."
        )
    return Table(
        caption="Recipe against recipe, paired by seed",
        head=("A", "B", "A minus B", "p", "seeds", "reading"),
        rows=tuple(_contrast_row(item, digits, judgement.criteria) for item in shown),
        numeric=(2, 3, 4),
        notes=(
            *notes,
            "A recipe that passes beside one that does not is no evidence that they differ: this table is.",
            f"{_interval_levels(shown, judgement.criteria)}; p two-sided, {_correction(judgement)}.",
        ),
    )


def _interval_levels(contrasts: Sequence[Contrast], criteria: Criteria) -> str:
    """Return the levels of the intervals shown: those of the looks that the contrasts have reached."""
    known = [item for item in contrasts if item.interval != (None, None)]
    found = levels(look_of(item.n_seeds, criteria).alpha for item in known)
    return f"Intervals {found}" if found else "No intervals yet"


def _shown(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return all contrasts in order, or of very many those with the smallest p, in order."""
    ranked = sorted(contrasts, key=lambda item: 2.0 if item.p is None else item.p)
    kept = {id(item) for item in ranked[:MAX_CONTRASTS]}
    return [item for item in contrasts if id(item) in kept]


def _correction(judgement: Judgement) -> str:
    criteria = judgement.criteria
    looks = "adjusted for the declared looks, " if criteria.looks else ""
    looks = "valid at any number of seeds, " if criteria.anytime else looks
    return looks + (
        "Holm-adjusted" if criteria.correction == "holm" else "uncorrected for the number of rows"
    )


def _contrast_row(item: Contrast, digits: int, criteria: Criteria) -> tuple[str, ...]:
    gap = fmt.gap(item.gap, item.interval, digits)
    return (item.a, item.b, gap, fmt.p_value(item.p), str(item.n_seeds), _reading(item, criteria))


def _reading(item: Contrast, criteria: Criteria) -> str:
    lo, hi = item.interval
    if lo is None or hi is None:
        waiting_for = look_of(item.n_seeds, criteria).waiting_for
        return f"waits for the look at {waiting_for} seeds" if waiting_for else "no interval"
    trend = item.a.startswith("trend over ")
    if lo > 0:
        return "rises along the axis" if trend else "A is worse"
    if hi < 0:
        return "falls along the axis" if trend else "A is better"
    return "no trend shown" if trend else "no difference shown"


_SPREADS = {
    "control_run": "a control run around its seed's mean",
    "test_run": "an FP8 run around its seed's mean",
    "pair_gap": "the gap over seeds",
    "between_seeds": "the control's seed means",
}


def noise_table(judgement: Judgement) -> Table | None:
    """Return every spread the study could measure; None when it could measure none."""
    digits = fmt.digits_for(judgement.criteria.margin) + 1
    # recipes that share their control runs share those spreads: one line names them all
    lines: dict[tuple[str, ...], list[str]] = {}
    for key, words in _SPREADS.items():
        for item in judgement.verdicts:
            cells = _spread_cells(item.noise_floor.get(key), digits)
            if cells:
                lines.setdefault((words, *cells), []).append(item.recipe)
    if not lines:
        return None
    return Table(
        caption="Noise floor: standard deviations in % of the loss",
        head=("spread of", "recipe", "sd", f"{level(judgement.criteria.alpha)} interval", "df"),
        rows=tuple((words, ", ".join(names), *cells) for (words, *cells), names in lines.items()),
        numeric=(2, 3, 4),
        notes=_noise_notes(judgement, digits),
    )


def _spread_cells(spread: Any, digits: int) -> tuple[str, ...]:
    if not isinstance(spread, Mapping) or spread.get("sd") is None:
        return ()
    bounds = fmt.interval(spread.get("interval") or (None, None), digits, signed=False)
    sd = fmt.number(100 * spread["sd"], digits, signed=False)
    return sd, bounds or fmt.NOTHING, str(spread.get("df", fmt.NOTHING))


def _noise_notes(judgement: Judgement, digits: int) -> tuple[str, ...]:
    notes = []
    for item in judgement.verdicts:
        smallest = item.noise_floor.get("detectable_gap")
        if smallest is not None and item.recipe not in judgement.null_recipes:
            notes.append(
                f"{item.recipe}: the smallest gap that {fmt.plural(item.n_seeds, 'seed')} find with "
                f"80 % power is {fmt.percent(smallest, digits - 1, signed=False)}{_ratio(item, digits)}."
            )
    return tuple(notes)


def _ratio(verdict: Verdict, digits: int) -> str:
    found = verdict.noise_floor.get("variance_ratio") or {}
    ratio, bounds = found.get("ratio"), found.get("interval") or (None, None)
    if ratio is None or not ratio < float("inf") or None in bounds:
        return ""
    return (
        f"; the gap varies {ratio:.2g} times as much as null pairs predict (in variance, "
        f"interval {bounds[0]:.2g} to {bounds[1]:.2g})"
    )


def cost_table(judgement: Judgement, speeds: Mapping[str, float | None], no_speed: str = "") -> Table | None:
    """Return what each gap costs in tokens and what speed gives back; None when nothing is known.

    `speeds` stand in where a verdict has no token cost; `no_speed` says why none was measured.
    """
    costs = [item for item in judgement.verdicts if item.recipe not in judgement.null_recipes]
    known = [item for item in costs if item.token_cost or speeds.get(item.recipe)]
    if not known:
        return None
    return Table(
        caption="Price of the gap in training tokens, against the measured speed",
        head=(
            "recipe",
            "extra tokens to close the gap",
            "speed-up over BF16",
            "net gain in time",
            "worth it",
        ),
        rows=tuple(_cost_row(item, _speedup(item, speeds)) for item in known),
        numeric=(1, 2, 3),
        notes=(
            *dict.fromkeys(_method(item) for item in known if item.token_cost),
            *([no_speed] if no_speed and any(_speedup(item, speeds) is None for item in known) else []),
        ),
    )


def _speedup(verdict: Verdict, speeds: Mapping[str, float | None]) -> float | None:
    """Return the speed-up that the judge weighed; where it weighed nothing, the measured one."""
    cost = verdict.token_cost
    return cost.get("speedup") if cost else speeds.get(verdict.recipe)


def _cost_row(verdict: Verdict, speedup: float | None) -> tuple[str, ...]:
    cost: Mapping[str, Any] = verdict.token_cost or {}
    extra = fmt.gap(cost.get("extra_tokens_frac"), cost.get("interval") or (None, None), 1)
    net = fmt.gap(cost.get("net_gain"), cost.get("net_gain_interval") or (None, None), 1)
    shown = fmt.NOTHING if speedup is None else f"{speedup:.2f} ×"
    return verdict.recipe, extra, shown, net, str(cost.get("worth_it") or fmt.NOTHING)


def _method(verdict: Verdict) -> str:
    method = (verdict.token_cost or {}).get("method") or "the control's own slope"
    return f"Extra tokens by the {method}." if not str(method).startswith("the ") else f"By {method}."
