"""The fused kernels against the definitions in plain torch; the probe on a GPU: equal numbers, no trace, no wait."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8parity.casts import RECIPES, CastPlan
from fp8parity.module import build_model
from fp8parity.probe import GemmProbe
from fp8parity.spec import RunSpec
from fp8parity.tensor_stats import TensorCasts, _values, cast_stats, cast_sums
from fp8parity.tensor_sums import PEAKS, SUMS

PLANS = sorted(
    {plan for recipe in RECIPES.values() for _, _, plan in recipe.casts}
    | {
        CastPlan("e5m2", "row"),
        CastPlan("e5m2", "block_1xB", power_of_two=True),
        CastPlan("e5m2", "block_BxB"),
    },
    key=str,
)
EXACT = [name for name in (*SUMS, *PEAKS) if not name.endswith(("abs", "square"))]


def spread(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp(3 * torch.randn(rows, columns, generator=generator))
    x = x * 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.05, 0.0, x)


def assert_equal(x: Tensor, plan: CastPlan, scale: Tensor | None = None) -> None:
    """Counts and extremes are equal. Sums: 2^-24 for each rounding of a product or of a tree of at most 2^14 terms.

    An error is a difference of two numbers near |x|, each rounded to fp32: 2^-22 of the norm of x at most.
    """
    fused = dict(zip((*SUMS, *PEAKS), cast_sums(x, plan, scale).values.tolist(), strict=True))
    exact = dict(zip((*SUMS, *PEAKS), _values(x, plan, scale).tolist(), strict=True))
    for name in EXACT:
        assert fused[name] == exact[name], (name, str(plan))
    for name in ("abs", "square", "lost_abs", "lost_square"):
        assert fused[name] == pytest.approx(exact[name], rel=2e-6), (name, str(plan))
    assert fused["error_abs"] == pytest.approx(exact["error_abs"], rel=2e-6, abs=2**-22 * exact["abs"])
    noise, signal = (math.sqrt(exact[name]) for name in ("error_square", "square"))
    assert math.sqrt(fused["error_square"]) == pytest.approx(noise, rel=2e-6, abs=2**-22 * signal)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (128, 128), (130, 257), (1000, 640), (64, 4099)])
def test_fused_sums_equal_the_definitions(plan: CastPlan, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = spread(*shape).to("cuda", dtype)
    assert_equal(x, plan)
    assert_equal(x.t(), plan)  # read with strides, never copied
    assert_equal(x[:, ::2], plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_degenerate_input(plan: CastPlan) -> None:
    x = spread(200, 300)
    bad, zero = x.clone(), x.clone()
    bad[5, 9], bad[150, 290] = math.inf, math.nan
    zero[3], zero[:, 7], zero[128:, 128:256] = 0, 0, 0
    for case in (bad, zero, torch.zeros(5, 6), torch.full((3, 4), math.nan), x * 1e-14, x * 1e-30, x * 1e-36):
        assert_equal(case.cuda(), plan)
    assert cast_stats(torch.zeros(0, 6, device="cuda"), plan).element_count == 0


def test_a_stale_scale() -> None:
    x = spread(300, 200).cuda().bfloat16()
    for value in (50.0, 1e-6, 1e8):
        assert_equal(x, CastPlan("e4m3fn", "tensor"), torch.tensor(value, device="cuda"))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_scales_near_a_power_of_two_round_as_in_plain_torch(name: Any) -> None:
    """A logarithm a few ulp below a whole number is rounded up to it: the kernel must do as `scale_from_amax` does."""
    plan = CastPlan(name, "row", power_of_two=True)
    ulps = torch.arange(-12, 13) * 2.0**-23
    for k in range(-25, 26, 5):
        amax = (plan.max_value * 2.0**-k * (1 + ulps)).float()
        x = torch.stack((amax, amax * 0.37, amax * 0.0123), 1).cuda()
        assert_equal(x, plan)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_every_midpoint_between_codes(name: Any) -> None:
    codes = torch.arange(128, dtype=torch.uint8, device="cuda").view(CastPlan(name, "tensor").dtype).float()
    codes = codes[codes.isfinite()]
    middle = (codes[1:] + codes[:-1]) / 2
    below, above = middle.nextafter(torch.zeros_like(middle)), middle.nextafter(middle * 2)
    x = torch.cat((codes, middle, below, above))[None, :]
    assert_equal(x, CastPlan(name, "tensor"))
    assert cast_stats(codes[None, :], CastPlan(name, "tensor")).relative_error == 0


def test_sums_repeat_themselves_and_wait_for_nothing() -> None:
    x = spread(1000, 3000).cuda().bfloat16()
    first = [cast_sums(x, plan).values for plan in PLANS]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        casts = TensorCasts(x)
        again = [casts.sums(plan).values for plan in PLANS]
        turned = [casts.sums(plan, transposed=True).values for plan in PLANS]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for plan, values in zip(PLANS, turned, strict=True):
        assert torch.equal(values, cast_sums(x.t(), plan).values)


def _decoder(recipe: str, backend: str) -> tuple[torch.nn.Module, Any, Tensor]:
    spec = RunSpec.model_validate(
        {
            "model": {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512},
            "data": {"source": "bin", "path": "corpus.bin"},
            "optim": {"lr": 1e-3},
            "train": {
                "steps": 10, "batch_size": 4, "context": 128, "eval_every": 5, "device": "cuda", "compile": "blocks",
            },
            "precision": {"recipe": recipe, "backend": backend},
            "seed": 0,
        }
    )  # fmt: skip
    torch._dynamo.reset()
    model = build_model(spec, 512).model.cuda()
    rows = torch.randint(0, 512, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    return model, loss_of, rows


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("bf16", "torchao_float8"), ("tensorwise", "torchao_float8"), ("rowwise", "torchao_float8"),
     ("rowwise_with_gw_hp", "torchao_float8"), ("blockwise", "torchao_blockwise")],
)  # fmt: skip
def test_a_probe_leaves_no_trace_on_a_compiled_model(recipe: str, backend: str) -> None:
    model, loss_of, rows = _decoder(recipe, backend)
    loss_of(rows).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    before = [t.clone() for p in model.parameters() for t in (p, p.grad) if t is not None]
    random = torch.cuda.get_rng_state().clone()
    probe = GemmProbe(model, what_if=["tensorwise", "rowwise", "blockwise"] if recipe == "bf16" else [])
    result = probe.run(1, 512, rows.chunk(2), loss_of)
    after = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), random)
    loss_of(rows).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert len(result.casts) == {"bf16": 15 * 18, "rowwise_with_gw_hp": 14 * 4}.get(recipe, 14 * 6)
    assert all(20 < row["sqnr_db"] < 60 for row in result.casts)


@pytest.mark.parametrize(("recipe", "backend"), [("bf16", "torchao_float8"), ("rowwise", "torchao_float8")])
def test_a_probe_waits_for_the_device_once(recipe: str, backend: str) -> None:
    model, loss_of, rows = _decoder(recipe, backend)
    probe = GemmProbe(model, what_if=["tensorwise", "rowwise"])
    probe.run(1, 512, [rows], loss_of)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            probe.run(1, 512, [rows], loss_of)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(item.message) for item in caught if "synchroniz" in str(item.message)]
    assert len(waits) == 1, waits
