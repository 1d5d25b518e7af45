from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8parity import matrix, model_preflight, plan
from fp8parity.errors import UsageError
from fp8parity.own_spec import HfModelSpec, ImportModelSpec
from fp8parity.spec import RunSpec

from .conftest import WriteRecipe

DECODER_KEYS = dict.fromkeys(["dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"])


def own(target: str = "own_models:build", **model: Any) -> dict[str, Any]:
    return {"base": {"model": {**DECODER_KEYS, "kind": "import", "target": target, **model}}}


def hf(**model: Any) -> dict[str, Any]:
    overrides = {
        "vocab_size": 272, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    overrides |= model.pop("overrides", {})
    return {
        "base": {
            "model": {**DECODER_KEYS, "kind": "hf", "model_type": "gpt2", "overrides": overrides, **model}
        }
    }


def with_changes(changes: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**changes, "base": {**changes["base"], **sections}}


@pytest.fixture
def read(write_recipe: WriteRecipe, own_root: Path, preflight_here: list[dict[str, Any]]) -> Any:
    return lambda changes: matrix.read(write_recipe(changes))


def test_a_matrix_of_the_users_model(read: Any, preflight_here: list[dict[str, Any]]) -> None:
    found = read(with_changes(own(kwargs={"depth": 3}), precision={"keep": 3}))
    assert {run.arm for run in found.runs} == {"bf16", "bf16_null", "tensorwise", "rowwise"}
    assert {run.group for run in found.runs} == {"own_models.build"}
    assert len(preflight_here) == 1  # two cells, two seeds, one model
    document = plan.plan_document(found)
    arm = next(a for a in document["arms"] if a["arm"] == "rowwise")
    # enter | a b | down | a b | down | a b | down: of seven GEMMs three are kept at each end
    assert arm["fp8_linears"] == ["layers.1.a", "layers.1.b"]
    assert arm["parameters"] == 272 * 32 * 2 + (32 * 32 + 32) + 3 * (2 * (32 * 64 + 64) + 64 * 32 + 32)
    assert any("attention logits are not probed" in line for line in document["words"])


def test_the_identity_follows_the_sources_and_not_the_place(
    read: Any, own_root: Path, write_recipe: WriteRecipe
) -> None:
    changes = with_changes(own(), precision={"keep": 3})
    before = [run.run_id for run in read(changes).runs]
    assert [run.run_id for run in read(changes).runs] == before
    path = own_root / "own_models.py"
    path.write_text(path.read_text() + "\n# another comment, another source\n")
    del sys.modules["own_models"]  # each preflight has a process of its own; this one plays two
    after = [run.run_id for run in read(changes).runs]
    assert not set(before) & set(after)


def test_the_answer_is_kept_under_what_it_depends_on(
    read: Any, preflight_here: list[dict[str, Any]], own_root: Path
) -> None:
    changes = with_changes(own(), precision={"keep": 3})
    first = read(changes)
    model_preflight._asked.cache_clear()  # as in another process
    assert [r.run_id for r in read(changes).runs] == [r.run_id for r in first.runs]
    assert len(preflight_here) == 1
    for stored in (own_root / "cache" / "models").iterdir():
        stored.write_text("{")  # cut off
    model_preflight._asked.cache_clear()
    read(changes)
    assert len(preflight_here) == 2
    read(with_changes(own(kwargs={"depth": 4}), precision={"keep": 3}))
    assert len(preflight_here) == 3


def test_an_answer_depends_on_what_a_configuration_says_and_where_the_weights_are(tmp_path: Path) -> None:
    def keys(root: Path, text: str) -> str:
        folder = root / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("config.json", text), ("model.safetensors", "w")):
            (folder / name).write_text(content)
            os.utime(folder / name, ns=(1, 1))
        spec = HfModelSpec.model_validate({"kind": "hf", "weights": "weights"})
        return model_preflight._cache_key(spec, root, 8)

    first = keys(tmp_path / "a", '{"n": 1}')
    assert keys(tmp_path / "a", '{"n": 2}') != first  # of the same size and time
    assert keys(tmp_path / "b", '{"n": 1}') != first
    assert keys(tmp_path / "a", '{"n": 1}') == first


def test_the_inventory_is_not_hashed_and_travels_beside_the_specification(read: Any) -> None:
    run = read(with_changes(own(), precision={"keep": 3})).runs[0]
    model = run.spec.model
    assert isinstance(model, ImportModelSpec)
    assert "inventory" not in run.spec.canonical()["model"]
    assert run.spec.canonical()["model"]["sources"].keys() == {"own_models"}
    document = run.to_json("study", "data.bin", 5, "../..")
    assert document["model"]["recipe_dir"] == "../.."
    assert len(document["model"]["inventory"]["linears"]) == len(model.found.linears)
    bare = RunSpec.model_validate(document["spec"])
    assert bare.hash() == run.spec.hash()


@pytest.mark.parametrize(
    ("changes", "place", "reason"),
    [
        (own("own_models:NoLogits"), "base.model.target", "returns dict without logits"),
        (own("own_models:TwoNames"), "base.model.target", "are one and the same nn.Linear under several names"),
        (own("nowhere_bits:build"), "base.model.target", "there is no module 'nowhere_bits'"),
        (own("own_models:build", kwargs={"vocab": 64}), "base.model", "logits for 64 tokens, the data has 257"),
        (own("own_models"), "base.model.target", "string should match pattern"),
        (own(sources={"a": "b"}), "base.model.sources", "is found out by fp8parity; remove it"),
        (own(depth=3), "base.model.depth", "unknown key; known: "),
        ({"base": {"model": {"kind": "torchvision"}}}, "base.model.kind", "got 'torchvision'; known: decoder, import"),
        (
            with_changes(own("own_models:NoBlocks"), train={"compile": "blocks"}, precision={"keep": 0}),
            "base.train.compile", "blocks, but the model keeps its blocks in no nn.ModuleList",
        ),
        (
            with_changes(own("own_models:NoBlocks"), precision={"keep": 0, "unit": "block"}),
            "base.precision.unit", "write unit: gemm",
        ),
        (
            with_changes(own(), train={"activation_checkpointing": True}, precision={"keep": 3}),
            "base.train.activation_checkpointing", "has no method gradient_checkpointing_enable",
        ),
        (
            with_changes(own("own_models:Buffered"), train={"compute": "bf16-true"}, precision={"keep": 3}),
            "base.train.compute", "would round the model's buffers scale to bf16",
        ),
        (
            with_changes(own("own_models:OwnLinear"), precision={"keep": 0}),
            "base.precision.exclude", "layers.1.a is a Own with its own forward",
        ),
        (
            with_changes(own("own_models:hooked"), precision={"keep": 0}),
            "base.precision.exclude", "layers.1.down has a forward hook, which may change",
        ),
        (
            with_changes(own(kwargs={"width": 24}), precision={"keep": 0}),
            "precision.recipe", "enter: GEMM output has K = 24, not a multiple of 16",
        ),
        ({"base": {"model": {**DECODER_KEYS, "kind": "hf"}}}, "base.model", "give one of config, model_type and"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_with_its_place(
    read: Any, changes: dict[str, Any], place: str, reason: str
) -> None:
    with pytest.raises(UsageError) as error:
        read(changes)
    assert any(f"{place}" in line and reason in line for line in str(error.value).splitlines()), str(
        error.value
    )


def test_gpt2s_own_vocabulary_is_no_problem_until_its_head_is_to_be_fp8(read: Any) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    changes = hf(overrides={"vocab_size": 50257})
    found = read(with_changes(changes, precision={"keep": 4}))
    assert next(run for run in found.runs if run.arm == "rowwise").spec.model.found.vocab_size == 50257
    with pytest.raises(UsageError, match=r"lm_head: GEMM output has N = 50257, not a multiple of 16"):
        read(with_changes(changes, precision={"keep": 0, "convert_head": True}))


def test_dropout_of_a_configuration_is_refused_with_the_lines_to_write(read: Any) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    with pytest.raises(
        UsageError, match=r"model\.overrides: attn_pdrop is 0\.2: dropout makes .*attn_pdrop: 0\.0"
    ):
        read(hf(overrides={"attn_pdrop": 0.2}))


def test_neither_planning_nor_the_inventory_looks_in_the_current_folder(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(with_changes(own("current_bits:build"), precision={"keep": 3}))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "current_bits.py").write_text("")
    command = [sys.executable, "-m", "fp8parity", "plan", str(recipe)]
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command, cwd=tmp_path / "here", env=unset, capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "there is no module 'current_bits'" in done.stderr

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> None:
        assert (env["PYTHONSAFEPATH"], env["PYTHONHASHSEED"]) == ("1", "0")
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(model_preflight.subprocess, "run", run)
    with pytest.raises(UsageError, match="building the model took more than"):
        model_preflight._ask({})


def test_planning_builds_the_model_in_another_process_and_imports_no_torch(
    write_recipe: WriteRecipe, own_root: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(with_changes(own("own_models:Wrapped"), precision={"keep": 3}))
    code = (
        "import sys, pathlib; from fp8parity import matrix; m = matrix.read(pathlib.Path(sys.argv[1])); "
        "print(m.runs[0].spec.model.found.vocab_size, 'torch' in sys.modules, 'own_models' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["272", "False", "False"]
