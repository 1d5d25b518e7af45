"""Timing for `throughput.py`: on a GPU by events and by the profiler's kernels, elsewhere by the clock."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|splitk", re.IGNORECASE)
"""Names of cuBLAS' and CUTLASS' matrix kernels. Inductor's fused kernels carry operator names, so they are told
apart first: all of Triton's here are casts."""


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds of one call on the device: matrix kernels, and everything else (casts, amax, copies)."""

    gemm_ms: float
    other_ms: float

    @property
    def total_ms(self) -> float:
        """Both together."""
        return self.gemm_ms + self.other_ms


def is_gemm_kernel(name: str) -> bool:
    """Return whether a device kernel of this name multiplies matrices."""
    return not name.startswith("triton_") and _GEMM_KERNEL.search(name) is not None


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_calls(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return milliseconds per call of `calls` calls in a row, with no synchronisation between them."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - started) * 1e3 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def interleaved(
    works: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Time all of `works` in turn, `rounds` times over (ABAB), so that a drifting clock meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(timed_calls(work, device, calls))
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return the median over rounds of slow / fast: how many times as fast the second is."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def kernel_times(work: Callable[[], object], device: torch.device, calls: int) -> KernelTimes | None:
    """Return the device time of one call by kind of kernel, or None where no kernel can be seen."""
    if device.type != "cuda":
        return None
    synchronise(device)
    # The device's activity alone: annotations of the host would be counted as kernels.
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            work()
        synchronise(device)
    results = profiled.profiler
    if results is None or results.kineto_results is None:
        return None
    gemm = other = 0
    for event in results.kineto_results.events():
        if int(event.device_type()) == 0 or event.is_user_annotation():
            continue
        if is_gemm_kernel(event.name()):
            gemm += event.duration_ns()
        else:
            other += event.duration_ns()
    if gemm == 0:
        return None
    return KernelTimes(gemm / 1e6 / calls, other / 1e6 / calls)


def gemm_ceiling(kind: str, device: torch.device, shapes: list[tuple[int, int, int]], calls: int) -> float:
    """Return the best TFLOP/s of one plain GEMM [M, K] x [K, N] over `shapes`, `kind` bf16 or fp8, on random data."""
    best = 0.0
    for m, k, n in shapes:
        a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
        work = _bf16_gemm(a, b) if kind == "bf16" else _fp8_gemm(a, b)
        timed_calls(work, device, calls)
        ms = statistics.median(timed_calls(work, device, calls) for _ in range(3))
        best = max(best, 2.0 * m * k * n / ms / 1e9)
    return best


def _bf16_gemm(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b.t())


def _fp8_gemm(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def peak_gib(device: torch.device, above: int = 0) -> float | None:
    """Return the peak of allocated memory since its reset, less `above` bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    return float(torch.cuda.max_memory_allocated(device) - above) / 2**30


def reset_peak(device: torch.device) -> int:
    """Restart the peak and return the bytes allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
