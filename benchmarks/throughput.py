"""How fast is a run? Against a bare PyTorch loop, and each FP8 recipe against BF16.

    python benchmarks/throughput.py [--only linear,1b,8b] [--recipes tensorwise,rowwise] [--runner bf16,tensorwise]
                                    [--seconds N] [--out FILE] [--tiny]
    python benchmarks/throughput.py --markdown FILE

One process on one GPU: fp32 master weights, bf16-mixed, blocks compiled, no activation checkpointing, cold compile
caches. Ratios are medians over rounds in which both sides take turns (ABAB). Sections:

linear  one linear's three GEMMs, 16384 tokens, 4096 and 8192 wide
1b      a decoder of 16 layers; first and last block and head in BF16. First our runner (Lightning, recorder, guard,
        clipping, schedule) against a bare loop of the same model and optimizer, then each recipe against BF16
8b      four layers of an 8 B Llama, head in BF16: each recipe against BF16

TFLOP/s count 6 M K N per linear and causal attention. The share of the ceiling is the time that the same FLOPs would
take at the measured rate of one large GEMM (bf16 or fp8), over the time they took. The Amdahl prediction takes the
control's step, and exchanges each converted linear's measured time for the recipe's (GEMMs and casts, the linear
alone); casts that the compiler shares or fuses with their neighbours can make a step faster than that.

Rows go to FILE as they are measured. Exit status 1 when a figure falls short of its target.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_timing as timing
from fp8parity import environment, layer_policy, matrix, module, precision, runner, study
from fp8parity.casts import GEMMS, recipe_plan
from fp8parity.layer_policy import LayerDecision, LayerPlan
from fp8parity.model import DecoderLM
from fp8parity.schedule import lr_factor
from fp8parity.shapes import linear_shapes, parameter_count
from fp8parity.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")

RUNNER_TARGET = 0.97
AMDAHL_TARGET = 0.9
LINEAR_TARGETS = {("tensorwise", 4096): 1.45}

WARM_STEPS = 5
Shape = tuple[int, int]
"""Input and output width of a linear."""


@dataclass(frozen=True)
class ModelCase:
    """A decoder to train: sizes as in a recipe file, tokens, and how many blocks at each end stay in BF16."""

    name: str
    sizes: dict[str, Any]
    vocab: int
    context: int
    batch: int
    keep: int
    runner: bool

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.context * self.batch


@dataclass(frozen=True)
class Setting:
    """Everything that --tiny makes small."""

    device: torch.device
    compile: str
    widths: tuple[int, ...]
    tokens: int
    ceiling_shapes: list[tuple[int, int, int]]
    cases: dict[str, ModelCase]
    rounds: int
    linear_calls: int
    model_calls: int
    segment: int


def full() -> Setting:
    """Return the sizes that are reported."""
    llama = {"dim": 4096, "n_layers": 4, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
    return Setting(
        device=torch.device("cuda"),
        compile="blocks",
        widths=(4096, 8192),
        tokens=16384,
        ceiling_shapes=[(16384, 4096, 4096), (16384, 8192, 8192), (8192, 8192, 8192)],
        cases={
            "1b": ModelCase("1b", {"preset": "1b"}, 32768, 4096, 4, 1, runner=True),
            "8b": ModelCase("8b", llama, 32000, 8192, 2, 0, runner=False),
        },
        rounds=5,
        linear_calls=10,
        model_calls=4,
        segment=10,
    )


def tiny() -> Setting:
    """Return sizes that a CPU does in seconds; the figures mean nothing."""
    sizes = {"dim": 64, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128}
    return Setting(
        device=torch.device("cpu"),
        compile="off",
        widths=(64, 128),
        tokens=128,
        ceiling_shapes=[(64, 64, 64)],
        cases={
            "1b": ModelCase("1b", sizes, 64, 32, 4, 1, runner=True),
            "8b": ModelCase("8b", {**sizes, "n_layers": 1}, 64, 32, 4, 0, runner=False),
        },
        rounds=2,
        linear_calls=1,
        model_calls=1,
        segment=2,
    )


# --- what is written ---------------------------------------------------------------------------------------


@dataclass
class Report:
    """Rows, what was not run, and what fell short; on the disk after every row."""

    path: Path | None
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document |= {"rows": [], "shortfalls": [], "errors": [], "not_run": []}

    def add(self, line: str, **row: Any) -> None:
        """Print one row and keep it."""
        print(line, flush=True)
        self.document["rows"].append(row)
        self._write()

    def target(self, what: str, value: float, least: float) -> None:
        """Check a figure against its target; one that falls short is printed as such."""
        if value < least:
            line = f"{what} is {value:.3f}, target {least}"
            print(f"    FALLS SHORT: {line}", flush=True)
            self.document["shortfalls"].append(line)
            self._write()

    def note(self, kind: str, line: str) -> None:
        """Keep and print one line about what was not measured (`errors`, `not_run`)."""
        print(f"{kind.replace('_', ' ')}: {line}", flush=True)
        self.document[kind].append(line)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


# --- arithmetic --------------------------------------------------------------------------------------------


def fp8_gemm_share(recipe: str) -> float:
    """Return how many of a converted linear's three GEMMs the recipe multiplies in FP8, as a share."""
    if recipe == "bf16":
        return 0.0
    plan = recipe_plan(recipe)
    return sum(plan.gemm(name).is_fp8 for name in GEMMS) / len(GEMMS)


def linear_flops(k: int, n: int, tokens: int) -> float:
    """Return the FLOPs of one linear's three GEMMs."""
    return 6.0 * tokens * k * n


def attention_flops(spec: RunSpec) -> float:
    """Return the FLOPs of causal attention in a training step: forward 2 B T^2 dim per layer, backward twice that."""
    train, model = spec.train, spec.model
    return 6.0 * train.batch_size * train.context**2 * model.dim * model.n_layers


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step by the format of the operands."""

    bf16: float
    fp8: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.bf16 + self.fp8

    def share_of_ceiling(self, ms: float, ceilings: Mapping[str, float]) -> float:
        """Return the time these FLOPs would take at `ceilings` (TFLOP/s), over `ms`."""
        return (self.bf16 / ceilings["bf16"] + self.fp8 / ceilings["fp8"]) / 1e9 / ms


def model_flops(spec: RunSpec, vocab: int, converted: tuple[str, ...]) -> Flops:
    """Return the FLOPs of one training step whose linears `converted` run the recipe of `spec`."""
    fp8 = 0.0
    total = attention_flops(spec)
    for shape in linear_shapes(spec.model, vocab):
        flops = linear_flops(shape.k, shape.n, spec.train.tokens_per_step)
        total += flops
        fp8 += flops * fp8_gemm_share(spec.precision.recipe) * (shape.fqn in converted)
    return Flops(total - fp8, fp8)


def amdahl_ms(
    control_ms: float,
    counts: Mapping[Shape, int],
    control: Mapping[Shape, float],
    test: Mapping[Shape, float],
) -> float:
    """Return the predicted step: the control's, each converted linear's time exchanged for the recipe's."""
    return control_ms - sum(count * (control[s] - test[s]) for s, count in counts.items())


# --- one linear --------------------------------------------------------------------------------------------


def precision_fields(recipe: str, device: torch.device) -> dict[str, Any]:
    """Return recipe and backend: torchao's kernels; on a CPU, the emulation where it has none."""
    if recipe != "blockwise":
        return {"recipe": recipe, "backend": "torchao_float8"}
    return {"recipe": recipe, "backend": "torchao_blockwise" if device.type == "cuda" else "reference"}


class LinearArm:
    """Forward and backward pass of one linear as a compiled block runs it: fp32 master, bf16 autocast."""

    def __init__(self, recipe: str, shape: Shape, tokens: int, setting: Setting) -> None:
        started = time.perf_counter()
        device = setting.device
        k, n = shape
        self.device = device
        with torch.device(device):
            model = nn.Sequential(nn.Linear(k, n, bias=False))
            self.x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
            self.grad = torch.randn(tokens, n, dtype=torch.bfloat16)
        nn.init.normal_(model[0].weight, std=0.02)
        if recipe != "bf16":
            fields = precision_fields(recipe, device)
            plan = LayerPlan((LayerDecision("0", fp8=True, reason=""),), 1.0)
            precision.apply(model, plan, spec_precision(fields))
        self.layer = model[0]
        self.call: Callable[[Tensor], Tensor] = self.layer
        if setting.compile != "off":
            # One code object serves every size here; without this the second size would compile for all sizes.
            self.call = torch.compile(self.layer, dynamic=False)
        self.step()
        timing.synchronise(device)
        self.first_step_s = time.perf_counter() - started

    def step(self) -> None:
        """Compute output, grad_input and grad_weight."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            out = self.call(self.x)
        out.backward(self.grad)
        self.x.grad = self.layer.weight.grad = None


def spec_precision(fields: dict[str, Any]) -> Any:
    """Return a `PrecisionSpec` of these fields."""
    return RunSpec.model_fields["precision"].annotation.model_validate(fields)


@dataclass(frozen=True)
class LinearTime:
    """Milliseconds of one linear's forward and backward: by events, and by kernels where they can be seen."""

    wall_ms: float
    kernels: timing.KernelTimes | None

    @property
    def ms(self) -> float:
        """The device's time: without the gaps that a lone linear's launches leave and a model's do not."""
        total = self.kernels.total_ms if self.kernels else self.wall_ms
        return min(total, self.wall_ms)


class Linears:
    """Times of single linears, each measured once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.known: dict[tuple[str, Shape, int], LinearTime] = {}

    def of_arm(self, arm: LinearArm, walls: list[float]) -> LinearTime:
        """Return the time of an arm whose rounds are already timed."""
        kernels = timing.kernel_times(arm.step, self.setting.device, self.setting.linear_calls)
        return LinearTime(statistics.median(walls), kernels)

    def time(self, recipe: str, shape: Shape, tokens: int) -> LinearTime:
        """Measure, or return what was measured."""
        key = (recipe, shape, tokens)
        if key not in self.known:
            arm = LinearArm(recipe, shape, tokens, self.setting)
            calls = self.setting.linear_calls
            timing.timed_calls(arm.step, self.setting.device, calls)
            walls = [timing.timed_calls(arm.step, self.setting.device, calls) for _ in range(3)]
            self.known[key] = self.of_arm(arm, walls)
        return self.known[key]


def _kernel_text(kernels: timing.KernelTimes | None) -> str:
    return f" = GEMMs {kernels.gemm_ms:.3f} + casts {kernels.other_ms:.3f}" if kernels else ""


def linear_row(
    report: Report, linears: Linears, ceilings: Mapping[str, float], recipe: str, width: int
) -> None:
    """Measure one width under one recipe against BF16."""
    setting = linears.setting
    shape = (width, width)
    arms = {name: LinearArm(name, shape, setting.tokens, setting) for name in dict.fromkeys(("bf16", recipe))}
    works = {name: arm.step for name, arm in arms.items()}
    timing.interleaved(works, setting.device, rounds=1, calls=setting.linear_calls)  # warm-up
    times = timing.interleaved(works, setting.device, rounds=setting.rounds, calls=setting.linear_calls)
    for name, arm in arms.items():
        linears.known.setdefault((name, shape, setting.tokens), linears.of_arm(arm, times[name]))
    measured = linears.known[recipe, shape, setting.tokens]
    ms, speedup = statistics.median(times[recipe]), timing.ratio(times["bf16"], times[recipe])
    total = linear_flops(width, width, setting.tokens)
    fp8 = total * fp8_gemm_share(recipe)
    tflops, share = total / ms / 1e9, Flops(total - fp8, fp8).share_of_ceiling(ms, ceilings)
    report.add(
        f"linear {width:>5} {recipe:<19} {ms:7.3f} ms{_kernel_text(measured.kernels)}  {tflops:6.0f} TFLOP/s "
        f"({share:4.0%} of ceiling)  {speedup:5.2f}x BF16  first step {arms[recipe].first_step_s:5.1f} s",
        section="linear",
        width=width,
        tokens=setting.tokens,
        recipe=recipe,
        ms=ms,
        gemm_ms=measured.kernels.gemm_ms if measured.kernels else None,
        cast_ms=measured.kernels.other_ms if measured.kernels else None,
        tflops=tflops,
        share_of_ceiling=share,
        speedup=speedup,
        first_step_s=arms[recipe].first_step_s,
        rounds_ms=times,
    )
    if (recipe, width) in LINEAR_TARGETS:
        report.target(f"{recipe} on a {width}-wide linear", speedup, LINEAR_TARGETS[recipe, width])


# --- a model -----------------------------------------------------------------------------------------------


def recipe_document(
    case: ModelCase, recipe: str, setting: Setting, steps: int, corpus: str
) -> dict[str, Any]:
    """Return a recipe file's content that trains `case` under `recipe`."""
    return {
        "name": "throughput",
        "base": {
            "model": {**case.sizes, "vocab_size": case.vocab},
            "data": {"source": "bin", "path": corpus},
            "optim": {"lr": 1e-4, "warmup_steps": 1},
            "train": {
                "steps": steps, "batch_size": case.batch, "context": case.context, "compute": "bf16-mixed",
                "compile": setting.compile, "eval_every": steps, "eval_sequences": case.batch,
                "device": setting.device.type,
            },
            "precision": {
                **precision_fields(recipe, setting.device), "unit": "block",
                "keep_first": case.keep, "keep_last": case.keep,
            },
        },
        "seeds": [0],
    }  # fmt: skip


def spec_of(case: ModelCase, recipe: str, setting: Setting) -> RunSpec:
    """Return the specification of a bare run."""
    base = recipe_document(case, recipe, setting, 1000, "none.bin")["base"]
    return RunSpec.model_validate({**base, "seed": 0})


def train_step(
    model: DecoderLM, optimizer: torch.optim.Optimizer, rows: Tensor, device: torch.device, clip: float | None
) -> Tensor:
    """Do one optimizer step of a bare loop; returns the loss on the device."""
    rows = rows.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def random_rows(case: ModelCase, device: torch.device, count: int = 4) -> list[Tensor]:
    """Return batches of random tokens on the host, pinned where there is a GPU."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.context + 1)
    batches = [torch.randint(case.vocab, shape, generator=generator) for _ in range(count)]
    return [rows.pin_memory() for rows in batches] if device.type == "cuda" else batches


class BareArm:
    """A bare PyTorch loop: model, fused AdamW, clipping and schedule of a run, without Lightning or recording.

    The weights are drawn on the device, which is faster and changes no timing.
    """

    def __init__(self, case: ModelCase, recipe: str, setting: Setting) -> None:
        started = time.perf_counter()
        self.device = setting.device
        self.below = timing.reset_peak(self.device)
        self.spec = spec_of(case, recipe, setting)
        with torch.device(self.device):
            self.model = DecoderLM(self.spec.model, case.vocab)
        for parameter in self.model.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=self.spec.model.init_std)
        plan = layer_policy.resolve(linear_shapes(self.spec.model, case.vocab), self.spec.precision)
        self.converted = precision.apply(self.model, plan, self.spec.precision).converted
        if self.spec.train.compile == "blocks":
            module.compile_blocks(self.model)
        self.optimizer, self.schedule = self._optimizer()
        self.rows = itertools.cycle(random_rows(case, self.device))
        self.step()
        timing.synchronise(self.device)
        self.first_step_s = time.perf_counter() - started

    def _optimizer(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optim = self.spec.optim
        groups = [
            {
                "params": [p for p in self.model.parameters() if p.ndim >= 2],
                "weight_decay": optim.weight_decay,
            },
            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (optim.beta1, optim.beta2)
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=optim.fused)
        steps = self.spec.train.steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps, optim))
        return optimizer, schedule

    def step(self) -> None:
        """Train one step."""
        rows = next(self.rows)
        self.loss = train_step(self.model, self.optimizer, rows, self.device, self.spec.optim.clip_norm)
        self.schedule.step()

    def warm(self) -> float | None:
        """Run a few steps and return the peak of memory in GiB, other arms' share left out."""
        self.step()
        timing.reset_peak(self.device)
        for _ in range(WARM_STEPS):
            self.step()
        timing.synchronise(self.device)
        return timing.peak_gib(self.device, self.below)


def shape_counts(spec: RunSpec, vocab: int, converted: tuple[str, ...]) -> Counter[Shape]:
    """Return how many converted linears there are of each size."""
    return Counter((s.k, s.n) for s in linear_shapes(spec.model, vocab) if s.fqn in converted)


def free() -> None:
    """Give memory of dropped models back to the device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class ModelSection:
    """One model: the control stays while each recipe is measured beside it."""

    def __init__(
        self, case: ModelCase, report: Report, linears: Linears, ceilings: Mapping[str, float]
    ) -> None:
        self.case = case
        self.report = report
        self.linears = linears
        self.ceilings = ceilings
        self.control: BareArm | None = None

    def close(self) -> None:
        """Drop the control, and the code compiled for its sizes: other sizes would compile for all sizes at once."""
        self.control = None
        torch._dynamo.reset()
        free()

    def bf16(self) -> None:
        """Build the control and report it."""
        self.control = BareArm(self.case, "bf16", self.linears.setting)
        memory = self.control.warm()
        setting = self.linears.setting
        times = timing.interleaved(
            {"bf16": self.control.step}, setting.device, rounds=setting.rounds, calls=setting.model_calls
        )
        self._row("bf16", self.control, times, memory, {})

    def recipe(self, recipe: str) -> None:
        """Measure one recipe against the control, in turns, and against its prediction."""
        if self.control is None:
            raise RuntimeError("the BF16 control was not measured")
        setting = self.linears.setting
        arm = BareArm(self.case, recipe, setting)
        try:
            memory = arm.warm()
            works = {"bf16": self.control.step, recipe: arm.step}
            times = timing.interleaved(
                works, setting.device, rounds=setting.rounds, calls=setting.model_calls
            )
            self._row(recipe, arm, times, memory, {})
            predicted = self._prediction(recipe, arm, statistics.median(times["bf16"]))
        finally:
            del arm
            free()
        self._prediction_row(recipe, times, predicted)

    def _row(
        self,
        recipe: str,
        arm: BareArm,
        times: dict[str, list[float]],
        memory: float | None,
        extra: dict[str, Any],
    ) -> None:
        ms, speedup = statistics.median(times[recipe]), timing.ratio(times["bf16"], times[recipe])
        flops = model_flops(arm.spec, self.case.vocab, arm.converted)
        share, rate = flops.share_of_ceiling(ms, self.ceilings), self.case.tokens / ms * 1e3
        gib = "" if memory is None else f"  peak {memory:5.1f} GiB"
        self.report.add(
            f"{self.case.name} {recipe:<19} {ms:8.2f} ms  {rate:10,.0f} tokens/s  "
            f"{flops.total / ms / 1e9:5.0f} TFLOP/s ({share:4.0%} of ceiling)  "
            f"{speedup:5.3f}x BF16{gib}  first step {arm.first_step_s:5.1f} s",
            section=self.case.name,
            recipe=recipe,
            ms=ms,
            tokens_per_s=rate,
            tflops=flops.total / ms / 1e9,
            fp8_flop_share=flops.fp8 / flops.total,
            share_of_ceiling=share,
            speedup=speedup,
            peak_gib=memory,
            first_step_s=arm.first_step_s,
            parameters=parameter_count(arm.spec.model, self.case.vocab),
            converted=len(arm.converted),
            last_loss=float(arm.loss),
            rounds_ms=times,
            **extra,
        )

    def _prediction(self, recipe: str, arm: BareArm, control_ms: float) -> dict[str, Any]:
        """Measure each linear's size alone and return the prediction, with casts and without."""
        counts = shape_counts(arm.spec, self.case.vocab, arm.converted)
        pairs = {
            s: (
                self.linears.time("bf16", s, self.case.tokens),
                self.linears.time(recipe, s, self.case.tokens),
            )
            for s in counts
        }
        control = {s: pair[0].ms for s, pair in pairs.items()}
        test = {s: pair[1].ms for s, pair in pairs.items()}
        gemms = {s: p[1].kernels.gemm_ms if p[1].kernels else p[1].ms for s, p in pairs.items()}
        return {
            "ms": amdahl_ms(control_ms, counts, control, test),
            "casts_free_ms": amdahl_ms(control_ms, counts, control, gemms),
            "linears": [
                {
                    "k": k,
                    "n": n,
                    "count": count,
                    "bf16": asdict(pairs[k, n][0]),
                    "recipe": asdict(pairs[k, n][1]),
                }
                for (k, n), count in counts.items()
            ],
        }

    def _prediction_row(self, recipe: str, times: dict[str, list[float]], predicted: dict[str, Any]) -> None:
        control_ms = statistics.median(times["bf16"])
        reached = timing.ratio(times["bf16"], times[recipe])
        speedup, free_casts = control_ms / predicted["ms"], control_ms / predicted["casts_free_ms"]
        self.report.add(
            f"{self.case.name} {recipe:<19} Amdahl {speedup:.3f}x (casts free {free_casts:.3f}x), "
            f"reached {reached:.3f}x = {reached / speedup:.3f} of it",
            section=self.case.name + "-amdahl",
            recipe=recipe,
            predicted_speedup=speedup,
            casts_free_speedup=free_casts,
            reached_speedup=reached,
            share_of_prediction=reached / speedup,
            linears=predicted["linears"],
        )
        self.report.target(
            f"{self.case.name} {recipe}, share of the Amdahl prediction", reached / speedup, AMDAHL_TARGET
        )


# --- our runner --------------------------------------------------------------------------------------------


class Turns(L.Callback):
    """Lets the runner and a bare loop of the very same model and optimizer train in turns.

    A segment is `length` steps, a multiple of the recorder's flush, with the device idle at both ends; the bare
    loop's follow each other while Lightning waits in this callback. The first round is warm-up.
    """

    def __init__(self, case: ModelCase, setting: Setting, started: float) -> None:
        self.device = setting.device
        self.length = setting.segment
        self.rows = itertools.cycle(random_rows(case, self.device))
        self.started = started
        self.first_step_s = 0.0
        self.ms: dict[str, list[float]] = {"runner": [], "bare": []}
        self.peak: dict[str, float] = {}
        self._clock: float | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change sides after each segment."""
        if trainer.global_step == 1:
            timing.synchronise(self.device)
            self.first_step_s = time.perf_counter() - self.started
        if trainer.global_step % self.length:
            return
        if self._clock is not None:
            self._end("runner")
        self._begin()
        for _ in range(self.length):
            self._bare_step(trainer, pl_module)
        self._end("bare")
        self._begin()

    def result(self) -> tuple[float, list[float], list[float]]:
        """Return the bare loop's time over the runner's, each segment against its two neighbours; and both times."""
        bare, ours = self.ms["bare"][1:], self.ms["runner"][1:]
        pairs = zip(itertools.pairwise(bare), ours, strict=True)
        return statistics.median((a + b) / 2 / ms for (a, b), ms in pairs), bare, ours

    def _bare_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, module.LMModule)
        clip = pl_module.spec.optim.clip_norm
        train_step(pl_module.decoder, trainer.optimizers[0], next(self.rows), self.device, clip)

    def _begin(self) -> None:
        timing.synchronise(self.device)
        timing.reset_peak(self.device)
        self._clock = time.perf_counter()

    def _end(self, side: str) -> None:
        timing.synchronise(self.device)
        assert self._clock is not None
        self.ms[side].append((time.perf_counter() - self._clock) * 1e3 / self.length)
        self.peak[side] = timing.peak_gib(self.device) or 0.0


def random_corpus(path: Path, case: ModelCase) -> None:
    """Write a token file of random tokens, long enough for the batches and the held-out set."""
    from fp8parity.data import write_tokens

    generator = np.random.default_rng(0)
    sizes = (8 * case.batch * (case.context + 1), 2 * case.batch * (case.context + 1))
    train, held_out = (generator.integers(case.vocab, size=size).astype(np.uint16) for size in sizes)
    about = {"tokenizer": "none", "tokenizer_sha256": None, "source": "random tokens", "documents": 2}
    write_tokens(path, [train], [held_out], vocab_size=case.vocab, **about)


def runner_order(folder: Path, case: ModelCase, recipe: str, setting: Setting) -> runner.RunOrder:
    """Lay out a study as `fp8parity run` does and return the order of its run under `recipe`."""
    # The last step evaluates, so one more than the segments need; rounds + warm-up.
    steps = setting.segment * (setting.rounds + 2) + 1
    random_corpus(folder / "corpus.bin", case)
    path = folder / "recipe.yaml"
    # A study needs a test arm; a study of a recipe has the control as well.
    arm = recipe if recipe != "bf16" else "tensorwise"
    document = recipe_document(case, arm, setting, steps, str(folder / "corpus.bin"))
    path.write_text(
        yaml.safe_dump({**document, "runtime": {"checkpoint_every": 10 * steps}}), encoding="utf-8"
    )
    orders = [runner.read_order(d) for d in study.lay_out(matrix.read(path), folder / "out")]
    return next(order for order in orders if order.spec.precision.recipe == recipe)


def runner_row(report: Report, case: ModelCase, recipe: str, setting: Setting) -> None:
    """Measure our runner against a bare loop of the same model and optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        order = runner_order(Path(folder), case, recipe, setting)
        threads = torch.get_num_threads()
        turns = Turns(case, setting, time.perf_counter())
        runner._quiet()
        runner._prepare_process(order.spec)
        session = runner._session(order)
        trainer = runner._trainer(session)
        trainer.callbacks.append(turns)
        try:
            trainer.fit(session.module, session.data)
            rate = session.recorder.tokens_per_second
        finally:
            session.recorder.writer.close()
            torch.set_num_threads(threads)
            del session, trainer
            free()
    share, bare, ours = turns.result()
    gib = (
        f"  peak {turns.peak['runner']:.1f} against {turns.peak['bare']:.1f} GiB"
        if setting.device.type == "cuda"
        else ""
    )
    report.add(
        f"{case.name} runner {recipe:<12} {statistics.median(ours):8.2f} ms, "
        f"bare loop {statistics.median(bare):8.2f} ms: {share:.3f} of its speed{gib}  "
        f"first step {turns.first_step_s:5.1f} s (proof included)",
        section=case.name + "-runner",
        recipe=recipe,
        runner_ms=statistics.median(ours),
        bare_ms=statistics.median(bare),
        share_of_bare=share,
        peak_gib=turns.peak,
        first_step_s=turns.first_step_s,
        recorded_tokens_per_s=rate,
        measured_tokens_per_s=case.tokens / statistics.median(ours) * 1e3,
        rounds_ms=turns.ms,
    )
    report.target(f"{case.name} {recipe}, our runner's share of the bare loop's speed", share, RUNNER_TARGET)


# --- all of it ---------------------------------------------------------------------------------------------

Item = tuple[str, "Callable[[], None]", bool]
"""Label, what to do, and whether it must run even when time is up (closing)."""


def items(options: argparse.Namespace, setting: Setting, report: Report) -> Iterator[Item]:
    """Yield what is to be measured, in order."""
    linears, ceilings = Linears(setting), dict.fromkeys(("bf16", "fp8"), 1.0)

    def measure_ceilings() -> None:
        for kind in ceilings:
            ceilings[kind] = timing.gemm_ceiling(
                kind, setting.device, setting.ceiling_shapes, setting.linear_calls
            )
        line = f"ceiling of one GEMM: bf16 {ceilings['bf16']:.0f}, fp8 {ceilings['fp8']:.0f} TFLOP/s"
        report.add(line, section="ceiling", **ceilings)

    yield "ceilings", measure_ceilings, False
    recipes = options.recipes
    if "linear" in options.only:
        for width, recipe in itertools.product(setting.widths, ("bf16", *recipes)):
            yield (
                f"linear {width} {recipe}",
                lambda w=width, r=recipe: (linear_row(report, linears, ceilings, r, w), free())[0],
                False,
            )
        yield "linear end", torch._dynamo.reset, True
    for name, case in setting.cases.items():
        if name not in options.only:
            continue
        section = ModelSection(case, report, linears, ceilings)
        for recipe in options.runner if case.runner else ():
            yield f"{name} runner {recipe}", lambda c=case, r=recipe: runner_row(report, c, r, setting), False
        yield f"{name} bf16", section.bf16, False
        for recipe in recipes:
            yield f"{name} {recipe}", lambda s=section, r=recipe: s.recipe(r), False
        yield f"{name} end", section.close, True


def run(options: argparse.Namespace, setting: Setting, report: Report) -> None:
    """Measure item by item until done or out of time; one that fails does not end the others."""
    started = time.monotonic()
    for label, work, always in items(options, setting, report):
        late = options.seconds is not None and time.monotonic() - started > options.seconds
        if late and not always:
            report.note("not_run", f"{label}: {options.seconds:.0f} s are over")
            continue
        begun = time.monotonic()
        try:
            work()
        except Exception as error:  # an out-of-memory case must not cost the remaining rows
            report.note("errors", f"{label}: {type(error).__name__}: {str(error).strip()[:500]}")
        finally:
            free()
        if not always:
            print(
                f"    ({label}: {time.monotonic() - begun:.0f} s, {time.monotonic() - started:.0f} s so far)",
                flush=True,
            )


def markdown(document: dict[str, Any]) -> str:
    """Return the rows as tables, one per section."""
    columns = {
        "ms": ("ms", ".2f"), "gemm_ms": ("GEMMs", ".2f"), "cast_ms": ("casts", ".2f"),
        "runner_ms": ("runner ms", ".2f"), "bare_ms": ("bare ms", ".2f"), "share_of_bare": ("runner / bare", ".3f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "tflops": ("TFLOP/s", ".0f"), "share_of_ceiling": ("of ceiling", ".0%"), "speedup": ("vs BF16", ".2f"),
        "predicted_speedup": ("Amdahl", ".3f"), "casts_free_speedup": ("casts free", ".3f"),
        "reached_speedup": ("reached", ".3f"), "share_of_prediction": ("of prediction", ".3f"),
        "peak_gib": ("peak GiB", ".1f"), "first_step_s": ("first step s", ".0f"), "bf16": ("bf16 TFLOP/s", ".0f"),
        "fp8": ("fp8 TFLOP/s", ".0f"),
    }  # fmt: skip
    lines: list[str] = []
    for section, group in itertools.groupby(document["rows"], key=lambda row: row["section"]):
        rows = list(group)
        names = [n for n in ("width", "recipe") if n in rows[0]]
        shown = [c for c in columns if isinstance(rows[0].get(c), int | float)]
        lines += [
            "",
            f"**{section}**",
            "",
            "| " + " | ".join([*names, *(columns[c][0] for c in shown)]) + " |",
        ]
        lines.append("| " + " | ".join(["---"] * (len(names) + len(shown))) + " |")
        for row in rows:
            cells = [str(row[n]) for n in names] + [format(row[c], columns[c][1]) for c in shown]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [f"* falls short: {line}" for line in document["shortfalls"]]
    lines += [
        f"* {kind.replace('_', ' ')}: {line}" for kind in ("not_run", "errors") for line in document[kind]
    ]
    return "\n".join(lines).strip()


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_list, default=["linear", "1b", "8b"], help="sections")
    parser.add_argument("--recipes", type=_list, default=list(RECIPES), help="recipes to compare with BF16")
    parser.add_argument(
        "--runner", type=_list, default=["bf16", "tensorwise"], help="recipes that our runner trains"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--seconds", type=float, help="start nothing more after this long")
    parser.add_argument("--out", type=Path, help="write rows to this JSON file as they come")
    parser.add_argument(
        "--tiny", action="store_true", help="a few seconds on a CPU; the figures mean nothing"
    )
    parser.add_argument("--warm-caches", action="store_true", help="use the machine's compile caches")
    parser.add_argument(
        "--markdown", type=Path, help="print the rows of this JSON file as tables, measure nothing"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def cold_caches(wanted: bool) -> Iterator[None]:
    """Compile into an empty folder, so that the time to the first step is what a first run waits."""
    if not wanted:
        yield
        return
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {name: str(Path(folder) / name.split("_")[0].lower()) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when a figure falls short or an item failed."""
    options = _options(argv)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))))
        return 0
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    setting = tiny() if options.tiny else full()
    if setting.device.type == "cuda" and not torch.cuda.is_available():
        print("throughput.py needs a CUDA device; --tiny runs on a CPU", file=sys.stderr)
        return 64
    setting = replace(setting, rounds=options.rounds or setting.rounds)
    torch._dynamo.config.recompile_limit = 64
    report = Report(
        options.out, {"environment": environment.fingerprint(setting.device.type), "tiny": options.tiny}
    )
    print("  ".join(f"{k} {v}" for k, v in report.document["environment"].items()), flush=True)
    with cold_caches(not options.warm_caches):
        run(options, setting, report)
    found = report.document
    print(f"\n{len(found['rows'])} rows, {len(found['shortfalls'])} short of target, {len(found['errors'])} errors, "
          f"{len(found['not_run'])} not run")  # fmt: skip
    for line in (*found["shortfalls"], *found["errors"]):
        print(f"  {line}")
    return 1 if found["shortfalls"] or found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
