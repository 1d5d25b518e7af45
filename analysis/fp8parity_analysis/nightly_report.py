"""What the nightly shows: a trend page, the same as JSON, a Markdown summary and JUnit XML."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.history_findings import FIXED, NEW, NOTICE, STILL, Assessment, Change, Finding, assess
from fp8parity_analysis.history_series import FALSE_ALARMS_PER_NIGHT, Series
from fp8parity_analysis.report import page_environment
from fp8parity_analysis.report_model import Table
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.summary import escape
from fp8parity_analysis.verdict import strict_json
from fp8parity_analysis.wording import GATE_WORDS

if TYPE_CHECKING:
    from pathlib import Path

    from fp8parity_analysis.history import Check, History

NIGHTLY_PAGE, NIGHTLY_JSON, SUMMARY_FILE, JUNIT_FILE = (
    "nightly.html",
    "nightly.json",
    "summary.md",
    "junit.xml",
)
NIGHTLY_SCHEMA_VERSION = 1
MAX_TRENDS, MAX_NIGHTS = 24, 40
MAX_TOLD = 3
"""What fails, up to so many, stands in the headline; so many changes stand beside what still fails."""
MAX_VALUES = 50
"""Characters of two values that still fit into a line."""

_NOT_TEXT = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BADGE = {
    NEW: ("fail", "New"),
    STILL: ("fail", "Still failing"),
    FIXED: ("pass", "Fixed"),
    NOTICE: ("inconclusive", "Notice"),
}


_QUIET = {
    Gate.PASS: "Nothing fails",
    Gate.INCONCLUSIVE: "Nothing new fails, but not every recipe is settled",
    Gate.INVALID: "No recipe was compared with BF16 tonight, so the night says nothing about FP8",
    Gate.FAIL: "A recipe fails against BF16",
}
"""The headline of a night without a failing finding, by gate."""


@dataclass(frozen=True)
class NightlyModel:
    """The page as plain data; texts are unescaped."""

    name: str
    headline: str
    gate: str
    gate_word: str
    night: str
    assessment: Assessment
    cells: Table | None
    changes: Table | None
    nights: Table
    rule: str
    warnings: tuple[str, ...]


def build(history: History, name: str) -> NightlyModel:
    """Return what the page says of a history that is not empty."""
    found = assess(history)
    gate = found.gate
    return NightlyModel(
        name=name,
        headline=_headline(found),
        gate=gate.value,
        gate_word="Regression" if gate is Gate.FAIL and found.regressed else GATE_WORDS[gate],
        night=found.night.night,
        assessment=found,
        cells=_cells_table(found),
        changes=_changes_table(found),
        nights=_nights_table(history),
        rule=(
            f"Steps are tested against the last good nights at {fmt.percent(FALSE_ALARMS_PER_NIGHT, 0, signed=False)} "
            f"false alarms per night over all {len(found.night.series)} series together. Execution proof, self test "
            "and crashes are compared by equality."
        ),
        warnings=_warnings(found, history),
    )


def _headline(found: Assessment) -> str:
    counts = Counter(item.state for item in found.findings)
    if found.night.status != "judged":
        return f"The night gave no verdict: {found.night.reason}"
    words = (
        (NEW, fmt.plural(counts[NEW], "new failure")),
        (STILL, f"{counts[STILL]} still failing"),
        (FIXED, f"{counts[FIXED]} fixed"),
    )
    parts = [word for state, word in words if counts[state]]
    if not counts[NEW] and not counts[STILL]:
        return _QUIET[found.gate] + (f"; {counts[FIXED]} fixed" if counts[FIXED] else "")
    failing = [item.text for item in found.findings if item.failing]
    rest = len(failing) - MAX_TOLD
    return f"{', '.join(parts)}: {'; '.join(failing[:MAX_TOLD])}" + (f"; and {rest} more" if rest > 0 else "")


def _warnings(found: Assessment, history: History) -> tuple[str, ...]:
    lines = []
    if found.learning:
        lines.append(
            f"{fmt.plural(len(found.learning), 'series')} of {len(found.night.series)} still learning: a step is "
            "tested once there are five good nights.".replace("seriess", "series")
        )
    unknown = sorted({name for _, name in history.accepted} - set(found.tracked.names))
    if unknown:
        lines.append(
            f"Accepted in the history, but no series of that name was ever seen: {', '.join(unknown)}."
        )
    if history.broken:
        lines.append(f"Unreadable lines of the history were skipped: {', '.join(map(str, history.broken))}.")
    return tuple(lines)


def _cells_table(found: Assessment) -> Table | None:
    night = found.night
    if not night.cells:
        return None
    digits = fmt.digits_for(night.margin or 0.0025)
    rows = []
    for cell in night.cells:
        speed, proof = (
            night.series.get(f"speedup/{cell.recipe}"),
            night.checks.get(f"execution/{cell.recipe}"),
        )
        nothing_compared = cell.outcome == Outcome.INVALID.value  # what the surviving runs show is no finding
        rows.append(
            (
                cell.recipe,
                f"{cell.outcome} ({cell.gate})",
                fmt.gap(cell.gap, cell.interval, digits),
                fmt.NOTHING if nothing_compared else str(cell.n_seeds),
                fmt.NOTHING if speed is None or nothing_compared else f"{speed.value:.2f}",
                _proof_text(proof, nothing_compared=nothing_compared),
            )
        )
    margin = f", margin {fmt.margin(night.margin)}" if night.margin else ""
    head = ("recipe", "verdict", "gap and interval", "seeds", "FP8 / BF16 speed", "FP8 ran")
    return Table(f"Against BF16 tonight{margin}", head, tuple(rows), numeric=(2, 3, 4))


def _proof_text(proof: Check | None, *, nothing_compared: bool) -> str:
    if proof is None or (proof.ok and nothing_compared):
        return fmt.NOTHING
    return "proven" if proof.ok else "not proven"


def _changes_table(found: Assessment) -> Table | None:
    if found.compared_with is None or not found.changes:
        return None
    before = found.compared_with.night
    rows = tuple((item.what, item.before, item.after) for item in found.changes)
    return Table(f"What changed since {_compared(found)}", ("what", before, "tonight"), rows)


def _compared(found: Assessment) -> str:
    """Name the night that the changes are since, without calling it good."""
    name = found.compared_with.night if found.compared_with else ""
    new, failing = (any(x.state == state for x in found.findings) for state in (NEW, STILL))
    if new or failing:
        return f"{name}, the last night before what {'is new' if new else 'still fails'} began"
    return f"{name}, the night before"


def _nights_table(history: History) -> Table:
    rows = []
    for night in reversed(history.nights[-MAX_NIGHTS:]):
        told = night.told
        failing = "; ".join(str(text) for text in told.get("failing", ())) or night.reason or fmt.NOTHING
        rows.append((night.night, str(told.get("gate") or night.status), failing))
    return Table(
        f"The last {fmt.plural(len(rows), 'night')}", ("night", "result", "what failed"), tuple(rows)
    )


def told_of(found: Assessment) -> dict[str, Any]:
    """Return what the history keeps of what a night said."""
    return {
        "gate": found.gate.value,
        "failing": [item.text for item in found.findings if item.failing],
        "findings": [asdict(item) for item in found.findings],
    }


def document(model: NightlyModel) -> dict[str, Any]:
    """Return the night as strict JSON values under a version of its own; a webhook posts the same."""
    found = model.assessment
    result: dict[str, Any] = strict_json(
        {
            "nightly_schema_version": NIGHTLY_SCHEMA_VERSION,
            "name": model.name,
            "night": model.night,
            "gate": model.gate,
            "regressed": found.regressed,
            "exit_code": found.exit_code,
            "headline": model.headline,
            "false_alarms_per_night": FALSE_ALARMS_PER_NIGHT,
            "findings": [asdict(item) for item in found.findings],
            "compared_with": found.compared_with.night if found.compared_with else None,
            "changes": [asdict(item) for item in found.changes],
            "record": found.night.to_json(),
            "learning": found.learning,
            "warnings": model.warnings,
        }
    )
    result["record"].pop("told", None)
    return result


def summary(model: NightlyModel) -> str:
    """Return the night as Markdown for a CI job's page."""
    found = model.assessment
    lines = [
        f"## {escape(model.name)}, {escape(model.night)}: {model.gate_word.lower()}",
        "",
        escape(model.headline),
        "",
    ]
    lines += [
        f"- **{_BADGE[item.state][1]}:** {escape(item.text)} ({escape(_when(item))})"
        for item in found.findings
    ]
    for table in (model.cells, model.changes):
        if table:
            lines += [
                "",
                f"**{escape(table.caption)}**",
                "",
                _row(table.head),
                _row([":---"] * len(table.head)),
            ]
            lines += [_row([escape(cell) for cell in row]) for row in table.rows]
    lines += ["", *(f"- {escape(text)}" for text in (model.rule, *model.warnings))]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _when(item: Finding) -> str:
    if item.state == FIXED:
        return f"began {item.since}"
    good = f", last good {item.last_good}" if item.last_good else ""
    changed = [_short(change) for change in item.changed]
    rest = len(changed) - MAX_TOLD
    with_it = f"; changed with it: {', '.join(changed[:MAX_TOLD])}" if changed else ""
    return f"since {item.since}{good}{with_it}" + (f" and {rest} more" if rest > 0 else "")


def _short(change: Change) -> str:
    """Say a change in a line; a digest is told by its name alone."""
    values = f"{change.before} \N{RIGHTWARDS ARROW} {change.after}"
    return change.what if len(values) > MAX_VALUES else f"{change.what} {values}"


def junit(model: NightlyModel) -> str:
    """Return one suite: a case per recipe and a case per finding about the history or a crash."""
    found = model.assessment
    root = ET.Element("testsuites", {"name": "fp8parity nightly"})
    suite = ET.SubElement(root, "testsuite", {"name": _legal(model.name), "time": "0"})
    if found.night.time:
        suite.set("timestamp", _legal(found.night.time))
    element = {"fail": "failure", "invalid": "error", "inconclusive": "skipped"}
    for cell in found.night.cells:
        case = _case(suite, "verdict", cell.recipe)
        if cell.gate in element:
            reasons = cell.reasons or (cell.outcome,)
            problem = ET.SubElement(
                case, element[cell.gate], {"message": _legal(reasons[0]), "type": cell.outcome}
            )
            problem.text = _legal("\n".join(reasons))
    for item in found.findings:
        if item.name.startswith("verdict/"):
            continue  # the recipe's own case says it
        case = _case(suite, item.kind, item.name)
        if item.failing:
            tag = "error" if item.kind == "crash" else "failure"
            ET.SubElement(case, tag, {"message": _legal(item.text), "type": item.state}).text = _legal(
                _when(item)
            )
        ET.SubElement(case, "system-out").text = _legal(f"{item.state}: {item.text}")
    for node in (root, suite):
        node.set("tests", str(len(suite.findall("testcase"))))
        for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            node.set(key, str(len(suite.findall(f"testcase/{tag}"))))
    ET.indent(root, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _case(suite: ET.Element, kind: str, name: str) -> ET.Element:
    names = {"name": _legal(name), "classname": f"fp8parity.nightly.{kind}", "time": "0"}
    return ET.SubElement(suite, "testcase", names)


def _legal(text: str) -> str:
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def page(model: NightlyModel) -> str:
    """Return the trend page: one self-contained HTML file, readable without script."""
    from fp8parity_analysis.nightly_trend import trend

    found = model.assessment
    names = _drawn(found)
    pictures = [
        (Series(name).title, Markup(trend(found.tracked, name, f"t{i}"))) for i, name in enumerate(names)
    ]
    text = (
        page_environment()
        .get_template("nightly.html.j2")
        .render(
            model=model,
            findings=[(*_BADGE[item.state], item.text, _when(item)) for item in found.findings],
            trends=pictures,
            compared=_compared(found),
            left_out=len(found.tracked.names) - len(names),
        )
    )
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text) + "\n"


def _drawn(found: Assessment) -> list[str]:
    """Return the series to draw: those with a finding first, then all others but single layers' statistics."""
    told = [item.name for item in found.findings if item.name in found.tracked.names]
    rest = [name for name in found.tracked.names if Series(name).kind.name != "tensor" and name not in told]
    return [*dict.fromkeys(told), *rest][:MAX_TRENDS]


def write(directory: Path, model: NightlyModel) -> tuple[Path, ...]:
    """Write page, JSON, summary and JUnit into `directory`, each by rename, and return the paths."""
    texts = {
        NIGHTLY_PAGE: page(model),
        NIGHTLY_JSON: json.dumps(document(model), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        SUMMARY_FILE: summary(model),
        JUNIT_FILE: junit(model),
    }
    paths = []
    for name, text in texts.items():
        path = directory / name
        temporary = path.with_name(name + ".tmp")
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
        paths.append(path)
    return tuple(paths)
