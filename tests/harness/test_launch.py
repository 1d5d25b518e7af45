"""The launcher against stand-in workers: what each exit code and each state on disk leads to."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8parity import faults, jobs, launch
from fp8parity.devices import default_slots
from fp8parity.errors import InterruptedRunError
from fp8parity.jobs import Job, RunState
from fp8parity.progress import stage_of
from fp8parity_analysis import schema

from .stand_in import DONE, attempts, faults_of, go, ledger


def test_results_faults_and_mistakes(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with(
        [DONE],
        [{"status": "diverged", "code": 20}],
        [{"code": 1, "say": "boom"}],
        [{"kill": True, "code": 0}, DONE],
        [{"code": 64, "say": "fp8parity: bad key"}],
        [{"code": 75}, DONE],
        [{"code": 0, "say": "left without a manifest"}],
        [{"code": 75, "say": "fp8parity: x: no space left on the device; what was written is kept"}],
        [{"code": 12, "say": "fp8parity: the run would not execute what it declares"}],
    )
    states = go(tmp_path, dirs)
    assert [states[f"run{i}"].state for i in range(9)] == [
        "finished", "diverged", "failed", "finished", "refused", "finished", "failed", "interrupted", "invalid",
    ]  # fmt: skip
    assert [attempts(d) for d in dirs] == [1, 1, 3, 2, 1, 2, 3, 1, 1]
    assert states["run2"].reason == "boom"
    assert states["run3"].reason == ""  # it was killed once, and finished
    assert states["run4"].reason == "fp8parity: bad key"
    events = Counter((line["run_id"], line["event"]) for line in ledger(tmp_path))
    assert events["run2", "retry"] == 2
    assert events["run2", "failed"] == 1
    assert events["run1", "diverged"] == 1


def test_each_fault_is_a_ledger_entry_with_cause_and_stage(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    traceback = (
        "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n[W] cleaning up"
    )
    dirs = study_with(
        [{"kill": True, "code": 0}, DONE],
        [{"code": 1, "say": traceback}, {"code": 1, "say": "RuntimeError: boom"}, DONE],
        [{"code": 75, "say": "fp8parity: SIGTERM received: saved at step 4"}, DONE],
        [{"code": 12, "say": "fp8parity: the run would not execute what it declares: x"}],
        [{"code": 64, "say": "fp8parity: bad key"}],
        [{"code": 75, "say": "fp8parity: x: no space left on the device; what was written is kept"}],
    )
    go(tmp_path, dirs)
    assert faults_of(tmp_path, "run0") == [("retry", "killed", "import")]
    assert faults_of(tmp_path, "run1") == [("retry", "out_of_memory", "import"), ("retry", "error", "import")]
    assert faults_of(tmp_path, "run2") == [("retry", "terminated", "import")]
    assert faults_of(tmp_path, "run3") == [("invalid", "not_as_declared", "import")]
    assert faults_of(tmp_path, "run4") == [("refused", "usage", "import")]
    assert faults_of(tmp_path, "run5") == [("interrupted", "full_disk", "import")]
    reasons = [line["reason"] for line in ledger(tmp_path) if line["run_id"] == "run1" and "cause" in line]
    assert reasons[0].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert reasons[1] == "RuntimeError: boom"  # the words of its own attempt, not of the one before


def test_a_hung_worker_is_killed_and_tried_again(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that hangs ages a hundred times as fast; those that only start have all the time they need."""
    silent = Job.silent_seconds
    monkeypatch.setattr(
        Job, "silent_seconds", lambda job: silent(job) * (100 if stage_of(job.run_dir) == "train" else 1)
    )
    monkeypatch.setattr(jobs, "STACKS_SECONDS", 0.01)
    dirs = study_with([{"hang": True}, DONE], [{"hang": True}], [DONE])
    states = go(tmp_path, dirs, slots=3, hang_after_s=30.0)
    assert [states[f"run{i}"].state for i in range(3)] == ["finished", "hung", "finished"]
    assert [attempts(d) for d in dirs] == [2, 3, 1]
    assert faults_of(tmp_path, "run0") == [("retry", "hung", "train")]
    assert [f[0] for f in faults_of(tmp_path, "run1")] == ["retry", "retry", "hung"]
    assert "no sign of life for 30 s in stage train" in states["run1"].reason
    silences = [
        line["silent_s"] for line in ledger(tmp_path) if line["event"] == "hung" and "silent_s" in line
    ]
    assert len(silences) == 4
    assert min(silences) >= 30.0


def test_a_killed_worker_that_does_not_end_holds_up_no_other(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that sleeps in the kernel: its SIGKILL strikes when the other run has ended."""
    silent, kill, pending = Job.silent_seconds, os.killpg, []
    monkeypatch.setattr(
        Job, "silent_seconds", lambda job: silent(job) * (100 if stage_of(job.run_dir) == "train" else 1)
    )
    monkeypatch.setattr(jobs, "STACKS_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "STACKS_SIGNAL", 0)  # no signal at all: the stand-in would die of the real one
    monkeypatch.setattr(jobs, "KILL_SECONDS", 0.01)
    monkeypatch.setattr(jobs.os, "killpg", lambda *struck: pending.append(struck))

    def look(states: list[RunState]) -> None:
        if pending:
            (tmp_path / schema.RUNS_DIR / "struck").touch()
        if pending and {state.run_id: state.state for state in states}["run1"] == "finished":
            kill(*pending.pop())

    dirs = study_with([{"hang": True}, DONE], [{**DONE, "until": "struck"}])
    states = launch.launch(tmp_path, dirs, slots=2, use_gpus=False, on_change=look, hang_after_s=30.0)
    assert [state.state for state in states] == ["finished", "finished"]
    events = [(line["run_id"], line["event"]) for line in ledger(tmp_path)]
    assert events.count(("run0", "hung")) == 1
    assert events.index(("run0", "hung")) < events.index(("run1", "finished"))
    assert events.index(("run1", "finished")) < events.index(("run0", "retry"))


def test_sigkill_is_put_down_to_memory_when_the_kernel_killed_somebody(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])  # at the start of the worker, at its end
    monkeypatch.setattr(faults, "host_oom_kills", lambda: next(counts, 4))
    go(tmp_path, study_with([{"kill": True, "code": 0, "say": "step 3"}, DONE]))
    assert faults_of(tmp_path, "run0") == [("retry", "out_of_memory", "import")]
    reason = next(line["reason"] for line in ledger(tmp_path) if line["event"] == "retry")
    assert reason == "SIGKILL by the kernel, which ran out of memory in stage import; last words: step 3"


def test_a_full_disk_that_leaves_no_words_is_seen(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FULL_BYTES", 2**80)
    states = go(tmp_path, study_with([{"code": 1}]))
    assert states["run0"].state == "interrupted"
    assert "no space left on the device" in states["run0"].reason


def test_a_ledger_on_a_full_disk_ends_no_run(
    tmp_path: Path, study_with: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    dirs = study_with([DONE])
    (tmp_path / schema.LEDGER_FILE).symlink_to("/dev/full")
    assert go(tmp_path, dirs)["run0"].state == "finished"
    assert "no space left to write ledger.jsonl" in capsys.readouterr().err


def test_a_kill_after_the_manifest_is_no_fault(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with(
        [{"status": "finished", "kill": True, "code": 0}], [{"status": "diverged", "kill": True, "code": 0}]
    )
    states = go(tmp_path, dirs)
    assert [states[f"run{i}"].state for i in range(2)] == ["finished", "diverged"]
    assert [attempts(d) for d in dirs] == [1, 1]


def test_a_slot_is_free_once_the_result_is_there(
    tmp_path: Path, study_with: Callable[..., list[Path]]
) -> None:
    # the first one's process ends only when the second one has begun; it counts as one of those that run at no time
    dirs = study_with([{**DONE, "lingers": "run1/begun"}], [DONE], [{**DONE, "lingers": "run0/begun"}])
    seen: list[list[str]] = []
    states = launch.launch(
        tmp_path, dirs, slots=1, use_gpus=False, on_change=lambda found: seen.append([s.state for s in found])
    )
    assert {state.state for state in states} == {"finished"}
    assert all(sum(state in ("running", "starting") for state in look) <= 1 for look in seen)
    events = [(line["run_id"], line["event"]) for line in ledger(tmp_path)]
    assert events.index(("run1", "started")) < events.index(("run0", "finished"))
    assert [attempts(d) for d in dirs] == [1, 1, 1]


def one_after_the_other(tmp_path: Path, dirs: list[Path], **options: Any) -> None:
    """Run two in one slot; the first one's process ends when it has lingered beside the waiting second for a while."""
    looks: list[list[str]] = []

    def look(states: list[RunState]) -> None:
        found = {state.run_id: state.state for state in states}
        looks.append([found["run0"], found["run1"]])
        if looks[-3:] == [["finished", "waiting"]] * 3:
            (tmp_path / schema.RUNS_DIR / "gate").touch()

    launch.launch(tmp_path, dirs, slots=1, on_change=look, **options)
    events = [(line["run_id"], line["event"]) for line in ledger(tmp_path)]
    assert events.index(("run0", "finished")) < events.index(("run1", "started"))
    assert looks[-1] == ["finished", "finished"]


def test_a_gpu_whose_memory_nobody_counts_is_given_to_one_process_after_the_other(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one_after_the_other(tmp_path, study_with([{**DONE, "lingers": "gate"}], [DONE]), use_gpus=True)


def test_what_lingers_holds_its_memory(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "device_memory", lambda gpus: 100)
    dirs = study_with([{**DONE, "lingers": "gate"}], [DONE])
    # a free slot, and no memory for the next
    one_after_the_other(tmp_path, dirs, use_gpus=False, memory={"run0": 60, "run1": 50})


def test_runs_share_a_device_only_within_its_memory(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "device_memory", lambda gpus: 100)
    dirs = study_with(*[[DONE]] * 5)
    sizes = dict(zip((d.name for d in dirs), (60, 60, 40, 300, 10), strict=True))
    together: list[int] = []
    started: list[Job] = []
    start = Job.start

    def noting(job: Job, slot: int, environment: Any) -> None:
        start(job, slot, environment)
        started.append(job)
        together.append(sum(j.memory for j in started if not j.outcome))

    monkeypatch.setattr(Job, "start", noting)
    go(tmp_path, dirs, slots=4, memory=sizes)
    assert [job.run_id for job in started] == [f"run{i}" for i in range(5)]  # the order of the plan
    assert max(used for used in together if used != 300) <= 100
    assert 300 in together  # too large for any device: it goes alone, the estimate may be wrong


def test_finished_runs_are_skipped(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with([DONE], [DONE])
    go(tmp_path, dirs)
    assert go(tmp_path, dirs) == {}
    assert [attempts(d) for d in dirs] == [1, 1]


def test_only_what_is_new_of_a_larger_study_runs(
    tmp_path: Path, study_with: Callable[..., list[Path]], lay_out: Callable[..., dict[str, Path]]
) -> None:
    study_with()

    def run_all(changes: dict[str, Any]) -> set[str]:
        dirs = lay_out(changes)
        for path in dirs.values():
            (path / "script.json").write_text(json.dumps([DONE]))
        go(tmp_path / "study", list(dirs.values()))
        assert all(attempts(path) == 1 for path in dirs.values())
        return set(dirs)

    first = run_all({"axes": {"precision.recipe": ["rowwise"]}, "null": None})
    more_seeds = run_all({"axes": {"precision.recipe": ["rowwise"]}, "null": None, "seeds": [0, 1, 2]})
    more_arms = run_all({"seeds": [0, 1, 2]})
    assert first < more_seeds < more_arms


def test_no_more_than_the_slots_run_at_once(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with(*[[DONE]] * 6)
    most = []
    launch.launch(
        tmp_path, dirs, slots=2, use_gpus=False,
        on_change=lambda states: most.append(sum(s.state in ("running", "starting") for s in states)),
    )  # fmt: skip
    assert max(most) <= 2
    assert {line["slot"] for line in ledger(tmp_path) if line["event"] == "started"} == {0, 1}
    launched = ledger(tmp_path)[0]
    assert (launched["event"], launched["pid"], launched["slots"]) == ("launched", os.getpid(), 2)


def test_each_gpu_slot_sees_its_own_gpu(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    dirs = study_with([DONE], [DONE])
    launch.launch(tmp_path, dirs, slots=2, use_gpus=True, on_change=lambda _: None)
    assert {(d / "attempt-0").read_text() for d in dirs} == {"3", "5"}
    assert default_slots("cuda", 1) == 2
    assert default_slots("cuda", 1, per_gpu=3) == 6
    assert default_slots("cpu", 10**6) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_workers_and_asks_to_resume(
    tmp_path: Path, study_with: Callable[..., list[Path]], number: int
) -> None:
    dirs = study_with([{"wait_for_term": True, "code": 0}, DONE], [DONE], [DONE])

    def when_ready() -> None:
        deadline = time.monotonic() + 60
        while not (dirs[0] / "ready").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=when_ready)
    thread.start()
    with pytest.raises(InterruptedRunError, match="run the same command again to resume"):
        go(tmp_path, dirs, slots=1)
    thread.join()
    assert [attempts(d) for d in dirs] == [1, 0, 0]
    assert ledger(tmp_path)[-1]["event"] == "interrupted"
    assert [s.state for s in go(tmp_path, dirs).values()] == ["finished"] * 3


def test_a_worker_that_does_not_stop_is_killed(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    dirs = study_with([{"deaf": True, "hang": True}])

    def when_ready() -> None:
        deadline = time.monotonic() + 60
        while not (dirs[0] / "heartbeat.json").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=when_ready)
    thread.start()
    with pytest.raises(InterruptedRunError):
        go(tmp_path, dirs)
    thread.join()
    last = ledger(tmp_path)[-1]
    assert (last["event"], last["cause"], last["stage"]) == ("killed", "hung", "train")


def test_the_runs_of_a_study_share_compile_caches_of_their_own(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")  # the user's own choice stays
    dirs = study_with([DONE], [DONE])
    go(tmp_path, dirs)
    for run_dir in dirs:
        seen = json.loads((run_dir / "environment.json").read_text())
        assert seen["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path.resolve() / "compile_cache" / "inductor")
        assert seen["TRITON_CACHE_DIR"] == "/elsewhere"
        assert seen["PYTHONSAFEPATH"] == "1"  # a worker finds no more modules than planning did
        assert seen["PYTHONHASHSEED"] == "0"  # nor registers a set of layers in another order
