"""What a selftest looks like on a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fp8parity.selftest.report import GEMM_NAMES, Fault, Row, SelftestReport, SubjectReport
from fp8parity.selftest.screen import show_selftest, statement


def subject(
    recipe: str = "rowwise_with_gw_hp",
    backend: str = "torchao_float8",
    cast: str = "master",
    faults: tuple[Fault, ...] = (),
    rows: tuple[Row, ...] = (),
) -> SubjectReport:
    agreement = tuple(Row("reference", "gaussian", gemm, 55.5, 52.9, "dB", "right") for gemm in GEMM_NAMES)
    status = "fault" if faults else "right"
    return SubjectReport(recipe, backend, cast, status, "", 1.0, (*agreement, *rows), faults)


def shown(*subjects: SubjectReport) -> str:
    out = io.StringIO()
    report = SelftestReport("cuda", {"device": "NVIDIA H200"}, False, 3.0, subjects)
    show_selftest(Console(file=out, width=80, color_system=None), report)
    return out.getvalue()


def test_no_name_is_cut_at_80_columns() -> None:
    text = shown(subject(), subject("blockwise_requant", "torchao_blockwise", "compute"))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["rowwise_with_gw_hp", "output", "55.5", "≥", "52.9", "1", "right"] in lines
    assert ["torchao_float8/master", "grad_input", "55.5", "≥", "52.9", "1", "right"] in lines
    assert ["torchao_blockwise", "grad_input", "55.5", "≥", "52.9", "1", "right"] in lines
    assert "right: 2 tested, in 3 s" in text


def test_a_fault_is_in_its_row_and_in_words() -> None:
    fault = Fault("k-tail", "output", "odd K", "12.0 dB where 52.9 are due")
    text = " ".join(shown(subject(faults=(fault,))).split())
    assert "rowwise_with_gw_hp output 55.5 ≥ 52.9 1 k-tail" in text
    assert (
        "FAULT rowwise_with_gw_hp/torchao_float8/master: GEMM output: k-tail: the last, incomplete tile"
        in text
    )
    assert "1 fault: 1 tested, in" in text


def test_what_was_not_run_has_no_row_and_a_reason() -> None:
    skipped = SubjectReport(
        "blockwise", "torchao_blockwise", "compute", "not_run", "needs a GPU", 0.0, (), ()
    )
    text = shown(skipped, subject())
    assert "right: 1 tested, 1 not run, in 3 s" in text
    text = shown(skipped)
    assert "blockwise/torchao_blockwise: not run: needs a GPU" in text
    assert "output" not in text


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ((0.0, 0.0, 0.0), "repeats, recomputes, resumes bit for bit"),
        ((0.0, 2e-4, 0.0), "repeats, resumes bit for bit; recomputes to 0.0002 of the typical size"),
    ],
)
def test_what_changes_nothing_is_said_once(measured: tuple[float, ...], words: str) -> None:
    checks = ("repeated", "recompute", "save and resume")
    rows = tuple(
        Row(check, "any", "output", value, 0.0, "share", "right")
        for check, value in zip(checks, measured, strict=True)
    )
    assert statement(subject(rows=rows)) == words
