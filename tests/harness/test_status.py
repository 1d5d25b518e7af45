"""Where a study stands, from every state the disk and the ledger can be in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fp8parity import ledger, status_screen
from fp8parity.errors import UsageError
from fp8parity.ledger import LAUNCHED, STANDBY, WITHDRAWN, ledger_line
from fp8parity.process import LOCK_FILE, start_ticks
from fp8parity.progress import HEARTBEAT_FILE, Heartbeat
from fp8parity.status import FRESH_SECONDS, study_status
from fp8parity_analysis import schema

HOST = "here"
GONE = {"pid": 2**22 + 1, "born": 1}
"""A process id beyond the kernel's largest."""


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8parity.status.socket.gethostname", lambda: HOST)


def me() -> dict[str, Any]:
    return {"pid": os.getpid(), "born": start_ticks(os.getpid())}


def launched(out: Path, who: dict[str, Any], host: str = HOST, slots: int = 2) -> None:
    ledger_line(out, "", LAUNCHED, **who, host=host, slots=slots)


def study_of(out: Path, names: list[str]) -> dict[str, Path]:
    (out / schema.STUDY_FILE).write_text(json.dumps({"name": "tiny", "runs": names}))
    dirs = {}
    for seed, name in enumerate(names):
        run_dir = out / schema.RUNS_DIR / name
        run_dir.mkdir(parents=True)
        train = {"steps": 100, "batch_size": 4, "context": 16}
        document = {"group": "g", "arm": "rowwise", "seed": seed, "replica": 0, "spec": {"train": train}}
        (run_dir / schema.SPEC_FILE).write_text(json.dumps(document))
        dirs[name] = run_dir
    return dirs


def train_to(run_dir: Path, step: int, loss: float = 2.5) -> None:
    rows = [{"step": i, "train_loss": loss, "step_time": 0.5} for i in range(1, step + 1)]
    (run_dir / schema.CURVE_STREAM).write_text("".join(json.dumps(row) + "\n" for row in rows))
    evals = [
        {"step": step, "split": "held_out", "eval_precision": name, "loss": value}
        for name, value in (("bf16", 2.25), ("arm", 2.75))
    ]
    (run_dir / schema.EVAL_STREAM).write_text("".join(json.dumps(row) + "\n" for row in evals))


def finish(run_dir: Path, status: str = "finished", **more: Any) -> None:
    train_to(run_dir, 100)
    document = {
        "status": status,
        "wall_seconds": 50.0,
        "throughput_tokens_per_s": 1000.0,
        "notes": [],
        **more,
    }
    (run_dir / schema.MANIFEST_FILE).write_text(json.dumps(document))


def states(out: Path) -> dict[str, str]:
    return {run["run_id"]: run["state"] for run in study_status(out)["runs"]}


def test_every_state_beside_a_living_launcher(tmp_path: Path) -> None:
    names = ["finished", "diverged", "running", "starting", "waiting", "retried", "failed", "hung", "dying"]
    dirs = study_of(tmp_path, [*names, "failed-before"])
    ledger_line(tmp_path, "failed-before", "failed", cause="error", stage="train", reason="boom")
    launched(tmp_path, me())
    finish(dirs["finished"])
    finish(dirs["diverged"], "diverged")
    for name in ("running", "starting"):
        ledger_line(tmp_path, name, "started", attempt=1, **me())
    Heartbeat(dirs["running"]).enter("train")
    train_to(dirs["running"], 40)
    ledger_line(tmp_path, "dying", "started", attempt=1, **GONE)
    ledger_line(tmp_path, "retried", "retry", attempt=1, cause="killed", stage="train", reason="SIGKILL")
    for name in ("failed", "hung"):
        ledger_line(tmp_path, name, name, attempt=3, cause=name, stage="train", reason="why it was")
    found = states(tmp_path)
    expected = {name: name for name in names} | {"retried": "waiting", "dying": "waiting"}
    assert found == {**expected, "failed-before": "waiting"}
    document = study_status(tmp_path)
    runs = {run["run_id"]: run for run in document["runs"]}
    running = runs["running"]
    assert (running["step"], running["steps"], running["stage"]) == (40, 100, "train")
    assert (running["train_loss"], running["held_out_loss"]) == (2.5, 2.25)
    assert running["tokens_per_s"] == pytest.approx(4 * 16 / 0.5)
    assert running["eta_s"] == pytest.approx(60 * 0.5)
    assert runs["retried"]["alerts"] == ["tried again: killed in stage train"]
    assert runs["hung"]["reason"] == "why it was"
    assert runs["finished"]["tokens_per_s"] == 1000.0
    assert document["launcher"] == {"alive": True, "slots": 2, "preparing": False}
    assert document["eta_s"] == pytest.approx(
        (30 + 5 * 50) / 2
    )  # five wait or start, 50 s each, in two slots
    json.dumps(document, allow_nan=False)


def test_a_worker_in_standby_neither_starts_nor_was_interrupted(tmp_path: Path) -> None:
    dirs = study_of(tmp_path, ["ready", "died", "withdrawn"])
    launched(tmp_path, me())
    for name, who in (("ready", me()), ("died", GONE), ("withdrawn", GONE)):
        ledger_line(tmp_path, name, STANDBY, attempt=1, depth="prove", **who)
        Heartbeat(dirs[name]).enter("standby")
    ledger_line(tmp_path, "withdrawn", WITHDRAWN, attempt=0)
    assert states(tmp_path) == {"ready": "standby", "died": "waiting", "withdrawn": "waiting"}
    launched(tmp_path, GONE)  # and once their launcher is dead
    assert states(tmp_path)["died"] == states(tmp_path)["withdrawn"] == "waiting"


def test_what_waits_is_expected_to_take_what_others_took(tmp_path: Path) -> None:
    dirs = study_of(tmp_path, ["done", "waits"])
    launched(tmp_path, me(), slots=1)
    for event, at in (("started", "2026-01-01T00:00:00+00:00"), ("finished", "2026-01-01T00:01:10+00:00")):
        ledger_line(tmp_path, "done", event, time=at)
    finish(dirs["done"])  # 50 s by its own clock, which began after the imports
    assert study_status(tmp_path)["eta_s"] == pytest.approx(70)


def test_what_a_dead_launcher_left(tmp_path: Path) -> None:
    dirs = study_of(tmp_path, ["killed", "stopped", "retried", "untouched", "outlives"])
    launched(tmp_path, GONE)
    for name in ("killed", "stopped"):
        ledger_line(tmp_path, name, "started", attempt=1, **GONE)
        train_to(dirs[name], 10)
    ledger_line(tmp_path, "stopped", "interrupted", cause="terminated", stage="train", reason="SIGTERM")
    ledger_line(tmp_path, "retried", "retry", cause="killed", stage="train")
    ledger_line(tmp_path, "outlives", "started", attempt=1, **me())
    assert states(tmp_path) == {
        "killed": "interrupted", "stopped": "interrupted", "retried": "interrupted", "untouched": "waiting",
        "outlives": "starting",
    }  # fmt: skip
    assert study_status(tmp_path)["launcher"]["alive"] is False


def test_without_a_process_to_ask_a_fresh_heartbeat_counts(tmp_path: Path) -> None:
    dirs = study_of(tmp_path, ["elsewhere", "dead-elsewhere", "by-hand"])
    launched(tmp_path, GONE, host="there")
    for name in ("elsewhere", "dead-elsewhere"):
        ledger_line(tmp_path, name, "started", attempt=1, **GONE)
    for run_dir in dirs.values():
        Heartbeat(run_dir).enter("train")
        train_to(run_dir, 5)
    old = time.time() - FRESH_SECONDS - 5
    os.utime(dirs["dead-elsewhere"] / HEARTBEAT_FILE, (old, old))
    assert states(tmp_path) == {
        "elsewhere": "running", "dead-elsewhere": "interrupted", "by-hand": "running",
    }  # fmt: skip


def test_alerts(tmp_path: Path) -> None:
    alert = {"step": 7, "rule": "sqnr_drop", "fqn": "blocks.1.ffn.up_proj"}
    dirs = study_of(tmp_path, ["noted", "nan", "silent"])
    finish(dirs["noted"], alerts=[alert], notes=["a note"])
    launched(tmp_path, me())
    for name in ("nan", "silent"):
        ledger_line(tmp_path, name, "started", attempt=1, **me())
        Heartbeat(dirs[name]).enter("train")
    train_to(dirs["nan"], 3, float("nan"))
    os.utime(dirs["silent"] / HEARTBEAT_FILE, (time.time() - 100, time.time() - 100))
    runs = {run["run_id"]: run for run in study_status(tmp_path)["runs"]}
    assert runs["noted"]["alerts"] == ["step 7, rule sqnr_drop, fqn blocks.1.ffn.up_proj", "a note"]
    assert (runs["nan"]["train_loss"], runs["nan"]["alerts"]) == (None, ["loss is not finite at step 3"])
    assert re.match("no sign of life for 10[0-9] s", runs["silent"]["alerts"][0])


def shown(out: Path, **options: Any) -> str:
    console = Console(width=160, record=True, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    status_screen.show(out, console, watch=False, **options)
    return console.export_text()


def test_the_screen_groups_cells_and_names_troubles(tmp_path: Path) -> None:
    dirs = study_of(tmp_path, ["one", "two", "three"])
    launched(tmp_path, me())
    finish(dirs["one"])
    ledger_line(tmp_path, "two", "started", attempt=2, **me())
    Heartbeat(dirs["two"]).enter("train")
    train_to(dirs["two"], 40)
    ledger_line(tmp_path, "three", "invalid", cause="not_as_declared", reason="[bold] would not execute")
    text = shown(tmp_path)
    assert "tiny: a launcher is at work, 2 at a time" in text
    assert "40/100" in text
    assert "invalid: three at step 0/100: [bold] would not execute" in text


def test_watch_ends_when_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = study_of(tmp_path, ["one"])
    launched(tmp_path, GONE)
    ledger_line(tmp_path, "one", "started", attempt=1, **me())
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        finish(dirs["one"])

    monkeypatch.setattr(status_screen.time, "sleep", nap)
    status_screen.show(tmp_path, Console(file=open(os.devnull, "w")), watch=True)  # noqa: SIM115
    assert naps == [status_screen.WATCH_SECONDS]


def test_no_study_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no study.json and no runs"):
        study_status(tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps({**GONE, "host": HOST}))
    with pytest.raises(UsageError, match="holds no study.json and no runs"):
        study_status(tmp_path)


def test_who_packs_or_tests_is_no_launcher_yet_and_not_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps({**me(), "host": HOST}))
    while_packing = study_status(tmp_path)  # nothing is laid out
    assert (while_packing["runs"], while_packing["launcher"]["preparing"]) == ([], True)
    study_of(tmp_path, ["one"])
    launched(tmp_path, GONE)  # of an earlier time
    found = study_status(tmp_path)
    assert found["launcher"] == {"alive": False, "slots": 2, "preparing": True}
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(status_screen.status_view(found))
    assert "tiny: a launcher prepares: it packs data or tests the FP8 arithmetic;" in console.export_text()
    launched(tmp_path, me())
    assert study_status(tmp_path)["launcher"]["preparing"] is False


def test_a_ledger_cut_by_a_kill_is_read(tmp_path: Path) -> None:
    study_of(tmp_path, ["one"])
    ledger_line(tmp_path, "one", "failed", reason="boom", cause="error", stage="train")
    with (tmp_path / schema.LEDGER_FILE).open("a") as handle:
        handle.write('{"run_id": "one", "ev')
    assert states(tmp_path) == {"one": "failed"}
    assert ledger.why_unfinished(tmp_path) == {"one": "error in stage train: boom"}


def test_status_needs_neither_torch_nor_pandas(tmp_path: Path) -> None:
    finish(study_of(tmp_path, ["one"])["one"])
    code = (
        "import sys\nfrom fp8parity.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n"
        "    print('\\nHEAVY', sorted({'torch', 'pandas', 'numpy', 'lightning'} & set(sys.modules)), stop.code)"
    )
    for options in ([], ["--json"], ["--watch"]):
        command = [sys.executable, "-c", code, "status", str(tmp_path), *options]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] in ("HEAVY [] 0", "HEAVY [] None"), result.stdout
