"""torchao's block-scaled quantisation kernels: every tile gives the codes of `casts.py`, so a fixed tile is safe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8parity import casts
from fp8parity.precision import torchao_blockwise
from fp8parity.precision.torchao_blockwise import TILES

PREFIX, SUFFIX = "triton_fp8_blockwise_", "_kernel"
WEIGHT_QUANTISERS = {"weight_quant_rhs", "weight_quant_transposed_rhs"}
COLUMNWISE = {"act_quant_rhs", "act_quant_transposed_lhs", "weight_quant_transposed_rhs"}
"""These scale groups along the rows of the input: the reduced axis is its first."""

WRITES_UNTRANSPOSED = {"act_quant_rhs"}


def quantisers() -> list[str]:
    return [name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in TILES]


@pytest.fixture
def kernels() -> Iterator[Any]:
    """torchao's module with the fixed tiles, as a run has it; other tiles set by a test are undone."""
    module = torchao_blockwise._import_linear()
    from torchao.prototype.blockwise_fp8_training import kernels

    assert module is not None
    yield kernels
    for name, tile in TILES.items():
        getattr(kernels, name).configs = [c for c in offered(kernels, name) if as_tile(c) == tile]


def as_tile(config: Any) -> torchao_blockwise.Tile:
    return dict(config.kwargs), config.num_warps, config.num_stages


def offered(kernels: Any, name: str) -> list[Any]:
    """What torchao tunes over. The kernels have no loop, so the number of stages changes nothing: one of each."""
    every = kernels.quant_kernel_configs if "weight" in name else kernels.quant_kernel_configs_with_groups
    return [c for c in every if c.num_stages == every[0].num_stages]


def operand(dtype: torch.dtype, device: str = "cuda") -> Tensor:
    """Magnitudes from subnormal codes to large, a zero row, zero columns and a lone outlier."""
    generator = torch.Generator().manual_seed(7)
    magnitude = 2.0 ** torch.randint(-30, 9, (384, 1), generator=generator)
    x = torch.randn(384, 512, generator=generator) * magnitude
    x[3] = 0
    x[:, 128:256] = 0
    x[200, 300] = 3e4
    return x.to(device, dtype)


def quantise(kernels: Any, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and inverse scales with the reduced axis last."""
    codes, inverse = getattr(kernels, PREFIX + name)(x)
    return (codes.t(), inverse.t()) if name in WRITES_UNTRANSPOSED else (codes, inverse)


def assert_codes_of_casts(kernels: Any, name: str, x: Tensor) -> None:
    plan = casts.RECIPES["blockwise"].output
    cast = plan.right if name in WEIGHT_QUANTISERS else plan.left
    assert cast is not None
    reduced_last = x.t() if name in COLUMNWISE else x
    codes, scale = casts.quantise(reduced_last, cast)
    theirs, inverse = quantise(kernels, name, x)
    assert torch.equal(theirs.contiguous().view(torch.uint8), codes.contiguous().view(torch.uint8))
    assert torch.equal(inverse, 1.0 / scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", quantisers())
def test_the_fixed_tile_gives_the_codes_of_casts(kernels: Any, name: str, dtype: torch.dtype) -> None:
    assert [as_tile(c) for c in getattr(kernels, PREFIX + name + SUFFIX).configs] == [
        TILES[PREFIX + name + SUFFIX]
    ]
    assert_codes_of_casts(kernels, name, operand(dtype))


@pytest.mark.parametrize("name", quantisers())
def test_every_tile_gives_the_same_codes(kernels: Any, name: str) -> None:
    kernel = getattr(kernels, PREFIX + name + SUFFIX)
    tiles = offered(kernels, PREFIX + name + SUFFIX)
    assert len(tiles) > 1
    for config in tiles:
        kernel.configs = [config]
        assert_codes_of_casts(kernels, name, operand(torch.bfloat16))
