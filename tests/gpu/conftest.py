"""Skip what needs a GPU, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def missing() -> str | None:
    """Return why the tests of this folder cannot run here."""
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch sees none"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 9) else f"FP8 needs compute capability 8.9, this device has {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
