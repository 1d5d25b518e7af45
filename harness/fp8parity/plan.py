"""What a study would cost and what it could find, before it costs anything. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Any

from fp8parity import layer_policy
from fp8parity.devices import default_slots, visible_gpus
from fp8parity.fork import fork_words
from fp8parity.matrix import Matrix, PlannedRun, resolve_data_path, vocab_rows
from fp8parity.memory import FORMULA, PROCESS_BYTES, estimate
from fp8parity.shapes import linear_shapes, parameter_count
from fp8parity.spec import DataSpec, ModelSpec, RunSpec
from fp8parity.standby import Depth
from fp8parity.study import criteria_of
from fp8parity.token_meta import read_meta
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.power_table import MAX_SEEDS, power_table
from fp8parity_analysis.schema import SCHEMA_VERSION

REFERENCE_RUN_SD = 0.00145
"""Sd of a BF16 run around its own seed's mean, as a fraction of the loss: a 25 M-parameter byte-level decoder after
65 M tokens on one H200 (docs/statistics.md). A guess for other studies, used only until they measure their own."""


def slots_of(matrix: Matrix, asked: int | None = None) -> int:
    """Return the runs at a time: asked for on the command line, else in the file, else what the devices offer.

    For `device: cuda` on a machine without a GPU that is what one GPU runs: cores are no measure of it.
    """
    train = matrix.runs[0].spec.train
    runtime = matrix.runtime
    offered = (
        runtime.slots_per_gpu
        if _lacks_gpu(matrix)
        else default_slots(train.device, train.threads, runtime.slots_per_gpu)
    )
    return asked or runtime.slots or offered


def _lacks_gpu(matrix: Matrix) -> bool:
    return matrix.runs[0].spec.train.device == "cuda" and not visible_gpus()


def standby_of(matrix: Matrix, asked: int | None = None) -> Depth | None:
    """Return how far workers prepare ahead of their turn, None for not at all.

    On a CPU the cores are what runs compete for. A model on the device is one run more in its memory, so by default
    only where memory limits the slots; and it disturbs the clock of a run that would have its GPU to itself.
    """
    runtime = matrix.runtime
    if runtime.standby is not None:
        return "prove" if runtime.standby else None
    if matrix.runs[0].spec.train.device == "cpu" or not visible_gpus():
        return None
    return "prove" if runtime.slots_per_gpu > 1 and not (asked or runtime.slots) else "build"


def memory_of(matrix: Matrix) -> dict[str, int]:
    """Return the estimated bytes of each run, by id."""
    folder = matrix.recipe_path.parent
    return {run.run_id: estimate(run.spec, vocab_rows(run.spec, folder)).total for run in matrix.runs}


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
        "switch_at": spec.precision.switch_at,
        "fork_step": spec.fork_from.step if spec.fork_from else None,
        "tokens_per_run": _tokens(spec),
        "parameters": parameter_count(spec.model, rows),
        "memory": estimate(spec, rows).to_json(),
        "fp8_flop_share": plan.fp8_flop_share,
        "fp8_linears": list(plan.fp8_fqns),
    }


def _detection(matrix: Matrix) -> dict[str, Any]:
    """Return what the planned number of seeds can find, at a stated or the reference run-to-run sd.

    `judged_seeds` are those of the last declared look that they reach, None where they get no verdict with an
    interval of their own; `first_verdict` is the smallest number that does.
    """
    criteria = criteria_of(matrix)
    n_seeds = len({run.spec.seed for run in matrix.runs if run.role == "test"}) or 1
    run_sd = criteria.noise_sd or REFERENCE_RUN_SD
    power = power_table(criteria)
    sd = run_sd * math.sqrt(2.0)  # a pair is two runs
    used = max((look for look in criteria.looks if look <= n_seeds), default=n_seeds)
    known = used in power.half_width
    return {
        "seeds": n_seeds,
        "judged_seeds": used if known else None,
        "first_verdict": min(power.half_width),
        "run_sd": run_sd,
        "run_sd_source": "criteria.noise_sd" if criteria.noise_sd else "reference",
        "margin": criteria.margin,
        "expected_half_width": sd * power.half_width[used] if known else None,
        "detectable_gap": sd * power.detectable[used] if known else None,
        "seeds_for_equivalent": next(
            (n for n, ratio in power.equivalent.items() if criteria.margin / sd >= ratio), None
        ),
    }


def _nothing_found(found: dict[str, Any], source: str, criteria: Criteria) -> str:
    seeds, first = found["seeds"], found["first_verdict"]
    if seeds >= first:
        return f"What {seeds} seeds find is not tabulated: the table ends at {MAX_SEEDS}."
    if criteria.looks or criteria.anytime:
        why = "the first declared look" if criteria.looks else "the first at which anytime has bounds"
        return f"{seeds} seed{'s' if seeds > 1 else ''} cannot be judged: {why} is at {first} seeds."
    return f"One seed has no variance of its own: with {source} verdicts are provisional at best."


def _detection_words(found: dict[str, Any], criteria: Criteria) -> list[str]:
    sd = f"{100 * found['run_sd']:.3g} %"
    source = (
        f"a run-to-run sd of {sd} (criteria.noise_sd)"
        if found["run_sd_source"] == "criteria.noise_sd"
        else f"a run-to-run sd of {sd} (measured on an H200 with 25 M parameters; yours will differ, state "
        "criteria.noise_sd once you know it)"
    )
    if found["detectable_gap"] is None:
        return [_nothing_found(found, source, criteria)]
    detectable = (
        f"Assuming {source}, {found['judged_seeds']} seeds find a gap of {100 * found['detectable_gap']:.2f} % in "
        f"80 % of studies; the interval is about ±{100 * found['expected_half_width']:.2f} % wide."
    )
    lines = [detectable]
    if found["expected_half_width"] >= found["margin"]:
        needed = found["seeds_for_equivalent"]
        none = "no declared look" if criteria.looks else f"no number up to {MAX_SEEDS}"
        remedy = f"{needed} seeds would do" if needed else f"{none} would do; widen the margin"
        lines.append(
            f"That is too wide for EQUIVALENT at a margin of {100 * found['margin']:.3g} %: {remedy} at that noise."
        )
    return lines


def _pair_key(run: PlannedRun) -> str:
    """Return what a test run shares with its control: everything but precision and replica."""
    same = {**run.spec.canonical(), "precision": None, "replica": 0, "replica_kind": "none"}
    return json.dumps(same, sort_keys=True)


def _shared_controls(matrix: Matrix) -> int:
    """Return how many control runs serve more than one arm, and so train once instead of once per arm."""
    arms: dict[str, set[str]] = {}
    for run in matrix.runs:
        if run.role == "test":
            arms.setdefault(_pair_key(run), set()).add(run.arm)
    return sum(run.role == "control" and len(arms.get(_pair_key(run), ())) > 1 for run in matrix.runs)


def _cost_words(document: dict[str, Any], rate: float | None, elsewhere: str) -> list[str]:
    runs, slots = document["runs"], document["slots"]
    cost = f"{document['total_tokens']:,} tokens in {runs} runs, {slots} at a time{elsewhere}"
    if rate:
        cost += (
            f"; {document['hours']:.2f} device-hours at {rate:,.0f} tokens/s, about {document['wall_hours']:.2f} h "
            "from start to end"
        )
    shared = document["shared_controls"]
    controls = f"{document['controls']} BF16 controls" + (
        f", {shared} of them shared by several arms" if shared else ""
    )
    memory = document["memory_bytes"]
    return [
        f"{cost}.",
        f"{document['pairs']} pairs, {controls}; baselines first, then seed by seed.",
        "Seeds, recipes, null runs may be added later; more steps are other runs: their schedule differs from step 1.",
        f"Memory of the largest run: about {memory / 2**30:.1f} GiB (an estimate: {FORMULA}).",
        *_standby_words(document["standby"], document["standby_bytes"]),
    ]


def _standby_words(depth: Depth | None, held: int) -> list[str]:
    if depth is None:
        return []
    what = "its model on the device" if depth == "prove" else "its model on the host"
    words = f"While a run trains, the next one waits in standby with {what}: up to {held / 2**30:.1f} GiB more on the "
    return [words + "device for each slot, as far as it fits (runtime.standby)."]


def _model_words(matrix: Matrix) -> list[str]:
    """Say what is worth knowing of models of the user's, once each."""
    models = {run.spec.model.label: run.spec.model for run in matrix.runs}
    return [
        f"{label}: {note}."
        for label, model in models.items()
        if not isinstance(model, ModelSpec)
        for note in model.found.notes
    ]


def _data_words(matrix: Matrix) -> list[str]:
    """Say where a run reads its training tokens more than once: what it learns by heart is another question.

    Known of token files only; other data are packed when the study begins. A fork goes on where its parent stopped.
    """
    told = {}
    for spec in (run.spec for run in matrix.runs):
        if isinstance(spec.data, DataSpec) and spec.data.source == "bin":
            path = resolve_data_path(spec, matrix.recipe_path.parent)
            before = spec.batches_before * spec.train.tokens_per_step
            told[path, before, before + _tokens(spec)] = path.name
    held = {path: read_meta(path).train_tokens for path, _, _ in told}
    return [
        f"{name} holds {held[path]:,} training tokens: a run of {end - before:,}"
        + (f", {before:,} of its parent's before it," if before else "")
        + f" reads them {end / held[path]:.2f} times."
        for (path, before, end), name in told.items()
        if end > held[path] > 0
    ]


def _tokens(spec: RunSpec) -> int:
    return spec.train.steps * spec.train.tokens_per_step


def plan_document(matrix: Matrix) -> dict[str, Any]:
    """Return the plan as JSON values; `words` says the same in sentences.

    Keys: study, runs, pairs, controls, shared_controls, slots, total_tokens, hours and wall_hours (None without
    runtime.tokens_per_s), memory_bytes (of the largest run), standby (how far workers prepare ahead of their turn, or
    None), standby_bytes (what one of them holds of its device), arms, order (run ids as they start), detection, errors
    (none: a recipe file with errors is refused), words.
    """
    grouped: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in matrix.runs:
        grouped.setdefault((run.group, run.arm), []).append(run)
    slots = slots_of(matrix)
    tokens = sum(_tokens(run.spec) for run in matrix.runs)
    rate = matrix.runtime.tokens_per_s
    hours = tokens / rate / 3600 if rate else None
    detection = _detection(matrix)
    arms = [_arm(matrix, runs) for runs in grouped.values()]
    memory = max(arm["memory"]["total"] for arm in arms)
    standby = standby_of(matrix)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "study": matrix.name,
        "runs": len(matrix.runs),
        "pairs": matrix.pairs,
        "controls": sum(run.role == "control" for run in matrix.runs),
        "shared_controls": _shared_controls(matrix),
        "slots": slots,
        "total_tokens": tokens,
        "hours": hours,
        "wall_hours": None if hours is None else hours / min(slots, len(matrix.runs)),
        "memory_bytes": memory,
        "standby": standby,
        "standby_bytes": {None: 0, "build": min(memory, PROCESS_BYTES), "prove": memory}[standby],
        "arms": arms,
        "order": [run.run_id for run in matrix.runs],
        "detection": detection,
        "errors": [],
    }
    found = (
        _detection_words(detection, criteria_of(matrix))
        if matrix.compares
        else ["Nothing is compared: this study trains parents of forks."]
    )
    forks = fork_words([run.spec for run in matrix.runs])
    on_one = _lacks_gpu(matrix) and not matrix.runtime.slots
    return {
        **document,
        "words": [
            *_cost_words(document, rate, " on one GPU (this machine has none)" if on_one else ""),
            *_data_words(matrix),
            *_model_words(matrix),
            *forks,
            *_tail_words(arms),
            *found,
        ],
    }


def _tail_words(arms: list[dict[str, Any]]) -> list[str]:
    told = [
        f"{arm['arm']}: FP8 up to step {arm['switch_at']} of {arm['steps']}, BF16 from the next step on."
        for arm in arms
        if arm["switch_at"] is not None
    ]
    return list(dict.fromkeys(told))  # once for an arm of several groups
