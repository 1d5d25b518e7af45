"""Mirror a study while it trains, from a process of its own: training never waits for MLflow and never sees it fail.

The launcher starts `python -m fp8parity_analysis.mlflow_follow DIR URI` and holds its standard input; when that
closes (the study ended, or the launcher was killed) the follower copies what is left and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.mlflow_mirror import MirrorResult, default_uri, mirror
from fp8parity_analysis.mlflow_sink import check_uri, require_mlflow

LOCAL = "local"
"""Stands for the sqlite file in the study directory."""
LOG_FILE = "mlflow.log"
INTERVAL_SECONDS = 10.0
GRACE_SECONDS = 60.0
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


@dataclass
class Follower:
    """Copies a study again and again; a failure is said once, and so are the recovery and a slow way of writing."""

    copy: Callable[[], MirrorResult]
    say: Callable[[str], None]
    failing: str = ""
    slow: str = ""

    def step(self) -> bool:
        """Copy what is new; return False when it failed. Whatever goes wrong is said in words, never raised."""
        try:
            slow_because = self.copy().slow_because
        except Exception as error:
            if not self.failing:
                self.say(f"the mirror is behind: {error}")
            self.failing = str(error) or type(error).__name__
            return False
        if self.failing:
            self.say("the mirror has caught up")
        if slow_because != self.slow:
            self.say(slow_because or "points are written straight into the sqlite file again")
        self.failing, self.slow = "", slow_because
        return True

    def follow(self, ended: Callable[[float], bool], interval: float = INTERVAL_SECONDS) -> bool:
        """Copy until `ended(seconds)` says so, then once more; return whether that last copy succeeded."""
        while not ended(interval):
            self.step()
        return self.step()


def _input_closed(seconds: float) -> bool:
    """Wait up to `seconds` for the launcher to close our standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1024)


def main(arguments: list[str]) -> int:
    """Follow a study directory; 0 when the last copy succeeded."""
    study_dir, uri = Path(arguments[0]), arguments[1]
    follower = Follower(lambda: mirror(study_dir, uri), lambda words: print(words, flush=True))
    return 0 if follower.follow(_input_closed) else 1


def target_of(study_dir: Path, uri: str) -> str:
    """Return the address that `--mlflow URI` means; `BadInputError` before any training when it cannot work."""
    require_mlflow()
    return default_uri(study_dir) if uri == LOCAL else check_uri(uri)


@contextlib.contextmanager
def followed(
    study_dir: Path, uri: str | None, warn: Callable[[str], None], *, grace: float = GRACE_SECONDS
) -> Iterator[None]:
    """Mirror `study_dir` in the background while the body runs; at its end wait at most `grace` seconds.

    Without `uri` nothing happens. Failure is one warning with the command that catches up, never an exception,
    except `BadInputError` before the body when mlflow is missing or the address is none.
    """
    if uri is None:
        yield
        return
    target = target_of(study_dir, uri)
    process = _start(study_dir, target)
    try:
        yield
    finally:
        problem = _finish(process, grace) if process else "its process could not be started"
        if problem:
            words = _last_words(study_dir) or problem
            warn(
                f"MLflow was not brought up to date ({words}); training was not affected. "
                f"Catch up with: fp8parity mlflow {study_dir} --uri {target}"
            )


def _start(study_dir: Path, target: str) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "fp8parity_analysis.mlflow_follow", str(study_dir), target]
    with contextlib.suppress(OSError):
        study_dir.mkdir(parents=True, exist_ok=True)
        with (study_dir / LOG_FILE).open("wb") as log:
            # Its own session: Ctrl-C is the launcher's business. Niced: never at the cost of a training process.
            return subprocess.Popen(
                ["nice", "-n", "10", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**_IMPATIENT, **os.environ},
            )
    return None


def _finish(process: subprocess.Popen[bytes], grace: float) -> str:
    """Let the follower make its last copy; return what is wrong, or nothing."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        code = process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no end within {grace:.0f} s"
    return "" if code == 0 else "it failed"


def _last_words(study_dir: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (study_dir / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        behind = [line for line in lines if line.startswith("the mirror is behind: ")]
        if behind:
            return behind[-1].removeprefix("the mirror is behind: ")
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInputError as error:
        sys.exit(str(error))
