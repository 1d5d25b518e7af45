"""The GEMMs of a decoder, listed without torch: names, sizes, execution order, and which shapes FP8 allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fp8parity.spec import FP8_DIM_MULTIPLE, AnyModelSpec, ModelSpec


@dataclass(frozen=True)
class LinearShape:
    """One linear layer, weight [n, k].

    `order` counts execution in the forward pass; linears with equal `group` read the same input and count as
    one GEMM, as training stacks fuse them; `block` is the decoder block, None for the head and for a linear
    `outside` the blocks of a model of the user's. One that never `runs` is listed and never FP8.
    """

    fqn: str
    k: int
    n: int
    order: int
    group: int
    block: int | None
    outside: bool = False
    runs: bool = True

    @property
    def is_head(self) -> bool:
        """Whether this is the output head."""
        return self.block is None and not self.outside


def _block_groups(model: ModelSpec, block: int) -> list[list[tuple[str, int, int]]]:
    head_dim = model.dim // model.n_heads
    q, kv = model.n_heads * head_dim, model.n_kv_heads * head_dim
    attn, ffn = f"blocks.{block}.attn", f"blocks.{block}.ffn"
    qkv = (
        [(f"{attn}.qkv_proj", model.dim, q + 2 * kv)]
        if model.fused_qkv
        else [
            (f"{attn}.q_proj", model.dim, q),
            (f"{attn}.k_proj", model.dim, kv),
            (f"{attn}.v_proj", model.dim, kv),
        ]
    )
    gate_up = (
        [(f"{ffn}.gate_up_proj", model.dim, 2 * model.ffn_dim)]
        if model.fused_gate_up
        else [(f"{ffn}.gate_proj", model.dim, model.ffn_dim), (f"{ffn}.up_proj", model.dim, model.ffn_dim)]
    )
    return [
        qkv,
        [(f"{attn}.o_proj", q, model.dim)],
        gate_up,
        [(f"{ffn}.down_proj", model.ffn_dim, model.dim)],
    ]


@lru_cache(maxsize=64)
def linear_shapes(model: AnyModelSpec, vocab_size: int) -> tuple[LinearShape, ...]:
    """Return every linear of the model in execution order, the head last.

    A tied head is listed too: it is an `nn.Linear` that shares the embedding's weight. Those of a model of the user's
    were found by building it (`model_preflight.resolve`).
    """
    if not isinstance(model, ModelSpec):
        return tuple(
            LinearShape(f.fqn, f.k, f.n, f.order, f.group, f.block, f.block is None and not f.head, f.runs)
            for f in model.found.linears
        )
    grouped: list[tuple[int | None, list[tuple[str, int, int]]]] = []
    for block in range(model.n_layers):
        grouped += [(block, group) for group in _block_groups(model, block)]
    grouped.append((None, [("head", model.dim, vocab_size)]))
    shapes: list[LinearShape] = []
    for index, (block_of, group) in enumerate(grouped):
        shapes += [
            LinearShape(fqn, k, n, len(shapes) + i, index, block_of) for i, (fqn, k, n) in enumerate(group)
        ]
    return tuple(shapes)


@lru_cache(maxsize=64)
def parameter_count(model: AnyModelSpec, vocab_size: int) -> int:
    """Return the number of parameters: linears, embedding and norms."""
    if not isinstance(model, ModelSpec):
        return model.found.parameters
    linears = sum(s.k * s.n for s in linear_shapes(model, vocab_size) if not (s.is_head and model.tied_head))
    return linears + vocab_size * model.dim + (2 * model.n_layers + 1) * model.dim


@dataclass(frozen=True)
class ShapeProblem:
    """A size that a backend's kernels refuse: which linear, which GEMM, which dimension, what to do."""

    fqn: str
    gemm: str
    dimension: str
    size: int
    multiple: int

    def __str__(self) -> str:
        """Return the one-line message."""
        remedy = (
            "M is batch_size / accumulate * context: change train.batch_size or train.context"
            if self.dimension == "M"
            else "change the size or keep this layer in BF16 (precision.exclude)"
        )
        return (
            f"{self.fqn}: GEMM {self.gemm} has {self.dimension} = {self.size}, not a multiple of {self.multiple}; "
            + remedy
        )


def shape_problems(shape: LinearShape, tokens: int, recipe: str, backend: str) -> list[ShapeProblem]:
    """Return what `backend` would refuse for one linear with `tokens` rows M per micro-batch.

    `torchao_float8` needs, of the three GEMMs, K and N (output, grad_input), M and K (grad_weight) to be multiples
    of 16; M does not matter for `rowwise_with_gw_hp`, whose grad_weight is not FP8. The rule is the GPU kernels';
    it is applied on CPU too, where torch accepts any size, so that a CPU run never blesses an illegal config.
    `torchao_blockwise` needs multiples of 128 throughout. `reference` accepts every size.
    """
    if backend == "reference":
        return []
    multiple = 128 if backend == "torchao_blockwise" else FP8_DIM_MULTIPLE
    wanted = [("output", "K", shape.k), ("output", "N", shape.n)]
    if recipe != "rowwise_with_gw_hp":
        wanted.append(("grad_weight", "M", tokens))
    return [
        ShapeProblem(shape.fqn, gemm, name, size, multiple) for gemm, name, size in wanted if size % multiple
    ]
