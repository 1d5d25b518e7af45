"""Tokens of one's own, by a function that returns the same at every call. Named by own_model.yaml."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def tokens(modules: tuple[str, ...] = ("argparse", "typing", "inspect", "tarfile")) -> dict[str, object]:
    """Return the bytes of some modules of the standard library to train on, and of another to evaluate on."""
    return {"train": _bytes_of(modules), "held_out": _bytes_of(("subprocess",))}


def _bytes_of(modules: tuple[str, ...]) -> Iterator[npt.NDArray[np.uint16]]:
    for name in modules:
        text = inspect.getsource(__import__(name)).encode()
        yield np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
