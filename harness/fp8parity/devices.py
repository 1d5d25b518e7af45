"""The devices of this machine, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess


def visible_gpus() -> list[str]:
    """Return the GPU indices that nvidia-smi lists, or those that CUDA_VISIBLE_DEVICES leaves; no torch needed."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
    )


def default_slots(device: str, threads: int) -> int:
    """Return the runs that fit at a time: one per GPU, or as many as the cores hold."""
    gpus = visible_gpus() if device != "cpu" else []
    return len(gpus) or max(1, (os.cpu_count() or 1) // threads)
