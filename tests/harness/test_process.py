from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8parity import runner
from fp8parity.errors import InterruptedRunError
from fp8parity.process import PARENT_PID, end_with_parent, importing, sole_trainer
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run, read_stream

LayOut = Callable[..., dict[str, Path]]

PARENT = """
import os, pathlib, subprocess, sys
env = {**os.environ, "FP8PARITY_PARENT_PID": str(os.getpid())}
worker = subprocess.Popen([sys.executable, "-m", "fp8parity", "train", sys.argv[1]], env=env, start_new_session=True)
pathlib.Path(sys.argv[2]).write_text(str(worker.pid))
worker.wait()
"""


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_worker_does_not_outlive_its_launcher(lay_out: LayOut, tmp_path: Path) -> None:
    changes = {"base": {"train": {"steps": 4000, "eval_every": 1000}}}
    run_dir = lay_out(changes)["tensorwise-0"]
    pid_file = tmp_path / "pid"
    launcher = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run_dir), str(pid_file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stream = run_dir / schema.CURVE_STREAM
    wait_until(lambda: len(read_stream(stream, schema.CURVE_COLUMNS)) > 10)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    worker = int(pid_file.read_text())
    wait_until(lambda: not is_running(worker))
    written = list(read_run(run_dir).curve["step"])
    assert written == list(range(1, len(written) + 1))
    assert len(written) < 4000
    saved = sorted((run_dir / schema.CHECKPOINT_DIR).glob("*.ckpt"))
    assert saved[-1].name == f"step-{len(written):09d}.ckpt"


def test_two_processes_never_train_one_run(lay_out: LayOut) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 3}}})["bf16-0"]
    with (
        sole_trainer(run_dir),
        pytest.raises(InterruptedRunError, match="another process is training this run"),
        sole_trainer(run_dir, patience_seconds=0.0),
    ):
        pass
    assert runner.train(run_dir) == 0


def test_a_launcher_that_is_already_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getpid()))  # our own id is never our parent's
    with pytest.raises(InterruptedRunError, match="the launcher is gone"):
        end_with_parent()
    monkeypatch.delenv(PARENT_PID)
    end_with_parent()


HANGING = """
import os, signal, sys, time
from fp8parity import process
process.WATCH_SECONDS, process.GRACE_SECONDS = 0.05, 0.1
signal.signal(signal.SIGTERM, lambda *_: None)  # takes note, as a worker does, and never comes to the end of its step
process.end_with_parent()
print("hangs", flush=True)
time.sleep(600)
"""

PARENT_OF_HANGING = """
import os, subprocess, sys
env = {**os.environ, "FP8PARITY_PARENT_PID": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env).wait()
"""


def test_a_worker_that_hangs_is_ended_some_time_after_its_launcher() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", PARENT_OF_HANGING, HANGING], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"hangs\n"
    launcher.kill()
    # the pipe ends when the last process that holds it does
    assert launcher.communicate(timeout=60)[0] == b""


class TestImporting:
    @pytest.fixture(autouse=True)
    def _collector(self) -> Iterator[None]:
        yield
        gc.unfreeze()
        gc.enable()

    def test_the_collector_rests_and_forgets_what_was_imported(self) -> None:
        gc.unfreeze()
        with importing():
            assert not gc.isenabled()
            before = gc.get_freeze_count()
        assert gc.isenabled()
        assert (before, gc.get_freeze_count() > 1000) == (0, True)

    def test_it_works_again_after_an_import_that_fails(self) -> None:
        with pytest.raises(ImportError), importing():
            raise ImportError("no such module")
        assert gc.isenabled()

    def test_one_that_was_off_stays_off(self) -> None:
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled()
