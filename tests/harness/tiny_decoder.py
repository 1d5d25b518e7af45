"""A decoder of a few thousand parameters with its loss, for tests of the probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8parity.model import DecoderLM
from fp8parity.module import build_model
from fp8parity.spec import RunSpec

VOCAB = 64
BACKENDS = {
    "bf16": "torchao_float8",
    "tensorwise": "torchao_float8",
    "rowwise": "torchao_float8",
    "rowwise_with_gw_hp": "torchao_float8",
    "blockwise": "reference",
    "blockwise_requant": "reference",
}


def run_spec(recipe: str, *, backend: str | None = None, model: Any = None, **train: Any) -> RunSpec:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64, **(model or {})}
    return RunSpec.model_validate(
        {
            "model": sizes,
            "data": {"source": "bin", "path": "corpus.bin"},
            "optim": {"lr": 1e-3},
            "train": {
                "steps": 10, "batch_size": 4, "context": 16, "eval_every": 5, "device": "cpu",
                "bf16_gemm": "fp32_accumulate", **train,
            },
            "precision": {"recipe": recipe, "backend": backend or BACKENDS[recipe]},
            "seed": 0,
        }
    )  # fmt: skip


def decoder(recipe: str, **kwargs: Any) -> DecoderLM:
    return build_model(run_spec(recipe, **kwargs), VOCAB).model


def rows(seed: int = 0, count: int = 4, context: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count, context + 1), generator=generator)


def loss_of(model: torch.nn.Module, parts: int = 1) -> Callable[[Tensor], Tensor]:
    """Return the loss of one of `parts` micro-batches under CPU autocast, as training has it."""

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / parts

    return loss
