"""Which runs belong together: an arm with the control runs of its group, and what two runs must share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8parity_analysis.schema import DATA_SPLIT, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import RunCurve, Series

SHOWN = 4
"""How many differing keys or runs a message spells out."""


@dataclass(frozen=True)
class Arm:
    """All runs of one arm in one group with its control runs, by seed.

    `extra` are further control runs (null arm).
    """

    recipe: str
    null_arm: bool
    test: Mapping[int, tuple[RunCurve, ...]]
    control: Mapping[int, tuple[RunCurve, ...]]
    extra: Mapping[int, tuple[RunCurve, ...]]


def arms_of(runs: Sequence[RunCurve]) -> tuple[Arm, ...]:
    """Return every test arm, then every null arm, with the control runs of its group."""
    groups = list(dict.fromkeys(run.group for run in runs))
    found = []
    for role in (Role.TEST, Role.NULL):
        for group in groups:
            members = [run for run in runs if run.group == group]
            control = by_seed([run for run in members if run.role is Role.CONTROL])
            nulls = by_seed([run for run in members if run.role is Role.NULL])
            for name in dict.fromkeys(run.arm for run in members if run.role is role):
                test = by_seed([run for run in members if run.role is role and run.arm == name])
                recipe = f"{group}/{name}" if len(groups) > 1 else name
                extra = {} if role is Role.NULL else nulls
                found.append(Arm(recipe, role is Role.NULL, test, control, extra))
    return tuple(found)


def by_seed(runs: Sequence[RunCurve]) -> dict[int, tuple[RunCurve, ...]]:
    """Return the runs by seed in order of seed, each in order of replica."""
    seeds: dict[int, list[RunCurve]] = {}
    for run in runs:
        seeds.setdefault(run.seed, []).append(run)
    return {seed: tuple(sorted(seeds[seed], key=lambda run: run.replica)) for seed in sorted(seeds)}


def series_of(run: RunCurve, criteria: Criteria) -> Series | None:
    """Return the series that the endpoint is taken from, or None when the run lacks it."""
    if criteria.endpoint == "train":
        return run.train
    return run.held_out(criteria.split, criteria.eval_precision)


def runs_of(arm: Arm, seeds: Sequence[int]) -> list[RunCurve]:
    """Return control and test runs of these seeds."""
    return [run for seed in seeds for run in (*arm.control[seed], *arm.test[seed])]


def listed(values: Sequence[Any]) -> str:
    """Return the first few values in words, and how many more there are."""
    shown = ", ".join(str(value) for value in values[:SHOWN])
    return shown if len(values) <= SHOWN else f"{shown} and {len(values) - SHOWN} more"


_ABSENT = "(absent)"
_FROM_MANIFEST = ("data_sha256", "init_digest", "environment", "effective")
"""What a run states at its end only: an unfinished one has not said it, which is no difference."""

_RECORDED_LATER = f"{DATA_SPLIT}."
"""What runs of earlier versions do not state."""


def shared_keys(first: RunCurve, second: RunCurve) -> list[str]:
    """Return the settings that two runs have to share, as far as both can have stated them."""
    keys = [
        key
        for key in dict.fromkeys([*first.identity, *second.identity])
        if not key.startswith(_RECORDED_LATER) or (key in first.identity and key in second.identity)
    ]
    if first.status is not None and second.status is not None:
        return keys
    return [key for key in keys if key.partition(".")[0] not in _FROM_MANIFEST]


def differing(control: RunCurve, test: RunCurve) -> list[str]:
    """Return every shared setting in which two runs differ, as `key: control != test`."""
    found = []
    for key in shared_keys(control, test):
        left, right = control.identity.get(key, _ABSENT), test.identity.get(key, _ABSENT)
        if left != right:
            found.append(f"{key}: {left} != {right}")
    if control.digests is not test.digests and control.digests != test.digests:
        common = [step for step in control.digests if step in test.digests]
        unequal = [step for step in common if control.digests[step] != test.digests[step]]
        if unequal:
            at = unequal[0]
            found.append(
                f"batch_digest at {len(unequal)} of {len(common)} steps, first step {at}: "
                f"{control.digests[at]} != {test.digests[at]}"
            )
    return found
