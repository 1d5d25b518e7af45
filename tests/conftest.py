"""The order of the files, the longest first, so that none runs alone beside an idle core; benchmarks as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

LONGEST = (
    "test_mlflow_live", "test_launcher_faults", "test_precision_apply", "test_runner", "test_selftest_faults",
    "test_fork", "test_standby", "test_wrong_pass", "test_calibration", "test_process",
)  # fmt: skip
"""Files that take longest. pytest-xdist gives a file to a process as a whole, by default by the number of its tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and leave every other order as it is."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """Import `benchmarks/NAME.py`, which is no package, anew at each call."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
