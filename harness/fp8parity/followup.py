"""The run that decides about a candidate: the same recipe with that layer held in BF16, as a new arm beside the old.

Statistics say where to look; only this intervention says whether a layer is the cause. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from fp8parity import matrix
from fp8parity.errors import UsageError
from fp8parity.own_sources import locate
from fp8parity.recipe_file import base_sections, parse, set_dotted
from fp8parity.yaml_marks import load
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_study
from fp8parity_analysis.tensor_health import ArmHealth, TensorHealth
from fp8parity_analysis.tensor_panel import Tensor

_PATHS = (("data", "path"), ("fork_from", "run"), ("model", "config"), ("model", "weights"))
"""Settings that are relative to the recipe file."""

MAX_LAYERS = 4
"""Layers held in BF16 at once: the first candidates of the arm."""


def layers_of(arm: ArmHealth) -> tuple[str, ...]:
    """Return the layers of an arm's first candidates: those of the leading candidate's kind, `MAX_LAYERS` at most.

    A signal of a module without an FP8 cast, such as the logits of an output head in BF16, has no layer to hold.
    """
    held = [item for item in arm.candidates if isinstance(item.tensor, Tensor) or _casts(arm, item.layers)]
    layers = dict.fromkeys(item.layers for item in held if item.basis == held[0].basis)
    return tuple(layers)[:MAX_LAYERS]


def _casts(arm: ArmHealth, layers: str) -> bool:
    return any(fnmatchcase(tensor.fqn, layers) for tensor in arm.tensors)


def _first(health: TensorHealth) -> ArmHealth | None:
    """Return the arm whose first candidate weighs most."""
    arms = [item for item in health.arms if item.candidates and layers_of(item)]
    return min(arms, key=lambda item: item.candidates[0].weight) if arms else None


def first_arm(health: TensorHealth) -> str:
    """Return the name of the arm to follow up, empty without a candidate."""
    arm = _first(health)
    return arm.recipe if arm else ""


def write_followup(
    study_dir: Path, health: TensorHealth, spec: Mapping[str, Any] | None, target: Path
) -> Path:
    """Write a recipe file that reruns the arm with the weightiest candidate, its layers in BF16; return its path.

    `spec` is the canonical RunSpec of a run of that arm. The file is checked as `fp8parity plan` would check it.
    Errors: `UsageError` when nothing is a candidate, when nothing would be left in FP8, or when what stands beside
    the study's recipe file would not be found from `target`.
    """
    arm = _first(health)
    if arm is None or spec is None:
        reason = "no layer is a candidate" if health.recorded else "no tensor statistics were recorded"
        raise UsageError(
            f"--emit-followup: {reason}, so there is nothing to follow up; {target} was not written"
        )
    text = followup_text(study_dir, arm.recipe, layers_of(arm), spec, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.draft.yaml")
    try:
        draft.write_text(text, encoding="utf-8")
        try:
            matrix.read(draft)
        except UsageError as error:
            words = str(error).replace(str(draft), str(target))
            raise UsageError(
                f"--emit-followup: with {', '.join(layers_of(arm))} in BF16 too: {words}"
            ) from error
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def followup_text(
    study_dir: Path, recipe: str, layers: Sequence[str], spec: Mapping[str, Any], target: Path
) -> str:
    """Return the recipe file: the study's own, its axes replaced by the arm as it was and the arm without `layers`."""
    stored = study_dir / schema.RECIPE_COPY
    parsed, problems = parse(load(stored))
    if parsed is None:
        raise UsageError(str(problems))
    sections = base_sections(parsed)
    for key in [*parsed.axes, *(key for entry in parsed.include for key in entry)]:
        section, _, name = key.partition(".")
        if section not in spec:  # another cell's: this run is no fork
            sections.pop(section, None)
            continue
        for real in ("keep_first", "keep_last") if name == "keep" else (name,):
            # what is unset may be left out of a specification
            set_dotted(sections, f"{section}.{real}", spec[section].get(real))
    held = list(spec["precision"]["exclude"])
    sections["precision"].pop("exclude", None)
    for place in _PATHS:
        _move(sections, *place, study_dir, target)
    for section in ("model", "data"):
        _require_module(sections.get(section, {}), study_dir, target)
    study = str(read_study(study_dir)["name"])
    raw = load(stored).values
    document: dict[str, Any] = {
        "name": f"{study}-followup",
        "description": f"{recipe} of {study}, as it was and with {', '.join(layers)} held in BF16.",
        "base": {name: values for name, values in sections.items() if values},
        "axes": {"precision.exclude": [held, [*held, *(name for name in layers if name not in held)]]},
    }
    document |= {
        key: raw[key] for key in ("seeds", "control", "null", "criteria", "runtime", "probe") if key in raw
    }
    head = (
        f"# Is the gap of {recipe} made in {', '.join(layers)}? The arm as it was, and with that held in BF16.\n"
        f"# The gap of the second arm, and the contrast between the two, are the evidence.\n"
        f"#   fp8parity run {target.name} --out out/{study}-followup\n"
    )
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _move(sections: dict[str, dict[str, Any]], section: str, key: str, study_dir: Path, target: Path) -> None:
    """Rewrite a path that is relative to the recipe file for the place of the new one."""
    path = sections.get(section, {}).get(key)
    if path is None or Path(path).is_absolute():
        return
    sections[section][key] = os.path.relpath(
        (_recipe_folder(study_dir, f"base.{section}.{key} {path!r}") / path).resolve(),
        target.parent.resolve(),
    )


def _recipe_folder(study_dir: Path, wanted: str) -> Path:
    """Return where the study's recipe file stands; `UsageError` when it is not to be found from here."""
    recipe = Path(str(read_study(study_dir)["recipe_file"]))
    if not recipe.exists():  # the study keeps it as it was given, maybe relative to another folder
        raise UsageError(
            f"--emit-followup: {wanted} is relative to the study's recipe file {recipe}, which does not exist seen "
            "from here; go to the folder where the study was launched"
        )
    return recipe.parent.resolve()


def _require_module(values: Mapping[str, Any], study_dir: Path, target: Path) -> None:
    """Refuse a folder from which a function of the user's is not found: modules are looked for beside the recipe."""
    if values.get("kind") != "import":
        return
    module = str(values["target"]).partition(":")[0]
    folder = _recipe_folder(study_dir, f"target {values['target']!r}")
    if folder != target.parent.resolve() and locate(module, [str(folder)]) is not None:
        raise UsageError(
            f"--emit-followup: {module} stands beside the study's recipe file and is looked for beside the new one; "
            f"write it there: --emit-followup {os.path.relpath(folder / target.name)}"
        )
