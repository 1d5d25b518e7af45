"""The tutorial's recipe file, as it stands there: it is planned as it says, on the text that it packs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fp8parity import matrix
from fp8parity.cli import main
from fp8parity.plan import plan_document
from fp8parity.token_meta import read_meta

ROOT = Path(__file__).parents[2]


def test_the_recipe_of_the_tutorial_can_run_on_the_text_it_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    found = re.search(r"fp8parity (data pack .*) --out text\.bin\n", text)
    assert found
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(found[1]), "--out", str(tmp_path / "text.bin")])
    recipe = next(block for block in text.split("```yaml") if "path: text.bin" in block).partition("```")[0]
    (tmp_path / "mine.yaml").write_text(recipe)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = matrix.read(tmp_path / "mine.yaml")
    meta, train = read_meta(tmp_path / "text.bin"), plan.runs[0].spec.train
    assert (meta.n_tokens - meta.train_tokens - 1) // train.context >= train.eval_sequences
    shown = next(block for block in text.split("```") if "text.bin holds" in block)
    of_the_text = re.compile(r"text\.bin holds .*? times\.")  # its counts move with the sources
    words = " ".join(plan_document(plan)["words"])
    assert of_the_text.search(words)
    assert of_the_text.sub("", " ".join(shown.split())) == of_the_text.sub("", words)
