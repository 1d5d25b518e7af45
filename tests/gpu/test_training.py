"""Every recipe trained on the device it is meant for, eager and compiled, with the proof of what ran."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fp8parity import matrix, runner, study
from fp8parity.data import pack_bytes
from fp8parity_analysis.store import RunRecord, read_run

CELLS = {
    "tensorwise": "torchao_float8",
    "rowwise": "torchao_float8",
    "rowwise_with_gw_hp": "torchao_float8",
    "blockwise": "torchao_blockwise",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    words = [b"alpha", b"beta", b"gamma", b"delta", b"norm", b"scale", b"cast"]
    texts = [b" ".join(rng.choice(words) for _ in range(40)) + b" %d" % i for i in range(2000)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    pack_bytes(texts, path, held_out_fraction=0.1, source="test")
    return path


def train(tmp_path: Path, corpus: Path, recipe: str, **changes: Any) -> tuple[RunRecord, RunRecord]:
    """Train control and test of one seed; return (control, test)."""
    sizes = {"dim": 256, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 512}
    document = {
        "name": "gpu",
        "base": {
            "model": sizes,
            "data": {"source": "bin", "path": str(corpus)},
            "optim": {"lr": 0.002, "warmup_steps": 5},
            "train": {
                "steps": 60, "batch_size": 8, "context": 128, "eval_every": 20, "eval_sequences": 16,
                "device": "cuda", **changes.pop("train", {}),
            },
            "precision": {"recipe": recipe, "backend": CELLS[recipe], "keep": 4, **changes},
        },
        "seeds": [0],
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    plan = matrix.read(path)
    dirs = study.lay_out(plan, tmp_path / "out")
    for run_dir in dirs:
        runner.train(run_dir)
    control, test = (read_run(run_dir) for run_dir in dirs)
    return control, test


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each run has a process of its own in real life."""
    torch._dynamo.reset()


def assert_learned(run: RunRecord) -> None:
    loss = run.curve["train_loss"]
    assert loss.notna().all()
    assert loss.iloc[-5:].mean() < loss.iloc[:3].mean() - 1.0


@pytest.mark.parametrize("compile_mode", ["off", "blocks"])
@pytest.mark.parametrize("recipe", list(CELLS))
def test_recipe_trains_and_is_proven(tmp_path: Path, corpus: Path, recipe: str, compile_mode: str) -> None:
    control, test = train(tmp_path, corpus, recipe, train={"compile": compile_mode})
    assert control.manifest is not None
    assert test.manifest is not None
    gemms = 3 if recipe != "rowwise_with_gw_hp" else 2
    assert test.manifest["execution"]["proven"]
    assert test.manifest["execution"]["as_trained"] == gemms * 7
    assert control.manifest["execution"]["as_trained"] == 0
    assert control.manifest["init_digest"] == test.manifest["init_digest"]
    assert list(control.curve["batch_digest"]) == list(test.curve["batch_digest"])
    assert_learned(control)
    assert_learned(test)


@pytest.mark.parametrize("source", ["compute", "master"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_cast_source_accumulation_and_recomputation(
    tmp_path: Path, corpus: Path, source: str, accumulate: int
) -> None:
    _, test = train(
        tmp_path, corpus, "tensorwise", weight_cast_source=source,
        train={"accumulate": accumulate, "activation_checkpointing": True},
    )  # fmt: skip
    assert_learned(test)


def test_bf16_true(tmp_path: Path, corpus: Path) -> None:
    _, test = train(tmp_path, corpus, "rowwise", train={"compute": "bf16-true"})
    assert_learned(test)


def test_environment_names_the_gpu(tmp_path: Path, corpus: Path) -> None:
    control, _ = train(tmp_path, corpus, "tensorwise", train={"steps": 6, "eval_every": 6})
    assert control.manifest is not None
    assert control.manifest["environment"]["device"] == torch.cuda.get_device_name()
    assert control.manifest["environment"]["cuda"] == torch.version.cuda
