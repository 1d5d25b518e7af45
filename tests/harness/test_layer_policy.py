from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp8parity.errors import UsageError
from fp8parity.layer_policy import resolve
from fp8parity.shapes import linear_shapes
from fp8parity.spec import ModelSpec, PrecisionSpec

MODEL = ModelSpec.model_validate({"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64})
SHAPES = linear_shapes(MODEL, 64)
BLOCK = (
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "attn.o_proj",
    "ffn.gate_proj",
    "ffn.up_proj",
    "ffn.down_proj",
)


def fp8(**precision: Any) -> tuple[str, ...]:
    return resolve(SHAPES, PrecisionSpec.model_validate({"recipe": "rowwise", **precision})).fp8_fqns


def block(index: int, names: tuple[str, ...] = BLOCK) -> tuple[str, ...]:
    return tuple(f"blocks.{index}.{name}" for name in names)


def test_four_gemms_are_one_dense_block() -> None:
    assert fp8(keep_first=4, keep_last=4) == block(1)


def test_units() -> None:
    assert fp8(unit="block", keep_first=1, keep_last=1) == block(1)
    assert fp8(unit="linear", keep_first=1, keep_last=0)[:2] == (
        "blocks.0.attn.k_proj",
        "blocks.0.attn.v_proj",
    )
    assert fp8(unit="gemm", keep_first=1, keep_last=0)[0] == "blocks.0.attn.o_proj"
    assert fp8(unit="gemm", keep_first=0, keep_last=1)[-1] == "blocks.2.ffn.up_proj"


def test_head_stays_unless_asked() -> None:
    assert "head" not in fp8()
    assert fp8(convert_head=True)[-1] == "head"
    assert fp8(convert_head=True, keep_last=1)[-1] == "blocks.2.ffn.down_proj"
    assert fp8(convert_head=True, unit="block", keep_last=1)[-1] == "blocks.2.ffn.down_proj"


def test_order_is_execution_order_not_the_order_given() -> None:
    plan = resolve(
        SHAPES[::-1], PrecisionSpec.model_validate({"recipe": "rowwise", "keep_first": 4, "keep_last": 4})
    )
    assert plan.fp8_fqns == block(1)


def test_patterns() -> None:
    assert fp8(include=["blocks.*.ffn.*"]) == tuple(
        name for i in range(3) for name in block(i, ("ffn.gate_proj", "ffn.up_proj", "ffn.down_proj"))
    )
    assert fp8(exclude=["re:attn", "*.down_proj"], keep_first=4) == tuple(
        name for i in (1, 2) for name in block(i, ("ffn.gate_proj", "ffn.up_proj"))
    )


@pytest.mark.parametrize(("recipe", "fp8_gemms"), [("rowwise", 3), ("rowwise_with_gw_hp", 2)])
def test_reasons_and_flop_share(recipe: str, fp8_gemms: int) -> None:
    plan = resolve(
        SHAPES, PrecisionSpec.model_validate({"recipe": recipe, "keep_first": 4, "exclude": ["*.o_proj"]})
    )
    reasons = {d.fqn: d.reason for d in plan.decisions}
    assert reasons["blocks.0.attn.q_proj"] == "among the first 4 (gemm)"
    assert reasons["blocks.1.attn.o_proj"] == "precision.exclude '*.o_proj'"
    assert reasons["head"] == "output head"
    assert reasons["blocks.1.attn.q_proj"] == recipe
    flops = {s.fqn: s.k * s.n for s in SHAPES}
    converted = sum(flops[name] for name in plan.fp8_fqns)
    assert plan.fp8_flop_share == pytest.approx(fp8_gemms * converted / (3 * sum(flops.values())), rel=1e-15)


def test_a_model_none_of_whose_linears_runs() -> None:
    shapes = [replace(s, runs=False) for s in SHAPES]
    plan = resolve(shapes, PrecisionSpec.model_validate({"recipe": "bf16"}))
    assert (plan.fp8_fqns, plan.fp8_flop_share) == ((), 0)
    with pytest.raises(UsageError, match="calls the forward of none of its 22 nn.Linear; let it call them"):
        resolve(shapes, PrecisionSpec.model_validate({"recipe": "rowwise"}))
    with pytest.raises(UsageError, match="none of its 0 nn.Linear"):
        resolve([], PrecisionSpec.model_validate({"recipe": "rowwise"}))


def test_control_converts_nothing() -> None:
    plan = resolve(SHAPES, PrecisionSpec.model_validate({"recipe": "bf16"}))
    assert plan.fp8_fqns == ()
    assert plan.fp8_flop_share == 0


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (
            {"keep_first": 6, "keep_last": 6},
            r"keep_first 6, keep_last 6 .* leave none of 12 gemms in FP8.*keep fewer",
        ),
        ({"exclude": ["blocks.*"]}, "leave none"),
        ({"exclude": ["*.gate"]}, r"precision.exclude: '\*.gate' matches none of the 22 linears"),
        ({"include": ["re:nothing"]}, "precision.include: 're:nothing' matches none"),
        ({"include": ["re:("]}, "is no regular expression"),
    ],
)
def test_refusals(precision: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fp8(**precision)
