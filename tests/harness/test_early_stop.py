"""Arms that failed at a declared look: what is not trained, what is judged, and that the error rates stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fp8parity import matrix, study
from fp8parity.early_stop import EarlyStop, Place, Stop, dropped, stops_of
from fp8parity.errors import UsageError
from fp8parity.judging import judge_study, write_results
from fp8parity.ledger import STOPPED_EARLY
from fp8parity.status import study_status
from fp8parity.token_meta import read_meta
from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.sequential import look_alphas
from fp8parity_analysis.store import RunWriter

from .conftest import WriteRecipe
from .stand_in import DONE, go, ledger

STEPS = 24
CRITERIA = {"looks": [2, 4], "early_stop": "fail", "margin": "0.5%"}
CHANGES = {"seeds": [0, 1, 2, 3], "null": None, "criteria": CRITERIA}


def finish(run_dir: Path, gap: float) -> None:
    """Store a run as if it had been trained, its loss `gap` above its control's, give or take 0.02 %."""
    document = read_json(run_dir / schema.SPEC_FILE)
    tokens = read_meta((run_dir / document["data_path"]).resolve()).sha256
    common = np.random.default_rng(document["seed"]).normal(0, 0.01)
    own = np.random.default_rng([document["seed"], len(document["arm"])]).normal(gap, 2e-4)
    writer = RunWriter(run_dir)
    losses = {step: float(np.exp(common + own) * (2.0 + 2.0 / step)) for step in range(1, STEPS + 1)}
    same = {"grad_norm": 1.0, "lr": 0.1, "step_time": 0.1}
    writer.append_curve(
        {"step": s, "tokens": 64 * s, "train_loss": v, "batch_digest": str(s), **same}
        for s, v in losses.items()
    )
    writer.append_evals(
        {"step": s, "split": "held_out", "eval_precision": p, "loss": v}
        for s, v in losses.items() if s % 3 == 0 for p in ("bf16", "arm")
    )  # fmt: skip
    known = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": run_dir.name, "status": "finished", "steps_done": STEPS,
        "tokens": 64 * STEPS, "data_sha256": tokens, "init_digest": str(document["seed"]), "environment": {},
        "conversion": {}, "execution": {}, "effective": {}, "notes": [], "model": {}, "resumes": 0,
        "started_at": "2026-01-01T00:00:00+00:00", "finished_at": "2026-01-01T00:01:00+00:00", "wall_seconds": 60.0,
    }  # fmt: skip
    writer.finish({**dict.fromkeys(schema.MANIFEST_KEYS), **known})


class Study:
    """A laid out study whose runs are finished by hand."""

    def __init__(self, recipe: Path, out: Path) -> None:
        self.plan, self.out = matrix.read(recipe), out
        self.dirs = dict(
            zip((run.run_id for run in self.plan.runs), study.lay_out(self.plan, out), strict=True)
        )

    def finish(self, seeds: list[int], **gaps: float) -> None:
        """Finish the runs of these seeds: the controls, and the arms that `gaps` names."""
        for run in self.plan.runs:
            if run.spec.seed in seeds and run.arm in {"bf16": 0.0, **gaps}:
                finish(self.dirs[run.run_id], {"bf16": 0.0, **gaps}[run.arm])

    def watcher(self) -> EarlyStop:
        return EarlyStop(self.plan, study.criteria_of(self.plan), self.out)

    def ids(self, *arms: str, seeds: tuple[int, ...]) -> set[str]:
        return {r.run_id for r in self.plan.runs if r.arm in arms and r.spec.seed in seeds}


@pytest.fixture
def begun(write_recipe: WriteRecipe, tmp_path: Path) -> Callable[..., Study]:
    return lambda changes=CHANGES, out="study": Study(write_recipe(changes), tmp_path / out)


def test_an_arm_that_fails_at_a_look_gets_no_further_seeds(begun: Callable[..., Study]) -> None:
    own = begun()
    watcher = own.watcher()
    own.finish([0], tensorwise=0.03, rowwise=0.0)
    assert watcher.unwanted() == {}  # no look is due
    own.finish([1], tensorwise=0.03, rowwise=0.0)
    found = watcher.unwanted()
    assert set(found) == own.ids("tensorwise", seeds=(2, 3))
    assert set(found.values()) == {"tensorwise is WORSE at look 1 of 2 (2 seeds)"}
    stored = read_json(own.out / schema.STUDY_FILE)[STOPPED_EARLY]
    assert stored == [
        {
            "group": stored[0]["group"],
            "arm": "tensorwise",
            "look": 1,
            "looks": 2,
            "seeds": [0, 1],
            "outcome": "WORSE",
            "criteria": study.criteria_of(own.plan).digest(),
        }
    ]
    assert [line["arm"] for line in ledger(own.out) if line["event"] == STOPPED_EARLY] == ["tensorwise"]
    again = begun()  # the same command again: what was decided stays, and is told once
    assert again.watcher().unwanted() == found
    assert len(ledger(own.out)) == 1
    states = {run["run_id"]: run["state"] for run in study_status(own.out)["runs"]}
    assert {name for name, state in states.items() if state == STOPPED_EARLY} == set(found)


def test_other_criteria_are_looked_at_anew(begun: Callable[..., Study]) -> None:
    own = begun()
    own.finish([0, 1], tensorwise=0.03, rowwise=0.0)
    assert own.watcher().unwanted() != {}
    wider = begun({**CHANGES, "criteria": {**CRITERIA, "margin": "5%"}})
    assert read_json(wider.out / schema.STUDY_FILE)[STOPPED_EARLY] == []
    assert wider.watcher().unwanted() == {}


def test_a_look_takes_the_lowest_seeds_as_the_verdict_does(begun: Callable[..., Study]) -> None:
    own = begun({**CHANGES, "seeds": [3, 2, 1, 0]})
    own.finish([3, 2], tensorwise=0.03, rowwise=0.0)
    assert own.watcher().unwanted() == {}
    own.finish([0, 1], rowwise=0.0)
    own.finish([0, 1], tensorwise=0.03)
    own.watcher().unwanted()
    assert read_json(own.out / schema.STUDY_FILE)[STOPPED_EARLY][0]["seeds"] == [0, 1]


def test_the_verdicts_are_those_of_the_declared_looks(begun: Callable[..., Study]) -> None:
    """The stopped arm's is its look's, the other's the one without the rule; a run beyond the look is no evidence."""
    own = begun()
    own.finish([0, 1], tensorwise=0.03, rowwise=0.0)
    own.watcher().unwanted()
    own.finish([2, 3], rowwise=0.0)
    own.finish([2], tensorwise=-0.03)  # was in training when its arm was stopped
    found = {v.recipe: v for v in judge_study(own.out, {}).verdicts}

    full = begun({**CHANGES, "criteria": {**CRITERIA, "early_stop": None}}, "full")
    full.finish([0, 1, 2, 3], tensorwise=0.03, rowwise=0.0)
    wanted = {v.recipe: v for v in judge_study(full.out, {}).verdicts}
    look = begun({**CHANGES, "seeds": [0, 1], "criteria": {**CRITERIA, "early_stop": None}}, "look")
    look.finish([0, 1], tensorwise=0.03, rowwise=0.0)
    at_look = {v.recipe: v for v in judge_study(look.out, {}).verdicts}["tensorwise"]

    stopped = found["tensorwise"]
    # the reasons state p-values adjusted over the recipes judged together, one fewer here
    assert replace(found["rowwise"], reasons=()) == replace(wanted["rowwise"], reasons=())
    assert (stopped.outcome, stopped.gap, stopped.interval) == (
        at_look.outcome,
        at_look.gap,
        at_look.interval,
    )
    assert (stopped.outcome.value, stopped.n_seeds) == ("WORSE", 2)
    assert stopped.alpha == look_alphas((2, 4), 0.05, "bonferroni")[0]
    assert stopped.warnings[0].startswith("stopped early: tensorwise is WORSE at look 1 of 2")
    judgement = judge_study(own.out, {})
    assert judgement.contrasts == ()
    assert judgement.exit_code == 10
    report = next(p for p in write_results(own.out, judgement) if p.suffix == ".html").read_text()
    assert "stopped early" in report


def test_when_every_arm_has_failed_the_controls_stop_too(begun: Callable[..., Study]) -> None:
    own = begun()
    own.finish([0, 1], tensorwise=0.03, rowwise=0.04)
    assert set(own.watcher().unwanted()) == own.ids("bf16", "tensorwise", "rowwise", seeds=(2, 3))
    found = judge_study(own.out, {})
    assert {v.recipe: v.outcome.value for v in found.verdicts} == {"tensorwise": "WORSE", "rowwise": "WORSE"}


def test_seeds_added_to_a_stopped_arm_are_not_trained_and_the_rule_can_be_taken_away(
    begun: Callable[..., Study],
) -> None:
    own = begun()
    own.finish([0, 1], tensorwise=0.03, rowwise=0.0)
    own.watcher().unwanted()
    more = begun({**CHANGES, "seeds": [0, 1, 2, 3, 4]})
    assert set(more.watcher().unwanted()) == more.ids("tensorwise", seeds=(2, 3, 4))
    without = begun({**CHANGES, "seeds": [0, 1, 2, 3, 4], "criteria": {**CRITERIA, "early_stop": None}})
    assert without.watcher().unwanted() == {}
    assert STOPPED_EARLY not in read_json(own.out / schema.STUDY_FILE)
    assert judge_study(own.out, {}).post_hoc  # the criteria are no longer those of the launch


def test_a_look_with_an_unfinished_run_waits(begun: Callable[..., Study]) -> None:
    own = begun()
    own.finish([0, 1], tensorwise=0.03)
    (own.dirs[next(iter(own.ids("bf16", seeds=(1,))))] / schema.MANIFEST_FILE).unlink()
    assert own.watcher().unwanted() == {}


def test_nothing_stops_unless_asked(begun: Callable[..., Study]) -> None:
    own = begun({**CHANGES, "criteria": {"looks": [2, 4], "margin": "0.5%"}})
    own.finish([0, 1], tensorwise=0.03, rowwise=0.0)
    assert own.watcher().unwanted() == {}
    assert STOPPED_EARLY not in read_json(own.out / schema.STUDY_FILE)


@pytest.mark.parametrize(
    ("criteria", "words"),
    [
        ({"early_stop": "fail"}, "declared before the run: write looks"),
        ({**CRITERIA, "correction": "holm"}, "correction: per_comparison"),
        ({**CRITERIA, "null_matched": True}, "null_matched"),
        ({**CRITERIA, "early_stop": "pass"}, "early_stop"),
    ],
)
def test_what_would_change_the_error_rates_is_refused(
    write_recipe: WriteRecipe, criteria: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=f"criteria.*{words}"):
        matrix.read(write_recipe({**CHANGES, "criteria": criteria}))


def test_a_stop_that_cannot_be_read_is_said() -> None:
    with pytest.raises(BadInputError, match=STOPPED_EARLY):
        stops_of({STOPPED_EARLY: [{"arm": "rowwise"}]})


def test_controls_serve_the_arms_that_go_on() -> None:
    places = [
        Place(f"{arm}{seed}", "g", arm, role, seed)
        for arm, role in (("bf16", "control"), ("bf16_null", "null"), ("a", "test"), ("b", "test"))
        for seed in (0, 1, 2)
    ]
    first, second = (Stop("g", arm, 1, 2, seeds, "WORSE", "d") for arm, seeds in (("a", (0,)), ("b", (0, 1))))
    assert dropped(places, []) == frozenset()
    assert dropped(places, [first]) == {"a1", "a2"}
    assert dropped(places, [first, second]) == {"a1", "a2", "b2", "bf162", "bf16_null2"}


def test_the_launcher_starts_nothing_that_is_not_wanted_any_more(
    tmp_path: Path, study_with: Callable[..., list[Path]]
) -> None:
    # the first one's slot is free before its process ends
    dirs = study_with([{**DONE, "until": "run1/prepared", "lingers": "run3/begun"}], [DONE], [DONE], [DONE])

    def unwanted() -> dict[str, str]:
        return {"run1": "why", "run2": "why"} if (dirs[0] / schema.MANIFEST_FILE).exists() else {}

    states = go(tmp_path, dirs, slots=1, standby="prove", unwanted=unwanted)
    assert [states[d.name].state for d in dirs] == ["finished", STOPPED_EARLY, STOPPED_EARLY, "finished"]
    assert states["run2"].reason == "why"
    assert [line["event"] for line in ledger(tmp_path) if line["run_id"] == "run1"] == [
        "standby",
        "withdrawn",
    ]
    assert not (dirs[2] / "begun").exists()


def test_the_error_rates_stay_as_declared(load_benchmark: Callable[[str], ModuleType]) -> None:
    """A small form of benchmarks/early_stopping.py, at the margin, where they are largest."""
    bench = load_benchmark("early_stopping")
    rows = [bench.row(gap, "bonferroni", 200) for gap in (0.0025, 0.005)]
    assert [row.excess() for row in rows] == [[], []]
    assert rows[0].fail > 0  # it was put to the test
    assert rows[1].seeds < 7  # and it saves seeds where an arm is hopeless
    json.dumps([vars(row) for row in rows])
