"""The verdicts as JUnit XML, so that a CI server lists every recipe as a test case.

A gate that fails is a failure, an invalid comparison an error, an inconclusive one is skipped.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING

from fp8parity_analysis.schema import Gate

if TYPE_CHECKING:
    from fp8parity_analysis.report_model import Finding, ReportModel
    from fp8parity_analysis.verdict import Judgement

_ELEMENT = {Gate.FAIL: "failure", Gate.INVALID: "error", Gate.INCONCLUSIVE: "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(model: ReportModel, judgement: Judgement, timestamp: str = "") -> str:
    """Return one test suite with one test case per verdict; `timestamp` is ISO 8601 or empty."""
    gates = Counter(Gate(item.gate) for item in model.findings)
    counts = {
        "tests": str(len(model.findings)),
        "failures": str(gates[Gate.FAIL]),
        "errors": str(gates[Gate.INVALID]),
        "skipped": str(gates[Gate.INCONCLUSIVE]),
    }
    root = ET.Element("testsuites", {"name": "fp8parity", **counts})
    stamp = {"timestamp": _legal(timestamp)} if timestamp else {}
    suite = ET.SubElement(root, "testsuite", {"name": _legal(model.name), **counts, "time": "0", **stamp})
    _add_properties(suite, model, judgement)
    for item in model.findings:
        _add_case(suite, model, item)
    ET.indent(root, " ")
    text: str = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_properties(suite: ET.Element, model: ReportModel, judgement: Judgement) -> None:
    facts = {
        "gate": model.gate,
        "margin": f"{judgement.criteria.margin:g}",
        "criteria_digest": judgement.criteria.digest(),
        "post_hoc": str(model.post_hoc).lower(),
        "made_by": model.made_by,
    }
    parent = ET.SubElement(suite, "properties")
    for name, value in facts.items():
        ET.SubElement(parent, "property", {"name": name, "value": _legal(value)})


def _add_case(suite: ET.Element, model: ReportModel, item: Finding) -> None:
    names = {"name": _legal(item.recipe), "classname": _legal(f"fp8parity.{model.name}"), "time": "0"}
    case = ET.SubElement(suite, "testcase", names)
    element = _ELEMENT.get(Gate(item.gate))
    reasons = item.reasons or (item.sentence,)
    if element is not None:
        attributes = {"message": _legal(reasons[0]), "type": item.outcome}
        ET.SubElement(case, element, attributes).text = _legal("\n".join(reasons))
    label = ["post hoc: the criteria were changed after the runs had started"] if model.post_hoc else []
    lines = [*label, item.sentence, f"gap {item.gap}, margin {item.margin}, {item.seeds}", *item.warnings]
    ET.SubElement(case, "system-out").text = _legal("\n".join(lines))


def _legal(text: str) -> str:
    """Replace the characters that XML 1.0 has no way to write."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
