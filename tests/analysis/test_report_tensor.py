"""The report's tensor section: a page that balances, fits, says what is missing; numbers that a nightly can watch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import report_study
from report_study import STUDY, Shape, hand_judgement, judged
from tensor_study import E5M2, Fault, TensorShape, write_tensor_study
from test_report import Page
from test_tensor_health import LAYER, STEP, growing_pair, outlier

from fp8parity_analysis import figures_tensor as fig
from fp8parity_analysis import report, report_tensor
from fp8parity_analysis.history_series import Series
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.tensor_health import TensorHealth, examine
from fp8parity_analysis.tensor_schema import SIGNALS

FAULTS = (
    Fault(LAYER, "input", STEP, growing_pair),
    Fault("blocks.1.attn.o_proj", "weight", 150, format=E5M2),
    Fault("blocks.0.ffn.down_proj", "input", 60, outlier),
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TensorHealth]:
    root = tmp_path_factory.mktemp("tensor")
    records = write_tensor_study(root / "runs", TensorShape(faults=FAULTS))
    judgement = judged(records)
    health = examine(judgement, StudyRuns.of(records))
    report.write(root, judgement, records, STUDY, reproduce="x", tensor=health)
    return root, health


def test_the_page_shows_candidates_maps_and_curves(study: tuple[Path, TensorHealth]) -> None:
    page = Page((study[0] / "report.html").read_text(encoding="utf-8"))
    assert "Candidates of tensorwise" in page.words
    assert "1. blocks.1.attn.o_proj" in page.words
    assert "A candidate is where to look, not a cause." in page.words
    labels = [attrs["aria-label"] for attrs in page.named("svg") if attrs.get("role") == "img"]
    assert sum("amax of" in label for label in labels) == 3
    assert any(label.startswith("Underflow of input in output: 12 layers by 33 probes") for label in labels)
    assert any(label.startswith("SQNR lost of weight in output") for label in labels)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {"href": "#tensors"} in page.named("a")
    assert "Signals of tensorwise at the end" in page.words
    assert "largest attention logit growing faster than BF16's" in page.words
    assert not page.named("script")


def test_the_same_arguments_give_the_same_page(study: tuple[Path, TensorHealth], tmp_path: Path) -> None:
    root, _ = study
    records = report_study.read_runs(root / "runs")
    report.write(tmp_path, judged(records), records, STUDY, reproduce="x")  # examines by itself
    assert (tmp_path / "report.html").read_bytes() == (root / "report.html").read_bytes()


def test_json_and_summary_hold_the_candidates(study: tuple[Path, TensorHealth]) -> None:
    root, health = study
    arm = json.loads((root / "report.json").read_text())["tensor"]["arms"][0]
    assert len(arm["candidates"]) == len(health.arms[0].candidates) == 6
    first = arm["candidates"][0]
    assert (first["rank"], first["fqn"], first["basis"], first["origin"]) == (
        1, "blocks.1.attn.o_proj", "absolute", "cast",
    )  # fmt: skip
    assert first["onset_step"] == 150
    assert first["reasons"][0]["name"] == "format"
    assert len(arm["levels"]) == 72
    # 12 gradient norms, 3 attentions, 3 blocks, 2 of the head: none of them differs
    assert {row["signal"] for row in arm["signal_levels"]} == set(SIGNALS)
    assert len(arm["signal_levels"]) == 20
    assert "6 candidates among 72 tensors, 20 signals" in (root / "summary.md").read_text()


def test_without_statistics_one_line_says_how_to_record_them(tmp_path: Path) -> None:
    report.write(tmp_path, hand_judgement(), report_study.records_of(), STUDY, reproduce="x")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No tensor statistics were recorded" in page.words
    assert "probe.every" in page.words
    assert json.loads((tmp_path / "report.json").read_text())["tensor"]["arms"] == []


def test_names_from_outside_are_only_text(tmp_path: Path) -> None:
    nasty = "blocks.0.<script>alert(1)</script>&\"'"
    shape = TensorShape(blocks=1, linears=("a",), steps=tuple(range(10, 101, 10)), what_if=("tensorwise",))
    records = write_tensor_study(tmp_path / "runs", shape, Shape(effects={"tensorwise": 0.0}, seeds=(0,)))
    health = examine(judged(records), StudyRuns.of(records))
    arm = health.arms[0]
    tensors = tuple(item._replace(fqn=nasty) for item in arm.tensors)
    pictures = replace(
        arm.pictures, tensors=tensors, underflow=np.full(arm.pictures.underflow.shape, 0.5),
        amax=tuple(replace(item, tensor=item.tensor._replace(fqn=nasty)) for item in arm.pictures.amax),
    )  # fmt: skip
    made = TensorHealth((replace(arm, tensors=tensors, pictures=pictures, notes=(nasty,)),))
    report.write(tmp_path, judged(records), records, STUDY, reproduce="x", tensor=made)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.named("script")
    assert any("alert(1)" in text for text in page.text)


def test_what_a_nightly_watches(study: tuple[Path, TensorHealth]) -> None:
    numbers = report_tensor.watched(study[1])
    assert len(numbers) == 12 * 3
    assert all(math.isfinite(value) for value in numbers.values())
    key = "tensorwise/blocks.0.ffn.down_proj/underflow_frac_max"
    assert numbers[key] > 0.5  # the outlier grows from an element that is small in some steps
    assert Series(f"tensor/{key}").direction == 1
    assert Series("tensor/tensorwise/blocks.0.ffn.down_proj/sqnr_db_min").direction == -1
    assert Series("tensor/tensorwise/blocks.0.ffn.down_proj/saturated_frac_max").direction == 1


def test_many_layers_are_watched_by_block() -> None:
    assert report_tensor._layer("blocks.12.ffn.down_proj") == "blocks.12"
    assert report_tensor._layer("head") == "head"


def heat(rows: int, columns: int, level: int = 0) -> fig.HeatMap:
    names = tuple(f"blocks.{row // 7}.linear{row % 7}" for row in range(rows))
    return fig.HeatMap(np.full((rows, columns), level), names, np.arange(1, columns + 1), {0: 1})


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (56, 60), (57, 61), (300, 100), (2000, 3)])
def test_a_map_of_any_size_is_small_and_whole(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    made = heat(rows, columns)
    noisy = fig.HeatMap(rng.integers(-1, 6, (rows, columns)), made.rows, made.steps, made.marks)
    svg = fig.heat_map(noisy, "x")
    Page(svg)
    assert len(svg) < 75_000  # every cell another colour: the worst case
    assert len(fig.heat_map(made, "x")) < 6000


def test_a_cell_that_stands_for_many_shows_the_worst() -> None:
    made = heat(300, 100)
    made.levels[137, 41] = 5
    small = fig.shrunk(made)
    assert small.levels.shape == (56, 60)
    assert (small.levels == 5).sum() == 1
    assert small.marks == {0: 1}


def test_row_labels_keep_their_distance() -> None:
    svg = fig.heat_map(heat(300, 10), "x")
    heights = [float(y) for y in re.findall(r'<text x="118" y="([\d.]+)"', svg)]
    assert len(heights) > 5
    assert min(b - a for a, b in pairwise(heights)) >= 13


def test_levels() -> None:
    found = fig.levels_of(np.array([np.nan, -1.0, 0.0, 1.0, 2.5, np.inf]), (1.0, 2.0))
    assert found.tolist() == [-1, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("values", [[np.nan], [0.0, 0.0], [1e-300, 1e300], [3.0, 3.0], [np.inf, 2.0]])
def test_amax_curves_of_anything(values: list[float]) -> None:
    steps = np.arange(1, len(values) + 1)
    row = np.array([values])
    assert fig.amax_panel(fig.AmaxPanel(steps, row, row, 1), "k", "x").startswith("<svg")
