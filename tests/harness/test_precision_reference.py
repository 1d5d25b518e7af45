"""The reference linear against torchao's module, a NumPy formulation, exact fractions and special values."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8parity.casts import GEMMS, RECIPES, Gemm, fake_quantise, operands_of, quantise
from fp8parity.errors import UsageError
from fp8parity.precision import reference, torchao_float8
from fp8parity.precision.reference import ReferenceLinear, convert
from fp8parity.precision_rules import jitter_constant
from fp8parity.spec import PrecisionSpec

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
U32, U16 = 2.0**-24, 2.0**-8  # unit roundoff of float32 (24 significand bits) and bfloat16 (8 bits)


def spec(recipe: str, source: str = "compute", backend: str = "reference") -> PrecisionSpec:
    return PrecisionSpec(recipe=recipe, backend=backend, weight_cast_source=source)  # type: ignore[arg-type]


def layer(
    k: int, n: int, *, bias: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return linear


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose rows and columns differ by orders of magnitude, so that every granularity matters."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-8, 8, (*shape[:-1], 1), generator=generator)
    return (x * 2.0 ** torch.randint(-8, 8, (shape[-1],), generator=generator)).to(dtype)


def three_gemms(module: nn.Module, x: Tensor, grad_output: Tensor, *, autocast: bool) -> dict[Gemm, Tensor]:
    """Run forward and backward once and return output, grad_input, grad_weight."""
    x = x.detach().clone().requires_grad_()
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = module(x)
    grad_input, grad_weight = torch.autograd.grad(output, [x, weight], grad_output)
    return {"output": output.detach(), "grad_input": grad_input, "grad_weight": grad_weight}


def exact_gemms(
    recipe: str, x: Tensor, weight: Tensor, grad_output: Tensor
) -> dict[Gemm, tuple[Tensor, Tensor]]:
    """Each GEMM of the dequantised operands in float64, and the sum of magnitudes that bounds rounding.

    Written from the recipe's equations with the casts, whose exactness `test_casts` proves, and nothing else.
    """
    plan, results = RECIPES[recipe], {}
    for gemm in GEMMS:
        left, right = operands_of(gemm, x, weight, grad_output)
        cast = plan.gemm(gemm)
        if cast.left is not None and cast.right is not None:
            if cast.right.source == "dequantised":
                assert plan.output.left is not None
                right = fake_quantise(x, plan.output.left).t()
            left = fake_quantise(left, cast.left, torch.float64)
            right = fake_quantise(right, cast.right, torch.float64)
        left, right = left.double(), right.double()
        results[gemm] = (left @ right.t(), left.abs() @ right.abs().t())
    return results


def assert_within_rounding(actual: Tensor, exact: Tensor, magnitude: Tensor, reduced: int) -> None:
    """|actual - exact| is within the rounding of a float32 GEMM and one rounding of its result to bfloat16.

    Each dequantised operand is rounded once, or each scale's reciprocal (2 u), each product once (u), and a
    sum of C terms in any order errs by at most (C - 1) u times the sum of magnitudes (Higham, 2002, section
    4.2): in all (C + 5) u32 with room for second order. Then u16 of the rounded value itself.
    """
    bound = (reduced + 5) * U32 * magnitude
    bound = bound + U16 * (exact.abs() + bound)
    excess = (actual.double() - exact).abs() - bound
    assert (excess <= 0).all(), f"largest excess {excess.max().item():.3g}"


# --- against torchao's module ------------------------------------------------------------------------------


def torchao_module(linear: nn.Linear, recipe: str, source: str) -> nn.Module:
    config = torchao_float8.Float8LinearConfig.from_recipe_name(recipe)
    module = torchao_float8.ComputeCastFloat8Linear.from_float(linear, config=config)
    module.weight_cast_source = source
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(64, 48, 80), (16, 16, 16), (7, 48, 33)])
@pytest.mark.parametrize("compute", ["mixed-compute", "mixed-master", "true"])
@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_reference_and_torchao_are_both_within_rounding_of_the_exact_gemms(
    recipe: str, compute: str, sizes: tuple[int, int, int]
) -> None:
    m, k, n = sizes
    mixed, source = compute.startswith("mixed"), "master" if compute == "mixed-master" else "compute"
    dtype = torch.float32 if mixed else torch.bfloat16
    linear = layer(k, n, dtype=dtype)
    x, go = drawn(m, k, seed=1, dtype=dtype), drawn(m, n, seed=2, dtype=torch.bfloat16)
    theirs = three_gemms(torchao_module(linear, recipe, source), x, go, autocast=mixed)
    ours = three_gemms(convert(linear, spec(recipe, source)), x, go, autocast=mixed)
    cast_weight = linear.weight.detach() if source == "master" else linear.weight.detach().bfloat16()
    exact = exact_gemms(recipe, x.bfloat16(), cast_weight, go)
    for gemm, reduced in (("output", k), ("grad_input", n), ("grad_weight", m)):
        value, magnitude = exact[gemm]
        assert ours[gemm].dtype == theirs[gemm].dtype
        for actual in (ours[gemm], theirs[gemm]):
            assert_within_rounding(actual, value, magnitude, reduced)


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_the_reference_is_bit_equal_to_torchaos_emulation(recipe: str) -> None:
    from dataclasses import replace

    linear = layer(64, 48, dtype=torch.bfloat16)
    x, go = drawn(32, 64, seed=3, dtype=torch.bfloat16), drawn(32, 48, seed=4, dtype=torch.bfloat16)
    config = replace(torchao_float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = three_gemms(torchao_float8.Float8Linear.from_float(linear, config=config), x, go, autocast=False)
    ours = three_gemms(convert(linear, spec(recipe)), x, go, autocast=False)
    for gemm in GEMMS:
        if RECIPES[recipe].gemm(gemm).is_fp8:
            # same casts, same float32 matmul of the same shapes; only the memory layout may reorder its sums
            different = (ours[gemm] != theirs[gemm]).float().mean().item()
            assert different <= 0.01, f"{gemm}: {different:.1%} of the elements differ"


# --- blockwise against NumPy -------------------------------------------------------------------------------


def numpy_cast(x: np.ndarray[Any, Any], rows: int, columns: int) -> tuple[Any, Any]:
    """E4M3 codes as float64 and inverse scales per block of rows x columns, by plain loops."""
    codes, inverse = np.zeros(x.shape), np.zeros(x.shape)
    for r in range(0, x.shape[0], rows):
        for c in range(0, x.shape[1], columns):
            part = x[r : r + rows, c : c + columns].astype(np.float32)
            scale = np.float32(448.0 / max(float(np.abs(part).max()), 1e-12))
            block = np.clip(part * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            codes[r : r + rows, c : c + columns] = block.astype(np.float64)
            inverse[r : r + rows, c : c + columns] = 1.0 / float(scale)
    return codes, inverse


def numpy_blockwise(x: Any, w: Any, go: Any, *, requantise: bool) -> dict[Gemm, tuple[Any, Any]]:
    """The three block-scaled GEMMs in float64: per block of 128, codes are summed first and scaled after.

    Written in [M, K] layout with 1 x 128 and 128 x 1 tiles, as DeepGEMM computes, not in the package's
    reduced-axis-last form.
    """

    def gemm(a: Any, ia: Any, b: Any, ib: Any) -> tuple[Any, Any]:
        total, size = np.zeros((a.shape[0], b.shape[1])), np.zeros((a.shape[0], b.shape[1]))
        for s in range(0, a.shape[1], 128):
            part = slice(s, s + 128)
            scale = ia[:, s : s + 1] * ib[s : s + 1, :]
            total += a[:, part] @ b[part] * scale
            size += np.abs(a[:, part]) @ np.abs(b[part]) * scale
        return total, size

    xq, xi = numpy_cast(x, 1, 128)
    wq, wi = numpy_cast(w, 128, 128)
    gq, gi = numpy_cast(go, 1, 128)
    again = (xq.astype(np.float32) / (1 / xi).astype(np.float32)) if requantise else x
    xq_tokens, xi_tokens = numpy_cast(again, 128, 1)
    gq_tokens, gi_tokens = numpy_cast(go, 128, 1)
    return {
        "output": gemm(xq, xi, wq.T, wi.T),
        "grad_input": gemm(gq, gi, wq, wi),
        "grad_weight": gemm(gq_tokens.T, gi_tokens.T, xq_tokens, xi_tokens),
    }


@pytest.mark.parametrize("sizes", [(256, 384, 128), (130, 200, 300), (1, 128, 5)])
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_requant"])
def test_blockwise_equals_a_numpy_formulation(recipe: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    linear = layer(k, n, dtype=torch.bfloat16)
    x, go = drawn(m, k, seed=5, dtype=torch.bfloat16), drawn(m, n, seed=6, dtype=torch.bfloat16)
    arrays = [t.detach().float().numpy() for t in (x, linear.weight, go)]
    expected = numpy_blockwise(*arrays, requantise=recipe == "blockwise_requant")
    ours = three_gemms(convert(linear, spec(recipe)), x, go, autocast=False)
    for gemm, reduced in (("output", k), ("grad_input", n), ("grad_weight", m)):
        value, magnitude = (torch.from_numpy(a) for a in expected[gemm])
        assert_within_rounding(ours[gemm], value, magnitude, reduced)


def test_the_two_block_recipes_differ_in_grad_weight_only() -> None:
    x, go = drawn(256, 256, seed=7, dtype=torch.bfloat16), drawn(256, 128, seed=8, dtype=torch.bfloat16)
    a, b = (
        three_gemms(convert(layer(256, 128, dtype=torch.bfloat16), spec(r)), x, go, autocast=False)
        for r in ("blockwise", "blockwise_requant")
    )
    assert torch.equal(a["output"], b["output"])
    assert torch.equal(a["grad_input"], b["grad_input"])
    assert not torch.equal(a["grad_weight"], b["grad_weight"])


# --- exactness in float64 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_grad_input_is_exactly_the_product_of_the_quantised_operands(recipe: str) -> None:
    linear = layer(5, 6, dtype=torch.float64)
    x = drawn(3, 5, seed=9, dtype=torch.float64)
    go = torch.randn(3, 6, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    ours = three_gemms(convert(linear, spec(recipe)), x, go, autocast=False)["grad_input"]
    plan = RECIPES[recipe].grad_input
    assert plan.left is not None
    assert plan.right is not None

    def exact(t: Tensor, cast: Any) -> list[list[Fraction]]:
        codes, scale = quantise(t, cast)
        wide = (
            scale.repeat_interleave(128, -1)[..., : t.shape[1]] if cast.granularity == "block_1xB" else scale
        )
        wide = wide.expand(t.shape)
        pairs = zip(codes.double().tolist(), wide.double().tolist(), strict=True)
        return [[Fraction(c) / Fraction(s) for c, s in zip(*pair, strict=True)] for pair in pairs]

    left, right = exact(go, plan.left), exact(linear.weight.detach().t(), plan.right)
    for i, row in enumerate(left):
        for j, column in enumerate(right):
            products = [a * b for a, b in zip(row, column, strict=True)]
            error = abs(Fraction(ours[i, j].item()) - sum(products))
            if plan.left.power_of_two and plan.right.power_of_two:
                assert (
                    error == 0
                )  # products of 4-bit significands within 53 bits of each other: no rounding at all
            else:
                # the two divisions and the product round once each, the sum of 6 five times, in float64
                assert error <= Fraction(9, 2**53) * sum(abs(p) for p in products)


# --- dtypes, autocast, weight cast source ------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast_the_compute_dtype_is_used_and_gradients_keep_the_parameters_dtype(
    recipe: str,
) -> None:
    linear = convert(layer(32, 48, bias=True), spec(recipe))
    x = drawn(2, 8, 32, seed=11).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
        inside = torch.autograd.grad(y.float().sum(), [x, linear.weight, linear.bias], retain_graph=True)
    assert y.dtype == torch.bfloat16
    outside = torch.autograd.grad(y.float().sum(), [x, linear.weight, linear.bias])
    assert [g.dtype for g in outside] == [torch.float32] * 3
    for a, b in zip(
        inside, outside, strict=True
    ):  # a backward pass under autocast must not round the operands
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_around_the_backward_pass_alone_changes_nothing(recipe: str) -> None:
    linear = convert(layer(32, 48), spec(recipe))
    x = drawn(8, 32, seed=30).requires_grad_()
    y = linear(x)  # float32 throughout
    go = drawn(8, 48, seed=31)
    outside = torch.autograd.grad(y, [x, linear.weight], go, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(y, [x, linear.weight], go)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_the_operator_itself_ignores_autocast() -> None:
    plan = RECIPES["tensorwise"].output
    x, w = drawn(8, 32, seed=32), drawn(16, 32, seed=33)
    outside = reference.multiply(plan, x, w, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = reference.multiply(plan, x, w, torch.float32)
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("source", ["compute", "master"])
def test_the_weight_cast_reads_what_it_says(source: str) -> None:
    linear = layer(64, 48, seed=1)
    converted = convert(linear, spec("tensorwise", source))
    x = drawn(16, 64, seed=12)
    read = linear.weight.detach().bfloat16() if source == "compute" else linear.weight.detach()
    other = linear.weight.detach() if source == "compute" else linear.weight.detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = converted(x)
    plan = RECIPES["tensorwise"].output
    expected, wrong = (reference.multiply(plan, x.bfloat16(), w, torch.bfloat16) for w in (read, other))
    assert torch.equal(y, expected)
    assert not torch.equal(y, wrong)
    assert plan.right is not None
    # bf16 has 16 values to a step of e4m3, so rounding to it moves a weight by 1/64 step on average and
    # carries 1 in 64 over a boundary; a scale that moved with the amax (up to 2^-8) may carry a few times
    # more
    codes = [quantise(w, plan.right)[0].float() for w in (read, other)]
    assert 1 / 128 < (codes[0] != codes[1]).float().mean().item() < 1 / 10


def test_a_bf16_activation_meets_an_fp32_weight_under_autocast() -> None:
    first, second = convert(layer(32, 48), spec("rowwise")), convert(layer(48, 16), spec("rowwise"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = second(first(drawn(8, 32, seed=29)))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert first.weight.grad is not None


def test_mismatched_dtypes_without_autocast_are_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"input is torch\.bfloat16 and weight is torch\.float32 without autocast"
    ):
        convert(layer(16, 16), spec("rowwise"))(torch.ones(2, 16, dtype=torch.bfloat16))


def test_gradients_that_nobody_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = reference.multiply

    def spy(plan: Any, *args: Any, **kwargs: Any) -> Tensor:
        ran.append(plan.gemm)
        return real(plan, *args, **kwargs)

    monkeypatch.setattr(reference, "multiply", spy)
    linear = convert(layer(16, 16), spec("rowwise"))
    linear(torch.ones(4, 16)).sum().backward()
    assert ran == ["output", "grad_weight"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_and_repetition_change_no_bit(recipe: str) -> None:
    linear = convert(layer(48, 32, bias=True), spec(recipe))
    x = drawn(24, 48, seed=13).requires_grad_()

    def gradients(*, recompute: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(linear, x, use_reentrant=False) if recompute else linear(x)
        return torch.autograd.grad(y.float().square().sum(), [x, linear.weight, linear.bias])

    first = gradients(recompute=False)
    for other in (gradients(recompute=True), gradients(recompute=False)):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_traces_into_one_graph(recipe: str) -> None:
    linear = convert(layer(48, 32), spec(recipe))
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    x, go = drawn(24, 48, seed=14), drawn(24, 32, seed=15, dtype=torch.bfloat16)
    results = []
    for module in (linear, compiled):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(inputs)
        results.append((y, *torch.autograd.grad(y, [inputs, linear.weight], go)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- special values and odd sizes --------------------------------------------------------------------------


ARMS = [(r, "reference") for r in RECIPES] + [(r, "torchao_float8") for r in TORCHAO_RECIPES]


def ran(
    recipe: str, backend: str, x: Tensor, go: Tensor, linear: nn.Linear | None = None
) -> dict[Gemm, Tensor]:
    linear = linear or layer(x.shape[-1], go.shape[-1], dtype=torch.bfloat16)
    module = convert if backend == "reference" else torchao_float8.convert
    converted = module(linear, spec(recipe, backend=backend))
    return three_gemms(converted, x.bfloat16(), go.bfloat16(), autocast=False)


@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_zeros_and_values_below_the_amax_floor_give_zeros(recipe: str, backend: str) -> None:
    go = drawn(8, 24, seed=16)
    for x in (torch.zeros(8, 32), torch.full((8, 32), 1e-30)):
        results = ran(recipe, backend, x, go)
        assert (results["output"] == 0).all()
        if RECIPES[recipe].grad_weight.is_fp8:
            assert (results["grad_weight"] == 0).all()
        assert results["grad_weight"].abs().max() < 1e-24  # gw_hp keeps 1e-30, as BF16 does
        assert results["grad_input"].isfinite().all()


@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_a_zero_row_gives_a_zero_row_and_leaves_the_others_alone(recipe: str, backend: str) -> None:
    x, go = drawn(8, 32, seed=17), drawn(8, 24, seed=18)
    x[3] = 0
    results = ran(recipe, backend, x, go)
    assert (results["output"][3] == 0).all()
    assert all(r.isfinite().all() for r in results.values())
    assert (results["output"].abs().sum(1) > 0).sum() == 7


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_one_inf_or_nan_in_the_input_is_never_turned_into_a_finite_number(
    recipe: str, backend: str, bad: float
) -> None:
    x, go = drawn(8, 32, seed=19), drawn(8, 24, seed=20)
    x[3, 5] = bad
    results = ran(recipe, backend, x, go)
    finite = {gemm: r.isfinite() for gemm, r in results.items()}
    assert finite["grad_input"].all()  # does not read the input
    everywhere = recipe == "tensorwise"
    rows, columns = torch.ones(8, dtype=torch.bool), torch.ones(32, dtype=torch.bool)
    rows[3], columns[5] = False, False
    # one scale per tensor spreads it over everything; a scale per row keeps it in its token's row
    assert torch.equal(finite["output"], rows[:, None].expand(8, 24) & (not everywhere))
    if recipe == "blockwise_requant":
        columns[:] = False  # the stored copy of the token's tile is NaN throughout, so every column of it is
    assert torch.equal(finite["grad_weight"], columns[None].expand(24, 32) & (not everywhere))


@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_one_nan_in_grad_output_reaches_both_gradients(recipe: str, backend: str) -> None:
    x, go = drawn(8, 32, seed=21), drawn(8, 24, seed=22)
    go[2, 4] = math.nan
    results = ran(recipe, backend, x, go)
    assert results["output"].isfinite().all()
    assert results["grad_input"][2].isnan().all()
    assert results["grad_weight"][4].isnan().all()
    if recipe != "tensorwise":
        assert results["grad_input"].isnan().any(1).sum() == 1


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_no_tokens_give_no_output_and_zero_gradients(
    recipe: str, backend: str, shape: tuple[int, ...]
) -> None:
    x, go = torch.empty(shape), torch.empty(*shape[:-1], 24)
    if backend == "torchao_float8" and RECIPES[recipe].grad_weight.is_fp8:
        # torchao takes the amax over no elements: of the tensor, or of the tokens; loud, so left as it is
        with pytest.raises((RuntimeError, IndexError), match=r"max\(\)|amax\(\)"):
            ran(recipe, backend, x, go)
        return
    results = ran(recipe, backend, x, go)
    assert results["output"].shape == (*shape[:-1], 24)
    assert results["grad_input"].shape == shape
    assert (results["grad_weight"] == 0).all()
    assert results["grad_weight"].shape == (24, 32)


@pytest.mark.parametrize("sizes", [(1, 16, 16), (3, 17, 19), (129, 131, 127), (1, 1, 1)])
@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_one_token_and_odd_sizes(recipe: str, backend: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    linear = layer(k, n, dtype=torch.bfloat16)
    x, go = drawn(m, k, seed=23, dtype=torch.bfloat16), drawn(m, n, seed=24, dtype=torch.bfloat16)
    results = ran(recipe, backend, x, go, linear)
    exact = exact_gemms(recipe, x, linear.weight.detach(), go)
    for gemm, reduced in (("output", k), ("grad_input", n), ("grad_weight", m)):
        assert_within_rounding(results[gemm], *exact[gemm], reduced)


@pytest.mark.parametrize(("recipe", "backend"), ARMS)
def test_leading_axes_are_tokens(recipe: str, backend: str) -> None:
    x, go = drawn(6, 32, seed=25), drawn(6, 24, seed=26)
    flat, shaped = ran(recipe, backend, x, go), ran(recipe, backend, x.view(2, 3, 32), go.view(2, 3, 24))
    assert torch.equal(flat["output"], shaped["output"].view(6, 24))
    assert torch.equal(flat["grad_input"], shaped["grad_input"].view(6, 32))
    assert torch.equal(flat["grad_weight"], shaped["grad_weight"])


# --- conversion and jitter ---------------------------------------------------------------------------------


def test_conversion_keeps_parameters_hooks_and_the_training_flag() -> None:
    linear = layer(16, 24, bias=True)
    weight, bias, calls = linear.weight, linear.bias, []
    handle = linear.register_forward_hook(lambda *_: calls.append("ran"))
    linear.eval()
    converted = convert(linear, spec("rowwise"))
    assert isinstance(converted, ReferenceLinear)
    assert converted.weight is weight
    assert converted.bias is bias
    assert not converted.training
    converted(torch.ones(2, 16))
    handle.remove()
    converted(torch.ones(2, 16))
    assert calls == ["ran"]
    assert list(converted.state_dict()) == ["weight", "bias"]
    assert "recipe=rowwise, weight_cast_source=compute" in repr(converted)


class LoraLinear(nn.Linear):
    """Stands for any subclass whose own forward a conversion would drop."""


def test_subclasses_and_patched_instances_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"a LoraLinear with its own forward cannot become FP8"):
        convert(LoraLinear(16, 16), spec("rowwise"))
    with pytest.raises(UsageError, match="a ReferenceLinear with its own forward"):
        convert(convert(layer(16, 16), spec("rowwise")), spec("rowwise"))
    patched = layer(16, 16)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"precision\.exclude"):
        convert(patched, spec("rowwise"))
    with pytest.raises(UsageError, match="'bf16' has no FP8 casts"):
        convert(layer(16, 16), spec("bf16"))


def test_jitter_constants_are_drawn_per_seed_and_replica() -> None:
    drawn_constants = [jitter_constant(s, r) for s in range(30) for r in range(1, 11)]
    assert len(set(drawn_constants)) == 300
    assert all(0.85 <= c < 1 for c in drawn_constants)
    # the mean of 300 uniforms on [0.85, 1) has sd 0.15 / sqrt(12 * 300) = 0.0025; seeded: no chance is left
    assert np.mean(drawn_constants) == pytest.approx(0.925, abs=0.01)
    assert jitter_constant(7, 3) == jitter_constant(7, 3)
    assert [jitter_constant(s, 0) for s in range(5)] == [1.0] * 5


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_jittered_replica_errs_as_much_but_differently(recipe: str) -> None:
    x, go = drawn(64, 128, seed=27), drawn(64, 96, seed=28)
    linear = layer(128, 96)
    plain = three_gemms(linear, x, go.float(), autocast=False)
    a = three_gemms(convert(layer(128, 96), spec(recipe)), x, go, autocast=False)
    b = three_gemms(convert(layer(128, 96), spec(recipe), jitter_constant(1, 1)), x, go, autocast=False)
    for gemm in GEMMS:
        if not RECIPES[recipe].gemm(gemm).is_fp8:
            torch.testing.assert_close(a[gemm], b[gemm])
            continue
        errors = [((t - plain[gemm]) / plain[gemm].norm()).double() for t in (a, b) for t in [t[gemm]]]
        assert not torch.equal(a[gemm], b[gemm])
        # noise-matched: the rms of thousands of rounding errors agrees to a few per cent; 1.5 is far outside
        assert 1 / 1.5 < (errors[0].norm() / errors[1].norm()).item() < 1.5
