"""What a conversion did: the record that goes into every manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ConversionRecord:
    """Which linears were replaced and which were left, with the reason; names in execution order.

    `gemm_dtypes` gives, per GEMM role, the operand formats as `a x b`; `notes` states side effects.
    """

    recipe: str
    backend: str
    weight_cast_source: str
    converted: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    fp8_flop_share: float
    gemm_dtypes: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        document = asdict(self)
        document["skipped"] = [{"fqn": fqn, "reason": reason} for fqn, reason in self.skipped]
        document["gemm_dtypes"] = dict(self.gemm_dtypes)
        return document
