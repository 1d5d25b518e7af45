"""The bench a subject is tested on: it measures, judges by the bounds, and keeps what failed for the diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8parity.casts import Gemm, RecipePlan, recipe_plan
from fp8parity.precision.effective import agreement_db, typical_size
from fp8parity.selftest import bounds
from fp8parity.selftest.exact import distance, gap, quantised_pair
from fp8parity.selftest.operands import Operands, reduced
from fp8parity.selftest.report import Fault, Outcome, Row
from fp8parity.selftest.subject import GemmUnderTest, Results, run

CONSEQUENCES = ("unexplained", "batch-dependent", "lost-micro-batch", "nan-lost", "nan-spread")
"""Faults that another one of the same GEMM brings about."""

Diagnose = Callable[["Bench", "Failure"], Fault]


@dataclass(frozen=True)
class Failure:
    """A GEMM whose result is not that of the exact arithmetic."""

    gemm: Gemm
    case: str
    operands: Operands
    actual: Tensor
    db: float


@dataclass
class Bench:
    """One subject under test and everything measured so far."""

    subject: GemmUnderTest
    device: torch.device
    diagnose: Diagnose
    rows: list[Row] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    repeatable: bool = False

    @property
    def plan(self) -> RecipePlan:
        """The casts of the subject's recipe."""
        return recipe_plan(self.subject.precision.recipe)

    def run(self, operands: Operands) -> Results:
        """Run forward and backward of a fresh module."""
        return run(self.subject.linear(operands.weight.float()), operands)

    def bound_db(self, gemm: Gemm, operands: Operands) -> float:
        """Return the least agreement of a sound kernel with the exact arithmetic."""
        return bounds.agreement_bound_db(reduced(operands.shape, gemm), self.subject.accumulation(gemm))

    def slack(self, gemm: Gemm, operands: Operands) -> float:
        """Return what the sum may add to the error of one entry, over its typical size."""
        return bounds.entry_slack(reduced(operands.shape, gemm), self.subject.accumulation(gemm))

    def add(
        self, check: str, case: str, gemm: str, measured: float, bound: float | None, outcome: Outcome,
        words: str = "", unit: str = "dB",
    ) -> None:  # fmt: skip
        """Keep one measurement."""
        self.rows.append(
            Row(check, case, gemm, measured, bound, "dB" if unit == "dB" else "share", outcome, words)
        )

    def name(self, fault: Fault) -> None:
        """Keep a fault once per GEMM; what a named fault of that GEMM drags along is not a second one."""
        known = [f for f in self.faults if f.gemm == fault.gemm]
        if fault.name in {f.name for f in known} or (fault.name in CONSEQUENCES and known):
            return
        self.faults = [f for f in self.faults if f.gemm != fault.gemm or f.name not in CONSEQUENCES]
        self.faults.append(fault)

    def against_reference(
        self, check: str, case: str, gemm: Gemm, operands: Operands, actual: Tensor
    ) -> bool:
        """Compare a result with the exact product of its quantised operands; diagnose it when it is not that."""
        left, right = quantised_pair(self.plan, gemm, operands)
        found = distance(actual, left, right, self.slack(gemm, operands))
        bound = self.bound_db(gemm, operands)
        right_one = found.finite and found.db >= bound and found.worst <= 1
        words = "" if right_one else f"largest error {found.worst:.3g} times what one entry may have"
        if not found.finite:
            words = "not finite"
        self.add(check, case, gemm, found.db, bound, "right" if right_one else "fault", words)
        if not right_one:
            self.name(self.diagnose(self, Failure(gemm, case, operands, actual, found.db)))
        return right_one

    def same(self, check: str, case: str, gemm: Gemm, operands: Operands, pair: tuple[Tensor, Tensor], fault: str,
             *, strict: bool, rows: slice = slice(None)) -> bool:  # fmt: skip
        """Compare two results that the recipe says are the same; the first is the one to trust.

        Equal bits are right. Unequal ones are a fault if `strict`, or if they are further apart than two sums of
        the same products can be. `rows` of a result [P, Q] are compared.
        """
        left, right = quantised_pair(self.plan, gemm, operands)
        size = typical_size(left, right)[rows]
        a, b = pair
        share = gap(a, b, size)
        bound = self.bound_db(gemm, operands) - 3.0  # two independent errors
        db = agreement_db(b, a, size)
        bad = share > 0 and (strict or db < bound)
        words = "bit-equal" if share == 0 else f"agree to {db:.0f} dB"
        self.add(check, case, gemm, share, None, "fault" if bad else "right", words, "share")
        if bad:
            self.name(Fault(fault, gemm, case, f"they differ by up to {share:.2g} of the typical size"))
        return not bad
