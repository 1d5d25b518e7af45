"""Accuracy: each GEMM against the exact arithmetic, against float64, and E4M3 against E5M2."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8parity.casts import GEMMS, CastPlan, Gemm, fake_quantise
from fp8parity.precision.effective import agreement_db, typical_size
from fp8parity.selftest.bench import Bench
from fp8parity.selftest.bounds import ORDERING_DB, sqnr_bound_db
from fp8parity.selftest.exact import quantised_pair
from fp8parity.selftest.operands import (
    SQUARE,
    Operands,
    gaussian,
    non_finite_cases,
    reduced,
    shapes,
    special_cases,
    wide_rows,
)
from fp8parity.selftest.report import Fault
from fp8parity.selftest.subject import Results, run


def _words(operands: Operands) -> str:
    return "M {} K {} N {}".format(*operands.shape)


def accuracy(bench: Bench, *, quick: bool) -> None:
    """Gaussian operands of every shape: against the reference, and against float64 of the unquantised operands."""
    for seed, shape in enumerate(shapes(bench.subject.multiple, quick=quick)):
        operands = gaussian(shape, bench.device, seed)
        results = bench.run(operands)
        for gemm in GEMMS:
            bench.against_reference("reference", _words(operands), gemm, operands, results[gemm])
            _against_float64(bench, gemm, operands, results)


def _against_float64(bench: Bench, gemm: Gemm, operands: Operands, results: Results) -> None:
    """Compare with the product of the unquantised operands and the SQNR that the formats imply."""
    left, right = operands.pair(gemm)
    terms, how = reduced(operands.shape, gemm), bench.subject.accumulation(gemm)
    bound = sqnr_bound_db(bench.plan.gemm(gemm), terms, how, (len(left), len(right)))
    db = _sqnr(results[gemm], left, right)
    fault = db < bound
    bench.add("float64", _words(operands), gemm, db, bound, "fault" if fault else "right")
    if fault:
        words = f"{db:.1f} dB against float64, {bound:.1f} dB expected of the formats"
        bench.name(Fault("unexplained", gemm, _words(operands), words))


def _sqnr(actual: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = left.double(), right.double()
    return agreement_db(actual, left @ right.t(), typical_size(left, right))


def special_values(bench: Bench, *, quick: bool) -> None:
    """Zeros, tiny, huge, one outlier, zero rows: against the reference."""
    base = gaussian(SQUARE, bench.device, 1000)
    for case, operands in special_cases(base, quick=quick):
        results = bench.run(operands)
        for gemm in GEMMS:
            bench.against_reference("special values", case, gemm, operands, results[gemm])


def non_finite(bench: Bench, *, quick: bool) -> None:
    """One inf or NaN in an operand: every result that reads its scaling group is not finite, and no other."""
    base = gaussian(SQUARE, bench.device, 1003)
    for case, operands in non_finite_cases(base, quick=quick):
        results = bench.run(operands)
        for gemm in GEMMS:
            left, right = (~x.isfinite().all(1) for x in quantised_pair(bench.plan, gemm, operands))
            wanted, found = left[:, None] | right, ~results[gemm].isfinite()
            lost, spread = wanted & ~found, found & ~wanted
            wrong = (lost | spread).double().mean().item()
            bench.add("inf and NaN", case, gemm, wrong, 0.0, "fault" if wrong else "right", unit="share")
            shares = [f"{mask.double().mean().item():.1%} of the results are" for mask in (lost, spread)]
            if lost.any():
                bench.name(Fault("nan-lost", gemm, case, f"{shares[0]} finite"))
            elif spread.any():
                bench.name(Fault("nan-spread", gemm, case, f"{shares[1]} not finite"))


def cast_source(bench: Bench) -> None:
    """Give a weight that bf16 cannot hold: the cast must read what is declared, the bf16 copy or the fp32 master."""
    drawn = gaussian(SQUARE, bench.device, 1001)
    # not the seed of the other operands: a weight equal to the input makes sums of squares, which no bound here is for
    generator = torch.Generator().manual_seed(2001)
    weight = torch.randn(drawn.weight.shape, generator=generator).to(bench.device)
    source = bench.subject.precision.weight_cast_source
    operands = replace(drawn, weight=weight if source == "master" else weight.bfloat16())
    results = run(bench.subject.linear(weight), operands)
    for gemm in GEMMS:
        bench.against_reference("weight cast source", f"reads {source}", gemm, operands, results[gemm])


def ordering(bench: Bench) -> None:
    """E4M3 is finer, E5M2 reaches further: the executed left operand must be on its format's side of the other's."""
    base = gaussian(SQUARE, bench.device, 1002)
    for gemm in GEMMS:
        cast = bench.plan.gemm(gemm).left
        if cast is None:
            continue
        _order(bench, gemm, cast, base, "Gaussian", finer=True)
        if cast.granularity == "tensor":
            _order(bench, gemm, cast, wide_rows(base, gemm), "rows down to 2^-24", finer=False)


def _order(bench: Bench, gemm: Gemm, cast: CastPlan, operands: Operands, case: str, *, finer: bool) -> None:
    left, right = operands.pair(gemm)
    _, right_cast = quantised_pair(bench.plan, gemm, operands)
    other = replace(cast, format="e5m2" if cast.format == "e4m3fn" else "e4m3fn")
    what_if = fake_quantise(left, other, torch.float64) @ right_cast.t()
    actual = bench.run(operands)[gemm]
    lead = _sqnr(actual, left, right) - _sqnr(what_if, left, right)
    ahead = (cast.format == "e4m3fn") == finer
    lead = lead if ahead else -lead
    fault = lead < ORDERING_DB
    words = f"{cast.format} {'closer' if ahead else 'farther'} than {other.format}"
    bench.add("E4M3 against E5M2", case, gemm, lead, ORDERING_DB, "fault" if fault else "right", words)
    if fault and not any(f.gemm == gemm for f in bench.faults):
        found = f"{cast.format} leads {other.format} by {lead:.1f} dB"
        bench.name(Fault("format-mixed-up", gemm, case, f"{found}, at least {ORDERING_DB:.0f} dB expected"))
