"""Are the tiles of the fused statistics kernels good ones? Times others on one CUDA GPU, in half a minute.

    python benchmarks/tensor_stats_tiles.py [--rows 16384] [--columns 8192]

`tensor_stats_triton` fixes the rows taken at a time (ROWS), the warps of a tile (WARPS) and the registers a thread of
the second pass may use (REGISTERS, by the axis along which the scale changes within a tile). A line per setting and
kernel: device time from the profiler, and bytes read a second over those that a device copy reads and writes a second.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fp8parity.casts import CastPlan
from probe_overhead import kernel_seconds

SETTINGS: dict[tuple[int, int], tuple[int, ...]] = {
    (8, 2): (96, 112, 128), (8, 4): (72, 80), (4, 2): (64, 72, 80), (4, 1): (96, 128),
}  # fmt: skip
"""(ROWS, WARPS): registers to try."""

ROW = CastPlan("e4m3fn", "row", power_of_two=True)
TILE = CastPlan("e4m3fn", "block_1xB")
CASTS = {
    "along rows": ((ROW, False), (TILE, False)),
    "along columns": ((ROW, True), (TILE, True)),
    "nowhere": ((CastPlan("e4m3fn", "tensor"), False),),
}
"""Where the scale changes within a tile (AXIS 0, 1, 2), and casts of which that is true."""

CALLS = 6


def second_pass(x: Tensor, casts: tuple[tuple[CastPlan, bool], ...]) -> list[float]:
    """Return the seconds of the second pass of each cast."""
    from fp8parity.tensor_stats_triton import FusedCasts

    first = FusedCasts(x)
    return [
        kernel_seconds(lambda p=plan, t=turned: first.values(p, transposed=t), CALLS)["_cast_kernel"]  # type: ignore[misc]
        for plan, turned in casts
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=8192)
    options = parser.parse_args()
    from fp8parity import tensor_stats_triton as fused

    x = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(0))
    x = x.to("cuda", torch.bfloat16)
    into = torch.empty_like(x)
    copy = sum(kernel_seconds(lambda: into.copy_(x), CALLS).values())
    fixed = (fused.ROWS, fused.WARPS, fused.REGISTERS)
    print(f"{torch.cuda.get_device_name()}, device copy {1e6 * copy:.0f} us; in use: {fixed}")
    for (fused.ROWS, fused.WARPS), tried in SETTINGS.items():
        where = f"{fused.ROWS} rows, {fused.WARPS} warps"
        first = kernel_seconds(lambda: fused.FusedCasts(x), CALLS)["_magnitude_kernel"]
        print(f"{where}: first pass {1e6 * first:.0f} us, {copy / 2 / first:.0%}", flush=True)
        for registers in tried:
            fused.REGISTERS = (registers,) * 3
            for axis, casts in CASTS.items():
                taken = second_pass(x, casts)
                shown = ", ".join(f"{1e6 * t:.0f} us {copy / 2 / t:.0%}" for t in taken)
                print(f"{where}, {registers} registers, scale changes {axis}: {shown}", flush=True)


if __name__ == "__main__":
    main()
