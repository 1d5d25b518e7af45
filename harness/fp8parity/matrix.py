"""From a recipe file to the runs: axes expanded, controls shared, everything checked before any training.

A pure function of the file. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8parity import layer_policy, model_preflight
from fp8parity.corpus import corpus_problems
from fp8parity.errors import UsageError
from fp8parity.fork import Parents
from fp8parity.labels import arm_label, group_label, told_within_presets, varying, varying_within_recipes
from fp8parity.own_spec import own_part
from fp8parity.precision_rules import Problem, rule_problems
from fp8parity.probe_spec import ProbePlan
from fp8parity.probe_spec import resolve as resolve_probe
from fp8parity.problems import Problems, explain
from fp8parity.recipe_file import (
    CriteriaSpec,
    RecipeFile,
    RuntimeSpec,
    base_sections,
    parse,
    run_error,
    run_spec,
    set_dotted,
)
from fp8parity.recipe_rules import (
    check_criteria,
    check_device,
    check_kept,
    check_names,
    check_reorder,
    check_used,
)
from fp8parity.shapes import ShapeProblem, linear_shapes, shape_problems
from fp8parity.spec import AnyModelSpec, DataSpec, Frozen, ModelSpec, PrecisionSpec, RunSpec
from fp8parity.token_meta import BYTE_VOCAB, read_meta
from fp8parity.yaml_marks import KeyPath, MarkedYaml, load
from fp8parity_analysis.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class PlannedRun:
    """One run of the matrix with the labels that place it in a comparison, when it is probed, where a fork starts."""

    run_id: str
    group: str
    arm: str
    role: str
    spec: RunSpec
    probe: ProbePlan = field(default_factory=ProbePlan)
    parent_checkpoint: Path | None = None

    def to_json(
        self, study: str, data_path: str, checkpoint_every: int, recipe_dir: str = "."
    ) -> dict[str, Any]:
        """Return the document that becomes `spec.json`; `data_path` and `recipe_dir` are relative to the run directory.

        A model of the user's is built from files beside the recipe, so its run knows where that is.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "study": study,
            "group": self.group,
            "arm": self.arm,
            "role": self.role,
            "seed": self.spec.seed,
            "replica": self.spec.replica,
            "replica_kind": self.spec.replica_kind,
            "data_path": data_path,
            "checkpoint_every": checkpoint_every,
            "spec": self.spec.canonical(),
            "probe": self.probe.model_dump(mode="json"),
            **(
                {}
                if isinstance(self.spec.model, ModelSpec)
                else {"model": own_part(self.spec.model, recipe_dir)}
            ),
        }


@dataclass(frozen=True)
class Matrix:
    """The study: its runs in launch order (controls first, seeds breadth-first), criteria and runtime settings."""

    name: str
    description: str
    runs: tuple[PlannedRun, ...]
    criteria: CriteriaSpec
    runtime: RuntimeSpec
    recipe_path: Path

    @property
    def pairs(self) -> int:
        """Number of (test, control) pairs."""
        return sum(run.role == "test" and run.spec.replica == 0 for run in self.runs)

    @property
    def compares(self) -> bool:
        """Whether anything is compared; a study may also train parents of forks only."""
        return any(run.role != "control" for run in self.runs)


@dataclass(frozen=True)
class _Cell:
    """One combination of axis values: the sections of a run, and where in the file each override stands."""

    sections: dict[str, dict[str, Any]]
    overrides: tuple[tuple[str, Any], ...]
    origins: Mapping[str, KeyPath]


def _cells(recipe: RecipeFile) -> list[_Cell]:
    keys = list(recipe.axes)
    cells = []
    for indices in itertools.product(*(range(len(recipe.axes[key])) for key in keys)):
        chosen = {key: recipe.axes[key][i] for key, i in zip(keys, indices, strict=True)}
        if any(all(chosen.get(k) == v for k, v in drop.items()) for drop in recipe.exclude):
            continue
        origins: dict[str, KeyPath] = {key: ("axes", key, i) for key, i in zip(keys, indices, strict=True)}
        cells.append(_cell(recipe, chosen, origins))
    for index, extra in enumerate(recipe.include):
        cells.append(_cell(recipe, dict(extra), {key: ("include", index, key) for key in extra}))
    return cells


def _cell(recipe: RecipeFile, chosen: Mapping[str, Any], origins: Mapping[str, KeyPath]) -> _Cell:
    sections = base_sections(recipe)
    for key, value in chosen.items():
        set_dotted(sections, key, value)
    return _Cell(sections, tuple(chosen.items()), origins)


def _place(cell: _Cell, loc: Sequence[str | int]) -> KeyPath:
    """Return where in the file a field of a cell was set."""
    dotted = ".".join(str(part) for part in loc[:2])
    if dotted in cell.origins:
        return cell.origins[dotted]
    if dotted in ("precision.keep_first", "precision.keep_last") and "precision.keep" in cell.origins:
        return cell.origins["precision.keep"]
    return ("base", *loc)


def _validated(cell: _Cell, seed: int, problems: Problems) -> RunSpec | None:
    try:
        return run_spec(cell.sections, seed, 0, "none")
    except ValidationError as error:
        for item in error.errors():
            loc, message = run_error(item)
            problems.add(_place(cell, loc), message)
        return None


def _control_precision(recipe: RecipeFile) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {"precision": {"recipe": "bf16"}}
    for key, value in recipe.control.items():
        set_dotted(sections, key, value)
    return sections["precision"]


def _check_control(recipe: RecipeFile, problems: Problems) -> bool:
    """Require the control to be BF16: every verdict is against it, and is worded so. Return whether it is."""
    try:
        control = PrecisionSpec.model_validate(_control_precision(recipe))
    except ValidationError as error:
        for item in error.errors():
            key = item["loc"][0] if item["loc"] else "switch_at"  # the one rule between two keys
            problems.add(("control", f"precision.{key}"), explain(item, PrecisionSpec))
        return False
    if not control.is_bf16:
        problems.add(
            ("control", "precision.recipe"),
            f"the control is {control.recipe}; it must be bf16 (compare FP8 recipes by the contrasts between arms)",
        )
    return control.is_bf16


def _control_problems(recipe: RecipeFile, spec: RunSpec, rows: int) -> Iterator[tuple[KeyPath, str]]:
    """Yield what of the control's own keys does not fit the model of `spec`, at their place in the file."""
    if not set(recipe.control) - {"precision.recipe"}:
        return
    for (section, key), message in preflight(_control_of(recipe, spec), rows):
        if section == "precision":
            yield ("control", f"precision.{key}"), message


def _control_of(recipe: RecipeFile, spec: RunSpec) -> RunSpec:
    """Return the pair's other arm: the same run with the control's precision, all its other keys at defaults."""
    precision = PrecisionSpec.model_validate(_control_precision(recipe))
    return spec.model_copy(update={"precision": precision})


@lru_cache(maxsize=64)
def _shapes(model: AnyModelSpec, vocab_rows: int) -> tuple[Any, ...]:
    return linear_shapes(model, vocab_rows)


def preflight(spec: RunSpec, vocab_rows: int) -> list[tuple[tuple[str, str], str]]:
    """Return what would make this run fail or not be FP8, as ((section, key), message), before any training."""
    rules = [*rule_problems(spec), *model_preflight.model_problems(spec)]
    if rules:
        return rules
    shapes = _shapes(spec.model, vocab_rows)
    try:
        plan = layer_policy.resolve(shapes, spec.precision)
    except UsageError as error:
        key = str(error).partition(":")[0].partition(" ")[0].removeprefix("precision.")
        return [(("precision", key), str(error))]
    if spec.precision.is_bf16:
        return []
    fp8 = set(plan.fp8_fqns)
    tokens = spec.train.tokens_per_micro_batch
    grouped: dict[tuple[str, str, int], list[ShapeProblem]] = {}
    for shape in shapes:
        if shape.fqn in fp8:
            for problem in shape_problems(shape, tokens, spec.precision.recipe, spec.precision.backend):
                grouped.setdefault((problem.gemm, problem.dimension, problem.size), []).append(problem)
    found = [(("precision", "recipe"), _shape_message(same)) for same in grouped.values()]
    return [*model_preflight.conversion_problems(spec, fp8), *found]


def _shape_message(same: Sequence[ShapeProblem]) -> str:
    """Say one size's problem once, however many linears have it."""
    others = f" (and {len(same) - 1} more linears)" if len(same) > 1 else ""
    return f"{same[0]}{others}"


def vocab_rows(spec: RunSpec, recipe_dir: Path) -> int:
    """Return the embedding rows, from the data's side file if it exists; `UsageError` when vocabularies clash."""
    data_vocab = BYTE_VOCAB
    if not isinstance(spec.data, DataSpec):
        data_vocab = spec.data.vocab_size
    elif spec.data.source == "bin":
        data_vocab = read_meta(resolve_data_path(spec, recipe_dir)).vocab_size
    try:
        return spec.model.resolve_vocab(data_vocab)
    except ValueError as error:
        raise UsageError(str(error)) from error


def resolve_data_path(spec: RunSpec, recipe_dir: Path) -> Path:
    """Return the token file of a `source: bin` spec; relative paths are relative to the recipe file."""
    assert isinstance(spec.data, DataSpec)
    assert spec.data.path is not None
    return recipe_dir / spec.data.path


def _run(spec: RunSpec, group: str, arm: str, role: str) -> PlannedRun:
    replica = f"-{spec.replica_kind}{spec.replica}" if spec.replica else ""
    stem = f"{group}-s{spec.seed}-{'bf16' if role == 'null' else arm}{replica}"
    return PlannedRun(f"{stem}-{spec.hash()[:8]}", group, arm, role, spec)


def _check_cells(
    recipe: RecipeFile, cells: Sequence[_Cell], parents: Parents, problems: Problems, *, has_tests: bool
) -> list[RunSpec]:
    """Validate every cell and run the preflight once per cell; problems are collected, not raised."""
    valid: list[RunSpec] = []
    has_control = _check_control(recipe, problems)
    for cell in cells:
        spec = _validated(cell, recipe.seeds[0], problems)
        if spec is None:
            continue
        try:
            spec = model_preflight.resolve(spec, parents.recipe_dir)
        except UsageError as error:
            where, words = model_preflight.place_of(error)
            problems.add(_place(cell, where or ("model",)), words)
            continue
        try:
            rows = vocab_rows(spec, parents.recipe_dir)
        except UsageError as error:
            key = "vocab_size" if str(error).startswith("vocab_size") else "path"
            problems.add(_place(cell, ("model" if key == "vocab_size" else "data", key)), str(error))
            continue
        if spec.precision.is_bf16 and has_tests:
            problems.add(
                _place(cell, ("precision", "recipe")),
                "bf16 is the control and is added by itself; name FP8 recipes here, and replicas of it under null",
            )
        for checked in (spec, *_replicas(recipe, spec, "test")):
            for loc, message in preflight(checked, rows):
                problems.add(_place(cell, loc), message)
        for place, message in _control_problems(recipe, spec, rows) if has_control else ():
            problems.add(place, message)
        for loc, message in _data_problems(recipe, spec, parents):
            problems.add(_place(cell, loc), message)
        valid.append(spec)
    return valid


def _data_problems(recipe: RecipeFile, spec: RunSpec, parents: Parents) -> Iterator[Problem]:
    """Yield what a token file that is there is too short for, and why a fork cannot start where it says."""
    packed = None
    if isinstance(spec.data, DataSpec) and spec.data.source == "bin":
        path = resolve_data_path(spec, parents.recipe_dir)
        packed = read_meta(path)
        yield from corpus_problems(spec, packed, path)
    for seed in (*recipe.seeds, *_null_seeds(recipe)):
        yield from parents.problems(spec, seed, packed.sha256 if packed else None)


def expand(recipe: RecipeFile, marked: MarkedYaml) -> Matrix:
    """Return the matrix of a parsed file; `UsageError` carries every problem of every cell, one per line."""
    problems = Problems(marked)
    has_tests = bool(recipe.axes) or bool(recipe.include) or "recipe" in recipe.base.get("precision", {})
    cells = _cells(recipe) if has_tests else [_cell(recipe, {"precision.recipe": "bf16"}, {})]
    if not cells:
        problems.add(("exclude",), "excludes every cell; nothing is left to run")
    if not has_tests and not recipe.null and not recipe.runtime.keep_checkpoints:
        problems.add(
            ("null",),
            "neither an FP8 recipe (axes: precision.recipe) nor a null arm: nothing to compare (a study that only "
            "trains parents of forks names runtime.keep_checkpoints)",
        )
    parents = Parents(marked.path.parent)
    valid = _check_cells(recipe, cells, parents, problems, has_tests=has_tests)
    check_used(recipe, problems, has_tests=has_tests)
    check_kept(recipe, valid, problems)
    check_device(recipe, valid, problems)
    check_reorder(recipe, valid, problems)
    check_criteria(recipe, problems)
    if problems:
        raise UsageError(str(problems))
    runs = _ordered_runs(recipe, valid, parents)
    check_names(recipe, ((run.run_id, run.group, run.arm, run.spec) for run in runs), problems)
    if problems:
        raise UsageError(str(problems))
    return Matrix(
        recipe.name,
        recipe.description,
        runs,
        recipe.criteria,
        recipe.runtime,
        marked.path,
    )


def _null_seeds(recipe: RecipeFile) -> list[int]:
    """Return the seeds that only replicas of the control have."""
    asked = {s for null in recipe.null if null.arm == "control" for s in (null.seeds or ())}
    return sorted(asked - set(recipe.seeds))


def _ordered_runs(recipe: RecipeFile, cells: Sequence[RunSpec], parents: Parents) -> tuple[PlannedRun, ...]:
    """Return the runs: seed by seed, control before null before tests, each run once."""
    precision_keys = varying_within_recipes(cells)
    group_keys, within_presets = varying(cells, precision=False), told_within_presets(cells)
    runs: dict[str, PlannedRun] = {}
    fp8 = _fp8_arms(cells)
    null_seeds = _null_seeds(recipe)
    for seed in (*recipe.seeds, *null_seeds):
        for spec in cells:
            test = parents.with_parent(spec, seed)
            group = group_label(spec, group_keys, within_presets)
            control = _control_of(recipe, test)
            planned = [_run(control, group, "bf16", "control")]
            planned += [_run(s, group, "bf16_null", "null") for s in _replicas(recipe, control, "control")]
            if seed in recipe.seeds and not spec.precision.is_bf16:
                arm = arm_label(spec, precision_keys)
                planned += [_run(s, group, arm, "test") for s in (test, *_replicas(recipe, test, "test"))]
            for run in planned:
                if run.run_id not in runs:
                    others = fp8.get(_shared_settings(run.spec), []) if run.spec.precision.is_bf16 else []
                    placed = replace(run, parent_checkpoint=parents.checkpoint_of(run.spec))
                    runs[run.run_id] = _with_probe(recipe, placed, others)
    order = {"control": 0, "null": 1, "test": 2}
    seeds = (*recipe.seeds, *null_seeds)
    return tuple(sorted(runs.values(), key=lambda r: (seeds.index(r.spec.seed), order[r.role])))


def _shared_settings(spec: RunSpec) -> tuple[Frozen, ...]:
    """Return what the arms of one comparison share."""
    return (spec.model, spec.data, spec.optim, spec.train)


def _fp8_arms(cells: Sequence[RunSpec]) -> dict[tuple[Frozen, ...], list[PrecisionSpec]]:
    """Return the FP8 arms' precisions by what they share with their control."""
    found: dict[tuple[Frozen, ...], list[PrecisionSpec]] = {}
    for cell in cells:
        if not cell.precision.is_bf16:
            found.setdefault(_shared_settings(cell), []).append(cell.precision)
    return found


def _with_probe(recipe: RecipeFile, run: PlannedRun, compared: Sequence[PrecisionSpec]) -> PlannedRun:
    """Return `run` with its probe; a BF16 arm tries by default the recipes of the FP8 arms it is compared with."""
    sources = {precision.weight_cast_source for precision in compared}
    source = sources.pop() if len(sources) == 1 else "compute"
    arms = tuple(dict.fromkeys(precision.recipe for precision in compared))
    return replace(run, probe=resolve_probe(recipe.probe, run.spec.train.steps, arms, source))


def _replicas(recipe: RecipeFile, spec: RunSpec, arm: str) -> list[RunSpec]:
    """Return the replicas of `spec` that the file's null entries ask for, numbered from 1 over all entries."""
    kinds = [null.kind for null in recipe.null if null.arm == arm for _ in range(null.replicas)]
    seeds = [null.seeds for null in recipe.null if null.arm == arm for _ in range(null.replicas)]
    return [
        spec.model_copy(update={"replica": number, "replica_kind": kind})
        for number, (kind, own) in enumerate(zip(kinds, seeds, strict=True), start=1)
        if own is None or spec.seed in own
    ]


def read(path: Path) -> Matrix:
    """Read a recipe file; `UsageError` carries every problem of the file, one per line, in file order."""
    marked = load(path)
    recipe, problems = parse(marked)
    if recipe is None:
        raise UsageError(str(problems))
    return expand(recipe, marked)
