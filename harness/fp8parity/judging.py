"""From what is stored to verdicts and reports. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8parity.early_stop import judge_with_stops, stops_of
from fp8parity.ledger import why_unfinished
from fp8parity.recipe_file import parse_fraction
from fp8parity.study import criteria_from_json, is_post_hoc
from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.store import RunRecord, read_runs, read_study
from fp8parity_analysis.verdict import Judgement
from fp8parity_analysis.verdict import judge as judge_curves

_FRACTIONS = ("margin", "noise_sd")


def changed_criteria(base: Criteria, options: Mapping[str, Any]) -> Criteria:
    """Return `base` with the options that were given (not None); percentages become fractions."""
    given = {key: value for key, value in options.items() if value is not None}
    for key in _FRACTIONS:
        if key in given:
            given[key] = _fraction(key, given[key])
    return replace(base, **given)


def _fraction(key: str, value: Any) -> float:
    try:
        return float(parse_fraction(value))
    except ValueError as error:
        raise BadInputError(
            f"--{key.replace('_', '-')}: {value!r} is no fraction; write 0.0025 or 0.25%"
        ) from error


def judge_study(study_dir: Path, options: Mapping[str, Any]) -> Judgement:
    """Judge a study directory under its own criteria, changed by `options`.

    Criteria that differ from those recorded at launch make the judgement *post hoc*.
    """
    study = read_study(study_dir)
    criteria = changed_criteria(criteria_from_json(study["criteria"]), options)
    records = read_runs(study_dir)
    gone = sorted(set(study.get("runs", ())) - {record.run_id for record in records})
    if gone:
        raise BadInputError(
            f"{study_dir}: {len(gone)} runs of the study are not on the disk ({', '.join(gone[:3])}); a verdict "
            "without them would be about the survivors. Run the study again, or take them out of the recipe file"
        )
    post_hoc = is_post_hoc(criteria, study["criteria_at_launch"])

    def judge(some: Sequence[RunRecord]) -> Judgement:
        curves = _with_reasons(CurveSet.from_runs(list(some)), study_dir)
        return judge_curves(curves, criteria, post_hoc=post_hoc)

    stops = stops_of(study)
    return judge_with_stops(records, stops, judge) if stops else judge(records)


def _with_reasons(curves: CurveSet, study_dir: Path) -> CurveSet:
    """Let the runs that left no result say why, as the ledger has it: a verdict that lacks them repeats it."""
    why = why_unfinished(study_dir)
    runs = tuple(
        replace(run, problems=(*run.problems, f"{run.label}: {why[run.label]}"))
        if run.status is None and run.label in why
        else run
        for run in curves.runs
    )
    return replace(curves, runs=runs)


def judge_paths(sources: Sequence[str], options: Mapping[str, Any], settings: ImportSettings) -> Judgement:
    """Judge one study directory, or run directories and curves of other programs taken together.

    `sources` are paths, or `mlflow:EXPERIMENT`; `settings` maps other programs' names. Errors: `BadInputError`.
    """
    if len(sources) == 1 and (Path(sources[0]) / schema.STUDY_FILE).exists():
        return judge_study(Path(sources[0]), options)
    return judge_curves(read_curves(sources, settings), changed_criteria(Criteria(), options))


def noise_of_study(path: Path) -> dict[str, Any]:
    """Return `noise_sd` and `noise_df` as an earlier study measured them: a run around the mean of its own seed.

    `path` is a study directory or its verdicts.json. Of all arms and both sides the largest sd is taken, with its
    degrees of freedom. `BadInputError` when the study had no replicas that differ.
    """
    source = path / schema.VERDICTS_FILE if path.is_dir() else path
    verdicts = read_json(source).get("verdicts")
    floors = [item.get("noise_floor") or {} for item in verdicts or () if isinstance(item, Mapping)]
    spreads = [floor.get(side) or {} for floor in floors for side in ("control_run", "test_run")]
    known = [(spread["sd"], spread["df"]) for spread in spreads if spread.get("sd") and spread.get("df")]
    if not known:
        raise BadInputError(
            f"--noise-from {path}: no arm there has replicas that differ, so it has no noise floor; add a null arm "
            "to that study, or state --noise-sd"
        )
    sd, df = max(known)
    return {"noise_sd": sd, "noise_df": df}


def mapping_of(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Turn `NAME=THEIRS` options into a mapping; `BadInputError` shows the form."""
    found = {}
    for pair in pairs:
        name, equals, theirs = pair.partition("=")
        if not equals or not name or not theirs:
            raise BadInputError(f"--{option} {pair!r}: write NAME=VALUE, such as loss=val_loss")
        found[name] = theirs
    return found


def write_results(study_dir: Path, judgement: Judgement, *, followup: Path | None = None) -> tuple[Path, ...]:
    """Write verdicts.json, the reports and, where there are any, tensor.json of a study directory; returns the paths.

    `followup` is where to write the recipe file of the run that decides about the tensors' first candidates. Errors:
    those of `followup.write_followup`, after everything else is written.
    """
    from fp8parity_analysis import report  # draws: matplotlib takes a second to import
    from fp8parity_analysis.report_tensor import TENSOR_FILE, watched
    from fp8parity_analysis.study_runs import StudyRuns
    from fp8parity_analysis.tensor_health import examine

    study = read_study(study_dir)
    verdicts = study_dir / schema.VERDICTS_FILE
    write_json(verdicts, judgement.to_json())
    command = f"fp8parity run {study['recipe_file']} --out {study_dir}"
    records = read_runs(study_dir)
    runs = StudyRuns.of(records)
    health = examine(judgement, runs)
    paths = [
        verdicts,
        *report.write(study_dir, judgement, records, study, reproduce=command, tensor=health),
    ]
    numbers = watched(health)
    if numbers:
        write_json(study_dir / TENSOR_FILE, numbers)
        paths.append(study_dir / TENSOR_FILE)
    if followup is not None:
        from fp8parity.followup import first_arm, write_followup

        tests = runs.tests_of(first_arm(health))
        paths.append(write_followup(study_dir, health, tests[0].spec["spec"] if tests else None, followup))
    return tuple(paths)
