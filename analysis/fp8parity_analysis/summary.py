"""The report as Markdown for the page of a CI job: the table of verdicts, then the reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fp8parity_analysis.report_tensor import summary_lines
from fp8parity_analysis.wording import is_note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8parity_analysis.report_model import Finding, ReportModel

_HEAD = ("recipe", "outcome", "gap and interval", "margin", "seeds")
_SPECIAL = re.compile(r"([\\`*\[\]|~])")
_LOOSE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_LINE_START = re.compile(r"^(\d+(?=[.)])|[#+=-])")


def escape(text: str) -> str:
    """Return text that Markdown, and the HTML in it, shows as it is, on one line and in a table cell."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    words = _SPECIAL.sub(r"\\\1", words)
    return _LOOSE_UNDERSCORE.sub(r"\\_", words)


def _item(text: str) -> str:
    """Return escaped text that opens no heading, list or quotation where a line of its own begins."""
    return _LINE_START.sub(
        lambda match: f"{match[1]}\\" if match[1].isdigit() else f"\\{match[1]}", escape(text)
    )


def render(model: ReportModel) -> str:
    """Return the summary; the study's gate is in its heading."""
    return "\n".join(_lines(model)) + "\n"


def _lines(model: ReportModel) -> Iterator[str]:
    yield f"## {_item(model.name)}: {model.gate_word.lower()}"
    yield ""
    yield _item(model.headline)
    if model.post_hoc:
        yield ""
        yield "**Post hoc:** the criteria were changed after the runs had started."
    yield ""
    yield _row(_HEAD)
    yield "| :--- | :--- | ---: | ---: | ---: |"
    yield from (_row(_cells(item)) for item in model.findings)
    yield ""
    yield _item(model.rule)
    for item in model.findings:
        yield ""
        yield f"### {_item(item.recipe)}"
        yield ""
        yield from (f"- {_item(text)}" for text in (item.sentence, *item.reasons))
        yield from (f"- {escape(text)}" for text in item.warnings if is_note(text))
        yield from (f"- **Warning:** {escape(text)}" for text in item.warnings if not is_note(text))
    for text in summary_lines(model.tensor):
        yield ""
        yield _item(text)
    if model.warnings:
        yield ""
        yield from (f"- **Warning:** {escape(text)}" for text in model.warnings)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(item: Finding) -> tuple[str, ...]:
    outcome = f"{item.outcome} ({item.gate}{', provisional' if item.provisional else ''})"
    seeds = item.seeds.partition(" ")[0]
    return escape(item.recipe), escape(outcome), item.gap, item.margin, seeds  # the numbers are our own
