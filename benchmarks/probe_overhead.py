"""What does a probe cost? Training time, memory bandwidth of the kernels, peak memory, and each what-if recipe.

    python benchmarks/probe_overhead.py [--json FILE]          # one CUDA GPU, more than 4 minutes
    python benchmarks/probe_overhead.py --tiny                 # CPU, a minute: the same path on a toy, no limits

Every figure is a ratio within this run: a probe over the median training step of the same model just before, a kernel's
bytes per second over those of a device copy. Steps and probes are timed by the clock between two waits for the device.
Exit status 1 when a limit is broken: default cadence 1 % of training time, kernels half the copy's bandwidth, peak
memory 10 % above training's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8parity.casts import RECIPES, CastPlan
from fp8parity.module import build_model
from fp8parity.presets import PRESETS
from fp8parity.probe import GemmProbe
from fp8parity.probe_recorder import recomputing
from fp8parity.probe_spec import ProbeSpec, resolve
from fp8parity.spec import RunSpec
from fp8parity.tensor_stats import TensorCasts

SHARE_LIMIT, BANDWIDTH_LIMIT, MEMORY_LIMIT = 0.01, 0.5, 0.10
HORIZON = 10_000
"""Steps of the run whose default cadence is charged; the cadence per step hardly depends on it."""


@dataclass(frozen=True)
class Case:
    """A decoder and its batch: presets are those of recipe files."""

    name: str
    preset: str
    vocab: int
    context: int
    batch: int
    what_if: tuple[str, ...]
    arms: tuple[str, ...] = ("bf16", "tensorwise", "rowwise")


CASES = (
    Case("0.1 B", "125m", 32768, 1024, 32, ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    Case("1 B", "1b", 32768, 4096, 4, ("tensorwise", "rowwise", "rowwise_with_gw_hp"), ("bf16", "rowwise")),
)
TINY = (Case("tiny", "0.7m", 256, 32, 4, ("tensorwise", "rowwise")),)


def say(text: str) -> None:
    """Print now: a run that is cut off has shown what it measured."""
    print(text, flush=True)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, work: Callable[[], object], repeats: int, warm: int = 1) -> float:
    """Return the median seconds of `work` between two waits for the device."""
    for _ in range(warm):
        work()
    taken = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Training:
    """A decoder in training: fp32 master weights, autocast, fused AdamW, blocks compiled on CUDA."""

    def __init__(self, case: Case, recipe: str, device: str) -> None:
        cuda = device == "cuda"
        backend = "torchao_float8" if recipe != "blockwise" else "torchao_blockwise" if cuda else "reference"
        spec = RunSpec.model_validate(
            {
                "model": {"preset": case.preset, "vocab_size": case.vocab},
                "data": {"source": "bin", "path": "none.bin"},
                "optim": {"lr": 1e-4},
                "train": {
                    "steps": HORIZON, "batch_size": case.batch, "context": case.context, "eval_every": HORIZON,
                    "device": device, "compile": "blocks" if cuda else "off",
                    "bf16_gemm": "native" if cuda else "fp32_accumulate",
                },
                "precision": {"recipe": recipe, "backend": backend, "keep_first": 4, "keep_last": 4},
                "seed": 0,
            }
        )  # fmt: skip
        torch._dynamo.reset()
        self.device = device
        self.model = build_model(spec, case.vocab).model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=cuda)
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, case.vocab, (case.batch, case.context + 1), generator=generator).to(
            device
        )

    def loss_of(self, rows: Tensor) -> Tensor:
        """Return the loss as the runner's module computes it."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def step(self) -> None:
        """Train one step in Lightning's order: the last step's gradients live through the forward pass."""
        loss = self.loss_of(self.rows)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def probe(self, what_if: tuple[str, ...]) -> int:
        """Probe as the runner does; returns the number of rows."""
        self.optimizer.zero_grad(set_to_none=True)
        with recomputing(self.model):
            result = GemmProbe(self.model, what_if=what_if).run(1, 1, [self.rows], self.loss_of)
        return len(result.casts)


def peak(device: str, work: Callable[[], object]) -> float:
    """Return the peak of allocated device memory in GiB while `work` runs; NaN on a CPU."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def probes_per_step() -> float:
    """Return the share of steps that the default cadence probes."""
    return len(resolve(ProbeSpec(), HORIZON, (), "compute").due_steps(HORIZON)) / HORIZON


def overhead(case: Case, recipe: str, device: str, repeats: int) -> dict[str, Any]:
    """Return the cost of the default probe of one arm; the control tries the case's recipes."""
    training = Training(case, recipe, device)
    what_if = case.what_if if recipe == "bf16" else ()
    step = seconds(device, training.step, 4 * repeats, warm=3)
    rows = training.probe(what_if)
    probe = seconds(device, lambda: training.probe(what_if), repeats)
    plain = seconds(device, lambda: training.probe(()), repeats)
    after = seconds(device, training.step, 2 * repeats)
    peaks = (peak(device, training.step), peak(device, lambda: training.probe(what_if)))
    found: dict[str, Any] = {
        "case": case.name,
        "arm": recipe,
        "rows": rows,
        "step_ms": 1e3 * step,
        "step_after_probe_ms": 1e3 * after,
        "probe_ms": 1e3 * probe,
        "probe_steps": probe / step,
        "share_of_training": probe / step * probes_per_step(),
        "peak_step_gib": peaks[0],
        "peak_probe_gib": peaks[1],
        "peak_growth": peaks[1] / peaks[0] - 1,
    }
    if what_if:
        found["without_what_if_ms"] = 1e3 * plain
        found["per_recipe_ms"] = _per_recipe(training, what_if, device, repeats)
    return found


def _per_recipe(training: Training, recipes: tuple[str, ...], device: str, repeats: int) -> dict[str, float]:
    """Return the milliseconds that each recipe adds to a probe that already has those before it."""
    cost, before = {}, seconds(device, lambda: training.probe(()), repeats)
    for index, name in enumerate(recipes):
        now = seconds(device, lambda n=index: training.probe(recipes[: n + 1]), repeats)  # type: ignore[misc]
        cost[name], before = 1e3 * (now - before), now
    return cost


def bandwidth(device: str, rows: int, columns: int, repeats: int) -> list[dict[str, Any]]:
    """Return, per cast, bytes that each kernel reads a second over those that a device copy reads and writes a second.

    A cast reads its operand twice: `_magnitude_kernel`, `_cast_kernel`. `share` is that of all the device does for a
    cast, their sums included, by the clock and queued, so that launches overlap.
    """
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    into = torch.empty_like(x)
    size, queued = x.numel() * x.element_size(), 10

    def times(work: Callable[[], object]) -> float:
        return seconds(device, lambda: [work() for _ in range(queued)], repeats) / queued

    copied = times(lambda: into.copy_(x))
    if device == "cuda":
        copied = min(copied, sum(kernel_seconds(lambda: into.copy_(x), queued).values()))
    copy = 2 * size / copied
    say(f"  device copy of {size / 2**20:.0f} MiB: {copy / 1e12:.2f} TB/s read and written")
    plans: dict[CastPlan, None] = {plan: None for recipe in RECIPES.values() for _, _, plan in recipe.casts}
    found = []
    for plan in (plan for plan in plans if plan.source == "high_precision"):
        for turned in (False, True):

            def work(plan: CastPlan = plan, turned: bool = turned) -> object:
                return TensorCasts(x).sums(plan, transposed=turned)

            taken = times(work)
            kernels = kernel_seconds(work, queued) if device == "cuda" else {}
            first, second = (
                kernels.get(name, float("nan")) for name in ("_magnitude_kernel", "_cast_kernel")
            )
            row: dict[str, Any] = {
                "cast": str(plan), "transposed": turned, "ms": 1e3 * taken, "share": 2 * size / taken / copy,
                "magnitudes_us": 1e6 * first, "codes_us": 1e6 * second,
                "magnitudes_share": size / first / copy, "codes_share": size / second / copy,
                "others_us": 1e6 * (sum(kernels.values()) - first - second),
            }  # fmt: skip
            found.append(row)
            say(
                f"  {plan!s:40s} {'transposed' if turned else '          '} kernels {row['magnitudes_us']:6.0f} + "
                f"{row['codes_us']:6.0f} us = {row['magnitudes_share']:4.0%} and {row['codes_share']:4.0%} of a copy, "
                f"others {row['others_us']:4.0f} us; by the clock {row['ms']:6.3f} ms = {row['share']:4.0%}"
            )
    return found


def kernel_seconds(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the device seconds of each kernel that `work` runs, by name, per call."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    return {
        event.key: 1e-6 * event.self_device_time_total / repeats
        for event in seen.key_averages()
        if event.self_device_time_total > 0
    }


def show(row: dict[str, Any]) -> None:
    """Print one arm."""
    say(
        f"{row['case']:6s} {row['arm']:20s} step {row['step_ms']:8.1f} ms  probe {row['probe_ms']:8.1f} ms = "
        f"{row['probe_steps']:4.1f} steps, {row['share_of_training']:.2%} of training  "
        f"peak {row['peak_step_gib']:.1f} -> {row['peak_probe_gib']:.1f} GiB ({row['peak_growth']:+.1%})  "
        f"step after a probe {row['step_after_probe_ms']:.1f} ms"
    )
    for recipe, cost in row.get("per_recipe_ms", {}).items():
        say(f"       what-if {recipe:20s} adds {cost:8.1f} ms = {cost / row['step_ms']:.2f} steps")


def broken(document: dict[str, Any]) -> list[str]:
    """Return the limits that the figures break."""
    found = []
    for row in document["overhead"]:
        name = f"{row['case']} {row['arm']}"
        if row["share_of_training"] > SHARE_LIMIT:
            found.append(f"{name}: {row['share_of_training']:.2%} of training time, limit {SHARE_LIMIT:.0%}")
        if row["peak_growth"] > MEMORY_LIMIT:
            found.append(f"{name}: peak memory {row['peak_growth']:+.1%}, limit {MEMORY_LIMIT:+.0%}")
    for row in document["bandwidth"]:
        for kernel in ("magnitudes", "codes"):
            if row[f"{kernel}_share"] < BANDWIDTH_LIMIT:
                turned = ", transposed" if row["transposed"] else ""
                found.append(
                    f"{row['cast']}{turned}: the kernel of {kernel} reads at {row[f'{kernel}_share']:.0%} of the copy, "
                    f"limit {BANDWIDTH_LIMIT:.0%}"
                )
    return found


def main() -> int:
    """Measure, print, write; 1 when a limit is broken on CUDA."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="a toy on the CPU, to see that the benchmark works"
    )
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    cases, repeats, size = (TINY, 1, (256, 384)) if options.tiny else (CASES, 5, (16384, 8192))
    name = "CPU" if options.tiny else torch.cuda.get_device_name()
    say(f"{name}, torch {torch.__version__}; default cadence probes {probes_per_step():.2%} of the steps")
    document: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "presets": list(PRESETS),
        "overhead": [],
    }
    say("kernels")
    document["bandwidth"] = bandwidth(device, *size, repeats)
    for case in cases:
        for recipe in case.arms:
            row = overhead(case, recipe, device, repeats)
            document["overhead"].append(row)
            show(row)
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    problems = [] if options.tiny else broken(document)
    say("\n".join(problems) or ("no limits on a CPU" if options.tiny else "every limit is kept"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
