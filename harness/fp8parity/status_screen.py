"""What `fp8parity status` shows on a terminal: a line per cell and arm, then what runs and what went wrong."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fp8parity.folding import Name
from fp8parity.screen import seconds_text
from fp8parity.status import ENDED, study_status

WATCH_SECONDS = 2.0
SHOWN = 20
"""Rows of runs on a screen; `--json` has all."""

_STYLES = {"finished": "green", "running": "cyan", "starting": "cyan", "waiting": "dim", "diverged": "red"}


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _states(counts: Counter[str]) -> Text:
    words = Text()
    for state, number in counts.most_common():
        words.append(f"{number} {state}  ", style=_STYLES.get(state, "yellow"))
    return words


def _cells(runs: list[dict[str, Any]]) -> Table:
    table = Table(title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("cell", "arm", "states", "steps"):
        table.add_column(heading, justify="right" if heading == "steps" else "left")
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault((run["group"], run["arm"]), []).append(run)
    for (group, arm), own in grouped.items():
        done, steps = sum(r["step"] for r in own), sum(r["steps"] for r in own)
        share = f"{100 * done / max(1, steps):.0f} %"
        table.add_row(Name(group), Name(arm), _states(Counter(r["state"] for r in own)), share)
    return table


def _running(runs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("run", "stage", "step", "loss", "held out", "tokens/s", "ETA"):
        table.add_column(heading, justify="left" if heading in ("run", "stage") else "right")
    for run in runs[:SHOWN]:
        rate = "" if run["tokens_per_s"] is None else f"{run['tokens_per_s']:,.0f}"
        table.add_row(
            Name(run["run_id"]),
            Text(run["stage"]),
            f"{run['step']}/{run['steps']}",
            _loss(run["train_loss"]),
            _loss(run["held_out_loss"]),
            rate,
            seconds_text(run["eta_s"]),
        )
    return table


def _troubles(runs: list[dict[str, Any]]) -> list[Text]:
    lines = []
    for run in runs:
        if run["state"] in ENDED and run["state"] != "finished":
            words = f"{run['state']}: {run['run_id']} at step {run['step']}/{run['steps']}"
            lines.append(Text(words + (f": {run['reason']}" if run["reason"] else ""), style="yellow"))
        lines += [Text(f"alert: {run['run_id']}: {alert}", style="yellow") for alert in run["alerts"]]
    hidden = len(lines) - SHOWN
    return [*lines[:SHOWN], *([Text(f"and {hidden} more; --json has all")] if hidden > 0 else [])]


def _launcher(found: dict[str, Any]) -> str:
    if found["preparing"]:
        return "a launcher prepares: it packs data or tests the FP8 arithmetic"
    work = "a launcher is at work" if found["alive"] else "no launcher is at work here"
    return f"{work}, {found['slots']} at a time"


def status_view(document: dict[str, Any]) -> Group:
    """Return the whole screen of a status document."""
    runs = document["runs"]
    head = Text(f"{document['study']}: {_launcher(document['launcher'])}; ")
    head.append_text(_states(Counter(document["counts"])))
    if document["eta_s"] is not None:
        head.append(f"about {seconds_text(document['eta_s'])} left")
    parts: list[Any] = [head, Text(), _cells(runs)]
    running = [run for run in runs if run["state"] in ("running", "starting")]
    if running:
        parts += [Text(), _running(running)]
    troubles = _troubles(runs)
    return Group(*parts, *([Text(), *troubles] if troubles else []))


def show(directory: Path, console: Console, *, watch: bool) -> None:
    """Print the status once; with `watch` renew it until nothing runs any more, or Ctrl-C."""
    document = study_status(directory)
    if not watch:
        console.print(status_view(document))
        return
    with Live(status_view(document), console=console, auto_refresh=False) as live:
        while (
            document["launcher"]["alive"]
            or document["launcher"]["preparing"]
            or {"running", "starting"} & set(document["counts"])
        ):
            time.sleep(WATCH_SECONDS)
            document = study_status(directory)
            live.update(status_view(document), refresh=True)
