"""The sums of `tensor_stats` on CUDA: two reads of a tensor per cast, nothing of its size written.

The first pass reads x once for all its casts: the largest |x| of every run of 128 elements, along either axis (from
which the amax of a tensor, a row, a 1x128 tile or a 128x128 square follows), zeros, norms and extremes. The second
reads x once per cast, as it is or transposed, with strides: an operand is never copied. Both write float64 partial
sums per program, which torch adds up: no atomics, so a result repeats itself bit for bit.

What makes fp32 enough: a program divides what it sums by a power of two near its largest element, so that no square
leaves the range, and multiplies it back in float64. Codes are classified by thresholds on the scaled value, which is
exact because rounding is monotone and ties go to the even code:

    code = 0           iff  scaled <= half the smallest subnormal number
    code is subnormal  iff  half of it < scaled < smallest normal - half the smallest subnormal number

Codes are rounded in fp32 arithmetic, not by a conversion to an FP8 type and back: it takes no more instructions and
means the same on every GPU and in Triton's interpreter. Imported only where a tensor is on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8parity.casts import BLOCK, CastPlan, Format, scale_from_amax
from fp8parity.tensor_sums import SATURATION_SLACK, assembled

TILE_ROWS = 64
"""Rows of a tile of the second pass: with 128 columns 32 elements for each of 256 threads."""

WARPS = 8

_SMALLEST: dict[Format, float] = {"e4m3fn": 2.0**-9, "e5m2": 2.0**-16}
_MANTISSA: dict[Format, int] = {"e4m3fn": 3, "e5m2": 2}


@triton.jit
def _power_of_two_near(value):
    """Return 2^k, and 2^-k, with 2^k <= value < 2^(k+1), both normal numbers."""
    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    return unit, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(scaled, TINY: tl.constexpr, MANTISSA: tl.constexpr):
    """Round 0 <= scaled <= the format's maximum to the nearest code, ties to even."""
    binade = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # a sum near this number has one code as its last place: fp32 has 23 bits behind the point, a code MANTISSA
    anchor = tl.maximum(binade, TINY) * (1.5 * 2 ** (23 - MANTISSA))
    return (scaled + anchor) - anchor


@triton.jit
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
    TILE: tl.constexpr,
):
    """Reduce one TILE x TILE tile: its maxima along both axes (inf where not finite) and six sums and peaks."""
    program = tl.program_id(0)
    tile_row, tile_column = program // column_tiles, program % column_tiles
    lane = tl.arange(0, TILE)
    r, c = tile_row * TILE + lane, tile_column * TILE + lane
    start = x_ptr + (tile_row * TILE).to(tl.int64) * row_stride
    start += (tile_column * TILE).to(tl.int64) * column_stride
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    place = lane[:, None] * row_stride + lane[None, :] * column_stride
    size = tl.abs(tl.load(start + place, mask=inside, other=0.0).to(tl.float32))
    finite = size < float("inf")
    seen = tl.where(finite, size, float("inf"))
    tl.store(along_rows_ptr + r.to(tl.int64) * column_tiles + tile_column, tl.max(seen, 1), mask=r < rows)
    tl.store(along_columns_ptr + tile_row.to(tl.int64) * columns + c, tl.max(seen, 0), mask=c < columns)
    clean = tl.where(finite, size, 0.0)
    largest = tl.max(tl.max(clean, 1), 0)
    smallest = tl.min(tl.min(tl.where(clean > 0, clean, float("inf")), 1), 0)
    unit, inverse = _power_of_two_near(largest)
    near_one = clean * inverse
    wide = unit.to(tl.float64)
    part = part_ptr + program.to(tl.int64) * 6
    zeros = tl.sum(tl.sum(((size == 0) & inside).to(tl.int32), 1), 0)
    bad = tl.sum(tl.sum((finite == 0).to(tl.int32), 1), 0)
    tl.store(part + 0, zeros.to(tl.float64))
    tl.store(part + 1, bad.to(tl.float64))
    tl.store(part + 2, tl.sum(tl.sum(near_one, 1), 0).to(tl.float64) * wide)
    tl.store(part + 3, tl.sum(tl.sum(near_one * near_one, 1), 0).to(tl.float64) * wide * wide)
    tl.store(part + 4, largest.to(tl.float64))
    tl.store(part + 5, -smallest.to(tl.float64))


@triton.jit
def _cast_kernel(
    x_ptr,
    amax_ptr,
    scale_ptr,
    part_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    column_tiles,
    group_row_stride,
    group_column_stride,
    GROUP_ROWS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    SMALLEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Cast one tile and reduce what that does to it: three counts and four sums."""
    program = tl.program_id(0)
    tile_row, tile_column = program // column_tiles, program % column_tiles
    row, column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    r, c = tile_row * TILE_ROWS + row, tile_column * TILE_COLUMNS + column
    start = x_ptr + (tile_row * TILE_ROWS).to(tl.int64) * row_stride
    start += (tile_column * TILE_COLUMNS).to(tl.int64) * column_stride
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    place = row[:, None] * row_stride + column[None, :] * column_stride
    size = tl.abs(tl.load(start + place, mask=inside, other=0.0).to(tl.float32))
    size = tl.where(size < float("inf"), size, 0.0)

    group = (r // GROUP_ROWS).to(tl.int64) * group_row_stride + tile_column * group_column_stride
    amax = tl.load(amax_ptr + group, mask=r < rows, other=0.0)
    scale = tl.load(scale_ptr + group, mask=r < rows, other=1.0)
    poisoned = (amax < float("inf")) == 0
    # a group that vanishes whole may be too small for its squares: it is measured by a scale of its own
    vanished = (amax * scale <= SMALLEST / 2) & (poisoned == 0)
    _, own = _power_of_two_near(amax)
    live = (poisoned == 0) & (vanished == 0)
    factor = tl.where(poisoned, 1.0, tl.where(vanished, own, scale))
    nothing_below = tl.where(poisoned, -1.0, tl.where(vanished, float("inf"), SMALLEST / 2))
    normal_from = tl.where(live, TINY - SMALLEST / 2, -1.0)
    too_large = tl.where(live, OVERFLOW, float("inf"))

    scaled = size * factor[:, None]
    nonzero = size > 0
    under = nonzero & (scaled <= nothing_below[:, None])
    subnormal = nonzero & (under == 0) & (scaled < normal_from[:, None])
    code = tl.where(live[:, None], _rounded(tl.minimum(scaled, LARGEST), TINY, MANTISSA), 0.0)
    # what a stale scale sends far beyond the range: 128 squares of it in a row stay finite
    error = tl.abs(tl.minimum(scaled, 1e18) - code)
    lost = tl.where(under, scaled, 0.0)
    back = 1.0 / factor.to(tl.float64)
    part = part_ptr + program.to(tl.int64) * 7
    tl.store(part + 0, tl.sum(tl.sum(under.to(tl.int32), 1), 0).to(tl.float64))
    tl.store(part + 1, tl.sum(tl.sum(subnormal.to(tl.int32), 1), 0).to(tl.float64))
    saturated = scaled > too_large[:, None]
    tl.store(part + 2, tl.sum(tl.sum(saturated.to(tl.int32), 1), 0).to(tl.float64))
    tl.store(part + 3, tl.sum(tl.sum(error, 1).to(tl.float64) * back, 0))
    tl.store(part + 4, tl.sum(tl.sum(error * error, 1).to(tl.float64) * back * back, 0))
    tl.store(part + 5, tl.sum(tl.sum(lost, 1).to(tl.float64) * back, 0))
    tl.store(part + 6, tl.sum(tl.sum(lost * lost, 1).to(tl.float64) * back * back, 0))


@dataclass(frozen=True)
class Magnitudes:
    """What the first pass found of x [R, C].

    `along_rows` [R, ceil(C / 128)] and `along_columns` [ceil(R / 128), C] are the largest |x| of runs of 128 elements,
    inf where one is not finite; `sums` [4] and `peaks` [2] are float64, in the order of `tensor_stats`.
    """

    along_rows: Tensor
    along_columns: Tensor
    sums: Tensor
    peaks: Tensor

    def transposed(self) -> Magnitudes:
        """Return the magnitudes of x^T."""
        return Magnitudes(self.along_columns.t(), self.along_rows.t(), self.sums, self.peaks)

    def group_amax(self, plan: CastPlan) -> Tensor:
        """Return the amax of every scaling group, contiguous, in the shape of `casts.scale_of`."""
        tiles = self.along_rows
        if plan.granularity == "tensor":
            return tiles.amax()
        if plan.granularity == "row":
            return tiles.amax(1, keepdim=True)
        if plan.granularity == "block_1xB":
            return tiles.contiguous()
        missing = -tiles.shape[0] % BLOCK
        padded = torch.nn.functional.pad(tiles, (0, 0, 0, missing))
        return padded.reshape(-1, BLOCK, tiles.shape[1]).amax(1)


def magnitudes(x: Tensor) -> Magnitudes:
    """Return the first pass over x [R, C] on CUDA, not empty, any strides; waits for nothing."""
    rows, columns = x.shape
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    along_rows = x.new_empty((rows, wide), dtype=torch.float32)
    along_columns = x.new_empty((tall, columns), dtype=torch.float32)
    parts = x.new_empty((tall * wide, 6), dtype=torch.float64)
    with torch.cuda.device_of(x):
        _magnitude_kernel[(tall * wide,)](
            x, along_rows, along_columns, parts, rows, columns, *x.stride(), wide, TILE=BLOCK, num_warps=WARPS
        )
    return Magnitudes(along_rows, along_columns, parts[:, :4].sum(0), parts[:, 4:].amax(0))


def _group_layout(plan: CastPlan, wide: int) -> tuple[int, int, int]:
    """Return rows per group, and the strides of the group index along row groups and column tiles."""
    return {"tensor": (1, 0, 0), "row": (1, 1, 0), "block_1xB": (1, wide, 1), "block_BxB": (BLOCK, wide, 1)}[
        plan.granularity
    ]


def cast_values(x: Tensor, seen: Magnitudes, plan: CastPlan, scale: Tensor | None = None) -> Tensor:
    """Return `CastSums.values` of x [R, C] on CUDA, not empty; `seen` are its magnitudes in the same orientation.

    Equal to the definitions of `tensor_stats` in every count, and in the sums to fp32 rounding.
    """
    rows, columns = x.shape
    wide = -(-columns // BLOCK)
    amax = seen.group_amax(plan)
    own = scale_from_amax(amax, plan) if scale is None else scale.float().expand(amax.shape).contiguous()
    group_rows, row_stride, column_stride = _group_layout(plan, wide)
    programs = -(-rows // TILE_ROWS) * wide
    parts = x.new_empty((programs, 7), dtype=torch.float64)
    smallest = _SMALLEST[plan.format]
    with torch.cuda.device_of(x):
        _cast_kernel[(programs,)](
            x,
            amax,
            own,
            parts,
            rows,
            columns,
            *x.stride(),
            wide,
            row_stride,
            column_stride,
            GROUP_ROWS=group_rows,
            MANTISSA=_MANTISSA[plan.format],
            LARGEST=plan.max_value,
            TINY=torch.finfo(plan.dtype).tiny,
            SMALLEST=smallest,
            OVERFLOW=plan.max_value * SATURATION_SLACK,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=BLOCK,
            num_warps=WARPS,
        )
    return assembled(torch.cat((seen.sums, parts.sum(0))), seen.peaks, amax, own)
