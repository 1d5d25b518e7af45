"""The short selftest a study begins with, in a process of its own for each GPU, once per machine and packages.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8parity.devices import query_gpus, visible_gpus
from fp8parity.environment import package_versions
from fp8parity.errors import EXIT_INVALID, EXIT_USAGE, Fp8ParityError, KernelFaultError, UsageError
from fp8parity.launch import compile_caches
from fp8parity.quiet import QUIET_ENVIRONMENT
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
    environment = {**os.environ, **compile_caches(out), **QUIET_ENVIRONMENT}
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


@dataclass(frozen=True)
class _Tested:
    """The selftest of one GPU, or of the processor (`gpu` None): its process, and what it printed if it came to that.

    `where` is `GPU 3: ` for one of several GPUs, nothing for the only one.
    """

    gpu: str | None
    where: str
    done: subprocess.CompletedProcess[str]
    document: dict[str, Any] | None

    @property
    def subjects(self) -> list[dict[str, Any]]:
        return [] if self.document is None else list(self.document["subjects"])

    @property
    def faults(self) -> list[str]:
        return [
            f"selftest: {self.where}{s['label']}: {f['text']}" for s in self.subjects for f in s["faults"]
        ]


def _require_document(tested: _Tested) -> None:
    """Raise what kept a selftest from printing, and where that was."""
    done = tested.done
    if done.returncode == EXIT_USAGE:
        said = [line for line in done.stderr.splitlines() if line.startswith("fp8parity: ")]
        raise UsageError(
            "\n".join(line.removeprefix("fp8parity: ") for line in said) or _last_words(done.stderr)
        )
    if tested.document is None:
        on = "" if tested.gpu is None else f"CUDA_VISIBLE_DEVICES={tested.gpu} "
        raise Fp8ParityError(
            f"selftest: {tested.where}crashed with exit code {done.returncode} before any training: "
            f"{_last_words(done.stderr)}; run {on}fp8parity selftest --quick to see it"
        )


def _test_all(out: Path, subjects: Sequence[str], device: str, visible: Sequence[str]) -> list[_Tested]:
    """Test every GPU at the same time; without one, the processor."""
    gpus: list[str | None] = [*visible] or [None]
    with ThreadPoolExecutor(len(gpus)) as pool:
        done = list(pool.map(lambda gpu: _test(out, subjects, device, gpu), gpus))
    several = len(gpus) > 1
    return [
        _Tested(gpu, f"GPU {gpu}: " if several else "", process, _document(process))
        for gpu, process in zip(gpus, done, strict=True)
    ]


def _keep(path: Path, key: Mapping[str, Any], tested: Sequence[_Tested], told: _Tested) -> None:
    """Store the document of `told`, and beside it how each of several GPUs did."""
    by_gpu = [{"gpu": t.gpu, "right": None if t.document is None else t.document["right"]} for t in tested]
    several = {"by_gpu": by_gpu} if len(tested) > 1 else {}
    write_json(path, {"key": dict(key), **(told.document or {}), **several})


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
    tested = _test_all(out, subjects, device, visible)
    at_fault = [one for one in tested if one.faults]
    if at_fault:  # before anything that kept another GPU's test from its end
        _keep(path, key, tested, at_fault[0])
        words = "\n".join(fault for one in at_fault for fault in one.faults)
        raise KernelFaultError(f"{words}\nselftest: nothing was trained; the measurements are in {path}")
    for one in tested:
        _require_document(one)
    missing = [
        f"{one.where}{s['label']}: {s['reason']}"
        for one in tested
        for s in one.subjects
        if s["status"] == "not_run"
    ]
    if missing:
        raise UsageError("\n".join(missing))
    _keep(path, key, tested, tested[0])
    on = f" on {len(tested)} GPUs" if len(tested) > 1 else ""
    seconds = max(one.document["seconds"] for one in tested if one.document is not None)
    say(f"selftest: {', '.join(subjects)} right{on} in {seconds:.0f} s")
