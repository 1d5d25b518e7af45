"""The report's section on tensor health: tables and sentences, strict JSON, the numbers a nightly watches."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.report_model import Table
from fp8parity_analysis.report_tensor_model import TensorArm, TensorSection
from fp8parity_analysis.tensor_candidates import BASIS_WORDS, ORIGIN_WORDS
from fp8parity_analysis.tensor_panel import Tensor
from fp8parity_analysis.tensor_reasons import amount
from fp8parity_analysis.tensor_signal_pairs import GROWTH_RULES
from fp8parity_analysis.tensor_signals import SIGNAL_STATISTICS, Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_candidates import Candidate, Reason
    from fp8parity_analysis.tensor_health import ArmHealth, TensorHealth
    from fp8parity_analysis.tensor_moves import RuleScore
    from fp8parity_analysis.tensor_signals import Place

TENSOR_FILE = "tensor.json"
"""Numbers of a study directory that a nightly watches: name to number."""
HOW_TO_RECORD = (
    "No tensor statistics were recorded, so this report cannot say which layer a gap comes from. The key probe.every "
    "of the recipe file, the optimizer steps between probes, records them."
)
MAX_ROWS = 20
"""Candidates in the table of the page; report.json has all."""
_NOT_A_CAUSE = (
    "A candidate is where to look, not a cause. A run with that layer held in BF16 decides: the gap closes or it does "
    "not. fp8parity report DIR --emit-followup FILE writes that recipe file for the first candidates."
)
_SINCE = (
    "Since: the first probe at which it shows (it began after the probe before). Lead: steps before the loss's gap "
    "begins to grow, the median over seeds; below five seeds the order is a description, no sign test reaches 5 %."
)
_RULES = (
    "Runs in which any tensor breaks the limit for three probes in a row, against its own past. The limit by BF16 runs "
    "is the largest value that one of them reaches; the probability that a run to which FP8 does nothing exceeds it is "
    "at most:"
)
_IN_BF16 = {
    "cast": "a fault of the cast",
    "both": "yes: possible cause",
    "fp8": "no: possible consequence",
    "unknown": "not settled",
}
_MAX_REASONS = 3
_MANY_LAYERS = 100
"""Beyond this many linears the nightly's numbers are one per block."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")


def section_of(health: TensorHealth) -> TensorSection:
    """Return the section; with no statistics it is the message alone."""
    arms = tuple(_arm(item, f"t{index}") for index, item in enumerate(health.arms, start=1))
    if not arms:
        return TensorSection((), HOW_TO_RECORD)
    absent = f"No tensor statistics: {', '.join(health.absent)}." if health.absent else ""
    return TensorSection(arms, absent)


def _arm(arm: ArmHealth, key: str) -> TensorArm:
    return TensorArm(
        key=key,
        recipe=arm.recipe,
        sentence=_sentence(arm),
        basis=arm.basis,
        table=_table(arm) if arm.candidates else None,
        scores=_scores(arm),
        notes=(*arm.notes, *arm.problems),
        candidates=tuple(_candidate_json(rank, item) for rank, item in enumerate(arm.candidates, start=1)),
        levels=tuple(_levels_json(arm)),
        signals=_signals(arm),
        signal_levels=tuple(_signals_json(arm)),
    )


def _sentence(arm: ArmHealth) -> str:
    signals = sum(len(item.places) for item in arm.signals)
    counted = (
        (len(arm.tensors), "tensor"),
        (signals, "signal"),
        (arm.n_probes, "probe"),
        (arm.n_seeds, "seed"),
    )
    seen = ", ".join(fmt.plural(count, noun) for count, noun in counted if count or noun != "signal")
    if not arm.candidates:
        return f"No candidate among {seen}."
    first = arm.candidates[0]
    since = f" since step {first.onset.step:,}" if first.onset.step is not None else ""
    return (
        f"{fmt.plural(len(arm.candidates), 'candidate')} among {seen}. First to look at: {first.tensor}: "
        f"{first.leading.text}{since}; {ORIGIN_WORDS[first.origin]}."
    )


def _table(arm: ArmHealth) -> Table:
    rows = _grouped(arm.candidates)
    shown = rows[:MAX_ROWS]
    notes = [_NOT_A_CAUSE, _SINCE]
    if len(rows) > len(shown):
        notes.insert(
            0, f"Shown are the first {len(shown)} of {len(rows)} rows; report.json has every candidate."
        )
    return Table(
        caption=f"Candidates of {arm.recipe}, in the order in which to look at them",
        head=("layer", "operand", "what", "since step", "lead over the loss", "seeds", "in the BF16 arm"),
        rows=tuple(_row(rank, items) for rank, items in enumerate(shown, start=1)),
        numeric=(5,),
        notes=tuple(notes),
    )


def _grouped(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return the candidates with those together that are one operand of one layer in two GEMMs, of one kind."""
    rows: dict[tuple[str, str, str], list[Candidate]] = {}
    for item in candidates:
        kind = item.leading.name if item.basis in ("absolute", "brief") else item.basis
        what = item.tensor.name if isinstance(item.tensor, Signal) else item.tensor.operand
        rows.setdefault((item.tensor.fqn, what, kind), []).append(item)
    return list(rows.values())


def ranks_of(candidates: Sequence[Candidate]) -> dict[Place, int]:
    """Return the number of the row in which the table shows each candidate."""
    return {item.tensor: rank for rank, row in enumerate(_grouped(candidates), start=1) for item in row}


def _row(rank: int, items: Sequence[Candidate]) -> tuple[str, ...]:
    item = items[0]
    texts = [reason.text for reason in item.reasons[:_MAX_REASONS]]
    if len(item.reasons) > _MAX_REASONS:
        texts.append(f"{len(item.reasons) - _MAX_REASONS} more")
    return (
        f"{rank}. {item.tensor.fqn}",
        _operand_words([each.tensor for each in items]),
        f"{'; '.join(texts)} ({BASIS_WORDS[item.basis]})",
        item.when,
        item.lead_words,
        f"{item.leading.seeds} of {item.leading.of}",
        _IN_BF16[item.origin],
    )


def _operand_words(places: Sequence[Place]) -> str:
    first = places[0]
    if isinstance(first, Signal):
        return f"signal: {SIGNAL_STATISTICS[first.name].words}"
    gemms = [place.gemm for place in places if isinstance(place, Tensor)]
    return f"{first.operand} of {', '.join(gemms)}"


def _signals(arm: ArmHealth) -> Table | None:
    """Return a row per signal: the module in which the arm leaves BF16 furthest, in the harmful direction."""
    rows = []
    for item in arm.signals:
        distance = np.abs(item.distance) if item.statistic.harm == 0 else item.statistic.harm * item.distance
        if not np.isfinite(distance).any():
            continue
        at = int(np.nanargmax(distance))
        rows.append(
            (
                item.statistic.words,
                item.places[at].fqn,
                str(len(item.places)),
                f"{item.control[at]:.3g}",
                f"{item.test[at]:.3g}",
                amount(item.statistic, float(item.distance[at])),
            )
        )
    if not rows:
        return None
    return Table(
        caption=f"Signals of {arm.recipe} at the end, where each leaves BF16's furthest",
        head=("signal", "module", "of", "BF16", arm.recipe, "FP8 over BF16"),
        rows=tuple(rows),
        numeric=(2, 3, 4, 5),
        notes=("The median over seeds. Which of them are tested to differ stands among the candidates.",),
    )


def _scores(arm: ArmHealth) -> Table | None:
    if not arm.scores:
        return None
    return Table(
        caption=f"Early-warning rules, run by run: {arm.recipe}",
        head=(
            "rule",
            "limit",
            "FP8 runs",
            "BF16 runs",
            "first at step",
            "lead",
            "limit by BF16 runs",
            "FP8 beyond it",
        ),
        rows=tuple(_score_row(item) for item in arm.scores),
        numeric=(1, 2, 3, 4, 5, 6, 7),
        notes=(f"{_RULES} {_rate(arm.scores)}.", *_paired_rate(arm.scores)),
    )


def _rate(scores: Sequence[RuleScore]) -> str:
    rate = scores[0].false_alarms
    return "not known (no BF16 run)" if rate is None else fmt.percent(rate, 0, signed=False)


def _paired_rate(scores: Sequence[RuleScore]) -> list[str]:
    growths = [item for item in scores if item.rule in GROWTH_RULES.values()]
    if not growths:
        return []
    rate = growths[0].false_alarms
    known = (
        "without a null pair the probability is not known"
        if rate is None
        else (f"the probability is at most {fmt.percent(rate, 0, signed=False)}")
    )
    return [f"Growth over BF16's is that of a pair of one seed; null pairs stand for BF16 runs; {known}."]


def _score_row(item: RuleScore) -> tuple[str, ...]:
    known = item.n_control > 0
    lead = fmt.NOTHING if item.onset.lead is None else f"{fmt.number(item.onset.lead, 0)} steps"
    return (
        item.rule.words,
        _limit(item, item.rule.limit),
        f"{item.hits} of {item.n_runs}",
        f"{item.control_hits} of {item.n_control}",
        fmt.NOTHING if item.onset.step is None else f"{item.onset.step:,}",
        lead,
        _limit(item, item.calibrated) if known else fmt.NOTHING,
        f"{item.calibrated_hits} of {item.n_runs}" if known else fmt.NOTHING,
    )


def _limit(item: RuleScore, value: float) -> str:
    if item.rule.unit == "ln":
        return f"× {math.exp(min(value, 700.0)):.3g}"
    return f"{value:.3g} {item.rule.unit}".strip()


def _candidate_json(rank: int, item: Candidate) -> dict[str, Any]:
    return {
        "rank": rank,
        "fqn": item.tensor.fqn,
        "gemm": None if isinstance(item.tensor, Signal) else item.tensor.gemm,
        "operand": None if isinstance(item.tensor, Signal) else item.tensor.operand,
        "signal": item.tensor.name if isinstance(item.tensor, Signal) else None,
        "basis": item.basis,
        "origin": item.origin,
        "onset_step": item.onset.step,
        "onset_resolution": item.onset.resolution,
        "lead_steps": item.onset.lead,
        "leads_in": [item.onset.ahead, item.onset.compared],
        "lead_p": item.onset.p,
        "follow_up": item.follow_up,
        "reasons": [_reason_json(reason) for reason in item.reasons],
    }


def _reason_json(reason: Reason) -> dict[str, Any]:
    return {
        "name": reason.name,
        "text": reason.text,
        "basis": reason.basis,
        "effect": _finite(reason.effect),
        "q": _finite(reason.q),
        "seeds": [reason.seeds, reason.of],
        "onset_step": reason.onset.step,
        "in_bf16": reason.in_bf16,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _levels_json(arm: ArmHealth) -> list[dict[str, Any]]:
    rows = []
    for index, tensor in enumerate(arm.tensors):
        levels = {name: _finite(_rounded(values[index])) for name, values in arm.levels.items()}
        rows.append({"fqn": tensor.fqn, "gemm": tensor.gemm, "operand": tensor.operand, **levels})
    return rows


def _signals_json(arm: ArmHealth) -> list[dict[str, Any]]:
    return [
        {
            "fqn": place.fqn,
            "signal": place.name,
            "test": _finite(_rounded(item.test[index])),
            "control": _finite(_rounded(item.control[index])),
        }
        for item in arm.signals
        for index, place in enumerate(item.places)
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


_WATCHED = (("sqnr_db", "sqnr_db_min", np.nanmin), ("underflow_frac", "underflow_frac_max", np.nanmax),
            ("saturated_frac", "saturated_frac_max", np.nanmax))  # fmt: skip


def watched(health: TensorHealth) -> dict[str, float]:
    """Return what a nightly watches, `recipe/layer/statistic` to number: each layer's worst operand at the end.

    Beyond `_MANY_LAYERS` linears a layer is a whole block. Numbers that are not known are left out.
    """
    found: dict[str, float] = {}
    for arm in health.arms:
        rows: dict[str, list[int]] = {}
        many = len({tensor.fqn for tensor in arm.tensors}) > _MANY_LAYERS
        for index, tensor in enumerate(arm.tensors):
            rows.setdefault(_layer(tensor.fqn) if many else tensor.fqn, []).append(index)
        for column, name, worst in _WATCHED:
            for layer, at in rows.items():
                values = arm.levels[column][at]
                if np.isfinite(values).any():
                    found[f"{arm.recipe}/{layer}/{name}"] = _rounded(
                        float(worst(values[np.isfinite(values)]))
                    )
    return found


def _layer(fqn: str) -> str:
    block = _BLOCK.match(fqn)
    return block[1] if block else fqn


def summary_lines(section: TensorSection | None) -> list[str]:
    """Return the section for the Markdown summary: one sentence per arm, or how to record the statistics."""
    if section is None:
        return []
    lines = [f"{arm.recipe}: {arm.sentence}" for arm in section.arms]
    return [*lines, *([section.message] if section.message else [])]
