"""Early-warning rules: how often they alarm for nothing, and how soon they see a planted fault.

    OMP_NUM_THREADS=1 python benchmarks/early_warning.py [--healthy 200] [--faulty 20] [--json FILE]

Labelled synthetic runs of 1000 steps, a probe every 20 (every 10 up to step 50): the 24 operands of 8 linears, drawn
element by element and really cast to FP8, one scale per tensor. Weights hardly move, activations by 1 % a probe, the
input of a down projection is a product of two Gaussians, and gradients have rows of very different size and move by
half in the first 100 steps, by a third after that (from real probes of a small model). Signals of a pair of one seed
differ by slow noise of 3 %, gradient norms by 10 % a probe.

Rules are those that train beside the run (`tensor_alerts`) and those of the analysis (`tensor_moves`,
`tensor_signal_pairs`). Of healthy runs the share with any alarm is a false-alarm rate per run, here per 1000 steps.
Faults begin at step 400 in one operand; an alarm counts there and from then on, at the probe at which it is known. A
fault's loss follows from an assumption: the gap grows by 1 % in 200 steps for a damage of one, and damage is the
noise-to-signal ratio of the faulty cast or the share of its elements that underflow, whichever is larger (of attention
logits: a tenth of what they have grown by). The loss's onset is what the report would say (`tensor_health.loss_onsets`)
of that gap with the noise of an evaluation.

Exit status 1 when a limit by 8 BF16 runs is exceeded by more than one run in nine, beyond the binomial 99.9 % limit, or
a fault is found by no rule in more than one run in ten.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from scipy.signal import lfilter
from scipy.stats import beta, binom

from fp8parity.tensor_alerts import AlertWatch
from fp8parity_analysis import tensor_moves as moves
from fp8parity_analysis import tensor_signal_pairs as pairs
from fp8parity_analysis.tensor_health import loss_onsets
from fp8parity_analysis.tensor_onset import LASTING
from fp8parity_analysis.tensor_panel import COLUMNS, ONE_SCALE, Panel, Tensor
from fp8parity_analysis.tensor_schema import TRAINED
from fp8parity_analysis.tensor_signals import SIGNAL_STATISTICS, Signal
from fp8parity_analysis.verdict import Evidence

Array = np.ndarray[Any, Any]

HORIZON, WARMUP, BEGIN, ROWS, WIDTH = 1000, 100, 400, 8, 512
STEPS = np.array([*range(10, 51, 10), *range(60, HORIZON + 1, 20)])
LINEARS = [
    f"blocks.{block}.{name}"
    for block in range(2)
    for name in ("attn.qkv_proj", "attn.o_proj", "ffn.gate_up_proj", "ffn.down_proj")
]
GEMM = {"input": "output", "weight": "output", "grad_output": "grad_input"}
TENSORS = tuple(Tensor(fqn, gemm, operand) for operand, gemm in GEMM.items() for fqn in LINEARS)
FAULTY = TENSORS.index(Tensor("blocks.1.ffn.down_proj", "output", "input"))
SIGNAL_FQNS = {
    "attention_logits_max": ("blocks.0.attn", "blocks.1.attn"), "head_logits_max": ("head",),
    "head_logsumexp_mean": ("head",), "block_output_rms": ("blocks.0", "blocks.1"), "grad_norm": tuple(LINEARS),
}  # fmt: skip
TOP = {"e4m3fn": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
BF16_RUNS = 8
MARGIN, EVAL_NOISE, GAP_PER_STEP = 0.0025, 0.0004, 0.01 / 200
ALERTS = ("saturation", "nonfinite", "zero_amax", "sqnr_drop", "scale_jump")
FOUND_IN = 0.9


def _outlier(x: Array, since: Array) -> Array:
    x[:, 3, 7] *= 2.0**20
    return x


def _growing_pair(x: Array, since: Array) -> Array:
    x[:, :, 5:7] *= 1.01 ** since[:, None, None]
    return x


def _faint_rows(x: Array, since: Array) -> Array:
    x[:, 2:] *= 1e-9
    return x


def _infinity(x: Array, since: Array) -> Array:
    x[:, 3, 7] = np.inf
    return x


def _as_it_is(x: Array, since: Array) -> Array:
    return x


@dataclass(frozen=True)
class Fault:
    """What is wrong from step `BEGIN` on: `change` of the operand [K, R, C] by steps since, or of its cast."""

    change: Callable[[Array, Array], Array] = _as_it_is
    format: str = "e4m3fn"
    frozen: bool = False
    attention: float = 1.0


FAULTS: Mapping[str, Fault] = {
    "one outlier x 2^20": Fault(_outlier),
    "two channels grow by 1 % a step": Fault(_growing_pair),
    "most rows x 1e-9": Fault(_faint_rows),
    "scale stands still": Fault(frozen=True),
    "e5m2 for e4m3": Fault(format="e5m2"),
    "an infinity": Fault(_infinity),
    "attention logits grow by 1 % a step": Fault(attention=1.01),
}


def operands(rng: np.random.Generator) -> Array:
    """Return every operand of a healthy run [L, K, R, C]."""
    x = rng.standard_normal((len(TENSORS), len(STEPS), ROWS, WIDTH), dtype=np.float32).astype(np.float64)
    size = np.zeros((len(TENSORS), len(STEPS)))
    for row, tensor in enumerate(TENSORS):
        if tensor.operand == "weight":
            x[row] = x[row, :1]
            size[row] = 0.1 * np.log(STEPS) + rng.normal(0, 0.003, len(STEPS))
        elif tensor.operand == "input":
            size[row] = 0.2 * np.log(STEPS) + rng.normal(0, 0.01, len(STEPS))
            if tensor.fqn.endswith("down_proj"):
                x[row] *= rng.standard_normal(x[row].shape, dtype=np.float32)
        else:
            x[row] *= np.exp(rng.standard_normal((len(STEPS), ROWS, 1)))
            spread = np.where(STEPS <= WARMUP, 0.5, 0.33)
            size[row] = -0.5 * np.log(STEPS) + spread * rng.standard_normal(len(STEPS))
    return np.asarray(x * np.exp(rng.normal(0, 0.5, (len(TENSORS), 1)) + size)[:, :, None, None])


def statistics(x: Array, format: str, scale: Array | None = None) -> dict[str, Array]:
    """Return the statistics of the casts of x [..., R, C] under one scale each [...], by name of the column."""
    finite = np.isfinite(x)
    size = np.where(finite, np.abs(x), 0.0)
    amax = size.max(axis=(-2, -1))
    used = TOP[format] / np.maximum(amax, 1e-12) if scale is None else scale
    scaled = size * used[..., None, None]
    codes = np.minimum(scaled, TOP[format]).astype(DTYPE[format]).astype(np.float64)
    poisoned = ~finite.all(axis=(-2, -1))
    back = np.where(poisoned[..., None, None], 0.0, codes / used[..., None, None])
    whole = (-2, -1)
    nonzero = (size > 0).sum(axis=whole)
    norm, error = np.sqrt((size**2).sum(axis=whole)), np.sqrt(((size - back) ** 2).sum(axis=whole))
    under = ((size > 0) & (codes == 0)).sum(axis=whole) * ~poisoned
    over = (scaled > TOP[format] * (1 + 2.0**-20)).sum(axis=whole)
    rms = norm / np.sqrt(x.shape[-2] * x.shape[-1])
    zero = np.zeros(amax.shape)
    columns = {
        "element_count": zero + x.shape[-2] * x.shape[-1],
        "group_count": zero + 1,
        "zero_count": zero + (x == 0).sum(axis=whole),
        "nonfinite_count": zero + (~finite).sum(axis=whole),
        "underflow_count": zero + under,
        "saturated_count": zero + over,
        "zero_amax_groups": zero + (amax == 0),
    }
    return columns | {
        "amax": amax,
        "scale_min": used,
        "scale_max": used,
        "underflow_frac": under / nonzero,
        "saturated_frac": over / nonzero,
        "sqnr_db": 20 * np.log10(norm / error),
        "rms": rms,
        "amax_over_rms": amax / rms,
    }


def panel(rng: np.random.Generator, fault: Fault | None = None) -> Panel:
    """Return the trained casts of one run."""
    x = operands(rng)
    formats = np.full(x.shape[:2], "e4m3fn", dtype=object)
    formats[[tensor.operand == "grad_output" for tensor in TENSORS]] = "e5m2"
    late = STEPS >= BEGIN
    if fault is not None:
        x[FAULTY, late] = fault.change(x[FAULTY, late], STEPS[late] - BEGIN)
        formats[FAULTY, late] = fault.format
    columns = {name: np.empty(x.shape[:2]) for name in COLUMNS}
    for name in TOP:
        at = formats == name
        for column, values in statistics(x[at], name).items():
            columns[column][at] = values
    if fault is not None and fault.frozen:
        first = int(late.argmax())
        still = np.full(int(late.sum()), columns["scale_min"][FAULTY, first])
        for column, values in statistics(x[FAULTY, late], "e4m3fn", still).items():
            columns[column][FAULTY, late] = values
    return Panel(TENSORS, STEPS, columns, formats, (ONE_SCALE,) * len(TENSORS))


def _slow(rng: np.random.Generator, rows: int, sd: float, memory: float = 0.9) -> Array:
    shocks = rng.standard_normal((rows, len(STEPS))) * sd * np.sqrt(1 - memory**2)
    shocks[:, 0] /= np.sqrt(1 - memory**2)
    return np.asarray(lfilter([1.0], [1.0, -memory], shocks, axis=1))


def signal_gaps(rng: np.random.Generator, fault: Fault | None = None) -> dict[str, Array]:
    """Return each signal of a run over that of another of its seed [modules, K], on the scale tested."""
    found = {}
    for name, fqns in SIGNAL_FQNS.items():
        found[name] = np.sqrt(2) * _slow(rng, len(fqns), 0.03)
        if name == "grad_norm":
            found[name] += np.sqrt(2) * 0.1 * rng.standard_normal(found[name].shape)
    if fault is not None:
        found["attention_logits_max"][1] += np.log(fault.attention) * np.maximum(0, STEPS - BEGIN)
    return found


def paired(name: str) -> pairs.PairedSignal:
    """Return an empty pair of a signal: what `growth` asks of it."""
    blank = np.zeros((0, len(SIGNAL_FQNS[name]), len(STEPS)))
    places = tuple(Signal(fqn, name) for fqn in SIGNAL_FQNS[name])
    return pairs.PairedSignal(SIGNAL_STATISTICS[name], places, STEPS, (), True, 1.0, {}, {}, {}, blank, blank)


@dataclass(frozen=True)
class Alarms:
    """What one run's rules said: first step known by (rule, row), and the largest lasting value by analysis rule."""

    first: Mapping[str, Mapping[int, int]]
    peaks: Mapping[str, float]


def alarms_of(casts: Panel, signals: Mapping[str, Array]) -> Alarms:
    """Run every rule over one run."""
    first: dict[str, dict[int, int]] = {f"alert {name}": {} for name in ALERTS}
    watch = AlertWatch()
    names = (
        "saturated_count",
        "saturated_frac",
        "nonfinite_count",
        "zero_amax_groups",
        "group_count",
        "sqnr_db",
        "scale_min",
    )
    for at, step in enumerate(STEPS):
        watch.look(
            {
                "step": int(step), "kind": TRAINED, **tensor._asdict(), "format": casts.formats[row, at],
                **{name: float(casts.columns[name][row, at]) for name in names},
            }
            for row, tensor in enumerate(TENSORS)
        )  # fmt: skip
    for alert in watch.alerts:
        first[f"alert {alert.rule}"][TENSORS.index(Tensor(alert.fqn, alert.gemm, alert.operand))] = alert.step
    values = {rule.name: (rule.limit, rule.value(casts, WARMUP, HORIZON)) for rule in moves.RULES}
    for name, gap in signals.items():
        rule = pairs.GROWTH_RULES[name]
        values[rule.name] = (rule.limit, pairs.growth(paired(name), gap, WARMUP))
    peaks = {}
    for name, (limit, path) in values.items():
        held = moves.held(path)
        peaks[name] = float(held.max())
        beyond = held > limit
        # known at the last of the probes that must last
        first[name] = {
            int(row): int(STEPS[beyond[row].argmax() + LASTING - 1])
            for row in np.flatnonzero(beyond.any(axis=1))
        }
    return Alarms(first, peaks)


def run_of(seed: int, index: int, fault: Fault | None = None) -> tuple[Panel, Alarms]:
    """Simulate one run and its alarms."""
    rng = np.random.default_rng([seed, index])
    casts = panel(rng, fault)
    return casts, alarms_of(casts, signal_gaps(rng, fault))


def share(hits: int, n: int) -> tuple[float, float, float]:
    """Return a share with its 95 % interval (Clopper-Pearson)."""
    low = float(beta.ppf(0.025, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, n - hits)) if hits < n else 1.0
    return hits / n, low, high


def healthy_rates(runs: list[Alarms]) -> dict[str, dict[str, Any]]:
    """Return the false alarms of each rule: runs with any, alarms per run, runs beyond the limit by BF16 runs."""
    found: dict[str, dict[str, Any]] = {}
    for rule in runs[0].first:
        hits = sum(bool(run.first[rule]) for run in runs)
        alarms = sum(len(run.first[rule]) for run in runs) / len(runs)
        found[rule] = {"runs": share(hits, len(runs)), "alarms_per_run": alarms}
    limits = {rule.name: rule.limit for rule in (*moves.RULES, *pairs.GROWTH_RULES.values())}
    for rule, limit in limits.items():
        found[rule]["calibrated"] = calibrated(np.array([run.peaks[rule] for run in runs]), limit)
    return found


def calibrated(peaks: Array, limit: float) -> tuple[int, int]:
    """Return how many of the groups of `BF16_RUNS` + 1 runs have their first beyond the others' limit."""
    groups = peaks[: len(peaks) // (BF16_RUNS + 1) * (BF16_RUNS + 1)].reshape(-1, BF16_RUNS + 1)
    return int((groups[:, 0] > np.maximum(groups[:, 1:].max(axis=1), limit)).sum()), len(groups)


def loss_onset(rng: np.random.Generator, casts: Panel, fault: Fault) -> int | None:
    """Return the step from which the report would say that the loss's gap grows; None where it ends in the margin."""
    noise = 10 ** (-casts.columns["sqnr_db"][FAULTY] / 10)
    late = STEPS >= BEGIN
    lost = casts.columns["underflow_frac"][FAULTY]
    damage = np.where(late, np.maximum(noise - np.median(noise[~late]), lost - np.median(lost[~late])), 0.0)
    damage = np.maximum(damage, 0.0)
    damage += np.where(late, np.minimum(1.0, (fault.attention ** (STEPS - BEGIN) - 1) / 10), 0.0)
    damage = np.where(np.isfinite(damage), damage, 1.0)
    gap = np.concatenate([[0.0], np.cumsum(damage[:-1] * np.diff(STEPS))]) * GAP_PER_STEP
    gap += EVAL_NOISE * rng.standard_normal(len(gap))
    evidence = Evidence("x", (0,), tuple(int(step) for step in STEPS), (tuple(gap.tolist()),))
    return loss_onsets(evidence, MARGIN).get(0)


def fault_rates(name: str, runs: int, seed: int) -> dict[str, Any]:
    """Return, by rule, in how many runs the fault was found where it is, how late, and how long before the loss."""
    fault, number = FAULTS[name], list(FAULTS).index(name)
    latency: dict[str, list[int]] = {}
    lead: dict[str, list[int]] = {}
    onsets = []
    any_rule = 0
    for index in range(runs):
        casts, alarms = run_of(seed + 1 + number, index, fault)
        onset = loss_onset(np.random.default_rng([seed, number, index]), casts, fault)
        onsets += [] if onset is None else [onset - BEGIN]
        seen = False
        for rule, rows in alarms.first.items():
            row = 1 if rule.endswith("_growth") and rule != "spread_growth" else FAULTY
            if (fault.attention > 1) != (rule == "attention_logits_max_growth"):
                continue
            if rows.get(row, 0) >= BEGIN:
                seen = True
                latency.setdefault(rule, []).append(rows[row] - BEGIN)
                if onset is not None:
                    lead.setdefault(rule, []).append(onset - rows[row])
        any_rule += seen
    return {
        "runs": runs,
        "found_by_any": any_rule,
        "loss_onset": _middle(onsets),
        "rules": {
            rule: {
                "found": share(len(late), runs),
                "latency": _middle(late),
                "lead": _middle(lead.get(rule, [])),
            }
            for rule, late in latency.items()
        },
    }


def _middle(values: list[int]) -> list[float] | None:
    """Return median and quartiles, None of nothing."""
    return [float(np.percentile(values, at)) for at in (50, 25, 75)] if values else None


def problems(healthy: Mapping[str, Mapping[str, Any]], faults: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is outside its limits."""
    texts = []
    for rule, rates in healthy.items():
        hits, groups = rates.get("calibrated", (0, 1))
        limit = int(binom.ppf(0.999, groups, 1 / (BF16_RUNS + 1)))
        if hits > limit:
            texts.append(
                f"{rule}: {hits} of {groups} beyond the limit by BF16 runs, at most {limit} expected"
            )
    texts += [
        f"{name}: found in {rates['found_by_any']} of {rates['runs']} runs"
        for name, rates in faults.items()
        if rates["found_by_any"] < FOUND_IN * rates["runs"]
    ]
    return texts


def _steps(middle: list[float] | None) -> str:
    return "-" if middle is None else f"{middle[0]:.0f} ({middle[1]:.0f} to {middle[2]:.0f})"


def main() -> int:
    """Measure, print the tables, return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--faulty", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    healthy = healthy_rates([run_of(0, index)[1] for index in range(options.healthy)])
    print(f"healthy runs: {options.healthy} of {HORIZON} steps")
    for rule, rates in healthy.items():
        at, low, high = (100 * value for value in rates["runs"])
        beyond = "{} of {}".format(*rates["calibrated"]) if "calibrated" in rates else "-"
        print(
            f"  {rule:32} false alarm in {at:5.1f} % of runs ({low:.1f} to {high:.1f}), {rates['alarms_per_run']:6.2f} "
            f"tensors a run; beyond the limit by {BF16_RUNS} BF16 runs: {beyond}",
            flush=True,
        )
    faults = {}
    for name in FAULTS:
        faults[name] = found = fault_rates(name, options.faulty, 100)
        print(f"{name}: the loss's onset {_steps(found['loss_onset'])} steps after the fault")
        for rule, rates in found["rules"].items():
            print(
                f"  {rule:32} found in {100 * rates['found'][0]:.0f} %, {_steps(rates['latency'])} steps after the "
                f"fault, {_steps(rates['lead'])} before the loss",
                flush=True,
            )
    wrong = problems(healthy, faults)
    print("\n".join(wrong) or "all within their limits")
    if options.json:
        document = {"steps": HORIZON, "healthy_runs": options.healthy, "healthy": healthy, "faults": faults}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
