"""A study under random faults: every run must end in its right state, with the curve of an undisturbed one.

    python benchmarks/launcher_faults.py [--seeds 12] [--kills 5] [--hang-after 90] [--standby] [--json FILE]

60 tiny runs in two slots on a CPU. Faults are planted from outside: a `sitecustomize` on the workers' PYTHONPATH
strikes at some step (SIGKILL, SIGTERM, raised error, hang, CUDA's out-of-memory error, a truncated
checkpoint with SIGKILL, a full disk), or in the interpreter's start. Meanwhile the launcher is killed, and a second one
tried on the same directory. The same runs trained one after the other without a fault are the reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fp8parity import matrix, study
from fp8parity.ledger import read_ledger
from fp8parity.status import study_status
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.store import read_run

STEPS, CADENCE = 30, 5
HANG_AFTER_S = 90.0
"""Well above an interpreter's start, which shows no sign of life; more on a machine that others keep busy."""

RECIPE: dict[str, Any] = {
    "name": "faults",
    "base": {
        "model": {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
        "data": {"source": "bin", "path": "corpus.bin"},
        "optim": {"lr": 0.003, "warmup_steps": 2},
        "train": {
            "steps": STEPS, "batch_size": 4, "context": 16, "eval_every": 5, "eval_sequences": 8,
            "bf16_gemm": "fp32_accumulate", "device": "cpu",
        },
        "precision": {"keep": 4},
    },
    "axes": {"precision.recipe": ["tensorwise", "rowwise"]},
    "runtime": {"checkpoint_every": CADENCE, "hang_after_s": HANG_AFTER_S, "slots": 2},
}  # fmt: skip

DIVERGING = {"precision.recipe": "tensorwise", "optim.lr": 1e30}
"""A cell that blows up by itself, its control too: a result, not a fault."""

CAUSES = {
    "kill": "killed", "kill_at_import": "killed", "truncate": "killed", "sigterm": "terminated", "error": "error",
    "hang": "hung", "memory": "out_of_memory", "full_disk": "full_disk", "hopeless": "error",
    "mismatch": "not_as_declared",
}  # fmt: skip
"""What the ledger calls each planted fault."""

LASTING = {"hopeless": "failed", "mismatch": "invalid"}
"""Faults that strike on every attempt, and the state they end in."""

SITE = """\
import errno, json, os, pathlib, signal, sys, time

def strike(kind, run_dir):
    if kind in ("kill", "truncate"):
        if kind == "truncate":
            newest = sorted((run_dir / "checkpoints").glob("step-*.ckpt"))[-1:]
            for path in newest:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "memory":
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")
    elif kind == "full_disk":
        raise OSError(errno.ENOSPC, "No space left on device (planted)")
    elif kind == "mismatch":
        from fp8parity.errors import ExecutionMismatchError
        raise ExecutionMismatchError("the run would not execute what it declares: planted")
    else:
        raise RuntimeError("planted")

def install(folder, run_dir):
    planned = json.loads((folder / "plan.json").read_text()).get(run_dir.name, [])
    left = [(i, f) for i, f in enumerate(planned) if not (folder / f"{run_dir.name}.{i}").exists()]
    number, fault = left[0] if left else (-1, {"kind": "", "step": 0})
    struck = folder / f"{run_dir.name}.{number}"
    if fault["kind"] == "kill_at_import":
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    from fp8parity_analysis.store import RunWriter
    append = RunWriter.append_curve
    def watched(self, rows):
        rows = list(rows)
        due = fault["kind"] and rows[-1]["step"] >= fault["step"] and not struck.exists()
        if not due or fault["kind"] != "full_disk":
            append(self, rows)
            with (folder / "trained.jsonl").open("a") as log:
                log.write(json.dumps([run_dir.name, os.getpid(), [row["step"] for row in rows]]) + "\\n")
        if due:
            if not fault["lasts"]:
                struck.touch()
            strike(fault["kind"], run_dir)
    RunWriter.append_curve = watched

if "train" in sys.orig_argv:
    install(pathlib.Path(os.environ["PLANTED_FAULTS"]), pathlib.Path(sys.orig_argv[-1]))
"""

REFERENCE = """\
import sys, pathlib
from fp8parity import runner
for run_dir in sys.argv[1:]:
    runner.train(pathlib.Path(run_dir))
"""


@dataclass
class Outcome:
    """What a study under faults came to; `wrong` is empty when all is as it should be."""

    runs: int = 0
    states: dict[str, int] = field(default_factory=dict)
    planted: dict[str, int] = field(default_factory=dict)
    launcher_kills: int = 0
    launches: int = 0
    second_launcher_exit: int | None = None
    starts: int = 0
    started_ahead: int = 0
    steps_kept: int = 0
    steps_trained: int = 0
    identical_curves: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    reference_wall_s: float = 0.0
    load_before_and_after: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def draw_faults(
    runs: Sequence[str], counts: Mapping[str, int], rng: random.Random, short: Collection[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Return the faults of each run, in the order they strike; some runs get two, lasting ones stand alone.

    Full disks come first and lasting faults last in the order of the study: either is met in as few launches as can be.
    `short` are runs that end at step 10.
    """
    once = [
        kind for kind, number in counts.items() for _ in range(number) if kind not in (*LASTING, "full_disk")
    ]
    rng.shuffle(once)
    lasting = [kind for kind in LASTING for _ in range(counts.get(kind, 0))]
    plan: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for run, kind in zip(reversed(runs), lasting, strict=False):
        plan[run].append({"kind": kind, "step": 1, "lasts": True})
    for run, kind in zip(runs, ["full_disk"] * counts.get("full_disk", 0), strict=False):
        plan[run].append({"kind": kind, "step": 10, "lasts": False})
    free = [run for run in runs if not (plan[run] and plan[run][0]["lasts"])]
    rng.shuffle(free)
    for run, kind in zip(free * 2, once, strict=False):
        # asked to stop at its last step a run ends instead, which is no fault
        step = (5 if kind == "sigterm" else 10) if run in short else rng.choice((10, 20))
        plan[run].append({"kind": kind, "step": step, "lasts": False})
    return {run: faults for run, faults in plan.items() if faults}


def write_study(folder: Path, corpus: Path, seeds: int, *, diverging: bool) -> Path:
    """Write the recipe file; returns its path."""
    recipe = json.loads(json.dumps(RECIPE))
    recipe["base"]["data"]["path"] = str(corpus.resolve())
    recipe["seeds"] = list(range(seeds))
    if diverging:
        recipe["include"] = [DIVERGING]
    path = folder / "faults.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def train_reference(recipe: Path, out: Path) -> None:
    """Train every run one after the other in one process without a fault."""
    dirs = [str(path) for path in study.lay_out(matrix.read(recipe), out)]
    subprocess.run([sys.executable, "-c", REFERENCE, *dirs], check=True, capture_output=True)


def _run_command(recipe: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "fp8parity", "run", str(recipe), "--out", str(out), "--any-verdict"]


def _events(out: Path, *events: str) -> int:
    return sum(entry.get("event") in events for entry in read_ledger(out))


def under_faults(
    recipe: Path, out: Path, plan: Mapping[str, Any], kills: Sequence[int], found: Outcome
) -> None:
    """Run the study until it ends by itself, killing the launcher whenever so many runs of `kills` have ended."""
    folder = out.parent / "planted"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PLANTED_FAULTS": str(folder)}
    waiting = list(kills)
    code: int | None = 75
    while code == 75 or code is None:
        found.launches += 1
        with (out.parent / "launcher.txt").open("ab") as log:
            launcher = subprocess.Popen(_run_command(recipe, out), stdout=log, stderr=log, env=environment)
        while (code := launcher.poll()) is None:
            if found.second_launcher_exit is None and _events(out, "started"):
                second = subprocess.run(_run_command(recipe, out), capture_output=True, check=False)
                found.second_launcher_exit = second.returncode
            if waiting and _events(out, "finished", "diverged") >= waiting[0]:
                waiting.pop(0)
                found.launcher_kills += 1
                launcher.kill()
                launcher.wait()
                break
            time.sleep(0.1)
        if found.launches > 10 + len(kills):
            found.wrong.append("the study does not come to an end")
            return


def _curve(run_dir: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    run = read_run(run_dir)
    return run.curve.drop(columns="step_time"), run.evals


def _check_states(out: Path, reference: Path, plan: Mapping[str, Any], found: Outcome) -> None:
    document = study_status(out)
    found.runs, found.states = len(document["runs"]), document["counts"]
    for run in document["runs"]:
        name = run["run_id"]
        expected = next((LASTING[f["kind"]] for f in plan.get(name, ()) if f["lasts"]), None)
        theirs = reference / schema.RUNS_DIR / name
        wanted = expected or read_json(theirs / schema.MANIFEST_FILE)["status"]
        if run["state"] != wanted:
            found.wrong.append(f"{name}: is {run['state']}, should be {wanted} ({run['reason']})")
        elif expected is None:
            ours = out / schema.RUNS_DIR / name
            same = all(a.equals(b) for a, b in zip(_curve(ours), _curve(theirs), strict=True))
            found.identical_curves += same
            if not same:
                found.wrong.append(f"{name}: its curve is not the one without faults")


def _check_training(out: Path, plan: Mapping[str, Any], found: Outcome) -> None:
    """Nothing is trained twice but what no checkpoint held: less than a cadence, two where the newest was damaged."""
    sessions: dict[str, dict[int, list[int]]] = {}
    for line in (out.parent / "planted" / "trained.jsonl").read_text(encoding="utf-8").splitlines():
        name, pid, steps = json.loads(line)
        sessions.setdefault(name, {}).setdefault(pid, []).extend(steps)
    for name, by_pid in sessions.items():
        runs = list(by_pid.values())
        lasting = any(f["lasts"] for f in plan.get(name, ()))
        truncated = any(f["kind"] == "truncate" for f in plan.get(name, ()))
        allowed = CADENCE * (2 if truncated else 1)
        found.steps_trained += sum(map(len, runs))
        found.steps_kept += max(map(max, runs))
        for before, after in itertools.pairwise(runs):
            again = before[-1] - after[0] + 1
            if again > allowed and not lasting:
                found.wrong.append(f"{name}: trained {again} steps again, {allowed} at most were not saved")


def _check_ledger(out: Path, plan: Mapping[str, Any], found: Outcome) -> None:
    """Every fault that struck is in the ledger with its cause, unless the launcher died with it."""
    entries = read_ledger(out)
    found.starts = sum(entry.get("event") == "started" for entry in entries)
    found.started_ahead = sum(bool(entry.get("prepared")) for entry in entries)
    told = Counter((str(entry["run_id"]), str(entry["cause"])) for entry in entries if "cause" in entry)
    struck: Counter[tuple[str, str]] = Counter()
    for name, faults in plan.items():
        for number, fault in enumerate(faults):
            if fault["lasts"] or (out.parent / "planted" / f"{name}.{number}").exists():
                struck[name, CAUSES[fault["kind"]]] += 1
                found.planted[fault["kind"]] = found.planted.get(fault["kind"], 0) + 1
            else:
                found.wrong.append(f"{name}: its fault {fault['kind']} never struck")
    missing = struck - told
    if sum(missing.values()) > found.launcher_kills:
        found.wrong.append(f"not in the ledger: {dict(missing)}")
    ended: set[str] = set()
    for entry in entries:
        if entry.get("event") in ("finished", "diverged"):
            ended.add(entry["run_id"])
        elif entry.get("event") == "started" and entry["run_id"] in ended:
            found.wrong.append(f"{entry['run_id']}: started again after its end")


def _check_verdicts(out: Path, plan: Mapping[str, Any], found: Outcome) -> None:
    """Check that a run without a result says why in the verdict that lacks it."""
    reasons = json.dumps(read_json(out / schema.VERDICTS_FILE))
    found.wrong += [
        f"{name}: no verdict says why it has no result"
        for name, faults in plan.items()
        if any(f["lasts"] for f in faults) and f"{name}: {CAUSES[faults[0]['kind']]}" not in reasons
    ]


def _cpu_of_children() -> float:
    """Return the processor seconds of ended children; those of killed launchers' workers are not among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def campaign(
    folder: Path,
    corpus: Path,
    *,
    seeds: int,
    counts: Mapping[str, int],
    kills: Sequence[int],
    diverging: bool,
) -> Outcome:
    """Train a study with and without faults below `folder` and compare."""
    recipe = write_study(folder, corpus, seeds, diverging=diverging)
    planned = matrix.read(recipe).runs
    short = {run.run_id for run in planned if run.spec.optim.lr == DIVERGING["optim.lr"]}
    plan = draw_faults([run.run_id for run in planned], counts, random.Random(0), short)
    found = Outcome(load_before_and_after=[round(os.getloadavg()[0], 1)])
    start = time.monotonic()
    train_reference(recipe, folder / "reference")
    found.reference_wall_s = round(time.monotonic() - start, 1)
    start, cpu = time.monotonic(), _cpu_of_children()
    out = folder / "study"
    under_faults(recipe, out, plan, kills, found)
    found.wall_s, found.cpu_s = round(time.monotonic() - start, 1), round(_cpu_of_children() - cpu, 1)
    found.load_before_and_after.append(round(os.getloadavg()[0], 1))
    _check_states(out, folder / "reference", plan, found)
    _check_training(out, plan, found)
    _check_ledger(out, plan, found)
    _check_verdicts(out, plan, found)
    if found.second_launcher_exit != 64:
        found.wrong.append(f"a second launcher was not refused (exit {found.second_launcher_exit})")
    return found


FULL = {
    "kill": 8, "kill_at_import": 3, "sigterm": 6, "error": 6, "hang": 2, "memory": 5, "truncate": 5, "full_disk": 2,
    "hopeless": 1, "mismatch": 1,
}  # fmt: skip


def main() -> None:
    """Run the full form and print what it came to; exit 1 when something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=12, help="five runs each")
    parser.add_argument("--kills", type=int, default=5, help="times the launcher is killed")
    parser.add_argument("--hang-after", type=float, default=HANG_AFTER_S, help="runtime.hang_after_s")
    parser.add_argument("--standby", action="store_true", help="runtime.standby: true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    RECIPE["runtime"]["standby"] = options.standby
    RECIPE["runtime"]["hang_after_s"] = options.hang_after
    from fp8parity.data import pack_bytes

    with tempfile.TemporaryDirectory(prefix="fp8parity-faults-") as name:
        folder = Path(name)
        rng = random.Random(0)
        words = [b"alpha", b"beta", b"gamma", b"delta", b"norm", b"scale", b"cast"]
        texts = [b" ".join(rng.choice(words) for _ in range(40)) + b" %d" % i for i in range(200)]
        pack_bytes(texts, folder / "corpus.bin", held_out_fraction=0.2, source="faults")
        runs = 5 * options.seeds
        kills = [round(runs * (i + 1) / (options.kills + 1.5)) for i in range(options.kills)]
        found = campaign(
            folder, folder / "corpus.bin", seeds=options.seeds, counts=FULL, kills=kills, diverging=True
        )
    text = json.dumps(asdict(found), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
