"""The held-out loss: in BF16 for every arm, through a twin that shares the parameters, and with the arm's own forward.

What training with FP8 did to the weights and what FP8 does to an evaluation are different findings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8parity.model import DecoderLM, sharing_twin
from fp8parity.own_model import plain_twin
from fp8parity.precision.bf16 import use_fp32_accumulation
from fp8parity.probe_signals import blocks_of
from fp8parity.spec import RunSpec


def bf16_twin(model: nn.Module, spec: RunSpec) -> nn.Module:
    """Return the BF16 twin, with the control's GEMM arithmetic and compiled as the model is."""
    twin: nn.Module = sharing_twin(model) if isinstance(model, DecoderLM) else plain_twin(model)
    if spec.train.bf16_gemm == "fp32_accumulate":
        use_fp32_accumulation(twin)
    if spec.train.compile == "blocks":
        for block in blocks_of(twin).values():
            block.compile()
    return twin


@torch.no_grad()
def held_out_loss(
    model: nn.Module, rows: Tensor, rows_per_batch: int, context: Callable[[], AbstractContextManager[object]]
) -> float:
    """Return the mean loss in nats per token over rows [sequences, context + 1], summed in fp64.

    `context` enters the compute dtype (autocast). The module's training flag is restored.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for part in rows.split(rows_per_batch):
        with context():
            logits = model(part[:, :-1])
        total += F.cross_entropy(
            logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        ).double()
    model.train(was_training)
    return float(total / (rows.shape[0] * (rows.shape[1] - 1)))
