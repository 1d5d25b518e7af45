"""Name a fault by computing it again: the known mistake that gives exactly the numbers that were seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from fp8parity.casts import (
    OPERANDS,
    RECIPES,
    CastPlan,
    Format,
    Gemm,
    Granularity,
    expand_scale,
    fake_quantise,
    quantise,
)
from fp8parity.selftest.bench import Bench, Failure
from fp8parity.selftest.exact import distance, quantised_pair
from fp8parity.selftest.operands import SQUARE, padded, reduced
from fp8parity.selftest.report import Fault

FORMATS: tuple[Format, ...] = ("e4m3fn", "e5m2")
TILES = (32, 64, 128, 256, 512)
"""Tiles along the sum that kernels use."""


@dataclass(frozen=True)
class Mistake:
    """What a fault of this name would multiply: left [P, C] and right [Q, C] in float64."""

    name: str
    words: str
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _Cast:
    """One operand's codes and scale in float64, the scale in the operand's shape."""

    codes: Tensor
    scale: Tensor
    plan: CastPlan
    small_scale: Tensor

    @property
    def value(self) -> Tensor:
        return self.codes / self.scale


def diagnose(bench: Bench, failure: Failure) -> Fault:
    """Return the known mistake whose numbers are those of the failure, or `unexplained` with the facts."""
    gemm = failure.gemm
    if not bool(failure.actual.isfinite().all()):
        return _not_finite(bench, failure)
    found = _recognised(bench, failure, _likely(bench, failure)) or _tail_by_padding(bench, failure)
    if found is None and not any(f.gemm == gemm for f in bench.faults) and failure.operands.shape == SQUARE:
        found = _recognised(bench, failure, _any_casts(failure))  # hundreds of products
    return found or _unexplained(bench, failure)


def _recognised(bench: Bench, failure: Failure, mistakes: Iterator[Mistake]) -> Fault | None:
    """Return the first mistake that gives the failure's numbers and not the right ones."""
    gemm, case = failure.gemm, failure.case
    bound = min(bench.bound_db(gemm, failure.operands), 45.0)
    left, right = quantised_pair(bench.plan, gemm, failure.operands)
    for mistake in mistakes:
        same = left.shape == mistake.left.shape and torch.equal(left, mistake.left)
        if same and torch.equal(right, mistake.right):
            continue  # this recipe cannot show it: the numbers would be right
        found = distance(failure.actual, mistake.left, mistake.right, 0.0)
        if found.finite and found.db >= bound and found.db > failure.db + 3:
            return Fault(
                mistake.name, gemm, case, f"{mistake.words} gives these numbers to {found.db:.0f} dB"
            )
    return None


def _likely(bench: Bench, failure: Failure) -> Iterator[Mistake]:
    own = bench.plan.gemm(failure.gemm)
    names = OPERANDS[failure.gemm]
    raw = failure.operands.pair(failure.gemm)
    pair = quantised_pair(bench.plan, failure.gemm, failure.operands)
    yield from _tails(*pair)
    if own.left is None or own.right is None:
        yield from _recipes_casts(failure.gemm, raw)
        return
    yield Mistake("not-quantised", "the unquantised operands", raw[0].double(), raw[1].double())
    if own.right.source == "high_precision":
        yield from _scales(names, _cast(raw[0], own.left), _cast(raw[1], own.right))
        yield from _floors(names, raw, (own.left, own.right), pair)
    for f, g in product(FORMATS, FORMATS):
        casts = replace(own.left, format=f), replace(own.right, format=g, source="high_precision")
        yield Mistake("format-mixed-up", f"{names[0]} in {f} and {names[1]} in {g}", *_both(raw, *casts))
    yield from _recipes_casts(failure.gemm, raw)


def _both(raw: tuple[Tensor, Tensor], left: CastPlan, right: CastPlan) -> tuple[Tensor, Tensor]:
    return fake_quantise(raw[0], left, torch.float64), fake_quantise(raw[1], right, torch.float64)


def _recipes_casts(gemm: Gemm, raw: tuple[Tensor, Tensor]) -> Iterator[Mistake]:
    """Yield the casts of every recipe."""
    left, right = OPERANDS[gemm]
    for recipe, plan in RECIPES.items():
        own = plan.gemm(gemm)
        if own.left is not None and own.right is not None and own.right.source == "high_precision":
            words = f"{recipe}: {left} {own.left} and {right} {own.right}"
            yield Mistake("other-granularity", words, *_both(raw, own.left, own.right))


def _any_casts(failure: Failure) -> Iterator[Mistake]:
    """Yield every pair of formats, scaling groups and scale roundings."""
    raw = failure.operands.pair(failure.gemm)
    left, right = OPERANDS[failure.gemm]
    grains: tuple[Granularity, ...] = ("tensor", "row", "block_1xB", "block_BxB")
    plans = [CastPlan(f, g, power_of_two=p) for f, g, p in product(FORMATS, grains, (False, True))]
    tried = [[(p, fake_quantise(x, p, torch.float64)) for p in plans] for x in raw]
    for (p, x), (q, y) in product(*tried):
        yield Mistake("other-granularity", f"{left} {p} and {right} {q}", x, y)


def _cast(x: Tensor, plan: CastPlan) -> _Cast:
    codes, scale = quantise(x, plan)
    wide = expand_scale(scale, codes.shape, plan).double().expand(codes.shape)
    return _Cast(codes.double(), wide, plan, scale)


def _tails(left: Tensor, right: Tensor) -> Iterator[Mistake]:
    terms = left.shape[1]
    for rest in sorted({terms % tile for tile in TILES} - {0, terms}):
        words = f"a sum without its last {rest} of {terms} terms"
        yield Mistake("k-tail", words, left[:, :-rest], right[:, :-rest])


def _rounded(scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    exponent = scale.log2()
    for how, power in (
        ("down", exponent.floor()),
        ("up", exponent.ceil()),
        ("to the nearest", exponent.round()),
    ):
        yield how, torch.exp2(power)


def _scales(names: tuple[str, str], left: _Cast, right: _Cast) -> Iterator[Mistake]:
    """Yield the right codes under wrong scales."""
    a, b = left.value, right.value
    for (how, s), (_, t) in zip(_rounded(left.scale), _rounded(right.scale), strict=True):
        rounded = f"scales rounded {how} to a power of two"
        x, y = left.codes / s, right.codes / t
        yield Mistake("scale-rounded", f"{rounded}, in both operands,", x, y)
        yield Mistake("scale-rounded", f"{rounded}, in {names[0]},", x, b)
        yield Mistake("scale-rounded", f"{rounded}, in {names[1]},", a, y)
    if left.scale.shape == right.scale.shape:
        swapped = left.codes / right.scale, right.codes / left.scale
        yield Mistake("scales-transposed", f"the scales of {names[0]} and {names[1]} exchanged", *swapped)
    for name, cast, build in ((names[0], left, lambda v: (v, b)), (names[1], right, lambda v: (a, v))):
        for value in _misread(cast):
            yield Mistake(
                "scales-transposed", f"the scales of {name} read along the other axis", *build(value)
            )
    yield Mistake("scale-not-applied", f"the codes of {names[0]} without their scale", left.codes, b)
    yield Mistake("scale-not-applied", f"the codes of {names[1]} without their scale", a, right.codes)


def _misread(cast: _Cast) -> Iterator[Tensor]:
    """Yield an operand whose scales are read along the other axis, or in the other memory order."""
    small, codes = cast.small_scale, cast.codes
    if small.ndim < 2:
        return
    if cast.scale.shape[0] == cast.scale.shape[1]:
        yield codes / cast.scale.t()
    reordered = small.t().reshape(small.shape)
    yield codes / expand_scale(reordered, codes.shape, cast.plan).double()


def _floors(
    names: tuple[str, str], raw: tuple[Tensor, Tensor], plans: tuple[CastPlan, CastPlan], pair: tuple[Tensor, Tensor]
) -> Iterator[Mistake]:  # fmt: skip
    """Yield casts whose amax is not floored: the same cast of the operand brought to an ordinary size."""
    for index, (x, plan) in enumerate(zip(raw, plans, strict=True)):
        amax = x.abs().max().double()
        if not 0 < amax < 1e-6:
            continue
        factor = torch.exp2(-amax.log2().round())
        value = fake_quantise(x.double() * factor, plan, torch.float64) / factor
        both = (value, pair[1]) if index == 0 else (pair[0], value)
        yield Mistake("amax-floor", f"an unfloored amax of {names[index]}", *both)


def _tail_by_padding(bench: Bench, failure: Failure) -> Fault | None:
    """Give the kernel the same sum, filled up with zeros to whole tiles; `k-tail` if it is right then."""
    gemm, terms = failure.gemm, reduced(failure.operands.shape, failure.gemm)
    for tile in (t for t in TILES if terms % t):
        whole = padded(failure.operands, gemm, max(tile, bench.subject.multiple))
        actual = bench.run(whole)[gemm]
        found = distance(actual, *quantised_pair(bench.plan, gemm, whole), bench.slack(gemm, whole))
        if found.finite and found.db >= bench.bound_db(gemm, whole) and found.worst <= 1:
            words = f"wrong with {terms} terms, right when zeros fill them up to a multiple of {tile}"
            return Fault("k-tail", gemm, failure.case, words)
    return None


def _not_finite(bench: Bench, failure: Failure) -> Fault:
    """Tell an unclamped cast (the largest scaled elements become NaN) from an unfloored amax and a bad tail."""
    gemm, case = failure.gemm, failure.case
    if any((f.name, f.gemm) == ("saturation-missing", gemm) for f in bench.faults):
        return Fault("saturation-missing", gemm, case, "not finite again")
    bad = ~failure.actual.isfinite()
    share = f"{bad.double().mean().item():.1%} of the results are not finite"
    raw = failure.operands.pair(gemm)
    sizes = [_scaled_size(x, bench, gemm, i) for i, x in enumerate(raw)]
    for mask in _zero_groups(raw):
        if torch.equal(mask, bad):
            return Fault("zero-group", gemm, case, f"{share}: those of rows that are zero")
    tail = _tail_by_padding(bench, failure)
    if tail is not None:
        return tail
    if _explained_by_largest(bad, *sizes):
        words = f"{share}: those that read the largest scaled elements"
        return Fault("saturation-missing", gemm, case, words)
    return Fault("not-finite", gemm, case, share)


def _scaled_size(x: Tensor, bench: Bench, gemm: Gemm, index: int) -> Tensor:
    """Return the largest scaled size of each row, as a share of the format's maximum."""
    own = bench.plan.gemm(gemm)
    plan = own.left if index == 0 else own.right
    if plan is None:
        return x.abs().amax(1).double()
    cast = _cast(x, plan)
    return (x.double() * cast.scale).abs().amax(1) / plan.max_value


def _zero_groups(raw: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    left, right = (~x.any(1) for x in raw)
    for a, b in ((left, right), (left, torch.zeros_like(right)), (torch.zeros_like(left), right)):
        if a.any() or b.any():
            yield a[:, None] | b[None, :]


def _explained_by_largest(bad: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether the bad entries are whole rows and columns, and these hold larger scaled elements than the others."""
    rows, columns = bad.all(1), bad.all(0)
    if not torch.equal(rows[:, None] | columns[None, :], bad):
        return False
    if rows.all() or columns.all():
        return True

    def above(mask: Tensor, sizes: Tensor) -> bool:
        return not mask.any() or bool(sizes[mask].min() >= sizes[~mask].max())

    return above(rows, left) and above(columns, right)


def _unexplained(bench: Bench, failure: Failure) -> Fault:
    left, right = quantised_pair(bench.plan, failure.gemm, failure.operands)
    error = (failure.actual.double() - left @ right.t()).abs()
    size = (left.square() @ right.square().t()).sqrt()
    wrong = (error > 2.0**-6 * size.clamp(min=torch.finfo(torch.float64).tiny)).double().mean().item()
    bound = bench.bound_db(failure.gemm, failure.operands)
    words = (
        f"agrees to {failure.db:.1f} dB with the exact arithmetic, {bound:.1f} dB expected; {wrong:.1%} wrong"
    )
    return Fault("unexplained", failure.gemm, failure.case, words)
