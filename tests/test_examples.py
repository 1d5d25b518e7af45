"""The examples: well formed, what they call exists, and what they describe can be planned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fp8parity import matrix
from fp8parity.cli import app
from fp8parity.errors import UsageError
from fp8parity.own_data import pack_imported
from fp8parity.own_spec import ImportDataSpec
from fp8parity.shapes import linear_shapes

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["cron.txt", "nightly-workflow.yml", "nightly.sbatch"])
def test_the_nightly_is_called_with_options_that_it_has(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    calls = re.findall(
        r"fp8parity nightly (.*)", "\n".join(x for x in text.splitlines() if not x.startswith("#"))
    )
    assert len(calls) == 1
    command = get_command(app).commands["nightly"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z]+", calls[0])) <= known
    assert "--history" in calls[0]


def test_the_workflow_is_scheduled_on_a_gpu_runner_and_shows_the_summary_whatever_happens() -> None:
    document = yaml.safe_load((EXAMPLES / "nightly-workflow.yml").read_text(encoding="utf-8"))
    assert document[True]["schedule"]  # YAML reads the key `on` as true
    (job,) = document["jobs"].values()
    assert {"self-hosted", "gpu"} <= set(job["runs-on"])
    shown = next(step for step in job["steps"] if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    assert shown["if"] == "always()"


BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("nightly", "code", "shown", "recorded"),
    [
        ("echo fresh > $HISTORY/summary.md; exit 10", 10, "fresh", True),
        ("echo fresh > $HISTORY/summary.md", 0, "fresh", True),
        ("echo line 3: no such key >&2; exit 64", 64, "line 3: no such key", False),
        (None, None, "the nightly was not started", False),
    ],
)
def test_the_workflow_shows_tonights_summary_or_why_there_is_none(
    tmp_path: Path, nightly: str | None, code: int | None, shown: str, recorded: bool
) -> None:
    document = yaml.safe_load((EXAMPLES / "nightly-workflow.yml").read_text(encoding="utf-8"))
    steps = {step.get("name"): step for step in document["jobs"]["nightly"]["steps"]}
    program, history = tmp_path / ".venv" / "bin" / "fp8parity", tmp_path / "history"
    program.parent.mkdir(parents=True)
    history.mkdir()
    (history / "summary.md").write_text("yesterday")
    os.utime(history / "summary.md", (1, 1))
    names = ("RUNNER_TEMP", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "HISTORY")
    places = (tmp_path, tmp_path / "shown", tmp_path / "output", history)
    environment = os.environ | dict(zip(names, map(str, places), strict=True))

    def step(name: str) -> int:  # as GitHub runs one: bash -e, from a file
        script = tmp_path / "step.sh"
        script.write_text(steps[name]["run"])
        assert BASH is not None
        done = subprocess.run([BASH, "-e", str(script)], cwd=tmp_path, env=environment, capture_output=True)
        return done.returncode

    assert step("Note the start") == 0
    os.utime(tmp_path / "nightly.start", (2, 2))
    if nightly is not None:
        program.write_text(f"#!/bin/sh\n{nightly}\n")
        program.chmod(0o755)
        assert step("Run the night") == code
    assert step("Show it") == 0
    text = (tmp_path / "shown").read_text()
    assert shown in text
    assert "yesterday" not in text
    assert (tmp_path / "output").exists() is recorded


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_the_shell_of_the_report_page_keeps_the_summary_of_a_study_that_fails(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (shell,) = re.findall(r"```sh\n(.*?)```", page, flags=re.S)
    program = tmp_path / "fp8parity"
    program.write_text("#!/bin/sh\nmkdir -p out/nightly; echo worse > out/nightly/summary.md; exit 10\n")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(tmp_path / "shown")}
    assert BASH is not None
    done = subprocess.run([BASH, "-ec", shell], cwd=tmp_path, env=os.environ | path, check=False)
    assert done.returncode == 10
    assert (tmp_path / "shown").read_text() == "worse\n"


def test_the_crontab_mails_tonights_summary_or_the_log(tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^0 2 \* \* \*  (.*)", (EXAMPLES / "cron.txt").read_text(encoding="utf-8"), flags=re.M
    )
    program = tmp_path / "fp8parity" / ".venv" / "bin" / "fp8parity"
    program.parent.mkdir(parents=True)
    (tmp_path / "nightly").mkdir()
    summary = tmp_path / "nightly" / "summary.md"
    summary.write_text("yesterday\n")
    os.utime(summary, (1, 1))
    for script, told in (("echo refused; exit 64", "refused"), (f"echo fresh > {summary}; exit 10", "fresh")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        if "fresh" in script:  # file times may be coarse
            line = line.replace("touch ", "touch -d 2001-01-01 ")
        done = subprocess.run(
            ["sh", "-c", line.replace("/srv/", f"{tmp_path}/")], capture_output=True, text=True, check=False
        )
        assert told in done.stdout
        assert "yesterday" not in done.stdout


def test_the_examples_for_a_gpu_run_the_recipe_for_a_gpu() -> None:
    for name in ("nightly-workflow.yml", "nightly.sbatch", "cron.txt"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        (recipe,) = set(re.findall(r"recipes/\w+\.yaml", text))
        plan = matrix.read(ROOT / recipe)
        assert {run.spec.train.device for run in plan.runs} == {"cuda"}


def test_the_batch_script_is_valid_shell() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    subprocess.run([bash, "-n", str(EXAMPLES / "nightly.sbatch")], check=True)
    text = (EXAMPLES / "nightly.sbatch").read_text(encoding="utf-8")
    assert text.index("\nsbatch --begin") < text.index("\nsrun ")  # a failing night does not end the chain


def test_the_crontab_line_has_five_fields_and_no_percent_sign() -> None:
    lines = (EXAMPLES / "cron.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [x for x in lines if x and not x.startswith("#") and "=" not in x.split()[0]]
    assert all(re.fullmatch(r"[\d*/,-]+", field) for field in line.split()[:5])
    assert "%" not in line  # cron reads it as a newline


def test_the_example_of_a_fork_lacks_nothing_but_its_parents(tmp_path: Path) -> None:
    parents = matrix.read(EXAMPLES / "fork" / "parents.yaml")
    copy = tmp_path / "examples" / "fork" / "anneal.yaml"
    copy.parent.mkdir(parents=True)
    shutil.copy(EXAMPLES / "fork" / "anneal.yaml", copy)
    with pytest.raises(UsageError) as caught:
        matrix.read(copy)
    assert all("fork_from.run" in line and "matches no" in line for line in str(caught.value).splitlines())
    fork = yaml.safe_load(copy.read_text(encoding="utf-8"))
    assert set(fork["axes"]["fork_from.step"]) <= set(parents.runtime.keep_checkpoints)
    parent = yaml.safe_load((EXAMPLES / "fork" / "parents.yaml").read_text(encoding="utf-8"))
    for section in ("model", "data"):
        assert fork["base"][section] == parent["base"][section]
    assert fork["seeds"] == parent["seeds"]


@pytest.mark.parametrize("name", ["own_model", "hf_gpt2", "hf_llama"])
def test_models_of_ones_own_are_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8parity import model_preflight

    if name.startswith("hf"):
        pytest.importorskip("transformers", reason="needs the extra hf")
    # building in this process instead of a new one saves the seconds of importing torch
    from fp8parity.model_inventory import respond

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv(model_preflight.CACHE, str(tmp_path))
    monkeypatch.setattr(model_preflight, "_ask", respond)
    plan = matrix.read(EXAMPLES / "own_model" / f"{name}.yaml")
    assert {run.arm for run in plan.runs} == {"bf16", "bf16_null", "tensorwise", "rowwise", "blockwise"}
    # twelve GEMMs, of which the first and last four stay in BF16
    shapes = linear_shapes(plan.runs[0].spec.model, 0)
    assert len({shape.group for shape in shapes if not shape.is_head}) == 12


def test_the_data_of_ones_own_are_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    recipe = yaml.safe_load((EXAMPLES / "own_model" / "own_model.yaml").read_text(encoding="utf-8"))
    spec = ImportDataSpec.model_validate(recipe["base"]["data"])
    meta = pack_imported(spec, EXAMPLES / "own_model", tmp_path / "data.bin")
    train = recipe["base"]["train"]
    assert meta.train_tokens > train["steps"] * train["batch_size"] * train["context"]
    assert (meta.n_tokens - meta.train_tokens) > train["eval_sequences"] * train["context"]
