"""What a study would cost and what it could find, before it costs anything. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from fp8parity import layer_policy
from fp8parity.devices import default_slots
from fp8parity.matrix import Matrix, PlannedRun, vocab_rows
from fp8parity.shapes import linear_shapes, parameter_count
from fp8parity.study import criteria_of
from fp8parity_analysis.power_table import power_table
from fp8parity_analysis.schema import SCHEMA_VERSION

REFERENCE_RUN_SD = 0.00145
"""Sd of a BF16 run around its own seed's mean, as a fraction of the loss: a 25 M-parameter byte-level decoder after
65 M tokens on one H200 (docs/statistics.md). A guess for other studies, used only until they measure their own."""


def _arm(matrix: Matrix, runs: list[PlannedRun]) -> dict[str, Any]:
    spec = runs[0].spec
    rows = vocab_rows(spec, matrix.recipe_path.parent)
    plan = layer_policy.resolve(linear_shapes(spec.model, rows), spec.precision)
    return {
        "group": runs[0].group,
        "arm": runs[0].arm,
        "role": runs[0].role,
        "runs": len(runs),
        "steps": spec.train.steps,
        "tokens_per_run": spec.train.steps * spec.train.tokens_per_step,
        "parameters": parameter_count(spec.model, rows),
        "fp8_flop_share": plan.fp8_flop_share,
        "fp8_linears": list(plan.fp8_fqns),
    }


def _detection(matrix: Matrix) -> dict[str, Any]:
    """Return what the planned number of seeds can find, at a stated or the reference run-to-run sd."""
    criteria = criteria_of(matrix)
    n_seeds = len({run.spec.seed for run in matrix.runs if run.role == "test"}) or 1
    run_sd = criteria.noise_sd or REFERENCE_RUN_SD
    power = power_table(criteria.alpha)
    sd = run_sd * math.sqrt(2.0)  # a pair is two runs
    known = n_seeds in power.half_width
    return {
        "seeds": n_seeds,
        "run_sd": run_sd,
        "run_sd_source": "criteria.noise_sd" if criteria.noise_sd else "reference",
        "margin": criteria.margin,
        "expected_half_width": sd * power.half_width[n_seeds] if known else None,
        "detectable_gap": sd * power.detectable[n_seeds] if known else None,
        "seeds_for_equivalent": next(
            (n for n, ratio in power.equivalent.items() if criteria.margin / sd >= ratio), None
        ),
    }


def _detection_words(found: dict[str, Any]) -> list[str]:
    sd = f"{100 * found['run_sd']:.3g} %"
    source = (
        f"a run-to-run sd of {sd} (criteria.noise_sd)"
        if found["run_sd_source"] == "criteria.noise_sd"
        else f"a run-to-run sd of {sd} (measured on an H200 with 25 M parameters; yours will differ, state "
        "criteria.noise_sd once you know it)"
    )
    if found["detectable_gap"] is None:
        return [f"One seed has no variance of its own: with {source} verdicts are provisional at best."]
    detectable = (
        f"Assuming {source}, {found['seeds']} seeds find a gap of {100 * found['detectable_gap']:.2f} % in 80 % of "
        f"studies; the interval is about ±{100 * found['expected_half_width']:.2f} % wide."
    )
    lines = [detectable]
    if found["expected_half_width"] >= found["margin"]:
        needed = found["seeds_for_equivalent"]
        remedy = f"{needed} seeds would do" if needed else "no number up to 30 would do; widen the margin"
        lines.append(
            f"That is too wide for EQUIVALENT at a margin of {100 * found['margin']:.3g} %: {remedy} at that noise."
        )
    return lines


def plan_document(matrix: Matrix) -> dict[str, Any]:
    """Return the plan as JSON values; `words` says the same in sentences.

    Keys: study, runs, pairs, slots, total_tokens, hours (None without runtime.tokens_per_s), arms, detection, words.
    """
    grouped: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in matrix.runs:
        grouped.setdefault((run.group, run.arm), []).append(run)
    train = matrix.runs[0].spec.train
    slots = matrix.runtime.slots or default_slots(train.device, train.threads)
    tokens = sum(r.spec.train.steps * r.spec.train.tokens_per_step for r in matrix.runs)
    rate = matrix.runtime.tokens_per_s
    hours = tokens / rate / 3600 if rate else None
    detection = _detection(matrix)
    cost = f"{tokens:,} tokens in {len(matrix.runs)} runs, {slots} at a time"
    if hours is not None:
        cost += f"; {hours:.2f} device-hours at {rate:,.0f} tokens/s"
    return {
        "schema_version": SCHEMA_VERSION,
        "study": matrix.name,
        "runs": len(matrix.runs),
        "pairs": matrix.pairs,
        "slots": slots,
        "total_tokens": tokens,
        "hours": hours,
        "arms": [_arm(matrix, runs) for runs in grouped.values()],
        "detection": detection,
        "words": [cost + ".", *_detection_words(detection)],
    }
