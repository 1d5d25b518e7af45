"""What a selftest found, as plain records, and its JSON document. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fp8parity.errors import EXIT_INVALID

SELFTEST_VERSION = 2
"""Raised when a check is added or a bound changes: a stored result of another version is not reused."""

GEMM_NAMES = ("output", "grad_input", "grad_weight")
"""`casts.GEMMS`, which this module does not import: casts imports torch."""

Outcome = Literal["right", "fault", "stated"]
Status = Literal["right", "fault", "not_run"]

CAUSES: dict[str, str] = {
    "scale-rounded": "the kernel rounds a scale to a power of two that the quantiser did not round",
    "scales-transposed": "scales are applied along the wrong axis, or those of the two operands are swapped",
    "scale-not-applied": "the codes are multiplied, but a scale is never divided out",
    "k-tail": "the last, incomplete tile of the sum is skipped or undefined",
    "format-mixed-up": "an operand is cast to the other FP8 format",
    "other-granularity": "an operand is cast with other scaling groups or scale rounding than declared",
    "not-quantised": "the GEMM multiplies unquantised operands: it is not FP8",
    "saturation-missing": "a cast overflows to NaN or inf where it must clamp",
    "zero-group": "a group of zeros is not zero: its amax is not floored",
    "amax-floor": "the amax of tiny values is not floored where the recipe floors it",
    "stale-weight-cast": "the cast of an earlier weight is used after the weight was updated",
    "lost-micro-batch": "gradient accumulation does not keep the weight gradient of every micro-batch",
    "batch-dependent": "a row's result depends on the other rows, which the recipe excludes",
    "recompute-differs": "activation checkpointing changes the numbers",
    "resume-differs": "a state_dict round trip changes the numbers",
    "not-repeatable": "the same GEMM repeated differs by more than its sum can explain",
    "does-not-run": "the kernel raises an error",
    "not-finite": "results are not finite although every operand is",
    "nan-lost": "an inf or NaN in an operand becomes finite numbers: a diverged run would train on",
    "nan-spread": "an inf or NaN in an operand reaches results that do not read its scaling group",
    "unexplained": "no known fault reproduces these numbers",
}
"""Every fault a selftest can name, and what it means."""


@dataclass(frozen=True)
class Row:
    """One measurement. `unit`: dB (more is better) or share (less is better).

    A share is of the typical size, 0: bit-equal; in "inf and NaN" it is that of the wrong results.
    """

    check: str
    case: str
    gemm: str
    measured: float
    bound: float | None
    unit: Literal["dB", "share"]
    outcome: Outcome
    words: str = ""


@dataclass(frozen=True)
class Fault:
    """A named fault of one GEMM, with the case that shows it and the numbers it was recognised by."""

    name: str
    gemm: str
    case: str
    words: str

    @property
    def text(self) -> str:
        """One sentence for a person."""
        return f"GEMM {self.gemm}: {self.name}: {CAUSES[self.name]} ({self.words}; case: {self.case})"


@dataclass(frozen=True)
class SubjectReport:
    """What was found about one recipe on one backend; `reason` says why it was not run, or not compiled."""

    recipe: str
    backend: str
    weight_cast_source: str
    status: Status
    reason: str
    seconds: float
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]

    @property
    def label(self) -> str:
        """RECIPE/BACKEND, as `--recipe` takes it."""
        suffix = "/master" if self.weight_cast_source == "master" else ""
        return f"{self.recipe}/{self.backend}{suffix}"


@dataclass(frozen=True)
class SelftestReport:
    """The whole selftest."""

    device: str
    environment: dict[str, str]
    quick: bool
    seconds: float
    subjects: tuple[SubjectReport, ...]

    @property
    def exit_code(self) -> int:
        """0, or that of an invalid comparison when anything is faulty."""
        return EXIT_INVALID if any(s.status == "fault" for s in self.subjects) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the document that `selftest --json` prints."""
        return {
            "selftest_version": SELFTEST_VERSION,
            "right": self.exit_code == 0,
            "device": self.device,
            "quick": self.quick,
            "seconds": self.seconds,
            "environment": self.environment,
            "subjects": [{"label": s.label, **_subject_json(s)} for s in self.subjects],
        }


def _subject_json(subject: SubjectReport) -> dict[str, Any]:
    faults = [{**asdict(f), "cause": CAUSES[f.name], "text": f.text} for f in subject.faults]
    return {**asdict(subject), "rows": [asdict(r) for r in subject.rows], "faults": faults}
