"""The study's ledger: one line per start, fault and end of a run. The run directories are the truth; this is the story.

Imports no torch.
"""

from __future__ import annotations

import errno
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8parity_analysis import schema

LAUNCHED = "launched"
"""Event of a launcher's own start; it belongs to no run."""


STANDBY = "standby"
"""Event of a worker that was started ahead of its turn; `started` follows when it gets a slot."""

WITHDRAWN = "withdrawn"
"""Event of a worker in standby that the launcher ended; its run waits as before."""

STANDBY_LIMITED = "standby_limited"
"""Event of the launcher: memory ran out beside a prepared model, so workers prepare less from here on."""

STOPPED_EARLY = "stopped_early"
"""Event of an arm that failed at a declared look, key of study.json, and state of the runs that it needs no more."""


def ledger_line(out: Path, run_id: str, event: str, **facts: Any) -> None:
    """Append one line to the study's ledger; on a full disk a warning, since it must not end the other runs."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_id": run_id,
        "event": event,
        **facts,
    }
    try:
        with (out / schema.LEDGER_FILE).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"fp8parity: warning: no space left to write {schema.LEDGER_FILE}: {line}", file=sys.stderr)


def read_ledger(out: Path) -> list[dict[str, Any]]:
    """Return the ledger's lines in order; one cut off by a kill is dropped."""
    try:
        text = (out / schema.LEDGER_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            lines.append(entry)
    return lines


def why_unfinished(out: Path) -> dict[str, str]:
    """Return, by run id, the reason of the last fault of every run that the ledger does not call ended well."""
    found: dict[str, str] = {}
    for entry in read_ledger(out):
        run_id = str(entry.get("run_id"))
        if entry.get("event") in (schema.Status.FINISHED.value, schema.Status.DIVERGED.value):
            found.pop(run_id, None)
        elif entry.get("reason"):
            where = f" in stage {entry['stage']}" if entry.get("stage") else ""
            words = str(entry["reason"]).removeprefix("fp8parity: ")
            found[run_id] = f"{entry.get('cause', entry.get('event'))}{where}: {words}"
    return found
