"""Planted faults, each a known way for an FP8 run not to be the declared FP8 run; each must be named."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8parity.errors import UsageError
from fp8parity.layer_policy import LayerDecision, LayerPlan, resolve
from fp8parity.precision import reference, torchao_float8
from fp8parity.precision.comparison import compare
from fp8parity.precision.effective import accumulation_differences, effective_differences
from fp8parity.precision.execution import observe
from fp8parity.shapes import LinearShape
from fp8parity.spec import PrecisionSpec

if TYPE_CHECKING:
    from collections.abc import Callable


def precision(recipe: str, **kwargs: Any) -> PrecisionSpec:
    return PrecisionSpec(recipe=recipe, **{"backend": "reference", **kwargs})  # type: ignore[arg-type]


def plan_of(*fqns: str, bf16: tuple[str, ...] = ()) -> LayerPlan:
    return LayerPlan(tuple(LayerDecision(f, f not in bf16, "") for f in fqns), 1.0)


def train_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    return step


def evaluation(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.eval()
        with torch.no_grad():
            model(x)

    return step


def two_linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def test_nothing_converted() -> None:
    model = two_linears()
    differences = compare(observe(model, train_step(model, X)), plan_of("0", "2"), "tensorwise")
    assert differences[0] == "no FP8 GEMM ran in training: recipe tensorwise is declared, the arm is BF16"
    assert "0: GEMM output ran unquantised in training: 0 FP8 GEMMs in 1 forward calls" in differences


def test_one_layer_not_converted() -> None:
    model = two_linears()
    reference.convert(model[0], precision("rowwise"))  # type: ignore[arg-type]
    differences = compare(observe(model, train_step(model, X)), plan_of("0", "2"), "rowwise")
    assert all(d.startswith("2: ") for d in differences)
    assert any("grad_weight ran 0 times in FP8, expected 1" in d for d in differences)


def test_a_layer_converted_that_the_plan_keeps_in_bf16() -> None:
    model = two_linears()
    for layer in (model[0], model[2]):
        reference.convert(layer, precision("rowwise"))  # type: ignore[arg-type]
    differences = compare(observe(model, train_step(model, X)), plan_of("0", "2", bf16=("2",)), "rowwise")
    assert differences == ["2: declared BF16, but 3 FP8 GEMMs ran in training"]


def test_a_filter_that_matches_nothing() -> None:
    shapes = [LinearShape(f"blocks.{i}.up", 32, 48, i, i, i) for i in range(3)]
    with pytest.raises(UsageError, match=r"precision\.include: 'layers\.\*' matches none of the 3 linears"):
        resolve(shapes, precision("rowwise", include=("layers.*",)))
    with pytest.raises(UsageError, match="leave none of 3 gemms in FP8: the arm would be BF16"):
        resolve(shapes, precision("rowwise", keep_first=2, keep_last=2))


class RunsLastRegisteredFirst(nn.Module):
    """Registration order a, b, c; execution order c, a, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(torch.relu(self.c(x)))))
        return out


def test_first_n_given_in_registration_order() -> None:
    model = RunsLastRegisteredFirst()
    registered = [LinearShape(name, 32, 32, i, i, i) for i, (name, _) in enumerate(model.named_children())]
    plan = resolve(registered, precision("rowwise", keep_first=1))
    assert plan.fp8_fqns == ("b", "c")  # keeps a, but c runs first
    for name in plan.fp8_fqns:
        reference.convert(getattr(model, name), precision("rowwise"))
    record = observe(model, train_step(model, X))
    assert record.executed("train") == ("c", "a", "b")
    differences = compare(record, plan, "rowwise")
    assert len(differences) == 1
    assert differences[0].startswith("c: executes at position 0, where the layer plan has a; ")
    assert "registration order?" in differences[0]


def test_emulation_that_drops_the_recipe() -> None:
    # as one training framework does: rowwise asked for, the emulated configuration built afresh, so
    # tensorwise
    config = torchao_float8.Float8LinearConfig(emulate=True)
    layer = torchao_float8.Float8Linear.from_float(nn.Linear(64, 48, bias=False), config=config)
    model = nn.Sequential(layer)
    declared = precision("rowwise", backend="torchao_float8")
    x = torch.randn(16, 64)
    assert (
        "no FP8 GEMM ran in training"
        in compare(observe(model, train_step(model, x)), plan_of("0"), "rowwise")[0]
    )
    on_bf16 = torchao_float8.Float8Linear.from_float(nn.Linear(64, 48, bias=False).bfloat16(), config=config)
    differences = effective_differences("0", on_bf16, declared)
    assert [d.split()[2] for d in differences] == ["output", "grad_input", "grad_weight"]
    assert all("computes tensorwise's" in d and "declared rowwise" in d for d in differences)


def test_one_cast_config_shared_by_input_and_grad_output() -> None:
    from torchao.float8.config import CastConfig

    shared = CastConfig()  # torchao fills its target_dtype in place, for input first: e4m3
    config = torchao_float8.Float8LinearConfig(cast_config_input=shared, cast_config_grad_output=shared)
    model = two_linears()
    model[0] = torchao_float8.ComputeCastFloat8Linear.from_float(model[0], config=config)
    differences = compare(observe(model, train_step(model, X)), plan_of("0", "2", bf16=("2",)), "tensorwise")
    assert differences == [
        "0: GEMM grad_input multiplied e4m3fn x e4m3fn in training, declared e5m2 x e4m3fn",
        "0: GEMM grad_weight multiplied e4m3fn x e4m3fn in training, declared e5m2 x e4m3fn",
    ]
    by_value = effective_differences("0", model[0], precision("tensorwise"))
    assert len(by_value) == 2
    assert all("computes grad_output e4m3fn, tensor, fp32 scale" in d for d in by_value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(self.attn(x, x, x, need_weights=False)[0])
        return out


def test_out_proj_converted_but_never_executed() -> None:
    model = Attention()
    config = torchao_float8.Float8LinearConfig()
    model.attn.out_proj = torchao_float8.ComputeCastFloat8Linear.from_float(
        model.attn.out_proj, config=config
    )
    reference.convert(model.proj, precision("tensorwise"))
    record = observe(model, train_step(model, X[None]))
    differences = compare(record, plan_of("attn.out_proj", "proj"), "tensorwise")
    assert differences == ["attn.out_proj: converted, but its forward was never executed in training"]


def test_evaluation_that_silently_runs_unquantised() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    fqns = ("linear1", "linear2")
    for name in fqns:
        reference.convert(getattr(model, name), precision("rowwise", weight_cast_source="master"))
    plan = plan_of("self_attn.out_proj", *fqns, bf16=("self_attn.out_proj",))
    x = torch.randn(2, 8, 32)
    record = observe(model, train_step(model, x), evaluation(model, x))
    assert [record.layer(n, "train").calls for n in fqns] == [1, 1]
    assert compare(record, plan, "rowwise") == [
        "linear1: converted, but its forward was never executed in evaluation",
        "linear2: converted, but its forward was never executed in evaluation",
    ]


class SilentOnRecompute(reference.ReferenceLinear):
    """FP8 in the forward pass, plain BF16 when the backward pass recomputes it."""

    def forward(self, input: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:
            return super().forward(input)
        output: Tensor = _SavesTheSame.apply(input.bfloat16(), self.weight.bfloat16())
        return output


class _SavesTheSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda t: self.b(torch.relu(self.a(t))), x, use_reentrant=False)
        return out


def test_recomputation_in_bf16_of_an_fp8_forward() -> None:
    model = Checkpointed()
    for layer in (model.a, model.b):
        reference.convert(layer, precision("rowwise"))
    x = X.clone().requires_grad_()
    sound = observe(model, train_step(model, x))
    assert compare(sound, plan_of("a", "b"), "rowwise", checkpointing=True) == []
    model.a.__class__ = SilentOnRecompute
    differences = compare(
        observe(model, train_step(model, x)), plan_of("a", "b"), "rowwise", checkpointing=True
    )
    assert differences == [
        "a: GEMM output ran in FP8 in 1 forward calls, but not in the 1 recomputations of the backward pass"
    ]


def test_declared_recomputation_that_does_not_happen() -> None:
    model = two_linears()
    for layer in (model[0], model[2]):
        reference.convert(layer, precision("rowwise"))  # type: ignore[arg-type]
    record = observe(model, train_step(model, X))
    assert compare(record, plan_of("0", "2"), "rowwise", checkpointing=True) == [
        "activation checkpointing is declared, but no linear was recomputed"
    ]


class FrozenScale(reference.ReferenceLinear):
    """Divides the input by the amax of the first batch ever seen: a scale that is never updated."""

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "first_amax"):
            self.first_amax = input.detach().abs().amax()
        bounded = input.clamp(-self.first_amax, self.first_amax)
        return super().forward(input + (bounded - input).detach())


def test_scales_not_updated() -> None:
    layer = reference.convert(nn.Linear(64, 48), precision("tensorwise"))
    layer.__class__ = FrozenScale
    layer(torch.randn(16, 64))
    differences = effective_differences("ffn.up", layer, precision("tensorwise"))
    assert any(
        d.startswith("ffn.up: GEMM output does not scale input by its present amax") and "not updated" in d
        for d in differences
    )


class _Instead(torch.autograd.Function):
    """The second tensor in the forward pass, the gradient to the first."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, used: Tensor) -> Tensor:
        return used.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class CachedWeight(reference.ReferenceLinear):
    """Quantises the weight once and keeps it, as a per-step cache does that is not invalidated."""

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.weight.detach().clone()
        straight_through = _Instead.apply(self.weight, self.kept)
        output: Tensor = reference.ReferenceMatmul.apply(
            input.bfloat16(), straight_through.bfloat16(), self.plan
        )
        return output


def test_the_weight_cast_reused_after_an_update() -> None:
    layer = reference.convert(nn.Linear(64, 48, bias=False), precision("rowwise"))
    layer.__class__ = CachedWeight
    layer(torch.randn(16, 64))
    with torch.no_grad():
        layer.weight.mul_(1.01)  # the optimizer step after which the cache should be stale
    assert effective_differences("ffn.up", layer, precision("rowwise")) == [
        "ffn.up: GEMM output reuses an old cast of weight: a new one does not change it",
        "ffn.up: GEMM grad_input reuses an old cast of weight: a new one does not change it",
    ]


@pytest.mark.parametrize(("kept", "named"), [(-1, "micro-batch 4 of 4"), (0, "micro-batch 1 of 4")])
def test_only_one_micro_batchs_weight_gradient_kept(kept: int, named: str) -> None:
    model = two_linears()
    for layer in (model[0], model[2]):
        reference.convert(layer, precision("rowwise"))  # type: ignore[arg-type]
    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean() / len(batches)

    def faulty() -> None:
        loss(batches[kept]).backward()

    differences = accumulation_differences(model, faulty, [partial(loss, x) for x in batches])
    weights = [d for d in differences if ".weight" in d]
    assert [d.split(":")[0] for d in weights] == ["0.weight", "2.weight"]
    assert all(f"the accumulated gradient is that of {named} alone" in d for d in weights)


def test_stray_fp8_gemms_outside_every_linear_are_named() -> None:
    model = two_linears()
    layer = torchao_float8.Float8Linear.from_float(
        nn.Linear(32, 32), config=torchao_float8.Float8LinearConfig()
    )

    def step() -> None:
        train_step(model, X)()
        layer(X)

    differences = compare(observe(model, step), plan_of("0", "2", bf16=("0", "2")), "bf16")
    assert differences == ["1 FP8 GEMMs (aten::_scaled_mm) ran outside every linear in phase train"]


def test_a_compute_dtype_that_autocast_did_not_reach_is_seen_by_value() -> None:
    # torchao's own module on a CPU ignores autocast: it quantises the fp32 master although `compute` is
    # declared
    config = torchao_float8.Float8LinearConfig.from_recipe_name("tensorwise")
    layer = torchao_float8.Float8Linear.from_float(nn.Linear(256, 384, bias=False), config=config)
    differences = effective_differences("x", layer, precision("tensorwise", backend="torchao_float8"))
    assert any("weight cast from master" in d for d in differences)
