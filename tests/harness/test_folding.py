"""Lines on a narrow terminal: the text is whole, numbers keep their unit, names part where they are joined."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from fp8parity.folding import Name, folded

SENTENCE = "gap +0.381 % from 3 seeds, 90 % interval -0.949 % to +1.711 % (paired t over 3 seeds, 2 df)"


@pytest.mark.parametrize("width", range(9, 100))
def test_no_line_begins_with_the_unit_of_a_number(width: int) -> None:
    lines = folded(SENTENCE, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.startswith("%") for line in lines)
    assert " ".join(lines) == SENTENCE  # nothing but breaks: it can be copied


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=60), st.integers(2, 40))
def test_a_name_is_whole_whatever_the_width(name: str, width: int) -> None:
    assert "".join(Name(name).lines(width)) == name


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (34, ["d128l3-step=100/rowwise-switch_at=", "15"]),
        (24, ["d128l3-step=100/rowwise-", "switch_at=15"]),
        (8, ["d128l3-", "step=", "100/", "rowwise-", "switch_", "at=15"]),
        (3, ["d12", "8l3", "-", "ste", "p=", "100", "/", "row", "wis", "e-", "swi", "tch", "_", "at=", "15"]),
    ],
)
def test_a_name_parts_where_it_is_joined(width: int, lines: list[str]) -> None:
    assert Name("d128l3-step=100/rowwise-switch_at=15").lines(width) == lines


def test_a_table_gives_a_name_the_room_it_needs() -> None:
    table = Table(box=None)
    table.add_column("name")
    table.add_column("number", no_wrap=True)
    table.add_row(Name("rowwise_with_gw_hp"), "+0.38 %")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(table)
    narrow = Console(file=io.StringIO(), width=21, color_system=None)
    narrow.print(table)
    assert "rowwise_with_gw_hp  +0.38 %" in console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in narrow.file.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]
    assert [row[0] for row in rows] == ["rowwise_", "with_gw_hp"]
