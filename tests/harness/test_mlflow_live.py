"""Training beside an MLflow server that is killed, unreachable, read-only or slow: the curves do not notice.

Real training on a CPU started with `--mlflow`, a real tracking server. Every study is compared bit by bit with one
that was trained without MLflow, and brought up to date afterwards with the command that the warning names.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8parity import cli, runner, study_run, ui
from fp8parity.launch import RunState
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json
from fp8parity_analysis.mlflow_content import RunContent
from fp8parity_analysis.mlflow_follow import followed
from fp8parity_analysis.mlflow_mirror import default_uri, mirror, read_contents
from fp8parity_analysis.store import read_runs

from .conftest import TINY, merged, passed_selftest

pytest.importorskip("mlflow")

SMALL = {"seeds": [0], "axes": {"precision.recipe": ["rowwise"]}, "criteria": {"margin": "5%"}}
Curves = dict[str, dict[str, bytes]]


def train_in_process(out: Path, run_dirs: list[Path], **options: Any) -> list[RunState]:
    return [
        RunState(p.name, "finished" if runner.train(p) == 0 else "diverged", 0, 0, None, None)
        for p in run_dirs
    ]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    path = tmp_path_factory.mktemp("live") / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged(merged(TINY, SMALL), {"base": {"data": {"path": str(corpus)}}})))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Curves:
    """Return the curves of the study trained without MLflow."""
    out = recipe.parent / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "launch", train_in_process)
        study_run.run_study(recipe, out, slots=1, any_verdict=True)
    return curves(out)


def curves(out: Path) -> Curves:
    """Return every number of every run but the clock's, as bytes."""
    found = {}
    for record in read_runs(out):
        frames = {"curve": record.curve.drop(columns="step_time"), "evals": record.evals}
        found[record.run_id] = {
            f"{kind}/{name}": frame[name].to_numpy().tobytes()
            if frame[name].dtype.kind in "if"
            else "\n".join(map(str, frame[name])).encode()
            for kind, frame in frames.items()
            for name in frame
        }
        assert len(record.curve) == TINY["base"]["train"]["steps"]
    return found


def contents(out: Path) -> list[RunContent]:
    return read_contents(out, read_json(out / schema.STUDY_FILE))


def in_mlflow(uri: str, experiment_id: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return each metric's history by (run name, metric), duplicates and all."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return {
        (run.info.run_name, name): [
            (p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)
        ]
        for run in client.search_runs([experiment_id])
        for name in run.data.metrics
    }


def assert_up_to_date(out: Path, uri: str) -> None:
    """What MLflow holds is what the disk holds, once, and another copy adds nothing."""
    again = mirror(out, uri)
    assert (again.runs_made, again.points_written) == (0, 0)
    wanted = {
        (run.name, name): list(zip(points.steps.tolist(), points.values.tolist(), strict=True))
        for run in contents(out)
        for name, points in run.series.items()
    }
    stored = in_mlflow(uri, again.experiment_id)
    assert {key: sorted(points) for key, points in stored.items()} == wanted


def warned(words: str, out: Path, uri: str) -> list[str]:
    """Return the arguments of the catching-up command that the only warning in `words` names."""
    (warning,) = [line for line in words.splitlines() if "warning: MLflow" in line]
    assert "training was not affected" in warning
    command = shlex.split(warning.split("Catch up with: fp8parity ", 1)[1])
    assert command == ["mlflow", str(out), "--uri", uri]
    return command


def call(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def beside(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Path, str]]:
    """Return a function that trains with `--mlflow URI` and gives the study and what was said on stderr."""
    monkeypatch.setattr(study_run, "launch", train_in_process)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")

    def run(uri: str) -> tuple[Path, str]:
        out = tmp_path / "study"
        assert call(["run", str(recipe), "--out", str(out), "--any-verdict", "--mlflow", uri]) == 0
        return out, capsys.readouterr().err

    return run


def patience(monkeypatch: pytest.MonkeyPatch, grace: float) -> None:
    """Wait at most `grace` seconds for the mirror when training has ended."""

    def mirrored(out: Path, uri: str) -> Any:
        return followed(
            out, uri, lambda words: print(f"fp8parity: warning: {words}", file=sys.stderr), grace=grace
        )

    monkeypatch.setattr(study_run, "_mirrored", mirrored)


def test_unreachable(alone: Curves, beside: Callable[..., tuple[Path, str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    out, said = beside(uri)
    assert curves(out) == alone
    assert "Connection refused" in said
    warned(said, out, uri)
    mirror(out)
    assert_up_to_date(out, default_uri(out))


def test_never_answers(
    alone: Curves, beside: Callable[..., tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # its backlog takes connections, nobody reads them
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        patience(monkeypatch, 5)
        out, said = beside(uri)
    assert curves(out) == alone
    warned(said, out, uri)


def test_read_only(
    alone: Curves,
    beside: Callable[..., tuple[Path, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)  # MLflow makes folders named like such an address where it stands
    store = tmp_path / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{store}").search_experiments()
    uri = f"sqlite:///file:{store}?mode=ro&uri=true"  # a root user writes to read-only files: sqlite itself is told
    out, said = beside(uri)
    assert curves(out) == alone
    assert "readonly database" in said
    warned(said, out, uri)
    mirror(out, f"sqlite:///{store}")
    assert_up_to_date(out, f"sqlite:///{store}")


class Tarpit:
    """A proxy that holds every answer back for `delay` seconds; `answered` is set by the first."""

    def __init__(self, target: str, delay: float) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target, self.delay, self.ended = (host, int(port)), delay, threading.Event()
        self.answered = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(self.target)
            for pair in ((client, server, 0.0), (server, client, self.delay)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, delay: float) -> None:
        try:
            while data := source.recv(1 << 16):
                if delay:
                    self.ended.wait(delay)
                    self.answered.set()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                one.close()

    def close(self) -> None:
        self.ended.set()
        self.listener.close()


def serve(folder: Path, stack: ExitStack, port: int) -> str:
    return stack.enter_context(ui.server(folder, f"sqlite:///{folder}/mlflow.db", port))


def points_in(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        return int(connection.execute("select count(*) from metrics").fetchone()[0])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "training ended before"
        assert time.monotonic() < deadline
        time.sleep(0.2)


def kill_group_of(port: int) -> None:
    """SIGKILL the server that listens on `port` with its workers."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"server" in words and str(port).encode() in words:
                os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)
                return
    raise AssertionError("no server to kill")


def test_killed_then_slow(
    alone: Curves,
    recipe: Path,
    tmp_path: Path,
    beside: Callable[..., tuple[Path, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kill the server once the first points are there, in the middle of training in processes of their own."""
    port, folder, killed = ui.free_port(), tmp_path / "server", tmp_path / "killed"
    folder.mkdir()
    passed_selftest(recipe, killed)
    with ExitStack() as stack:
        uri = serve(folder, stack, port)
        command = ["run", str(recipe), "--out", str(killed), "--slots", "1", "--any-verdict", "--mlflow", uri]
        training = subprocess.Popen(
            [sys.executable, "-m", "fp8parity", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(training.kill)
        wait_for(lambda: points_in(folder / "mlflow.db") > 0, training)
        kill_group_of(port)
        said = training.communicate(timeout=300)[1]
        assert training.returncode == 0, said
    assert curves(killed) == alone
    catch_up = warned(said, killed, uri)
    with ExitStack() as stack:
        assert serve(folder, stack, port) == uri
        assert call(catch_up) == 0
        assert_up_to_date(killed, f"sqlite:///{folder}/mlflow.db")

        slow = Tarpit(uri, 1.0)
        stack.callback(slow.close)
        patience(monkeypatch, 6)

        def until_answered(out: Path, run_dirs: list[Path], **options: Any) -> list[RunState]:
            """Train; end only once the mirror, whose imports may take longer than so short a study, is at work."""
            states = train_in_process(out, run_dirs, **options)
            assert slow.answered.wait(120)
            return states

        monkeypatch.setattr(study_run, "launch", until_answered)
        capsys.readouterr()
        out, said = beside(slow.uri)
        assert curves(out) == alone
        warned(said, out, slow.uri)
        mirror(out, uri)
        assert_up_to_date(out, f"sqlite:///{folder}/mlflow.db")
