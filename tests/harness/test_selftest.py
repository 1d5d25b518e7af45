"""The selftest of this machine, the document it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8parity.casts import GEMMS
from fp8parity.cli import main
from fp8parity.errors import UsageError
from fp8parity.precision_rules import BACKEND_RECIPES
from fp8parity.selftest import operands as made_up
from fp8parity.selftest import session
from fp8parity.selftest.report import CAUSES, Fault, SelftestReport, SubjectReport
from fp8parity.selftest.session import check_subject, default_subjects, parse_subject, selftest
from fp8parity.selftest.subject import Converted

from . import planted

CPU = torch.device("cpu")
RUN_HERE = sorted(
    (recipe, backend)
    for backend, recipes in BACKEND_RECIPES.items()
    for recipe in recipes
    if backend != "torchao_blockwise"
)


@pytest.mark.parametrize(("recipe", "backend"), RUN_HERE)
def test_every_recipe_that_a_cpu_runs_is_right(recipe: str, backend: str) -> None:
    (precision,) = parse_subject(f"{recipe}/{backend}")
    report = check_subject(Converted(precision, CPU), CPU, quick=True)
    assert (report.status, [f.text for f in report.faults]) == ("right", [])
    assert {row.gemm for row in report.rows} == set(GEMMS)
    repeated = [row for row in report.rows if row.unit == "share"]
    assert repeated
    assert all(row.measured == 0 for row in repeated)  # a CPU repeats itself bit for bit


def test_master_weights_are_read_where_declared() -> None:
    for source in ("compute", "master"):
        (precision,) = parse_subject(f"rowwise/torchao_float8/{source}")
        report = check_subject(Converted(precision, CPU), CPU, quick=True)
        assert (report.label.endswith("/master"), report.status) == (source == "master", "right")

    class ReadsTheCopy(planted.Planted):
        @property
        def precision(self) -> Any:
            return super().precision.model_copy(update={"weight_cast_source": "master"})

    report = check_subject(ReadsTheCopy("rowwise"), CPU, quick=True)
    assert {f.gemm for f in report.faults} == {"output", "grad_input"}
    assert {f.case for f in report.faults} == {"reads master"}


def test_no_global_random_number_is_drawn() -> None:
    (precision,) = parse_subject("tensorwise/reference")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check_subject(Converted(precision, CPU), CPU, quick=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("multiple", [16, 128])
def test_every_gemm_sums_over_every_length(multiple: int) -> None:
    shapes = made_up.shapes(multiple, quick=False)
    assert all(size % multiple == 0 for shape in shapes for size in shape)
    lengths = {g: {made_up.reduced(s, g) for s in shapes} for g in GEMMS}
    wanted = {16: {16, 48, 2064, 16384}, 128: {128, 384, 16384}}[multiple]
    assert all(wanted <= found for found in lengths.values())
    assert multiple == 16 or len(shapes) <= 6  # torchao's block kernels are compiled for each


def test_padding_changes_no_result() -> None:
    operands = made_up.gaussian((48, 80, 112), CPU, 0)
    for gemm in GEMMS:
        whole = made_up.padded(operands, gemm, 128)
        assert made_up.reduced(whole.shape, gemm) == 128
        (a, b), (c, d) = operands.pair(gemm), whole.pair(gemm)
        assert torch.allclose(a.double() @ b.double().t(), c.double() @ d.double().t())


def test_special_cases_stay_within_bf16() -> None:
    base = made_up.gaussian(made_up.SQUARE, CPU, 0)
    for case, operands in made_up.special_cases(base, quick=False):
        for gemm in GEMMS:
            left, right = (x.double() for x in operands.pair(gemm))
            size = (left @ right.t()).abs().max().item()
            assert size == 0 or 2.0**-126 < size < 2.0**127, (case, gemm)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_command_prints_one_document_and_nothing_else(tmp_path: Path) -> None:
    command = ["selftest", "--device", "cpu", "--quick", "--recipe", "tensorwise/reference", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fp8parity", *command], capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert tuple(document) == (
        "selftest_version", "right", "device", "quick", "seconds", "environment", "subjects"
    )  # fmt: skip
    (subject,) = document["subjects"]
    assert tuple(subject) == (
        "label", "recipe", "backend", "weight_cast_source", "status", "reason", "seconds", "rows", "faults"
    )  # fmt: skip
    assert tuple(subject["rows"][0]) == (
        "check", "case", "gemm", "measured", "bound", "unit", "outcome", "words"
    )  # fmt: skip


def faulty_report() -> SelftestReport:
    fault = Fault("k-tail", "output", "M 144 K 2064 N 272", "a sum without its last 16 of 2064 terms")
    broken = SubjectReport("rowwise", "torchao_float8", "compute", "fault", "", 1.0, (), (fault,))
    absent = SubjectReport("blockwise", "torchao_blockwise", "compute", "not_run", "no GPU", 0.0, (), ())
    return SelftestReport("cpu", {"device": "cpu"}, True, 1.0, (broken, absent))


def test_a_fault_exits_12_and_is_named_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "selftest", lambda *a, **k: faulty_report())
    code, out, _ = call(capsys, "selftest")
    text = " ".join(out.split())
    assert code == 12
    assert f"FAULT rowwise/torchao_float8: GEMM output: k-tail: {CAUSES['k-tail']}" in text
    assert "blockwise/torchao_blockwise: not run: no GPU" in text
    assert "1 fault: 1 tested, 1 not run" in text
    code, out, _ = call(capsys, "selftest", "--json")
    document = json.loads(out)
    assert (code, document["right"]) == (12, False)
    assert document["subjects"][0]["faults"][0]["cause"] == CAUSES["k-tail"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "tpu"], "--device: 'tpu' is not known; write auto, cpu or cuda"),
        (["--recipe", "mxfp8"], "--recipe: 'mxfp8' is not RECIPE, RECIPE/BACKEND"),
        (["--recipe", "blockwise/torchao_float8"], "is not RECIPE, RECIPE/BACKEND"),
        (
            ["--device", "cpu", "--recipe", "blockwise/torchao_blockwise"],
            "needs an NVIDIA GPU of compute capability 9.0",
        ),
    ],
)
def test_unusable_input_is_64(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    code, out, err = call(capsys, "selftest", *arguments)
    assert (code, out) == (64, "")
    assert reason in err
    assert all(line.startswith("fp8parity: ") for line in err.splitlines())


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees no CUDA device; write auto or cpu"):
        selftest("cuda")


def test_what_may_not_be_compiled_is_tested_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference of blockwise_requant on CUDA: compiled it is not exact, and no run may compile it."""
    monkeypatch.setattr(session, "_refusal", lambda *_, compiled: "lies on ties" if compiled else "")
    (subject,) = selftest("cpu", ["blockwise_requant/reference"], quick=True, compiled=True).subjects
    assert (subject.status, subject.reason) == ("right", "lies on ties")
    assert "compiled" not in {row.check for row in subject.rows}
    code, out, _ = call(
        capsys,
        "selftest",
        "--device",
        "cpu",
        "--quick",
        "--compile",
        "--recipe",
        "blockwise_requant/reference",
    )
    assert code == 0
    assert "not compiled: lies on ties" in " ".join(out.split())


def test_what_cannot_run_is_listed_with_the_reason() -> None:
    report = selftest("cpu", ["blockwise"], quick=True)
    found = {s.label: s.status for s in report.subjects}
    assert found == {"blockwise/torchao_blockwise": "not_run", "blockwise/reference": "right"}
    assert report.exit_code == 0


def test_defaults_are_every_recipe_on_every_backend() -> None:
    assert {(p.recipe, p.backend) for p in default_subjects()} == {
        *RUN_HERE, ("blockwise", "torchao_blockwise"),
    }  # fmt: skip


def test_documentation_names_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "selftest.md").read_text()
    assert [name for name in CAUSES if f"`{name}`" not in text] == []
