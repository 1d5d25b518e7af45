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

from fp8parity import launch
from fp8parity.devices import default_slots
from fp8parity.errors import InterruptedRunError
from fp8parity.launch import RunState
from fp8parity_analysis import schema

WORKER = """\
import json, os, pathlib, signal, sys, time
run_dir = pathlib.Path(sys.argv[-1])
script = json.loads((run_dir / "script.json").read_text())
attempt = len(list(run_dir.glob("attempt-*")))
(run_dir / f"attempt-{attempt}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
(run_dir / "environment.json").write_text(json.dumps(dict(os.environ)))
action = script[min(attempt, len(script) - 1)]
print(action.get("say", ""), flush=True)
if action.get("wait_for_term"):
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))
    (run_dir / "ready").touch()
    while True:
        signal.pause()
if action.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if action.get("status"):
    (run_dir / "manifest.json").write_text(json.dumps({"status": action["status"]}))
sys.exit(action["code"])
"""

DONE: dict[str, Any] = {"status": "finished", "code": 0}


@pytest.fixture
def study_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Return a function that makes run directories whose worker follows a script, one action per attempt."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    real = launch.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([command[0], str(worker), *command[3:]], **options)

    monkeypatch.setattr(launch.subprocess, "Popen", popen)

    def make(*scripts: list[dict[str, Any]]) -> list[Path]:
        dirs = []
        for index, script in enumerate(scripts):
            run_dir = tmp_path / schema.RUNS_DIR / f"run{index}"
            run_dir.mkdir(parents=True)
            (run_dir / schema.SPEC_FILE).write_text(
                json.dumps({"spec": {"train": {"steps": 10, "threads": 1}}})
            )
            (run_dir / "script.json").write_text(json.dumps(script))
            dirs.append(run_dir)
        return dirs

    return make


def go(out: Path, dirs: list[Path], slots: int = 2) -> dict[str, RunState]:
    states = launch.launch(out, dirs, slots=slots, use_gpus=False, on_change=lambda _: None)
    return {state.run_id: state for state in states}


def ledger(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / schema.LEDGER_FILE).read_text().splitlines()]


def attempts(run_dir: Path) -> int:
    return len(list(run_dir.glob("attempt-*")))


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
    assert states["run4"].reason == "fp8parity: bad key"
    events = Counter((line["run_id"], line["event"]) for line in ledger(tmp_path))
    assert events["run2", "retry"] == 2
    assert events["run2", "failed"] == 1
    assert events["run1", "diverged"] == 1


def test_finished_runs_are_skipped(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with([DONE], [DONE])
    go(tmp_path, dirs)
    assert go(tmp_path, dirs) == {}
    assert [attempts(d) for d in dirs] == [1, 1]


def test_no_more_than_the_slots_run_at_once(tmp_path: Path, study_with: Callable[..., list[Path]]) -> None:
    dirs = study_with(*[[DONE]] * 6)
    most = []
    launch.launch(
        tmp_path, dirs, slots=2, use_gpus=False,
        on_change=lambda states: most.append(sum(s.state in ("running", "starting") for s in states)),
    )  # fmt: skip
    assert max(most) <= 2
    assert {line["slot"] for line in ledger(tmp_path) if line["event"] == "started"} == {0, 1}


def test_each_gpu_slot_sees_its_own_gpu(
    tmp_path: Path, study_with: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    dirs = study_with([DONE], [DONE])
    launch.launch(tmp_path, dirs, slots=2, use_gpus=True, on_change=lambda _: None)
    assert {(d / "attempt-0").read_text() for d in dirs} == {"3", "5"}
    assert default_slots("cuda", 1) == 2
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
