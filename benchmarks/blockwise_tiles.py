"""Is the fixed tile of each blockwise quantisation kernel a good one? Times all of torchao's, on a Hopper GPU.

    python benchmarks/blockwise_tiles.py [--sizes 2048,4096] [--tokens 16384] [--json FILE]

torchao would tune over these at every new size; `torchao_blockwise.TILES` fixes one each. The kernels have no loop, so
the number of pipeline stages changes nothing and one of each is timed. A line per kernel and size: the fixed tile's
time and bytes per second (bf16 read, fp8 written), the best tile, and how far the fixed one lies above it. About
half a second of compilation per tile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_timing as timing
from fp8parity.precision import torchao_blockwise

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = "_kernel"
SLOWER = 1.15
"""A fixed tile that takes longer than the best by more than this is marked."""


def candidates(kernels: Any, name: str) -> list[Any]:
    """Return torchao's tiles of one kernel, one per number of stages."""
    every = kernels.quant_kernel_configs if "weight" in name else kernels.quant_kernel_configs_with_groups
    return [c for c in every if c.num_stages == every[0].num_stages]


def measured(kernels: Any, name: str, x: torch.Tensor) -> Iterator[tuple[torchao_blockwise.Tile, float]]:
    """Yield every tile with its milliseconds; the fixed tile is put back."""
    kernel, quantise = getattr(kernels, name), getattr(kernels, name.removesuffix(SUFFIX))
    fixed = kernel.configs
    try:
        for config in candidates(kernels, name):
            kernel.configs = [config]
            timing.timed_calls(lambda: quantise(x), x.device, 5)
            ms = statistics.median(timing.timed_calls(lambda: quantise(x), x.device, 20) for _ in range(3))
            yield (dict(config.kwargs), config.num_warps, config.num_stages), ms
    finally:
        kernel.configs = fixed


def lines(sizes: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """Measure each kernel at each width."""
    torchao_blockwise._import_linear()
    from torchao.prototype.blockwise_fp8_training import kernels

    for name, fixed in torchao_blockwise.TILES.items():
        for width in sizes:
            rows = width if "weight" in name else tokens
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            times = list(measured(kernels, name, x))
            ms = next(t for tile, t in times if tile == fixed)
            best, least = min(times, key=lambda pair: pair[1])
            yield {
                "kernel": name, "rows": rows, "width": width, "fixed": fixed, "fixed_ms": ms, "best": best,
                "best_ms": least, "tb_per_s": 3 * rows * width / ms / 1e9,
                "all": sorted(times, key=lambda pair: pair[1]),
            }  # fmt: skip


def main() -> int:
    """Print every kernel and size; 1 when a fixed tile is much slower than the best."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="2048,4096", help="widths of the matrices")
    parser.add_argument("--tokens", type=int, default=16384, help="rows of an activation")
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    options = parser.parse_args()
    found = []
    for line in lines([int(size) for size in options.sizes.split(",")], options.tokens):
        found.append(line)
        slower = line["fixed_ms"] / line["best_ms"]
        mark = "ok  " if slower <= SLOWER else "SLOW"
        print(
            f"{mark} {line['kernel']} [{line['rows']}, {line['width']}]: {line['fixed_ms']:.4f} ms "
            f"({line['tb_per_s']:.2f} TB/s), best {line['best']} {line['best_ms']:.4f} ms, {slower:.2f}x",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(line["fixed_ms"] <= SLOWER * line["best_ms"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
