"""Why a study directory does not take a changed recipe file: what of it changed, and what to do. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8parity.labels import named_settings
from fp8parity.matrix import PlannedRun
from fp8parity_analysis.schema import Role

_ANOTHER = "use another --out directory"

Stored = Mapping[str, Mapping[str, Any]]
"""`spec.json` of the stored runs, by run id."""


def what_changed(stored: Stored, unknown: Sequence[str], planned: Sequence[PlannedRun]) -> str:
    """Return in words why the file has no run named as the `unknown` ones are, and the remedy.

    The first stored run with a successor in the file is told of: the same specification under another name, or the
    same arm, seed and replica with other settings.
    """
    documents = [stored[run_id] for run_id in unknown if run_id in stored]
    for document in documents:
        for tell in (_renamed, _renumbered, _changed):
            words = tell(document, stored, planned)
            if words:
                return words
    if not documents:
        return f"their specifications are gone; {_ANOTHER}"
    arm, seed, replica = _place(documents[0])
    which = f"arm {arm}, seed {seed}" + (f", replica {replica}" if replica else "")
    return f"the file has no run of {which} any more; what a study holds stays in its file: put it back, or {_ANOTHER}"


def seeds_too_low(stored: Stored, planned: Sequence[PlannedRun]) -> str:
    """Return in words which new seeds sort below seeds that the study holds, and the remedy; empty when none does.

    A declared look takes the lowest seeds, so such a seed would change the verdict of a look already taken.
    """
    held: dict[tuple[str, str], set[int]] = {}
    for document in stored.values():
        if document.get("role") != Role.CONTROL.value:
            held.setdefault((document["group"], document["arm"]), set()).add(int(document["seed"]))
    low: dict[int, int] = {}
    for run in planned:
        seeds = held.get((run.group, run.arm))
        if seeds and run.spec.seed not in seeds and run.spec.seed < max(seeds):
            low[run.spec.seed] = max(seeds)
    if not low:
        return ""
    highest = max(low.values())
    return (
        f"seed {', '.join(map(str, sorted(low)))} is new and below seed {highest} of this study: looks take seeds in "
        f"ascending order, so a look already taken would change; number new seeds from {highest + 1} up, or {_ANOTHER}"
    )


def _place(document: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(document.get(key) for key in ("arm", "seed", "replica"))


def _successor(document: Mapping[str, Any], planned: Sequence[PlannedRun]) -> PlannedRun | None:
    """Return the planned run of the same arm, seed and replica; of the same group where there is one."""
    found = [r for r in planned if (r.arm, r.spec.seed, r.spec.replica) == _place(document)]
    found.sort(key=lambda run: run.group != document.get("group"))
    return found[0] if found else None


def _renamed(document: Mapping[str, Any], stored: Stored, planned: Sequence[PlannedRun]) -> str:
    same = next((run for run in planned if run.spec.canonical() == document.get("spec")), None)
    if same is None:
        return ""
    names = [
        f"{what} {document.get(what)} would be named {now}"
        for what, now in (("group", same.group), ("arm", same.arm))
        if document.get(what) != now
    ]
    there = named_settings([entry["spec"] for entry in stored.values()])
    here = named_settings([run.spec.canonical() for run in planned])
    reasons = [f"{key} varies in the file and not there" for key in here if key not in there]
    reasons += [f"{key} varies there and not in the file" for key in there if key not in here]
    why = f", because {', '.join(reasons)}" if reasons else ""
    return (
        f"{', '.join(names)}{why}; names say what varies, so a study grows by seeds, by recipes and at the end of null "
        f"only: {_ANOTHER}"
    )


def _renumbered(document: Mapping[str, Any], stored: Stored, planned: Sequence[PlannedRun]) -> str:
    run = _successor(document, planned)
    if run is None or run.spec.replica_kind == document.get("replica_kind"):
        return ""
    return (
        f"replica {run.spec.replica} is a {document.get('replica_kind')} there and a {run.spec.replica_kind} in the "
        f"file: replicas are numbered through the entries of null; append new entries at the end, or {_ANOTHER}"
    )


def _changed(document: Mapping[str, Any], stored: Stored, planned: Sequence[PlannedRun]) -> str:
    run = _successor(document, planned)
    changed = _differing(document.get("spec", {}), run.spec.canonical()) if run else []
    if not changed:
        return ""
    longer = any(words.startswith("train.steps ") for words in changed)
    more = (
        "; a longer run has another schedule from its first step on, so it is another run" if longer else ""
    )
    return f"{', '.join(changed)}{more}; {_ANOTHER}"


def _differing(stored: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    """Return `section.key: stored, now planned` for every setting of a run that differs."""
    return [
        f"{section}.{key} is {values.get(key)} there and {value} in the file"
        for section, settings in planned.items()
        if isinstance(settings, dict) and isinstance(values := stored.get(section, {}), dict)
        for key, value in settings.items()
        if values.get(key) != value
    ]
