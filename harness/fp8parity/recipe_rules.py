"""What a recipe file must hold as a whole, beyond each cell by itself. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8parity.problems import Problems
from fp8parity.recipe_file import RecipeFile
from fp8parity.spec import RunSpec
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.errors import BadInputError


def check_used(recipe: RecipeFile, problems: Problems, *, has_tests: bool) -> None:
    """Refuse entries that change nothing: a misspelt value must not pass for an excluded cell or a null arm."""
    for index, drop in enumerate(recipe.exclude):
        unknown = [key for key in drop if key not in recipe.axes]
        missing = [key for key in drop if key in recipe.axes and drop[key] not in recipe.axes[key]]
        if unknown:
            problems.add(
                ("exclude", index, unknown[0]), "is no axis, so this entry excludes nothing; name an axis"
            )
        elif missing:
            key = missing[0]
            values = ", ".join(map(str, recipe.axes[key]))
            problems.add(
                ("exclude", index, key),
                f"{drop[key]!r} is no value of this axis, so it excludes nothing; values: {values}",
            )
    for index, null in enumerate(recipe.null):
        if null.arm == "control":
            continue
        absent = sorted(set(null.seeds or ()) - set(recipe.seeds))
        if not has_tests:
            problems.add(("null", index, "arm"), "there is no FP8 arm to repeat; write arm: control")
        elif absent:
            problems.add(
                ("null", index, "seeds"),
                f"seeds {absent} have no run of an FP8 arm to repeat; add them to seeds",
            )


def check_kept(recipe: RecipeFile, cells: Sequence[RunSpec], problems: Problems) -> None:
    """Refuse a step to keep that no run reaches."""
    longest = max((cell.train.steps for cell in cells), default=None)
    beyond = [step for step in recipe.runtime.keep_checkpoints if longest is not None and step > longest]
    if beyond:
        problems.add(
            ("runtime", "keep_checkpoints"),
            f"no run reaches step {beyond[0]} (train.steps {longest}); keep a step that is trained",
        )


def check_device(recipe: RecipeFile, cells: Sequence[RunSpec], problems: Problems) -> None:
    """Refuse cells of several devices: a study has one environment, and its runs are counted in slots of one kind."""
    devices = list(dict.fromkeys(cell.train.device for cell in cells))
    if len(devices) < 2:
        return
    key = "train.device"
    named = [("include", index, key) for index, extra in enumerate(recipe.include) if key in extra]
    problems.add(
        ("axes", key) if key in recipe.axes else named[0],
        f"{', '.join(devices)} in one study, whose runs all train on one kind of device; write one of them in "
        "base.train.device, and run the others from a recipe file and an --out of their own",
    )


def check_reorder(recipe: RecipeFile, cells: Sequence[RunSpec], problems: Problems) -> None:
    """Refuse a null arm that permutes batches of one row: it would repeat its run and measure no noise."""
    if all(cell.train.batch_size > 1 for cell in cells):
        return
    for index, null in enumerate(recipe.null):
        if null.kind == "reorder":
            problems.add(
                ("null", index, "kind"),
                "reorder permutes the rows of each batch, and train.batch_size is 1: there is nothing to permute; "
                "write a larger batch_size, or take this entry out",
            )


LONGEST_NAME = 255
"""Bytes of a directory's name that common file systems take."""


def check_names(
    recipe: RecipeFile, runs: Iterable[tuple[str, str, str, RunSpec]], problems: Problems
) -> None:
    """Refuse runs (run_id, group, arm, spec) that could not be told apart, or whose directory could not be made."""
    where = ("axes",) if recipe.axes else ("include",)
    places: dict[tuple[str, str, int, int], RunSpec] = {}
    for run_id, group, arm, spec in runs:
        if len(run_id.encode()) > LONGEST_NAME:
            problems.add(
                where,
                f"the runs of {group[:40]}..., {arm[:40]}... would be named by more than the {LONGEST_NAME} bytes that "
                "a directory's name may have; vary fewer keys in one file",
            )
        other = places.setdefault((group, arm, spec.seed, spec.replica), spec)
        if other != spec:
            problems.add(
                where,
                f"two different cells would both be named {group}, {arm}, so that no pair of theirs could be judged; "
                "write the values that differ in another way, or each in a recipe file of its own",
            )


def check_criteria(recipe: RecipeFile, problems: Problems) -> None:
    """Refuse criteria that the analysis refuses."""
    try:
        Criteria(**recipe.criteria.model_dump())
    except BadInputError as error:
        key, _, message = str(error).partition(": ")
        known = key in type(recipe.criteria).model_fields
        problems.add(("criteria", key) if known else ("criteria",), message if known else str(error))
