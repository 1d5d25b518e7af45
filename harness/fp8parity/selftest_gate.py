"""The short selftest a study begins with, in a process of its own for each GPU, once per machine and packages.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp8parity.devices import query_gpus, visible_gpus
from fp8parity.environment import package_versions
from fp8parity.errors import EXIT_INVALID, EXIT_USAGE, Fp8ParityError, KernelFaultError, UsageError
from fp8parity.launch import compile_caches
from fp8parity.selftest.report import SELFTEST_VERSION
from fp8parity.spec import RunSpec
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json

SELFTEST_FILE = "selftest.json"
"""In the study directory: what was tested where (`key`), and the document of `selftest --quick --json`.

On several GPUs the document is that of the first GPU at fault, or of the first; `by_gpu` has the outcome of each.
"""


def subjects_of(specs: Sequence[RunSpec]) -> list[str]:
    """Return RECIPE/BACKEND, with /master where the weight cast reads the master, of every FP8 arm, sorted."""
    fp8 = {(p.recipe, p.backend, p.weight_cast_source) for p in (s.precision for s in specs) if not p.is_bf16}
    return sorted(f"{r}/{b}" + ("/master" if source == "master" else "") for r, b, source in fp8)


def key_of(subjects: Sequence[str], device: str, gpus: Sequence[str]) -> dict[str, Any]:
    """Return what a stored result is valid for: subjects, packages, machine and the very GPUs that were tested."""
    return {
        "selftest_version": SELFTEST_VERSION,
        "subjects": list(subjects),
        "device": device,
        "packages": package_versions(),
        "machine": platform.machine(),
        "gpus": query_gpus("uuid,name,driver_version", gpus) if gpus else [],
    }


def _passed_before(path: Path, key: dict[str, Any]) -> bool:
    try:
        stored = read_json(path)
    except BadInputError:
        return False
    return stored.get("key") == key and stored.get("right") is True


def _test(
    out: Path, subjects: Sequence[str], device: str, gpu: str | None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8parity", "selftest", "--quick", "--json", "--device", device]
    command += [part for subject in subjects for part in ("--recipe", subject)]
    # the runs' own cache folders: what Triton compiles for the selftest, the workers need not compile again
    environment = {**os.environ, **compile_caches(out), "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _last_words(text: str) -> str:
    lines = [line.removeprefix("fp8parity: ") for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _document(done: subprocess.CompletedProcess[str]) -> dict[str, Any] | None:
    """Return what the selftest printed; None when it did not come to that."""
    if done.returncode not in (0, EXIT_INVALID):
        return None
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _require_document(done: subprocess.CompletedProcess[str], gpu: str | None, where: str) -> None:
    """Raise what kept the selftest from printing, and where that was."""
    if done.returncode == EXIT_USAGE:
        said = [line for line in done.stderr.splitlines() if line.startswith("fp8parity: ")]
        raise UsageError(
            "\n".join(line.removeprefix("fp8parity: ") for line in said) or _last_words(done.stderr)
        )
    if _document(done) is None:
        on = "" if gpu is None else f"CUDA_VISIBLE_DEVICES={gpu} "
        raise Fp8ParityError(
            f"selftest: {where}crashed with exit code {done.returncode} before any training: "
            f"{_last_words(done.stderr)}; run {on}fp8parity selftest --quick to see it"
        )


def require_sound_arithmetic(
    out: Path, specs: Sequence[RunSpec], say: Callable[[str], None], slots: int | None = None
) -> None:
    """Test the recipes and backends of `specs` on their device before any of them trains.

    That is every visible GPU that `slots` runs at a time use (None: all), at the same time. The result is kept in
    `out`/selftest.json and holds until subjects, packages, machine or GPUs change. Raises `KernelFaultError` naming
    each fault, `UsageError` for a subject this machine cannot run, `Fp8ParityError` when a selftest itself crashes.
    """
    subjects = subjects_of(specs)
    if not subjects:
        return
    device = specs[0].train.device
    visible = visible_gpus()[:slots] if device != "cpu" else []
    path, key = out / SELFTEST_FILE, key_of(subjects, device, visible)
    if _passed_before(path, key):
        return
    gpus: list[str | None] = [*visible] or [None]
    with ThreadPoolExecutor(len(gpus)) as pool:
        tested = list(pool.map(lambda gpu: _test(out, subjects, device, gpu), gpus))
    names = [f"GPU {gpu}: " if len(gpus) > 1 else "" for gpu in gpus]
    documents = [_document(done) for done in tested]
    told = [
        (where, document, subject)
        for where, document in zip(names, documents, strict=True)
        if document is not None
        for subject in document["subjects"]
    ]

    def keep(document: dict[str, Any]) -> None:
        right = [None if d is None else d["right"] for d in documents]
        by_gpu = [{"gpu": gpu, "right": r} for gpu, r in zip(gpus, right, strict=True)]
        write_json(path, {"key": key, **document, **({"by_gpu": by_gpu} if len(gpus) > 1 else {})})

    faults = [
        (f"selftest: {where}{subject['label']}: {fault['text']}", document)
        for where, document, subject in told
        for fault in subject["faults"]
    ]
    if faults:  # before anything that kept another GPU's test from its end
        keep(faults[0][1])
        raise KernelFaultError(
            "\n".join(words for words, _ in faults)
            + f"\nselftest: nothing was trained; the measurements are in {path}"
        )
    for done, gpu, where in zip(tested, gpus, names, strict=True):
        _require_document(done, gpu, where)
    missing = [f"{where}{s['label']}: {s['reason']}" for where, _, s in told if s["status"] == "not_run"]
    if missing:
        raise UsageError("\n".join(missing))
    keep(told[0][1])
    on = f" on {len(gpus)} GPUs" if len(gpus) > 1 else ""
    seconds = max(document["seconds"] for _, document, _ in told)
    say(f"selftest: {', '.join(subjects)} right{on} in {seconds:.0f} s")
