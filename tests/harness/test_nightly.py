"""Nights end to end: exit codes, the history on disk, crashes, kills, the webhook."""

from __future__ import annotations

import json
import shutil
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fp8parity import nightly as subject
from fp8parity import runner, study_run
from fp8parity.cli import main
from fp8parity.errors import InterruptedRunError
from fp8parity.launch import RunState, ledger_line
from fp8parity_analysis import schema
from fp8parity_analysis.history import NIGHTS_DIR, read_history

from .conftest import TINY, merged

WIDE = {"criteria": {"margin": "5%"}, "axes": {"precision.recipe": ["rowwise", "tensorwise"]}}
RECIPES = Path(__file__).parents[2] / "recipes"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return int(caught.value.code or 0), captured.out, captured.err


def train_in_process(out: Path, run_dirs: list[Path], **options: Any) -> list[RunState]:
    states = []
    for path in run_dirs:
        code = runner.train(path)
        states.append(RunState(path.name, "finished" if code == 0 else "diverged", 0, 0, None, None))
    return states


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Path]:
    """Return (recipe, history) after one real night of the tiny matrix."""
    import yaml

    folder = tmp_path_factory.mktemp("nightly")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merged(merged(TINY, {"base": {"data": {"path": str(corpus)}}}), WIDE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "launch", train_in_process)
        code = subject.nightly(recipe, folder / "history")
    assert code == 0
    return recipe, folder / "history"


@pytest.fixture
def again(finished: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return (recipe, a history of one night, a copy of that night's study to take as finished runs)."""
    recipe, history = finished
    shutil.copytree(history, tmp_path / "history")
    (night,) = (history / NIGHTS_DIR).iterdir()
    shutil.copytree(night, tmp_path / "study")
    return recipe, tmp_path / "history", tmp_path / "study"


def test_a_first_night_leaves_a_record_and_every_file(finished: tuple[Path, Path]) -> None:
    _, history = finished
    (night,) = read_history(history).nights
    assert night.status == "judged"
    assert {cell.recipe for cell in night.cells} == {"rowwise", "tensorwise"}
    kinds = {name.partition("/")[0] for name in night.series}
    assert kinds == {"gap", "loss", "noise", "speed", "speedup"}
    assert night.checks["execution/rowwise"].ok
    wanted = {
        "torch",
        "torchao",
        "lightning",
        "Python",
        "data sha256",
        "recipe sha256",
        "criteria digest",
        "GPU",
    }
    assert wanted <= set(night.facts)
    assert len(night.facts["data sha256"]) == 64
    assert night.finished is not None
    assert any(name.endswith("/rowwise seed 0") for name in night.finished)
    assert (
        night.series["gap/rowwise"].df
        == night.series[next(x for x in night.series if x[:5] == "noise")].df
        > 0
    )
    for name in ("nightly.html", "nightly.json", "summary.md", "junit.xml"):
        assert (history / name).stat().st_size > 200, name
    assert (history / NIGHTS_DIR / night.night / schema.REPORT_FILE).exists()


def test_every_night_is_a_new_one_and_a_killed_one_is_noted(
    again: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    (history / NIGHTS_DIR / "1999-01-01").mkdir()
    with (history / "history.jsonl").open("a") as handle:
        handle.write('{"schema_version": 1, "night": "cut')
    assert call(capsys, "nightly", recipe, "--history", history, "--runs", study)[0] == 0
    found = read_history(history)
    assert [night.status for night in found.nights] == ["judged", "killed", "judged"]
    assert found.broken == (2,)
    assert found.nights[0].night != found.nights[2].night
    assert "Unreadable lines" in (history / "nightly.html").read_text()


def test_a_crashed_cell_is_named_and_the_rest_is_judged(
    again: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    crashed = next((study / "runs").glob("*s1-tensorwise-*"))
    (crashed / schema.MANIFEST_FILE).unlink()
    ledger_line(study, crashed.name, "failed", exit_code=139, reason="segmentation fault")
    code, out, _ = call(capsys, "nightly", recipe, "--history", history, "--runs", study)
    assert code == 12
    assert "tensorwise seed 1 crashed: exit code 139, segmentation fault" in out
    suite = ET.parse(history / "junit.xml").getroot()[0]
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    assert cases["tensorwise"].find("error") is not None
    assert list(cases["rowwise"]) == []
    assert int(suite.attrib["errors"]) == len(suite.findall("testcase/error")) == 2
    document = json.loads((history / "nightly.json").read_text())
    assert (document["exit_code"], document["gate"]) == (12, "invalid")
    assert "crashed" in (history / "summary.md").read_text()


def test_failed_and_unsettled_verdicts_have_their_exit_codes(
    again: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    document = json.loads((study / schema.STUDY_FILE).read_text())
    document["criteria"]["margin"] = 1e-7
    (study / schema.STUDY_FILE).write_text(json.dumps(document))
    assert call(capsys, "nightly", recipe, "--history", history, "--runs", study)[0] == 11
    told = {"selftest_version": 1, "right": True, "subjects": [{"label": "rowwise", "faults": []}]}
    fault = {"text": "e4m3 rounding differs"}
    broken = {**told, "right": False, "subjects": [{"label": "rowwise", "faults": [fault]}]}
    (study / subject.SELFTEST_FILE).write_text(json.dumps(broken))
    code, out, _ = call(capsys, "nightly", recipe, "--history", history, "--runs", study)
    assert code == 10
    assert "new: selftest: rowwise: e4m3 rounding differs" in out
    (study / subject.SELFTEST_FILE).write_text(json.dumps(told))
    (study / subject.TENSOR_FILE).write_text('{"rowwise/blocks.1.mlp.down/weight/sqnr_db": 31.0}')
    code, out, _ = call(capsys, "nightly", recipe, "--history", history, "--runs", study)
    assert code == 11
    assert "fixed: selftest" in out
    assert (
        read_history(history).nights[-1].series["tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db"].value
        == 31.0
    )


def test_a_night_that_cannot_be_judged_is_recorded(finished: tuple[Path, Path], tmp_path: Path) -> None:
    def refuse(recipe: Path, out: Path) -> None:
        raise subject.UsageError("torchao 0.19 does not go with torch 2.13")

    assert subject.nightly(finished[0], tmp_path / "h", train=refuse) == 12
    (night,) = read_history(tmp_path / "h").nights
    assert (night.status, night.reason) == ("failed", "torchao 0.19 does not go with torch 2.13")
    assert "no verdict" in (tmp_path / "h" / "nightly.html").read_text()


def test_an_interrupted_night_is_recorded_and_raised(finished: tuple[Path, Path], tmp_path: Path) -> None:
    def interrupt(recipe: Path, out: Path) -> None:
        raise InterruptedRunError("stopped")

    with pytest.raises(InterruptedRunError):
        subject.nightly(finished[0], tmp_path / "h", train=interrupt)
    assert [night.status for night in read_history(tmp_path / "h").nights] == ["killed"]
    assert "The night gave no verdict: interrupted: stopped" in (tmp_path / "h" / "nightly.html").read_text()
    for _ in range(2):
        with pytest.raises(InterruptedRunError):
            subject.nightly(finished[0], tmp_path / "h", train=interrupt)
    found = json.loads((tmp_path / "h" / "nightly.json").read_text())["findings"]
    first = read_history(tmp_path / "h").nights[0].night
    assert [(item["state"], item["since"]) for item in found] == [("still failing", first)]


def test_taken_runs_are_not_given_the_facts_of_this_machine(
    again: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    monkeypatch.setattr(subject, "_driver", lambda: "570.1")
    assert call(capsys, "nightly", recipe, "--history", history, "--runs", study)[0] == 0
    taken = read_history(history).nights[-1].facts
    assert "driver" not in taken
    assert taken["torch"] == read_history(history).nights[0].facts["torch"]
    assert subject.static_facts(subject.matrix.read(recipe), here=True)["driver"] == "570.1"


def test_a_tensor_statistic_that_is_no_number_is_named(
    again: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    (study / subject.TENSOR_FILE).write_text('{"rowwise/x/sqnr_db": "high"}')
    code, out, _ = call(capsys, "nightly", recipe, "--history", history, "--runs", study)
    assert code == 12
    assert "rowwise/x/sqnr_db: 'high' is no number" in out


def test_an_accepted_series_that_does_not_exist_is_a_warning(
    again: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, history, study = again
    with (history / "history.jsonl").open("a") as handle:
        handle.write(
            '{"event": "accept", "series": ["spede/25m"]}\n{"event": "accept", "series": "speed/25m"}\n'
        )
    assert call(capsys, "nightly", recipe, "--history", history, "--runs", study)[0] == 0
    page = (history / "nightly.html").read_text()
    assert "no series of that name was ever seen: spede/25m." in page
    assert "Unreadable lines of the history were skipped: 3." in page


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "fail" in self.path else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", got
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "warns"), [("/ok", False), ("/fail", True)])
def test_the_webhook_gets_one_post_and_its_failure_is_a_warning(
    again: tuple[Path, Path, Path],
    server: tuple[str, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    path: str,
    warns: bool,
) -> None:
    recipe, history, study = again
    url, got = server
    code, out, _ = call(
        capsys, "nightly", recipe, "--history", history, "--runs", study, "--webhook", url + path
    )
    assert code == 0
    assert ("warning: the webhook" in out) is warns
    assert [body["gate"] for body in got] == ["pass"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--webhook", "file:///etc/passwd"], "is no web address"),
        (["--runs", "{tmp}"], "holds no study.json"),
        (["--out", "{tmp}"], "is not empty"),
    ],
)
def test_bad_usage_is_64_and_leaves_no_record(
    finished: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    reason: str,
) -> None:
    (tmp_path / "x").write_text("")
    filled = [option.replace("{tmp}", str(tmp_path)) for option in options]
    code, _, err = call(capsys, "nightly", finished[0], "--history", tmp_path / "h", *filled)
    assert code == 64
    assert reason in err
    assert not (tmp_path / "h").exists()


def test_the_shipped_recipe_plans_from_its_frozen_corpus() -> None:
    from fp8parity import matrix

    plan = matrix.read(RECIPES / "nightly.yaml")
    assert len(plan.runs) == 12
    assert (RECIPES / "data" / "nightly.bin").stat().st_size < 1 << 20
