"""What is said of runs whose weights were not drawn anew for each seed, and of forks: what that leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8parity_analysis.study_runs import distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.arms import Arm
    from fp8parity_analysis.store import RunRecord

PARENT_PREFIX = "parent."
"""Settings of a run's identity that tell one parent from another: seeds may have parents of their own."""

_SHOWN = 4
_DIGEST_SHOWN = 12


def is_fork(arm: Arm) -> bool:
    """Whether the arm's control runs start from another run's checkpoint."""
    return any(_step(run.identity) is not None for runs in arm.control.values() for run in runs)


def _step(identity: Mapping[str, Any]) -> Any:
    return identity.get("fork_from.step")


def fork_remarks(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield what every verdict on a fork must say: where it starts, what its steps count, what its seeds vary."""
    if not is_fork(arm):
        return
    identities = [arm.control[seed][0].identity for seed in seeds]
    parents = distinct([identity.get("parent.run_id") for identity in identities])
    step = distinct([_step(identity) for identity in identities])
    more = f" and {len(parents) - _SHOWN} more" if len(parents) > _SHOWN else ""
    yield (
        f"forked: both arms start from step {' or '.join(step)} of the BF16 run {', '.join(parents[:_SHOWN])}{more}; "
        "steps, tokens and gaps count from there, and no price in tokens is stated, since the slope of a fork's loss "
        "is that of its schedule"
    )
    if len(seeds) > 1 and len(parents) == 1:
        yield (
            "all seeds start from one state of one parent: their spread is that of the order of data after the fork, "
            "and the verdict is about this parent"
        )


def start_remarks(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield the seeds whose controls began with the same weights, drawn once or loaded; forks have their own remark."""
    if is_fork(arm):
        return
    found: dict[Any, list[int]] = {}
    for seed in seeds:
        found.setdefault(arm.control[seed][0].identity.get("init_digest"), []).append(seed)
    for digest, same in found.items():
        if digest is None or len(same) < 2:
            continue
        who = "all seeds" if len(same) == len(seeds) else f"seeds {', '.join(map(str, same))}"
        yield (
            f"{who} start from the same initial weights: their spread is that of the order of data alone, and the "
            "verdict is about these weights; a builder that is to draw them anew must not set a seed of its own"
        )


def _sources(records: Sequence[RunRecord]) -> dict[tuple[str, Any], Mapping[str, Any]]:
    """Return the parents by (run id, step) in order of first appearance."""
    found: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for record in records:
        spec = record.spec["spec"]
        parent, source = spec.get("parent") or {}, spec.get("fork_from") or {}
        if parent and source:
            found.setdefault((str(parent.get("run_id")), source.get("step")), parent)
    return found


def fork_facts(records: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Yield the provenance of forked runs: (what, value) per parent and step."""
    for (run_id, step), parent in _sources(records).items():
        weights = str(parent.get("weights_sha256"))[:_DIGEST_SHOWN]
        optimizer = str(parent.get("optimizer_sha256"))[:_DIGEST_SHOWN]
        yield "forked from", f"{run_id}, step {step} (weights {weights}..., optimizer state {optimizer}...)"


def fork_limits(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what a fork's verdict does not claim."""
    sources = _sources(records)
    if not sources:
        return
    steps = ", ".join(distinct([step for _, step in sources]))
    yield (
        f"About training in FP8 from the start: these runs begin with the BF16 state of step {steps} of another run, "
        "and the horizon below counts from there. What FP8 does before that step is another study."
    )


def tail_notes(records: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Yield, per recipe, until when runs that changed their precision were FP8."""
    for recipe, runs in records.items():
        switches = distinct([(run.spec["spec"].get("precision") or {}).get("switch_at") for run in runs])
        if switches:
            yield f"{recipe}: FP8 up to step {' or '.join(switches)}, BF16 from the next step on."
