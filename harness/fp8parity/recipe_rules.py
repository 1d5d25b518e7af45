"""What a recipe file must hold as a whole, beyond each cell by itself. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_criteria(recipe: RecipeFile, problems: Problems) -> None:
    """Refuse criteria that the analysis refuses."""
    try:
        Criteria(**recipe.criteria.model_dump())
    except BadInputError as error:
        key, _, message = str(error).partition(": ")
        known = key in type(recipe.criteria).model_fields
        problems.add(("criteria", key) if known else ("criteria",), message if known else str(error))
