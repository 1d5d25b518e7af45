"""The whole selftest on this GPU: every recipe and backend, block-scaled kernels too, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from fp8parity.selftest import SubjectReport
from fp8parity.selftest.session import default_subjects, selftest

LABELS = [f"{p.recipe}/{p.backend}" for p in default_subjects()]
NEEDS_HOPPER = ("rowwise", "rowwise_with_gw_hp", "blockwise")


def examine(label: str, *, quick: bool = False, compiled: bool = False) -> SubjectReport:
    recipe, _, backend = label.partition("/")
    if backend != "reference" and recipe in NEEDS_HOPPER and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{label} needs compute capability 9.0, this is {torch.cuda.get_device_capability()}")
    (report,) = selftest("cuda", [label], quick=quick, compiled=compiled).subjects
    return report


@pytest.mark.parametrize("label", LABELS)
def test_arithmetic_is_right(label: str) -> None:
    report = examine(label)
    assert (report.status, [f.text for f in report.faults]) == ("right", [])


@pytest.mark.parametrize("label", LABELS)
def test_compiled_arithmetic_is_right(label: str) -> None:
    torch._dynamo.reset()
    report = examine(label, quick=True, compiled=True)
    assert [f.text for f in report.faults] == []
    if label == "blockwise_requant/reference":
        assert "lie on ties; write compile: off" in report.reason
        return
    assert [row.check for row in report.rows].count("compiled") == 3


@pytest.mark.parametrize("label", ["tensorwise/torchao_float8/master", "rowwise/torchao_float8/master"])
def test_master_weights_are_read(label: str) -> None:
    assert [f.text for f in examine(label, quick=True).faults] == []
