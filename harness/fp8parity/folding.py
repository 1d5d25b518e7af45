"""Words and names on a narrow terminal: numbers keep their unit, names part where they are joined.

What is shown is what is stored, with line breaks and nothing else, so that it can be copied.
"""

from __future__ import annotations

import re
import textwrap

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

_NBSP = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=%)")
_PIECES = re.compile(r"[^-_/=,. ]*[-_/=,. ]*")


def folded(text: str, width: int) -> str:
    """Return `text` in lines of at most `width` characters; no line begins with the `%` of a number."""
    lines = textwrap.wrap(
        _UNIT.sub(_NBSP, text), max(width, 1), break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(lines).replace(_NBSP, " ")


class Name:
    """A name in a table: whole where it fits, else parted after `-`, `_`, `/`, `=`, `,` or `.`; it is never cut."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def lines(self, width: int) -> list[str]:
        """Return the name in lines of at most `width` cells; a longer piece is cut into such lines."""
        lines = [""]
        for piece in _PIECES.findall(self._name):
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            for letter in piece:
                if lines[-1] and cell_len(lines[-1] + letter) > width:
                    lines.append("")
                lines[-1] += letter
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(max(1, options.max_width)):
            yield Segment(line)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(cell_len(piece) for piece in _PIECES.findall(self._name))
        return Measurement(max(1, longest), max(1, cell_len(self._name))).with_maximum(options.max_width)
