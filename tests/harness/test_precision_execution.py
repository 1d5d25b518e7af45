"""What the profiler saw equals what was declared, for every recipe, backend, phase and kind of step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8parity.casts import GEMMS, RECIPES
from fp8parity.layer_policy import LayerDecision, LayerPlan
from fp8parity.precision import reference, torchao_float8
from fp8parity.precision.bf16 import use_fp32_accumulation
from fp8parity.precision.comparison import compare, compare_compiled
from fp8parity.precision.effective import accumulation_differences, effective_differences
from fp8parity.precision.execution import FP8_GEMM_OPS, ExecutionRecord, StepCount, count_step, observe
from fp8parity.spec import PrecisionSpec

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = [("reference", r) for r in RECIPES] + [("torchao_float8", r) for r in torchao_float8.RECIPES]


class Mlp(nn.Module):
    """Three linears; `checkpointing` recomputes the first two in the backward pass."""

    def __init__(self, *, square: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        k, n = (32, 32) if square else (32, 48)
        self.up, self.down, self.head = nn.Linear(k, n), nn.Linear(n, k, bias=False), nn.Linear(k, 16)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            out: Tensor = x + self.down(torch.relu(self.up(x)))
            return out

        x = checkpoint(body, x, use_reentrant=False) if self.checkpointing and self.training else body(x)
        out: Tensor = self.head(x)
        return out


def precision(recipe: str, backend: str = "reference") -> PrecisionSpec:
    return PrecisionSpec(recipe=recipe, backend=backend)  # type: ignore[arg-type]


def converter(backend: str) -> Callable[[nn.Linear, PrecisionSpec], nn.Linear]:
    return reference.convert if backend == "reference" else torchao_float8.convert


def plan_of(fp8: tuple[str, ...], order: tuple[str, ...] = ("up", "down", "head")) -> LayerPlan:
    return LayerPlan(tuple(LayerDecision(f, f in fp8, "") for f in order), 0.5)


def converted(recipe: str, backend: str = "reference", **kwargs: bool) -> Mlp:
    torch.manual_seed(0)
    model = Mlp(**kwargs)
    for name in ("up", "down"):
        setattr(model, name, converter(backend)(getattr(model, name), precision(recipe, backend)))
    return model


def steps(
    model: nn.Module, *, micro_batches: int = 1, tokens: int = 16, wants_grad: bool = True
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step and an evaluation of [tokens, 32] inputs under bf16 autocast."""
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1)).requires_grad_(wants_grad)

    def train() -> None:
        model.train()
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        model.train()

    return train, evaluate


def counts(record: ExecutionRecord, fqn: str) -> tuple[int, ...]:
    return tuple(record.layer(fqn, "train").count(g) for g in GEMMS)


@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
@pytest.mark.parametrize("square", [False, True])
def test_a_sound_arm_is_proven_in_training_and_evaluation(backend: str, recipe: str, square: bool) -> None:
    model = converted(recipe, backend, square=square)
    record = observe(model, *steps(model, tokens=32 if square else 16))  # M = K = N when square
    assert compare(record, plan_of(("up", "down")), recipe) == []
    expected = tuple(int(RECIPES[recipe].gemm(g).is_fp8) for g in GEMMS)
    assert counts(record, "up") == counts(record, "down") == expected
    assert counts(record, "head") == (0, 0, 0)
    assert record.executed("train") == ("up", "down", "head")
    assert record.layer("up", "eval").count("output") == 1
    assert record.unattributed == ()
    declared = RECIPES[recipe].grad_input
    assert declared.left is not None
    assert dict(record.layer("up", "train").formats)["grad_input"] == (f"{declared.left.format} x e4m3fn",)


@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
def test_accumulation_and_recomputation_are_counted_apart(backend: str, recipe: str) -> None:
    model = converted(recipe, backend, checkpointing=True)
    record = observe(model, *steps(model, micro_batches=3))
    assert compare(record, plan_of(("up", "down")), recipe, checkpointing=True) == []
    layer = record.layer("up", "train")
    assert (layer.calls, layer.recomputed, layer.count("output"), layer.count("grad_input")) == (3, 3, 6, 3)
    assert record.layer("head", "train").recomputed == 0


@pytest.mark.parametrize("backend", ["reference", "torchao_float8"])
def test_an_input_that_wants_no_gradient_is_no_difference(backend: str) -> None:
    model = converted("rowwise", backend)
    record = observe(model, *steps(model, wants_grad=False))
    assert not record.layer("up", "train").input_wants_grad
    assert compare(record, plan_of(("up", "down")), "rowwise") == []


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("reference", "rowwise_with_gw_hp"), ("torchao_float8", "tensorwise")],
)
def test_the_compiled_step_runs_as_many_fp8_gemms(backend: str, recipe: str) -> None:
    model = converted(recipe, backend)
    record = observe(model, *steps(model))
    train, _ = steps(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    train()  # compiles, outside the count
    assert compare_compiled(record, count_step(train)) == []
    assert compare_compiled(record, StepCount(1, 1)) == [
        f"the compiled step ran 1 FP8 GEMMs, the uncompiled one {record.total('train')}"
    ]
    with torch.compiler.set_stance("force_eager"):
        (unproven,) = compare_compiled(record, count_step(train))
    assert unproven.startswith("train.compile: blocks is declared, but no compiled code ran")


def test_observing_leaves_no_trace_on_the_model() -> None:
    model = converted("rowwise")
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    patched = model.head.forward = model.head.forward  # type: ignore[method-assign]
    observe(model, *steps(model))
    assert vars(model.head)["forward"] == patched
    del model.head.forward
    after = {name: dict(vars(m)) for name, m in model.named_modules()}
    assert {n: set(v) for n, v in after.items()} == {n: set(v) for n, v in before.items()}


def test_a_control_is_proven_to_run_no_fp8() -> None:
    torch.manual_seed(0)
    model = Mlp()
    record = observe(model, *steps(model))
    assert compare(record, plan_of(()), "bf16") == []
    assert record.total("train") == record.total("eval") == 0


def test_a_bf16_evaluation_of_an_fp8_arm_is_compared_as_such() -> None:
    model = converted("rowwise")
    train, evaluate = steps(model)
    record = observe(model, train, evaluate)
    differences = compare(record, plan_of(("up", "down")), "rowwise", fp8_evaluation=False)
    assert differences == [
        "up: declared BF16, but 1 FP8 GEMMs ran in evaluation",
        "down: declared BF16, but 1 FP8 GEMMs ran in evaluation",
    ]


class PartlyFloat32(nn.Module):
    """Autocast is switched off around the first of two linears."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.a, self.b = first, nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.a(x.float())
        out: Tensor = self.b(x)
        return out


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_linear_that_computes_in_float32_is_a_difference(fp8: bool, accumulate: bool) -> None:
    model = PartlyFloat32(nn.Linear(32, 32, bias=False))
    if fp8:
        reference.convert(model.a, precision("rowwise"))
    if accumulate:
        use_fp32_accumulation(model)
    plan = plan_of(("a",) if fp8 else (), ("a", "b"))
    differences = compare(observe(model, *steps(model)), plan, "rowwise" if fp8 else "bf16")
    assert [d.split(", declared bfloat16 (train.compute)")[0] for d in differences] == [
        "a: computes in float32 in training",
        "a: computes in float32 in evaluation",
    ]
    assert all("precision.exclude" in d for d in differences)


class Float32Linear(nn.Linear):
    """A forward of its own: never FP8, and so the same in every arm."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(input.float(), self.weight).bfloat16().float()


def test_what_a_linear_of_ones_own_computes_in_is_its_own() -> None:
    model = PartlyFloat32(Float32Linear(32, 32, bias=False))
    assert compare(observe(model, *steps(model)), plan_of((), ("a", "b")), "bf16") == []
    model.a = nn.Linear(32, 32, bias=False)
    model.a.forward = partial(Float32Linear.forward, model.a)  # type: ignore[method-assign]
    assert compare(observe(model, *steps(model)), plan_of((), ("a", "b")), "bf16") == []


@pytest.mark.parametrize("accumulate", [False, True])
def test_bf16_parameters_without_autocast_are_the_declared_compute(accumulate: bool) -> None:
    model = Mlp(checkpointing=True).bfloat16()
    if accumulate:
        use_fp32_accumulation(model)
    x = torch.randn(16, 32).bfloat16()
    record = observe(model, lambda: model(x).float().square().mean().backward())
    assert record.layer("up", "train").computed == ("bfloat16",)
    assert compare(record, plan_of(()), "bf16", checkpointing=True) == []


def test_every_fp8_product_that_torch_has_is_counted() -> None:
    names = {f"aten::{name}" for name in dir(torch.ops.aten) if name.startswith("_scaled") and "mm" in name}
    assert names <= set(FP8_GEMM_OPS)
    assert {"aten::_scaled_grouped_mm"} <= names


# --- effective arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(256, 384), (32, 48)])
@pytest.mark.parametrize("source", ["compute", "master"])
@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
def test_a_sound_layer_computes_what_its_recipe_says(
    backend: str, recipe: str, source: str, sizes: tuple[int, int]
) -> None:
    spec = PrecisionSpec(recipe=recipe, backend=backend, weight_cast_source=source)  # type: ignore[arg-type]
    torch.manual_seed(0)
    linear = nn.Linear(*sizes)
    weight = linear.weight.detach().clone()
    layer = converter(backend)(linear, spec)
    assert effective_differences("layer", layer, spec) == []
    assert torch.equal(layer.weight, weight)
    assert layer.weight.grad is None


@pytest.mark.parametrize("declared", RECIPES)
@pytest.mark.parametrize("ran", RECIPES)
def test_any_other_recipe_is_told_apart_and_named(declared: str, ran: str) -> None:
    layer = reference.convert(nn.Linear(256, 384, bias=False), precision(ran))
    differences = effective_differences("layer", layer, precision(declared))
    changed = [g for g in GEMMS if RECIPES[declared].gemm(g) != RECIPES[ran].gemm(g)]
    assert [d.split()[2] for d in differences] == changed
    for difference in differences:
        assert f"; declared {declared}: " in difference
        gemm = RECIPES[ran].gemm(difference.split()[2])  # type: ignore[arg-type]
        assert (str(gemm.left) in difference) if gemm.is_fp8 else ("high precision (no FP8)" in difference)


def test_the_source_of_the_weight_cast_and_a_jittered_grid_are_told_apart() -> None:
    master = PrecisionSpec(recipe="tensorwise", backend="reference", weight_cast_source="master")
    layer = reference.convert(nn.Linear(64, 48), master)
    differences = effective_differences("layer", layer, precision("tensorwise"))
    assert len(differences) == 2
    assert all("weight cast from master" in d.split("; declared")[0] for d in differences)
    jittered = reference.convert(nn.Linear(64, 48), precision("rowwise"), 0.9)
    assert effective_differences("layer", jittered, precision("rowwise"), jitter=0.9) == []
    found = effective_differences("layer", jittered, precision("rowwise"))
    assert len(found) == 3
    assert all("matches no known cast" in d for d in found)


def test_sound_accumulation_is_no_difference() -> None:
    model = converted("rowwise")
    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean() / 3

    def accumulate() -> None:
        for x in batches:
            loss(x).backward()

    losses = [partial(loss, x) for x in batches]
    assert accumulation_differences(model, accumulate, losses) == []
    assert all(p.grad is None for p in model.parameters())
