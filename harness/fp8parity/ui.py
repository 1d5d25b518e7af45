"""Mirror a study into MLflow, serve it on loopback and open the chart page. Imports no torch and no mlflow."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from fp8parity.errors import Fp8ParityError
from fp8parity.process import stopping_with
from fp8parity_analysis.mlflow_mirror import MirrorResult, mirror
from fp8parity_analysis.mlflow_sink import QUIET, artifacts_beside
from fp8parity_analysis.mlflow_view import chart_path, table_path

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 15.0
LOG_FILE = "mlflow-server.log"


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Fp8ParityError(f"port {port}: {error.strerror}; give another --port") from error
    return port


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _command(uri: str, port: int) -> list[str]:
    artifacts = artifacts_beside(uri)
    root = ["--default-artifact-root", artifacts.as_uri()] if artifacts else []
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *root]
    return [*command, "--host", HOST, "--port", str(port), "--workers", "1"]


@contextlib.contextmanager
def server(study_dir: Path, uri: str, port: int | None = None) -> Iterator[str]:
    """Serve a tracking store on loopback and give its address; stopped with all its processes at the end.

    `Fp8ParityError` when the port is taken or the server does not answer within `START_SECONDS`.
    """
    number = _check_port(port) if port else free_port()
    address = f"http://{HOST}:{number}"
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **QUIET, **os.environ}
    with (study_dir / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            _command(uri, number),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait(process, address, study_dir / LOG_FILE)
        yield address
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _healthy(address):
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise Fp8ParityError(f"the MLflow server did not start: {' '.join(words)} (see {log})")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group: its workers are children of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def until_signal() -> None:
    """Block until Ctrl-C or SIGTERM."""
    stopped = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stopped.set()

    with stopping_with(note):
        stopped.wait()


def show(
    study_dir: Path,
    *,
    port: int | None,
    browser: bool,
    say: Callable[[str], None],
    wait: Callable[[], None] = until_signal,
) -> MirrorResult:
    """Mirror, serve, print and open the chart page, and serve on until `wait` returns."""
    result = mirror(study_dir)
    if result.slow_because:
        say(f"warning: {result.slow_because}")
    say(f"mirrored {result.runs} runs, {result.points_written:,} new points; starting the server")
    with server(study_dir, result.uri, port) as address:
        link = address + chart_path(result.experiment_id)
        say(f"charts by recipe: {link}")
        say(f"runs and verdicts: {address + table_path(result.experiment_id)}")
        say("Ctrl-C stops the server")
        if browser:
            webbrowser.open(link)
        wait()
    return result
