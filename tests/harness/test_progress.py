"""Life signs: what the worker writes while it runs, and how its end of the disk is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8parity import progress, runner
from fp8parity.module import LMModule
from fp8parity.progress import HEARTBEAT_FILE, Heartbeat, last_row, last_rows, life_signs, stage_of
from fp8parity.proof import prove
from fp8parity_analysis import schema


def test_a_worker_says_where_it_is(
    lay_out: Callable[..., dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 3}}})["bf16-0"]
    seen: dict[str, str] = {}
    step_of = LMModule.training_step

    def proving(*arguments: Any) -> Any:
        seen["prove"] = stage_of(run_dir)
        return prove(*arguments)

    def training(self: LMModule, batch: Any, batch_idx: int) -> Any:
        seen["train"] = stage_of(run_dir)
        return step_of(self, batch, batch_idx)

    monkeypatch.setattr("fp8parity.callbacks.prove", proving)
    monkeypatch.setattr(LMModule, "training_step", training)
    assert stage_of(run_dir) == "import"
    assert runner.train(run_dir) == 0
    assert seen == {"prove": "prove", "train": "train"}
    assert stage_of(run_dir) == "finish"
    progress.forget(run_dir)
    assert stage_of(run_dir) == "import"


def test_a_beat_renews_the_time_but_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fp8parity.progress.time.monotonic", lambda: now[0])
    heart = Heartbeat(tmp_path)
    heart.enter("train")
    os.utime(tmp_path / HEARTBEAT_FILE, ns=(1, 1))
    heart.beat()
    assert life_signs(tmp_path)[0] == 1
    now[0] += progress.BEAT_SECONDS
    heart.beat()
    assert life_signs(tmp_path)[0] > 1


def test_seconds_of_stages_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fp8parity.progress.time.monotonic", lambda: now[0])
    heart = Heartbeat(tmp_path)
    for stage, seconds in (("build", 2.0), ("prove", 3.0), ("build", 4.0), ("train", 50.0)):
        heart.enter(stage)  # type: ignore[arg-type]
        heart.beat()
        now[0] += seconds
    assert heart.seconds == {"build": 6.0, "prove": 3.0}  # training has not ended
    heart.enter("finish")
    assert heart.seconds == {"build": 6.0, "prove": 3.0, "train": 50.0}


def test_a_heartbeat_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "gone")
    heart.enter("train")
    heart.beat()
    assert life_signs(tmp_path / "gone") == (0, 0, 0, 0)


def test_half_a_heartbeat_is_none(tmp_path: Path) -> None:
    (tmp_path / HEARTBEAT_FILE).write_text('{"sta')
    assert stage_of(tmp_path) == "import"


def test_last_rows_of_a_stream_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / schema.CURVE_STREAM
    assert last_row(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in last_rows(path)] == [1, 2]
    path.write_text("".join(json.dumps({"step": i, "pad": "x" * 50}) + "\n" for i in range(500)))
    rows = last_rows(path)
    assert [row["step"] for row in rows] == list(range(500 - len(rows), 500))
    assert 10 < len(rows) < 100
    assert last_rows(path, 3) == rows[-3:]
