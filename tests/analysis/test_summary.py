"""The Markdown summary, read back by a Markdown parser."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING

import pytest
from markdown_it import MarkdownIt
from report_study import STUDY, hand_judgement

from fp8parity_analysis import report, summary
from fp8parity_analysis.study_runs import StudyRuns

if TYPE_CHECKING:
    from fp8parity_analysis.verdict import Judgement

NASTY = "<b>|`x`*y*_z_[l](http://e.org)]]>&\n# head\\"


def rendered(judgement: Judgement) -> str:
    return summary.render(report.build(judgement, StudyRuns({}, {}), STUDY, reproduce="x"))


def tokens(text: str) -> list:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)


def cells(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    inside = False
    for token in tokens(text):
        if token.type == "tr_open":
            rows.append([])
        inside = {"td_open": True, "th_open": True, "td_close": False, "th_close": False}.get(
            token.type, inside
        )
        if inside and token.type == "inline":
            rows[-1].append("".join(child.content for child in token.children))
    return rows


def test_the_table_has_a_row_per_verdict() -> None:
    assert cells(rendered(hand_judgement())) == [
        ["recipe", "outcome", "gap and interval", "margin", "seeds"],
        ["tensorwise", "WORSE (fail)", "+0.58 % [+0.42, +0.73]", "±0.25 %", "3"],
        ["rowwise", "EQUIVALENT (pass)", "+0.04 % [−0.05, +0.13]", "±0.25 %", "3"],
        ["bf16_null", "INCONCLUSIVE (inconclusive)", "−0.02 % [−0.31, +0.27]", "±0.25 %", "3"],
    ]


def test_a_provisional_verdict_is_called_so() -> None:
    judgement = hand_judgement()
    first = replace(judgement.verdicts[0], provisional=True, n_seeds=1)
    table = cells(rendered(replace(judgement, verdicts=(first,))))
    assert table[1][1] == "WORSE (fail, provisional)"
    assert table[1][4] == "1"


def test_reasons_and_warnings_are_list_items_under_their_recipe() -> None:
    text = rendered(hand_judgement())
    assert "### tensorwise\n\n- tensorwise is worse" in text
    assert "- worse: above the margin\n- next: look\n" in text
    assert "\n- described only: gap +0.05 %" in text  # a note, no warning
    judgement = hand_judgement()
    first = replace(judgement.verdicts[0], warnings=("look out",))
    text = rendered(replace(judgement, verdicts=(first, *judgement.verdicts[1:])))
    assert "\n- **Warning:** look out" in text


def test_hostile_text_stays_text() -> None:
    judgement = hand_judgement(names=(NASTY, "rowwise"))
    first = replace(judgement.verdicts[0], reasons=(NASTY, "# no heading", "1. no list", "- none", "> none"))
    text = rendered(replace(judgement, verdicts=(first, *judgement.verdicts[1:])))
    table = cells(text)
    assert {len(row) for row in table} == {5}
    assert table[1][0] == NASTY.replace("\n", " ")
    kinds = [child.type for token in tokens(text) for child in token.children or ()]
    assert not {"html_inline", "em_open", "link_open", "code_inline", "image"} & set(kinds)
    blocks = [(token.type, token.tag) for token in tokens(text)]
    assert ("html_block", "") not in blocks
    assert ("blockquote_open", "blockquote") not in blocks
    assert [tag for kind, tag in blocks if kind == "heading_open"] == ["h2", "h3", "h3", "h3"]
    assert ("ordered_list_open", "ol") not in blocks
    shown = [
        "".join(child.content for child in token.children) for token in tokens(text) if token.type == "inline"
    ]
    for reason in ("# no heading", "1. no list", "- none", "> none"):
        assert reason in shown


@pytest.mark.parametrize("text", ["a_b", "EQUIVALENT_BUT_GROWING", "+0.12 % to 3 seeds", "p = 0.05; n=3"])
def test_ordinary_text_is_not_littered_with_escapes(text: str) -> None:
    assert summary.escape(text) == text


def test_escaping_is_undone_by_the_parser() -> None:
    for text in ("_x_", "**x**", "a|b", "`", "\\", "[x]", "<i>", "&amp;", "~~x~~"):
        inline = next(token for token in tokens(f"x {summary.escape(text)}") if token.type == "inline")
        assert unescape("".join(child.content for child in inline.children)) == f"x {unescape(text)}"
