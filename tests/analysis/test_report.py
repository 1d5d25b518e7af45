"""The report as a reader, a screen reader and an attacker meet it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import report_study
from report_study import STUDY, Shape, hand_judgement, verdict
from tensor_study import noisy_health

from fp8parity_analysis import report, report_facts, wording
from fp8parity_analysis import report_format as fmt
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.report_tables import MAX_CONTRASTS, cost_table, grid_of, place_of
from fp8parity_analysis.schema import Gate, Outcome
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.verdict import Contrast, Judgement

if TYPE_CHECKING:
    from fp8parity_analysis.store import RunRecord
    from fp8parity_analysis.tensor_health import TensorHealth

GOLD = Path(__file__).parents[1] / "gold" / "report"
REPRODUCE = "fp8parity run recipes/granularity.yaml --out out/granularity"
VOID = {"meta", "link", "br", "img", "hr", "input", "base"}
NASTY = "<script>alert(1)</script>]]>\"'&|`*_$\\frac{"


class Page(HTMLParser):
    """A page taken apart: complains when tags do not balance."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split()).replace("\xa0", " ")


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    return report_study.records_of()


def written(
    out: Path,
    judgement: Judgement,
    records: list[RunRecord] | None = None,
    study: dict | None = None,
    tensor: TensorHealth | None = None,
) -> dict[str, str]:
    study = STUDY if study is None else study
    paths = report.write(out, judgement, records or [], study, reproduce=REPRODUCE, tensor=tensor)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, records: list[RunRecord]) -> dict[str, str]:
    return written(tmp_path_factory.mktemp("report"), hand_judgement(), records)


@pytest.fixture(scope="module")
def page(files: dict[str, str]) -> Page:
    return Page(files["report.html"])


def scrubbed(text: str) -> str:
    """The text without pictures, versions, digests and dates."""
    text = re.sub(r"<svg[^>]*role=\"img\".*?</svg>", "<svg/>", text, flags=re.S)
    text = re.sub(r"<style>.*?</style>", "<style/>", text, flags=re.S)
    text = re.sub(r"fp8parity \d[\w.+]*", "fp8parity VERSION", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", text)
    text = re.sub(r"-[0-9a-f]{8}\b", "-HASH", text)
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE", text)


@pytest.mark.parametrize("name", ["report.html", "summary.md", "junit.xml"])
def test_gold(files: dict[str, str], name: str) -> None:
    # FP8PARITY_REGOLD=1 writes the gold files anew: read the difference before you commit it
    gold, text = GOLD / name, scrubbed(files[name])
    if os.environ.get("FP8PARITY_REGOLD"):
        gold.write_text(text, encoding="utf-8")
    assert text == gold.read_text(encoding="utf-8")


def test_the_four_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    paths = report.write(tmp_path / "new" / "out", hand_judgement(), [], STUDY, reproduce=REPRODUCE)
    names = [path.name for path in paths]
    assert names == ["report.html", "report.json", "summary.md", "junit.xml"]
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(names)


def test_same_input_same_bytes(tmp_path: Path, records: list[RunRecord], files: dict[str, str]) -> None:
    assert written(tmp_path, hand_judgement(), records) == files


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, hand_judgement())
    before = (tmp_path / "report.html").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, hand_judgement(post_hoc=True))
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_ids_are_unique_and_every_inner_link_leads_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = {attrs["href"][1:] for _, attrs in page.tags if attrs.get("href", "").startswith("#")}
    wanted |= {name for _, attrs in page.tags for name in attrs.get("aria-labelledby", "").split()}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", json.dumps([attrs for _, attrs in page.tags])))
    assert wanted
    assert wanted <= set(ids)


def test_nothing_is_loaded_from_anywhere(files: dict[str, str], page: Page) -> None:
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "iframe", "img", "object", "embed", "base"}
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert attrs.get(name, "#").startswith("#")
    assert "@import" not in files["report.html"]
    assert re.findall(r"https?://", files["report.html"]) == []
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]+)", files["report.html"]))


def test_a_screen_reader_finds_its_way(page: Page) -> None:
    assert page.named("html")[0]["lang"] == "en"
    assert [len(page.named(tag)) for tag in ("main", "header", "footer", "h1", "title")] == [1] * 5
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert len(page.named("caption")) == len(page.named("table"))
    assert all(attrs.get("scope") in {"row", "col", "rowgroup"} for attrs in page.named("th"))
    pictures = [attrs for attrs in page.named("svg") if attrs.get("role") == "img"]
    assert len(pictures) == 2 + 3 + 2  # forest wide and narrow, a gap each, a loss for each recipe
    assert all(len(attrs["aria-label"]) > 40 for attrs in pictures)
    assert all(attrs.get("aria-hidden") == "true" for attrs in page.named("svg") if attrs not in pictures)
    assert "rowwise +0.04 % [−0.05, +0.13], equivalent" in pictures[0]["aria-label"]


def test_the_answer_stands_first_in_plain_words(page: Page) -> None:
    words = page.words
    order = [
        "rowwise passes; tensorwise fails.",
        "tensorwise is worse than BF16 by more than the margin of 0.25 %.",
        "gap +0.58 % [+0.42, +0.73] margin ±0.25 % from 3 seeds",
        "rowwise trains like BF16: the whole interval lies within the margin of ±0.25 %.",
        "Gaps against the margin",
        "Recipes against each other",
        "Curves and reasons",
        "Tensor health",
        "Noise floor",
        "Token cost and speed",
        "What is not claimed",
        "Precision",
        "Provenance",
        "How to reproduce",
        REPRODUCE,
    ]
    places = [words.rindex(text) if text == order[-1] else words.index(text) for text in order[:4]]
    assert places == sorted(places)
    headings = re.findall(r"<h2[^>]*>([^<]+)", GOLD.joinpath("report.html").read_text(encoding="utf-8"))
    assert headings[1:] == order[4:-1]
    assert REPRODUCE in words


def test_tables_hold_what_the_runs_recorded(page: Page) -> None:
    words = page.words
    assert "tensorwise 30.9 % 6 of 19 18 e4m3 x e4m3 e5m2 x e4m3 e5m2 x e4m3 torchao_float8" in words
    linears = "attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, ffn.gate_proj, ffn.down_proj"
    assert f"FP8 converted 1 {linears} BF16 output head – head" in words
    assert f"BF16 among the first 4 (gemm) 0 {linears}" in words
    assert "153,600 tokens, 300 steps, 512 tokens a step" in words
    assert "0.513 M parameters (d128l3)" in words
    assert "computed FP8 on a CPU" in words
    assert "data sha256 " + report_study.digest("data") in words
    assert "torchao 0.18.0" in words


def test_a_setting_that_differs_between_runs_is_said_so(tmp_path: Path, records: list[RunRecord]) -> None:
    other = dict(records[0].manifest or {}, environment={"torch": "2.11.0"})
    changed = [replace(records[0], manifest=other), *records[1:]]
    words = Page(written(tmp_path, hand_judgement(), changed)["report.html"]).words
    assert "torch differs between runs: 2.11.0 | 2.13.0+cpu" in words


def test_names_and_reasons_from_outside_are_text_only(tmp_path: Path) -> None:
    judgement = hand_judgement(names=(NASTY, "rowwise"))
    first = replace(judgement.verdicts[0], reasons=(NASTY, "\x00\x1b[31m"), warnings=(NASTY,))
    judgement = replace(judgement, verdicts=(first, *judgement.verdicts[1:]))
    study = {"name": NASTY, "description": "</style><img src=x onerror=alert(1)>", "recipe_file": NASTY}
    files = written(tmp_path, judgement, study=study)
    page = Page(files["report.html"])
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.words.count("<script>alert(1)</script>]]>\"'&|`*_$\\frac{") >= 6
    assert "\x00" not in files["report.html"]
    assert json.loads(files["report.json"])["name"] == NASTY


def test_the_command_is_shown_as_typed(tmp_path: Path) -> None:
    command = "fp8parity run a.yaml --margin '0.25 %' && echo \"<done>\""
    path = report.write(tmp_path, hand_judgement(), [], {}, reproduce=command)[0]
    assert command in "".join(Page(path.read_text(encoding="utf-8")).text)


def test_post_hoc_is_said_in_every_file(tmp_path: Path) -> None:
    files = written(tmp_path, hand_judgement(post_hoc=True))
    assert "Post hoc. The criteria were changed" in Page(files["report.html"]).words
    assert json.loads(files["report.json"])["post_hoc"] is True
    assert "**Post hoc:**" in files["summary.md"]
    assert files["junit.xml"].count("post hoc: the criteria were changed") == 3
    plain = written(tmp_path, hand_judgement())
    assert not any("ost hoc" in text for name, text in plain.items() if name != "report.json")


def test_curves_from_outside_make_a_report_without_runs(tmp_path: Path) -> None:
    files = written(tmp_path, hand_judgement(), study={})
    page = Page(files["report.html"])
    assert "the curves came from outside" in page.words
    assert sum(attrs.get("role") == "img" for attrs in page.named("svg")) == 2 + 3
    assert "Linears of" not in page.words


def test_without_a_single_verdict_there_is_still_a_page(tmp_path: Path) -> None:
    files = written(tmp_path, Judgement(criteria=Criteria(), verdicts=()))
    assert "Nothing was judged." in Page(files["report.html"]).words


def test_an_unfinished_run_is_listed_as_such(tmp_path: Path, records: list[RunRecord]) -> None:
    started = replace(records[0], manifest=None, evals=records[0].evals.iloc[:0])
    words = Page(written(tmp_path, hand_judgement(), [started, *records[1:]])["report.html"]).words
    assert re.search(rf"{re.escape(started.run_id)} \S+ \d unfinished – – – – –", words)


def test_report_json_is_versioned_strict_and_complete(files: dict[str, str]) -> None:
    def never(token: str) -> None:
        raise AssertionError(token)

    document = json.loads(files["report.json"], parse_constant=never)
    assert next(iter(document)) == "report_schema_version"
    assert document["report_schema_version"] == report.REPORT_SCHEMA_VERSION == 1
    assert document["judgement"]["verdicts"][0]["gap"] == 0.0058
    assert [item["recipe"] for item in document["evidence"]] == ["tensorwise", "rowwise", "bf16_null"]
    assert len(document["evidence"][0]["gap_by_seed"]) == 3
    assert {"findings", "contrasts", "limits", "provenance", "reproduce", "made_by"} <= set(document)


def test_a_warning_that_all_share_is_said_once(tmp_path: Path) -> None:
    judgement = hand_judgement()
    shared = tuple(replace(item, warnings=("one for all", *item.warnings)) for item in judgement.verdicts)
    words = Page(written(tmp_path, replace(judgement, verdicts=shared))["report.html"]).words
    assert words.count("one for all") == 1


def test_a_hundred_runs_stay_below_three_megabytes(tmp_path: Path) -> None:
    effects = {f"rowwise-n{n}": 0.002 / (n + 1) for n in (0, 2, 4)}
    shape = Shape(groups=("25m", "125m", "350m", "1b"), effects=effects, seeds=(0, 1, 2, 3, 4), steps=1200)
    records = report_study.records_of(shape)
    assert len(records) == 100
    judgement = report_study.judged(records)
    recipes = [item.recipe for item in judgement.verdicts if item.recipe not in judgement.null_recipes]
    assert len(recipes) == 12
    files = written(tmp_path, judgement, records, tensor=noisy_health(recipes))
    assert len(files["report.html"].encode()) < 3e6
    page = Page(files["report.html"])
    drawn = [attrs for attrs in page.named("svg") if attrs.get("role") == "img"]
    maps = [attrs for attrs in drawn if attrs.get("class") == "heat"]
    amax = [attrs for attrs in drawn if attrs["aria-label"].startswith("amax of")]
    assert len(drawn) - len(maps) - len(amax) == 2 + 12 + 12 + 4
    # arms whose pictures no longer fit are tables and one sentence; those drawn have all their maps and curves
    full = page.words.count("Not drawn: the page is full.")
    assert 0 < full < 12
    assert (len(maps), len(amax)) == ((12 - full) * 12, (12 - full) * 4)
    assert all(f"Candidates of {recipe}" in page.words for recipe in recipes)
    lines = [attrs.get("d", "") for attrs in page.named("path") if attrs.get("class", "")[:1] != "l"]
    assert max(map(len, lines)) < 500 * 14


def test_stored_runs_and_the_real_judge_fit_the_report(tmp_path: Path) -> None:
    records = report_study.write_study(tmp_path / "runs")
    words = Page(written(tmp_path, report_study.judged(records), records)["report.html"]).words
    assert "tensorwise is worse than BF16" in words


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_title_and_one_sentence(outcome: Outcome) -> None:
    item = verdict("rowwise", outcome, 0.001, (0.0, 0.002))
    sentence = wording.sentence(item)
    assert wording.TITLES[outcome]
    assert sentence.startswith("rowwise ")
    assert sentence.endswith(".")
    assert ". " not in sentence


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            verdict("r", Outcome.DIVERGED, diverged_seeds=(2,), onset_step=1250),
            "r diverged in 1 of 3 seeds, from about step 1,250; its controls did not.",
        ),
        (
            verdict("r", Outcome.DIVERGED, 0.02, (0.01, 0.03), onset_step=700),
            "r parted from BF16: the gap grew beyond the margin of 0.25 %, from about step 700.",
        ),
        (
            verdict("r", Outcome.INCONCLUSIVE, 0.001, (-0.001, 0.003), need_seeds=8),
            (
                "r is not settled: 3 seeds allow both a gap within the margin and one beyond it; "
                "8 seeds in all should settle it."
            ),
        ),
        (
            verdict("r", Outcome.INCONCLUSIVE, 0.001, n_seeds=1),
            "r is not settled: one pair says nothing about its own noise.",
        ),
        (
            verdict("r", Outcome.INCONCLUSIVE, 0.001, n_seeds=1, need_seeds=5),
            "r is not settled: one pair says nothing about its own noise; 5 seeds in all measure it first.",
        ),
        (verdict("r", Outcome.INVALID, reasons=("data differ.",)), "r cannot be judged: data differ."),
        (
            verdict("r", Outcome.IDENTICAL, 0.0, gate=Gate.PASS),
            "r repeats its control to the last digit: it shows no run-to-run noise on this device.",
        ),
    ],
)
def test_sentences(item: object, expected: str) -> None:
    assert wording.sentence(item) == expected  # type: ignore[arg-type]


def judgement_of(*outcomes: Outcome, stem: str = "recipe") -> Judgement:
    items = tuple(verdict(f"{stem}{index}", outcome) for index, outcome in enumerate(outcomes))
    return Judgement(criteria=Criteria(), verdicts=items)


@pytest.mark.parametrize(
    ("judgement", "expected"),
    [
        (judgement_of(Outcome.EQUIVALENT), "recipe0 passes."),
        (judgement_of(Outcome.WORSE, Outcome.BETTER), "recipe1 passes; recipe0 fails."),
        (judgement_of(Outcome.WORSE, Outcome.DIVERGED), "recipe0 and recipe1 fail."),
        (
            judgement_of(Outcome.EQUIVALENT, Outcome.INVALID, Outcome.WORSE, Outcome.BETTER),
            "Of 4 recipes, 2 pass, 1 fails and 1 has no valid comparison.",
        ),
        (judgement_of(*[Outcome.INCONCLUSIVE] * 5), "None of the 5 recipes is settled."),
        (judgement_of(Outcome.WORSE, stem="r" * 60), "The recipe fails."),
        (
            replace(judgement_of(*[Outcome.IDENTICAL] * 4), null_recipes=frozenset({"recipe0"})),
            "recipe1, recipe2 and recipe3 have no valid comparison.",
        ),
    ],
)
def test_headlines(judgement: Judgement, expected: str) -> None:
    assert wording.headline(judgement) == expected


def test_grid_by_model_and_kept_gemms() -> None:
    names = ["25m/rowwise-n0", "25m/rowwise-n4", "25m/tensorwise-n4", "125m/rowwise-n0", "125m/tensorwise-n4"]
    items = tuple(verdict(name, Outcome.EQUIVALENT, 0.001, (0.0, 0.002)) for name in names)
    grid = grid_of(Judgement(criteria=Criteria(), verdicts=items))
    assert grid is not None
    assert grid.columns == ("N = 0", "N = 4")
    assert [block.label for block in grid.blocks] == ["25m", "125m"]
    assert [row.label for row in grid.blocks[0].rows] == ["rowwise", "tensorwise"]
    filled = [[[cell is not None for cell in row.cells] for row in block.rows] for block in grid.blocks]
    assert filled == [[[True, True], [False, True]], [[True, False], [False, True]]]
    cell = grid.blocks[0].rows[0].cells[0]
    assert cell is not None
    assert (cell.gap, cell.interval, cell.key) == ("+0.10", "[0.00, +0.20]", "r1")


def test_no_grid_without_an_axis() -> None:
    assert grid_of(hand_judgement()) is None


def test_no_grid_that_would_be_mostly_holes() -> None:
    items = tuple(verdict(name, Outcome.EQUIVALENT) for name in ("a/x-n1", "b/y-n2", "c/z-n3"))
    assert grid_of(Judgement(criteria=Criteria(), verdicts=items)) is None


def test_models_are_columns_when_they_are_the_only_axis() -> None:
    items = tuple(verdict(name, Outcome.EQUIVALENT) for name in ("25m/rowwise", "125m/rowwise"))
    grid = grid_of(Judgement(criteria=Criteria(), verdicts=items))
    assert grid is not None
    assert (grid.columns, len(grid.blocks)) == (("25m", "125m"), 1)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rowwise", ("", "rowwise", "")),
        ("rowwise-n4", ("", "rowwise", "4")),
        ("d128l3-lr=0.001/tensorwise-n4_2-backend=x", ("d128l3-lr=0.001", "tensorwise-backend=x", "4 + 2")),
        ("block-norm", ("", "block-norm", "")),
    ],
)
def test_places(name: str, place: tuple[str, str, str]) -> None:
    assert place_of(name) == place


def test_of_very_many_contrasts_the_clearest_are_shown() -> None:
    many = tuple(Contrast(f"a{i}", "b", 0.001, (0.0, 0.002), 1.0 / (i + 1), 3) for i in range(200))
    table = report.report_tables.contrasts_table(replace(hand_judgement(), contrasts=many))
    assert table is not None
    assert [row[0] for row in table.rows] == [f"a{i}" for i in range(200 - MAX_CONTRASTS, 200)]
    assert "60 with the smallest p of 200" in table.notes[0]


@pytest.mark.parametrize(
    ("settings", "seeds", "rule", "note", "reading"),
    [
        ({}, 4, "Intervals: 90 %, over seeds.", "Intervals 90 %; p two-sided, uncorrected", "A is worse"),
        (
            {"looks": (3, 5, 8)},
            5,
            "Intervals: 96.67 % at each look, over 3, 5 and 8 seeds.",
            "Intervals 96.67 %; p two-sided, adjusted for the declared looks, uncorrected",
            "A is worse",
        ),
        (
            {"looks": (3, 8), "spending": "obrien_fleming", "correction": "holm"},
            8,
            "Intervals: 99.73 % at 3 seeds and 90.27 % at 8 seeds.",
            "Intervals 90.27 %; p two-sided, adjusted for the declared looks, Holm-adjusted.",
            "A is worse",
        ),
        (
            {"looks": (5, 8)},
            4,
            "Intervals: 95 % at each look, over 5 and 8 seeds.",
            "No intervals yet; p two-sided, adjusted",
            "waits for the look at 5 seeds",
        ),
        (
            {"anytime": True},
            4,
            "Intervals: 90 %, over seeds, at any number of them.",
            "Intervals 90 %; p two-sided, valid at any number of seeds, uncorrected",
            "A is worse",
        ),
    ],
)
def test_the_level_that_was_used_is_the_level_that_is_stated(
    settings: dict, seeds: int, rule: str, note: str, reading: str
) -> None:
    criteria = Criteria(**settings)
    assert wording.rule(criteria).endswith(rule)
    waits = reading.startswith("waits")
    found = Contrast("a", "b", 0.001, (None, None) if waits else (0.0005, 0.002), None, seeds)
    table = report.report_tables.contrasts_table(
        replace(hand_judgement(), criteria=criteria, contrasts=(found,))
    )
    assert table is not None
    assert table.notes[-1].startswith(note)
    assert table.rows[0][-1] == reading


@pytest.mark.parametrize(
    ("alphas", "said"),
    [
        ([], ""),
        ([0.05, 0.05], "90 %"),
        ([0.05 / 3, 0.05], "90 % and 96.67 %"),
        ([1e-12, 0.025, 0.05], "90 %, 95 % and above 99.99 %"),
    ],
)
def test_levels(alphas: list[float], said: str) -> None:
    assert wording.levels(alphas) == said


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0.0012, (-0.0005, 0.0029), "+0.12 % [−0.05, +0.29]"),
        (-0.0012, (None, None), "−0.12 %"),
        (0.00001, (-0.00001, None), "0.00 % [0.00, –]"),
        (None, (None, None), "–"),
    ],
)
def test_gaps_are_written_with_the_unit_once(value: float, bounds: tuple, expected: str) -> None:
    assert fmt.gap(value, bounds, 2) == expected


@pytest.mark.parametrize(
    ("margin", "digits"), [(0.0025, 2), (0.001, 2), (0.0005, 3), (0.00005, 4), (0.05, 2)]
)
def test_decimals_resolve_a_tenth_of_the_margin(margin: float, digits: int) -> None:
    assert fmt.digits_for(margin) == digits


def test_ranges_of_blocks() -> None:
    assert fmt.ranges([3, 1, 2, 7]) == "1–3, 7"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.WORSE, "lies off zero by more than the margin: by chance (about 1 null in 20 "),
        (Outcome.WORSE_MARGIN_UNRESOLVED, "lies off zero: by chance (about 1 null in 20 "),
        (Outcome.BETTER, "lies off zero: by chance (about 1 null in 20 "),
    ],
)
def test_bf16_is_neither_worse_nor_better_than_itself(outcome: Outcome, said: str) -> None:
    null = verdict("bf16_null", outcome, 0.001, (0.0004, 0.0016))
    sentence = wording.sentence(null, null_arm=True)
    assert sentence.startswith(f"bf16_null, BF16 against itself, {said}")
    assert "distrust gaps of this size here" in sentence
    assert wording.title(outcome, null_arm=True) == "Off zero"
    assert wording.title(outcome) == wording.TITLES[outcome]


def rated(records: list[RunRecord], effective: dict[str, object]) -> StudyRuns:
    """The runs with a throughput of 1000 tokens/s in BF16 and 1300 in FP8."""
    rates = {
        record.run_id: {
            **(record.manifest or {}),
            "throughput_tokens_per_s": 1300.0 if record.spec["role"] == "test" else 1000.0,
            "effective": effective,
        }
        for record in records
    }
    return StudyRuns.of([replace(record, manifest=rates[record.run_id]) for record in records])


@pytest.mark.parametrize(
    ("effective", "speedup", "reason"),
    [
        ({"device": "cuda"}, 1.3, ""),
        ({"device": "cuda", "runs_per_device": 1}, 1.3, ""),
        ({"device": "cuda", "runs_per_device": 4}, None, "several runs share a device"),
        ({"device": "cpu"}, None, "on a CPU, which emulates FP8"),
    ],
)
def test_a_speed_that_the_judge_withholds_is_not_shown(
    records: list[RunRecord], effective: dict[str, object], speedup: float | None, reason: str
) -> None:
    runs = rated(records, effective)
    measured = report_facts.speedups_of(runs)
    assert [measured[name] for name in ("rowwise", "tensorwise")] == [speedup, speedup]
    assert reason in report_facts.no_speed(runs)
    unpriced = verdict("rowwise", Outcome.WORSE, 0.01, (0.008, 0.012), token_cost=None)
    weighed = {"extra_tokens_frac": 0.04, "speedup": speedup, "method": "slope"}
    priced = replace(unpriced, recipe="tensorwise", token_cost=weighed)
    judgement = replace(hand_judgement(), verdicts=(unpriced, priced))
    table = cost_table(judgement, measured, report_facts.no_speed(runs))
    assert table is not None
    shown = {row[0]: row[2] for row in table.rows}
    if speedup is None:
        assert shown == {"tensorwise": fmt.NOTHING}
        assert table.notes[-1] == report_facts.no_speed(runs)
    else:
        assert shown == {"rowwise": "1.30 \u00d7", "tensorwise": "1.30 \u00d7"}
        assert len(table.notes) == 1
