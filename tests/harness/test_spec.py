from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fp8parity.presets import PRESETS
from fp8parity.spec import ModelSpec, PrecisionSpec, RunSpec, TrainSpec

BIN = {"source": "bin", "path": "x.bin"}
RUN: dict[str, Any] = {
    "model": {"preset": "0.7m"},
    "data": {},
    "optim": {"lr": 1e-3},
    "train": {"steps": 10, "batch_size": 4, "context": 16, "eval_every": 5},
    "precision": {"recipe": "rowwise"},
    "seed": 0,
}


def test_hash_is_frozen() -> None:
    # A changed value here renames every run that anyone has stored: raise SPEC_VERSION on purpose, or do not.
    assert RunSpec.model_validate(RUN).hash()[:16] == "97d254003135c871"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "init_std", 0.01),
        ("data", "max_mib", 3.0),
        ("optim", "lr", 2e-3),
        ("train", "compile", "blocks"),
        ("precision", "weight_cast_source", "master"),
    ],
)
def test_every_section_is_in_the_hash(section: str, key: str, value: Any) -> None:
    changed = {**RUN, section: {**RUN[section], key: value}}
    assert RunSpec.model_validate(changed).hash() != RunSpec.model_validate(RUN).hash()


def test_preset_is_filled_and_overridden() -> None:
    model = ModelSpec.model_validate({"preset": "0.7m", "n_layers": 7})
    assert (model.dim, model.n_layers, model.label) == (128, 7, "0.7m")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_legal_for_block_scaling(preset: str) -> None:
    model = ModelSpec.model_validate({"preset": preset})
    head_dim = model.dim // model.n_heads
    assert not [size for size in (model.dim, model.ffn_dim, model.n_kv_heads * head_dim) if size % 64]


def test_yaml_booleans() -> None:
    train = {"steps": 10, "batch_size": 4, "context": 16, "eval_every": 5}
    assert TrainSpec.model_validate({**train, "compile": False}).compile == "off"
    with pytest.raises(ValidationError, match="compile"):
        TrainSpec.model_validate({**train, "compile": True})
    with pytest.raises(ValidationError, match="got the boolean true"):
        PrecisionSpec.model_validate({"recipe": "rowwise", "keep_first": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": "0.7m", "n_heads": 3}}, "dim 128 is not divisible by n_heads 3"),
        ({"model": {"preset": "0.7m", "n_kv_heads": 3}}, "n_heads 4 is not divisible by n_kv_heads 3"),
        ({"model": {"preset": "9z"}}, "unknown preset '9z'; known: 0.7m"),
        ({"train": {**RUN["train"], "accumulate": 3}}, "batch_size 4 is not divisible by accumulate 3"),
        ({"train": {**RUN["train"], "eval_every": 11}}, "eval_every 11 is larger than steps 10"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 10}}, "warmup_steps 10 is not below train.steps 10"),
        ({"optim": {"lr": float("nan")}}, "greater than 0"),
        ({"data": {"source": "bin"}}, "source: bin needs path"),
        ({"data": {"path": "x.bin"}}, "path and sha256 belong to source: bin"),
        ({"data": {**BIN, "held_out_fraction": 0.2}}, "held_out_fraction has no effect .*pack it again"),
        ({"data": {**BIN, "max_mib": 3}}, "max_mib has no effect on source: bin.*leave it out"),
        ({"data": {**BIN, "scope": "environment"}}, "scope has no effect on source: bin"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate({**RUN, **changes})


def test_a_stored_run_on_a_bin_file_states_the_defaults_and_is_read_again() -> None:
    spec = RunSpec.model_validate({**RUN, "data": BIN})
    assert RunSpec.model_validate(spec.canonical()) == spec


def test_vocabulary_is_rounded_up_or_refused() -> None:
    assert ModelSpec.model_validate({"preset": "0.7m"}).resolve_vocab(257) == 272
    assert ModelSpec.model_validate({"preset": "0.7m", "vocab_size": 300}).resolve_vocab(257) == 300
    with pytest.raises(
        ValueError, match="vocab_size 100 is smaller than the data's vocabulary 257; write vocab_size: 272"
    ):
        ModelSpec.model_validate({"preset": "0.7m", "vocab_size": 100}).resolve_vocab(257)


def test_specs_are_frozen() -> None:
    spec = RunSpec.model_validate(RUN)
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 3  # type: ignore[misc]
