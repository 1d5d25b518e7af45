"""One night: run the standing matrix or take finished runs, judge, compare with the history, tell. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from fp8parity import environment, matrix, study
from fp8parity.errors import Fp8ParityError, InterruptedRunError, UsageError
from fp8parity.matrix import Matrix
from fp8parity_analysis import history as hist
from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json

TENSOR_FILE = "tensor.json"
"""Optional file of a study directory: an object of name to number, watched like every other series."""
SELFTEST_FILE = "selftest.json"
"""What `fp8parity run` leaves of its selftest in a study directory; taken runs may lack it."""
WEBHOOK_SECONDS = 10.0

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_ENVIRONMENT_NAMES = {
    "cuda": "CUDA",
    "device": "GPU",
    "numerics": "numerics version",
    "device_type": "device type",
}

Train = Callable[[Path, Path], object]


def _train(recipe: Path, out: Path) -> None:
    from fp8parity.study_run import run_study

    run_study(recipe, out, slots=None, any_verdict=True)


def nightly(
    recipe: Path,
    history_dir: Path,
    *,
    out: Path | None = None,
    runs: Path | None = None,
    webhook: str | None = None,
    train: Train = _train,
) -> int:
    """Run one night and return its exit code: 0 pass, 10 regression or fail, 11 inconclusive, 12 invalid or crashed.

    The runs go to a fresh `HISTORY/nights/DATE`, or to `out`; with `runs`, a finished study directory is judged and
    nothing is trained. Page, JSON, summary and JUnit are written into `history_dir`. Errors: those of `matrix.read`;
    `UsageError` for a webhook that is no http(s) address, an `out` that is not empty, or a history in use; a night
    that fails later is recorded with its reason and returns 12; an interruption is recorded and raised again.
    """
    from fp8parity_analysis.history_findings import assess
    from fp8parity_analysis.nightly_report import build, document, told_of, write

    _check_webhook(webhook)
    plan = matrix.read(recipe)
    if out is not None and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"--out {out}: is not empty; every night is a new run, give an empty or new directory"
        )
    if runs is not None and not (runs / schema.STUDY_FILE).exists():
        raise UsageError(
            f"--runs {runs}: holds no {schema.STUDY_FILE}; give a directory made by `fp8parity run`"
        )
    console = Console(emoji=False)  # a name such as a:on:b is a name
    with study.lock(history_dir):
        for killed in hist.killed_nights(history_dir, hist.read_history(history_dir)):
            hist.append_night(history_dir, killed)
        name, fresh = hist.claim_night(history_dir, datetime.now(UTC).date().isoformat())
        night, interruption = _night(name, plan, runs or out or fresh, None if runs else train)
        past = hist.read_history(history_dir)
        found = assess(past.plus(night))
        night = hist.Night(**{**vars(night), "told": told_of(found)})
        hist.append_night(history_dir, night)
        model = build(past.plus(night), plan.name)
        paths = write(history_dir, model)
    for item in model.assessment.findings:
        console.print(f"{item.state}: {item.text}", markup=False, highlight=False)
    console.print(f"{name}: {model.headline}\nnightly: {paths[0]}", markup=False, highlight=False)
    if webhook:
        _post(webhook, document(model), console)
    if interruption is not None:
        raise interruption
    return model.assessment.exit_code


def _night(
    name: str, plan: Matrix, where: Path, train: Train | None
) -> tuple[hist.Night, InterruptedRunError | None]:
    """Train if asked to, then turn what is stored into the night's record; a failure or interruption is one too."""
    facts = static_facts(plan, here=train is not None)
    try:
        if train is not None:
            train(plan.recipe_path, where)
        return observe(name, where, facts), None
    except InterruptedRunError as error:
        return _blank(name, hist.KILLED, f"interrupted: {error}", where, facts), error
    except (Fp8ParityError, BadInputError) as error:
        return _blank(name, hist.FAILED, str(error), where, facts), None


def _blank(name: str, status: str, reason: str, where: Path, facts: Mapping[str, str]) -> hist.Night:
    return hist.Night(name, status, _now(), reason, str(where), facts=facts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def observe(name: str, study_dir: Path, facts: Mapping[str, str]) -> hist.Night:
    """Return the record of a study directory; `BadInputError` when it cannot be judged at all."""
    from fp8parity.judging import judge_study
    from fp8parity_analysis import nightly_observe
    from fp8parity_analysis.store import read_runs

    judgement = judge_study(study_dir, {})
    records = read_runs(study_dir)
    stored = read_json(study_dir / schema.STUDY_FILE)
    digests = {
        "recipe sha256": str(stored.get("recipe_sha256", "")),
        "criteria digest": judgement.criteria.digest(),
    }
    ran = [record.manifest["environment"] for record in records if record.manifest]
    return hist.Night(
        night=name,
        status=hist.JUDGED,
        time=_now(),
        directory=str(study_dir),
        margin=judgement.criteria.margin,
        facts={
            **facts,
            **(environment_facts(ran[0]) if ran else {}),
            **nightly_observe.facts_of(records),
            **digests,
        },
        cells=nightly_observe.cells_of(judgement),
        series=nightly_observe.series_of(judgement, records, _numbers(study_dir / TENSOR_FILE)),
        checks=nightly_observe.checks_of(judgement, records, _optional(study_dir / SELFTEST_FILE)),
        crashed=nightly_observe.crashed_of(records, _reasons(study_dir)),
        finished=nightly_observe.finished_of(records),
    )


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _numbers(path: Path) -> dict[str, float] | None:
    """Read an object of name to number; `BadInputError` names what is none."""
    document = _optional(path)
    for name, value in (document or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadInputError(f"{path}: {name}: {value!r} is no number")
    return document


def _reasons(study_dir: Path) -> dict[str, str]:
    """Return why runs ended, by run id, from the last lines of the ledger."""
    path = study_dir / schema.LEDGER_FILE
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        if entry.get("reason") or entry.get("exit_code"):
            code = f"exit code {entry['exit_code']}" if entry.get("exit_code") is not None else ""
            found[str(entry.get("run_id"))] = ", ".join(
                x for x in (code, str(entry.get("reason") or "")) if x
            )
    return found


def environment_facts(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Return an environment fingerprint under the names that people use."""
    return {_ENVIRONMENT_NAMES.get(key, key): str(value) for key, value in fingerprint.items()}


def static_facts(plan: Matrix, *, here: bool) -> dict[str, str]:
    """Return what identifies the program and, when the runs are made `here`, this machine before anything ran."""
    facts = environment_facts(environment.package_versions()) if here else {}
    if here:
        facts["Python"] = platform.python_version()
    facts["recipe sha256"] = hashlib.sha256(plan.recipe_path.read_bytes()).hexdigest()
    facts["criteria digest"] = study.criteria_of(plan).digest()
    try:
        facts["fp8parity"] = metadata.version("fp8parity")
    except metadata.PackageNotFoundError:
        facts["fp8parity"] = "not installed"
    for key, value in (("commit", _commit()), ("driver", _driver() if here else None)):
        if value:
            facts[key] = value
    return facts


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*?([0-9]+(?:\.[0-9]+)+)", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _commit() -> str | None:
    """Return the commit of the checkout that this program runs from; None for an installed package."""
    try:
        result = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip()[:12] if result.returncode == 0 else None


def _check_webhook(url: str | None) -> None:
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise UsageError(f"--webhook {url!r}: is no web address; write http://... or https://...")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """One POST to the given address and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse: the redirect becomes an `HTTPError`."""


def _post(url: str, body: Mapping[str, Any], console: Console) -> None:
    """POST the night as JSON once; whatever goes wrong is a warning, the verdict stands."""
    request = urllib.request.Request(
        url, data=json.dumps(body, allow_nan=False).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_SECONDS):
            return
    except (OSError, urllib.error.URLError, ValueError) as error:
        host = urlsplit(url).hostname
        console.print(
            f"warning: the webhook at {host} was not reached: {error}", markup=False, highlight=False
        )
