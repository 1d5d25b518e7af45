"""From hits, tests and moves of an arm to reasons in words, each tied to one tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.tensor_candidates import Basis, Reason
from fp8parity_analysis.tensor_onset import Onset, onset_of
from fp8parity_analysis.tensor_reduce import level, nanmean, nanmedian
from fp8parity_analysis.tensor_screen import JUMP_FLOOR, departures, envelope
from fp8parity_analysis.tensor_tests import MIN_DF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8parity_analysis.tensor_arm import ArmTensors
    from fp8parity_analysis.tensor_moves import Move
    from fp8parity_analysis.tensor_panel import FloatArray, Statistic
    from fp8parity_analysis.tensor_screen import Family, Paired
    from fp8parity_analysis.tensor_signals import Place

Reasons = list[tuple["Place", Reason]]

_MIN_PEERS = 3
_DESCRIBED_FLOORS, _DESCRIBED_SDS = 4.0, 6.0
"""Without a test a tensor is described when it differs by so many floors and so many robust sds of its peers."""
_SAME, _OTHER = 0.5, 0.25
"""Share of the FP8 arm's movement that the BF16 arm must show to move too, and below which it stands still."""


def tested_reasons(
    arm: Paired, families: Sequence[Family], loss_onsets: dict[int, int], basis: Basis
) -> Reasons:
    """Return a reason, on this basis, for every tensor or module of a signal that a family flags."""
    found: Reasons = []
    for name, statistic in {family.statistic.name: family.statistic for family in families}.items():
        flagged = [
            family for family in families if family.statistic.name == name and family.screen.flagged().any()
        ]
        if not flagged:
            continue
        left = departures(arm, statistic, envelope(arm, statistic).limit)
        for family in flagged:
            for row in np.flatnonzero(family.screen.flagged()):
                onset = onset_of(left[row], loss_onsets)
                found.append((arm.tensors[int(row)], _tested(arm, family, int(row), onset, basis)))
    return found


def _tested(arm: Paired, family: Family, row: int, onset: Onset, basis: Basis) -> Reason:
    statistic, screen = family.statistic, family.screen
    effect, q = float(screen.effect[row]), float(screen.q[row])
    floor = JUMP_FLOOR if family.reduction == "jump" else statistic.floor
    return Reason(
        name=f"{statistic.name}_{family.reduction}",
        text=f"{statistic.words}: {_effect_words(family, effect)} (q {_p_words(q)})",
        basis=basis,
        cast_fault=False,
        order=0,
        strength=abs(effect) / floor,
        seeds=int(screen.n[row]),
        of=len(arm.seed_numbers),
        onset=onset,
        # a signal is the same quantity in both arms and grows in any run: what differs is what BF16 does not do
        in_bf16=False if basis == "signal" else _moves_in_bf16(arm, statistic, row, onset),
        effect=effect,
        q=q,
    )


def _p_words(q: float) -> str:
    text = fmt.p_value(q)
    return text if text.startswith("<") else f"= {text}"


def factor(logarithm: float) -> str:
    """Return e^x as a factor that people can read."""
    value = math.exp(max(-700.0, min(logarithm, 700.0)))
    if 100 <= value < 1e6:
        return f"× {value:,.0f}"
    return f"× {value:.3g}" if 1e-3 <= value < 100 else f"× {value:.1e}"


def _effect_words(family: Family, effect: float) -> str:
    if family.reduction == "jump":
        return f"jumps {math.exp(effect):.1f} times as far as usual"
    size = amount(family.statistic, effect)
    return (
        f"{size} over BF16 at the end"
        if family.reduction == "level"
        else f"drifts by {size} over the last half"
    )


def amount(statistic: Statistic, effect: float) -> str:
    """Return an effect as a difference in dB, or as the factor that a logarithm stands for."""
    if statistic.unit == "dB":
        return f"{fmt.number(effect, 1)} dB"
    if statistic.unit == "nats":
        return f"{fmt.number(effect, 2)} nats"
    odds = " in odds" if statistic.unit == "logit" else ""
    return f"{factor(effect)}{odds}"


def _moves_in_bf16(arm: Paired, statistic: Statistic, row: int, onset: Onset) -> bool | None:
    """Return whether the BF16 arm's what-if cast moves from before the onset to after it as the FP8 arm's does."""
    if onset.step is None:
        return None
    before, after = arm.steps < onset.step, arm.steps >= onset.step
    if not before.any():
        return False  # the pair differs from the first probe on, so the BF16 arm does not have it
    test, control = (
        nanmean(paths[statistic.name][:, row], 0) for paths in (arm.test_paths, arm.control_paths)
    )
    moved = [float(nanmean(path[after], 0) - nanmean(path[before], 0)) for path in (test, control)]
    if any(map(math.isnan, moved)):
        return None
    sign = statistic.harm or (1.0 if moved[0] >= 0 else -1.0)
    own, other = sign * moved[0], sign * moved[1]
    if other >= max(statistic.floor, _SAME * own):
        return True
    return False if other < max(statistic.floor, _OTHER * own) else None


def moved_reasons(moves: Sequence[Move], loss_onsets: dict[int, int]) -> Reasons:
    """Return a reason for every tensor that breaks an early-warning rule in most seeds."""
    return [
        (
            move.tensor,
            Reason(
                name=move.rule.name,
                text=f"{move.rule.words} by {_move_words(move)}",
                basis="moved",
                cast_fault=False,
                order=0,
                strength=move.worst / move.rule.limit,
                seeds=len(move.found),
                of=move.n_seeds,
                onset=onset_of(move.found, loss_onsets),
                in_bf16=None if move.in_control is None else 2 * move.in_control >= len(move.found),
                effect=move.worst,
            ),
        )
        for move in moves
        if 2 * len(move.found) > move.n_seeds
    ]


def _move_words(move: Move) -> str:
    return f"{move.worst:.1f} dB" if move.rule.unit == "dB" else factor(move.worst)


def described_reasons(arm: ArmTensors, families: Sequence[Family], loss_onsets: dict[int, int]) -> Reasons:
    """Return tensors whose level is far from that of their peers, where too few seeds and nulls allow a test."""
    found: Reasons = []
    for family in families:
        if family.reduction != "level" or (family.screen.df >= MIN_DF).any():
            continue
        statistic = family.statistic
        far = _far_from_peers(arm, family.screen.effect, statistic)
        rows = np.flatnonzero(far)
        left = departures(arm, statistic, envelope(arm, statistic).limit) if len(rows) else []
        for row in rows:
            found.append(
                (arm.tensors[row], _described(arm, family, int(row), onset_of(left[row], loss_onsets)))
            )
    return found


def _described(arm: ArmTensors, family: Family, row: int, onset: Onset) -> Reason:
    effect = float(family.screen.effect[row])
    return Reason(
        name=f"{family.statistic.name}_level",
        text=f"{family.statistic.words}: {_effect_words(family, effect)}, far from its peers",
        basis="descriptive",
        cast_fault=False,
        order=0,
        strength=abs(effect) / family.statistic.floor,
        seeds=int(family.screen.n[row]),
        of=len(arm.seeds),
        onset=onset,
        in_bf16=_moves_in_bf16(arm, family.statistic, row, onset),
        effect=effect,
    )


def _far_from_peers(
    arm: ArmTensors, effect: FloatArray, statistic: Statistic
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    far = np.zeros(len(effect), dtype=np.bool_)
    parts = np.array([f"{tensor.gemm}/{tensor.operand}" for tensor in arm.tensors])
    for part in np.unique(parts):
        rows = np.flatnonzero(parts == part)
        values = effect[rows]
        if np.isfinite(values).sum() < _MIN_PEERS:
            continue
        distance = values - nanmedian(values, 0)
        spread = 1.4826 * float(nanmedian(np.abs(distance), 0))
        harmful = np.abs(distance) if statistic.harm == 0 else statistic.harm * distance
        limit = max(_DESCRIBED_FLOORS * statistic.floor, _DESCRIBED_SDS * spread)
        with np.errstate(invalid="ignore"):
            far[rows] = harmful > limit
    return far


def seed_levels(arm: ArmTensors, column: str) -> FloatArray:
    """Return the level of a raw statistic of the arm's runs, the median over seeds [L]."""
    rows = []
    for seed in arm.seeds:
        values = seed.test[0].columns[column]
        probed = ~np.isnan(values).all(axis=0)
        rows.append(level(np.where(np.isfinite(values), values, np.nan)[:, probed]))
    return nanmedian(np.stack(rows), 0) if rows else np.zeros(0)
