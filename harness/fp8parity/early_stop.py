"""Arms that have failed at a declared look get no further seeds (`criteria.early_stop: fail`). Imports no torch.

The rule is the verdict's own: each declared look has its share of the error rate and takes the lowest seeds, as the
verdict does. The verdict of a stopped arm is the one of its look, from the runs that the look saw: stopping adds
no chance of error, since each look's chance is counted whether one stops or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fp8parity.ledger import STOPPED_EARLY, ledger_line
from fp8parity.matrix import Matrix
from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json
from fp8parity_analysis.schema import Gate, Role
from fp8parity_analysis.sequential import look_sizes
from fp8parity_analysis.store import RunRecord, read_run
from fp8parity_analysis.verdict import Judgement
from fp8parity_analysis.verdict import judge as judge_curves

Judge = Callable[[Sequence[RunRecord]], Judgement]


class Place(NamedTuple):
    """Where a run stands in the study."""

    run_id: str
    group: str
    arm: str
    role: str
    seed: int


@dataclass(frozen=True)
class Stop:
    """An arm that failed at a look: the look's number (from 1) of how many (0: at any), its seeds, the outcome.

    `criteria` is the digest of the criteria it failed: under others it is looked at anew.
    """

    group: str
    arm: str
    look: int
    looks: int
    seeds: tuple[int, ...]
    outcome: str
    criteria: str

    @property
    def words(self) -> str:
        """The stop in one clause."""
        of = f"look {self.look} of {self.looks}" if self.looks else "a look"
        return f"{self.arm} is {self.outcome} at {of} ({len(self.seeds)} seeds)"


def place_of(document: Mapping[str, Any]) -> Place:
    """Return where the run of a `spec.json` stands."""
    group, arm, role = (str(document[key]) for key in ("group", "arm", "role"))
    return Place(str(document["run_id"]), group, arm, role, int(document["seed"]))


def stops_of(study: Mapping[str, Any]) -> tuple[Stop, ...]:
    """Return the stops that study.json records; `BadInputError` when something else wrote them."""
    try:
        return tuple(
            Stop(**{**entry, "seeds": tuple(map(int, entry["seeds"]))})
            for entry in study.get(STOPPED_EARLY, ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{schema.STUDY_FILE}: {STOPPED_EARLY} cannot be read ({error})") from error


def dropped(places: Sequence[Place], stops: Sequence[Stop]) -> frozenset[str]:
    """Return the runs beyond the looks at which their arms were stopped.

    The controls and null runs of later seeds go too once every arm that they serve is stopped.
    """
    stopped = {(stop.group, stop.arm): set(stop.seeds) for stop in stops}
    found = set()
    for group in {place.group for place in places}:
        own = [place for place in places if place.group == group]
        arms = {place.arm for place in own if place.role == Role.TEST.value}
        seen = {arm: stopped[group, arm] for arm in arms if (group, arm) in stopped}
        judged = set().union(*seen.values()) if arms and len(seen) == len(arms) else None
        for place in own:
            seeds = seen.get(place.arm) if place.role == Role.TEST.value else judged
            if seeds is not None and place.seed not in seeds:
                found.add(place.run_id)
    return frozenset(found)


def _seen(place: Place, group: str, arm: str, seeds: Iterable[int]) -> bool:
    """Whether a look at an arm sees this run; null runs take no part, since none are pooled."""
    is_pair = place.role == Role.CONTROL.value or (place.role == Role.TEST.value and place.arm == arm)
    return place.group == group and is_pair and place.seed in seeds


class EarlyStop:
    """Looks at a study while it runs; what it decides is in study.json and the ledger."""

    def __init__(self, matrix: Matrix, criteria: Criteria, out: Path) -> None:
        self.criteria, self.out = criteria, out
        self.places = [Place(run.run_id, run.group, run.arm, run.role, run.spec.seed) for run in matrix.runs]
        self.stops = list(stops_of(read_json(out / schema.STUDY_FILE)))
        self._looked: set[tuple[str, str, int]] = set()

    def unwanted(self) -> dict[str, str]:
        """Look where a look is due and return the runs that need no training, each with the reason."""
        if self.criteria.early_stop is None:
            return {}
        arms = dict.fromkeys((p.group, p.arm) for p in self.places if p.role == Role.TEST.value)
        for group, arm in arms:
            if not any((stop.group, stop.arm) == (group, arm) for stop in self.stops):
                self._look(group, arm)
        words = "; ".join(stop.words for stop in self.stops)
        return dict.fromkeys(dropped(self.places, self.stops), words)

    def _look(self, group: str, arm: str) -> None:
        tests = [p for p in self.places if (p.group, p.arm, p.role) == (group, arm, Role.TEST.value)]
        seeds = sorted({place.seed for place in tests})
        for number, size in enumerate(look_sizes(self.criteria, len(seeds)), start=1):
            runs = [p for p in self.places if _seen(p, group, arm, seeds[:size])]
            dirs = [self.out / schema.RUNS_DIR / place.run_id for place in runs]
            if not all((path / schema.MANIFEST_FILE).exists() for path in dirs):
                return
            if (group, arm, size) in self._looked:
                continue
            self._looked.add((group, arm, size))
            (verdict,) = judge_curves(
                CurveSet.from_runs([read_run(path) for path in dirs]), self.criteria
            ).verdicts
            if verdict.gate is Gate.FAIL:
                looks = len(self.criteria.looks)
                outcome, digest = verdict.outcome.value, self.criteria.digest()
                self._stop(Stop(group, arm, number, looks, tuple(seeds[:size]), outcome, digest))
                return

    def _stop(self, stop: Stop) -> None:
        self.stops.append(stop)
        document = read_json(self.out / schema.STUDY_FILE)
        entries = [asdict(one) for one in self.stops]
        write_json(self.out / schema.STUDY_FILE, {**document, STOPPED_EARLY: entries})
        ledger_line(self.out, "", STOPPED_EARLY, **asdict(stop))


def judge_with_stops(records: Sequence[RunRecord], stops: Sequence[Stop], judge: Judge) -> Judgement:
    """Judge the arms that were not stopped together, and each stopped one by what its look saw.

    There are no contrasts with a stopped arm, and no trends over arms some of which were stopped for their gap.
    """
    places = {record.run_id: place_of(record.spec) for record in records}
    gone = dropped(list(places.values()), stops)
    names = {(stop.group, stop.arm) for stop in stops}
    rest = [
        r for r in records if not _is_of(places[r.run_id], names) and (r.run_id not in gone or r.manifest)
    ]
    several = len({place.group for place in places.values()}) > 1
    alone = [_judge_stopped(records, places, stop, judge, several=several) for stop in stops]
    if not any(places[record.run_id].role != Role.CONTROL.value for record in rest):
        return _merged(alone[0], alone[1:])
    return _merged(judge(rest), alone)


def _is_of(place: Place, arms: Iterable[tuple[str, str]]) -> bool:
    return place.role == Role.TEST.value and (place.group, place.arm) in arms


def _judge_stopped(
    records: Sequence[RunRecord], places: Mapping[str, Place], stop: Stop, judge: Judge, *, several: bool
) -> Judgement:
    seen = [r for r in records if _seen(places[r.run_id], stop.group, stop.arm, stop.seeds)]
    found = judge(seen)
    label = f"{stop.group}/{stop.arm}" if several else stop.arm
    warning = (
        f"stopped early: {stop.words}; its further seeds were not trained or are not judged. The error rates are those "
        "of the declared looks; the gap of an arm that was stopped because it is large is overstated on average"
    )
    return replace(
        found,
        verdicts=tuple(replace(v, recipe=label, warnings=(warning, *v.warnings)) for v in found.verdicts),
        evidence=tuple(replace(item, recipe=label) for item in found.evidence),
    )


def _merged(first: Judgement, others: Sequence[Judgement]) -> Judgement:
    """Return one judgement of all verdicts, null arms last."""
    verdicts = [verdict for one in (first, *others) for verdict in one.verdicts]
    evidence = [item for one in (first, *others) for item in one.evidence]
    nulls = first.null_recipes
    contrasts = tuple(item for item in first.contrasts if not item.a.startswith("trend over "))
    return replace(
        first,
        verdicts=tuple(sorted(verdicts, key=lambda verdict: verdict.recipe in nulls)),
        evidence=tuple(sorted(evidence, key=lambda item: item.recipe in nulls)),
        contrasts=contrasts,
    )
