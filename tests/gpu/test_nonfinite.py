"""An inf or NaN on this GPU: every recipe and backend gives NaN where `casts.py` says, never a finite number."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fp8parity import casts
from fp8parity.casts import GEMMS
from fp8parity.precision import torchao_blockwise
from fp8parity.precision.torchao_blockwise import TILES
from fp8parity.selftest.exact import quantised_pair
from fp8parity.selftest.operands import SQUARE, Operands, gaussian, mapped
from fp8parity.selftest.session import default_subjects
from fp8parity.selftest.subject import Converted, run
from fp8parity.spec import PrecisionSpec

LABELS = [f"{p.recipe}/{p.backend}" for p in default_subjects()]
NEEDS_HOPPER = ("rowwise", "rowwise_with_gw_hp", "blockwise")
BAD = (math.nan, math.inf, -math.inf)
PLACE = (37, 141)
"""Row and column, in a block of its own along either axis."""

Name = Literal["input", "weight", "grad_output"]
NAMES: tuple[Name, ...] = ("input", "weight", "grad_output")


def subject(label: str, *, compiled: bool = False) -> Converted:
    recipe, _, backend = label.partition("/")
    if backend != "reference" and recipe in NEEDS_HOPPER and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{label} needs compute capability 9.0, this is {torch.cuda.get_device_capability()}")
    precision = PrecisionSpec.model_validate({"recipe": recipe, "backend": backend})
    return Converted(precision, torch.device("cuda"), compiled)


def with_bad(name: Name, bad: float) -> Operands:
    def place(x: Tensor) -> Tensor:
        x[PLACE] = bad
        return x

    return mapped(gaussian(SQUARE, torch.device("cuda"), 5), place, name)


def assert_not_finite_as_casts_say(tested: Converted, name: Name, bad: float) -> None:
    operands = with_bad(name, bad)
    results = run(tested.linear(operands.weight.float()), operands)
    plan = casts.recipe_plan(tested.precision.recipe)
    for gemm in GEMMS:
        left, right = quantised_pair(plan, gemm, operands)
        expected = ~(left @ right.t()).isfinite()
        found = ~results[gemm].isfinite()
        reads = name in casts.OPERANDS[gemm]
        where = f"{gemm}, {bad} in {name}: {int(found.sum())} not finite, expected {int(expected.sum())}"
        assert bool(expected.any()) == reads, where
        assert torch.equal(found, expected), where


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", LABELS)
def test_an_inf_or_nan_is_never_turned_into_a_finite_number(label: str, name: Name, bad: float) -> None:
    assert_not_finite_as_casts_say(subject(label), name, bad)


@pytest.mark.parametrize(
    "label", [x for x in LABELS if x.endswith("torchao_float8") or "torchao_blockwise" in x]
)
def test_nor_is_it_when_compiled(label: str) -> None:
    torch._dynamo.reset()
    for name in NAMES:
        assert_not_finite_as_casts_say(subject(label, compiled=True), name, math.nan)
    assert_not_finite_as_casts_say(subject(label, compiled=True), "input", math.inf)


# --- torchao's block-scaled quantisation kernels -----------------------------------------------------------


@pytest.fixture
def kernels() -> Any:
    """torchao's module as a run has it."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torchao's block-scaled kernels need compute capability 9.0")
    torchao_blockwise._import_linear()
    from torchao.prototype.blockwise_fp8_training import kernels

    return kernels


def inverse_scales(kernels: Any, kernel: str, x: Tensor) -> Tensor:
    """Return the inverse scales with the reduced axis last."""
    name = kernel.removesuffix("_kernel")
    _, inverse = getattr(kernels, name)(x)
    result: Tensor = inverse.t() if name.endswith("act_quant_rhs") else inverse
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kernel", TILES)
def test_a_bad_group_and_no_other_gets_a_nan_scale(
    kernels: Any, kernel: str, bad: float, dtype: torch.dtype
) -> None:
    x = torch.randn(384, 512, device="cuda", dtype=dtype)
    sound = inverse_scales(kernels, kernel, x).clone()
    x[PLACE] = bad
    found = inverse_scales(kernels, kernel, x)
    assert int(found.isnan().sum()) == 1
    assert torch.equal(found[~found.isnan()], sound[~found.isnan()])


UNCORRECTED = """
import torch
from torchao.prototype.blockwise_fp8_training import kernels
from fp8parity.precision import torchao_blockwise
torchao_blockwise.fix_tiles(kernels)
x = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
x[37, 141] = float("nan")
codes, inverse = kernels.triton_fp8_blockwise_act_quant_lhs(x)
print("finite", bool(codes.float().isfinite().all() and inverse.isfinite().all()))
"""


def test_torchaos_own_kernel_loses_a_nan() -> None:
    """Why `pass_on_non_finite` exists: when this fails, torchao or Triton was mended, and it can go."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torchao's block-scaled kernels need compute capability 9.0")
    ran = subprocess.run([sys.executable, "-c", UNCORRECTED], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == ["finite True"], ran.stderr[-2000:]
