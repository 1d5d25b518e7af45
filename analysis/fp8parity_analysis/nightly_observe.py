"""From the runs and verdicts of one night to the line that the history keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import schema
from fp8parity_analysis.history import Cell, Check, Observation
from fp8parity_analysis.report_facts import speeds_of
from fp8parity_analysis.study_runs import StudyRuns, first_of, median_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.store import RunRecord
    from fp8parity_analysis.verdict import Judgement, Verdict

TAIL_FRACTION = 0.10


def cells_of(judgement: Judgement) -> tuple[Cell, ...]:
    """Return one cell per recipe; null arms are noise, not cells, unless there is nothing else."""
    only_nulls = all(item.recipe in judgement.null_recipes for item in judgement.verdicts)
    return tuple(
        Cell(
            item.recipe,
            item.outcome.value,
            item.gate.value,
            item.gap,
            item.interval,
            item.n_seeds,
            item.reasons,
        )
        for item in judgement.verdicts
        if only_nulls or item.recipe not in judgement.null_recipes
    )


def series_of(
    judgement: Judgement, records: Sequence[RunRecord], tensor: Mapping[str, float] | None = None
) -> dict[str, Observation]:
    """Return the monitored numbers of a night; what is not known is left out.

    `tensor` maps names such as `rowwise/blocks.3.mlp.down/weight/sqnr_db` to numbers.
    """
    runs = StudyRuns.of(records)
    speeds = speeds_of(runs)
    found: dict[str, float | None] = {}
    predicted: dict[str, float | None] = {}
    sizes: dict[str, int] = {}
    for verdict in judgement.verdicts:
        if verdict.recipe in judgement.null_recipes:
            continue
        controls = runs.controls_of(verdict.recipe)
        group = str(controls[0].spec["group"]) if controls else "all"
        sd, df = _null_sd(verdict)
        found[f"gap/{verdict.recipe}"] = verdict.gap
        predicted[f"gap/{verdict.recipe}"] = _over_root(sd, verdict.n_seeds / 2)
        found[f"speedup/{verdict.recipe}"] = speeds.get(verdict.recipe)
        found[f"noise/{group}"] = sd
        found[f"loss/{group}"] = control_loss(controls)
        predicted[f"loss/{group}"] = _over_root(sd, len(controls))
        if sd is not None:
            sizes |= dict.fromkeys((f"gap/{verdict.recipe}", f"noise/{group}", f"loss/{group}"), df)
        found[f"speed/{group}"] = median_of(controls, "throughput_tokens_per_s")
    found |= {f"tensor/{name}": float(value) for name, value in (tensor or {}).items()}
    return {
        name: Observation(value, predicted.get(name), sizes.get(name))
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    }


def _null_sd(verdict: Verdict) -> tuple[float | None, int]:
    """Return the sd of a control run within its seed and its degrees of freedom."""
    spread = verdict.noise_floor.get("control_run") or {}
    sd = spread.get("sd")
    if sd is None or not math.isfinite(sd):
        return None, 0
    return float(sd), int(spread["df"])


def _over_root(sd: float | None, n: float) -> float | None:
    return sd / math.sqrt(n) if sd is not None and n > 0 else None


def control_loss(controls: Sequence[RunRecord]) -> float | None:
    """Return the geometric mean over control runs of the held-out loss in the last tenth of their evaluations."""
    logs = [value for value in (_tail_log(record) for record in controls) if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _tail_log(record: RunRecord) -> float | None:
    rows = record.evals
    rows = rows[(rows["split"] == schema.HELD_OUT) & (rows["eval_precision"] == schema.EVAL_BF16)]
    losses = [float(value) for value in rows.sort_values("step")["loss"]]
    tail = losses[-max(1, math.ceil(TAIL_FRACTION * len(losses))) :]
    if not tail or any(not math.isfinite(value) or value <= 0 for value in tail):
        return None
    return sum(math.log(value) for value in tail) / len(tail)


def checks_of(
    judgement: Judgement, records: Sequence[RunRecord], selftest: Mapping[str, Any] | None = None
) -> dict[str, Check]:
    """Return what is right or wrong: the proof that FP8 ran, by recipe, and the self test where there is one."""
    runs = StudyRuns.of(records)
    found = {}
    for verdict in judgement.verdicts:
        if verdict.recipe not in judgement.null_recipes and runs.tests_of(verdict.recipe):
            proof = first_of(runs.tests_of(verdict.recipe), "execution")
            if proof:
                found[f"execution/{verdict.recipe}"] = _proof(proof)
    if selftest is not None:
        found["selftest"] = _selftest(selftest)
    return found


def _selftest(told: Mapping[str, Any]) -> Check:
    """Read what `fp8parity selftest --json` prints; the words do not hold measurements, which differ every night."""
    faults = [
        f"{subject.get('label')}: {fault.get('text')}"
        for subject in told.get("subjects", ())
        for fault in subject.get("faults", ())
    ]
    ok = told.get("right") is True and not faults
    return Check(ok, "right" if ok else "; ".join(faults) or "not right")


def _proof(proof: Mapping[str, Any]) -> Check:
    differences = [str(text) for text in proof.get("differences") or ()]
    ok = bool(proof.get("proven", not differences))
    words = f"proven, {proof.get('as_trained')} FP8 GEMMs a step" if ok else "not proven"
    return Check(ok, "; ".join([words, *differences]))


def crashed_of(records: Sequence[RunRecord], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the runs without an end, by a name that is the same every night, and why."""
    return {
        _name(record): reasons.get(record.run_id, "no manifest was written")
        for record in records
        if record.manifest is None
    }


def finished_of(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return the names of the runs that reached an end."""
    return tuple(_name(record) for record in records if record.manifest is not None)


def _name(record: RunRecord) -> str:
    spec = record.spec
    replica = f" replica {spec['replica']}" if spec["replica"] else ""
    return f"{spec['group']}/{spec['arm']} seed {spec['seed']}{replica}"


def facts_of(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what the runs say of their data and their Python; what none of them says is left out."""
    manifests = [record.manifest for record in records if record.manifest]
    told = {
        "data sha256": {item.get("data_sha256") for item in manifests},
        "Python": {(item.get("effective") or {}).get("python") for item in manifests},
    }
    return {name: ", ".join(sorted(filter(None, values))) for name, values in told.items() if any(values)}
