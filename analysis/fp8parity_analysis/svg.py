"""A matplotlib figure as SVG that lives inside an HTML page: themed by CSS, small, deterministic."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

PALETTE: Mapping[str, tuple[str, str]] = {
    "ink": ("#010101", "#1a1d21"),
    "muted": ("#020202", "#59616b"),
    "line": ("#030303", "#d9dee4"),
    "paper": ("#040404", "#ffffff"),
    "band": ("#050505", "#e0eeea"),
    "nullband": ("#060606", "#cfd5dc"),
    "control": ("#070707", "#1f5fa8"),
    "test": ("#080808", "#c2410c"),
    "null": ("#090909", "#69717c"),
    "pass": ("#0a0a0a", "#0b6e5f"),
    "fail": ("#0b0b0b", "#b3261e"),
    "inconclusive": ("#0c0c0c", "#855800"),
    "invalid": ("#0d0d0d", "#6a3fa0"),
}
"""Role: the colour drawn with, which stands for a CSS variable, and the fallback where no style sheet is."""

_RC: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fp8parity", "path.simplify": True}
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
_ROLE_OF = {drawn: name for name, (drawn, _) in PALETTE.items()}

_NOT_DRAWN = re.compile(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", re.S)
_TAG = re.compile(r"<[^>]+>")
_REFERENCE = re.compile(r'(?:href="#|url\(#)([^")]+)')
_GEOMETRY = re.compile(r'\b(d|x|y|transform|viewBox)="([^"]*)"')


def colour(role: str) -> str:
    """Return the colour to draw a role with; `to_svg` turns it into the CSS variable of the same name."""
    return PALETTE[role][0]


def to_svg(figure: Figure, key: str, label: str) -> str:
    """Return the figure as an inline `<svg role="img">`.

    Its ids start with `key`, a plain word that is unique on the page; `label` is what a screen reader says.
    """
    buffer = io.StringIO()
    with mpl.rc_context(_RC):
        figure.savefig(buffer, format="svg", metadata=_METADATA, transparent=True)
    text = buffer.getvalue()
    body = _NOT_DRAWN.sub("", text[text.index("<svg") :])
    used = {name for tag in _TAG.findall(body) for name in _REFERENCE.findall(tag)}
    body = _TAG.sub(lambda match: _tag(match[0], key, used), body)  # tags only: a label's text stays as it is
    body = re.sub(r">\s*\n\s*<", "><", body).replace("<defs></defs>", "").strip()
    return re.sub(r"<svg[^>]*>", lambda match: _head(match[0], label), body, count=1)


def _head(tag: str, label: str) -> str:
    box = re.search(r'viewBox="[^"]*"', tag)
    style = f"font-family: {_FONT}; stroke-linejoin: round"
    return (
        f'<svg {box[0] if box else ""} role="img" aria-label="{escape(label)}" focusable="false" '
        f'style="{style}">'
    )


def _tag(tag: str, key: str, used: set[str]) -> str:
    """Return a tag without ids that nothing refers to, which matplotlib repeats in every figure."""
    tag = re.sub(r' id="([^"]*)"', lambda match: f' id="{key}-{match[1]}"' if match[1] in used else "", tag)
    tag = _REFERENCE.sub(lambda match: match[0].replace(f"#{match[1]}", f"#{key}-{match[1]}"), tag)
    tag = _GEOMETRY.sub(lambda match: f'{match[1]}="{_short(match[2])}"', tag.replace("xlink:href", "href"))
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    tag = re.sub(r"font-family: [^;\"]*;?\s*", "", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: _variable(match[0]), tag)


def _short(numbers: str) -> str:
    """Round coordinates to a tenth of a pixel and drop the white space around path commands."""
    text = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), numbers)
    return re.sub(r"\s*([MLQCzZ])\s*", r"\1", text).strip()


def _variable(drawn: str) -> str:
    role = _ROLE_OF.get(drawn)
    return f"var(--{role}, {PALETTE[role][1]})" if role else drawn
