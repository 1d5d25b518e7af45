"""What the report says about tensor statistics, as plain data, apart from its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8parity_analysis.report_model import Table


@dataclass(frozen=True)
class TensorArm:
    """One arm: what its tests rest on, its candidates (the table may be cut), its early-warning rules.

    `candidates` holds all of them with all evidence for `report.json`; `levels` each tensor's levels at the end,
    `signal_levels` each module's signals, of which `signals` is the table.
    """

    key: str
    recipe: str
    sentence: str
    basis: str
    table: Table | None
    scores: Table | None
    notes: tuple[str, ...]
    candidates: tuple[Mapping[str, Any], ...]
    levels: tuple[Mapping[str, Any], ...]
    signals: Table | None = None
    signal_levels: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class TensorSection:
    """The section of the report; `message` says what is missing, and how to have it. Empty where nothing is."""

    arms: tuple[TensorArm, ...]
    message: str = ""


@dataclass(frozen=True)
class Figure:
    """One inline SVG with its caption."""

    caption: str
    svg: str


@dataclass(frozen=True)
class TensorFigures:
    """The pictures of one arm: amax of single tensors, then heat maps by statistic, each by GEMM and operand.

    `note` says what is not drawn.
    """

    amax: tuple[Figure, ...]
    underflow: tuple[Figure, ...]
    sqnr: tuple[Figure, ...]
    note: str = ""
