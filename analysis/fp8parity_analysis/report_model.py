"""What the report says, as plain data: every page, table and file is made from these and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8parity_analysis.report_tensor_model import TensorSection

REPORT_SCHEMA_VERSION = 1
"""Raised when a key of `report.json` changes its meaning or goes away."""


@dataclass(frozen=True)
class Table:
    """A table ready to be set: `numeric` are the columns whose cells line up on the right."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """The verdict of one recipe in words: a sentence, its numbers, the reasons behind it."""

    key: str
    recipe: str
    null_arm: bool
    outcome: str
    gate: str
    title: str
    sentence: str
    gap: str
    has_gap: bool
    margin: str
    level: str
    seeds: str
    provisional: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class GridCell:
    """One recipe's place in the grid."""

    key: str
    gate: str
    title: str
    gap: str
    interval: str


@dataclass(frozen=True)
class GridRow:
    """One line of the grid: a recipe, with a cell or a hole in every column."""

    label: str
    cells: tuple[GridCell | None, ...]


@dataclass(frozen=True)
class GridBlock:
    """The lines that share a model; `label` is empty with one model, or where models are the columns."""

    label: str
    rows: tuple[GridRow, ...]


@dataclass(frozen=True)
class Grid:
    """Recipe by kept GEMMs by model."""

    caption: str
    corner: str
    columns: tuple[str, ...]
    blocks: tuple[GridBlock, ...]


@dataclass(frozen=True)
class PrecisionDetail:
    """Which GEMMs one arm ran in FP8 and which stayed in BF16, and why."""

    arm: str
    table: Table


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from."""

    facts: Table
    runs: Table | None
    digests: Table | None


@dataclass(frozen=True)
class ReportModel:
    """The whole report. Texts are plain, unescaped Unicode."""

    name: str
    description: str
    headline: str
    gate: str
    gate_word: str
    post_hoc: bool
    rule: str
    findings: tuple[Finding, ...]
    grid: Grid | None
    contrasts: Table | None
    noise: Table | None
    cost: Table | None
    limits: tuple[str, ...]
    warnings: tuple[str, ...]
    precision: Table | None
    precision_details: tuple[PrecisionDetail, ...]
    provenance: Provenance
    reproduce: str
    made_by: str
    judgement: dict[str, Any] = field(default_factory=dict)
    evidence: tuple[dict[str, Any], ...] = ()
    tensor: TensorSection | None = None

    @property
    def recipes(self) -> tuple[Finding, ...]:
        """The findings about recipes, without the null arms."""
        return tuple(item for item in self.findings if not item.null_arm)

    @property
    def nulls(self) -> tuple[Finding, ...]:
        """The findings about null arms: BF16 against itself."""
        return tuple(item for item in self.findings if item.null_arm)
