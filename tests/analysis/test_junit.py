"""The JUnit file, read back the way CI servers read it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from report_study import STUDY, hand_judgement, verdict

from fp8parity_analysis import junit, report
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.verdict import Judgement


def parsed(judgement: Judgement, study: dict | None = None) -> ET.Element:
    model = report.build(judgement, StudyRuns({}, {}), STUDY if study is None else study, reproduce="x")
    return ET.fromstring(junit.render(model, judgement, "2025-01-02T03:04:05+00:00"))


def one(outcome: Outcome, **changes: object) -> ET.Element:
    judgement = Judgement(criteria=Criteria(), verdicts=(verdict("r", outcome, **changes),))
    (case,) = parsed(judgement).iter("testcase")
    return case


def test_one_suite_with_a_case_per_verdict_and_true_counts() -> None:
    root = parsed(hand_judgement())
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert root.tag == "testsuites"
    assert suite.attrib["name"] == "granularity"
    assert [case.attrib["name"] for case in cases] == ["tensorwise", "rowwise", "bf16_null"]
    for key, children in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.attrib[key]) == len(suite.findall(f"testcase/{children}")) == int(root.attrib[key])
    assert int(suite.attrib["tests"]) == 3
    assert suite.attrib["timestamp"] == "2025-01-02T03:04:05+00:00"


@pytest.mark.parametrize(
    ("outcome", "element"),
    [
        (Outcome.WORSE, "failure"),
        (Outcome.DIVERGED, "failure"),
        (Outcome.INVALID, "error"),
        (Outcome.IDENTICAL, "error"),
        (Outcome.INCONCLUSIVE, "skipped"),
        (Outcome.EQUIVALENT_BUT_GROWING, "skipped"),
    ],
)
def test_the_gate_chooses_the_element_and_the_first_reason_is_its_message(
    outcome: Outcome, element: str
) -> None:
    case = one(outcome, reasons=("first", "second"))
    children = [child for child in case if child.tag != "system-out"]
    assert [child.tag for child in children] == [element]
    assert children[0].attrib == {"message": "first", "type": outcome.value}
    assert children[0].text == "first\nsecond"


@pytest.mark.parametrize("outcome", [Outcome.EQUIVALENT, Outcome.NON_INFERIOR, Outcome.BETTER])
def test_a_pass_has_its_numbers_and_no_complaint(outcome: Outcome) -> None:
    case = one(outcome, gap=0.0004, interval=(-0.0005, 0.0013))
    assert [child.tag for child in case] == ["system-out"]
    assert "gap +0.04 % [−0.05, +0.13], margin ±0.25 %, 3 seeds" in (case[0].text or "")


def test_hostile_text_survives_and_forbidden_characters_are_replaced() -> None:
    nasty = "<script>]]>\"'&|\x00\x1b\ud800 \u00e9"
    judgement = hand_judgement(names=(nasty, "rowwise"))
    first = replace(judgement.verdicts[0], reasons=(nasty,))
    root = parsed(replace(judgement, verdicts=(first,)), {"name": nasty})
    clean = "<script>]]>\"'&|\ufffd\ufffd\ufffd \u00e9"
    case = root.find("testsuite/testcase")
    assert case is not None
    assert case.attrib["name"] == clean
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"] == failure.text == clean


def test_properties_tell_gate_margin_and_criteria() -> None:
    judgement = hand_judgement()
    found = {item.attrib["name"]: item.attrib["value"] for item in parsed(judgement).iter("property")}
    assert found["gate"] == "fail"
    assert float(found["margin"]) == 0.0025
    assert found["criteria_digest"] == judgement.criteria.digest()
    assert found["post_hoc"] == "false"


def test_without_verdicts_the_suite_is_empty() -> None:
    (suite,) = parsed(Judgement(criteria=Criteria(), verdicts=())).findall("testsuite")
    assert suite.attrib["tests"] == "0"


def test_a_public_parser_reads_it() -> None:
    import junitparser

    outcomes = (Outcome.EQUIVALENT, Outcome.WORSE, Outcome.INCONCLUSIVE, Outcome.INVALID)
    verdicts = tuple(verdict(item.value.lower(), item, reasons=("first <&> \x00",)) for item in outcomes)
    judgement = Judgement(criteria=Criteria(), verdicts=verdicts)
    model = report.build(judgement, StudyRuns({}, {}), STUDY, reproduce="x")
    text = junit.render(model, judgement, "2025-01-02T03:04:05+00:00")
    (suite,) = junitparser.JUnitXml.fromstring(text.encode())
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (4, 1, 1, 1)
    kinds = {case.name: [type(result) for result in case.result] for case in suite}
    wanted = ([], [junitparser.Failure], [junitparser.Skipped], [junitparser.Error])
    assert kinds == dict(zip((item.recipe for item in verdicts), wanted, strict=True))
