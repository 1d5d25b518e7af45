"""A Llama-style decoder whose every GEMM is an `nn.Linear` with a stable FQN (the names of `shapes.py`)."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8parity.spec import ModelSpec


def next_token_loss(logits: Tensor, rows: Tensor) -> Tensor:
    """Return the mean loss in nats per token of logits [rows, context, vocabulary] on rows int64 [rows, context + 1].

    The softmax is taken in fp32.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_table(context: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each fp32 [context, head_dim / 2], of the rotary embedding (Su et al. 2021, RoFormer)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(context, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last axis of x [batch, heads, context, head_dim] in fp32; returns x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = spec.n_heads, spec.n_kv_heads
        self.head_dim = spec.dim // spec.n_heads
        q, kv = spec.n_heads * self.head_dim, spec.n_kv_heads * self.head_dim
        self.fused = spec.fused_qkv
        if self.fused:
            self.qkv_proj = nn.Linear(spec.dim, q + 2 * kv, bias=False)
        else:
            self.q_proj = nn.Linear(spec.dim, q, bias=False)
            self.k_proj = nn.Linear(spec.dim, kv, bias=False)
            self.v_proj = nn.Linear(spec.dim, kv, bias=False)
        self.o_proj = nn.Linear(q, spec.dim, bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.fused:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        parts: tuple[Tensor, Tensor, Tensor] = self.qkv_proj(x).split((q, kv, kv), dim=-1)
        return parts

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x [batch, context, dim] to the same shape."""
        batch, context, _ = x.shape
        q, k, v = (t.view(batch, context, -1, self.head_dim).transpose(1, 2) for t in self._project(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.n_kv_heads != self.n_heads:
            repeat = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, context, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.fused = spec.fused_gate_up
        if self.fused:
            self.gate_up_proj = nn.Linear(spec.dim, 2 * spec.ffn_dim, bias=False)
        else:
            self.gate_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
            self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, context, dim] to the same shape."""
        gate, up = (
            self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        )
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attn = Attention(spec)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.ffn = FeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map the residual stream x [batch, context, dim] to the same shape."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class DecoderLM(nn.Module):
    """The decoder: tokens [batch, context] int64 to logits [batch, context, vocab_size].

    `activation_checkpointing` recomputes each block in the backward pass, which changes memory, not numbers.
    """

    def __init__(self, spec: ModelSpec, vocab_size: int, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.activation_checkpointing = activation_checkpointing
        self.embed = nn.Embedding(vocab_size, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.n_layers))
        self.norm = RMSNorm(spec.dim, spec.norm_eps)
        self.head = nn.Linear(spec.dim, vocab_size, bias=False)
        if spec.tied_head:
            self.head.weight = self.embed.weight
        self._rope: tuple[Tensor, Tensor] | None = None

    def _rope_for(self, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # No buffer: bf16-true would round the table, and a twin that shares parameters would need a copy.
        if self._rope is None or self._rope[0].shape[0] != context or self._rope[0].device != device:
            head_dim = self.spec.dim // self.spec.n_heads
            self._rope = rope_table(context, head_dim, self.spec.rope_theta, device)
        return self._rope

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, context, vocab_size] in the compute dtype."""
        cos, sin = self._rope_for(tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def initialise(model: DecoderLM, seed: int) -> None:
    """Draw all weights on the CPU from one generator, so that a seed means the same weights on every device.

    Normal with `init_std`; the two projections that write to the residual stream get init_std / sqrt(2 L), since
    2 L of them add up (GPT-2: Radford et al. 2019, section 2.3; Megatron-LM's scaled_init_method_normal).
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    std = model.spec.init_std
    residual_std = std / math.sqrt(2 * model.spec.n_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        # dtype and device are named because Lightning builds models under the run's own defaults
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, residual_std if is_residual else std, generator=generator))


def parameters_digest(model: nn.Module) -> str:
    """Return the sha256 of every parameter's name, shape and bytes: equal digests mean equal weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        flat = parameter.detach().cpu().contiguous().reshape(-1)  # a view of bytes needs an axis
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sharing_twin(model: DecoderLM) -> DecoderLM:
    """Return a decoder of plain linears whose parameters are the very parameters of `model`.

    It evaluates every arm in the same BF16 arithmetic, without toggling classes (which would recompile).
    """
    with torch.device("meta"):
        twin = DecoderLM(model.spec, model.embed.num_embeddings)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        twin.get_submodule(owner)._parameters[leaf] = parameter
    return twin
