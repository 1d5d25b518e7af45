"""The arithmetic of benchmarks/utilisation.py on a launch made up by hand. Never a timing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fp8parity import matrix
from fp8parity.data import pack_bytes
from fp8parity.jobs import RunState
from fp8parity.plan import standby_of

STEPS = 100


@pytest.fixture(scope="module")
def bench(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("utilisation")


def look(**runs: tuple[str, int]) -> list[RunState]:
    return [RunState(name, state, step, STEPS, None, None) for name, (state, step) in runs.items()]


@pytest.fixture
def trace(bench: ModuleType) -> object:
    """Return two slots and three runs; a run in standby waits, whatever its stream holds from an earlier launch."""
    made = bench.Trace()
    made.note(0.0, look(a=("waiting", 0), b=("waiting", 0), c=("waiting", 0)))
    made.note(10.0, look(a=("running", 20), b=("starting", 0), c=("waiting", 7)))
    made.note(20.0, look(a=("running", 40), b=("running", 20), c=("waiting", 0)))
    made.note(30.0, look(a=("running", 60), b=("running", 40), c=("waiting", 0)))
    made.note(40.0, look(a=("finished", 100), b=("running", 60), c=("starting", 0)))
    made.note(50.0, look(a=("finished", 100), b=("finished", 100), c=("running", 30)))
    made.note(60.0, look(a=("finished", 100), b=("finished", 100), c=("finished", 100)))
    return made


def test_steady_steps_are_those_while_every_slot_trains(bench: ModuleType, trace: object) -> None:
    assert bench.all_train(trace, 2, STEPS) == [False, False, True, True, False, False, False]
    intervals = bench.steady_steps(trace, 2, STEPS)
    assert intervals == {"a": [(40, 60)], "b": [(20, 40)]}
    times = {"a": [0.5] * STEPS, "b": [1.5] * STEPS}
    # 40 steps of 8 tokens in 10 + 30 seconds of two slots
    assert bench.steady_rate(intervals, lambda run, i, j: times[run][i:j], 2, 8) == 2 * 40 * 8 / 40.0
    assert bench.steady_rate({}, lambda run, i, j: [], 2, 8) is None


def test_what_preparing_costs_is_not_steady(bench: ModuleType, trace: object) -> None:
    trace.preparing[3] = 1  # type: ignore[attr-defined]
    assert bench.steady_steps(trace, 2, STEPS) == {}
    assert bench.steady_steps(trace, 2, STEPS, quiet=False) == {"a": [(40, 60)], "b": [(20, 40)]}


def test_workers_prepare_until_they_are_ready(bench: ModuleType, tmp_path: Path) -> None:
    lines = [
        ("a", "started"),
        ("b", "standby"),
        ("c", "standby"),
        ("d", "standby"),
        ("d", "withdrawn"),
        ("e", "standby"),
    ]
    lines.append(("e", "started"))
    (tmp_path / "ledger.jsonl").write_text(
        "".join(json.dumps({"run_id": run, "event": event}) + "\n" for run, event in lines)
    )
    assert bench.preparing(tmp_path) == 2  # b and c are still in their imports
    for run, stage in (("b", "prove"), ("c", "standby")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "heartbeat.json").write_text(json.dumps({"stage": stage}))
    assert bench.preparing(tmp_path) == 1


def test_the_timeline_adds_up(bench: ModuleType, trace: object) -> None:
    found = bench.timeline(trace, 8, window=20.0)
    assert [(seconds, busy) for seconds, _, busy, _ in found] == [(20.0, 2), (40.0, 2), (60.0, 0)]
    assert sum(20 * rate for _, rate, _, _ in found) == 300 * 8


def test_the_clock_ends_when_no_run_is_left_to_start(bench: ModuleType, trace: object) -> None:
    assert bench.run_out(trace, 2) == 5  # b has ended, c is the last
    assert bench.tokens_between(trace, 0, 5, 8) == 230 * 8
    assert bench.tokens_between(trace, 2, 3, 8) == 40 * 8


def test_handovers_are_measured_slot_by_slot(bench: ModuleType, trace: object) -> None:
    assert bench.handovers(trace, {"a": 0, "b": 1, "c": 0}, STEPS) == [10.0]
    assert bench.handovers(trace, {"a": 0, "b": 1, "c": 1}, STEPS) == [0.0]
    assert bench.handovers(trace, {"a": 0, "b": 1, "c": 2}, STEPS) == []


def test_an_earlier_call_tells_rate_and_steady_tokens(bench: ModuleType) -> None:
    document = {
        "parts": {
            "warm-up": {"slots": 2, "steady_tokens_per_s": 7},
            "slots-4": {"slots": 4, "steady_tokens_per_s": 200},
            "slots-3": {"left_out": "no time"},
        }
    }
    known = bench.known_from(document, 4)
    assert (known.steady, known.rate) == ({4: 200.0}, 50.0)
    with pytest.raises(SystemExit, match="of 3 slots in it; measure --part slots first"):
        bench.known_from(document, 3)


@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("name", ["GPU", "MINIATURE"])
def test_the_recipes_are_valid(
    bench: ModuleType, tmp_path: Path, name: str, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    corpus, path = tmp_path / "corpus.bin", tmp_path / "recipe.yaml"
    # long enough for the GPU's 512 sequences of 512
    pack_bytes([b"%06d" % i * 400 for i in range(1000)], corpus, held_out_fraction=0.2, source="test")
    path.write_text(yaml.safe_dump(bench.recipe_of(getattr(bench, name), corpus, 4, 4, 640, pauses=pauses)))
    plan = matrix.read(path)
    assert (len(plan.runs), plan.pairs) == (8, 4)
    assert {run.spec.train.device for run in plan.runs} == {"cuda" if name == "GPU" else "cpu"}
    assert {run.spec.train.eval_every for run in plan.runs} == {80 if pauses else 640}
    assert plan.runtime.checkpoint_every == (None if pauses else 640)
    assert standby_of(plan) == ("prove" if pauses else None)
