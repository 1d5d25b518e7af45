"""The probe: right operands, once each, and no trace left; planted faults show where they were planted."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8parity.casts import RECIPES, CastPlan, Gemm, Operand, operands_of, recipe_plan
from fp8parity.errors import UsageError
from fp8parity.precision.casts_of import casts_of
from fp8parity.precision.reference import ReferenceLinear
from fp8parity.probe import GemmProbe, ProbeResult
from fp8parity.probe_signals import attention_logits_max
from fp8parity.tensor_stats import CastStats
from fp8parity_analysis.tensor_schema import CAST_COLUMNS, SIGNAL_COLUMNS, SIGNALS, TRAINED, WHAT_IF

from .cast_oracle import assert_same, oracle
from .tiny_decoder import BACKENDS, decoder, loss_of, rows

FP8 = [name for name in BACKENDS if name != "bf16"]
Row = dict[str, Any]


def stats_of(row: Row) -> CastStats:
    return CastStats(**{name: row[name] for name in CastStats.__dataclass_fields__})


def find(result: ProbeResult, fqn: str, gemm: str, operand: str, recipe: str | None = None) -> Row:
    found = [
        row for row in result.casts
        if (row["fqn"], row["gemm"], row["operand"]) == (fqn, gemm, operand) and recipe in (None, row["recipe"])
    ]  # fmt: skip
    assert len(found) == 1, found
    return found[0]


def signal(result: ProbeResult, name: str, fqn: str) -> float:
    (found,) = [row["value"] for row in result.signals if (row["signal"], row["fqn"]) == (name, fqn)]
    return float(found)


def probed(model: nn.Module, batches: list[Tensor] | None = None, **kwargs: Any) -> ProbeResult:
    batches = batches or [rows()]
    return GemmProbe(model, **kwargs).run(7, 448, batches, loss_of(model, len(batches)))


class Spy:
    """Records x, w and grad_output of one linear by an independent way: autograd on its own forward."""

    def __init__(self, model: nn.Module, fqn: str, batch: Tensor, parts: int = 1) -> None:
        linear = model.get_submodule(fqn)
        kept: list[Tensor] = []
        output: list[Tensor] = []
        forward = linear.forward

        def spying(x: Tensor) -> Tensor:
            kept.append(x.detach())
            output.append(forward(x))
            return output[-1]

        linear.forward = spying
        try:
            loss = loss_of(model, parts)(batch)
            (grad,) = torch.autograd.grad(loss, output)
        finally:
            del linear.forward
        self.input = kept[0].bfloat16().reshape(-1, kept[0].shape[-1])
        self.weight = linear.weight.detach().bfloat16()
        self.grad_output = grad.reshape(-1, grad.shape[-1])

    def operand(self, gemm: Gemm, operand: Operand) -> Tensor:
        left, right = operands_of(gemm, self.input, self.weight, self.grad_output)
        names = {"output": ("input", "weight"), "grad_input": ("grad_output", "weight")}
        pair = names.get(gemm, ("grad_output", "input"))
        return left if pair[0] == operand else right


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("fqn", ["blocks.0.attn.q_proj", "blocks.1.ffn.down_proj"])
def test_operands_are_what_the_casts_read(recipe: str, fqn: str) -> None:
    model = decoder(recipe)
    result, spy = probed(model), Spy(model, fqn, rows())
    for gemm, operand, plan in recipe_plan(recipe).casts:
        if plan.source == "dequantised":
            continue
        row = find(result, fqn, gemm, operand)
        assert (row["kind"], row["format"], row["granularity"]) == (TRAINED, plan.format, plan.granularity)
        assert_same(stats_of(row), oracle(spy.operand(gemm, operand).float().numpy(), plan))


def test_a_requantised_operand_is_read_from_its_fp8_copy() -> None:
    from fp8parity.casts import fake_quantise

    model = decoder("blockwise_requant")
    result, spy = probed(model), Spy(model, "blocks.0.ffn.up_proj", rows())
    plan = recipe_plan("blockwise_requant")
    assert plan.output.left is not None
    copy = fake_quantise(spy.input, plan.output.left)
    cast = plan.grad_weight.cast_of("input")
    assert cast is not None
    row = find(result, "blocks.0.ffn.up_proj", "grad_weight", "input")
    assert_same(stats_of(row), oracle(copy.t().numpy(), cast))


@pytest.mark.parametrize("source", ["compute", "master"])
def test_the_weight_cast_reads_what_is_declared(source: str) -> None:
    model = decoder("bf16")
    result = probed(model, what_if=["rowwise"], weight_cast_source=source)
    weight = model.head.weight.detach()
    read = weight.bfloat16().float() if source == "compute" else weight
    row = find(result, "head", "output", "weight")
    assert_same(stats_of(row), oracle(read.numpy(), CastPlan("e4m3fn", "row", power_of_two=True)))


def test_bf16_arm_reports_what_if_casts_only_and_fp8_arm_both() -> None:
    bf16 = probed(decoder("bf16"), what_if=["tensorwise", "rowwise_with_gw_hp"])
    linears = 2 * 7 + 1
    assert len(bf16.casts) == linears * (6 + 4)
    assert {row["kind"] for row in bf16.casts} == {WHAT_IF}
    assert all(tuple(row) == CAST_COLUMNS for row in bf16.casts)
    fp8 = probed(decoder("tensorwise"), what_if=["tensorwise", "rowwise"])
    kinds = {(row["recipe"], row["kind"]) for row in fp8.casts}
    assert kinds == {("tensorwise", TRAINED), ("rowwise", WHAT_IF), ("tensorwise", WHAT_IF)}
    by_layer = {row["fqn"] for row in fp8.casts if (row["recipe"], row["kind"]) == ("tensorwise", WHAT_IF)}
    assert by_layer == {"head"}  # what training already casts is not tried again
    assert probed(decoder("bf16")).casts == []


@pytest.mark.parametrize("recipe", FP8)
def test_the_first_what_if_of_bf16_is_the_trained_cast_of_fp8(recipe: str) -> None:
    what_if = probed(decoder("bf16"), what_if=[recipe])
    trained = probed(decoder(recipe))
    fqn = "blocks.0.attn.q_proj"  # reads the same input and weight in both arms, before any FP8 GEMM
    for operand in ("input", "weight"):
        a, b = (find(result, fqn, "output", operand) for result in (what_if, trained))
        assert {**a, "kind": TRAINED} == b


# --- no trace ----------------------------------------------------------------------------------------------


def _state(model: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(p.detach().clone() for p in model.parameters()), *grads, torch.get_rng_state()]


@pytest.mark.parametrize("recipe", ["bf16", *FP8])
def test_nothing_is_left_behind(recipe: str) -> None:
    model = decoder(recipe, activation_checkpointing=True)
    loss_of(model)(rows()).backward()
    model.blocks[0].eval()
    before, flags = _state(model), [m.training for m in model.modules()]
    probed(model, what_if=["tensorwise"])
    after = _state(model)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class Counting(nn.Module):
    """A layer with a buffer that every forward changes, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return F.dropout(self.linear(x), 0.5, training=self.training)


def test_buffers_and_random_numbers_are_put_back_also_after_an_error() -> None:
    model = Counting()
    probe = GemmProbe(model, what_if=["tensorwise"])
    before = torch.get_rng_state()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def failing(x: Tensor) -> Tensor:
        loss(x)
        raise RuntimeError("planted")

    probe.run(1, 1, [torch.ones(4, 8)], loss)
    with pytest.raises(RuntimeError, match="planted"):
        probe.run(1, 1, [torch.ones(4, 8)], failing)
    assert float(model.seen) == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.linear._forward_hooks


def test_random_numbers_of_python_and_numpy_are_put_back() -> None:
    model = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:  # LayerDrop drawn with the wrong generator
        return model(x * random.random() * np.random.rand()).square().mean()  # noqa: NPY002

    before, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    GemmProbe(model, what_if=["tensorwise"]).run(1, 1, [torch.ones(4, 8)], loss)
    assert random.getstate() == before
    after = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(after, numpys, strict=True))


@pytest.mark.parametrize("trained", [False, True])
def test_a_loss_that_calls_backward_is_refused_and_its_gradients_are_taken_back(trained: bool) -> None:
    model = nn.Linear(8, 8)
    if trained:
        model(torch.ones(4, 8)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def loss(x: Tensor) -> Tensor:
        value = model(x).square().mean()
        value.backward()
        return value

    with pytest.raises(UsageError, match="loss_of: called backward; return the loss before that"):
        GemmProbe(model, what_if=["tensorwise"]).run(1, 1, [torch.ones(4, 8)], loss)
    for p, old in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) if old is None else torch.equal(p.grad, old)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (Tensor.item, "returned a float"),
        (Tensor.detach, "returned a tensor without gradient"),
        (lambda loss: loss * torch.ones(2, 3), r"returned a tensor of shape \[2, 3\]"),
    ],
)
def test_what_is_no_loss_is_refused(change: Any, named: str) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=f"loss_of: {named}; return the scalar tensor that training calls"):
        GemmProbe(model).run(1, 1, [torch.ones(4, 8)], lambda x: change(model(x).sum()))


def test_a_compiled_model_has_the_names_of_the_one_inside() -> None:
    torch._dynamo.reset()
    model = decoder("rowwise")
    plain = probed(model)
    compiled: Any = torch.compile(model, backend="eager")
    assert probed(compiled) == plain
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]
    assert probed(compiled) == plain
    torch._dynamo.reset()


def test_a_compiled_model_is_not_compiled_again() -> None:
    model = decoder("bf16", model={"n_layers": 1})
    compiled = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        compiled[0] += 1
        return graph.forward

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=backend)
    loss_of(model)(rows()).backward()
    first = compiled[0]
    assert first > 0
    result = probed(model, what_if=["rowwise"])
    loss_of(model)(rows(1)).backward()
    assert compiled[0] == first
    assert len(result.casts) == 8 * 6
    torch._dynamo.reset()


# --- each cast once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise_requant"])
def test_recomputation_does_not_count_twice(recipe: str) -> None:
    plain = probed(decoder(recipe), what_if=["tensorwise"])
    recomputed = probed(decoder(recipe, activation_checkpointing=True), what_if=["tensorwise"])
    assert plain == recomputed


def test_reentrant_checkpoints_are_refused_by_torch_and_leave_no_trace() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    probe = GemmProbe(model, what_if=["tensorwise"])
    with pytest.raises(RuntimeError, match="use_reentrant"):
        probe.run(
            1, 1, [torch.ones(4, 8)],
            lambda x: checkpoint(model[1], model[0](x), use_reentrant=True).sum(),
        )  # fmt: skip
    assert not any(module._forward_hooks for module in model)


def test_accumulation_merges_the_micro_batches_as_they_were_cast() -> None:
    model = decoder("rowwise")
    parts = [rows(seed, 2) for seed in range(3)]
    merged = probed(model, parts)
    alone = [GemmProbe(model).run(7, 448, [part], loss_of(model, 3)) for part in parts]
    for row in merged.casts:
        key = (row["fqn"], row["gemm"], row["operand"])
        singles = [find(one, *key) for one in alone]
        if row["operand"] == "weight":
            assert row == singles[0]  # every micro-batch casts the same weight: once
            continue
        for name in ("element_count", "group_count", "zero_count", "underflow_count", "subnormal_count"):
            assert row[name] == sum(one[name] for one in singles)
        assert row["amax"] == max(one["amax"] for one in singles)
        assert row["scale_min"] == min(one["scale_min"] for one in singles)
    batch = torch.cat(parts)
    model.zero_grad()
    for part in parts:
        loss_of(model, 3)(part).backward()
    norm = model.blocks[0].attn.q_proj.weight.grad.norm().item()
    assert signal(merged, "grad_norm", "blocks.0.attn.q_proj") == pytest.approx(norm, rel=1e-6)
    whole = probed(model, [batch])
    for name, fqn in (("block_output_rms", "blocks.1"), ("head_logsumexp_mean", "head")):
        assert signal(merged, name, fqn) == pytest.approx(signal(whole, name, fqn), rel=1e-3)
    for name, fqn in (("head_logits_max", "head"), ("attention_logits_max", "blocks.1.attn")):
        assert signal(merged, name, fqn) == max(signal(one, name, fqn) for one in alone)


class TwiceTheSame(nn.Module):
    """One linear under two names and called twice, and another that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = self.a
        self.c = nn.Linear(8, 8, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def test_shared_modules_and_weights_count_once() -> None:
    model = TwiceTheSame()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    result = GemmProbe(model, what_if=["tensorwise"]).run(
        1, 5, [x], lambda batch: model(batch).square().sum()
    )
    assert {row["fqn"] for row in result.casts} == {"a", "c"}
    assert find(result, "a", "output", "input")["element_count"] == 2 * 40
    assert find(result, "a", "output", "weight")["element_count"] == 64
    assert find(result, "c", "output", "input")["element_count"] == 40
    model(x).square().sum().backward()
    assert model.a.weight.grad is not None
    for fqn in ("a", "c"):
        assert signal(result, "grad_norm", fqn) == pytest.approx(model.a.weight.grad.norm().item(), rel=1e-6)


def test_a_tied_head_is_a_gemm_of_its_own() -> None:
    result = probed(decoder("bf16", model={"tied_head": True}), what_if=["tensorwise"])
    assert find(result, "head", "output", "weight")["element_count"] == 64 * 32


def test_calls_without_gradient_are_not_counted() -> None:
    model = decoder("rowwise")

    def with_teacher(batch: Tensor) -> Tensor:
        with torch.no_grad():
            loss_of(model)(batch.flip(0).repeat(2, 1))
        return loss_of(model)(batch)

    assert GemmProbe(model).run(7, 448, [rows()], with_teacher) == probed(model)


def test_a_gemm_that_does_not_run_is_not_reported() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.requires_grad_(False)
    result = GemmProbe(model, what_if=["tensorwise"]).run(1, 4, [torch.ones(4, 8)], lambda x: model(x).sum())
    seen = {(row["fqn"], row["gemm"]) for row in result.casts}
    assert seen == {("0", "output"), ("0", "grad_weight"), ("1", "output"), ("1", "grad_input")}


# --- signals -----------------------------------------------------------------------------------------------


def test_signals_against_their_definitions() -> None:
    model = decoder("bf16")
    result = probed(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows()[:, :-1]).float()
    assert {row["signal"] for row in result.signals} == set(SIGNALS)
    assert all(tuple(row) == SIGNAL_COLUMNS for row in result.signals)
    assert signal(result, "head_logits_max", "head") == logits.abs().max().item()
    mean = logits.double().logsumexp(-1).mean().item()
    assert signal(result, "head_logsumexp_mean", "head") == pytest.approx(mean, rel=1e-6)
    outputs: list[Tensor] = []
    handle = model.blocks[0].register_forward_hook(
        lambda module, args, output: outputs.append(output.detach())
    )
    loss_of(model)(rows())
    handle.remove()
    rms = outputs[0].double().square().mean().sqrt().item()
    assert signal(result, "block_output_rms", "blocks.0") == pytest.approx(rms, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_logits_are_those_that_attention_sees(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("bf16", model={"fused_qkv": fused})
    seen: list[float] = []
    attend = F.scaled_dot_product_attention

    def spying(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        seen.append(scores.masked_fill(~mask, -math.inf).max().item())
        return attend(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spying)
    result = probed(model)
    for layer, expected in enumerate(seen):
        found = signal(result, "attention_logits_max", f"blocks.{layer}.attn")
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("context", "pieces"), [(5, 2**26), (1100, 2**26), (40, 700)])
def test_attention_logits_in_pieces(context: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8parity.probe_signals.SCORES", pieces)
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(2, 4, context, 8, generator=generator)
    k = torch.randn(2, 2, context, 8, generator=generator)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(context, context).triu(1).bool(), -math.inf)
    assert attention_logits_max(q, k).item() == pytest.approx(scores.max().item(), rel=1e-6)


def test_a_model_of_somebody_else_lacks_only_the_attention_signal() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"0": nn.Linear(8, 8), "1": nn.Linear(8, 8)})
            self.lm_head = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.layers["1"](self.layers["0"](x)))

    net = Net()
    result = GemmProbe(net).run(1, 4, [torch.ones(4, 8)], lambda x: net(x).square().mean())
    assert {(row["signal"], row["fqn"]) for row in result.signals} == {
        ("head_logits_max", "lm_head"), ("head_logsumexp_mean", "lm_head"),
        ("block_output_rms", "layers.0"), ("block_output_rms", "layers.1"),
        *(("grad_norm", fqn) for fqn in ("layers.0", "layers.1", "lm_head")),
    }  # fmt: skip


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp4' has no FP8 casts"):
        GemmProbe(nn.Linear(8, 8), what_if=["fp4"])
    with pytest.raises(KeyError, match="has no module 'heads'"):
        GemmProbe(decoder("bf16"), head="heads")
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        GemmProbe(nn.LayerNorm(4))
    with pytest.raises(UsageError, match="the model is a DataParallel.*pass its .module"):
        GemmProbe(nn.DataParallel(nn.Linear(8, 8)))


# --- what a layer says of itself, and planted faults -------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_layers_are_understood_without_us(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    casts = casts_of(model[0])
    assert casts is not None
    assert (casts.plan, casts.weight_cast_source) == (RECIPES[recipe], "master")


def test_a_torchao_format_mix_up_shows_in_the_format() -> None:
    from dataclasses import replace

    from torchao.float8.config import CastConfig, Float8LinearConfig

    model = decoder("tensorwise")
    layer = model.get_submodule("blocks.1.ffn.up_proj")
    shared = CastConfig()
    object.__setattr__(
        layer, "config", Float8LinearConfig(cast_config_input=shared, cast_config_grad_output=shared)
    )
    row = find(probed(model), "blocks.1.ffn.up_proj", "grad_input", "grad_output")
    assert (row["format"], row["recipe"]) == ("e4m3fn", "torchao")
    config: Any = layer.config
    assert replace(config) is not None


def _reference(recipe: str = "tensorwise") -> nn.Module:
    return decoder(recipe, backend="reference")


def test_a_format_mix_up_costs_six_decibels_in_one_tensor() -> None:
    from dataclasses import replace

    model, fqn = _reference(), "blocks.1.ffn.gate_proj"
    clean = probed(model)
    layer = model.get_submodule(fqn)
    assert isinstance(layer, ReferenceLinear)
    wrong = replace(layer.plan.output, left=CastPlan("e5m2", "tensor"), right=layer.plan.output.right)
    layer.plan = replace(layer.plan, output=wrong)
    faulty = probed(model)
    changes = {
        (a["fqn"], a["gemm"], a["operand"]): a["sqnr_db"] - b["sqnr_db"]
        for a, b in zip(clean.casts, faulty.casts, strict=True)
    }
    worst = max(changes, key=lambda key: changes[key])
    assert worst == (fqn, "output", "input")
    assert changes[worst] == pytest.approx(6.0, abs=0.7)
    assert find(faulty, fqn, "output", "input")["format"] == "e5m2"


class FrozenScaleLinear(ReferenceLinear):
    """A test backend that goes on using the input scale of its first call."""

    scale: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.scale is None:
            amax = input.detach().abs().max().double()
            self.scale = (448.0 / amax).float()
        return super().forward(input)

    def cast_scale(self, gemm: Gemm, operand: Operand) -> Tensor | None:
        return self.scale if (gemm, operand) == ("output", "input") else None


def test_a_frozen_scale_saturates_where_it_was_frozen() -> None:
    model, fqn = _reference(), "blocks.1.ffn.down_proj"
    model.get_submodule(fqn).__class__ = FrozenScaleLinear
    clean = probed(model)
    assert find(clean, fqn, "output", "input")["saturated_count"] == 0
    with torch.no_grad():
        for name in ("up_proj", "gate_proj"):
            model.get_submodule(f"blocks.1.ffn.{name}").weight.mul_(8)
    faulty = probed(model)
    saturated = {(r["fqn"], r["gemm"], r["operand"]) for r in faulty.casts if r["saturated_count"]}
    assert saturated == {(fqn, "output", "input")}
    frozen = float(model.get_submodule(fqn).scale)
    spy = Spy(model, fqn, rows())
    row = find(faulty, fqn, "output", "input")
    assert_same(stats_of(row), oracle(spy.input.float().numpy(), CastPlan("e4m3fn", "tensor"), frozen))
    assert row["scale_min"] == frozen


class Planted:
    """Changes the input of one linear in the forward pass, as a fault upstream would."""

    def __init__(self, model: nn.Module, fqn: str, change: Any) -> None:
        self.calls = 0
        self._change = change
        self.handle = model.get_submodule(fqn).register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.calls += 1
        return (self._change(args[0], self.calls),)


def _outlier(x: Tensor, call: int) -> Tensor:
    largest = x.detach().abs() == x.detach().abs().max()
    return x * torch.where(largest, 2.0**20, 1.0).to(x.dtype)


def test_one_outlier_floods_its_tensor_with_underflow() -> None:
    model, fqn = decoder("tensorwise"), "blocks.1.attn.o_proj"
    clean = find(probed(model), fqn, "output", "input")
    Planted(model, fqn, _outlier)
    result = probed(model)
    row = find(result, fqn, "output", "input")
    size = row["element_count"] - row["zero_count"]
    assert clean["underflow_frac"] < 0.01
    # all others lie 2^20 below it and more, the smallest code 2^18.8
    assert size - 2 <= row["underflow_count"] < size
    assert row["amax"] == clean["amax"] * 2**20
    worst = max(result.casts, key=lambda r: r["underflow_frac"] if r["gemm"] == "output" else 0)
    assert (worst["fqn"], worst["operand"]) == (fqn, "input")


def test_the_outlier_in_the_first_of_four_micro_batches_is_seen() -> None:
    model, fqn = decoder("tensorwise"), "blocks.1.attn.o_proj"
    parts = [rows(seed, 1) for seed in range(4)]
    clean = find(probed(model, parts), fqn, "output", "input")
    Planted(model, fqn, lambda x, call: _outlier(x, call) if call == 1 else x)
    row = find(probed(model, parts), fqn, "output", "input")
    quarter = row["element_count"] // 4
    assert row["amax"] >= clean["amax"] * 2**19
    assert 0.9 * quarter < row["underflow_count"] - clean["underflow_count"] <= quarter


def test_a_growing_swiglu_channel_pair_shows_in_the_products_range() -> None:
    model, fqn = decoder("tensorwise"), "blocks.1.ffn.down_proj"
    ffn = model.get_submodule("blocks.1.ffn")
    seen = []
    for _ in range(4):
        row = find(probed(model), fqn, "output", "input")
        seen.append((row["amax"], row["amax_over_rms"], row["sqnr_db"], row["underflow_frac"]))
        with torch.no_grad():
            for name in ("gate_proj", "up_proj"):
                ffn.get_submodule(name).weight[11] *= 16
    amax, over_rms, _, underflow = (list(values) for values in zip(*seen, strict=True))
    assert all(np.diff(np.log2(amax)) > 5)  # 16 x 16, less what SiLU takes at the start
    assert over_rms[-1] > 2 * over_rms[0]
    assert underflow[-1] > underflow[0] + 0.5
    worst = max(probed(model).casts, key=lambda r: r["amax_over_rms"])
    assert worst["fqn"] in (fqn, "blocks.1.ffn.gate_proj", "blocks.1.ffn.up_proj")


def test_tiny_rows_underflow_tensorwise_and_not_rowwise() -> None:
    def tiny(x: Tensor, call: int) -> Tensor:
        factor = torch.full_like(x[:, :, :1], 1e-9)
        factor[:, :2] = 1
        return x * factor

    rows_of: dict[str, Row] = {}
    for recipe in ("tensorwise", "rowwise"):
        model = decoder(recipe)
        Planted(model, "blocks.1.attn.o_proj", tiny)
        rows_of[recipe] = find(probed(model), "blocks.1.attn.o_proj", "output", "input")
    assert rows_of["tensorwise"]["underflow_frac"] == pytest.approx(14 / 16, abs=0.01)
    assert rows_of["rowwise"]["underflow_frac"] < 0.01
    assert rows_of["rowwise"]["zero_amax_groups"] == 0


def test_a_zero_row_is_a_zero_group_and_no_underflow() -> None:
    def zeroed(x: Tensor, call: int) -> Tensor:
        keep = torch.ones_like(x)
        keep[1, 4] = 0
        return x * keep

    model, fqn = decoder("rowwise"), "blocks.0.ffn.up_proj"
    clean = find(probed(model), fqn, "output", "input")
    Planted(model, fqn, zeroed)
    row = find(probed(model), fqn, "output", "input")
    assert (row["zero_amax_groups"], clean["zero_amax_groups"]) == (1, 0)
    assert row["zero_count"] == clean["zero_count"] + 32
    assert row["underflow_count"] <= clean["underflow_count"]
