"""Declared against effective: what one converted layer's three GEMMs really compute, judged by their values.

A count of FP8 GEMMs cannot tell a row scale from a tensor scale, or a fresh scale from last week's. So the
layer itself is run on made-up operands, its weight replaced by a made-up one for the call, and its output,
grad_input and grad_weight are compared with the reference arithmetic of the declared recipe:

* agreement  sqnr = -10 log10 mean(min(1, (actual - expected)^2 / sum_c left_c^2 right_c^2)) in dB, each entry
             relative to its own typical size. If sums and the bf16 rounding of the result differ everywhere,
             58 dB are left (two uniform roundings of 2^-9 half width); equal casts on a CPU give 80 and
             more. Casting the bf16 copy of a weight instead of the weight itself moves 1 code in 64: 24 to
             43 dB. Another scale or format: 26 dB and less. 50 dB lies between.
* freshness  every recipe here scales by the present amax, so multiplying an operand by 2^16 multiplies the
results
             that read it by exactly 2^16. A frozen scale saturates; a reused cast does not move at all.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fp8parity.casts import (
    GEMMS,
    OPERANDS,
    RECIPES,
    CastPlan,
    Format,
    Gemm,
    GemmPlan,
    Granularity,
    Operand,
    RecipePlan,
    fake_quantise,
    operands_of,
    recipe_plan,
    with_jitter,
)
from fp8parity.precision.reference import multiply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fp8parity.spec import PrecisionSpec

AGREEMENT_DB = 50.0
"""Least agreement of the declared arithmetic with the layer's; derivation in the module's text."""

FACTOR = 2.0**16
"""Beyond the headroom any frozen scale can have: E4M3 spans 2^18 from smallest subnormal to maximum."""

TOKENS = 128
"""Rows of the made-up input: one block along the tokens, and legal for every kernel."""

REDUCED = 256
"""Non-zero terms of each sum, two blocks. A Hopper tensor core keeps about 14 bits of the running sum
(DeepSeek-V3, section 3.5.2) and rounds it every 32 terms: 8 times 2^-15, 72 dB; 4096 terms leave 48 dB."""

Operands = dict[Operand, Tensor]
Results = dict[Gemm, Tensor]


def _made_up(
    shape: tuple[int, int], seed: int, like: Tensor, dtype: torch.dtype, reduced: int | None = None
) -> Tensor:
    """Draw a matrix whose rows and columns differ by powers of two, so that every granularity shows.

    Columns from `reduced` on are zero. Drawn on the device of `like`.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=like.device)
    for size in ((shape[0], 1), (1, shape[1])):
        x *= 2.0 ** torch.randint(-10, 11, size, generator=generator, device=like.device)
    if reduced is not None:
        x[:, reduced:] = 0
    return x.to(dtype)


def _operands(layer: nn.Linear, seed: int) -> Operands:
    weight = layer.weight
    n, k = layer.out_features, layer.in_features
    return {
        "input": _made_up((TOKENS, k), seed, weight, torch.bfloat16, REDUCED),
        "weight": _made_up((n, k), seed + 1, weight, weight.dtype),
        "grad_output": _made_up((TOKENS, n), seed + 2, weight, torch.bfloat16, REDUCED),
    }


def _run(layer: nn.Linear, operands: Operands) -> Results:
    """Run the layer's own forward and backward on `operands`, under bf16 autocast if its weight is wider."""
    x = operands["input"].detach().clone().requires_grad_()
    weight = operands["weight"].detach().clone().requires_grad_()
    bias = {} if layer.bias is None else {"bias": torch.zeros_like(layer.bias)}
    kind = x.device.type
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=weight.dtype != torch.bfloat16):
            output = functional_call(layer, {"weight": weight, **bias}, (x,))
        grads = torch.autograd.grad(
            output, [x, weight], operands["grad_output"].to(output.dtype), allow_unused=True
        )
    grad_input, grad_weight = (
        torch.zeros_like(t) if g is None else g for g, t in zip(grads, (x, weight), strict=True)
    )
    return {"output": output.detach(), "grad_input": grad_input, "grad_weight": grad_weight}


def typical_size(left: Tensor, right: Tensor) -> Tensor:
    """Return sqrt(sum_c left_c^2 right_c^2) [P, Q] of left [P, C] @ right [Q, C]^T: an entry's usual size."""
    return (left.double().square() @ right.double().t().square()).sqrt()


def agreement_db(actual: Tensor, expected: Tensor, size: Tensor) -> float:
    """Return how well two results [P, Q] agree, in dB, entries relative to their typical size; 0: not at all.

    Entries of size zero count only where one of the results is not zero there.
    """
    tiny = torch.finfo(torch.float64).tiny
    error = ((actual.double() - expected.double()) / size.clamp(min=tiny)).square().nan_to_num(nan=1.0)
    counted = (size > 0) | (error > 0)
    mean = error.clamp(max=1.0).sum().item() / max(int(counted.sum()), 1)
    return -10 * math.log10(max(mean, 1e-20))


def _cast_weight(weight: Tensor, source: str) -> Tensor:
    return weight.bfloat16() if source == "compute" else weight


def _read_operands(gemm: Gemm, operands: Operands, source: str) -> tuple[Tensor, Tensor]:
    weight = _cast_weight(operands["weight"], source)
    return operands_of(gemm, operands["input"], weight, operands["grad_output"])


def _expected(gemm: GemmPlan, stored: CastPlan | None, operands: Operands, source: str) -> Tensor:
    left, right = _read_operands(gemm.gemm, operands, source)
    return multiply(gemm, left, right, torch.bfloat16, stored=stored)


def _candidates(gemm: Gemm, operands: Operands) -> Iterator[tuple[str, Tensor]]:
    """Yield what a GEMM may have been instead, with its result: the recipes' own, then any two casts."""
    wide = operands["weight"].dtype != torch.bfloat16
    sources = [("", "compute")] if "weight" not in OPERANDS[gemm] or not wide else [
        (f", weight cast from {source}", source) for source in ("compute", "master")
    ]  # fmt: skip
    yield "high precision (no FP8)", _expected(GemmPlan(gemm, None, None), None, operands, "compute")
    for (recipe, plan), (suffix, source) in product(RECIPES.items(), sources):
        own = plan.gemm(gemm)
        yield f"{recipe}'s ({_casts(own)}){suffix}", _expected(own, plan.output.left, operands, source)
    formats: tuple[Format, ...] = ("e4m3fn", "e5m2")
    grains: tuple[Granularity, ...] = ("tensor", "row", "block_1xB", "block_BxB")
    casts = [CastPlan(f, g, power_of_two=p) for f, g, p in product(formats, grains, (False, True))]
    for suffix, source in sources:
        left, right = _read_operands(gemm, operands, source)
        lefts, rights = ([(c, fake_quantise(t, c)) for c in casts] for t in (left, right))
        for (a, x), (b, y) in product(lefts, rights):
            yield f"{_casts(GemmPlan(gemm, a, b))}{suffix}", (x @ y.t()).bfloat16()


def _casts(plan: GemmPlan) -> str:
    left, right = OPERANDS[plan.gemm]
    return f"{left} {plan.left} x {right} {plan.right}" if plan.is_fp8 else "high precision"


def _nearest(gemm: Gemm, operands: Operands, actual: Tensor, size: Tensor) -> tuple[float, str]:
    """Return the best agreement among the candidates and its name; the first good enough one wins."""
    best, name = -1.0, ""
    for label, result in _candidates(gemm, operands):
        db = agreement_db(actual, result, size)
        if db > best:
            best, name = db, label
        if best >= AGREEMENT_DB:
            break
    return best, name


def effective_differences(
    fqn: str, layer: nn.Linear, precision: PrecisionSpec, *, jitter: float = 1.0, seed: int = 0
) -> list[str]:
    """Return how the arithmetic of the converted `layer` differs from `precision`'s, each difference named.

    `jitter` is the grid constant of a jittered replica. Its parameters are read, never changed. Cost: a few
    passes of 128 tokens through the layer; hundreds of small GEMMs more when something differs, to say what
    it is instead.
    """
    plan = recipe_plan(precision.recipe)
    plan = plan if jitter == 1.0 else with_jitter(plan, jitter)
    operands = _operands(layer, seed)
    results = _run(layer, operands)
    stale = list(_stale(fqn, layer, plan, operands, results))
    if stale:
        return stale  # its values match nothing; the cause is named already
    differences = []
    for gemm in GEMMS:
        size = typical_size(*_read_operands(gemm, operands, "master"))
        expected = _expected(plan.gemm(gemm), plan.output.left, operands, precision.weight_cast_source)
        db = agreement_db(results[gemm], expected, size)
        if db < AGREEMENT_DB:
            best, name = _nearest(gemm, operands, results[gemm], size)
            found = f"computes {name} ({best:.0f} dB)" if best >= AGREEMENT_DB else "matches no known cast"
            differences.append(
                f"{fqn}: GEMM {gemm} {found}; declared {precision.recipe}: {_casts(plan.gemm(gemm))}, weight "
                f"cast from {precision.weight_cast_source} ({db:.0f} dB)"
            )
    return differences


def _stale(fqn: str, layer: nn.Linear, plan: RecipePlan, operands: Operands, base: Results) -> Iterator[str]:
    """Yield the operands whose cast does not follow the present tensor."""
    for name in ("input", "weight", "grad_output"):
        operand: Operand = name
        scaled = _run(layer, {**operands, operand: operands[operand] * FACTOR})
        for gemm in GEMMS:
            reads = operand in OPERANDS[gemm]
            if not reads or not base[gemm].any() or torch.equal(scaled[gemm], base[gemm] * FACTOR):
                continue
            if torch.equal(scaled[gemm], base[gemm]):
                yield f"{fqn}: GEMM {gemm} reuses an old cast of {operand}: a new one does not change it"
            else:
                yield (
                    f"{fqn}: GEMM {gemm} does not scale {operand} by its present amax: {operand} times 2^16 "
                    "is not the result times 2^16 (a scale that is not updated)"
                )


# --- gradient accumulation ---------------------------------------------------------------------------------


def accumulation_differences(
    model: nn.Module, accumulate: Callable[[], object], micro_losses: Sequence[Callable[[], Tensor]]
) -> list[str]:
    """Compare the gradients `accumulate` leaves with the sum of those of its micro-batches, one by one.

    `accumulate` is the training loop's own accumulation, without the optimizer step; each of `micro_losses`
    returns the loss of one micro-batch as that loop weighs it. Gradients are cleared before and after. A
    tenth of the norm is tolerated: rounding of a bf16 sum stays below n 2^-8, one of n equal micro-batches
    lost changes 1/n.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    accumulate()
    left = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for n, p in named.items()}
    model.zero_grad(set_to_none=True)
    parts = [torch.autograd.grad(loss(), list(named.values()), allow_unused=True) for loss in micro_losses]
    differences = []
    for index, (name, parameter) in enumerate(named.items()):
        grads = [torch.zeros_like(parameter) if part[index] is None else part[index] for part in parts]
        total = torch.stack([g.float() for g in grads]).sum(0)
        if _apart(left[name], total) <= 0.1:
            continue
        kept = [i for i, g in enumerate(grads) if _apart(left[name], g.float()) <= 0.1]
        which = f"that of micro-batch {kept[0] + 1} of {len(grads)} alone" if kept else "not their sum"
        ratio = (left[name].float().norm() / total.norm()).item()
        differences.append(f"{name}: the accumulated gradient is {which} (norm ratio {ratio:.2f})")
    return differences


def _apart(a: Tensor, b: Tensor) -> float:
    norm = b.float().norm().item()
    return (a.float() - b.float()).norm().item() / norm if norm else float(a.any())
