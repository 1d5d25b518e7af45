"""How much of a device's time the launcher turns into training: short BF16 and FP8 runs, one to four at a time.

    python benchmarks/utilisation.py --part slots --json slots.json             # about 6 minutes on an H200
    python benchmarks/utilisation.py --part minute --after slots.json --no-warm-up  # about 5 minutes
    python benchmarks/utilisation.py --part three --after slots.json --no-warm-up   # about 8 minutes
    python benchmarks/utilisation.py --device cpu --miniature                   # tries it out

Each part is one study of the 25m preset, half BF16 and half rowwise, launched as `fp8parity run` does it.

    warm-up   one run of each arm, a few steps: fills the compile caches; the start is cold (left out with --no-warm-up)
    slots     tokens per second of 1 to SLOTS runs at a time, without evaluation or checkpoint before the last step: one
              that pauses leaves the device to the others, whose steps then seem faster than they are
    minute    three rounds of runs of a minute each in SLOTS slots; wanted: utilisation 0.75
    three     two rounds of runs of three minutes each; wanted: utilisation 0.9

Utilisation is tokens per second of the wall clock, over steady tokens per second at the same number of slots. Steady
tokens per second come from the runs' own `step_time` of steps during which every slot trained and no worker prepared
the next run: what preparing costs those that train counts against the launcher. They are those of the `slots` part,
measured before in the same process or read with `--after`, whose runs do not pause. A part without it takes its own,
which pauses make larger than they are: utilisation is then understated. The wall clock begins with the launch and ends

    utilisation        when a slot is free and no run is left to start
    utilisation_whole  with the last run: what runs of unequal speed leave idle at the very end counts too
    sustained          as the first, but begins when every slot trains for the first time: without the first start

A part that would not fit into what is left of the budget is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from fp8parity import matrix, study
from fp8parity.data import pack_python_sources
from fp8parity.jobs import RunState
from fp8parity.launch import launch
from fp8parity.ledger import read_ledger
from fp8parity.plan import memory_of, slots_of, standby_of
from fp8parity.progress import stage_of
from fp8parity.spec import DataSpec
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run

WARM_STEPS = 20
"""Steps of a run that are not called steady, as in the manifest's throughput."""

PARTS = {"minute": (60.0, 3, 0.75), "three": (180.0, 2, 0.9)}
"""Seconds of one run, how many follow each other in a slot, and the utilisation wanted.

The first start, which nothing hides, weighs the less the more rounds there are; `sustained` is without it."""

SCAN_SECONDS = 40.0
"""What a run of the slots part trains, beside others: rowwise runs start ten seconds after the BF16 ones."""
START_SECONDS = 45.0
"""What a first start is expected to take, for the budget."""


@dataclass(frozen=True)
class Setting:
    """What is measured: device, model, how the time is cut."""

    device: str
    slots: int
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    data: DataSpec
    rate_guess: float
    seconds: float = 1.0
    standby: bool | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return int(self.train["batch_size"]) * int(self.train["context"])


GPU = Setting(
    "cuda", 4, {"preset": "25m"},
    {"batch_size": 64, "context": 512, "compute": "bf16-mixed", "compile": "blocks", "eval_sequences": 512},
    DataSpec(source="python-sources", scope="environment", max_mib=64), rate_guess=4e5,
)  # fmt: skip
MINIATURE = Setting(
    "cpu", 2, {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
    {"batch_size": 4, "context": 16, "bf16_gemm": "fp32_accumulate", "eval_sequences": 8},
    DataSpec(source="python-sources", max_mib=0.5), rate_guess=1500.0, seconds=0.25, standby=True,
)  # fmt: skip


@dataclass
class Trace:
    """What the launcher said at each look.

    Seconds, steps by run, how many runs occupy a slot, how many wait, how many workers prepare one that waits.
    """

    times: list[float] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    preparing: list[int] = field(default_factory=list)

    def note(self, seconds: float, states: Sequence[RunState], preparing: int = 0) -> None:
        """Add a look; a run that has ended keeps its last step, which its state reports as all of them."""
        self.preparing.append(preparing)
        self.times.append(seconds)
        self.steps.append({s.run_id: 0 if s.state in ("waiting", "starting") else s.step for s in states})
        self.busy.append(sum(s.state in ("running", "starting") for s in states))
        self.waiting.append(sum(s.state == "waiting" for s in states))


def all_train(trace: Trace, slots: int, steps: int) -> list[bool]:
    """Return for each look whether `slots` runs are past their first steps and not at their end."""
    return [sum(WARM_STEPS <= step < steps for step in look.values()) >= slots for look in trace.steps]


def preparing(out: Path) -> int:
    """Return how many workers of the study `out` prepare a run that has no slot yet; one that is ready does nothing."""
    last = {str(entry["run_id"]): str(entry["event"]) for entry in read_ledger(out) if entry.get("run_id")}
    ahead = [run for run, event in last.items() if event == "standby"]
    return sum(stage_of(out / schema.RUNS_DIR / run) != "standby" for run in ahead)


def steady_steps(
    trace: Trace, slots: int, steps: int, *, quiet: bool = True
) -> dict[str, list[tuple[int, int]]]:
    """Return by run the intervals (a, b] of steps between two looks at which every slot trained.

    Those beside which no worker prepared, or, not `quiet`, those beside which one did.
    """
    full = all_train(trace, slots, steps)
    found: dict[str, list[tuple[int, int]]] = {}
    for i in range(1, len(full)):
        busy = trace.preparing[i - 1] > 0 or trace.preparing[i] > 0
        if full[i - 1] and full[i] and busy != quiet:
            for run, after in trace.steps[i].items():
                before = trace.steps[i - 1].get(run, 0)
                if WARM_STEPS <= before < after < steps:
                    found.setdefault(run, []).append((before, after))
    return found


def steady_rate(
    intervals: Mapping[str, Sequence[tuple[int, int]]],
    seconds_of: Callable[[str, int, int], Sequence[float]],
    slots: int,
    tokens_per_step: int,
) -> float | None:
    """Return steady tokens per second of `slots` runs together, None when no step is known to be steady."""
    taken = [seconds_of(run, a, b) for run, pairs in intervals.items() for a, b in pairs]
    seconds, steps = sum(map(sum, taken)), sum(map(len, taken))
    return slots * steps * tokens_per_step / seconds if seconds else None


def run_out(trace: Trace, slots: int) -> int:
    """Return the first look at which a slot is free and no run is left to start; the last one if there is none."""
    looks = zip(trace.busy, trace.waiting, strict=True)
    return next((i for i, (b, w) in enumerate(looks) if w == 0 and b < slots), len(trace.times) - 1)


def tokens_between(trace: Trace, first: int, last: int, tokens_per_step: int) -> int:
    """Return the tokens trained between two looks."""
    before, after = trace.steps[first], trace.steps[last]
    return tokens_per_step * sum(step - before.get(run, 0) for run, step in after.items())


def timeline(trace: Trace, tokens_per_step: int, window: float = 10.0) -> list[tuple[float, int, int, int]]:
    """Return, window by window: seconds at its end, tokens per second, runs in a slot, workers that prepare."""
    found, first = [], 0
    for i, seconds in enumerate(trace.times):
        if seconds - trace.times[first] >= window:
            tokens = tokens_between(trace, first, i, tokens_per_step)
            rate = round(tokens / (seconds - trace.times[first]))
            found.append((round(seconds, 1), rate, trace.busy[i], trace.preparing[i]))
            first = i
    return found


def handovers(trace: Trace, slot_of: Mapping[str, int], steps: int) -> list[float]:
    """Return the seconds in each slot between the last step of a run and the first steps of the next."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for seconds, look in zip(trace.times, trace.steps, strict=True):
        for run, step in look.items():
            if step > 0:
                begun.setdefault(run, seconds)
            if step >= steps:
                ended.setdefault(run, seconds)
    found = []
    for run, at in begun.items():
        before = [
            ended[o] for o in ended if slot_of.get(o) == slot_of.get(run) and ended[o] <= at and o != run
        ]
        if before:
            found.append(round(at - max(before), 1))
    return sorted(found)


def recipe_of(
    setting: Setting, tokens: Path, slots: int, seeds: int, steps: int, *, pauses: bool = True
) -> dict[str, Any]:
    """Return the recipe file: `seeds` pairs of BF16 and rowwise, `steps` long, `slots` at a time.

    With `pauses` eight evaluations, the default checkpoints and the setting's standby; without, one evaluation at the
    end, and no worker prepares beside those that train.
    """
    every = max(1, steps // 8) if pauses else steps
    saving = {} if pauses else {"checkpoint_every": steps}
    where = {"slots_per_gpu": slots} if setting.device == "cuda" else {"slots": slots}
    return {
        "name": "utilisation",
        "base": {
            "model": dict(setting.model),
            "data": {"source": "bin", "path": str(tokens)},
            "optim": {"lr": 1e-3, "warmup_steps": 2},
            "train": {**setting.train, "steps": steps, "eval_every": every, "device": setting.device},
            "precision": {"keep": 4},
        },
        "axes": {"precision.recipe": ["rowwise"]},
        "seeds": list(range(seeds)),
        "runtime": {**where, **saving, "standby": setting.standby if pauses else False},
    }


@dataclass(frozen=True)
class Known:
    """What an earlier call measured: steady tokens per second by number of slots, and of one of SLOTS runs."""

    steady: Mapping[int, float]
    rate: float


def known_from(document: Mapping[str, Any], slots: int) -> Known:
    """Return what the `slots` part of an earlier call found, read from its JSON.

    Raises:
        SystemExit: it has no steady tokens per second of so many slots.
    """
    parts = {name: part for name, part in document["parts"].items() if name.startswith("slots-")}
    steady = {
        int(p["slots"]): float(p["steady_tokens_per_s"])
        for p in parts.values()
        if p.get("steady_tokens_per_s")
    }
    if slots not in steady:
        raise SystemExit(
            f"--after: no steady tokens per second of {slots} slots in it; measure --part slots first"
        )
    return Known(steady, steady[slots] / slots)


class Bench:
    """One measurement: a folder, a clock with a budget, and what was found so far."""

    def __init__(self, setting: Setting, folder: Path, budget: float, known: Known | None = None) -> None:
        self.setting, self.folder = setting, folder
        self.deadline = time.monotonic() + budget
        self.rate = known.rate if known else setting.rate_guess
        self.scan: dict[int, float] = dict(known.steady) if known else {}
        self.found: dict[str, Any] = {}
        self.tokens = folder / "tokens.bin"
        pack_python_sources(self.tokens, setting.data)

    def steps_for(self, seconds: float) -> int:
        """Return how many steps a run trains in so many seconds at the rate per run known so far."""
        return max(
            2 * WARM_STEPS, round(seconds * self.setting.seconds * self.rate / self.setting.tokens_per_step)
        )

    def has_time(self, part: str, seconds: float) -> bool:
        """Say whether a part fits into what is left, aloud if it does not."""
        left = self.deadline - time.monotonic()
        if seconds <= left:
            return True
        words = f"left out: needs about {seconds:.0f} s, {left:.0f} s of the budget are left"
        self.found[part] = {"left_out": words}
        print(f"{part}: {words}", flush=True)
        return False

    def train(self, part: str, slots: int, runs: int, steps: int, *, pauses: bool = True) -> dict[str, Any]:
        """Train `runs` runs, `slots` at a time, and return what was measured."""
        recipe = self.folder / f"{part}.yaml"
        seeds = -(-runs // 2)
        document = recipe_of(self.setting, self.tokens, slots, seeds, steps, pauses=pauses)
        recipe.write_text(yaml.safe_dump(document))
        plan = matrix.read(recipe)
        out = self.folder / part
        dirs = study.lay_out(plan, out)[:runs]
        trace, began = Trace(), time.monotonic()
        trace.note(0.0, [RunState(path.name, "waiting", 0, steps, None, None) for path in dirs])
        states = launch(
            out, dirs, slots=slots_of(plan), use_gpus=self.setting.device == "cuda",
            on_change=lambda found: trace.note(time.monotonic() - began, found, preparing(out)),
            memory=memory_of(plan), standby=standby_of(plan),
        )  # fmt: skip
        trace.note(time.monotonic() - began, states)
        unfinished = [f"{s.run_id}: {s.state}: {s.reason}" for s in states if s.state != "finished"]
        if unfinished:
            raise SystemExit("\n".join([f"{part}: a run did not finish", *unfinished]))
        return self._figures(part, out, trace, slots, steps)

    def _figures(self, part: str, out: Path, trace: Trace, slots: int, steps: int) -> dict[str, Any]:
        per_step = self.setting.tokens_per_step
        runs = [path for path in (out / schema.RUNS_DIR).iterdir() if (path / schema.MANIFEST_FILE).exists()]
        records = {path.name: read_run(path) for path in runs}
        rows = {name: record.curve["step_time"].tolist() for name, record in records.items()}
        own, beside = (
            steady_rate(
                steady_steps(trace, slots, steps, quiet=quiet),
                lambda run, a, b: rows[run][a:b],
                slots,
                per_step,
            )
            for quiet in (True, False)
        )
        steady = self.scan.get(slots, own)
        entries = read_ledger(out)
        slot_of = {str(e["run_id"]): int(e["slot"]) for e in entries if e.get("event") == "started"}
        last = len(trace.times) - 1
        end, full = run_out(trace, slots), all_train(trace, slots, steps)
        begin = full.index(True) if True in full else 0

        def share(first: int, to: int) -> float | None:
            wall = trace.times[to] - trace.times[first]
            if steady is None or wall <= 0:
                return None
            return round(tokens_between(trace, first, to, per_step) / wall / steady, 3)

        arms = {
            arm: round(
                per_step / fmean([s for run, t in rows.items() if f"-{arm}-" in run for s in t[WARM_STEPS:]])
            )
            for arm in ("bf16", "rowwise")
            if any(f"-{arm}-" in run for run in rows)
        }
        stages = {
            arm: {
                stage: round(fmean([s.get(stage, 0.0) for s in taken]), 1)
                for stage in ("import", "build", "prove", "train", "evaluate")
            }
            for arm in arms
            if (
                taken := [r.manifest["seconds_by_stage"] for name, r in records.items() if f"-{arm}-" in name]
            )
        }
        found = {
            "slots": slots,
            "runs": len(rows),
            "steps": steps,
            "tokens": tokens_between(trace, 0, last, per_step),
            "wall_s": round(trace.times[last], 1),
            "first_steps_after_s": round(
                next(t for t, look in zip(trace.times, trace.steps, strict=True) if any(look.values())), 1
            ),
            "steady_tokens_per_s": None if own is None else round(own),
            "utilisation_is_of_tokens_per_s": None if steady is None else round(steady),
            "tokens_per_s_beside_preparation": None if beside is None else round(beside),
            "preparing_share": round(fmean(n > 0 for n in trace.preparing), 2),
            "tokens_per_s_of_a_run": arms,
            "seconds_by_stage": stages,
            "utilisation": share(0, end),
            "utilisation_whole": share(0, last),
            "sustained": share(begin, end),
            "handovers_s": handovers(trace, slot_of, steps),
            "started_ahead": sum(bool(e.get("prepared")) for e in entries),
            "faults": sum("cause" in e for e in entries),
        }
        print(f"{part}: {json.dumps(found)}", flush=True)
        found["timeline"] = timeline(trace, per_step)
        if (
            steady is not None
        ):  # what one run of so many trains; alone, at its beginning and end, it is faster
            self.rate = steady / slots
        return found

    def slots_part(self, numbers: Sequence[int]) -> None:
        """Measure each number of slots; the largest first, which tells how many steps a run of a minute has."""
        for slots in numbers:
            part = f"slots-{slots}"
            seconds = SCAN_SECONDS / (2 if slots == 1 else 1)
            if self.has_time(
                part, (START_SECONDS / 2 + seconds * self.setting.seconds) * (2 if slots == 1 else 1)
            ):
                steps = self.steps_for(seconds)
                self.found[part] = self.train(part, slots, max(2, slots), steps, pauses=False)
                if self.found[part]["steady_tokens_per_s"]:
                    self.scan[slots] = self.found[part]["steady_tokens_per_s"]

    def rounds_part(self, part: str) -> None:
        """Train the rounds of runs of the part's length and compare the utilisation with what is wanted."""
        seconds, rounds, wanted = PARTS[part]
        if self.has_time(part, START_SECONDS + 1.05 * rounds * seconds * self.setting.seconds):
            slots = self.setting.slots
            found = self.train(part, slots, rounds * slots, self.steps_for(seconds))
            reached = found["utilisation"] is not None and found["utilisation"] >= wanted
            self.found[part] = {**found, "wanted": wanted, "reached": reached}
            verdict = "reached" if reached else "NOT reached"
            print(f"{part}: utilisation {found['utilisation']}, wanted {wanted}: {verdict}", flush=True)


def measure(
    setting: Setting, folder: Path, parts: Sequence[str], budget: float, *, warm_up: bool, known: Known | None
) -> dict[str, Any]:
    """Measure the parts in order and return all figures; with nothing known that of SLOTS runs comes first."""
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(folder / "cache" / "inductor")
    )  # one for all studies
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "cache" / "triton"))
    began = time.monotonic()
    bench = Bench(setting, folder, budget, known)
    if warm_up:
        bench.found["warm-up"] = bench.train("warm-up", 2, 2, 2 * WARM_STEPS)
        bench.rate = known.rate if known else setting.rate_guess  # two runs of a few steps say little
    if "slots" in parts:
        bench.slots_part(range(setting.slots, 0, -1))
    elif known is None:
        bench.slots_part([setting.slots])
    for part in PARTS:
        if part in parts:
            bench.rounds_part(part)
    return {"device": setting.device, "seconds": round(time.monotonic() - began, 1), "parts": bench.found}


def setting_of(options: argparse.Namespace) -> Setting:
    """Return the setting that the options ask for."""
    base = MINIATURE if options.miniature else GPU
    changes = {
        "device": options.device,
        "slots": options.slots or base.slots,
        "standby": {"default": base.standby, "on": True, "off": False}[options.standby],
    }
    return Setting(**{**vars(base), **changes})


def main() -> None:
    """Measure, print as it goes, write JSON when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=["slots", *PARTS], default=["slots", "minute"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--miniature", action="store_true", help="a tiny model and quarter lengths")
    parser.add_argument("--slots", type=int, help="runs at a time")
    parser.add_argument("--after", type=Path, help="the JSON of an earlier --part slots on the same machine")
    parser.add_argument("--standby", choices=["default", "on", "off"], default="default")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds")
    parser.add_argument("--no-warm-up", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8parity-utilisation-") as name:
        setting = setting_of(options)
        after = json.loads(options.after.read_text(encoding="utf-8")) if options.after else None
        found = measure(
            setting, Path(name), options.part, options.budget,
            warm_up=not options.no_warm_up, known=known_from(after, setting.slots) if after else None,
        )  # fmt: skip
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
