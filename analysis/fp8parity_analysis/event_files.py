"""Scalars from TensorBoard event files, through TensorBoard's own reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8parity_analysis.errors import BadInputError

if TYPE_CHECKING:
    from pathlib import Path

Scalars = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
_PATTERN = "*events.out.tfevents.*"


def folders(directory: Path) -> list[Path]:
    """Return the folders at or below `directory` that hold event files, sorted."""
    return sorted({path.parent for path in directory.rglob(_PATTERN)})


def read_scalars(folder: Path) -> Scalars:
    """Return {tag: (steps [K], values [K])}; of a step that was logged twice the later record counts.

    `BadInputError` when tensorboard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise BadInputError("reading TensorBoard files needs the extra fp8parity[tensorboard]") from error
    events = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False
    )
    events.Reload()
    tags = events.Tags()
    found = {
        tag: {item.step: item.value for item in _in_time(events.Scalars(tag))} for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        items = _in_time(events.Tensors(tag))
        values = {item.step: make_ndarray(item.tensor_proto) for item in items}
        if values and all(value.size == 1 and value.dtype.kind == "f" for value in values.values()):
            found[tag] = {step: float(value) for step, value in values.items()}
    return {tag: _arrays(values) for tag, values in found.items()}


def _in_time(items: list) -> list:  # type: ignore[type-arg]  # TensorBoard publishes no types
    return sorted(items, key=lambda item: item.wall_time)


def _arrays(values: dict[int, float]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    steps = np.array(sorted(values), dtype=np.int64)
    return steps, np.array([values[int(step)] for step in steps], dtype=np.float64)
