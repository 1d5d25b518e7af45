"""The pages as a browser and a parser of the HTML standard see them: valid, accessible, no wider than their window.

With FP8PARITY_SCREENSHOTS=DIR the same test writes report-WIDTH-THEME.png and nightly-WIDTH-THEME.png; with
FP8PARITY_STUDY=DIR the report is that study's.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import html5lib
import nights as sim
import numpy as np
import pytest
import report_study

from fp8parity_analysis import nightly_report, report
from fp8parity_analysis.history import History

from .browser import Browser, browser, missing

SIZES = ((1280, 900), (400, 800))
THEMES = ("light", "dark")

needs_chromium = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a report with every section that synthetic runs fill, and a night with findings of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    if given := os.environ.get("FP8PARITY_STUDY"):
        (folder / "report.html").write_bytes((Path(given) / "report.html").read_bytes())
    else:
        records = report_study.records_of()
        report.write(
            folder, report_study.judged(records), records, report_study.STUDY, reproduce="fp8parity run"
        )
    write_nightly(folder)
    return {name: folder / f"{name}.html" for name in ("report", "nightly")}


def write_nightly(folder: Path) -> None:
    """Write the page after a torchao upgrade that broke a layer, a crash and a slower kernel."""
    simulated = sim.simulate(np.random.default_rng(3), 1)
    simulated = simulated.shifted("tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db", 20, -9.0)
    simulated = simulated.shifted("speedup/rowwise", 18, 0.0, times=0.9)
    nights = sim.records(simulated)[:20]
    last = nights[-1]
    crashed = {"25m/tensorwise seed 1": "exit code 139, segmentation fault"}
    nights[-1] = replace(last, crashed=crashed, facts={**last.facts, "torchao": "0.19.0"})
    nightly_report.write(folder, nightly_report.build(History(tuple(nights)), "nightly"))


@pytest.mark.parametrize("name", ["report", "nightly"])
def test_valid_html(pages: dict[str, Path], name: str) -> None:
    parser = html5lib.HTMLParser(strict=False)
    parser.parse(pages[name].read_text(encoding="utf-8"))
    assert parser.errors == []


def violations(page: Browser) -> list[str]:
    """Return what axe-core finds and calls serious or critical, as one line each."""
    page.script(resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    page.script(
        "window.found = null; axe.run().then(r => { window.found = r; }, e => { window.found = String(e); })"
    )
    found: Any = page.until(lambda: page.script("return window.found && JSON.stringify(window.found)"))
    told = json.loads(found)
    assert len(told["passes"]) > 10, told
    return [
        f"{item['id']} ({item['impact']}): {item['help']}: {[node['html'][:120] for node in item['nodes'][:3]]}"
        for item in told["violations"]
        if item["impact"] in ("serious", "critical")
    ]


@needs_chromium
@pytest.mark.parametrize("name", ["report", "nightly"])
def test_accessible_and_inside_its_window(pages: dict[str, Path], tmp_path: Path, name: str) -> None:
    with browser(tmp_path / "profile", 1280, 900) as page:
        for width, height in SIZES:
            for theme in THEMES:
                page.theme(theme)
                page.size(width, height)
                page.open(pages[name].as_uri())
                assert page.script("return window.innerWidth") == width
                assert page.script(f"return matchMedia('(prefers-color-scheme: {theme})').matches")
                assert violations(page) == [], (width, theme)
                assert page.script("return document.documentElement.scrollWidth") <= width
                assert page.script("return performance.getEntriesByType('resource').length") == 0
                picture(page, f"{name}-{width}-{theme}")
        page.script("document.querySelector('main, body').append(document.createElement('img'))")
        (planted,) = violations(page)
        assert planted.startswith("image-alt (critical)")


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("FP8PARITY_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")
