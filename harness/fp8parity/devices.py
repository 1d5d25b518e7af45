"""The devices of this machine, found without torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path


def visible_gpus() -> list[str]:
    """Return the GPU indices that nvidia-smi lists, or those that CUDA_VISIBLE_DEVICES leaves; no torch needed.

    Of the variable CUDA takes what stands before the first entry that is no index and no UUID: `-1` hides itself and
    all that follows (CUDA C++ Programming Guide, environment variables).
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = (name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        return list(takewhile(_names_a_gpu, names))
    return query_gpus("index")


def _names_a_gpu(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def query_gpus(fields: str, gpus: Sequence[str] = ()) -> list[str]:
    """Return what nvidia-smi says of `fields`, a line without units per GPU (all, or `gpus`); empty where it cannot."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command += ["-i", ",".join(gpus)] if gpus else []
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
    )


def default_slots(device: str, threads: int, per_gpu: int = 1) -> int:
    """Return the runs that go at a time: `per_gpu` on each GPU, or as many as the cores hold."""
    gpus = visible_gpus() if device != "cpu" else []
    return len(gpus) * per_gpu or max(1, (os.cpu_count() or 1) // threads)


USABLE_SHARE = 0.92
"""Share of a device's memory that runs may be planned on: allocators keep some of it in fragments."""


def device_memory(gpus: Sequence[str]) -> int | None:
    """Return the bytes that runs may use on each of `gpus` (the smallest), or of the host when there is none.

    None when the machine does not say.
    """
    total = _smallest_gpu(gpus) if gpus else _host_memory()
    return None if total is None else int(USABLE_SHARE * total)


def _smallest_gpu(gpus: Sequence[str]) -> int | None:
    with contextlib.suppress(ValueError):  # nothing said, or no number
        return min(int(line) for line in query_gpus("memory.total", gpus)) * 2**20
    return None


def _host_memory() -> int | None:
    """Return what the host has free now, or what the container may still take where that is less."""
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, StopIteration):  # the limit reads "max" where there is none
        cgroup = Path("/sys/fs/cgroup")
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = int(next(line for line in stat if line.startswith("file ")).split()[1])
        free.append(limit - (used - cached))
    return min(free, default=None)
