"""The order of the files: the longest first, so that none of them runs alone at the end beside an idle core."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_mlflow_live", "test_launcher_faults", "test_precision_apply", "test_runner", "test_selftest_faults",
    "test_fork", "test_standby", "test_wrong_pass", "test_calibration", "test_process",
)  # fmt: skip
"""Files that take longest. pytest-xdist gives a file to a process as a whole, by default by the number of its tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and leave every other order as it is."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
