"""Tables of the report that come from the stored runs: precision, provenance, and what is not claimed."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.forks import fork_facts, fork_limits, tail_notes
from fp8parity_analysis.report_model import PrecisionDetail, Provenance, Table
from fp8parity_analysis.schema import HELD_OUT
from fp8parity_analysis.study_runs import StudyRuns, distinct, first_of, median_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.arms import Arm
    from fp8parity_analysis.store import RunRecord
    from fp8parity_analysis.verdict import Judgement

_GEMMS = ("output", "grad_input", "grad_weight")
_BLOCK = re.compile(r"\.(\d+)\.")
_DIGEST_SHOWN = 12


def speeds_of(runs: StudyRuns) -> dict[str, float | None]:
    """Return the median throughput of each recipe over that of its controls, None where not recorded.

    As recorded, also on a CPU or a shared device: fit to be compared over nights, which share those. `speedups_of` is
    what may be said of a recipe.
    """
    speeds: dict[str, float | None] = {}
    for recipe in runs.arms:
        key = "throughput_tokens_per_s"
        test, control = median_of(runs.tests_of(recipe), key), median_of(runs.controls_of(recipe), key)
        speeds[recipe] = test / control if test and control else None
    return speeds


def speedups_of(runs: StudyRuns) -> dict[str, float | None]:
    """Return the speed-up of each recipe over BF16, None where the throughput says nothing about the recipe."""
    return {recipe: _speedup(arm) for recipe, arm in runs.arms.items()}


def _speedup(arm: Arm) -> float | None:
    control = [run for seed, members in arm.control.items() if seed in arm.test for run in members]
    tests = [run for members in arm.test.values() for run in members]
    rates = [[run.tokens_per_s for run in side if run.tokens_per_s] for side in (tests, control)]
    return median(rates[0]) / median(rates[1]) if all(rates) else None


def no_speed(runs: StudyRuns) -> str:
    """Return why a measured throughput is no speed of a recipe, empty where it is one or none was measured."""
    measured = [item for item in runs.manifests() if item.get("throughput_tokens_per_s")]
    effective = [item.get("effective") or {} for item in measured]
    if any(item.get("device") == "cpu" for item in effective):
        return "No speed-up is measured on a CPU, which emulates FP8."
    if any(item.get("runs_per_device", 1) != 1 for item in effective):
        return "No speed-up is measured where several runs share a device: train with one run per device."
    return ""


def precision_table(runs: StudyRuns) -> Table | None:
    """Return what each recipe converted and in which formats it multiplied; None without a record of it."""
    rows = [_precision_row(recipe, runs.tests_of(recipe)) for recipe in _recipes(runs)]
    rows = [row for row in rows if row]
    if not rows:
        return None
    return Table(
        caption="What ran in FP8",
        head=("recipe", "FP8 share of FLOPs", "linears", "FP8 GEMMs run", *_GEMMS, "backend"),
        rows=tuple(rows),
        numeric=(1, 2, 3),
        notes=(
            "Share of the GEMMs' FLOPs. Formats are those of the two operands of each matrix product.",
            *_cast_sources(runs),
            *_execution_notes(runs),
            *tail_notes({recipe: runs.tests_of(recipe) for recipe in _recipes(runs)}),
        ),
    )


def _recipes(runs: StudyRuns) -> list[str]:
    return [recipe for recipe, arm in runs.arms.items() if not arm.null_arm]


def _precision_row(recipe: str, records: Sequence[RunRecord]) -> tuple[str, ...]:
    conversion = first_of(records, "conversion")
    if not conversion:
        return ()
    share, converted = conversion.get("fp8_flop_share"), len(conversion.get("converted") or ())
    total = converted + len(conversion.get("skipped") or ())
    formats = conversion.get("gemm_dtypes") or {}
    return (
        recipe,
        fmt.percent(share, 1, signed=False),
        f"{converted} of {total}",
        fmt.count(first_of(records, "execution").get("as_trained")),
        *(str(formats.get(gemm, fmt.NOTHING)) for gemm in _GEMMS),
        str(conversion.get("backend", fmt.NOTHING)),
    )


def _cast_sources(runs: StudyRuns) -> Iterator[str]:
    sources = [
        first_of(runs.tests_of(name), "conversion").get("weight_cast_source") for name in _recipes(runs)
    ]
    known = distinct(sources)
    if known:
        yield f"An FP8 weight is cast from the {' or the '.join(known)} copy of the weight."


def _execution_notes(runs: StudyRuns) -> Iterator[str]:
    proofs = {name: first_of(runs.tests_of(name), "execution") for name in _recipes(runs)}
    if any(proofs.values()):
        yield "FP8 GEMMs run: counted in one forward and backward pass, before the first step."
    for name, proof in proofs.items():
        for difference in proof.get("differences") or ():
            yield f"{name} ran other than declared: {difference}"


def precision_details(runs: StudyRuns) -> tuple[PrecisionDetail, ...]:
    """Return, by recipe, which linears ran in FP8 and why the others did not."""
    found = ((recipe, first_of(runs.tests_of(recipe), "conversion")) for recipe in _recipes(runs))
    return tuple(
        PrecisionDetail(recipe, _linears(recipe, conversion)) for recipe, conversion in found if conversion
    )


def _linears(recipe: str, conversion: Mapping[str, Any]) -> Table:
    blocks: dict[tuple[str, str, str], list[int]] = {}
    for name, state, why in _decisions(conversion):
        block = _BLOCK.search(name)
        stem = name[block.end() :] if block else name
        blocks.setdefault((state, why, stem), []).extend([int(block[1])] if block else [])
    # linears that share state, reason and blocks share a line
    lines: dict[tuple[str, str, str], list[str]] = {}
    for (state, why, stem), numbers in blocks.items():
        where = fmt.ranges(numbers) if numbers else fmt.NOTHING
        lines.setdefault((state, why, where), []).append(stem)
    return Table(
        caption=f"Linears of {recipe}",
        head=("ran in", "why", "blocks", "linears"),
        rows=tuple((*line, ", ".join(stems)) for line, stems in lines.items()),
        notes=tuple(str(note) for note in conversion.get("notes") or ()),
    )


def _decisions(conversion: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in conversion.get("converted") or ():
        yield str(name), "FP8", "converted"
    for item in conversion.get("skipped") or ():
        yield str(item.get("fqn")), "BF16", str(item.get("reason"))


def provenance_of(runs: StudyRuns, study: Mapping[str, Any], judgement: Judgement) -> Provenance:
    """Return the facts that identify the study: environment, data, recipe, digests, runs."""
    return Provenance(
        facts=Table("Environment and inputs", ("what", "value"), tuple(_facts(runs, study, judgement))),
        runs=_runs_table(runs),
        digests=_digests_table(runs),
    )


def _facts(runs: StudyRuns, study: Mapping[str, Any], judgement: Judgement) -> Iterator[tuple[str, str]]:
    for key, words in (("created_at", "study started"), ("recipe_file", "recipe file")):
        if study.get(key):
            yield words, str(study[key])
    if study.get("recipe_sha256"):
        yield "recipe sha256", str(study["recipe_sha256"])
    yield "criteria digest", judgement.criteria.digest()
    yield from fork_facts(list(runs.records.values()))
    manifests = list(runs.manifests())
    yield from _told("data sha256", [item.get("data_sha256") for item in manifests])
    said: set[str] = set()
    for key in ("environment", "effective"):
        documents = [item.get(key) or {} for item in manifests]
        names = dict.fromkeys(name for document in documents for name in document)
        for name in names:
            words = str(name).replace("_", " ") + (", as used" if name in said else "")
            yield from _told(words, [document.get(name) for document in documents])
        said |= set(names)


def _told(name: str, values: Sequence[Any]) -> Iterator[tuple[str, str]]:
    found = distinct(values)
    if len(found) == 1:
        yield name, found[0]
    elif found:
        yield name, "differs between runs: " + " | ".join(found)


def _digests_table(runs: StudyRuns) -> Table | None:
    by_cell: dict[tuple[str, str], list[Any]] = {}
    for record in runs.records.values():
        key = (str(record.spec["group"]), str(record.spec["seed"]))
        by_cell.setdefault(key, []).append((record.manifest or {}).get("init_digest"))
    rows = [
        (group, seed, " | ".join(distinct(values)))
        for (group, seed), values in by_cell.items()
        if any(values)
    ]
    if not rows:
        return None
    return Table("Initial weights, shared by every run of a seed", ("group", "seed", "digest"), tuple(rows))


def _runs_table(runs: StudyRuns) -> Table | None:
    if not runs.records:
        return None
    head = ("run", "arm", "seed", "status", "steps", "tokens", "last held-out loss", "tokens/s", "wall time")
    rows = tuple(_run_row(record) for record in runs.records.values())
    return Table(f"All {fmt.plural(len(rows), 'run')}", head, rows, numeric=(2, 4, 5, 6, 7, 8))


def _run_row(record: RunRecord) -> tuple[str, ...]:
    manifest = record.manifest or {}
    speed, wall = manifest.get("throughput_tokens_per_s"), manifest.get("wall_seconds")
    return (
        record.run_id,
        str(record.spec["arm"]),
        str(record.spec["seed"]),
        str(manifest.get("status", "unfinished")),
        fmt.count(manifest.get("steps_done")),
        fmt.count(manifest.get("tokens")),
        _last_loss(record),
        fmt.count(speed),
        fmt.NOTHING if wall is None else fmt.duration(wall),
    )


def _last_loss(record: RunRecord) -> str:
    rows = record.evals[record.evals["split"] == HELD_OUT]
    if rows.empty:
        return fmt.NOTHING
    last = rows[rows["step"] == rows["step"].max()].sort_values("eval_precision")  # arm before bf16
    return f"{float(last['loss'].iloc[-1]):.4f}"


def limits_of(runs: StudyRuns, judgement: Judgement) -> tuple[str, ...]:
    """Return what the verdicts do not claim: each line names a limit and what would be needed beyond it."""
    return (
        *fork_limits(list(runs.records.values())),
        *_horizon(runs, judgement),
        *_setting(runs),
        *_numerics(runs),
        *_words(judgement),
    )


def _horizon(runs: StudyRuns, judgement: Judgement) -> Iterator[str]:
    tokens = {item.horizon_tokens for item in judgement.verdicts if item.horizon_tokens}
    steps = max((evidence.steps[-1] for evidence in judgement.evidence if evidence.steps), default=0)
    length = [f"{fmt.count(min(tokens))} tokens"] if tokens else []
    length += [f"{fmt.plural(steps, 'step')}"] if steps else []
    per_step = _tokens_per_step(runs)
    if per_step:
        length.append(f"{per_step} tokens a step")
    if length:
        yield f"Beyond this horizon: {', '.join(length)}. A gap that opens later does not show here."


def _tokens_per_step(runs: StudyRuns) -> str:
    rates = {
        round(manifest["tokens"] / manifest["steps_done"])
        for manifest in runs.manifests()
        if manifest.get("tokens") and manifest.get("steps_done")
    }
    return " or ".join(fmt.count(rate) for rate in sorted(rates))


def _setting(runs: StudyRuns) -> Iterator[str]:
    if not runs.records:
        yield (
            "For another model, batch size, learning rate or data set: the curves came from outside, so what "
            "they were trained on is not recorded here."
        )
        return
    models = [manifest.get("model") or {} for manifest in runs.manifests()]
    sizes = {item["parameters"]: item.get("label") for item in models if item.get("parameters")}
    if sizes:
        named = [f"{fmt.short_count(size)} parameters ({label})" for size, label in sorted(sizes.items())]
        yield f"For another model: {', '.join(named)}. Larger models are another question."
    specs = [record.spec["spec"] for record in runs.records.values()]
    rates = distinct([(spec.get("optim") or {}).get("lr") for spec in specs])
    source = distinct([(manifest.get("effective") or {}).get("data_source") for manifest in runs.manifests()])
    told = ([f"data: {', '.join(source)}"] if source else []) + (
        [f"learning rate {', '.join(rates)}"] if rates else []
    )
    if told:
        yield f"For other data or settings: {'; '.join(told)}."


def _numerics(runs: StudyRuns) -> Iterator[str]:
    devices = distinct([(item.get("environment") or {}).get("device_type") for item in runs.manifests()])
    if "cpu" in devices:
        yield (
            "About a GPU's kernels or speed: these runs computed FP8 on a CPU, so the verdict is about the "
            "numerics of the recipe, and throughput here says nothing about hardware."
        )


def _words(judgement: Judgement) -> Iterator[str]:
    yield (
        "That two recipes are the same because neither differs from BF16, or that nothing differs because "
        "nothing was found: only an interval inside the margin is called equivalent."
    )
    if any(item.outcome.value == "INCONCLUSIVE" for item in judgement.verdicts):
        yield "That a recipe that is not settled is either fine or faulty."
