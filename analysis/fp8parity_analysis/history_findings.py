"""What a night found: verdicts against BF16, steps against history, new, still failing or fixed, and what changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.history import JUDGED, History, Night
from fp8parity_analysis.history_prior import pooled
from fp8parity_analysis.history_series import FALSE_ALARMS_PER_NIGHT, Series, levels
from fp8parity_analysis.history_steps import BAD_STATES, Replay, State, replay
from fp8parity_analysis.schema import EXIT_OF_GATE, Gate

NEW, STILL, FIXED, NOTICE = "new", "still failing", "fixed", "notice"

_STATE_OF: Mapping[State, str] = {
    State.NEW: NEW,
    State.STILL: STILL,
    State.FIXED: FIXED,
    State.BETTER: NOTICE,
    State.STILL_BETTER: NOTICE,
    State.ADOPTED: NOTICE,
}
_BAD_GATES = (Gate.FAIL.value, Gate.INVALID.value)


@dataclass(frozen=True)
class Change:
    """A fact that differs between two nights, with both values."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Finding:
    """One thing a night has to say. `state` is new, still failing, fixed or notice; `kind` step, check or crash.

    `since`: the first night of the episode; `last_good`: the last night before it without a failure of this kind;
    `changed`: for what still fails, what differed between the night it began and the one before.
    """

    name: str
    kind: str
    state: str
    text: str
    since: str
    last_good: str | None
    changed: tuple[Change, ...] = ()

    @property
    def failing(self) -> bool:
        """Whether this is a failure tonight."""
        return self.state in (NEW, STILL)


@dataclass(frozen=True)
class Tracked:
    """The replay of one history: `names` [S], the judged nights [N], and plain numbers for text and pictures."""

    nights: tuple[Night, ...]
    names: tuple[str, ...]
    replay: Replay


@dataclass(frozen=True)
class Assessment:
    """Everything the latest night says, before it is laid out.

    `changes` is since `compared_with`: the night before what is new began, else before what still fails, else the
    last one. It can have failures of its own.
    """

    night: Night
    findings: tuple[Finding, ...]
    compared_with: Night | None
    changes: tuple[Change, ...]
    gate: Gate
    regressed: bool
    learning: tuple[str, ...]
    tracked: Tracked

    @property
    def exit_code(self) -> int:
        """0 pass, 10 fail or regression, 11 inconclusive, 12 invalid or crashed."""
        return EXIT_OF_GATE[self.gate]


def track(history: History, rate: float = FALSE_ALARMS_PER_NIGHT) -> Tracked:
    """Replay every series over the judged nights; the rate is per night, over all series of that night."""
    nights = tuple(night for night in history.nights if night.status == JUDGED)
    names = tuple(dict.fromkeys(name for night in nights for name in night.series))
    shape = (len(nights), len(names))
    values, predicted, df = (np.full(shape, np.nan) for _ in range(3))
    alpha, restart = np.zeros(shape), np.zeros(shape, dtype=bool)
    for t, night in enumerate(nights):
        level = levels(night.series, rate) if night.series else {}
        for j, name in enumerate(names):
            item = night.series.get(name)
            if item is not None:
                values[t, j] = Series(name).scaled(item.value)
                predicted[t, j] = math.nan if item.se is None else item.se
                df[t, j] = math.nan if item.df is None else item.df
                alpha[t, j] = level[name]
    for before, name in history.accepted:
        t = sum(night.status == JUDGED for night in history.nights[:before])
        if name in names and t < len(nights):
            restart[t, names.index(name)] = True
    series = [Series(name) for name in names]
    predicted, df = pooled(predicted, df)
    told = replay(
        values[None],
        alpha,
        np.array([float(item.direction) for item in series]),
        np.array([item.floor for item in series]),
        relative_floor=np.array([item.relative_floor for item in series]),
        predicted=predicted[None],
        df=df[None],
        variance=np.array([item.kind.scale == "variance" for item in series], dtype=bool),
        restart=restart,
    )
    return Tracked(nights, names, told)


def _step_findings(tracked: Tracked) -> Iterator[Finding]:
    t = len(tracked.nights) - 1
    for j, name in enumerate(tracked.names):
        state = State(int(tracked.replay.state[0, t, j]))
        if state not in _STATE_OF:
            continue
        onset = int(tracked.replay.onset[0, t, j])
        series = Series(name)
        before = series.plain(float(tracked.replay.base[0, t, j]))
        after = series.plain(float(tracked.replay.level[0, t, j]))
        text = series.step_words(before, after)
        if state is State.FIXED:
            text = f"{series.title} is back at {series.show(after)}, beside {series.show(before)} before"
        elif state is State.ADOPTED:
            text += "; this is the normal from now on"
        yield Finding(
            name, "step", _STATE_OF[state], text, tracked.nights[onset].night, _good_before(tracked, onset, j)
        )


def _good_before(tracked: Tracked, onset: int, j: int) -> str | None:
    """Return the last night before `onset` on which the series was seen and not failing."""
    states = tracked.replay.state[0, :onset, j]
    good = [
        t for t, state in enumerate(states) if state != State.MISSING and State(int(state)) not in BAD_STATES
    ]
    return tracked.nights[good[-1]].night if good else None


def _right(night: Night) -> dict[str, tuple[bool | None, str]]:
    """Return everything of a night that is right or wrong, by name: checks and verdicts; None is not settled."""
    found: dict[str, tuple[bool | None, str]] = {
        f"check/{name}": (item.ok, item.value) for name, item in night.checks.items()
    }
    for cell in night.cells:
        bad = cell.gate in _BAD_GATES
        reason = f": {cell.reasons[0]}" if cell.reasons and bad else ""
        ok = None if cell.gate == Gate.INCONCLUSIVE.value else not bad
        found[f"verdict/{cell.recipe}"] = (ok, f"{cell.outcome}{reason}")
    return found


def _check_findings(nights: Sequence[Night]) -> Iterator[Finding]:
    """Compare what is right or wrong with the last night that settles it: only what is right ends a failure."""
    tonight = nights[-1]
    for name, (ok, value) in _right(tonight).items():
        past = [(night, _right(night)[name]) for night in nights[:-1] if name in _right(night)]
        settled = [(night.night, was_ok) for night, (was_ok, _) in past if was_ok is not None]
        last_good = next((night for night, was_ok in reversed(settled) if was_ok), None)
        failed = bool(settled) and not settled[-1][1]
        since = _start_of_run(settled) if failed else tonight.night
        title = (
            name.partition("/")[2]
            if name.startswith("verdict/")
            else name.removeprefix("check/").replace("/", " of ", 1)
        )
        if ok is None:
            if failed:
                text = f"{title}: {value}, so its failure is no longer shown, nor is it shown to be right"
                yield Finding(name, "check", NOTICE, text, since, last_good)
        elif not ok:
            yield Finding(name, "check", STILL if failed else NEW, f"{title}: {value}", since, last_good)
        elif failed:
            yield Finding(name, "check", FIXED, f"{title}: {value}", since, tonight.night)
        elif past and name.startswith("check/") and past[-1][1][1] != value:
            text = f"{title} changed from {past[-1][1][1]!r} to {value!r}"
            yield Finding(name, "check", NOTICE, text, tonight.night, last_good)


def _start_of_run(settled: Sequence[tuple[str, bool | None]]) -> str:
    """Return the first night of the unbroken run of failures that `settled` ends with."""
    start = settled[-1][0]
    for night, ok in reversed(settled):
        if ok:
            break
        start = night
    return start


def _crash_findings(nights: Sequence[Night]) -> Iterator[Finding]:
    tonight, past = nights[-1], nights[:-1]
    for name, why in tonight.crashed.items():
        good = [t for t, night in enumerate(past) if name not in night.crashed and _has(night, name)]
        start = good[-1] + 1 if good else 0
        state = STILL if start < len(past) else NEW
        last_good = nights[good[-1]].night if good else None
        yield Finding(
            f"crash/{name}", "crash", state, f"{name} crashed: {why}", nights[start].night, last_good
        )
    for name in past[-1].crashed if past else ():
        if name not in tonight.crashed and _has(tonight, name):
            text = f"{name} ran to its end again"
            yield Finding(f"crash/{name}", "crash", FIXED, text, past[-1].night, tonight.night)
        elif name not in tonight.crashed:
            same = past[-1].facts.get("recipe sha256") == tonight.facts.get("recipe sha256")
            words = "has no run tonight" if same else "is no longer in the recipe file"
            text = f"{name} crashed last night and {words}"
            yield Finding(f"crash/{name}", "crash", NOTICE, text, past[-1].night, None)
    yield from _missing(nights)


def _has(night: Night, run: str) -> bool:
    """Return whether a run that did not crash ran to its end; nights of earlier versions do not say, and count."""
    return night.finished is None or run in night.finished


def _missing(nights: Sequence[Night]) -> Iterator[Finding]:
    """Name the cells that nights of the same recipe file had, or last night, and tonight has not."""
    have = [{cell.recipe for cell in night.cells} for night in nights]
    digests = [night.facts.get("recipe sha256") for night in nights]
    same = len(nights) - 1  # the first night of this recipe file
    while same > 0 and digests[same - 1] == digests[-1]:
        same -= 1
    wanted = set().union(*have[same:-1])
    dropped = have[-2] - wanted if same == len(nights) - 1 and same > 0 else set()
    for recipe in sorted((wanted | dropped) - have[-1]):
        last = max(t for t, recipes in enumerate(have) if recipe in recipes)
        state = NOTICE if recipe in dropped else NEW if last == len(nights) - 2 else STILL
        words = "is no longer in the recipe file" if recipe in dropped else "has no runs tonight"
        since, good = nights[last + 1].night, nights[last].night
        yield Finding(f"missing/{recipe}", "crash", state, f"{recipe} {words}", since, good)


def changes_between(before: Night, after: Night) -> tuple[Change, ...]:
    """Return every fact that differs, with both values; a fact that one night lacks is `absent`."""
    names = list(dict.fromkeys([*after.facts, *before.facts]))
    pairs = [(name, before.facts.get(name, "absent"), after.facts.get(name, "absent")) for name in names]
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


_ORDER = {NEW: 0, STILL: 1, FIXED: 2, NOTICE: 3}


def assess(history: History, rate: float = FALSE_ALARMS_PER_NIGHT) -> Assessment:
    """Return what the last night of `history`, which must not be empty, says."""
    tonight = history.nights[-1]
    tracked = track(history, rate)
    if tonight.status != JUDGED:
        last = tracked.nights[-1] if tracked.nights else None
        changes = changes_between(last, tonight) if last else ()
        start = _silent_before(history.nights)
        state, since = (STILL, start[0].night) if start else (NEW, tonight.night)
        text = f"no verdict tonight: {tonight.reason}"
        finding = Finding("night", "crash", state, text, since, last.night if last else None)
        return Assessment(tonight, (finding,), last, changes, Gate.INVALID, False, (), tracked)
    found = [
        *_silence_ended(history.nights),
        *_crash_findings(tracked.nights),
        *_check_findings(tracked.nights),
        *_step_findings(tracked),
    ]
    findings = tuple(
        _dated(item, tracked.nights) for item in sorted(found, key=lambda item: _ORDER[item.state])
    )
    before = _before(tracked.nights, findings)
    latest = len(tracked.nights) - 1
    learning = tuple(
        name for j, name in enumerate(tracked.names) if tracked.replay.state[0, latest, j] == State.LEARNING
    )
    regressed = any(item.failing and item.kind == "step" for item in findings)
    return Assessment(
        tonight,
        findings,
        before,
        changes_between(before, tonight) if before else (),
        _gate(tonight, findings),
        regressed,
        learning,
        tracked,
    )


def _silent_before(nights: Sequence[Night]) -> list[Night]:
    """Return the unbroken run of nights without a verdict that tonight follows, oldest first."""
    silent: list[Night] = []
    for night in reversed(nights[:-1]):
        if night.status == JUDGED:
            break
        silent.insert(0, night)
    return silent


def _silence_ended(nights: Sequence[Night]) -> Iterator[Finding]:
    silent = _silent_before(nights)
    if silent:
        told = "; ".join(f"{night.night}: {night.reason}" for night in silent[-3:])
        text = f"there is a verdict again, after {fmt.plural(len(silent), 'night')} without one ({told})"
        yield Finding("night", "crash", FIXED, text, silent[0].night, nights[-1].night)


def _dated(item: Finding, nights: Sequence[Night]) -> Finding:
    """Give what still fails the changes of the night on which it began."""
    t = next((t for t, night in enumerate(nights) if night.night == item.since), 0)
    if item.state != STILL or t == 0:
        return item
    return replace(item, changed=changes_between(nights[t - 1], nights[t]))


def _before(nights: Sequence[Night], findings: Sequence[Finding]) -> Night | None:
    """Return the last night before what is new tonight, else before what still fails, else last night."""
    new = [item.since for item in findings if item.state == NEW]
    starts = new or [item.since for item in findings if item.failing]
    order = {night.night: t for t, night in enumerate(nights)}
    end = min((order[name] for name in starts if name in order), default=len(nights) - 1)
    return nights[end - 1] if end > 0 else None


def _gate(night: Night, findings: Sequence[Finding]) -> Gate:
    failing = [item for item in findings if item.failing]
    gates = {cell.gate for cell in night.cells}
    if not night.cells or Gate.INVALID.value in gates or any(item.kind == "crash" for item in failing):
        return Gate.INVALID
    if failing or Gate.FAIL.value in gates:
        return Gate.FAIL
    return Gate.INCONCLUSIVE if Gate.INCONCLUSIVE.value in gates else Gate.PASS
