"""The casts equal torchao's own, bit for bit: its three recipes, and its PyTorch references of block scaling."""

from __future__ import annotations

import ast
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8parity import casts
from fp8parity.casts import RECIPES


def torchao_cast(gemm: casts.Gemm, operand: casts.Operand, recipe: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What torchao's own conversion makes of a 2-D operand (reduced axis last): codes and scale."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    config = Float8LinearConfig.from_recipe_name(recipe)
    suffix = {
        ("grad_weight", "input"): "_for_grad_weight",
        ("grad_input", "weight"): "_for_grad_input",
        ("grad_weight", "grad_output"): "_for_grad_weight",
    }.get((gemm, operand), "")
    cast = getattr(config, f"cast_config_{operand}{suffix}")
    fp8 = hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        LinearMMConfig(),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return fp8._data, fp8._scale


TORCHAO_CASTS = [
    (recipe, gemm, operand)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    for gemm, operand, _ in RECIPES[recipe].casts
]


def assert_same_bits(ours: Tensor, theirs: Tensor, view: torch.dtype) -> None:
    """Equal bits; of a NaN only that it is one: its sign and payload depend on the order of a reduction."""
    nan = ours.float().isnan()
    assert torch.equal(nan, theirs.float().isnan())
    assert torch.equal(ours.view(view)[~nan], theirs.view(view)[~nan])


def assert_bits_equal_to_torchao(recipe: str, gemm: casts.Gemm, operand: casts.Operand, x: Tensor) -> None:
    plan = RECIPES[recipe].gemm(gemm).cast_of(operand)
    assert plan is not None
    codes, scale = casts.quantise(x, plan)
    theirs, their_scale = torchao_cast(gemm, operand, recipe, x)
    assert codes.dtype == theirs.dtype
    assert scale.shape == their_scale.shape
    assert_same_bits(scale, their_scale, torch.int32)
    assert_same_bits(codes, theirs, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random, structured and extreme matrices in fp32 or bf16, contiguous or transposed."""
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, columns, generator=generator)
    kind = draw(
        st.sampled_from(["normal", "lognormal", "rows", "one", "zero row", "constant", "powers", "special"])
    )
    if kind == "lognormal":
        x = x.sign() * torch.exp(4 * torch.randn(rows, columns, generator=generator))
    elif kind == "rows":
        x *= 2.0 ** torch.randint(-60, 60, (rows, 1), generator=generator)
    elif kind == "one":
        x[rows // 2, columns // 2] = draw(st.sampled_from([1e30, -1e-13, 448.0, 57344.0, 1e4]))
    elif kind == "zero row":
        x[rows // 2] = 0
    elif kind == "constant":
        x = torch.full_like(x, draw(st.floats(width=32, allow_nan=False, allow_infinity=False)))
    elif kind == "powers":
        x = x.sign() * 2.0 ** torch.randint(-40, 40, (rows, columns), generator=generator)
    elif kind == "special":
        x[rows // 2, columns // 2] = draw(st.sampled_from([math.inf, -math.inf, math.nan, -0.0]))
    x = x * draw(st.sampled_from([1.0, 1e-14, 1e-30, 1e-38, 1e8, 3.0]))
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    return x.t() if draw(st.booleans()) else x


@pytest.mark.parametrize(("recipe", "gemm", "operand"), TORCHAO_CASTS)
@settings(max_examples=120, deadline=None)
@given(x=tensors())
def test_every_cast_of_torchaos_recipes_is_bit_equal(
    recipe: str, gemm: casts.Gemm, operand: casts.Operand, x: Tensor
) -> None:
    assert_bits_equal_to_torchao(recipe, gemm, operand, x)


@pytest.mark.parametrize(("recipe", "gemm", "operand"), TORCHAO_CASTS)
def test_bit_equality_over_every_bfloat16(recipe: str, gemm: casts.Gemm, operand: casts.Operand) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    assert_bits_equal_to_torchao(recipe, gemm, operand, finite.reshape(1, -1))
    # one element a row: every bf16 as amax
    assert_bits_equal_to_torchao(recipe, gemm, operand, every.reshape(-1, 1))


def test_the_recipes_of_torchao_disable_the_gemms_that_the_plans_leave_in_high_precision() -> None:
    from torchao.float8.config import Float8LinearConfig, ScalingType

    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = Float8LinearConfig.from_recipe_name(recipe)
        disabled = config.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED
        assert RECIPES[recipe].grad_weight.is_fp8 is not disabled


def torchao_blockwise_references() -> dict[str, Any]:
    """The PyTorch references of torchao's blockwise kernels, from the source: their module needs triton."""
    found = find_spec("torchao")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "prototype" / "blockwise_fp8_training" / "kernels.py"
    prefix = "torch_blockwise_scale_"
    wanted = {prefix + "act_quant_lhs", prefix + "act_quant_rhs", prefix + "weight_quant"}
    tree = ast.parse(path.read_text()).body
    body = [node for node in tree if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(body) == len(wanted)
    eps = [node for node in tree if isinstance(node, ast.Assign) and ast.unparse(node).startswith("EPS =")]
    scope: dict[str, Any] = {
        "torch": torch,
        "Tuple": tuple,
        "e4m3_dtype": torch.float8_e4m3fn,
        "FP8_E4M3_DTYPES": (torch.float8_e4m3fn,),
    }
    exec(compile(ast.Module(body=[*eps, *body], type_ignores=[]), str(path), "exec"), scope)
    assert scope["EPS"] == casts.AMAX_FLOOR
    return scope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_casts_are_bit_equal_to_torchaos_block_references(dtype: torch.dtype) -> None:
    theirs = torchao_blockwise_references()
    generator = torch.Generator().manual_seed(3)
    magnitude = 2.0 ** torch.randint(-30, 9, (256, 1), generator=generator)
    x = (torch.randn(256, 384, generator=generator) * magnitude).to(dtype)
    x[3] = 0
    plan = RECIPES["blockwise"]
    tile, square = plan.output.left, plan.output.right
    assert tile is not None
    assert square is not None
    cases = (
        (casts.quantise(x, tile), theirs["torch_blockwise_scale_act_quant_lhs"](x)),
        (casts.quantise(x, square), theirs["torch_blockwise_scale_weight_quant"](x)),
    )
    for (codes, scale), (their_codes, inverse) in cases:
        assert torch.equal(codes.view(torch.uint8), their_codes.view(torch.uint8))
        assert torch.equal(1.0 / scale, inverse)
    codes, scale = casts.quantise(x.t(), tile)  # their rhs quantiser works down the columns
    their_codes, inverse = theirs["torch_blockwise_scale_act_quant_rhs"](x)
    assert torch.equal(codes.t().view(torch.uint8), their_codes.view(torch.uint8))
    assert torch.equal(1.0 / scale.t(), inverse)
