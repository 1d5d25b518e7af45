"""Where a study stands, read from its disk by any process while another trains it. Imports neither torch nor pandas."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fp8parity.errors import UsageError
from fp8parity.ledger import LAUNCHED, STANDBY, STOPPED_EARLY, WITHDRAWN, read_ledger
from fp8parity.process import LOCK_FILE, is_alive
from fp8parity.progress import HEARTBEAT_FILE, last_rows, stage_of
from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json

FRESH_SECONDS = 30.0
"""A heartbeat this young is a living worker's, where its process cannot be asked: another machine, or no launcher."""

SILENT_SECONDS = 60.0
"""A running worker that wrote nothing for longer is worth an alert; the launcher ends it later."""

ENDED = ("finished", "diverged", "failed", "invalid", "refused", "interrupted", "hung", STOPPED_EARLY)
"""States in which nothing goes on. finished and diverged are results; the others are tried again by the next launch."""

EVAL_ROWS = 4
"""Rows at the end of a stream among which the last BF16 evaluation is: one per forward and evaluation."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """One run. Losses in nats per token; times in seconds; None is not known, `attempt` 0 not started."""

    run_id: str
    group: str
    arm: str
    seed: int
    replica: int
    state: str
    stage: str
    attempt: int
    step: int
    steps: int
    train_loss: float | None
    held_out_loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    silent_s: float | None
    reason: str
    alerts: tuple[str, ...]
    wall_s: float | None = field(default=None)


@dataclass(frozen=True)
class _Launch:
    """The last launcher of the study: whether it lives, on this machine, and where its lines begin in the ledger."""

    alive: bool
    local: bool
    slots: int
    first_line: int


def _last_launch(entries: Sequence[Entry]) -> _Launch:
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.get("event") == LAUNCHED:
            local = entry.get("host") == socket.gethostname()
            alive = local and is_alive(int(entry.get("pid", 0)), entry.get("born"))
            return _Launch(alive, local, int(entry.get("slots", 1)), index)
    return _Launch(alive=False, local=True, slots=1, first_line=0)


def _is_held(directory: Path) -> bool:
    """Whether a `run` of this machine holds the study directory, launching or not; its lock is not touched."""
    try:
        holder = json.loads((directory / LOCK_FILE).read_text(encoding="utf-8"))
        pid, born, host = int(holder["pid"]), holder["born"], holder["host"]
    except (OSError, ValueError, KeyError, TypeError):  # nobody ever, or nobody now
        return False
    return host == socket.gethostname() and is_alive(pid, born)


def _silence(run_dir: Path) -> float | None:
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - (run_dir / HEARTBEAT_FILE).stat().st_mtime)
    return None


def _lives(entry: Entry, launch: _Launch) -> bool:
    return launch.local and is_alive(int(entry.get("pid", 0)), entry.get("born"))


def _is_worked_on(last: Entry | None, launch: _Launch, silent: float | None) -> bool:
    if last is not None and last.get("event") in ("started", STANDBY, WITHDRAWN) and launch.local:
        return last["event"] == "started" and _lives(last, launch)
    return silent is not None and silent < FRESH_SECONDS and not (last and last.get("event") in ENDED)


def _state(run_dir: Path, own: Sequence[tuple[int, Entry]], launch: _Launch, silent: float | None) -> str:
    """Return the state of a run without a manifest; `own` are its ledger lines with their places."""
    place, last = own[-1] if own else (-1, None)
    if last and last.get("event") == STANDBY and _lives(last, launch):
        return "standby"
    if _is_worked_on(last, launch, silent):
        return "running" if stage_of(run_dir) in ("train", "finish") else "starting"
    event = str(last.get("event")) if last else ""
    is_settled = event in ENDED and "cause" in (
        last or {}
    )  # a hung worker's own line comes before what follows
    if launch.alive and (place < launch.first_line or not is_settled):
        return "waiting"  # for a slot: not begun yet, or to be tried again
    if event in ENDED and event not in ("finished", "diverged"):
        return event
    begun = event not in ("", STANDBY, WITHDRAWN) or (run_dir / schema.CURVE_STREAM).exists()
    return "interrupted" if begun else "waiting"


def _finite(value: Any) -> float | None:
    number = float(value) if isinstance(value, int | float) else math.nan
    return number if math.isfinite(number) else None


def _held_out(run_dir: Path) -> float | None:
    rows = [
        r
        for r in last_rows(run_dir / schema.EVAL_STREAM, EVAL_ROWS)
        if r.get("eval_precision") == schema.EVAL_BF16
    ]
    return _finite(rows[-1].get("loss")) if rows else None


def _alerts(
    manifest: Entry | None, row: Entry | None, own: Sequence[Entry], silent: float | None
) -> list[str]:
    """Return what deserves a look: the manifest's alerts and notes, faults survived, losses not finite, silence."""
    found = [
        ", ".join(f"{key} {value}" for key, value in alert.items()) if isinstance(alert, dict) else str(alert)
        for key in ("alerts", "notes")
        for alert in (manifest or {}).get(key, ())
    ]
    found += [
        f"tried again: {e.get('cause')} in stage {e.get('stage')}" for e in own if e.get("event") == "retry"
    ]
    if row is not None and _finite(row.get("train_loss")) is None:
        found.append(f"loss is not finite at step {row.get('step')}")
    if silent is not None and silent > SILENT_SECONDS:
        found.append(f"no sign of life for {silent:.0f} s")
    return found


def _took(own: Sequence[Entry], manifest: Entry | None) -> float | None:
    """Return the seconds of an ended run's last worker, its interpreter's start included where the ledger has both."""
    if manifest is None:
        return None
    times = {str(entry.get("event")): str(entry.get("time")) for entry in own}
    with contextlib.suppress(KeyError, ValueError):
        begun, ended = (datetime.fromisoformat(times[e]) for e in ("started", str(manifest.get("status"))))
        return (ended - begun).total_seconds()
    return _finite(manifest.get("wall_seconds"))


def _run(run_dir: Path, own: Sequence[tuple[int, Entry]], launch: _Launch, *, not_needed: bool) -> RunStatus:
    document = read_json(run_dir / schema.SPEC_FILE)
    train: Entry = document["spec"]["train"]
    path = run_dir / schema.MANIFEST_FILE
    manifest = read_json(path) if path.exists() else None
    silent = None if manifest else _silence(run_dir)
    state = str(manifest.get("status")) if manifest else _state(run_dir, own, launch, silent)
    if not_needed and state not in ("finished", "diverged", "running", "starting"):
        state = STOPPED_EARLY
    running = state in ("running", "starting")
    rows = last_rows(run_dir / schema.CURVE_STREAM, None if running else 1)
    row = rows[-1] if rows else None
    step = int(row["step"]) if row else 0
    step_s = fmean(float(r["step_time"]) for r in rows) if running and rows else None
    lines = [entry for _, entry in own]
    last = lines[-1] if lines else {}
    rate = int(train["batch_size"]) * int(train["context"]) / step_s if step_s else None
    return RunStatus(
        run_id=run_dir.name,
        group=str(document.get("group", "")),
        arm=str(document.get("arm", "")),
        seed=int(document.get("seed", 0)),
        replica=int(document.get("replica", 0)),
        state=state,
        stage=stage_of(run_dir) if running else str(last.get("stage", "")),
        attempt=max((int(e.get("attempt", 0)) for e in lines), default=0),
        step=step,
        steps=int(train["steps"]),
        train_loss=_finite(row.get("train_loss")) if row else None,
        held_out_loss=_held_out(run_dir),
        tokens_per_s=_finite(manifest.get("throughput_tokens_per_s")) if manifest else rate,
        eta_s=step_s * (int(train["steps"]) - step) if step_s else None,
        silent_s=silent if running else None,
        reason="" if manifest or running else str(last.get("reason", "")),
        alerts=tuple(_alerts(manifest, row, lines, silent if running else None)),
        wall_s=_took(lines, manifest),
    )


def _study_eta(runs: Sequence[RunStatus], slots: int) -> float | None:
    """Return the seconds to the end: what runs has its own pace, what waits the median of its arm's ended runs.

    The slots share the work evenly; what running runs evaluate is left out.
    """
    walls: dict[str, list[float]] = {}
    for run in runs:
        if run.wall_s is not None:
            walls.setdefault(run.arm, []).append(run.wall_s)
    paces = [w for arm in walls.values() for w in arm]
    paces = paces or [r.eta_s * r.steps / (r.steps - r.step) for r in runs if r.eta_s and r.step < r.steps]
    left = [run.eta_s for run in runs if run.eta_s is not None]
    waiting = [run for run in runs if run.state in ("waiting", "standby", "starting")]
    if (waiting and not paces) or not (waiting or left):
        return None
    ahead = sum(median(walls.get(run.arm, paces)) for run in waiting)
    return max([(sum(left) + ahead) / max(1, slots), *left])


def _run_dirs(directory: Path) -> list[Path]:
    """Return the run directories in the order of the study."""
    path = directory / schema.STUDY_FILE
    if path.exists():
        names = read_json(path).get("runs", ())
        return [
            d
            for d in (directory / schema.RUNS_DIR / str(n) for n in names)
            if (d / schema.SPEC_FILE).exists()
        ]
    found = sorted(p.parent for p in directory.glob(f"{schema.RUNS_DIR}/*/{schema.SPEC_FILE}"))
    if not found and not _is_held(directory):
        raise UsageError(
            f"{directory}: holds no {schema.STUDY_FILE} and no runs; give a directory of `fp8parity run`"
        )
    return found


def _dropped(directory: Path, run_dirs: Sequence[Path]) -> frozenset[str]:
    """Return the runs that are not trained because their arm was stopped early."""
    path = directory / schema.STUDY_FILE
    stops = read_json(path).get(STOPPED_EARLY) if path.exists() else None
    if not stops:
        return frozenset()
    from fp8parity.early_stop import dropped, place_of, stops_of  # judges: imports pandas

    places = [place_of(read_json(run_dir / schema.SPEC_FILE)) for run_dir in run_dirs]
    return dropped(places, stops_of({STOPPED_EARLY: stops}))


def study_status(directory: Path) -> dict[str, Any]:
    """Return where the study in `directory` stands, as JSON values.

    Keys: study, launcher (alive, slots, and preparing: data are packed or the arithmetic is tested before it launches),
    counts (by state), steps_done, steps, tokens_per_s (of what runs now), eta_s,
    runs (the fields of `RunStatus`). `UsageError` when the directory holds no study; `BadInputError` for a broken file.
    """
    run_dirs = _run_dirs(directory)
    entries = read_ledger(directory)
    launch = _last_launch(entries)
    own: dict[str, list[tuple[int, Entry]]] = {}
    for place, entry in enumerate(entries):
        own.setdefault(str(entry.get("run_id")), []).append((place, entry))
    try:
        dropped = _dropped(directory, run_dirs)
        runs = [
            _run(path, own.get(path.name, []), launch, not_needed=path.name in dropped) for path in run_dirs
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{directory}: a file of a run lacks what every run has ({error!r})") from error
    rates = [run.tokens_per_s for run in runs if run.state == "running" and run.tokens_per_s]
    study = directory / schema.STUDY_FILE
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "study": read_json(study).get("name", "") if study.exists() else directory.name,
        "launcher": {
            "alive": launch.alive,
            "slots": launch.slots,
            "preparing": not launch.alive and _is_held(directory),
        },
        "counts": dict(Counter(run.state for run in runs)),
        "steps_done": sum(run.step for run in runs),
        "steps": sum(run.steps for run in runs),
        "tokens_per_s": sum(rates) if rates else None,
        "eta_s": _study_eta(runs, launch.slots),
        "runs": [{**vars(run), "alerts": list(run.alerts)} for run in runs],
    }
