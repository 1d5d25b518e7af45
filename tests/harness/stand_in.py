"""Workers that follow a script instead of training: what the launcher does with each exit and each state on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8parity import jobs, launch
from fp8parity.jobs import RunState
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
gate = os.environ.get("FP8PARITY_STANDBY")
if gate:
    (run_dir / "depth").write_text(gate.partition(":")[0])
    if action.get("dies_in_standby"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action.get("refused_in_standby"):
        sys.exit(64)
    (run_dir / "heartbeat.json").write_text(json.dumps({"stage": "standby"}))
    (run_dir / "prepared").touch()
    if os.read(int(gate.partition(":")[2]), 1) != b"g":
        (run_dir / "orphaned").touch()
        sys.exit(75)
(run_dir / "begun").touch()
if action.get("until"):  # every scripted wait ends after a minute
    # one step of ten, so that the launcher expects the end soon, then on until something is there
    (run_dir / "curve.jsonl").write_text(json.dumps({"step": 1, "train_loss": 1.0}) + "\\n")
    deadline = time.monotonic() + 60
    while not (run_dir.parent / action["until"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
if action.get("wait_for_term"):
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))
    (run_dir / "ready").touch()
    while True:
        signal.pause()
if action.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / "ready").touch()
if action.get("hang"):
    (run_dir / "heartbeat.json").write_text(json.dumps({"stage": "train"}))
    while True:
        signal.pause()
if action.get("status") and action.get("kill"):
    (run_dir / "manifest.json").write_text(json.dumps({"status": action["status"]}))
if action.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if action.get("status"):
    (run_dir / "manifest.json").write_text(json.dumps({"status": action["status"]}))
deadline = time.monotonic() + 60
while action.get("lingers") and not (run_dir.parent / action["lingers"]).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(action["code"])
"""

DONE: dict[str, Any] = {"status": "finished", "code": 0}


def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Put scripted workers in place of real ones; return what makes run directories, one action per attempt."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    real = jobs.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        is_worker = command[1:4] == ["-m", "fp8parity", "train"]
        return real([command[0], str(worker), *command[3:]] if is_worker else command, **options)

    monkeypatch.setattr(jobs.subprocess, "Popen", popen)

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


def go(out: Path, dirs: list[Path], slots: int = 2, **options: Any) -> dict[str, RunState]:
    states = launch.launch(out, dirs, slots=slots, use_gpus=False, on_change=lambda _: None, **options)
    return {state.run_id: state for state in states}


def ledger(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / schema.LEDGER_FILE).read_text().splitlines()]


def attempts(run_dir: Path) -> int:
    return len(list(run_dir.glob("attempt-*")))


def faults_of(out: Path, run_id: str) -> list[tuple[str, str, str]]:
    lines = [line for line in ledger(out) if line["run_id"] == run_id and "cause" in line]
    return [(line["event"], line["cause"], line["stage"]) for line in lines]
