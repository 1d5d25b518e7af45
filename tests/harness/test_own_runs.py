"""Models of the user's, trained: paired, proven, probed and resumed as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8parity import runner
from fp8parity.errors import InterruptedRunError, UsageError
from fp8parity.judging import judge_study
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.store import RunWriter, read_run

LayOut = Callable[..., dict[str, Path]]

pytestmark = pytest.mark.usefixtures("own_root", "preflight_here")

DECODER_KEYS = dict.fromkeys(["dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"])
TRAIN = {"steps": 6, "eval_every": 3}


def changes(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    base = {
        "model": {**DECODER_KEYS, **model},
        "train": TRAIN,
        "precision": {"keep": 3},
        "optim": {"warmup_steps": 0},
    }
    return {
        "base": base,
        "axes": {"precision.recipe": ["rowwise"]},
        "seeds": [0],
        "probe": {"every": 3},
        "null": None,
        **sections,
    }


OWN = changes({"kind": "import", "target": "own_models:tied"})
HF_SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 272, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 272},
}  # fmt: skip


def hf(name: str) -> dict[str, Any]:
    return changes({"kind": "hf", "model_type": name, "overrides": HF_SIZES[name]})


def numbers(run_dir: Path) -> pd.DataFrame:
    return read_run(run_dir).curve.drop(columns="step_time")


@pytest.mark.parametrize("kind", ["import", "gpt2", "llama"])
def test_a_matrix_trains_pairs_and_is_judged(lay_out: LayOut, tmp_path: Path, kind: str) -> None:
    if kind != "import":
        pytest.importorskip("transformers", reason="needs the extra hf")
    dirs = lay_out(OWN if kind == "import" else hf(kind))
    assert {name: runner.train(path) for name, path in dirs.items()} == dict.fromkeys(dirs, 0)
    runs = {name: read_run(path) for name, path in dirs.items()}
    control, rowwise = runs["bf16-0"], runs["rowwise-0"]
    assert control.manifest is not None
    assert rowwise.manifest is not None
    assert rowwise.manifest["init_digest"] == control.manifest["init_digest"]
    assert list(rowwise.curve["batch_digest"]) == list(control.curve["batch_digest"])
    assert list(rowwise.curve["train_loss"]) != list(control.curve["train_loss"])
    assert rowwise.manifest["execution"]["proven"]
    # one FP8 layer has three FP8 GEMMs in a training step
    assert rowwise.manifest["execution"]["train"] == 3 * len(rowwise.manifest["conversion"]["converted"]) > 0
    model = rowwise.manifest["model"]
    assert ("own_models" in model["sources"]) if kind == "import" else model["packages"]["transformers"]
    assert rowwise.manifest["notes"] == []  # no probe gave up
    outcome = judge_study(tmp_path / "study", {}).verdicts[0].outcome
    assert outcome not in (schema.Outcome.INVALID, schema.Outcome.IDENTICAL)


def test_a_killed_run_resumes_to_the_same_numbers(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**OWN, "runtime": {"checkpoint_every": 2}}
    whole, killed = lay_out(settings, "whole")["rowwise-0"], lay_out(settings, "killed")["rowwise-0"]
    runner.train(whole)
    append, seen = RunWriter.append_curve, []

    def dying(self: RunWriter, rows: Any) -> None:
        append(self, rows)
        seen.extend(rows)
        if len(seen) >= 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunWriter, "append_curve", dying)
    with pytest.raises(InterruptedRunError, match="SIGINT received"):
        runner.train(killed)
    monkeypatch.setattr(RunWriter, "append_curve", append)
    assert runner.train(killed) == 0
    manifest = read_run(killed).manifest
    assert manifest is not None
    assert manifest["resumes"] == 1
    pd.testing.assert_frame_equal(numbers(whole), numbers(killed), check_exact=True)
    pd.testing.assert_frame_equal(read_run(whole).evals, read_run(killed).evals, check_exact=True)


def test_checkpointing_of_transformers_changes_no_number(lay_out: LayOut) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    settings = hf("llama")
    plain = lay_out(settings, "plain")["rowwise-0"]
    settings["base"]["train"] = {**TRAIN, "activation_checkpointing": True}
    recomputed = lay_out(settings, "recomputed")["rowwise-0"]
    for run_dir in (plain, recomputed):
        runner.train(run_dir)
    pd.testing.assert_frame_equal(numbers(plain), numbers(recomputed), check_exact=True)


def test_a_source_that_changed_since_the_study_was_laid_out_never_trains(
    lay_out: LayOut, own_root: Path
) -> None:
    run_dir = lay_out(OWN)["bf16-0"]
    path = own_root / "own_models.py"
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(UsageError, match="own_models changed since the study was laid out"):
        runner.train(run_dir)
    assert not (run_dir / schema.MANIFEST_FILE).exists()


def test_a_linear_that_is_never_called_stays_bf16_and_says_so(lay_out: LayOut) -> None:
    run_dir = lay_out(changes({"kind": "import", "target": "own_models:Idle"}))["rowwise-0"]
    runner.train(run_dir)
    skipped = read_json(run_dir / schema.MANIFEST_FILE)["conversion"]["skipped"]
    assert {"fqn": "attention.out_proj", "reason": "its own forward is never called"} in skipped
