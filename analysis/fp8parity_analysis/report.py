"""The report of a study: one self-contained HTML page, the same as JSON, a Markdown summary and JUnit XML."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fp8parity_analysis import (
    junit,
    report_facts,
    report_tables,
    report_tensor,
    report_tensor_figures,
    summary,
    tensor_health,
    wording,
)
from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.report_figures import MAX_POINTS, Pictures, pictures_of
from fp8parity_analysis.report_model import REPORT_SCHEMA_VERSION, Finding, ReportModel
from fp8parity_analysis.schema import REPORT_FILE
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.verdict import Evidence, strict_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fp8parity_analysis.report_tensor_model import TensorFigures
    from fp8parity_analysis.store import RunRecord
    from fp8parity_analysis.tensor_health import TensorHealth
    from fp8parity_analysis.verdict import Judgement, Verdict

REPORT_JSON = "report.json"
SUMMARY_FILE = "summary.md"
JUNIT_FILE = "junit.xml"

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_POST_HOC = "*post hoc*: "


def write(
    out_dir: Path,
    judgement: Judgement,
    records: Sequence[RunRecord],
    study: Mapping[str, Any],
    *,
    reproduce: str,
    tensor: TensorHealth | None = None,
) -> tuple[Path, ...]:
    """Write `report.html`, `report.json`, `summary.md` and `junit.xml` into `out_dir` and return their paths.

    `records` may be empty (curves from outside); `study` is the content of `study.json`, every key
    optional; `reproduce` is the shell command that repeats the study; `tensor` is the tensor health of the runs where
    it is known already. Each file appears by rename, whole or
    not at all. Deterministic: the same arguments give the same bytes. Errors: `OSError` of the disk.
    """
    runs = StudyRuns.of(records)
    health = tensor or tensor_health.examine(judgement, runs)
    model = build(judgement, runs, study, reproduce=reproduce)
    model = replace(model, tensor=report_tensor.section_of(health))
    documents = {
        REPORT_FILE: render(model, pictures_of(judgement, runs), report_tensor_figures.figures_of(health)),
        REPORT_JSON: to_json(model),
        SUMMARY_FILE: summary.render(model),
        JUNIT_FILE: junit.render(model, judgement, str(study.get("created_at") or "")),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    return tuple(_replace(out_dir / name, text) for name, text in documents.items())


def _replace(path: Path, text: str) -> Path:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def build(judgement: Judgement, runs: StudyRuns, study: Mapping[str, Any], *, reproduce: str) -> ReportModel:
    """Return everything that the report says, as data."""
    findings = _findings(judgement)
    model = ReportModel(
        name=str(study.get("name") or "FP8 against BF16"),
        description=str(study.get("description") or ""),
        headline=wording.headline(judgement),
        gate=judgement.gate.value,
        gate_word=wording.GATE_WORDS[judgement.gate],
        post_hoc=judgement.post_hoc,
        rule=wording.rule(judgement.criteria),
        findings=findings,
        grid=report_tables.grid_of(judgement),
        contrasts=report_tables.contrasts_table(judgement),
        noise=report_tables.noise_table(judgement),
        cost=report_tables.cost_table(judgement, report_facts.speedups_of(runs), report_facts.no_speed(runs)),
        limits=report_facts.limits_of(runs, judgement),
        warnings=_shared_warnings(findings),
        precision=report_facts.precision_table(runs),
        precision_details=report_facts.precision_details(runs),
        provenance=report_facts.provenance_of(runs, study, judgement),
        reproduce=reproduce,
        made_by=f"fp8parity {_version()}",
        judgement=judgement.to_json(),
        evidence=tuple(_evidence_json(item) for item in judgement.evidence),
    )
    return _without_repeats(model)


def _findings(judgement: Judgement) -> tuple[Finding, ...]:
    keys = report_tables.keys_of(judgement)
    return tuple(
        _finding(item, keys[item.recipe], null_arm=item.recipe in judgement.null_recipes)
        for item in judgement.verdicts
    )


def _finding(verdict: Verdict, key: str, *, null_arm: bool) -> Finding:
    return Finding(
        key=key,
        recipe=verdict.recipe,
        null_arm=null_arm,
        outcome=verdict.outcome.value,
        gate=verdict.gate.value,
        title=wording.title(verdict.outcome, null_arm=null_arm),
        sentence=wording.sentence(verdict, null_arm=null_arm),
        gap=fmt.gap(verdict.gap, verdict.interval, fmt.digits_for(verdict.margin)),
        has_gap=verdict.gap is not None,
        margin=fmt.margin(verdict.margin),
        level=wording.level(verdict.alpha),
        seeds=fmt.plural(verdict.n_seeds, "seed"),
        provisional=verdict.provisional,
        reasons=verdict.reasons,
        warnings=tuple(text for text in verdict.warnings if not text.startswith(_POST_HOC)),
    )


def _shared_warnings(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the warnings that every recipe repeats: they are said once, for the study."""
    if len(findings) < 2:
        return ()
    common = set.intersection(*(set(item.warnings) for item in findings))
    return tuple(text for text in findings[0].warnings if text in common and not wording.is_note(text))


def _without_repeats(model: ReportModel) -> ReportModel:
    findings = tuple(
        replace(item, warnings=tuple(text for text in item.warnings if text not in model.warnings))
        for item in model.findings
    )
    return replace(model, findings=findings)


def _evidence_json(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence with its curves cut to at most `MAX_POINTS` evenly spread evaluations."""
    stride = -(-len(evidence.steps) // MAX_POINTS) or 1
    document: dict[str, Any] = strict_json(asdict(evidence))
    document["steps"] = list(evidence.steps[::stride])
    document["gap_by_seed"] = [list(row[::stride]) for row in evidence.gap_by_seed]
    return document


def _version() -> str:
    try:
        return version("fp8parity")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "(not installed)"


def to_json(model: ReportModel) -> str:
    """Return the report as strict JSON text under a version of its own."""
    document = {"report_schema_version": REPORT_SCHEMA_VERSION, **strict_json(asdict(model))}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


@lru_cache(maxsize=1)
def page_environment() -> Environment:
    """Return the environment of this page's template and the nightly's: escaping, numbers tied to their unit."""
    environment = Environment(
        loader=PackageLoader("fp8parity_analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_keep_units,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["note"] = wording.is_note
    return environment


def _keep_units(value: object) -> object:
    """Tie a per cent sign to its number; what is marked safe, such as a command, stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.replace(" %", "\N{NO-BREAK SPACE}%")
    return value


def render(
    model: ReportModel, pictures: Pictures, tensor_figures: Mapping[str, TensorFigures] | None = None
) -> str:
    """Return the HTML page; every text of the model is escaped, the pictures are trusted SVG."""
    template = page_environment().get_template("report.html.j2")
    page = template.render(
        model=model,
        reproduce=escape(model.reproduce),
        forest_wide=Markup(pictures.forest_wide or ""),
        forest_narrow=Markup(pictures.forest_narrow or ""),
        loss={recipe: Markup(svg) for recipe, svg in pictures.loss.items()},
        gap={recipe: Markup(svg) for recipe, svg in pictures.gap.items()},
        tail_of_one=pictures.tail_of_one,
        tensor=model.tensor,
        tensor_figures=tensor_figures or {},
        tensor_words=report_tensor_figures.WORDS,
    )
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", page) + "\n"
