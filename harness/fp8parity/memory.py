"""How much memory a run takes: an estimate to plan with, never a promise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8parity.own_spec import Inventory
from fp8parity.shapes import parameter_count
from fp8parity.spec import ModelSpec, RunSpec

PROCESS_BYTES = int(0.7 * 2**30)
"""What a worker takes before its model: Python and torch on the host, or the CUDA context and workspaces on a GPU."""

FORMULA = (
    "parameters x 18 bytes (fp32 weights, gradients and two Adam moments, bf16 copies; 8 for bf16-true) + tokens of a "
    "micro-batch x (blocks x what one saves for the backward pass + 14 x vocabulary) + 0.7 GiB of the process"
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one run: `states` (weights, gradients, optimizer), `activations`, `process`."""

    states: int
    activations: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.states + self.activations + self.process

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, all in bytes."""
        return {
            "total": self.total,
            "states": self.states,
            "activations": self.activations,
            "process": self.process,
        }


def _block_bytes_per_token(model: ModelSpec, *, compiled: bool, residual: int) -> int:
    """Return what one decoder block saves for its backward pass, per token.

    Compiled, what is pointwise is computed again: two residuals, the two norms' outputs, q, k, v and the mixed heads,
    gate, up and their product. Eager torch keeps each intermediate result, the norms' and rotations' in fp32. Flash
    attention saves no scores.
    """
    kv = model.n_kv_heads * (model.dim // model.n_heads)
    if compiled:
        return (2 * residual + 8) * model.dim + 4 * kv + 6 * model.ffn_dim
    return (6 * residual + 20) * model.dim + 12 * kv + 8 * model.ffn_dim


def _own_estimate(spec: RunSpec, model: Inventory) -> MemoryEstimate:
    """Return the estimate for a model of the user's: per token, what its GEMMs read and write, as a decoder's do.

    The factors make the formula of our own decoder out of the sums over its GEMMs (within a third); attention scores
    that a module keeps are not seen.
    """
    reads = {linear.group: linear.k for linear in model.linears if linear.runs and not linear.head}
    writes = sum(linear.n for linear in model.linears if linear.runs and not linear.head)
    per_read, per_write = (3, 2) if spec.train.compile != "off" else (8, 6)
    linears = per_read * sum(reads.values()) + per_write * writes
    if spec.train.activation_checkpointing:
        linears //= max(1, len(model.blocks))
    return MemoryEstimate(
        states=(18 if spec.train.compute == "bf16-mixed" else 8) * model.parameters,
        activations=spec.train.tokens_per_micro_batch * (linears + 14 * model.vocab_size),
    )


def estimate(spec: RunSpec, vocab_rows: int) -> MemoryEstimate:
    """Return the estimate for one run whose embedding has `vocab_rows` rows.

    Against the measured peaks of a 0.96 B decoder on an H200 (bf16-true, compiled blocks, batch 4 x 4096 tokens): 31
    GiB estimated, 24 to 29 measured. An FP8 copy of weights and activations lives for one GEMM only and is left out.
    """
    if not isinstance(spec.model, ModelSpec):
        return _own_estimate(spec, spec.model.found)
    mixed = spec.train.compute == "bf16-mixed"
    residual = 4 if mixed else 2
    block = _block_bytes_per_token(spec.model, compiled=spec.train.compile != "off", residual=residual)
    blocks = spec.model.n_layers * block
    if spec.train.activation_checkpointing:
        blocks = block + spec.model.n_layers * residual * spec.model.dim
    # logits in bf16 and fp32, their gradient in both, and one fp32 copy of the softmax
    head = 14 * vocab_rows + 2 * residual * spec.model.dim
    return MemoryEstimate(
        states=(18 if mixed else 8) * parameter_count(spec.model, vocab_rows),
        activations=spec.train.tokens_per_micro_batch * (blocks + head),
    )
