"""Absolute findings of an arm put together over its seeds: what is a candidate, what is usual, what only passed."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis import tensor_absolute
from fp8parity_analysis.tensor_candidates import Reason
from fp8parity_analysis.tensor_onset import onset_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8parity_analysis.tensor_absolute import Hit
    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_panel import Tensor
    from fp8parity_analysis.tensor_signals import Place

Reasons = list[tuple["Place", Reason]]

_WIDESPREAD = 0.5
"""Share of the tensors of one kind beyond which a harmless kind of hit says nothing about any one of them."""
_MIN_PEERS = 3


def absolute_reasons(
    arm: ArmTensors, loss_onsets: dict[int, int], declared: str
) -> tuple[Reasons, list[str]]:
    """Return the absolute findings of an arm by the recipe it declares, and a note for each that is usual."""
    hits: dict[tuple[str, Tensor], dict[int, Hit]] = {}
    also: dict[tuple[str, Tensor], set[int]] = {}
    for seed in arm.seeds:
        for panel in seed.test[:1]:
            for hit in tensor_absolute.hits_of(panel, declared):
                hits.setdefault((hit.rule.name, hit.tensor), {})[seed.seed] = hit
        for panel in seed.control:
            for hit in tensor_absolute.hits_of(panel, arm.recipe):
                also.setdefault((hit.rule.name, hit.tensor), set()).add(seed.seed)
    usual = _usual(arm, hits, also)
    reasons: Reasons = [
        (tensor, _absolute(arm, by_seed, also.get((name, tensor), set()), loss_onsets))
        for (name, tensor), by_seed in hits.items()
        if not any((name, part) in usual for part in _parts(tensor))
    ]
    passing = [item for item in reasons if item[1].basis == "brief" and 2 * item[1].seeds <= item[1].of]
    notes = [_usual_words(name, part, count) for (name, part), count in usual.items()]
    return [item for item in reasons if item not in passing], notes + _passing_words(passing)


def _passing_words(passing: Reasons) -> list[str]:
    if not passing:
        return []
    tensor, reason = passing[0]
    more = f" and {len(passing) - 1} more like it" if len(passing) > 1 else ""
    return [f"passing, no candidate: {tensor}: {reason.text}, {reason.seeds} of {reason.of} seeds{more}"]


def _part(tensor: Tensor) -> tuple[str, str]:
    return tensor.gemm, tensor.operand


def _parts(tensor: Tensor) -> tuple[tuple[str, ...], ...]:
    """Return the kinds a tensor belongs to: its operand, and its operand in the linears of its name in every block."""
    return (_part(tensor), (*_part(tensor), re.sub(r"\d+", "*", tensor.fqn)))


def _usual(
    arm: ArmTensors, hits: Mapping[tuple[str, Tensor], object], also: Mapping[tuple[str, Tensor], set[int]]
) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return (rule, kind) of hits that most tensors of that kind have in both arms: zero rows of masked tokens, say."""
    brief = {rule.name for rule in tensor_absolute.RULES if rule.brief}
    counts = Counter(
        (name, part)
        for name, tensor in hits
        if name in brief and (name, tensor) in also
        for part in _parts(tensor)
    )
    sizes = Counter(part for tensor in arm.tensors for part in _parts(tensor))
    found = {
        (name, part): count
        for (name, part), count in counts.items()
        if count >= _MIN_PEERS and count > _WIDESPREAD * sizes[part]
    }
    # what is usual for an operand need not be said again for each name
    return {
        key: count for key, count in found.items() if len(key[1]) == 2 or (key[0], key[1][:2]) not in found
    }


def _usual_words(name: str, part: tuple[str, ...], count: int) -> str:
    words = next(rule.words for rule in tensor_absolute.RULES if rule.name == name)
    where = f", {part[2]}" if len(part) > 2 else ""
    return f"{words}: {count} tensors of {part[1]} in {part[0]}{where}, in both arms; a property of the model"


def _absolute(arm: ArmTensors, by_seed: Mapping[int, Hit], also: set[int], losses: dict[int, int]) -> Reason:
    hit = next(iter(by_seed.values()))
    rule = hit.rule
    order = tensor_absolute.RULES.index(rule)
    lasts = [item for item in by_seed.values() if item.lasts] if rule.brief else list(by_seed.values())
    used = {seed: item for seed, item in by_seed.items() if item in lasts} or dict(by_seed)
    values = [item.worst for item in used.values() if not math.isnan(item.worst)]
    worst = (max(values) if rule.worst > 0 else min(values)) if values else math.nan
    onset = onset_of([(seed, item.step, item.resolution) for seed, item in used.items()], losses)
    share = max(item.share for item in used.values())
    compared = any(seed.control and not seed.control[0].empty for seed in arm.seeds)
    shared = (2 * len(also & set(used)) >= len(used)) if compared else None
    harmless = rule.name == "zero_amax" and shared is True  # zeros cost nothing, and FP8 did not make them
    return Reason(
        name=rule.name,
        text=f"{rule.words}{_quoted(rule.name, worst)}, in {fmt.percent(share, 0, signed=False)} of the probes",
        basis="absolute" if lasts and not harmless else "brief",
        cast_fault=rule.cast_fault,
        order=order,
        strength=share + (abs(worst) if math.isfinite(worst) else 0.0) * 1e-6,
        seeds=len(used),
        of=len(arm.seeds),
        onset=onset,
        in_bf16=shared,
    )


def _quoted(name: str, worst: float) -> str:
    if math.isnan(worst):
        return ""
    if name in ("format", "sqnr_bound"):
        return f" (SQNR {fmt.number(worst, 1, signed=False)} dB)"
    if name in ("underflow", "saturated"):
        return f" ({fmt.number(100 * worst, 3 if worst < 0.001 else 1, signed=False)} % of the elements)"
    return f" ({worst:.4g})"
