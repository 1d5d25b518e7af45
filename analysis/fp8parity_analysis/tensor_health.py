"""Which layer, GEMM and operand went bad, since when, and whether BF16's did too: the tensor statistics of a study.

What this does not claim: that a candidate is the cause of a gap. It says where to look first; a run with that layer
held in BF16 decides (`Candidate.follow_up`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.divergence import hinge_onset
from fp8parity_analysis.gap import tail_count
from fp8parity_analysis.tensor_absolute import is_current_scaled
from fp8parity_analysis.tensor_arm import ArmTensors, RunDirs, read_arm, remembering
from fp8parity_analysis.tensor_candidates import Candidate, candidates_of
from fp8parity_analysis.tensor_moves import RuleScore, warnings_of
from fp8parity_analysis.tensor_pictures import ArmPictures, pictures_of
from fp8parity_analysis.tensor_reasons import (
    described_reasons,
    moved_reasons,
    seed_levels,
    tested_reasons,
)
from fp8parity_analysis.tensor_reasons_absolute import absolute_reasons
from fp8parity_analysis.tensor_screen import families_of
from fp8parity_analysis.tensor_signal_pairs import (
    SignalLevels,
    growth_score,
    levels_of,
    paired_signals,
    signal_families,
)
from fp8parity_analysis.tensor_signals import Signal
from fp8parity_analysis.tensor_tests import FDR, MIN_DF, Method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.store import RunRecord
    from fp8parity_analysis.study_runs import StudyRuns
    from fp8parity_analysis.tensor_panel import FloatArray, Tensor
    from fp8parity_analysis.tensor_screen import Family
    from fp8parity_analysis.verdict import Evidence, Judgement

_METHODS: dict[Method, str] = {"bh": "Benjamini-Hochberg", "by": "Benjamini-Yekutieli"}
FEW_PROBES = 6
LEVEL_COLUMNS = ("sqnr_db", "underflow_frac", "saturated_frac")


@dataclass(frozen=True)
class ArmHealth:
    """What the tensor statistics of one arm say. `recipe` is the verdict's name, `cast_recipe` that of the casts.

    `basis` says what the tests rest on, `candidates` are in the order in which to look at them, `scores` are the
    early-warning rules, `notes` what was seen and is no candidate, `problems` what could not be read. `levels` maps
    `LEVEL_COLUMNS` to the arm's levels at the end [L], in the order of `tensors`; `signals` are those at the end.
    """

    recipe: str
    cast_recipe: str
    tensors: tuple[Tensor, ...]
    n_probes: int
    n_seeds: int
    n_nulls: int
    descriptive: bool
    basis: str
    candidates: tuple[Candidate, ...]
    scores: tuple[RuleScore, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    levels: Mapping[str, FloatArray]
    pictures: ArmPictures
    signals: tuple[SignalLevels, ...] = ()


@dataclass(frozen=True)
class TensorHealth:
    """The arms that recorded tensor statistics, in the order of the verdicts; `absent` names those that did not."""

    arms: tuple[ArmHealth, ...]
    absent: tuple[str, ...] = ()

    @property
    def recorded(self) -> bool:
        """Whether any arm recorded any."""
        return bool(self.arms)


def examine(judgement: Judgement, runs: StudyRuns, *, method: Method = "bh") -> TensorHealth:
    """Return the tensor health of every recipe of a judged study; never raises on what the files hold.

    `method` "by" controls the FDR under any dependence between tensors (Benjamini and Yekutieli 2001), at a price in
    power; "bh" is what `benchmarks/tensor_fdr.py` measures for tensors that share a seed's luck.
    """
    evidence = {item.recipe: item for item in judgement.evidence}
    found, absent = [], []
    what_if = remembering()
    for verdict in judgement.verdicts:
        if verdict.recipe in judgement.null_recipes or verdict.recipe not in runs.arms:
            continue
        arm = read_arm(_dirs(runs, verdict.recipe), matched=judgement.criteria.null_matched, what_if=what_if)
        if arm is None:
            absent.append(verdict.recipe)
            continue
        losses = loss_onsets(evidence.get(verdict.recipe), judgement.criteria.margin)
        if verdict.diverged_seeds and verdict.onset_step is not None:
            losses = {**dict.fromkeys(verdict.diverged_seeds, verdict.onset_step), **losses}
        tests = runs.tests_of(verdict.recipe)
        found.append(arm_health(verdict.recipe, arm, _span(tests), losses, method, declared=_declared(tests)))
    return TensorHealth(tuple(found), tuple(absent))


def _dirs(runs: StudyRuns, recipe: str) -> RunDirs:
    arm = runs.arms[recipe]

    def paths(group: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
        return {seed: [runs.records[run.label].path for run in members] for seed, members in group.items()}

    return RunDirs(paths(arm.test), paths(arm.control), paths(arm.extra))


def _declared(records: Sequence[RunRecord]) -> str:
    """Return the precision recipe that an arm's runs declare, empty where they declare none."""
    precision = records[0].spec.get("spec", {}).get("precision") if records else None
    return str(precision.get("recipe", "")) if isinstance(precision, dict) else ""


def _span(records: Sequence[RunRecord]) -> tuple[int, int]:
    """Return warm-up and horizon in optimizer steps, zero where the run does not say."""
    spec = records[0].spec.get("spec", {}) if records else {}

    def number(section: str, key: str) -> int:
        values = spec.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return int(value) if isinstance(value, int | float) else 0

    return number("optim", "warmup_steps"), number("train", "steps")


def loss_onsets(evidence: Evidence | None, margin: float) -> dict[int, int]:
    """Return, by seed whose gap ends above the margin, the step from which it grows (`divergence.hinge_onset`).

    A seed whose gap is masked to its end diverged: its onset is the first masked evaluation, or the hinge before it.
    """
    if evidence is None or not evidence.steps:
        return {}
    found = {}
    for seed, row in zip(evidence.seeds, evidence.gap_by_seed, strict=False):
        gap = np.array([np.nan if value is None else value for value in row], dtype=np.float64)
        known = np.flatnonzero(np.isfinite(gap))
        lost = not len(known) or known[-1] < len(gap) - 1
        end = int(known[-1]) + 1 if len(known) else 0
        tail = gap[end - tail_count(end) : end] if end else gap[:0]
        if not lost and not np.nanmean(tail) > margin:
            continue
        steps = np.array(evidence.steps, dtype=np.float64)
        at = min(end, len(gap) - 1)
        if end >= 3 and np.nanmean(tail) > margin:
            at = int(hinge_onset(gap[:end], steps[:end] / steps[-1]))
        found[seed] = evidence.steps[at]
    return found


def arm_health(
    recipe: str,
    arm: ArmTensors,
    span: tuple[int, int],
    losses: dict[int, int],
    method: Method = "bh",
    *,
    declared: str = "",
) -> ArmHealth:
    """Return the health of one arm; `span` is (warm-up, horizon) in steps, `losses` the loss's onset by seed.

    `declared` is the precision recipe that the arm's casts are held to, where it is a known one.
    """
    paired = any(seed.control for seed in arm.seeds)
    families = families_of(arm, method) if paired else []
    descriptive = not any((family.screen.df >= MIN_DF).any() for family in families)
    horizon = span[1] or (int(arm.steps[-1]) if len(arm.steps) else 0)
    scores, moves = warnings_of(arm, warmup=span[0], horizon=horizon, loss_onsets=losses)
    declared = declared if is_current_scaled(declared) else arm.recipe
    absolute, notes = absolute_reasons(arm, losses, declared)
    if declared != arm.recipe:
        notes = [f"declared as {declared}, the casts are those of {arm.recipe}", *notes]
    signals = paired_signals(arm)
    reasons = [*absolute, *tested_reasons(arm, families, losses, "tested"), *moved_reasons(moves, losses)]
    for item, tested in zip(signals, signal_families(signals, method), strict=True):
        reasons += tested_reasons(item, tested, losses, "signal")
    growths = [growth_score(item, span[0], losses) for item in signals]
    if descriptive:
        reasons += described_reasons(arm, families, losses)
    candidates = candidates_of(reasons)
    return ArmHealth(
        recipe=recipe,
        cast_recipe=arm.recipe,
        tensors=arm.tensors,
        n_probes=len(arm.steps),
        n_seeds=len(arm.seeds),
        n_nulls=arm.n_nulls,
        descriptive=descriptive,
        basis=_basis(arm, families, paired=paired, descriptive=descriptive, method=method),
        candidates=candidates,
        scores=(*scores, *(score for score in growths if score is not None)),
        notes=(*notes, *_few_probes(arm)),
        problems=arm.problems,
        levels={name: seed_levels(arm, name) for name in LEVEL_COLUMNS},
        pictures=pictures_of(
            arm, [item.tensor for item in candidates if not isinstance(item.tensor, Signal)]
        ),
        signals=tuple(levels_of(item) for item in signals),
    )


def _few_probes(arm: ArmTensors) -> list[str]:
    if len(arm.steps) >= FEW_PROBES:
        return []
    probes = fmt.plural(len(arm.steps), "probe")
    return [f"{probes}: too few to date anything or to tell a drift; probe.every sets the cadence"]


def _basis(
    arm: ArmTensors, families: Sequence[Family], *, paired: bool, descriptive: bool, method: Method
) -> str:
    seeds, nulls = fmt.plural(len(arm.seeds), "seed"), fmt.plural(arm.n_nulls, "null pair")
    if not paired:
        return (
            f"The BF16 runs recorded no what-if casts of {arm.recipe}: nothing is paired, nothing tested; only what "
            "is wrong by itself is listed."
        )
    if descriptive:
        return (
            f"Descriptive: {seeds} and no matched null pairs allow no test. What differs is ranked, without an "
            "error rate; three seeds, or null pairs declared as matched, would test it."
        )
    pooled = max((family.n_nulls for family in families), default=0)
    quiet = sum(family.quiet for family in families)
    words = [f"Tested over {seeds}"]
    words.append(f", the variance pooled with {fmt.plural(pooled, 'matched null pair')}" if pooled else "")
    words.append(
        f". In each of {len(families)} families (one statistic, one reduction) at most "
        f"{fmt.percent(FDR, 0, signed=False)} of what is flagged is false on average ({_METHODS[method]})."
    )
    if quiet:
        places = "1 family" if quiet == 1 else f"{quiet} families"
        words.append(f" In {places} the null pairs are too quiet to be the noise of a pair: not pooled.")
    if arm.n_nulls and not arm.matched:
        words.append(
            f" {nulls.capitalize()} {'is' if arm.n_nulls == 1 else 'are'} not declared as matched and not pooled."
        )
    return "".join(words)
