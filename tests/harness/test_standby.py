"""Workers that are started ahead of their turn: scripted ones for the launcher, real ones for the curves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8parity import launch, matrix, runner
from fp8parity.callbacks import HeldOutEvaluator
from fp8parity.errors import InterruptedRunError
from fp8parity.jobs import Job
from fp8parity.memory import PROCESS_BYTES
from fp8parity.plan import plan_document, standby_of
from fp8parity.progress import Heartbeat, stage_of
from fp8parity.standby import GO, STANDBY, Gate
from fp8parity.status import study_status
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.store import read_run

from .conftest import WriteRecipe
from .stand_in import DONE, attempts, faults_of, go, ledger

Make = Callable[..., list[Path]]
LayOut = Callable[..., dict[str, Path]]


def until(path: str) -> dict[str, Any]:
    """An action that trains one step and ends well once `path` (relative to the runs) is there."""
    return {**DONE, "until": path}


def story(out: Path, run_id: str) -> list[str]:
    return [line["event"] for line in ledger(out) if line["run_id"] == run_id]


def test_the_next_worker_is_ready_before_the_run_before_ends(tmp_path: Path, study_with: Make) -> None:
    dirs = study_with([until("run1/prepared")], [until("run2/prepared")], [DONE])
    states = go(tmp_path, dirs, slots=1, standby="prove")
    assert {state.state for state in states.values()} == {"finished"}
    assert [attempts(d) for d in dirs] == [1, 1, 1]
    assert story(tmp_path, "run0") == ["started", "finished"]
    for name in ("run1", "run2"):
        assert story(tmp_path, name) == ["standby", "started", "finished"]
        own = [line for line in ledger(tmp_path) if line["run_id"] == name]
        assert own[0]["pid"] == own[1]["pid"]  # the same worker went on
        assert (own[0]["depth"], own[1]["prepared"]) == ("prove", True)
        assert (tmp_path / schema.RUNS_DIR / name / "depth").read_text() == "prove"
    for before, after in (("run0", "run1"), ("run1", "run2")):  # the slot is free once there is a result
        result, begun = (
            (tmp_path / schema.RUNS_DIR / before / "manifest.json"),
            dirs[0].parent / after / "begun",
        )
        assert result.stat().st_mtime_ns <= begun.stat().st_mtime_ns


def test_none_is_started_ahead_unless_asked(tmp_path: Path, study_with: Make) -> None:
    dirs = study_with([until("run0/curve.jsonl")], [DONE])
    go(tmp_path, dirs, slots=1)
    assert story(tmp_path, "run1") == ["started", "finished"]
    assert not (dirs[1] / "depth").exists()


def test_a_worker_that_fails_in_standby(tmp_path: Path, study_with: Make) -> None:
    """It is a fault like any other; its run is tried again in a slot of its own, and the others go on."""
    dirs = study_with(
        [until("run2/prepared")],
        [{"dies_in_standby": True}, DONE],
        [DONE],
        [{"refused_in_standby": True, "code": 64}],
    )
    states = go(tmp_path, dirs, slots=1, standby="prove")
    assert [states[d.name].state for d in dirs] == ["finished", "finished", "finished", "refused"]
    assert faults_of(tmp_path, "run1") == [("retry", "killed", "import")]
    assert story(tmp_path, "run1") == ["standby", "retry", "started", "finished"]
    assert story(tmp_path, "run2") == ["standby", "started", "finished"]
    assert attempts(dirs[1]) == 2


def test_memory_that_runs_out_beside_a_prepared_model(tmp_path: Path, study_with: Make) -> None:
    """No model is prepared any more, the worker in standby makes room, its run has lost no attempt."""
    no_memory = {"until": "run1/prepared", "code": 1, "say": "torch.OutOfMemoryError: CUDA out of memory"}
    dirs = study_with([no_memory, until("run1/prepared")], [DONE, until("run2/prepared")], [DONE])
    states = go(tmp_path, dirs, slots=1, standby="prove")
    assert {state.state for state in states.values()} == {"finished"}
    assert faults_of(tmp_path, "run0") == [("retry", "out_of_memory", "import")]
    assert story(tmp_path, "run1")[:2] == ["standby", "withdrawn"]
    assert [line["depth"] for line in ledger(tmp_path) if line["event"] == "standby_limited"] == ["build"]
    depths = [line["depth"] for line in ledger(tmp_path) if line["event"] == "standby"]
    assert depths[0] == "prove"
    assert set(depths[1:]) <= {"build"}
    started = [
        line["attempt"]
        for line in ledger(tmp_path)
        if line["event"] == "started" and line["run_id"] == "run1"
    ]
    assert started == [1]


@pytest.mark.parametrize(("free", "depth"), [(10.0, "prove"), (5.0, "build"), (3.1, None)])
def test_a_standby_holds_no_more_than_the_memory_leaves(
    tmp_path: Path, study_with: Make, monkeypatch: pytest.MonkeyPatch, free: float, depth: str | None
) -> None:
    gib = 2**30
    monkeypatch.setattr(launch, "device_memory", lambda gpus: int(free * gib))
    dirs = study_with([until("run1/prepared" if depth else "run0/curve.jsonl")], [DONE])
    go(tmp_path, dirs, slots=1, standby="prove", memory={"run0": 3 * gib, "run1": 3 * gib})
    assert [line["depth"] for line in ledger(tmp_path) if line["event"] == "standby"] == (
        [depth] if depth else []
    )
    assert 3.1 < (3 * gib + PROCESS_BYTES) / gib < 5.0


def stop_when(path: Path, number: int) -> threading.Thread:
    """Send this process a signal once `path` is there."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_launcher_that_is_stopped_ends_its_standby(tmp_path: Path, study_with: Make) -> None:
    dirs = study_with([{"until": "run1/prepared", "wait_for_term": True, "code": 0}, DONE], [DONE])
    thread = stop_when(dirs[1] / "prepared", signal.SIGTERM)
    with pytest.raises(InterruptedRunError):
        go(tmp_path, dirs, slots=1, standby="prove")
    thread.join()
    assert story(tmp_path, "run1") == ["standby", "withdrawn"]
    assert not (dirs[1] / "begun").exists()
    assert {run["run_id"]: run["state"] for run in study_status_of(tmp_path, dirs)["runs"]}[
        "run1"
    ] == "waiting"
    assert {s.state for s in go(tmp_path, dirs, slots=1, standby="prove").values()} == {"finished"}


def study_status_of(out: Path, dirs: list[Path]) -> dict[str, Any]:
    for path in dirs:
        document = read_json(path / schema.SPEC_FILE)
        document["spec"]["train"] |= {"batch_size": 1, "context": 1}
        (path / schema.SPEC_FILE).write_text(json.dumps(document))
    return study_status(out)


LAUNCHER = """
import pathlib, sys
from fp8parity import jobs, launch
real = jobs.subprocess.Popen
jobs.subprocess.Popen = lambda command, **options: real([command[0], sys.argv[1], *command[3:]], **options)
dirs = [pathlib.Path(name) for name in sys.argv[3:]]
launch.launch(pathlib.Path(sys.argv[2]), dirs, slots=1, use_gpus=False, on_change=lambda s: None, standby="prove")
"""


def test_a_standby_of_a_killed_launcher_never_trains(tmp_path: Path, study_with: Make) -> None:
    dirs = study_with([until("never")], [DONE])
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "worker.py"), str(tmp_path), *map(str, dirs)]
    with subprocess.Popen(command) as launcher:
        try:
            deadline = time.monotonic() + 60
            while not (dirs[1] / "prepared").exists():
                assert launcher.poll() is None
                assert time.monotonic() < deadline
                threading.Event().wait(0.02)
        finally:
            launcher.kill()
    deadline = time.monotonic() + 60
    while not (dirs[1] / "orphaned").exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    (dirs[0].parent / "never").touch()  # lets the scripted run, which asks no kernel, end too
    assert not (dirs[1] / "begun").exists()
    assert not (dirs[1] / schema.MANIFEST_FILE).exists()


def test_a_free_slot_of_another_gpu_does_not_wait(
    tmp_path: Path, study_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run2 is prepared for the GPU of run0; when the other GPU is free first, it is begun there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    dirs = study_with([until("run2/begun")], [until("run2/prepared")], [DONE])
    monkeypatch.setattr(Job, "ends_within", lambda job, seconds: job.run_id == "run0")
    launch.launch(tmp_path, dirs, slots=2, use_gpus=True, on_change=lambda _: None, standby="prove")
    assert story(tmp_path, "run2") == ["standby", "withdrawn", "started", "finished"]
    assert [(dirs[2] / f"attempt-{i}").read_text() for i in range(2)] == ["3", "5"]


class Scripted(Job):
    """A job without a process: it trains until it is told to end."""

    ending = False

    def _begin(self, slot: int, environment: Any, descriptors: Any) -> None:
        self.slot, self.attempts = slot, self.attempts + 1

    def go(self, slot: int) -> None:
        self.slot, self.standby = slot, None

    def withdraw(self) -> None:
        self.standby, self.attempts = None, self.attempts - 1

    def ends_within(self, seconds: float) -> bool:
        return self.ending

    @property
    def pid(self) -> int:
        return os.getpid()


GIB = 2**30


def launcher(out: Path, slots: int, *jobs: tuple[str, int]) -> launch.Launcher:
    """Return a launcher of one device of 128 GiB; `jobs` are names and GiB."""
    queue: list[Job] = [Scripted(out / name, 10, 1, gib * GIB) for name, gib in jobs]
    return launch.Launcher(out, slots, ["0"], lambda _: None, queue, device_bytes=128 * GIB, depth="build")


def end(own: launch.Launcher, *names: str) -> None:
    own.running = [job for job in own.running if job.run_id not in names]
    own._start_what_fits()
    own._prepare_next()


def names(jobs: list[Job]) -> list[str]:
    return [job.run_id for job in jobs]


def prepared(own: launch.Launcher) -> None:
    """Have what runs be about to end, and the next ones start ahead."""
    for job in own.running:
        job.ending = True  # type: ignore[attr-defined]
    own._prepare_next()


def test_two_large_runs_in_standby_do_not_wait_for_each_other(tmp_path: Path) -> None:
    own = launcher(tmp_path, 2, ("a", 40), ("b", 40), ("large", 128), ("larger", 140))
    own._start_what_fits()
    prepared(own)
    assert names(own.standbys) == ["large", "larger"]
    end(own, "a", "b")
    assert (names(own.running), names(own.queue)) == (["large"], ["larger"])
    end(own, "large")
    assert names(own.running) == ["larger"]


def test_nothing_overtakes_a_run_that_was_started_ahead(tmp_path: Path) -> None:
    own = launcher(tmp_path, 2, ("a", 40), ("b", 40), ("large", 100), ("c", 40), ("d", 40))
    own._start_what_fits()
    prepared(own)
    end(own, "a")
    assert names(own.running) == ["b"]
    end(own, "b")
    assert names(own.running) == ["large"]
    end(own, "large")
    assert names(own.running) == ["c", "d"]


def test_a_run_that_failed_in_standby_is_next_all_the_same(tmp_path: Path) -> None:
    own = launcher(tmp_path, 1, ("a", 10), ("failed", 10), ("b", 10), ("c", 10))
    own._start_what_fits()
    own.queue[0].prepared_in_vain = True
    prepared(own)
    assert names(own.standbys) == ["b"]
    end(own, "a")
    assert (names(own.running), names(own.standbys), names(own.queue)) == (["failed"], ["b"], ["c"])


def test_waiting_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fp8parity.jobs.time.monotonic", lambda: now[0])
    job = Job(tmp_path, 10, 1, standby="prove")
    heart = Heartbeat(tmp_path)
    heart.enter("prove")
    job.silent_seconds()
    now[0] += 50
    assert job.silent_seconds() == 50  # it hangs while it prepares
    heart.enter("standby")
    for _ in range(2):
        now[0] += 5000
        assert job.silent_seconds() == 0


def test_how_far_a_worker_prepares(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def depth(runtime: dict[str, Any], device: str = "auto", asked: int | None = None) -> str | None:
        changes = {"base": {"train": {"device": device, "bf16_gemm": "native"}}, "runtime": runtime}
        return standby_of(matrix.read(write_recipe(changes)), asked)

    assert depth({}, "cpu") is None
    assert depth({}) == "build"  # one run has the GPU to itself: nothing disturbs its clock
    assert depth({"slots_per_gpu": 4}) == "prove"
    assert depth({"slots_per_gpu": 4}, asked=2) == "build"  # whatever the memory
    assert depth({"slots_per_gpu": 4, "slots": 2}) == "build"
    assert [depth({"standby": True}, d) for d in ("cpu", "auto")] == ["prove", "prove"]
    assert [depth({"standby": False, "slots_per_gpu": 4}, d) for d in ("cpu", "auto")] == [None, None]


def test_the_plan_states_what_standby_holds(write_recipe: WriteRecipe) -> None:
    document = plan_document(matrix.read(write_recipe({"runtime": {"standby": True}})))
    assert (document["standby"], document["standby_bytes"]) == ("prove", document["memory_bytes"])
    assert any("in standby with its model on the device" in words for words in document["words"])
    document = plan_document(matrix.read(write_recipe()))
    assert (document["standby"], document["standby_bytes"]) == (None, 0)
    assert not any("standby" in words for words in document["words"])


def curves(run_dir: Path) -> dict[str, list[Any]]:
    run = read_run(run_dir)
    return {
        **run.curve.drop(columns="step_time").to_dict("list"),
        **{f"eval_{k}": v for k, v in run.evals.to_dict("list").items()},
    }


@pytest.mark.parametrize("depth", ["build", "prove"])
def test_a_run_that_waited_has_the_same_numbers(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    changes = {"base": {"train": {"steps": 6, "accumulate": 2}}, "seeds": [0]}
    undisturbed, waited = lay_out(changes, "a")["rowwise-0"], lay_out(changes, "b")["rowwise-0"]
    assert runner.train(undisturbed) == 0
    worker_end, ours = os.pipe()
    seen: list[str] = []

    def say_go() -> None:
        deadline = time.monotonic() + 60
        while stage_of(waited) != "standby" and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        seen.append(stage_of(waited))
        seen.append(
            str((waited / schema.CURVE_STREAM).read_text() if (waited / schema.CURVE_STREAM).exists() else "")
        )
        os.write(ours, GO)

    monkeypatch.setenv(STANDBY, f"{depth}:{worker_end}")
    thread = threading.Thread(target=say_go)
    thread.start()
    assert runner.train(waited) == 0
    thread.join()
    os.close(ours)
    assert seen == ["standby", ""]  # no step before its turn
    assert STANDBY not in os.environ
    assert curves(waited) == curves(undisturbed)
    theirs, own = (read_json(path / schema.MANIFEST_FILE) for path in (undisturbed, waited))
    assert own["init_digest"] == theirs["init_digest"]
    assert own["execution"] == theirs["execution"]


def test_evaluation_is_compiled_before_the_slot(
    lay_out: LayOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = torch.nn.Module.compile
    # the graphs are what counts here, not the code they become
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiling(self, backend="eager"))
    graphs: list[int] = []
    start = HeldOutEvaluator.on_train_start  # the first thing after the gate that only this callback does

    def noting(self: HeldOutEvaluator, trainer: Any, pl_module: Any) -> None:
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        start(self, trainer, pl_module)

    monkeypatch.setattr(HeldOutEvaluator, "on_train_start", noting)
    changes = {"base": {"train": {"compile": "blocks", "eval_sequences": 6}}}  # the last batch is a short one
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        recompile_limit=64, fail_on_recompile_limit_hit=True
    ):  # put back afterwards
        runner.train(lay_out(changes)["rowwise-0"])
    assert graphs[0] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs[0]


def test_a_worker_whose_launcher_is_gone_trains_nothing(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 6}}})["rowwise-0"]
    worker_end, ours = os.pipe()
    os.close(ours)
    monkeypatch.setenv(STANDBY, f"prove:{worker_end}")
    with pytest.raises(InterruptedRunError, match="the launcher is gone"):
        runner.train(run_dir)
    assert len((run_dir / schema.CURVE_STREAM).read_text()) == 0
    assert not (run_dir / schema.MANIFEST_FILE).exists()


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    worker_end, ours = os.pipe()
    before = signal.getsignal(signal.SIGTERM)
    thread = stop_when(tmp_path / "heartbeat.json", signal.SIGTERM)
    with pytest.raises(InterruptedRunError, match="SIGTERM received in standby"):
        Gate("build", worker_end).wait("build", Heartbeat(tmp_path))
    thread.join()
    os.close(worker_end)
    os.close(ours)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_no_launcher_wrote_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STANDBY, "soon:7")
    with pytest.raises(ValueError, match="is not DEPTH:FD"):
        Gate.from_environment()
    monkeypatch.delenv(STANDBY, raising=False)
    assert Gate.from_environment().depth is None
