"""The pictures: what they promise about size, themes, ids and the shape of an outcome."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import fp8parity_analysis
from fp8parity_analysis import figures
from fp8parity_analysis.figures import GapPanel, Line, LossPanel, thin
from fp8parity_analysis.forest import MARKERS, ForestRow
from fp8parity_analysis.forest import forest as draw_forest
from fp8parity_analysis.schema import Gate
from fp8parity_analysis.svg import PALETTE

STEPS = np.arange(1.0, 41.0)


STYLE = (Path(fp8parity_analysis.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
THEMES = [
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for block in re.findall(r":root \{(.*?)\}", STYLE, re.S)
]


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG 2."""
    bright, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def line(values: np.ndarray | float) -> Line:
    return Line(STEPS, np.broadcast_to(values, STEPS.shape).astype(float))


def row(**changes: object) -> ForestRow:
    values: dict = {"label": "rowwise", "text": "+0.1 %", "gate": "pass", "gap": 0.1, "low": 0.0, "high": 0.2}
    return ForestRow(**(values | changes))


def forest(*rows: ForestRow, narrow: bool = False) -> str:
    return draw_forest(rows, 0.25, "f", "a label", narrow=narrow)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("text")]


def marker_paths(svg: str, role: str) -> list[str]:
    """The outlines of all markers drawn in the colour of `role`."""
    used = re.findall(rf'<use href="#([^"]+)"[^>]*var\(--{role},', svg)
    shapes = dict(re.findall(r'<path id="([^"]+)" d="([^"]+)"', svg))
    return [shapes[name] for name in used]


def test_thin_keeps_ends_and_spikes_within_the_limit() -> None:
    steps = np.arange(5000.0)
    values = np.sin(steps / 300)
    values[1234], values[4321] = 9.0, -9.0
    found = thin(Line(steps, values), 200)
    assert len(found.steps) <= 200
    assert {0.0, 1234.0, 4321.0, 4999.0} <= set(found.steps)
    assert np.all(np.diff(found.steps) > 0)
    assert np.array_equal(found.values, values[found.steps.astype(int)])


def test_thin_leaves_short_curves_alone_and_keeps_gaps_open() -> None:
    short = line(1.0)
    assert thin(short, 40) is short
    values = np.ones(1000)
    values[500:] = np.nan
    found = thin(Line(np.arange(1000.0), values), 100)
    assert np.isnan(found.values[found.steps >= 500]).all()
    assert np.isfinite(found.values[found.steps < 500]).all()


@pytest.mark.parametrize("limit", [50, 51, 99, 333])
@pytest.mark.parametrize("n", [51, 100, 101, 1000, 1777])
def test_thin_never_exceeds_its_limit(limit: int, n: int) -> None:
    rng = np.random.default_rng(n)
    assert len(thin(Line(np.arange(float(n)), rng.normal(size=n)), limit).steps) <= limit


def test_a_picture_is_one_labelled_image_in_theme_colours() -> None:
    svg = figures.loss_panel(LossPanel([line(2.0)], [line(2.1)]), "k1", 'says "this" & <that>')
    root = ET.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == 'says "this" & <that>'
    fallbacks = {fallback for _, fallback in PALETTE.values()}
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= fallbacks
    assert "var(--control, #1f5fa8)" in svg
    assert "var(--test, #c2410c)" in svg
    assert "DejaVu" not in svg
    assert "<metadata" not in svg


def test_ids_carry_the_key_and_all_are_used() -> None:
    svg = forest(row())
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert ids
    assert all(name.startswith("f-") for name in ids)
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg))
    assert {a or b for a, b in used} == set(ids)


def test_the_same_picture_twice_is_the_same_text() -> None:
    panel = GapPanel([line(0.1), line(0.2)], line(0.15), 0.25, line(0.05), tail_from=36.0)
    assert figures.gap_panel(panel, "g", "x") == figures.gap_panel(panel, "g", "x")


@pytest.mark.parametrize(("tail_from", "starts"), [(36.0, 36.0), (49.9, 49.25), (50.0, 49.25)])
def test_the_mark_of_the_endpoint_is_seen_though_it_is_one_evaluation(
    tail_from: float, starts: float
) -> None:
    _, axes = figures._panel_axes()
    curve = Line(np.array([1.0, 50.0]), np.array([0.1, 0.1]))
    figures._mark_tail(axes, GapPanel([], curve, 0.25, tail_from=tail_from))
    assert axes.lines[-1].get_xdata().tolist() == pytest.approx([starts, 50.0])


def test_a_name_is_neither_formula_nor_colour_nor_markup() -> None:
    name = "#010101 $\\frac <b>"
    for narrow in (False, True):
        assert name in texts(forest(row(label=name), narrow=narrow))


def test_a_long_name_is_cut_to_its_column() -> None:
    assert max(map(len, texts(forest(row(label="x" * 90))))) < 70
    assert any(text.endswith("…") for text in texts(forest(row(label="x" * 90))))


def test_every_gate_has_a_marker_of_its_own() -> None:
    assert set(MARKERS) == {gate.value for gate in Gate}
    assert len(set(MARKERS.values())) == len(MARKERS)
    drawn = {gate: marker_paths(forest(row(gate=gate)), gate) for gate in MARKERS}
    assert all(len(found) == 1 for found in drawn.values())
    assert len({found[0] for found in drawn.values()}) == len(MARKERS)


def test_a_row_without_a_gap_draws_no_marker_but_says_why() -> None:
    svg = forest(row(gate="fail", gap=None, low=None, high=None, text="diverged"))
    assert "diverged" in texts(svg)
    assert "var(--fail" in svg  # the word
    assert marker_paths(svg, "fail") == []


def test_an_interval_beyond_the_frame_ends_in_an_arrow() -> None:
    inside = forest(row(low=-2.0, high=2.5))
    beyond = forest(row(low=-2.0, high=40.0))
    assert len(marker_paths(inside, "pass")) == 1
    assert len(marker_paths(beyond, "pass")) == 2


def test_the_narrow_forest_fits_a_phone() -> None:
    width = float(ET.fromstring(forest(row(), narrow=True)).attrib["viewBox"].split()[2])
    assert width <= 400


def test_the_gap_panel_shows_the_margin_even_when_the_gap_is_tiny() -> None:
    svg = figures.gap_panel(GapPanel([], line(0.001), 0.25), "g", "x")
    assert {"+0.25", "−0.25", "0"} <= set(texts(svg))


def test_a_diverging_loss_does_not_flatten_the_control() -> None:
    wild = np.where(STEPS > 20, 1e6, 2.0)
    svg = figures.loss_panel(LossPanel([line(np.linspace(6, 2, 40))], [line(wild)]), "l", "x")
    ticks = [float(text) for text in texts(svg) if re.fullmatch(r"\d+\.\d+", text)]
    assert ticks
    assert max(ticks) < 10


def test_a_curve_that_goes_non_finite_ends_in_a_cross() -> None:
    broken = np.where(STEPS > 20, np.nan, 2.0)
    whole = figures.loss_panel(LossPanel([line(2.0)], [line(2.1)]), "l", "x")
    lost = figures.loss_panel(LossPanel([line(2.0)], [line(broken)]), "l", "x")
    assert marker_paths(whole, "test") == []
    assert len(marker_paths(lost, "test")) == 1


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_enough_contrast_in_every_theme(theme: dict[str, str]) -> None:
    roles = ("ink", "muted", "accent", "pass", "fail", "inconclusive", "invalid")
    for role in roles:
        assert contrast(theme[role], theme["paper"]) >= 4.5, role
    for role in roles[3:]:
        assert contrast(theme[role], theme[f"tint-{role}"]) >= 4.5, role
    assert contrast(theme["ink"], theme["tint-inconclusive"]) >= 7
    for role in ("control", "test", "null"):  # WCAG asks 3:1 of lines
        assert contrast(theme[role], theme["band"]) >= 3, role


def test_there_are_three_themes_and_pictures_outside_a_page_are_light() -> None:
    assert len(THEMES) == 3
    for role, (_, fallback) in PALETTE.items():
        assert THEMES[0][role] == fallback


def test_nothing_but_non_finite_values_still_draws() -> None:
    svg = figures.loss_panel(LossPanel([line(np.nan)], [line(np.nan)]), "l", "x")
    assert ET.fromstring(svg).tag == "svg"
