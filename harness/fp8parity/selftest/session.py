"""Run the checks on every recipe and backend that this device has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fp8parity import environment
from fp8parity.casts import GEMMS
from fp8parity.errors import UsageError
from fp8parity.precision_rules import BACKEND_RECIPES
from fp8parity.selftest import checks, invariance
from fp8parity.selftest.bench import Bench
from fp8parity.selftest.diagnosis import diagnose
from fp8parity.selftest.operands import SQUARE, gaussian
from fp8parity.selftest.report import Fault, SelftestReport, Status, SubjectReport
from fp8parity.selftest.subject import Converted, GemmUnderTest
from fp8parity.spec import PrecisionSpec
from fp8parity.version_gates import precision_problems

Say = Callable[[str], None]


def _steps(*, quick: bool) -> list[Callable[[Bench], None]]:
    return [
        lambda bench: checks.accuracy(bench, quick=quick),
        lambda bench: checks.special_values(bench, quick=quick),
        checks.cast_source,
        checks.ordering,
        lambda bench: invariance.repeatability(bench, times=2 if quick else 5),
        invariance.recomputation,
        invariance.resuming,
        invariance.other_rows,
        invariance.accumulation,
        invariance.updated_weight,
        # last: what another fault does to a NaN is no second one
        lambda bench: checks.non_finite(bench, quick=quick),
    ]


def check_subject(subject: GemmUnderTest, device: torch.device, *, quick: bool = False) -> SubjectReport:
    """Run every check on one subject. A kernel that raises is a fault; a subject that cannot be made is not run."""
    started = time.monotonic()
    precision = subject.precision
    bench = Bench(subject, device, diagnose)
    status: Status = "right"
    reason = ""
    try:
        subject.linear(gaussian(SQUARE, device, 0).weight.float())
    except UsageError as error:
        status, reason = "not_run", str(error)
    else:
        for step in _steps(quick=quick):
            _guarded(bench, step)
        status = "fault" if bench.faults else "right"
    rows, faults = tuple(bench.rows), tuple(bench.faults)
    names = (precision.recipe, precision.backend, precision.weight_cast_source)
    return SubjectReport(*names, status, reason, round(time.monotonic() - started, 2), rows, faults)


def _guarded(bench: Bench, step: Callable[[Bench], None]) -> None:
    try:
        step(bench)
    except (
        Exception
    ) as error:  # kernels and compilers raise what they like: Triton's errors share no base class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = bench.rows[-1].case if bench.rows else "first call"
        bench.name(
            Fault("does-not-run", "output", f"after {where}", f"{type(error).__name__}: {lines[0][:200]}")
        )


def default_subjects() -> list[PrecisionSpec]:
    """Return every recipe on every backend that has it."""
    return [
        PrecisionSpec(recipe=recipe, backend=backend)
        for backend, recipes in BACKEND_RECIPES.items()
        for recipe in recipes
    ]


def parse_subject(text: str) -> list[PrecisionSpec]:
    """Read RECIPE, RECIPE/BACKEND or RECIPE/BACKEND/master; `UsageError` names what exists."""
    recipe, _, rest = text.partition("/")
    backend, _, source = rest.partition("/")
    found = [p for p in default_subjects() if p.recipe == recipe and backend in ("", p.backend)]
    if not found or source not in ("", "compute", "master"):
        known = ", ".join(f"{p.recipe}/{p.backend}" for p in default_subjects())
        raise UsageError(
            f"--recipe: {text!r} is not RECIPE, RECIPE/BACKEND or RECIPE/BACKEND/master of: {known}"
        )
    return [p.model_copy(update={"weight_cast_source": source or "compute"}) for p in found]


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu or cuda; `UsageError` when there is no such device here."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: {name!r} is not known; write auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: cuda was asked for, and torch sees no CUDA device; write auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _refusal(precision: PrecisionSpec, device: torch.device, *, compiled: bool) -> str:
    """Return why these versions or this device cannot run the subject; empty: they may."""
    versions = environment.package_versions()
    problems = precision_problems(versions, precision, device.type, compiled=compiled)
    if precision.backend == "torchao_blockwise" and device.type == "cpu":
        problems.append("needs an NVIDIA GPU of compute capability 9.0; on a CPU only its emulation runs")
    needed = (8, 9) if precision.recipe == "tensorwise" else (9, 0)
    if device.type == "cuda" and precision.backend == "torchao_float8":
        found = torch.cuda.get_device_capability(device)
        if found < needed:
            problems.append(
                f"needs compute capability {needed}, {torch.cuda.get_device_name(device)} has {found}"
            )
    return "; ".join(problems)


def selftest(
    device_name: str, wanted: Sequence[str] = (), *, quick: bool = False, compiled: bool = False,
    say: Say = lambda words: None,
) -> SelftestReport:  # fmt: skip
    """Test the FP8 arithmetic of this machine; `wanted` as `parse_subject` reads, empty for all.

    `compiled` adds one compiled linear per subject. Raises `UsageError` for an unknown device or recipe, and when
    nothing of what was asked for can run here.
    """
    started = time.monotonic()
    device = resolve_device(device_name)
    asked = [p for text in wanted for p in parse_subject(text)] if wanted else default_subjects()
    subjects = list(dict.fromkeys(asked))
    reports = []
    with _one_thread():
        for precision in subjects:
            say(f"selftest: {precision.recipe} on {precision.backend}")
            reports.append(_one(precision, device, quick=quick, compiled=compiled))
    if all(r.status == "not_run" for r in reports):
        reasons = "\n".join(f"selftest: {r.label}: {r.reason}" for r in reports)
        raise UsageError(f"{reasons}\nselftest: nothing of what was asked for runs on this machine")
    found = environment.fingerprint(device.type)
    seconds = round(time.monotonic() - started, 2)
    return SelftestReport(device.type, found, quick, seconds, tuple(reports))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one CPU thread: for matrices this small, threads of a busy machine wait for each other tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _one(precision: PrecisionSpec, device: torch.device, *, quick: bool, compiled: bool) -> SubjectReport:
    reason = _refusal(precision, device, compiled=False)
    if reason:
        names = (precision.recipe, precision.backend, precision.weight_cast_source)
        return SubjectReport(*names, "not_run", reason, 0.0, (), ())
    report = check_subject(Converted(precision, device), device, quick=quick)
    if not compiled or report.status == "not_run":
        return report
    refused = _refusal(precision, device, compiled=True)
    return replace(report, reason=refused) if refused else _with_compiled(report, precision, device)


def _with_compiled(report: SubjectReport, precision: PrecisionSpec, device: torch.device) -> SubjectReport:
    """Add one compiled linear, Gaussian operands."""
    bench = Bench(Converted(precision, device, compiled=True), device, diagnose)
    _guarded(bench, _compiled_linear)
    rows, faults = (*report.rows, *bench.rows), (*report.faults, *bench.faults)
    return replace(report, rows=rows, faults=faults, status="fault" if faults else "right")


def _compiled_linear(bench: Bench) -> None:
    operands = gaussian(SQUARE, bench.device, 3000)
    results = bench.run(operands)
    for gemm in GEMMS:
        bench.against_reference("compiled", "Gaussian", gemm, operands, results[gemm])
