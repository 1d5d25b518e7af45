"""The words of a night: new, fixed, still failing, and what changed."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import nights as sim
import numpy as np
import pytest

from fp8parity_analysis import nightly_report, nightly_trend
from fp8parity_analysis.history import KILLED, Check, History, Night
from fp8parity_analysis.history_findings import Assessment, assess
from fp8parity_analysis.schema import Gate

SQNR = "tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db"
Change = Callable[[Night], Night]


def told(
    upto: int, simulated: sim.Simulated | None = None, change: Change | None = None, at: int = 20
) -> Assessment:
    """Assess the nights up to `upto`; `change` alters the nights from number `at` on."""
    simulated = simulated or sim.simulate(np.random.default_rng(3), 1)
    nights = sim.records(simulated)[:upto]
    if change:
        nights = [change(night) if t + 1 >= at else night for t, night in enumerate(nights)]
    return assess(History(tuple(nights)))


def base() -> sim.Simulated:
    return sim.simulate(np.random.default_rng(3), 1)


def test_quiet_nights_pass_and_say_nothing() -> None:
    found = told(19)
    assert (found.findings, found.gate, found.exit_code) == ((), Gate.PASS, 0)


def test_a_throughput_fall_of_ten_per_cent_is_told_on_its_night_and_still_fails_after() -> None:
    slow = base().shifted("speedup/rowwise", 20, 0.0, times=0.9)
    (finding,) = told(20, slow).findings
    assert finding.state == "new"
    assert "throughput of rowwise over BF16 fell by" in finding.text
    assert (finding.since, finding.last_good) == ("2025-01-20", "2025-01-19")
    assert told(20, slow).exit_code == 10
    (later,) = told(22, slow).findings
    assert (later.state, later.since) == ("still failing", "2025-01-20")


def test_a_torchao_upgrade_that_breaks_a_layer_is_told_with_both_versions() -> None:
    found = told(
        20,
        base().shifted(SQNR, 20, -9.0),
        lambda night: replace(night, facts={**night.facts, "torchao": "0.19.0"}),
    )
    (finding,) = found.findings
    assert finding.state == "new"
    words = (
        r"rowwise/blocks\.1\.mlp\.down/weight/sqnr_db fell by [89]\.\d+ dB, from 3\d\.\d+ dB to 2\d\.\d+ dB"
    )
    assert re.fullmatch(words, finding.text)
    assert [(c.what, c.before, c.after) for c in found.changes] == [("torchao", "0.18.0", "0.19.0")]
    assert found.exit_code == 10


def test_a_half_per_cent_gap_is_told_within_two_nights() -> None:
    worse = base().shifted("gap/rowwise", 20, 0.005)
    (finding,) = told(21, worse).findings
    assert finding.text.startswith("gap of rowwise rose by 0.")
    assert finding.failing


def test_a_crashed_cell_is_named_once_then_still_then_fixed() -> None:
    def crash(night: Night) -> Night:
        return replace(night, crashed={"25m/rowwise seed 1": "exit code 139"})

    found = told(20, change=crash)
    assert found.findings[0].text == "25m/rowwise seed 1 crashed: exit code 139"
    assert (found.findings[0].state, found.exit_code) == ("new", 12)
    assert told(21, change=crash).findings[0].state == "still failing"
    nights = sim.records(base())[:21]
    nights[19] = crash(nights[19])
    fixed = assess(History(tuple(nights)))
    assert [(item.state, item.text) for item in fixed.findings] == [
        ("fixed", "25m/rowwise seed 1 ran to its end again")
    ]
    assert fixed.exit_code == 0


def test_a_cell_without_runs_is_missing_unless_the_recipe_changed() -> None:
    def drop(night: Night) -> Night:
        return replace(night, cells=night.cells[:1])

    found = told(20, change=drop)
    assert (found.findings[0].text, found.exit_code) == ("rowwise has no runs tonight", 12)
    (later,) = told(22, change=drop).findings
    assert (later.state, later.since, later.last_good) == ("still failing", "2025-01-20", "2025-01-19")
    found = told(20, change=lambda n: replace(drop(n), facts={**n.facts, "recipe sha256": "b"}))
    assert found.findings[0].state == "notice"
    assert told(21, change=lambda n: replace(drop(n), facts={**n.facts, "recipe sha256": "b"})).findings == ()


def test_execution_that_is_no_longer_proven_is_a_failure() -> None:
    def unproven(night: Night) -> Night:
        return replace(
            night, checks={**night.checks, "execution/rowwise": Check(False, "not proven; 0 GEMMs ran")}
        )

    found = told(20, change=unproven)
    assert [item.text for item in found.findings] == ["execution of rowwise: not proven; 0 GEMMs ran"]
    assert found.exit_code == 10


@pytest.mark.parametrize(("gate", "code"), [("fail", 10), ("inconclusive", 11), ("invalid", 12)])
def test_the_verdict_against_bf16_counts_as_well(gate: str, code: int) -> None:
    def worse(night: Night) -> Night:
        return replace(night, cells=(replace(night.cells[0], gate=gate, outcome="X"), *night.cells[1:]))

    assert told(20, change=worse).exit_code == code


def test_a_killed_night_has_no_verdict_and_does_no_harm_to_the_next() -> None:
    nights = sim.records(base())[:20]
    killed = Night("2025-01-21", KILLED, reason="killed")
    found = assess(History((*nights, killed)))
    assert (found.gate, found.findings[0].text) == (Gate.INVALID, "no verdict tonight: killed")
    after = assess(History((*nights[:-1], killed, nights[-1])))
    (finding,) = after.findings
    assert (finding.state, after.exit_code) == ("fixed", 0)
    assert finding.text == "there is a verdict again, after 1 night without one (2025-01-21: killed)"


def test_a_verdict_that_is_only_undecided_does_not_end_a_failure() -> None:
    nights = sim.records(base())[:20]

    def verdict(night: Night, outcome: str, gate: str) -> Night:
        return replace(night, cells=(replace(night.cells[0], outcome=outcome, gate=gate), *night.cells[1:]))

    nights[17] = verdict(nights[17], "WORSE", "fail")
    nights[18] = verdict(nights[18], "INCONCLUSIVE", "inconclusive")
    found = assess(History(tuple(nights[:19])))
    (finding,) = found.findings
    assert (finding.state, finding.since, finding.last_good) == ("notice", "2025-01-18", "2025-01-17")
    assert "no longer shown, nor is it shown to be right" in finding.text
    assert found.exit_code == 11
    (finding,) = assess(History(tuple(nights))).findings
    assert (finding.state, finding.since) == ("fixed", "2025-01-18")
    (finding,) = assess(History((*nights[:19], verdict(nights[19], "WORSE", "fail")))).findings
    assert (finding.state, finding.since, finding.last_good) == ("still failing", "2025-01-18", "2025-01-17")


def test_a_crashed_run_that_no_longer_exists_is_not_fixed() -> None:
    nights = sim.records(base())[:20]
    run = "25m/rowwise seed 2"
    nights[18] = replace(nights[18], crashed={run: "exit code 139"}, finished=("25m/rowwise seed 1",))
    nights[19] = replace(nights[19], finished=("25m/rowwise seed 1",))
    (finding,) = assess(History(tuple(nights))).findings
    assert (finding.state, finding.text) == ("notice", f"{run} crashed last night and has no run tonight")
    nights[19] = replace(nights[19], facts={**nights[19].facts, "recipe sha256": "b"})
    (finding,) = assess(History(tuple(nights))).findings
    assert finding.text == f"{run} crashed last night and is no longer in the recipe file"
    nights[19] = replace(nights[19], finished=(run,))
    assert [item.state for item in assess(History(tuple(nights))).findings] == ["fixed"]


def test_changes_are_dated_from_a_night_that_is_not_called_good_and_an_older_fault_keeps_its_own() -> None:
    nights = sim.records(base().shifted("speedup/rowwise", 17, 0.0, times=0.9))[:20]
    for t in range(16, 20):
        nights[t] = replace(nights[t], facts={**nights[t].facts, "torch": "2.13.1"})
    tonight = replace(
        nights[19],
        crashed={"25m/rowwise seed 2": "exit code 139"},
        facts={**nights[19].facts, "torchao": "0.19.0"},
    )
    model = nightly_report.build(History((*nights[:19], tonight)), "nightly")
    assert model.changes is not None
    assert model.changes.caption == "What changed since 2025-01-19, the last night before what is new began"
    assert [row[0] for row in model.changes.rows] == ["torchao"]
    summary = nightly_report.summary(model).replace("\\", "")
    assert "since 2025-01-17, last good 2025-01-16; changed with it: torch 2.13.0 → 2.13.1" in summary
    assert nightly_report.document(model)["compared_with"] == "2025-01-19"


def test_a_night_without_cells_does_not_say_that_nothing_fails() -> None:
    nights = sim.records(base())[:1]
    model = nightly_report.build(History((replace(nights[0], cells=()),)), "nightly")
    assert model.assessment.exit_code == 12
    assert model.headline.startswith("No recipe was compared with BF16 tonight")


def test_the_page_ties_numbers_to_their_unit() -> None:
    nights = sim.records(base().shifted("speedup/rowwise", 20, 0.0, times=0.9))[:20]
    page = nightly_report.page(nightly_report.build(History(tuple(nights)), "nightly"))
    heading = re.search(r"<h1>(.*?)</h1>", page)
    assert heading is not None
    assert "\N{NO-BREAK SPACE}%" in heading[1]
    assert " %" not in heading[1]


def test_a_commit_alone_has_a_short_mark_beside_that_of_a_version() -> None:
    night = sim.records(base())[0]
    facts = [night.facts, {**night.facts, "commit": "2"}, {**night.facts, "commit": "2", "torch": "9"}]
    nights = [replace(night, facts=item) for item in facts]
    assert nightly_trend.mark_height(nights[0], nights[0]) == 0.0
    assert 0.0 < nightly_trend.mark_height(nights[0], nights[1]) < 0.2
    assert nightly_trend.mark_height(nights[1], nights[2]) == 1.0


def test_nights_are_placed_by_date() -> None:
    names = ["2025-01-30", "2025-02-02", "2025-02-02.2", "2025-02-03"]
    at = nightly_trend.places(names)
    assert [b - a for a, b in itertools.pairwise(at)] == [3.0, 0.5, 0.5]
    assert nightly_trend.places(["d0", "d1"]) == [0.0, 1.0]


def test_an_accepted_level_is_the_new_normal() -> None:
    slow = base().shifted("speedup/rowwise", 15, 0.0, times=0.9)
    nights = tuple(sim.records(slow)[:25])
    assert assess(History(nights)).exit_code == 10
    assert assess(History(nights, accepted=((14, "speedup/rowwise"),))).exit_code == 0


class Strict(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href")]


def test_every_file_escapes_what_it_is_told_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>]]>\x00 | `x`"
    nights = sim.records(base())[:20]
    nights[-1] = replace(nights[-1], crashed={evil: evil}, facts={**nights[-1].facts, "driver": evil})
    model = nightly_report.build(History(tuple(nights)), "night & day")
    nightly_report.write(tmp_path, model)
    parser = Strict()
    parser.feed((tmp_path / "nightly.html").read_text())
    assert "script" not in parser.tags
    assert all(reference.startswith("#") for reference in parser.references)
    suite = ET.parse(tmp_path / "junit.xml").getroot()[0]
    assert suite.attrib["errors"] == "1"
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"]) == 3
    document = json.loads((tmp_path / "nightly.json").read_text())
    assert document["findings"][0]["kind"] == "crash"
    assert document["exit_code"] == 12
    assert "<script>" not in (tmp_path / "summary.md").read_text()


def test_the_headline_names_all_that_is_new_and_an_invalid_cell_shows_no_number() -> None:
    nights = sim.records(base())[:20]
    broken, sound = nights[-1].cells
    cells = (replace(broken, outcome="INVALID", gate="invalid", reasons=("seed 1 has no run",)), sound)
    nights[-1] = replace(nights[-1], cells=cells, crashed={f"{broken.recipe}-s1": "killed"})
    model = nightly_report.build(History(tuple(nights)), "nightly")
    told = f"2 new failures: {broken.recipe}-s1 crashed: killed; {broken.recipe}: INVALID: seed 1 has no run"
    assert model.headline == told
    assert model.cells is not None
    assert model.cells.rows[0][3:] == ("–", "–", "–")
    assert model.cells.rows[1][3] == str(sound.n_seeds)
    many = replace(nights[-1], crashed={f"run {i}": "killed" for i in range(5)})
    headline = nightly_report.build(History((*nights[:-1], many)), "nightly").headline
    assert headline.endswith("run 2 crashed: killed; and 3 more")


def test_public_parsers_read_the_junit_file_and_the_summary() -> None:
    import junitparser
    from markdown_it import MarkdownIt

    nights = sim.records(base().shifted("speedup/rowwise", 20, 0.0, times=0.9))[:20]
    nights[-1] = replace(
        nights[-1],
        crashed={"25m/rowwise seed 1": "a | b\n# no head"},
        facts={**nights[-1].facts, "torchao": "9"},
    )
    model = nightly_report.build(History(tuple(nights)), "nightly")
    (suite,) = junitparser.JUnitXml.fromstring(nightly_report.junit(model).encode())
    assert (suite.tests, suite.failures, suite.errors) == (4, 1, 1)
    tokens = MarkdownIt("commonmark").enable("table").parse(nightly_report.summary(model))
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h2"]
    assert sum(token.type == "table_open" for token in tokens) == 2
    rows = sum(token.type == "tr_open" for token in tokens)
    assert sum(token.type in ("td_open", "th_open") for token in tokens) == 6 * 3 + 3 * (rows - 3)
