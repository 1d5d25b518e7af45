"""A tiny corpus and a tiny recipe, so that a run takes a second."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .own_fixtures import own_request, own_root, preflight_here
from .stand_in import scripted

__all__ = ["own_request", "own_root", "preflight_here"]

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
# Read when torch is imported. Several threads for tensors this small cost several times the processor's time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY: dict[str, Any] = {
    "name": "tiny",
    "base": {
        "model": {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
        "data": {"source": "bin", "path": "corpus.bin"},
        "optim": {"lr": 0.003, "warmup_steps": 2},
        "train": {
            "steps": 24,
            "batch_size": 4,
            "context": 16,
            "eval_every": 3,
            "eval_sequences": 8,
            "bf16_gemm": "fp32_accumulate",
            "device": "cpu",
        },
        "precision": {"keep": 4},
    },
    "axes": {"precision.recipe": ["tensorwise", "rowwise"]},
    "seeds": [0, 1],
    "null": [{"kind": "reorder"}],
}


def documents(count: int, seed: int = 0) -> list[bytes]:
    """Return small pseudo-texts with some structure to learn."""
    rng = random.Random(seed)
    words = [b"alpha", b"beta", b"gamma", b"delta", b"norm", b"scale", b"cast"]
    return [b" ".join(rng.choice(words) for _ in range(40)) + b" %d" % i for i in range(count)]


@pytest.fixture(scope="session", autouse=True)
def _no_selftest_before_studies() -> Iterator[None]:
    """Studies of these tests train at once: the selftest has tests of its own, and costs seconds of imports."""
    from fp8parity import study_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "require_sound_arithmetic", lambda *args: None)
        yield


def passed_selftest(recipe: Path, out: Path) -> None:
    """Lay out a study and store that its selftest has passed, for launchers in processes of their own."""
    from fp8parity import matrix, selftest_gate, study
    from fp8parity_analysis.json_files import write_json

    plan = matrix.read(recipe)
    study.lay_out(plan, out)
    specs = [run.spec for run in plan.runs]
    key = selftest_gate.key_of(selftest_gate.subjects_of(specs), specs[0].train.device, [])
    write_json(out / selftest_gate.SELFTEST_FILE, {"key": key, "right": True})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed byte-level token file."""
    from fp8parity.data import pack_bytes

    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    pack_bytes(documents(200), path, held_out_fraction=0.2, source="test")
    return path


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with nested changes; None removes a key."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


WriteRecipe = Callable[..., Path]


@pytest.fixture
def write_recipe(tmp_path: Path, corpus: Path) -> WriteRecipe:
    """Return a function that writes the tiny recipe with changes beside its corpus."""

    def write(changes: dict[str, Any] | None = None, name: str = "recipe.yaml") -> Path:
        recipe = merged(TINY, {"base": {"data": {"path": str(corpus)}}})
        path = tmp_path / name
        path.write_text(yaml.safe_dump(merged(recipe, changes or {}), sort_keys=False))
        return path

    return write


@pytest.fixture
def lay_out(write_recipe: WriteRecipe, tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Return a function that lays out a study and gives its run directories by `arm-seed`."""
    from fp8parity import matrix, study

    def lay(changes: dict[str, Any] | None = None, out: str = "study") -> dict[str, Path]:
        plan = matrix.read(write_recipe(changes))
        dirs = study.lay_out(plan, tmp_path / out)
        return {f"{run.arm}-{run.spec.seed}": path for run, path in zip(plan.runs, dirs, strict=True)}

    return lay


@pytest.fixture
def study_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Return a function that makes run directories whose worker follows a script, one action per attempt."""
    return scripted(tmp_path, monkeypatch)
