"""The command line end to end: exit codes, one-line reasons, no traceback, no torch where none is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8parity import runner, study_run
from fp8parity.cli import app, main
from fp8parity.jobs import RunState
from fp8parity.ledger import ledger_line
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run

from .conftest import WriteRecipe

DEMO = Path(__file__).parents[2] / "recipes" / "demo_cpu.yaml"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return int(caught.value.code or 0), captured.out, captured.err


def train_in_process(out: Path, run_dirs: list[Path], **options: Any) -> list[RunState]:
    """Stand in for the launcher: the same runs, one after the other in this process, to save the imports."""
    states = []
    for path in run_dirs:
        code = runner.train(path)
        states.append(RunState(path.name, "finished" if code == 0 else "diverged", 0, 0, None, None))
    return states


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "launch", train_in_process)


def test_surface_is_frozen() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert commands == {
        "plan", "run", "status", "train", "judge", "report", "mlflow", "ui", "nightly", "selftest", "schema"
    }  # fmt: skip
    assert {group.name for group in app.registered_groups} == {"data"}


@pytest.mark.parametrize(
    "command", [["--help"], ["plan", str(DEMO)], ["plan", str(DEMO), "--json"], ["schema"]]
)
def test_no_torch_where_none_is_needed(command: list[str]) -> None:
    code = (
        "import sys\nfrom fp8parity.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n"
        "    heavy = {'torch', 'lightning', 'mlflow', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "    print('\\nHEAVY', sorted(heavy), 'EXIT', stop.code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] in ("HEAVY [] EXIT 0", "HEAVY [] EXIT None")


def test_plan_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "plan", str(DEMO), "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert (document["runs"], document["pairs"]) == (15, 9)
    assert {arm["arm"] for arm in document["arms"]} >= {"bf16", "bf16_null", "tensorwise", "rowwise"}
    assert document["detection"]["detectable_gap"] > 0


def test_whole_path(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    recipe, out = write_recipe(), tmp_path / "out"
    code, text, _ = call(capsys, "run", str(recipe), "--out", str(out))
    verdicts = json.loads((out / schema.VERDICTS_FILE).read_text())
    worst = {"pass": 0, "fail": 10, "inconclusive": 11, "invalid": 12}
    by_recipe = {v["recipe"]: v for v in verdicts["verdicts"]}
    assert set(by_recipe) == {"tensorwise", "rowwise", "bf16_null"}
    assert by_recipe["rowwise"]["n_seeds"] == 2
    assert code == max(worst[by_recipe[name]["gate"]] for name in ("tensorwise", "rowwise"))
    assert code != 12
    assert (out / schema.REPORT_FILE).stat().st_size > 10_000
    assert "rowwise" in text
    manifests = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/manifest.json")}
    assert len(manifests) == 8

    again, _, _ = call(capsys, "run", str(recipe), "--out", str(out))
    assert again == code
    assert {p: p.stat().st_mtime_ns for p in out.glob("runs/*/manifest.json")} == manifests

    judged, text, _ = call(capsys, "judge", str(out), "--json")
    assert judged == code
    assert json.loads(text) == verdicts

    code, text, _ = call(capsys, "judge", str(out), "--margin", "3%", "--json")
    assert json.loads(text)["criteria"]["post_hoc"] is True
    assert all(any("post hoc" in w for w in v["warnings"]) for v in json.loads(text)["verdicts"])


def test_changed_margin_is_post_hoc_in_every_output(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    out = tmp_path / "out"
    tiny = {"seeds": [0], "null": None, "axes": {"precision.recipe": ["rowwise"]}}
    call(capsys, "run", str(write_recipe(tiny)), "--out", str(out))
    assert "post hoc" not in (out / schema.REPORT_FILE).read_text().lower()
    changed = write_recipe({**tiny, "criteria": {"margin": "5%"}})
    _, text, _ = call(capsys, "run", str(changed), "--out", str(out))
    assert "post hoc" in text
    for name in (schema.VERDICTS_FILE, schema.REPORT_FILE, "summary.md", "report.json", "junit.xml"):
        assert re.search("post.hoc", (out / name).read_text().lower()), name


def test_any_verdict_hides_every_gate_but_invalid(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    recipe, out = write_recipe({"seeds": [0], "null": None}), tmp_path / "out"
    assert call(capsys, "run", str(recipe), "--out", str(out))[0] == 11
    assert call(capsys, "run", str(recipe), "--out", str(out), "--any-verdict")[0] == 0
    control = next(out.glob("runs/*bf16*"))
    manifest = json.loads((control / "manifest.json").read_text())
    (control / "manifest.json").write_text(json.dumps({**manifest, "init_digest": "0" * 64}))
    code, text, _ = call(capsys, "run", str(recipe), "--out", str(out), "--any-verdict")
    assert code == 12
    assert "init_digest" in text


def test_a_run_without_a_result_says_why_everywhere(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "fp8parity: the run would not execute what it declares: blocks.1.ffn.up_proj: no FP8 GEMM"

    def control_only(out: Path, run_dirs: list[Path], **options: Any) -> list[RunState]:
        control, test = run_dirs
        states = train_in_process(out, [control])
        facts = {"cause": "not_as_declared", "stage": "prove", "reason": reason}
        ledger_line(out, test.name, "invalid", exit_code=12, **facts)
        return [*states, RunState(test.name, "invalid", 0, 24, None, None, reason)]

    monkeypatch.setattr(study_run, "launch", control_only)
    tiny = {"seeds": [0], "null": None, "axes": {"precision.recipe": ["rowwise"]}}
    out = tmp_path / "out"
    code, text, _ = call(capsys, "run", str(write_recipe(tiny)), "--out", str(out), "--any-verdict")
    assert code == 12
    end = " ".join(text[text.index("report:") :].split())
    assert re.search(r"invalid: \S*rowwise\S*: the run would not execute what it declares", end)
    why = "not_as_declared in stage prove: the run would not execute what it declares: blocks.1.ffn.up_proj"
    assert why in (out / schema.VERDICTS_FILE).read_text()
    assert "would not execute what it declares" in (out / "summary.md").read_text()
    assert "would not execute what it declares" in (out / schema.REPORT_FILE).read_text()


def test_train_by_hand(write_recipe: WriteRecipe, tmp_path: Path, lay_out: Any) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 3}}})["rowwise-0"]
    result = subprocess.run(
        [sys.executable, "-m", "fp8parity", "train", str(run_dir)], capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(read_run(run_dir).curve) == 3


def csv_of(path: Path, gaps: dict[int, float], **columns: Any) -> Path:
    rows = []
    for seed, gap in gaps.items():
        for step in range(10, 210, 10):
            loss = 3.0 + 10 / step + seed / 100
            rows.append({"seed": seed, "arm": "bf16", "step": step, "loss": loss, **columns})
            rows.append({"seed": seed, "arm": "rowwise", "step": step, "loss": loss * (1 + gap), **columns})
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("gaps", "code"),
    [
        ({0: 0.0001, 1: -0.0001, 2: 0.0002}, 0),
        ({0: 0.010, 1: 0.011, 2: 0.012}, 10),
        ({0: 0.002, 1: 0.009, 2: -0.004}, 11),
        ({0: 0.0, 1: 0.0, 2: 0.0}, 12),
    ],
)
def test_exit_codes_of_judge_on_anybodys_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gaps: dict[int, float], code: int
) -> None:
    path = csv_of(tmp_path / "c.csv", gaps)
    assert call(capsys, "judge", str(path))[0] == code
    got, out, err = call(capsys, "judge", str(path), "--json")
    assert (got, err) == (code, "")
    document = json.loads(out)
    assert tuple(document) == schema.JUDGEMENT_KEYS
    assert tuple(document["verdicts"][0]) == schema.VERDICT_KEYS


def test_judge_reads_other_names_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_of(tmp_path / "c.csv", {0: 0.0001, 1: -0.0001, 2: 0.0002})
    renamed = tmp_path / "renamed.csv"
    pd.read_csv(path).rename(columns={"loss": "val_loss", "step": "iter"}).to_csv(renamed, index=False)
    _, plain, _ = call(capsys, "judge", str(path), "--holm", "--speedup", "1.2", "--json")
    mapped = ("--column", "loss=val_loss", "--column", "step=iter")
    code, text, _ = call(capsys, "judge", str(renamed), *mapped, "--holm", "--speedup", "1.2", "--json")
    assert code == 0
    assert json.loads(text) == json.loads(plain)
    assert json.loads(text)["criteria"]["correction"] == "holm"


def test_judge_takes_the_noise_floor_of_an_earlier_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = csv_of(tmp_path / "earlier.csv", {seed: 0.0002 * (seed + 1) for seed in range(8)})
    table = pd.read_csv(earlier)
    sizes = {seed: 1 + 0.0003 * (-1) ** seed for seed in range(8)}
    nulls = table[table["arm"] == "bf16"].assign(arm="bf16_null")
    nulls["loss"] *= nulls["seed"].map(sizes)
    pd.concat([table, nulls]).to_csv(earlier, index=False)
    floor = tmp_path / "verdicts.json"
    floor.write_text(call(capsys, "judge", str(earlier), "--json")[1])
    pair = csv_of(tmp_path / "pair.csv", {0: 0.0002})
    code, text, _ = call(capsys, "judge", str(pair), "--noise-from", str(floor), "--json")
    verdict = json.loads(text)["verdicts"][0]
    assert code == 0
    assert verdict["provisional"]
    assert verdict["basis"] == (
        "one pair against a stated run-to-run sd of 0.0212 % with 8 df, from an earlier study"
    )
    assert call(capsys, "judge", str(pair), "--json")[0] == 11
    code, _, error = call(capsys, "judge", str(pair), "--noise-from", str(floor), "--noise-sd", "0.1%")
    assert (code, "two answers to one question" in error) == (64, True)
    floor.write_text(call(capsys, "judge", str(pair), "--json")[1])
    code, _, error = call(capsys, "judge", str(pair), "--noise-from", str(floor))
    assert (code, "it has no noise floor" in error) == (64, True)


def test_judge_reads_a_tensorboard_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for seed in range(3):
        for arm, gap in (("bf16", 0.0), ("rowwise", 0.02 + seed / 1e4)):
            with SummaryWriter(str(tmp_path / f"{arm}_seed{seed}")) as writer:
                for step in range(10, 210, 10):
                    writer.add_scalar("validation/loss", (3.0 + 10 / step + seed / 100) * (1 + gap), step)
    code, text, _ = call(
        capsys, "judge", str(tmp_path), "--run-pattern", r"(?P<arm>\w+)_seed(?P<seed>\d+)", "--json"
    )
    verdict = json.loads(text)["verdicts"][0]
    assert (code, verdict["recipe"], verdict["outcome"], verdict["n_seeds"]) == (10, "rowwise", "WORSE", 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["plan"], "Missing argument"),
        (["fly"], "No such command"),
        (["plan", "absent.yaml"], "absent.yaml: cannot be read"),
        (["judge", "absent.csv"], "absent.csv: does not exist"),
        (["judge", "{tmp}"], "holds no run"),
        (["judge", "{csv}", "--margin", "lots"], "--margin: 'lots' is no fraction; write 0.0025 or 0.25%"),
        (
            ["judge", "{csv}", "--endpoint", "middle"],
            "endpoint: 'middle' is not known; write one of held_out",
        ),
        (["judge", "{csv}", "--preset", "litgpt"], "preset: 'litgpt' is not known; write one of"),
        (["judge", "{csv}", "--column", "loss"], "--column 'loss': write NAME=VALUE, such as loss=val_loss"),
        (["judge", "{csv}", "--run-pattern", "x"], "run pattern: 'x' needs the groups"),
        (["report", "{tmp}"], "study.json: cannot be read"),
        (["train", "{tmp}"], "spec.json: cannot be read"),
        (["data", "pack", "absent.txt", "--out", "{tmp}/x.bin"], "absent.txt: no such file or folder"),
        (["run", str(DEMO), "--out", "{csv}"], "c.csv: File exists; give another path"),
        (["run", str(DEMO), "--out", "{csv}/below"], "Not a directory; give another path"),
        (["data", "pack", "{csv}", "--out", "{tmp}/x.txt"], "a token file ends in .bin"),
    ],
)
def test_bad_usage_is_one_line_and_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    csv = csv_of(tmp_path / "c.csv", {0: 0.1})
    filled = [a.replace("{tmp}", str(tmp_path)).replace("{csv}", str(csv)) for a in arguments]
    code, out, err = call(capsys, *filled)
    assert (code, out) == (64, "")
    assert reason in err
    assert err.startswith("fp8parity: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("key", ["base.train.device", "axes.train.device"])
def test_a_missing_gpu_is_said_with_its_line_before_anything_is_written(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(study_run, "_GPU_NODES", ())
    given = {"axes": {"train.device": ["cuda"], "precision.recipe": ["rowwise"]}}
    path = write_recipe({"base": {"train": {"device": "cuda"}}} if key.startswith("base") else given)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "device" in text)
    out = tmp_path / "out"
    code, said, err = call(capsys, "run", path, "--out", out)
    assert (code, said) == (64, "")
    if key.startswith("base"):
        assert err.startswith(f"fp8parity: {path}:{line}: {key}: cuda, and no GPU is visible here")
    else:
        assert f"{key}: cuda, and no GPU is visible here" in err
    assert not out.exists()


def test_recipe_errors_are_64_with_lines(
    write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe({"base": {"optim": {"lrr": 1}}})
    code, _, err = call(capsys, "plan", str(path))
    assert code == 64
    assert re.search(r"recipe.yaml:\d+: base.optim.lrr: unknown key; did you mean 'lr'\?", err)


def test_plan_json_lists_every_error(write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe({"base": {"optim": {"lrr": 1}, "model": {"dim": 33}}})
    code, out, err = call(capsys, "plan", str(path), "--json")
    errors = json.loads(out)["errors"]
    assert (code, len(errors)) == (64, len(err.splitlines()))
    assert len(errors) > 1
    assert any("base.optim.lrr: unknown key" in line for line in errors)


@pytest.mark.parametrize(
    "arguments",
    [
        ("judge", "nowhere.csv"),
        ("judge", "nowhere.csv", "--margin", "-1"),
        ("status", "nowhere"),
        ("status", "nowhere", "--no-such-option"),
        ("selftest", "--recipe", "no_such_recipe"),
    ],
    ids=" ".join,
)
def test_json_of_a_refusal_is_one_document(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *arguments, "--json")
    document = json.loads(out)
    assert (code, document["schema_version"]) == (64, 1)
    assert document["errors"]
    assert [f"fp8parity: {line}" for line in document["errors"]] == err.splitlines()


def test_unreadable_run_directory(lay_out: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lay_out()
    broken = next((tmp_path / "study" / "runs").iterdir()) / schema.SPEC_FILE
    broken.write_text("{half")
    code, _, err = call(capsys, "judge", str(tmp_path / "study"))
    assert code == 64
    assert f"{broken}: is not JSON" in err


def test_data_pack_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join(f"paragraph number {i}" for i in range(200)))
    code, out, _ = call(capsys, "data", "pack", str(text), "--out", str(tmp_path / "t.bin"))
    assert code == 0
    assert "200 documents, vocabulary 257" in out
