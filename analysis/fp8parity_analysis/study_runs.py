"""The stored runs behind a judgement, found by recipe and arm, for the tables and curves of the report."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8parity_analysis.arms import Arm, arms_of
from fp8parity_analysis.curves import run_of_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fp8parity_analysis.store import RunRecord


@dataclass(frozen=True)
class StudyRuns:
    """Runs by recipe name as verdicts spell it, records by run id; both empty for external curves."""

    arms: Mapping[str, Arm]
    records: Mapping[str, RunRecord]

    @staticmethod
    def of(records: Sequence[RunRecord]) -> StudyRuns:
        """Sort the records into arms by the judge's own rule."""
        arms = arms_of([run_of_record(record) for record in records])
        return StudyRuns({arm.recipe: arm for arm in arms}, {record.run_id: record for record in records})

    def tests_of(self, recipe: str) -> list[RunRecord]:
        """Return the records of a recipe's own runs, in order of seed."""
        arm = self.arms.get(recipe)
        runs = [run for members in arm.test.values() for run in members] if arm else []
        return [self.records[run.label] for run in runs]

    def controls_of(self, recipe: str) -> list[RunRecord]:
        """Return the records of the control runs that share a seed with the recipe."""
        arm = self.arms.get(recipe)
        if arm is None:
            return []
        runs = [run for seed, members in arm.control.items() if seed in arm.test for run in members]
        return [self.records[run.label] for run in runs]

    def manifests(self) -> Iterator[Mapping[str, Any]]:
        """Yield every manifest; unfinished runs have none."""
        yield from (record.manifest for record in self.records.values() if record.manifest)


def first_of(records: Sequence[RunRecord], key: str) -> Mapping[str, Any]:
    """Return the first document that a manifest has under `key`, such as `conversion`; empty without one."""
    for record in records:
        found = (record.manifest or {}).get(key)
        if isinstance(found, dict) and found:
            return found
    return {}


def median_of(records: Sequence[RunRecord], key: str) -> float | None:
    """Return the median of a number in the manifests, None where no run has it."""
    values = [(record.manifest or {}).get(key) for record in records]
    known = [float(value) for value in values if isinstance(value, int | float) and value]
    return median(known) if known else None


def distinct(values: Sequence[Any]) -> list[str]:
    """Return the different values as text in order of first appearance, None left out."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))
