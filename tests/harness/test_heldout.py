from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor, nn

from fp8parity import precision
from fp8parity.heldout import bf16_twin, held_out_loss
from fp8parity.layer_policy import resolve
from fp8parity.model import DecoderLM, initialise
from fp8parity.shapes import linear_shapes
from fp8parity.spec import RunSpec

SPEC = RunSpec.model_validate(
    {
        "model": {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64},
        "data": {},
        "optim": {"lr": 1e-3},
        "train": {
            "steps": 10,
            "batch_size": 4,
            "context": 16,
            "eval_every": 5,
            "bf16_gemm": "fp32_accumulate",
        },
        "precision": {"recipe": "rowwise", "keep_first": 4, "keep_last": 4},
        "seed": 0,
    }
)
ROWS = torch.randint(0, 64, (7, 17), generator=torch.Generator().manual_seed(0))


class Uniform(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        return torch.zeros((*tokens.shape, 64))


@pytest.mark.parametrize("rows_per_batch", [1, 3, 7, 100])
def test_uniform_predictions_cost_the_log_of_the_vocabulary(rows_per_batch: int) -> None:
    model = Uniform()
    loss = held_out_loss(model, ROWS, rows_per_batch, contextlib.nullcontext)
    # cross entropy in fp32: 112 tokens, each with relative error of a few 2**-24
    assert loss == pytest.approx(math.log(64), rel=1e-6)
    assert model.training


def test_twin_evaluates_the_fp8_arm_as_the_control_would() -> None:
    control, arm = (DecoderLM(SPEC.model, 64) for _ in range(2))
    for model in (control, arm):
        initialise(model, 0)
    precision.apply(arm, resolve(linear_shapes(SPEC.model, 64), SPEC.precision), SPEC.precision)
    control_twin, arm_twin = bf16_twin(control, SPEC), bf16_twin(arm, SPEC)

    def bf16() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    in_bf16 = held_out_loss(arm_twin, ROWS, 4, bf16)
    assert in_bf16 == held_out_loss(control_twin, ROWS, 4, bf16)
    assert in_bf16 != held_out_loss(arm, ROWS, 4, bf16)
    with torch.no_grad():
        arm.head.weight.mul_(3)
    assert held_out_loss(arm_twin, ROWS, 4, bf16) != in_bf16
