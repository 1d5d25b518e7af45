"""What forbids or qualifies a comparison: unusable runs, copied logs, blow-ups, spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis import gap as gaps
from fp8parity_analysis.arms import SHOWN, Arm, differing, listed, runs_of, series_of, shared_keys
from fp8parity_analysis.forks import PARENT_PREFIX
from fp8parity_analysis.grid import common_steps, on_grid
from fp8parity_analysis.health import LASTING_STEPS, Runs, nonfinite_from
from fp8parity_analysis.schema import EVAL_ARM, EVAL_BF16, TRAIN, Role, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.curves import FloatArray, IntArray, RunCurve, Series

_MIN_EVALS_IDENTICAL = 3
_MIN_SEEDS_IDENTICAL = 3
"""Two seeds may agree in one or two rounded losses by chance; three do not."""

MASKED_EVALS, MASKED_SHARE = 2, 0.1
"""Evaluations of a pair that may be masked: two, or a tenth of them."""


def left_out(arm: Arm) -> Iterator[str]:
    """Yield a remark on test seeds without a control run."""
    lonely = sorted(set(arm.test) - set(arm.control))
    if lonely:
        yield f"seeds {listed(lonely)} have no control run and are left out"
    # a control seed with replicas is there for the noise floor, unless judged seeds have them too; any other one lacks
    # its other half
    for_noise = {seed for seed in arm.control if len(arm.control[seed]) > 1 or seed in arm.extra}
    if for_noise & set(arm.test):
        for_noise = set()
    missing = [] if arm.null_arm else sorted(set(arm.control) - set(arm.test) - for_noise)
    if missing:
        yield (
            f"seeds {listed(missing)} have a control but no run of this arm: if those runs failed, this verdict is "
            "about the survivors only"
        )


def lonely_divergence(arm: Arm, criteria: Criteria) -> Iterator[str]:
    """Yield the diverged runs of this arm that have no control: they must not vanish with their seed."""
    for seed in sorted(set(arm.test) - set(arm.control)):
        steps = [step for run in arm.test[seed] if (step := nonfinite_from(run, criteria)) is not None]
        if steps:
            yield f"seed {seed} diverged at step {min(steps)} and has no control run to be judged against"


def unusable(arm: Arm, seeds: Sequence[int], criteria: Criteria) -> Iterator[str]:
    """Yield why runs cannot be judged: unfinished, contradictory, or without the endpoint."""
    runs = runs_of(arm, seeds)
    unfinished = [run.label for run in runs if run.status is None]
    if unfinished:
        yield f"unfinished runs: {listed(unfinished)}; run the study again to finish them"
    for run in runs:
        yield from run.problems
    wanted = "training loss" if criteria.endpoint == "train" else f"loss on {criteria.split!r}"
    lacking = [run.label for run in runs if _lacks_curve(series_of(run, criteria))]
    if lacking:
        yield f"no {wanted} ({criteria.eval_precision} forward) in: {listed(lacking)}"


def stopped(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield a remark on runs that somebody stopped: their learning rate may not have reached its end."""
    runs = [run.label for run in runs_of(arm, seeds) if run.status is Status.STOPPED]
    if runs:
        yield (
            f"stopped before their planned end: {listed(runs)}; this verdict is about the step they reached, in the "
            "middle of a schedule"
        )


def mixed_precision(arm: Arm, seeds: Sequence[int], criteria: Criteria) -> Iterator[str]:
    """Yield why the evaluations of one side cannot be one endpoint: some state another precision than others."""
    if criteria.endpoint == TRAIN:
        return
    for side, runs in (("control", arm.control), ("this arm", arm.test)):
        found: dict[str, str] = {}
        for run in [run for seed in seeds for run in runs[seed]]:
            found.setdefault(_decides(run, criteria), run.label)
        if len(found) > 1:
            told = ", ".join(f"{precision} in {label}" for precision, label in found.items())
            yield f"the runs of {side} were evaluated in different precisions: {told}; state one for all of them"


def _decides(run: RunCurve, criteria: Criteria) -> str:
    """Return the precision of the series that decides; a control's own forward is BF16 under either name."""
    series = series_of(run, criteria)
    for (split, precision), candidate in run.evals.items():
        if split == criteria.split and candidate is series:
            return EVAL_BF16 if precision == EVAL_ARM and run.role is not Role.TEST else precision
    return "none"


def broken_replicas(
    control_logs: Sequence[FloatArray], seeds: Sequence[int], steps: IntArray
) -> Iterator[str]:
    """Yield the seeds whose control runs [r, K] end apart: their mean would hide which of them broke."""
    for logs, seed in zip(control_logs, seeds, strict=True):
        if len(logs) < 2:
            continue
        starts = gaps.blow_up_starts(logs.max(axis=0, keepdims=True) - logs.min(axis=0, keepdims=True))
        if starts[0] is not None:
            yield (
                f"seed {seed}: its control runs are more than {gaps.BLOW_UP_GAP:.0%} apart from step "
                f"{int(steps[starts[0]])} to the end; one of them broke, so their mean is no baseline"
            )


def _lacks_curve(series: Series | None) -> bool:
    return series is None or len(series.steps) == 0


def differences(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield the pairs of runs of one seed that differ beyond precision."""
    yield from _between_seeds(arm, seeds)
    for seed in seeds:
        first, *others = arm.control[seed]
        for run in (*others, *arm.test[seed]):
            found = differing(first, run)
            if found:
                yield (
                    f"{first.label} and {run.label} differ beyond precision: {'; '.join(found[:SHOWN])}"
                    + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
                )


_SEEDS_OWN = ("init_digest",)


def _between_seeds(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield the seeds whose control differs from the first one's in more than the seed: another data file, library."""
    reference = arm.control[seeds[0]][0]
    for seed in seeds[1:]:
        other = arm.control[seed][0]
        keys = [
            key
            for key in shared_keys(reference, other)
            if key not in _SEEDS_OWN and not key.startswith(PARENT_PREFIX)
        ]
        found = [
            f"{key}: {reference.identity.get(key)} != {other.identity.get(key)}"
            for key in keys
            if reference.identity.get(key) != other.identity.get(key)
        ]
        if found:
            yield f"{reference.label} and {other.label} are no seeds of one study: {'; '.join(found[:SHOWN])}"


def blow_ups(run_gaps: Sequence[FloatArray], seeds: Sequence[int], steps: IntArray) -> dict[int, int]:
    """Return the seeds with a run whose gap stays above 5 % to the end, with the earliest step from which one does.

    `run_gaps` [n] of [r, K]: each test run against the mean of its control runs, not their mean, which hides one.
    """
    owners = [seed for seed, rows in zip(seeds, run_gaps, strict=True) for _ in rows]
    found: dict[int, int] = {}
    for seed, start in zip(owners, gaps.blow_up_starts(np.concatenate(run_gaps)), strict=True):
        if start is not None:
            found[seed] = min(found.get(seed, int(steps[start])), int(steps[start]))
    return found


def late_blow_ups(
    control: Runs, test: Runs, seeds: Sequence[int], last_eval: int
) -> tuple[dict[int, int], list[str]]:
    """Return what the training loss shows after the last common evaluation: test seeds that blew up, broken controls.

    The training losses of both runs at the same steps lie more than 5 % apart up to the end, over eight steps or more:
    fewer can do so by chance where the arms do not see the same batches.
    """
    late, broken = {}, []
    for seed in seeds:
        steps, gap = _training_gap(control[seed], test[seed], last_eval)
        above, below = (gaps.trailing_start(sign * gap > gaps.BLOW_UP_GAP) for sign in (1, -1))
        if len(steps) - above >= LASTING_STEPS:
            late[seed] = int(steps[above])
        if len(steps) - below >= LASTING_STEPS:
            broken.append(
                f"seed {seed}: the control's training loss is more than {gaps.BLOW_UP_GAP:.0%} above this arm's from "
                f"step {int(steps[below])}, past the last evaluation, to the end; the baseline diverged"
            )
    return late, broken


def _training_gap(
    control: Sequence[RunCurve], test: Sequence[RunCurve], after: int
) -> tuple[IntArray, FloatArray]:
    """Return the common training steps past `after` and, at each, the gap of the test run that is farthest above."""
    series = [run.train for run in (*control, *test)]
    whole = [item for item in series if item is not None]
    if len(whole) < len(series) or any(not len(item.steps) or item.steps[-1] <= after for item in whole):
        return np.zeros(0, np.int64), np.zeros(0)
    steps = common_steps(whole)
    steps = steps[steps > after]
    logs = gaps.log_loss(np.array([on_grid(item, steps) for item in whole]))
    ours, theirs = logs[len(control) :], logs[: len(control)]
    return steps, ours.max(axis=0) - theirs.mean(axis=0)


def mask_transients(
    gap: FloatArray, seeds: Sequence[int], diverged: Mapping[int, int]
) -> tuple[FloatArray, list[str], list[str]]:
    """Mask single evaluations that jump by more than 5 % and come back, say how many, and where they are too many."""
    marks = gaps.transient_gaps(gap)
    marks[[row for row, seed in enumerate(seeds) if seed in diverged]] = False
    spikes, lost = marks.sum(axis=1), np.isnan(gap).sum(axis=1)
    allowed = max(MASKED_EVALS, int(MASKED_SHARE * gap.shape[1]))
    live = [(row, seed) for row, seed in enumerate(seeds) if seed not in diverged]
    unstable = [seed for row, seed in live if spikes[row] + lost[row] > allowed]
    remarks = [
        f"seed {seed}: {int(spikes[row])} evaluations with a spike and {int(lost[row])} with a non-finite "
        "loss were masked; the run recovered from them"
        for row, seed in live
        if seed not in unstable and (spikes[row] or lost[row])
    ]
    masked = np.where(marks, np.nan, gap)
    if not unstable:
        return masked, remarks, []
    told = (
        f"seeds {listed(unstable)}: more than {allowed} of {gap.shape[1]} evaluations jump by more than "
        f"{gaps.BLOW_UP_GAP:.0%} and come back, or are not finite; so many are no accident that may be left out"
    )
    return masked, remarks, [told]


def suspicious(
    gap: FloatArray, seeds: Sequence[int], steps: IntArray, count: int, arm: Arm, diverged: Mapping[int, int]
) -> Iterator[str]:
    """Yield what makes gaps unbelievable: copied logs, a seed equal to its control, a broken control."""
    live = [row for row, seed in enumerate(seeds) if seed not in diverged]
    for row, start in enumerate(gaps.blow_up_starts(-gap)):
        if start is not None and row in live:
            yield (
                f"seed {seeds[row]}: the control's loss is more than {gaps.BLOW_UP_GAP:.0%} above this arm's "
                f"from step {int(steps[start])} to the end; the baseline diverged"
            )
    zero = np.all(gap == 0, axis=1)
    equal = [row for row in live if zero[row]]
    if equal and len(equal) < len(live) and not arm.null_arm and len(steps) >= _MIN_EVALS_IDENTICAL:
        yield (
            f"seeds {listed([seeds[row] for row in equal])} equal their control exactly while others do "
            "not: FP8 was not switched on there, or a log was copied"
        )
    ends = gaps.endpoint(gap[live], count) if live else np.zeros(0)
    lost = [seeds[row] for row, end in zip(live, ends, strict=True) if np.isnan(end)]
    if lost:
        yield f"seeds {listed(lost)} have no finite loss among the evaluations of the endpoint"
    elif len(ends) > 1 and _same(ends) and (ends[0] != 0 or (not arm.null_arm and not zero[live].all())):
        yield (
            f"the same gap ({ends[0]:.6g}) in all {len(ends)} seeds to the last digit: a log was copied, or the "
            "losses were rounded too coarsely to tell seeds apart"
        )
    for row, end in zip(live, ends, strict=True):
        if end < -gaps.BLOW_UP_GAP:
            yield (
                f"seed {seeds[row]}: the control ends {-end:.1%} above this arm; a baseline that broke at its end says "
                "nothing about FP8"
            )
    yield from _copied_runs(arm.test, seeds)
    yield from _copied_runs(arm.control, seeds)


def _same(ends: FloatArray) -> bool:
    return bool(np.all(np.abs(ends - ends[0]) <= 1e-9 * abs(ends[0])))


def _copied_runs(runs: Runs, seeds: Sequence[int]) -> Iterator[str]:
    """Yield pairs of seeds whose runs have one curve of three points or more, and three seeds with a shorter one."""
    yield from _short_copies(runs, seeds)
    seen: dict[bytes, tuple[int, str]] = {}
    for seed in seeds:
        for run in runs[seed]:
            series = next(iter(run.evals.values()), run.train)
            if series is None or len(series.loss) < _MIN_EVALS_IDENTICAL:
                continue
            owner, label = seen.setdefault(series.loss.tobytes(), (seed, run.label))
            if owner != seed and np.ptp(series.loss) > 0:
                yield f"{label} and {run.label} have the same curve: a log was copied, or seeds do nothing"


def _short_copies(runs: Runs, seeds: Sequence[int]) -> Iterator[str]:
    found: dict[bytes, list[int]] = {}
    for seed in seeds:
        series = next(iter(runs[seed][0].evals.values()), runs[seed][0].train)
        if series is not None and 0 < len(series.loss) < _MIN_EVALS_IDENTICAL:
            found.setdefault(series.loss.tobytes(), []).append(seed)
    for same in found.values():
        if len(same) >= _MIN_SEEDS_IDENTICAL:
            yield (
                f"seeds {listed(same)} have the same losses to the last digit: a log was copied, or the losses were "
                "rounded too coarsely to tell seeds apart"
            )


def spike_counts_of(arm: Arm, seeds: Sequence[int]) -> FloatArray | None:
    """Return spikes in the training loss of test and control [n, 2], None where a run has no such loss."""
    runs = runs_of(arm, seeds)
    if any(run.train is None for run in runs):
        return None
    return np.array([[_spikes(arm.test[seed]), _spikes(arm.control[seed])] for seed in seeds])


def _spikes(runs: Sequence[RunCurve]) -> float:
    """Return the mean number of spikes per run in the training loss."""
    return float(np.mean([gaps.spikes(run.train.loss).sum() for run in runs if run.train is not None]))
