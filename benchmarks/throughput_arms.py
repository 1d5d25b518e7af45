"""What `throughput.py` measures: sizes, a linear and a model to step, their FLOPs, and the Amdahl prediction."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpu_timing as timing
from fp8parity import layer_policy, module, precision
from fp8parity.casts import GEMMS
from fp8parity.layer_policy import LayerDecision, LayerPlan
from fp8parity.model import DecoderLM
from fp8parity.precision_rules import FP8_GEMMS
from fp8parity.schedule import lr_factor
from fp8parity.shapes import linear_shapes
from fp8parity.spec import PrecisionSpec, RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


# --- arithmetic --------------------------------------------------------------------------------------------


def fp8_gemm_share(recipe: str) -> float:
    """Return how many of a converted linear's three GEMMs the recipe multiplies in FP8, as a share."""
    return FP8_GEMMS[recipe] / len(GEMMS)


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
            precision.apply(model, plan, PrecisionSpec.model_validate(fields))
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
