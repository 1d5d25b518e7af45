"""The selftest on a terminal: one row per GEMM, what must not change a result, and each fault in words."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8parity.selftest.report import GEMM_NAMES, Row, SelftestReport, SubjectReport

_AGREEMENT = (
    "reference",
    "special values",
    "weight cast source",
    "accumulated",
    "updated weight",
    "compiled",
)
_INVARIANCE = {
    "repeated": "repeats",
    "recompute": "recomputes",
    "save and resume": "resumes",
    "other rows": "ignores other rows",
}


def _worst(rows: Iterable[Row]) -> Row | None:
    """Return the row nearest to its bound, or farthest beyond it."""
    bounded = [row for row in rows if row.bound is not None]
    return min(bounded, key=lambda row: row.measured - (row.bound or 0.0), default=None)


def _cell(row: Row | None) -> str:
    if row is None or row.bound is None:
        return ""
    sign = "≥" if row.measured >= row.bound else "<"
    return f"{row.measured:.1f} {sign} {row.bound:.1f}"


def gemm_table(report: SelftestReport) -> Table:
    """Return one row per GEMM: agreement and SQNR where they come nearest to their bounds, in dB."""
    title = f"FP8 arithmetic of {report.environment.get('device', report.device)}"
    table = Table(
        title=Text(title, style="table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("recipe, backend", "GEMM", "reference", "float64", "cases", ""):
        table.add_column(heading, justify="right" if heading in ("reference", "float64", "cases") else "left")
    for subject in report.subjects:
        if subject.status == "not_run":
            continue
        # stacked, so that neither name is cut on a narrow terminal
        names_of_it = (subject.recipe, subject.label.removeprefix(f"{subject.recipe}/"), "")
        for name, gemm in zip(names_of_it, GEMM_NAMES, strict=True):
            rows = [row for row in subject.rows if row.gemm == gemm]
            names = sorted({fault.name for fault in subject.faults if fault.gemm == gemm})
            outcome = Text(", ".join(names), style="red") if names else Text("right", style="green")
            agreement = _worst(row for row in rows if row.check in _AGREEMENT)
            sqnr = _worst(row for row in rows if row.check == "float64")
            table.add_row(Text(name), gemm, _cell(agreement), _cell(sqnr), str(len(rows)), outcome)
        table.add_section()
    table.caption = "dB, with the least a sound kernel has; the case nearest to its bound"
    table.caption_justify = "left"
    return table


def statement(subject: SubjectReport) -> str:
    """Return in a line what left the subject's results as they were, bit for bit or by how much."""
    verbs: dict[str, list[str]] = {}
    for check, verb in _INVARIANCE.items():
        rows = [r for r in subject.rows if r.check == check and r.unit == "share"]
        if not rows:
            continue
        largest = max(row.measured for row in rows)
        how = "bit for bit" if largest == 0 else f"to {largest:.1g} of the typical size"
        verbs.setdefault(how, []).append(verb)
    parts = [f"{', '.join(taken)} {how}" for how, taken in verbs.items()]
    stated = dict.fromkeys(row.words for row in subject.rows if row.outcome == "stated")
    return "; ".join([*parts, *stated])


def show_selftest(console: Console, report: SelftestReport) -> None:
    """Print the table, a line per subject, what was not run and why, and every fault with its likely cause."""
    console.print(gemm_table(report))
    for subject in report.subjects:
        words = f"not run: {subject.reason}" if subject.status == "not_run" else statement(subject)
        if subject.reason and subject.status != "not_run":
            words += f"; not compiled: {subject.reason}"
        console.print(Text(f"{subject.label}: {words}"))
    faults = [(subject.label, fault) for subject in report.subjects for fault in subject.faults]
    for label, fault in faults:
        console.print(Text(f"FAULT {label}: {fault.text}", style="red"))
    tested = sum(subject.status != "not_run" for subject in report.subjects)
    verdict = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}" if faults else "right"
    left_out = len(report.subjects) - tested
    more = f", {left_out} not run" if left_out else ""
    console.print(f"\n{verdict}: {tested} tested{more}, in {report.seconds:.0f} s", highlight=False)
