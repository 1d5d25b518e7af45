from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fp8parity.model import DecoderLM
from fp8parity.shapes import linear_shapes, parameter_count, shape_problems
from fp8parity.spec import ModelSpec

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
VARIANTS = [
    {"fused_qkv": q, "fused_gate_up": g, "tied_head": t}
    for q, g, t in itertools.product((False, True), repeat=3)
]


def trace(model: nn.Module) -> list[tuple[str, int, int, torch.Tensor]]:
    """Return (fqn, K, N, input) of every linear in the order in which they really run; inputs are kept alive."""
    seen: list[tuple[str, int, int, torch.Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, name=name: seen.append((name, m.in_features, m.out_features, args[0]))
            )
    with torch.no_grad():
        model(torch.zeros((1, 8), dtype=torch.long))
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_list_equals_a_trace_of_the_real_model(variant: dict[str, bool]) -> None:
    spec = ModelSpec.model_validate({**SIZES, **variant})
    traced = trace(DecoderLM(spec, 64))
    shapes = linear_shapes(spec, 64)
    assert [(s.fqn, s.k, s.n) for s in shapes] == [(name, k, n) for name, k, n, _ in traced]
    assert [s.order for s in shapes] == list(range(len(shapes)))
    # linears are one group exactly when they follow each other and read the same tensor
    for (a, b), (ta, tb) in zip(itertools.pairwise(shapes), itertools.pairwise(traced), strict=True):
        assert (a.group == b.group) == (ta[3] is tb[3]), (a.fqn, b.fqn)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_count_equals_the_model(variant: dict[str, bool]) -> None:
    spec = ModelSpec.model_validate({**SIZES, **variant})
    assert parameter_count(spec, 64) == sum(p.numel() for p in DecoderLM(spec, 64).parameters())


@pytest.mark.parametrize(
    ("preset", "rows", "millions"),
    [("0.7m", 272, 0.7), ("4m", 272, 4), ("25m", 272, 25), ("125m", 32768, 125), ("350m", 32768, 350),
     ("1b", 32768, 1000), ("3b", 32768, 3000), ("8b", 32768, 8000)],
)  # fmt: skip
def test_presets_are_named_by_their_size(preset: str, rows: int, millions: float) -> None:
    count = parameter_count(ModelSpec.model_validate({"preset": preset}), rows)
    assert count == pytest.approx(millions * 1e6, rel=0.15)


@pytest.mark.parametrize(
    ("k", "n", "tokens", "recipe", "backend", "bad"),
    [
        (32, 48, 64, "tensorwise", "torchao_float8", []),
        (24, 48, 64, "tensorwise", "torchao_float8", [("output", "K")]),
        (32, 40, 64, "rowwise", "torchao_float8", [("output", "N")]),
        (32, 48, 21, "rowwise", "torchao_float8", [("grad_weight", "M")]),
        (32, 48, 21, "rowwise_with_gw_hp", "torchao_float8", []),
        (128, 256, 128, "blockwise", "torchao_blockwise", []),
        (144, 256, 64, "blockwise", "torchao_blockwise", [("output", "K"), ("grad_weight", "M")]),
        (7, 5, 3, "blockwise", "reference", []),
    ],
)
def test_kernel_rules(
    k: int, n: int, tokens: int, recipe: str, backend: str, bad: list[tuple[str, str]]
) -> None:
    shape = linear_shapes(ModelSpec.model_validate(SIZES), 64)[0]
    shape = type(shape)(shape.fqn, k, n, 0, 0, 0)
    problems = shape_problems(shape, tokens, recipe, backend)
    assert [(p.gemm, p.dimension) for p in problems] == bad
    for problem in problems:
        assert str(problem.size) in str(problem)
        assert ("train.batch_size" if problem.dimension == "M" else "precision.exclude") in str(problem)
