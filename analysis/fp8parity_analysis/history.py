"""The history of a nightly: one line per night in `history.jsonl`, appended and never rewritten.

A night that was killed leaves a directory and no line; the next one notes it. A line that was cut off is skipped and
reported. Lines with `"event": "accept"` are written by people: from that line on the level of a series is the new
normal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.verdict import strict_json

HISTORY_FILE = "history.jsonl"
NIGHTS_DIR = "nights"
HISTORY_SCHEMA_VERSION = 1

JUDGED, KILLED, FAILED = "judged", "killed", "failed"


@dataclass(frozen=True)
class Observation:
    """One number of one night. `se`: the night-to-night sd that the null pairs predict, None if unknown.

    `df`: the degrees of freedom of `se`, or of a value that is itself an sd; None in nights of earlier versions.
    """

    value: float
    se: float | None = None
    df: int | None = None


@dataclass(frozen=True)
class Check:
    """Something that is right or wrong, not more or less; `value` is compared by equality between nights."""

    ok: bool
    value: str


@dataclass(frozen=True)
class Cell:
    """The verdict on one recipe in one night; gap and interval are fractions of the loss."""

    recipe: str
    outcome: str
    gate: str
    gap: float | None
    interval: tuple[float | None, float | None]
    n_seeds: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Night:
    """One line of the history.

    `status` is `judged`, `killed` (no end was recorded) or `failed` (no verdict; `reason` says why). `facts` are what
    can have changed between nights, such as versions and digests, all text. `finished` names the runs that reached
    an end, as `crashed` does those that did not; None in nights of earlier versions.
    """

    night: str
    status: str
    time: str = ""
    reason: str = ""
    directory: str = ""
    margin: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    series: Mapping[str, Observation] = field(default_factory=dict)
    checks: Mapping[str, Check] = field(default_factory=dict)
    crashed: Mapping[str, str] = field(default_factory=dict)
    finished: tuple[str, ...] | None = None
    told: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the line as strict JSON values."""
        document: dict[str, Any] = strict_json(
            {
                "schema_version": HISTORY_SCHEMA_VERSION,
                "night": self.night,
                "status": self.status,
                "time": self.time,
                "reason": self.reason,
                "directory": self.directory,
                "margin": self.margin,
                "facts": self.facts,
                "cells": [vars(cell) for cell in self.cells],
                "series": {name: vars(item) for name, item in self.series.items()},
                "checks": {name: vars(item) for name, item in self.checks.items()},
                "crashed": self.crashed,
                "finished": self.finished,
                "told": self.told,
            }
        )
        return document


@dataclass(frozen=True)
class History:
    """All nights in the order of the file.

    `accepted` holds, by number of nights before the line, the series whose level people accepted; `broken` the line
    numbers that could not be read.
    """

    nights: tuple[Night, ...] = ()
    accepted: tuple[tuple[int, str], ...] = ()
    broken: tuple[int, ...] = ()

    def plus(self, night: Night) -> History:
        """Return the history with one more night."""
        return History((*self.nights, night), self.accepted, self.broken)


def _night(document: Mapping[str, Any]) -> Night:
    series = {
        str(name): Observation(float(item["value"]), item.get("se"), item.get("df"))
        for name, item in document.get("series", {}).items()
        if item.get("value") is not None
    }
    cells = tuple(
        Cell(**{**cell, "interval": tuple(cell["interval"]), "reasons": tuple(cell.get("reasons", ()))})
        for cell in document.get("cells", ())
    )
    return Night(
        night=str(document["night"]),
        status=str(document["status"]),
        time=str(document.get("time", "")),
        reason=str(document.get("reason", "")),
        directory=str(document.get("directory", "")),
        margin=document.get("margin"),
        facts={str(key): str(value) for key, value in document.get("facts", {}).items()},
        cells=cells,
        series=series,
        checks={str(name): Check(**item) for name, item in document.get("checks", {}).items()},
        crashed={str(name): str(why) for name, why in document.get("crashed", {}).items()},
        finished=None if document.get("finished") is None else tuple(map(str, document["finished"])),
        told=document.get("told", {}),
    )


def read_history(directory: Path) -> History:
    """Read `history.jsonl` below `directory`; no file is an empty history.

    A line that is cut off or damaged is skipped and its number kept. `BadInputError` when the file cannot be read or
    was written under another schema version.
    """
    path = directory / HISTORY_FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror or error})") from error
    nights: list[Night] = []
    accepted: list[tuple[int, str]] = []
    broken: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if document.get("event") == "accept":
                if not isinstance(document["series"], list):
                    raise ValueError("series is no list")
                accepted += [(len(nights), str(name)) for name in document["series"]]
                continue
            if document["schema_version"] != HISTORY_SCHEMA_VERSION:
                raise BadInputError(
                    f"{path}:{number}: schema_version {document['schema_version']}, this program reads "
                    f"{HISTORY_SCHEMA_VERSION}; use the fp8parity that wrote it, or another --history directory"
                )
            nights.append(_night(document))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadInputError):
                raise
            broken.append(number)
    return History(tuple(nights), tuple(accepted), tuple(broken))


def append_night(directory: Path, night: Night) -> None:
    """Append one line and force it to the disk. A cut-off line before it is ended first, never rewritten."""
    path = directory / HISTORY_FILE
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps(night.to_json(), allow_nan=False, ensure_ascii=False) + "\n"
    with path.open("ab+") as handle:
        if handle.tell() > 0:
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                line = "\n" + line
        handle.write(line.encode())
        handle.flush()
        os.fsync(handle.fileno())


def claim_night(directory: Path, day: str) -> tuple[str, Path]:
    """Make the directory of a fresh night and return its name and path: `2025-01-31`, or `2025-01-31.2` if taken."""
    recorded = {night.night for night in read_history(directory).nights}
    number = 1
    while True:
        name = day if number == 1 else f"{day}.{number}"
        path = directory / NIGHTS_DIR / name
        if name not in recorded:
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                pass
            else:
                return name, path
        number += 1


def killed_nights(directory: Path, history: History) -> list[Night]:
    """Return a record for every night that has a directory and no line; hold the history's lock when calling."""
    recorded = {night.night for night in history.nights}
    folder = directory / NIGHTS_DIR
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    reason = "the night ended without a record: killed, or the machine went down"
    return [
        Night(name, KILLED, reason=reason, directory=f"{NIGHTS_DIR}/{name}")
        for name in names
        if name not in recorded
    ]
