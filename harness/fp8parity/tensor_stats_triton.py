"""The sums of `tensor_stats` on CUDA: two reads of a tensor per cast, nothing of its size written.

The first pass reads x once for all its casts: the largest |x| of every run of 128 elements, along either axis (from
which the amax of a tensor, a row, a 1x128 tile or a 128x128 square follows, of x and of x^T), zeros, norms and
extremes. The second reads x once per cast. Both read x as it lies in memory: a cast of x^T differs only in which
elements share a scale. Both write float64 partial sums per tile, which are added in a fixed order without atomics, so
that a result repeats itself bit for bit.

What makes fp32 enough: sums are taken of multiples of a power of two near the largest element of the tile (first pass),
or of scaled values and then of multiples of 2^-48 of the tensor's amax (second pass), so that no square leaves the
range; an error below 2^-84 of its group's amax, or 2^-113 of the tensor's, is nothing beside the others. Codes are
classified by thresholds on the scaled value, which is exact because rounding is monotone and ties go to the even code:

    code = 0           iff  scaled <= half the smallest subnormal number
    code is subnormal  iff  half of it < scaled < smallest normal - half the smallest subnormal number

What the kernels are short of is instructions, not bytes: about twenty per element. Hence thresholds by a product and
sum that is cut to [0, 1], what a thread loads at once added up at once, and no test for non-finite elements where the
first pass saw none. Codes are rounded in fp32 arithmetic, not by a conversion to an FP8 type and back. Imported only
where a tensor is on CUDA.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fp8parity.casts import AMAX_FLOOR, BLOCK, CastPlan, Format
from fp8parity.tensor_sums import PEAKS, SATURATION_SLACK, SUMS

ROWS = 8
"""Rows that are taken at a time: with 128 columns two loads of 8 bf16 elements for each of 64 threads."""

WARPS = 2
"""Few, because threads of two warps wait for each other at the end of a tile less often than those of four."""

VECTOR = 8
"""Elements of a row that a thread loads at once."""

REGISTERS = (96, 96, 112)
"""Per thread of the second pass, by AXIS: fewer make room for more threads, which hide each other's waits.

All three measured (`benchmarks/tensor_stats_tiles.py`)."""

STALE_REGISTERS = 128
"""With a scale that is not of the present amax a thread looks for saturation too, and for groups that vanish."""

LANES = 512
GROUPS = 1024
"""Scaling groups of one program."""

HEADROOM = tl.constexpr(48)
"""Errors are counted in units of 2^-48 of the tensor's amax: the sum of 2^14 squares stays below 2^127."""

STEEP = tl.constexpr(60)
"""fp32 numbers near the thresholds of a code are 2^-41 apart or more: 2^60 times that is above 1."""

INFINITY_BITS = tl.constexpr(0x7F800000)
"""Of fp32. The bits of numbers that are not negative are ordered as the numbers, NaN beyond infinity."""

LARGE_BITS = tl.constexpr((127 + 50) << 23)
SMALL_BITS = tl.constexpr((127 - 40) << 23)
"""Of 2^50 and 2^-40. Between them the squares of a tile's elements are summed as they are: 2^14 of them stay finite,
and those that vanish, below 2^-126, are nothing beside that of the largest."""

_MANTISSA: dict[Format, int] = {"e4m3fn": 3, "e5m2": 2}


@triton.jit
def _power_of_two_near(value):
    """Return 2^k, and 2^-k, with 2^k <= value < 2^(k+1), both normal numbers."""
    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    return unit, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _thresholds(TINY: tl.constexpr, MANTISSA: tl.constexpr):
    """Return below what a scaled value has the code 0, and below what none of a normal number, for `_is_below`."""
    half: tl.constexpr = TINY / 2 ** (MANTISSA + 1)
    return half * (1 + 2**-23) * 2.0**STEEP, (TINY - half) * 2.0**STEEP


@triton.jit
def _rounded(scaled, TINY: tl.constexpr, MANTISSA: tl.constexpr):
    """Round 0 <= scaled <= the format's maximum to the nearest code, ties to even."""
    binade = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # a sum near this number has one code as its last place: fp32 has 23 bits behind the point, a code MANTISSA
    anchor = tl.maximum(binade, TINY) * (1.5 * 2 ** (23 - MANTISSA))
    return (scaled + anchor) - anchor


@triton.jit
def _chunk(place, r, c, rows, columns, edge):
    """Return some rows of a tile; 0 outside the tensor."""
    if edge:
        raw = tl.load(place, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0)
    else:
        raw = tl.load(place)
    return raw


@triton.jit
def _bits(place, r, c, rows, columns, edge):
    """Return the bits of |x| of some rows of a tile as fp32."""
    raw = _chunk(place, r, c, rows, columns, edge)
    return raw.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _per_thread(value, VECTOR: tl.constexpr):
    """Add up what lies next to each other: [R, C] to [R, C / VECTOR], within a thread."""
    return tl.sum(tl.reshape(value, value.shape[0], value.shape[1] // VECTOR, VECTOR), 2)


@triton.jit
def _add_and_least(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, tl.minimum(a2, b2)


@triton.jit
def _add(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


# Divisibility of sizes and strides by 16 makes loads wide; of the rest it would only make more kernels to compile.
@triton.jit(do_not_specialize=["column_tiles"])
def _magnitude_kernel(
    x_ptr,
    along_rows_ptr,
    along_columns_ptr,
    part_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    column_tiles,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Reduce one TILE x TILE tile: its maxima along both axes (inf where not finite) and six sums and peaks."""
    program = tl.program_id(0)
    tile_row, tile_column = program // column_tiles, program % column_tiles
    row, column = tl.arange(0, CHUNK), tl.arange(0, TILE)
    c = tile_column * TILE + column
    start = x_ptr + (tile_row * TILE).to(tl.int64) * row_stride
    start += (tile_column * TILE).to(tl.int64) * column_stride
    place = row[:, None] * row_stride + column[None, :] * column_stride
    edge = ((tile_row + 1) * TILE > rows) | ((tile_column + 1) * TILE > columns)
    top = tl.zeros([CHUNK, TILE], tl.int32)
    least = tl.full([CHUNK, TILE // VECTOR], INFINITY_BITS, tl.int32)
    total = tl.zeros([CHUNK, TILE // VECTOR], tl.float32)
    squares = total
    raw = _chunk(start + place, tile_row * TILE + row, c, rows, columns, edge)
    for first in tl.range(0, TILE, CHUNK):
        r = tile_row * TILE + first + row
        bits = raw.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # the next chunk is on its way while this one is reduced; after the last one it is read again, from the cache
        after = tl.minimum(first + CHUNK, TILE - CHUNK)
        here = start + tl.cast(after, tl.int64) * row_stride
        raw = _chunk(here + place, tile_row * TILE + after + row, c, rows, columns, edge)
        size = bits.to(tl.float32, bitcast=True)
        row_top = tl.minimum(tl.max(bits, 1), INFINITY_BITS).to(tl.float32, bitcast=True)
        tl.store(along_rows_ptr + r.to(tl.int64) * column_tiles + tile_column, row_top, mask=r < rows)
        top = tl.maximum(top, bits)
        least = tl.minimum(least, tl.min(tl.reshape(bits, CHUNK, TILE // VECTOR, VECTOR), 2))
        total += _per_thread(size, VECTOR)
        squares += _per_thread(size * size, VECTOR)
    column_top = tl.max(top, 0)
    highest = tl.max(column_top, 0)
    column_top = tl.minimum(column_top, INFINITY_BITS).to(tl.float32, bitcast=True)
    tl.store(along_columns_ptr + tile_row.to(tl.int64) * columns + c, column_top, mask=c < columns)
    sum_abs, sum_square, smallest = tl.reduce((total, squares, least), None, _add_and_least)
    unit = 1.0
    bad, zeros = highest * 0, highest * 0
    if (smallest == 0) | (highest >= LARGE_BITS) | (highest < SMALL_BITS):
        # Zeros, or squares that may leave the range of fp32: once more, slowly, in units of the largest element.
        highest, smallest = bad, bad + INFINITY_BITS
        zeros += tl.minimum(rows - tile_row * TILE, TILE) * tl.minimum(columns - tile_column * TILE, TILE)
        for first in tl.range(0, TILE, CHUNK):
            r = tile_row * TILE + first + row
            here = start + tl.cast(first, tl.int64) * row_stride
            bits = _bits(here + place, r, c, rows, columns, edge)
            finite = bits < INFINITY_BITS
            zeros -= tl.sum(tl.minimum(bits, 1))  # outside the tensor there is nothing but 0
            bad += tl.sum((finite == 0).to(tl.int32))
            highest = tl.maximum(highest, tl.max(tl.where(finite, bits, 0)))
            smallest = tl.minimum(smallest, tl.min(tl.where(bits > 0, bits, INFINITY_BITS)))
        unit, inverse = _power_of_two_near(highest.to(tl.float32, bitcast=True))
        total = tl.zeros([CHUNK, TILE // VECTOR], tl.float32)
        squares = total
        for first in tl.range(0, TILE, CHUNK):
            r = tile_row * TILE + first + row
            here = start + tl.cast(first, tl.int64) * row_stride
            bits = _bits(here + place, r, c, rows, columns, edge)
            near_one = tl.where(bits < INFINITY_BITS, bits, 0).to(tl.float32, bitcast=True) * inverse
            total += _per_thread(near_one, VECTOR)
            squares += _per_thread(near_one * near_one, VECTOR)
        sum_abs, sum_square = tl.sum(total), tl.sum(squares)
    wide = tl.cast(unit, tl.float64)
    part = part_ptr + program.to(tl.int64) * 6
    tl.store(part + 0, zeros.to(tl.float64))
    tl.store(part + 1, bad.to(tl.float64))
    tl.store(part + 2, sum_abs.to(tl.float64) * wide)
    tl.store(part + 3, sum_square.to(tl.float64) * wide * wide)
    tl.store(part + 4, highest.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(part + 5, -smallest.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=["groups", "programs"])
def _group_kernel(
    amax_ptr,
    scale_ptr,
    peaks_ptr,
    group_ptr,
    part_ptr,
    groups,
    programs,
    FRESH: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    JITTER: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Prepare scaling groups for the second pass: factor, thresholds and unit of each; what `assembled` counts.

    Thresholds are those of `_is_below`: from 0 a poisoned group counts nothing, up to infinity a vanished one all.
    """
    program = tl.program_id(0)
    index = program * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    known = index < groups
    amax = tl.load(amax_ptr + index, mask=known, other=0.0)
    if FRESH:
        # as `casts.scale_from_amax`: a reciprocal and a product in float64, rounded once to fp32
        scale = ((1.0 / tl.maximum(amax.to(tl.float64), FLOOR)) * LARGEST).to(tl.float32)
        if POWER_OF_TWO:
            scale = libdevice.exp2(tl.floor(libdevice.log2(scale)))
        scale *= JITTER
    else:
        scale = tl.load(scale_ptr + index, mask=known, other=1.0)
    tensor_unit, tensor_inverse = _power_of_two_near(tl.load(peaks_ptr).to(tl.float32))
    poisoned = (amax < float("inf")) == 0
    # a group that vanishes whole may be too small for its squares: it is measured by a scale of its own
    vanished = (amax * scale <= TINY / 2 ** (MANTISSA + 1)) & (poisoned == 0)
    _, own = _power_of_two_near(amax)
    factor = tl.where(poisoned, tensor_inverse, tl.where(vanished, own, scale))
    half, normal = _thresholds(TINY, MANTISSA)
    nothing_below = tl.where(poisoned, 0.0, tl.where(vanished, float("inf"), half))
    normal_from = tl.where(poisoned, 0.0, tl.where(vanished, float("inf"), normal))
    back = 2.0**HEADROOM / (factor.to(tl.float64) * tensor_unit.to(tl.float64))
    stride = tl.cast(groups, tl.int64)
    tl.store(group_ptr + index, factor, mask=known)
    tl.store(group_ptr + stride + index, back.to(tl.float32), mask=known)
    tl.store(group_ptr + stride * 2 + index, nothing_below, mask=known)
    tl.store(group_ptr + stride * 3 + index, normal_from, mask=known)
    live = known & (amax > 0) & (poisoned == 0)
    none = float("-inf")
    tl.store(part_ptr + program, tl.sum((known & (amax == 0)).to(tl.int32)).to(tl.float64))
    tl.store(part_ptr + programs + program, tl.sum(live.to(tl.int32)).to(tl.float64))
    tl.store(part_ptr + programs * 2 + program, tl.max(tl.where(live, scale, none)).to(tl.float64))
    tl.store(part_ptr + programs * 3 + program, tl.max(tl.where(live, -scale, none)).to(tl.float64))
    tl.store(part_ptr + programs * 4 + program, tl.max(tl.where(live, -amax, none)).to(tl.float64))


@triton.jit
def _is_below(value, threshold):
    """Return 1.0 where value < threshold * 2^-STEEP, else 0.0: a product and sum, rounded once, cut to [0, 1].

    One instruction of the units that multiply, which have time: a comparison goes to those that are short of it.
    """
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [value, -(2.0**STEEP), threshold],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_groups(
    group_ptr,
    at,
    held,
    stride,
    MASKED: tl.constexpr,
    ORDINARY: tl.constexpr,
    TINY: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Return factor, unit and both thresholds of scaling groups; a group that is not held counts nothing.

    ORDINARY: none is poisoned or vanished, so that all have the same thresholds.
    """
    if MASKED:
        factor = tl.load(group_ptr + at, mask=held, other=1.0)
        back = tl.load(group_ptr + stride + at, mask=held, other=0.0)
        nothing_below = tl.load(group_ptr + stride * 2 + at, mask=held, other=0.0)
        normal_from = tl.load(group_ptr + stride * 3 + at, mask=held, other=0.0)
    else:
        factor = tl.load(group_ptr + at)
        back = tl.load(group_ptr + stride + at)
        if ORDINARY:
            nothing_below, normal_from = _thresholds(TINY, MANTISSA)
        else:
            nothing_below = tl.load(group_ptr + stride * 2 + at)
            normal_from = tl.load(group_ptr + stride * 3 + at)
    return factor, back, nothing_below, normal_from


@triton.jit
def _cast_tile(
    start,
    group_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    groups,
    group_row_stride,
    group_column_stride,
    tile_row,
    tile_column,
    AXIS: tl.constexpr,
    CAREFUL: tl.constexpr,
    FRESH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    OVERFLOW: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Cast a tile; return its three counts and four sums."""
    row, column = tl.arange(0, CHUNK), tl.arange(0, TILE)
    c = tile_column * TILE + column
    place = row[:, None] * row_stride + column[None, :] * column_stride
    # what a thread loads at once it adds up at once: one register per sum, not eight
    nothing = tl.zeros([CHUNK, TILE // VECTOR], tl.float32)
    error_sum, error_squares, lost_sum, lost_squares = nothing, nothing, nothing, nothing
    unders, lows, zeros, saturated = nothing, nothing, nothing, nothing
    stride = tl.cast(groups, tl.int64)
    # what does not change from chunk to chunk is loaded once
    if AXIS == 1:
        stride *= columns
        at = ((tile_row * group_row_stride).to(tl.int64) * columns + c)[None, :]
        held = (c < columns)[None, :]
    elif AXIS == 2:
        at = (row * 0 + (tile_row * group_row_stride + tile_column * group_column_stride))[:, None]
        held = (row >= 0)[:, None]
    else:
        r = tile_row * TILE + row
        at = (r.to(tl.int64) * group_row_stride + tile_column * group_column_stride)[:, None]
        held = (r < rows)[:, None]
    factor, back, nothing_below, normal_from = _load_groups(
        group_ptr, at, held, stride, CAREFUL, FRESH and not CAREFUL, TINY, MANTISSA
    )
    raw = _chunk(start + place, tile_row * TILE + row, c, rows, columns, CAREFUL)
    for first in tl.range(0, TILE, CHUNK):
        size = tl.abs(raw.to(tl.float32))
        if CAREFUL:
            size = tl.where(size < float("inf"), size, 0.0)
        # the next chunk is on its way while this one is cast; after the last one it is read again, from the cache
        after = tl.minimum(first + CHUNK, TILE - CHUNK)
        r = tile_row * TILE + after + row
        raw = _chunk(start + tl.cast(after, tl.int64) * row_stride + place, r, c, rows, columns, CAREFUL)

        scaled = size * factor
        if FRESH:
            code = _rounded(scaled, TINY, MANTISSA)
            far = scaled
        else:
            code = _rounded(tl.minimum(scaled, LARGEST), TINY, MANTISSA)
            # what a stale scale sends far beyond the range: its squares stay finite
            far = tl.minimum(scaled, 1e18)
        if CAREFUL or not FRESH:
            # neither poisoned nor vanished: those keep no code
            live = (nothing_below > 0) & (nothing_below < float("inf"))
            code *= live.to(tl.float32)
            if not FRESH:
                saturated += _per_thread(
                    (scaled > tl.where(live, OVERFLOW, float("inf"))).to(tl.float32), VECTOR
                )
            if CAREFUL:
                zeros += _per_thread(((size == 0) & (nothing_below > 0)).to(tl.float32), VECTOR)
        error = tl.abs(far - code)
        if AXIS == 1:
            error *= back
        under = _is_below(scaled, nothing_below)  # a zero too
        lost = error * under  # all of it is error
        unders += _per_thread(under, VECTOR)
        lows += _per_thread(_is_below(scaled, normal_from), VECTOR)
        if AXIS == 1:
            error_sum += _per_thread(error, VECTOR)
            error_squares += _per_thread(error * error, VECTOR)
            lost_sum += _per_thread(lost, VECTOR)
            lost_squares += _per_thread(lost * error, VECTOR)
        else:
            error_sum += _per_thread(error, VECTOR) * back
            error_squares += _per_thread(error * error, VECTOR) * back * back
            lost_sum += _per_thread(lost, VECTOR) * back
            lost_squares += _per_thread(lost * error, VECTOR) * back * back
        if AXIS == 0:
            at = (r.to(tl.int64) * group_row_stride + tile_column * group_column_stride)[:, None]
            factor, back, nothing_below, normal_from = _load_groups(
                group_ptr, at, (r < rows)[:, None], stride, CAREFUL, FRESH and not CAREFUL, TINY, MANTISSA
            )
    # what is not careful saw no zero; what is fresh saturates nowhere
    zero, high = 0.0, 0.0
    if CAREFUL:
        zero = tl.sum(zeros)
    if not FRESH:
        high = tl.sum(saturated)
    under, low, error_abs, error_square, lost_abs, lost_square = tl.reduce(
        (unders, lows, error_sum, error_squares, lost_sum, lost_squares), None, _add
    )
    return under - zero, low - under, high, error_abs, error_square, lost_abs, lost_square


@triton.jit(
    do_not_specialize=["column_tiles", "groups", "group_row_stride", "group_column_stride", "programs"]
)
def _cast_kernel(
    x_ptr,
    group_ptr,
    seen_ptr,
    tile_ptr,
    part_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    column_tiles,
    groups,
    group_row_stride,
    group_column_stride,
    programs,
    AXIS: tl.constexpr,
    FRESH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    OVERFLOW: tl.constexpr,
    ORDINARY: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Cast one TILE x TILE tile and reduce what that does to it: three counts and four sums.

    Within the tile the scale changes with the row (AXIS 0), with the column (1) or not at all (2). FRESH: it is the
    scale of the present amax, so nothing saturates. A tile that is whole, of elements not below ORDINARY and of a
    tensor without non-finite ones, takes the short way.
    """
    program = tl.program_id(0)
    tile_row, tile_column = program // column_tiles, program % column_tiles
    start = x_ptr + (tile_row * TILE).to(tl.int64) * row_stride
    start += (tile_column * TILE).to(tl.int64) * column_stride
    edge = ((tile_row + 1) * TILE > rows) | ((tile_column + 1) * TILE > columns)
    tile = tile_ptr + program.to(tl.int64) * 6
    # with its own scale a group vanishes only far below the floor of amax; the tile's smallest element tells
    odd = (tl.load(seen_ptr + 1) > 0) | (tl.load(tile) > 0) | (-tl.load(tile + 5) < ORDINARY)
    if edge | odd:
        under, subnormal, saturated, error_abs, error_square, lost_abs, lost_square = _cast_tile(
            start, group_ptr, rows, columns, row_stride, column_stride, groups, group_row_stride,
            group_column_stride, tile_row, tile_column, AXIS, True, FRESH, MANTISSA, LARGEST, TINY, OVERFLOW, CHUNK,
            TILE, VECTOR,
        )  # fmt: skip
    else:
        under, subnormal, saturated, error_abs, error_square, lost_abs, lost_square = _cast_tile(
            start, group_ptr, rows, columns, row_stride, column_stride, groups, group_row_stride,
            group_column_stride, tile_row, tile_column, AXIS, False, FRESH, MANTISSA, LARGEST, TINY, OVERFLOW, CHUNK,
            TILE, VECTOR,
        )  # fmt: skip
    tl.store(part_ptr + program, tl.cast(under, tl.float64))
    tl.store(part_ptr + programs + program, tl.cast(subnormal, tl.float64))
    tl.store(part_ptr + programs * 2 + program, tl.cast(saturated, tl.float64))
    tl.store(part_ptr + programs * 3 + program, error_abs.to(tl.float64))
    tl.store(part_ptr + programs * 4 + program, error_square.to(tl.float64))
    tl.store(part_ptr + programs * 5 + program, lost_abs.to(tl.float64))
    tl.store(part_ptr + programs * 6 + program, lost_square.to(tl.float64))


@triton.jit(do_not_specialize=["programs", "group_programs"])
def _finish_kernel(
    part_ptr,
    group_part_ptr,
    seen_ptr,
    peaks_ptr,
    sorted_ptr,
    out_ptr,
    programs,
    group_programs,
    LANES: tl.constexpr,
):
    """Add up the partial sums in a fixed order and write `CastSums.values`; one program."""
    which, lane = tl.arange(0, 8), tl.arange(0, LANES)
    total = tl.zeros([8, LANES], tl.float64)
    for first in tl.range(0, programs, LANES):
        at = first + lane
        inside = (which[:, None] < 7) & (at[None, :] < programs)
        total += tl.load(part_ptr + which[:, None] * programs + at[None, :], mask=inside, other=0.0)
    zero_groups = tl.zeros([LANES], tl.float64)
    live_groups = tl.zeros([LANES], tl.float64)
    peaks = tl.full([4, LANES], float("-inf"), tl.float64)
    third = tl.arange(0, 4)
    for first in tl.range(0, group_programs, LANES):
        at = first + lane
        inside = at < group_programs
        zero_groups += tl.load(group_part_ptr + at, mask=inside, other=0.0)
        live_groups += tl.load(group_part_ptr + group_programs + at, mask=inside, other=0.0)
        wanted = (third[:, None] < 3) & inside[None, :]
        here = group_part_ptr + (2 + third[:, None]) * group_programs + at[None, :]
        peaks = tl.maximum(peaks, tl.load(here, mask=wanted, other=float("-inf")))
    unit, _ = _power_of_two_near(tl.load(peaks_ptr).to(tl.float32))
    unit = unit.to(tl.float64) * 2.0 ** (-HEADROOM)
    sums = tl.sum(total, 1)
    sums = tl.where((which == 3) | (which == 5), sums * unit, sums)
    sums = tl.where((which == 4) | (which == 6), sums * unit * unit, sums)
    four, two = tl.arange(0, 4), tl.arange(0, 2)
    tl.store(out_ptr + four, tl.load(seen_ptr + four))
    tl.store(out_ptr + 4 + which, sums, mask=which < 7)
    zero, live = tl.sum(zero_groups), tl.sum(live_groups)
    tl.store(out_ptr + 11, zero)
    tl.store(out_ptr + 12, live)
    # zeros are sorted before live groups and poisoned ones, which are infinite, behind
    middle = zero.to(tl.int64) + tl.maximum(live.to(tl.int64) - 1, 0) // 2
    median = tl.load(sorted_ptr + middle, mask=live > 0, other=0.0)
    tl.store(out_ptr + 13, median.to(tl.float64) * live)
    tl.store(out_ptr + 14 + two, tl.load(peaks_ptr + two))
    tl.store(out_ptr + 16 + third, tl.max(peaks, 1), mask=third < 3)


class FusedCasts:
    """The first pass over x [R, C] on CUDA, not empty, any strides, and then any number of casts of x or x^T.

    `along_rows` [R, ceil(C / 128)] and `along_columns` [ceil(R / 128), C] are the largest |x| of runs of 128 elements,
    inf where one is not finite; `sums` [4] and `peaks` [2] are float64, in the order of `tensor_sums`. If the columns
    of x lie next to each other in memory, all this is of x^T (`turned`). Waits for nothing.
    """

    def __init__(self, x: Tensor) -> None:
        self.turned = x.stride(1) != 1 and x.stride(0) == 1
        self.x = x.t() if self.turned else x
        rows, columns = self.x.shape
        self.tall, self.wide = -(-rows // BLOCK), -(-columns // BLOCK)
        self.along_rows = x.new_empty((rows, self.wide), dtype=torch.float32)
        self.along_columns = x.new_empty((self.tall, columns), dtype=torch.float32)
        self.parts = parts = x.new_empty((self.tall * self.wide, 6), dtype=torch.float64)
        with torch.cuda.device_of(x):
            _magnitude_kernel[(self.tall * self.wide,)](
                self.x,
                self.along_rows,
                self.along_columns,
                parts,
                rows,
                columns,
                *self.x.stride(),
                self.wide,
                CHUNK=ROWS,
                TILE=BLOCK,
                VECTOR=VECTOR,
                num_warps=WARPS,
            )
        self.sums, self.peaks = parts[:, :4].sum(0), parts[:, 4:].amax(0)
        self._groups: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}

    def groups(self, granularity: str, *, turned: bool) -> tuple[Tensor, Tensor]:
        """Return the amax of every scaling group of `self.x`, or of its transpose, and the same values sorted.

        Groups lie as they do in `self.x`: the transpose of the shape of `casts.scale_of` if `turned`. inf where an
        element is not finite.
        """
        key = (granularity, turned and granularity in ("row", "block_1xB"))
        if key not in self._groups:
            amax = self._group_amax(*key)
            flat = amax.reshape(-1)
            self._groups[key] = (amax, flat.sort().values if flat.numel() > 1 else flat)
        return self._groups[key]

    def _group_amax(self, granularity: str, turned: bool) -> Tensor:
        if granularity == "tensor":
            return self.along_rows.amax()
        if granularity == "row":
            return (
                self.along_columns.amax(0, keepdim=True) if turned else self.along_rows.amax(1, keepdim=True)
            )
        if granularity == "block_1xB":
            return self.along_columns if turned else self.along_rows
        return self._squares

    @cached_property
    def _squares(self) -> Tensor:
        """[ceil(R / 128), ceil(C / 128)]."""
        missing = -self.along_rows.shape[0] % BLOCK
        padded = torch.nn.functional.pad(self.along_rows, (0, 0, 0, missing))
        return padded.reshape(self.tall, BLOCK, self.wide).amax(1)

    def values(self, plan: CastPlan, *, transposed: bool, scale: Tensor | None = None) -> Tensor:
        """Return `CastSums.values` of the cast of x, or of x^T.

        Equal to the definitions of `tensor_stats` in every count, and in the sums to fp32 rounding. `scale` is as in
        `tensor_stats.cast_sums`.
        """
        turned = transposed != self.turned
        amax, ordered = self.groups(plan.granularity, turned=turned)
        own = amax  # not read
        if scale is not None:
            held = amax.t() if turned else amax
            own = scale.float().expand(held.shape)
            own = (own.t() if turned else own).contiguous()
        rows, columns = self.x.shape
        count, programs = amax.numel(), self.tall * self.wide
        group_programs = -(-count // GROUPS)
        axis, lines, row_stride, column_stride = self._layout(plan.granularity, count, turned=turned)
        prepared = self.x.new_empty(4 * count, dtype=torch.float32)
        partial = self.x.new_empty(7 * programs + 5 * group_programs, dtype=torch.float64)
        parts, group_parts = partial, partial[7 * programs :]
        out = self.x.new_empty(len(SUMS) + len(PEAKS), dtype=torch.float64)
        tiny = torch.finfo(plan.dtype).tiny
        # the scale of the present amax, exactly
        fresh = scale is None and plan.jitter == 1.0
        with torch.cuda.device_of(self.x):
            _group_kernel[(group_programs,)](
                amax,
                own,
                self.peaks,
                prepared,
                group_parts,
                count,
                group_programs,
                FRESH=scale is None,
                POWER_OF_TWO=plan.power_of_two,
                JITTER=plan.jitter,
                FLOOR=AMAX_FLOOR,
                LARGEST=plan.max_value,
                TINY=tiny,
                MANTISSA=_MANTISSA[plan.format],
                BLOCK_GROUPS=GROUPS,
            )
            _cast_kernel[(programs,)](
                self.x,
                prepared,
                self.sums,
                self.parts,
                parts,
                rows,
                columns,
                *self.x.stride(),
                self.wide,
                lines,
                row_stride,
                column_stride,
                programs,
                AXIS=axis,
                FRESH=fresh,
                MANTISSA=_MANTISSA[plan.format],
                LARGEST=plan.max_value,
                TINY=tiny,
                OVERFLOW=plan.max_value * SATURATION_SLACK,
                ORDINARY=2 * AMAX_FLOOR * tiny / 2 ** _MANTISSA[plan.format] / plan.max_value,
                CHUNK=ROWS,
                TILE=BLOCK,
                VECTOR=VECTOR,
                num_warps=WARPS,
                maxnreg=REGISTERS[axis] if fresh else STALE_REGISTERS,
            )
            _finish_kernel[(1,)](
                parts,
                group_parts,
                self.sums,
                self.peaks,
                ordered,
                out,
                programs,
                group_programs,
                LANES=LANES,
                num_warps=8,
            )
        return out

    def _layout(self, granularity: str, count: int, *, turned: bool) -> tuple[int, int, int, int]:
        """Return along which axis the scale changes within a tile (2: not), and how groups lie.

        Axes 0 and 2: the number of groups, and the strides of a group's index along rows (tiles of rows: 2) and tiles
        of columns. Axis 1, where each line of groups has one per column: the number of lines, and how many of them
        lie from one tile of rows to the next.
        """
        if granularity == "tensor":
            return 2, 1, 0, 0
        if granularity == "block_BxB":
            return 2, count, self.wide, 1
        if granularity == "row":
            return (1, 1, 0, 0) if turned else (0, count, 1, 0)
        return (1, self.tall, 1, 0) if turned else (0, count, self.wide, 1)
