from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8parity import matrix
from fp8parity.errors import UsageError
from fp8parity.plan import plan_document
from fp8parity.problems import nearest
from fp8parity.recipe_file import dotted_keys, parse_fraction
from fp8parity.yaml_marks import load

GOOD = """\
base:
  model: {preset: 0.7m}
  optim: {lr: 1e-3}
  train: {steps: 10, batch_size: 8, context: 16, eval_every: 5, compile: off}
  precision: {keep: 4}
axes:
  precision.recipe: [tensorwise, rowwise]
seeds: [0, 1]
null:
  - kind: reorder
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def inner(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return path

    return inner


def errors_of(path: Path) -> list[str]:
    with pytest.raises(UsageError) as caught:
        matrix.read(path)
    return [line.replace(f"{path}:", "") for line in str(caught.value).splitlines()]


def test_yaml_traps_are_handled(write: Write) -> None:
    spec = matrix.read(write(GOOD)).runs[0].spec
    assert spec.optim.lr == 1e-3  # YAML 1.1 reads 1e-3 as a string
    assert spec.train.compile == "off"  # and a bare off as False
    assert [r.role for r in matrix.read(write(GOOD)).runs[:2]] == [
        "control",
        "null",
    ]  # and the key null as None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("preset: 0.7m", "preset: 0.7m, dimm: 3", "2: base.model.dimm: unknown key; did you mean 'dim'?"),
        ("lr: 1e-3", "lr: fast", "3: base.optim.lr: input should be a valid number"),
        ("lr: 1e-3", "lr: on", "3: base.optim.lr: expected a number, got the boolean true"),
        ("steps: 10", "steps: 10.5", "4: base.train.steps: input should be a valid integer"),
        ("steps: 10, ", "", "4: base.train.steps: is missing; add it"),
        ("compile: off", "compile: block", "4: base.train.compile: got 'block'; did you mean 'blocks'?"),
        ("rowwise]", "rowise]", "7: axes.precision.recipe.1: got 'rowise'; did you mean 'rowwise'?"),
        ("precision.recipe:", "precision.recipee:", "7: axes.precision.recipee: is no section.key of a run; did you"),
        ("[tensorwise, rowwise]", "[]", "6: axes: axis precision.recipe is empty; give it at least one value"),
        ("[tensorwise, rowwise]", "[bf16]", "7: axes.precision.recipe.0: bf16 is the control and is added by itself"),
        ("seeds: [0, 1]", "seeds: []", "8: seeds: "),
        ("seeds: [0, 1]", "seeds: [1, 1]", "8: seeds: seeds [1] stand twice"),
        ("seeds: [0, 1]", "seeds: [0, 1]\ncreteria: {}", "9: creteria: unknown key; did you mean 'criteria'?"),
        ("seeds: [0, 1]", "seeds: [0, 1]\nseeds: [2]", "9: seeds: written twice; keep one"),
        ("kind: reorder", "{kind: reorder, seeds: [4294967296]}", "10: null.0.seeds: seeds [4294967296] are beyond 2^"),
        ("[tensorwise, rowwise]", "[rowwise]\n  train.device: [cpu, cuda]", "8: axes.train.device: cpu, cuda in one"),
        ("seeds: [0, 1]", "include: [{precision.recipe: tensorwise, train.device: cpu}]\nseeds: [0]",
         "8: include.0.train.device: auto, cpu in one study"),
        ("kind: reorder", "kind: jiggle", "10: null.0.kind: got 'jiggle'"),
        ("seeds: [0, 1]", "seeds: [0]\ncriteria: {margin: 0.25 percent}", "9: criteria.margin: "),
        ("seeds: [0, 1]", "seeds: [0]\ncontrol: {precision.recipe: bf17}", "9: control.precision.recipe: got 'bf17'"),
        ("seeds: [0, 1]", "seeds: [0]\ncontrol: {precision.recipe: rowwise}", "9: control.precision.recipe: the con"),
        ("seeds: [0, 1]", "seeds: [0]\ncontrol: {optim.lr: 3}", "9: control.optim.lr: the control differs"),
        ("keep: 4", "keep: 8", "5: base.precision.keep_first: precision.keep_first 8, keep_last 8 (unit: gemm), inclu"),
        ("keep: 4", "exclude: ['*.gate']", "5: base.precision.exclude: precision.exclude: '*.gate' matches none"),
        ("batch_size: 8, context: 16", "batch_size: 3, context: 7", "7: axes.precision.recipe.0: blocks.1.attn.q_pro"),
        ("base:", "bass:", "1: base: is missing; add it"),
        ("  model:", "  modell: {}\n  model:", "2: base.modell: unknown section; did you mean 'model'?"),
        ("preset: 0.7m", "preset: 0.7m, vocab_size: 32", "2: base.model.vocab_size: vocab_size 32 is smaller than"),
    ],
)  # fmt: skip
def test_every_mistake_has_place_and_remedy(write: Write, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    found = errors_of(write(GOOD.replace(old, new, 1)))
    assert any(line.startswith(expected) for line in found), found


def test_all_mistakes_in_one_pass_and_in_order(write: Write) -> None:
    text = (
        GOOD.replace("preset: 0.7m", "presett: 0.7m")
        .replace("lr: 1e-3", "lr: -1")
        .replace("rowwise]", "rowwice]")
    )
    lines = errors_of(write(text))
    numbers = [int(line.partition(":")[0]) for line in lines]
    assert {2, 3, 7} <= set(numbers)
    assert numbers == sorted(numbers)
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: a recipe file is a mapping"),
        ("- a\n- b\n", ":1: a recipe file is a mapping"),
        ("base: {a: [}\n", ":1: not valid YAML"),
        ("a: 1\n b: 2\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(write: Write, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        matrix.read(write(text))


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x.yaml: cannot be read \(No such file or directory\)"):
        matrix.read(tmp_path / "x.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8"):
        matrix.read(tmp_path / "b.yaml")


@given(st.text(max_size=300))
def test_any_text_is_a_recipe_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError):
        matrix.read(path)


def test_lines_of_nested_values(write: Write) -> None:
    marked = load(write(GOOD))
    assert marked.line(("axes", "precision.recipe", 1)) == 7
    assert marked.line(("base", "train", "steps")) == 4
    assert marked.line(("base", "train", "absent", "deeper")) == 4


@pytest.mark.parametrize(("text", "value"), [("0.25%", 0.0025), (" 1 % ", 0.01), (0.5, 0.5), ("0.5", "0.5")])
def test_fractions(text: object, value: object) -> None:
    assert parse_fraction(text) == value


def test_dotted_keys_are_the_sections_fields() -> None:
    assert {"precision.recipe", "precision.keep", "optim.lr", "train.steps"} <= set(dotted_keys())


def test_nearest() -> None:
    assert nearest("cosin", ["cosine", "wsd"]).startswith("did you mean 'cosine'?")
    assert nearest("zzz", ["cosine", "wsd"]) == "known: cosine, wsd"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("base:", "name: 2026-11-31\nbase:", r"1: not valid YAML: day .*; put it in quotes"),
        (
            "base:",
            "description: 2026-13-01\nbase:",
            r"1: not valid YAML: month must be in 1..12; put it in quotes",
        ),
        ("seeds: [0, 1]", "seeds: &a [0, *a]", r"8: this value contains itself through an alias"),
        ("base:", "x: &a {y: *a}\nbase:", r"1: this value contains itself through an alias"),
        ("base:", "x: &a {<<: *a}\nbase:", r"1: this value contains itself through an alias"),
        ("steps: 10", "steps: " + "1" * 5000, r"4: not valid YAML: the number is beyond 2\^64 - 1"),
        ("steps: 10", "steps: 0x" + "f" * 5000, r"4: not valid YAML: the number is beyond 2\^64 - 1"),
        (
            "preset: 0.7m",
            "preset: 0.7m, vocab_size: 1" + "0" * 400,
            r"2: not valid YAML: the number is beyond",
        ),
        ("base:", "x: " + "[" * 5000 + "\nbase:", r"1: is nested too deeply"),
    ],
    ids=["date", "month", "list", "mapping", "merge", "digits", "hex", "vocabulary", "depth"],
)
def test_yaml_that_python_cannot_hold_is_one_line(write: Write, old: str, new: str, expected: str) -> None:
    (error,) = errors_of(write(GOOD.replace(old, new, 1)))
    assert re.match(expected, error), error


@pytest.mark.parametrize("key", ["vocab_size", "ffn_dim"])
def test_the_largest_number_is_planned_or_refused(write: Write, key: str) -> None:
    text = GOOD.replace("preset: 0.7m", f"preset: 0.7m, {key}: {2**64 - 16}", 1)
    with contextlib.suppress(UsageError):
        plan_document(matrix.read(write(text)))
