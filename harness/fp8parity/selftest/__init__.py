"""Is the FP8 arithmetic of this machine right? Asked per recipe, backend and GEMM, before any training."""

from fp8parity.selftest.report import Fault, Row, SelftestReport, SubjectReport

__all__ = ["Fault", "Row", "SelftestReport", "SubjectReport"]
