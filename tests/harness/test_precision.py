from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8parity import precision
from fp8parity.errors import UsageError
from fp8parity.layer_policy import LayerDecision, LayerPlan, resolve
from fp8parity.model import DecoderLM, initialise
from fp8parity.precision.bf16 import Fp32AccumulateLinear, use_fp32_accumulation
from fp8parity.precision.torchao_float8 import ComputeCastFloat8Linear
from fp8parity.shapes import linear_shapes
from fp8parity.spec import ModelSpec, PrecisionSpec

MODEL = ModelSpec.model_validate({"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64})


def spec(recipe: str = "tensorwise", **changes: Any) -> PrecisionSpec:
    return PrecisionSpec.model_validate({"recipe": recipe, "keep_first": 4, "keep_last": 4, **changes})


def built(**changes: Any) -> DecoderLM:
    model = DecoderLM(MODEL.model_copy(update=changes), 64)
    initialise(model, 0)
    return model


def plan_of(*fqns: str) -> LayerPlan:
    return LayerPlan(tuple(LayerDecision(name, True, "rowwise") for name in fqns), 1.0)


def test_exactly_the_planned_linears_are_converted_with_their_parameters() -> None:
    model = built()
    before = {name: id(p) for name, p in model.named_parameters()}
    plan = resolve(linear_shapes(MODEL, 64), spec())
    record = precision.apply(model, plan, spec())
    found = [n for n, m in model.named_modules() if isinstance(m, ComputeCastFloat8Linear)]
    assert set(found) == set(plan.fp8_fqns) == set(record.converted)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert dict(record.skipped)["head"] == "output head"
    assert record.to_json()["gemm_dtypes"]["grad_weight"] == "e5m2 x e4m3"


def test_control_stays_untouched() -> None:
    model = built()
    record = precision.apply(model, resolve(linear_shapes(MODEL, 64), spec("bf16")), spec("bf16"))
    assert record.converted == ()
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_swap_keeps_training_flag_and_hooks() -> None:
    model = built()
    model.eval()
    calls = []
    target = model.get_submodule("blocks.1.attn.o_proj")
    target.register_forward_hook(lambda m, i, o: calls.append("forward"))
    target.register_full_backward_hook(lambda m, i, o: calls.append("backward"))
    precision.apply(model, resolve(linear_shapes(MODEL, 64), spec()), spec())
    assert not any(m.training for m in model.modules())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros((1, 16), dtype=torch.long)).float().sum().backward()
    assert calls == ["forward", "backward"]


def test_plan_of_another_model_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"disagree about the linears: only in the model \['head'\], only in the plan"
    ):
        precision.apply(nn.ModuleDict({"head": nn.Linear(16, 16)}), plan_of("tail"), spec())


class LoraLinear(nn.Linear):
    pass


def test_subclass_and_attention_projection_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"a is a LoraLinear with its own forward, which would be lost.*precision.exclude: \['a'\]",
    ):
        precision.apply(nn.ModuleDict({"a": LoraLinear(16, 16)}), plan_of("a"), spec())
    attention = nn.ModuleDict({"mha": nn.MultiheadAttention(16, 2)})
    with pytest.raises(
        UsageError, match=r"mha.out_proj .*(MultiheadAttention|NonDynamicallyQuantizableLinear)"
    ):
        precision.apply(attention, plan_of("mha.out_proj"), spec())


def run_linear(linear: nn.Module, x: Tensor, *, autocast: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = linear(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    weight = next(linear.parameters())
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_autocast_on_a_cpu_gives_the_arms_one_compute_dtype(recipe: str) -> None:
    from fp8parity.precision.torchao_float8 import convert

    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=False)
    fp8 = convert(plain, spec(recipe))
    x = torch.randn(16, 32)
    y_plain, _, _ = run_linear(plain, x, autocast=True)
    y, gx, gw = run_linear(fp8, x, autocast=True)
    assert y.dtype == y_plain.dtype == torch.bfloat16
    assert gx.dtype == gw.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_cast_source(recipe: str) -> None:
    """`compute` quantises the bf16 copy: equal to a layer whose stored weight is that copy. `master` is not."""
    from fp8parity.precision.torchao_float8 import convert

    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    rounded = nn.Linear(64, 48, bias=False)
    rounded.weight.data.copy_(linear.weight.bfloat16().float())
    x = torch.randn(32, 64)
    outputs = {}
    for name, layer, source in (
        ("compute", linear, "compute"),
        ("master", linear, "master"),
        ("rounded", rounded, "master"),
    ):
        outputs[name] = run_linear(convert(layer, spec(recipe, weight_cast_source=source)), x, autocast=True)
        linear.weight.grad = rounded.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(outputs["compute"], outputs["rounded"], strict=True))
    assert not torch.equal(outputs["compute"][0], outputs["master"][0])


def test_unsupported_recipe_of_the_backend_is_named() -> None:
    model = built()
    blockwise = spec("blockwise")
    with pytest.raises(
        UsageError,
        match="torchao_float8 has no recipe blockwise .*write backend: torchao_blockwise or reference",
    ):
        precision.apply(model, resolve(linear_shapes(MODEL, 64), blockwise), blockwise)


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (1, 32)])
def test_fp32_accumulation_is_the_rounded_exact_product(shape: tuple[int, ...]) -> None:
    """Operands are bf16, so float64 holds the exact result; fp32 sums of K terms then differ by at most K ulps."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 24, bias=False)
    use_fp32_accumulation(nn.ModuleDict({"a": linear}))
    assert type(linear) is Fp32AccumulateLinear
    x = torch.randn(shape)
    y, gx, gw = run_linear(linear, x, autocast=True)
    xb, wb = x.bfloat16().double().flatten(0, -2), linear.weight.detach().bfloat16().double()
    g = (2 * y.float()).bfloat16().double().flatten(0, -2)  # the gradient of sum(y**2), in the compute dtype
    for got, exact, terms in (
        (y.flatten(0, -2), xb @ wb.T, (xb.abs() @ wb.abs().T, 32)),
        (gx.flatten(0, -2), g @ wb, (g.abs() @ wb.abs(), 24)),
        (gw, g.T @ xb, (g.abs().T @ xb.abs(), xb.shape[0])),
    ):
        magnitude, k = terms
        # bf16 rounds once with relative error 2**-9 (to nearest, 8 bits); the fp32 sum errs by k * 2**-24 * sum|terms|
        bound = exact.abs() * 2**-8 + magnitude * k * 2**-23
        assert ((got.double() - exact).abs() <= bound).all()


def test_fp32_accumulation_equals_the_native_kernel_up_to_one_rounding() -> None:
    torch.manual_seed(0)
    native, ours = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
    ours.load_state_dict(native.state_dict())
    use_fp32_accumulation(nn.ModuleDict({"a": ours}))
    x = torch.randn(16, 64)
    for a, b in zip(run_linear(native, x, autocast=True), run_linear(ours, x, autocast=True), strict=True):
        scale = a.float().abs().max()
        assert ((a.float() - b.float()).abs() / scale).max() <= 2**-7
