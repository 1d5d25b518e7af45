"""What must not change a result: repetition, recomputation, save and resume, other rows, micro-batches, old weights."""

from __future__ import annotations

import io
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8parity.casts import GEMMS, Gemm
from fp8parity.precision.effective import agreement_db, typical_size
from fp8parity.selftest.bench import Bench
from fp8parity.selftest.exact import distance, quantised_pair
from fp8parity.selftest.operands import SQUARE, Operands, gaussian, mapped
from fp8parity.selftest.report import Fault
from fp8parity.selftest.subject import run, weight_of

MICRO_BATCHES = 4
_BY_ROW: tuple[Gemm, ...] = ("output", "grad_input")


def repeatability(bench: Bench, *, times: int) -> None:
    """Repeat the same GEMMs and state whether the bits repeat; a fault only beyond what a sum explains."""
    operands = gaussian(SQUARE, bench.device, 2000)
    first = bench.run(operands)
    equal = True
    for _ in range(times - 1):
        again = bench.run(operands)
        for gemm in GEMMS:
            pair = (first[gemm], again[gemm])
            bench.same("repeated", f"{times} times", gemm, operands, pair, "not-repeatable", strict=False)
            equal &= bench.rows[-1].measured == 0
    bench.repeatable = equal


def recomputation(bench: Bench) -> None:
    """Compare forward and backward under activation checkpointing with the plain pass."""

    def recomputed(module: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(module, x, use_reentrant=False)
        return output

    operands = gaussian(SQUARE, bench.device, 2001)
    plain = bench.run(operands)
    again = run(bench.subject.linear(operands.weight.float()), operands, recomputed)
    for gemm in GEMMS:
        pair = (plain[gemm], again[gemm])
        strict = bench.repeatable
        bench.same("recompute", "on and off", gemm, operands, pair, "recompute-differs", strict=strict)


def resuming(bench: Bench) -> None:
    """Load a saved state_dict into a fresh module that has already worked with another weight."""
    operands, other = (gaussian(SQUARE, bench.device, seed) for seed in (2002, 2003))
    module = bench.subject.linear(operands.weight.float())
    before = run(module, operands)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = bench.subject.linear(other.weight.float())
    run(fresh, other)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    after = run(fresh, operands)
    for gemm in GEMMS:
        pair = (before[gemm], after[gemm])
        strict = bench.repeatable
        bench.same("save and resume", "state_dict", gemm, operands, pair, "resume-differs", strict=strict)


def _pinned(x: Tensor) -> Tensor:
    """Put one amax into both halves of the rows, so that a scale per tensor is theirs too."""
    x[0, 0] = x[x.shape[0] // 2, 0] = 8.0
    return x


def other_rows(bench: Bench) -> None:
    """Exchange the second half of the rows and look at the first: what each recipe implies.

    One scale per row or block: nothing outside a row reaches it, an outlier neither. One scale per tensor: the rows
    are as they were while the amax stays; what an outlier elsewhere costs them is stated.
    """
    base, other = (mapped(gaussian(SQUARE, bench.device, s), _pinned, *_ROWS) for s in (2004, 2005))
    half = slice(0, SQUARE[0] // 2)

    def exchanged(source: Operands) -> Operands:
        halves = {n: torch.cat([getattr(base, n)[half], getattr(source, n)[half.stop :]]) for n in _ROWS}
        return replace(base, **halves)

    with_outlier = mapped(other, _outlier_in_last_row, *_ROWS)
    before, moved, shouted = (bench.run(o) for o in (base, exchanged(other), exchanged(with_outlier)))
    for gemm in _BY_ROW:
        trusted = before[gemm][half]
        quiet, loud = (trusted, moved[gemm][half]), (trusted, shouted[gemm][half])
        _same_rows(bench, "exchanged, same amax", gemm, base, quiet, half)
        cast = bench.plan.gemm(gemm).left
        if cast is not None and cast.granularity == "tensor":
            _state_cost(bench, gemm, base, loud, half)
        else:
            _same_rows(bench, "an outlier among them", gemm, base, loud, half)


def _same_rows(
    bench: Bench, case: str, gemm: Gemm, base: Operands, pair: tuple[Tensor, Tensor], half: slice
) -> None:
    bench.same("other rows", case, gemm, base, pair, "batch-dependent", strict=False, rows=half)


_ROWS = ("input", "grad_output")


def _outlier_in_last_row(x: Tensor) -> Tensor:
    x[-1, 1] = 2.0**17
    return x


def _state_cost(bench: Bench, gemm: Gemm, base: Operands, pair: tuple[Tensor, Tensor], half: slice) -> None:
    left, right = (t.double() for t in base.pair(gemm))
    exact, size = (left @ right.t())[half], typical_size(left, right)[half]
    alone, beside = (agreement_db(result, exact, size) for result in pair)
    cost = max(0.0, alone - beside)
    words = f"{gemm} has one scale per tensor: an outlier in another row of 2^17 costs {cost:.1f} dB"
    bench.add("other rows", "an outlier among them", gemm, beside, None, "stated", words)


def accumulation(bench: Bench) -> None:
    """Accumulate micro-batches into one weight gradient, and check each one's other results on the way."""
    parts = [gaussian(SQUARE, bench.device, 2010 + i) for i in range(MICRO_BATCHES)]
    parts = [replace(p, weight=parts[0].weight) for p in parts]
    module = bench.subject.linear(parts[0].weight.float())
    weight_of(module).grad = None
    for index, part in enumerate(parts):
        x = part.input.clone().requires_grad_()
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            output = module(x)
        output.backward(part.grad_output.to(output.dtype))
        where = f"micro-batch {index + 1} of {MICRO_BATCHES}"
        bench.against_reference("accumulated", where, "output", part, output.detach())
        assert x.grad is not None
        bench.against_reference("accumulated", where, "grad_input", part, x.grad)
    _check_sum(bench, parts, weight_of(module).grad)


def _check_sum(bench: Bench, parts: list[Operands], grad: Tensor | None) -> None:
    pairs = [quantised_pair(bench.plan, "grad_weight", part) for part in parts]
    left, right = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
    actual = torch.zeros_like(left @ right.t()) if grad is None else grad
    bound, slack = bench.bound_db("grad_weight", parts[0]), bench.slack("grad_weight", parts[0])
    # each part is rounded by itself, so an entry may be off by the parts' steps, not only by the sum's
    found = distance(actual, left, right, slack + 2.0**-8 * len(parts))
    right_one = found.finite and found.db >= bound
    case = f"sum of {len(parts)} micro-batches"
    bench.add("accumulated", case, "grad_weight", found.db, bound, "right" if right_one else "fault")
    if not right_one:
        kept = [i + 1 for i, pair in enumerate(pairs) if distance(actual, *pair, slack).db >= bound]
        which = f"it is the gradient of micro-batch {kept[0]} alone" if kept else "it is not their sum"
        ratio = (actual.double().norm() / (left @ right.t()).norm()).nan_to_num().item()
        bench.name(Fault("lost-micro-batch", "grad_weight", case, f"{which}, norm ratio {ratio:.2f}"))


def updated_weight(bench: Bench) -> None:
    """Use a module, let an optimizer change its weight in place, and use it again."""
    old = gaussian(SQUARE, bench.device, 2020)
    module = bench.subject.linear(old.weight.float())
    run(module, old)
    weight = weight_of(module)
    weight.grad = weight.detach() - 0.5 * weight.detach().flip(0)
    torch.optim.SGD([weight], lr=1.0).step()
    new = replace(old, weight=weight.detach().bfloat16())
    results = run(module, new)
    for gemm in GEMMS:
        _check_fresh(bench, gemm, old, new, results[gemm])


def _check_fresh(bench: Bench, gemm: Gemm, old: Operands, new: Operands, actual: Tensor) -> None:
    bound, slack = bench.bound_db(gemm, new), bench.slack(gemm, new)
    stale = distance(actual, *quantised_pair(bench.plan, gemm, old), slack)
    if gemm != "grad_weight" and stale.db >= bound:
        bench.add(
            "updated weight", "after an optimizer step", gemm, 0.0, bound, "fault", "the old weight's result"
        )
        words = f"the result is that of the weight before the update, to {stale.db:.0f} dB"
        bench.name(Fault("stale-weight-cast", gemm, "after an optimizer step", words))
        return
    bench.against_reference("updated weight", "after an optimizer step", gemm, new, actual)
