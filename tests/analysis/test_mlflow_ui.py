"""`fp8parity ui` in a real browser: runs, grouped by recipe, curves drawn, verdict tags to be seen.

With FP8PARITY_SCREENSHOTS=DIR and FP8PARITY_STUDY=DIR the same test renews docs/images/mlflow-*.png from a real study.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fp8parity import ui
from fp8parity.errors import Fp8ParityError

from .browser import Browser, browser, missing
from .test_mlflow_mirror import write_study, write_verdicts

_LINES = "return document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line').length"


def study_of(tmp_path: Path) -> Path:
    """Return a study to show: small and synthetic, or a copy of the one that the environment names."""
    out = tmp_path / "out"
    if given := os.environ.get("FP8PARITY_STUDY"):
        shutil.copytree(given, out, ignore=shutil.ignore_patterns("mlflow*", "mlartifacts"))
        return out
    write_study(out, seeds=2)
    write_verdicts(out)
    return out


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("FP8PARITY_SCREENSHOTS"):
        from PIL import Image

        path = Path(folder) / f"mlflow-{name}.png"
        page.screenshot(path)
        with Image.open(path) as whole:  # without the assistant that MLflow opens on the right
            whole.crop((0, 0, 1276, whole.height)).save(path, optimize=True)


@pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
def test_charts_by_recipe_in_a_browser(tmp_path: Path) -> None:
    out = study_of(tmp_path)
    said: list[str] = []

    def look() -> None:
        link = next(words.split(": ", 1)[1] for words in said if words.startswith("charts by recipe"))
        table = next(words.split(": ", 1)[1] for words in said if words.startswith("runs and verdicts"))
        with browser(tmp_path / "profile", 1720, 1130) as page:
            page.open(link)
            page.until(lambda: page.script(_LINES) >= 2)
            text = page.until(lambda: "Group: recipe: " in page.text() and page.text())
            for words in (
                "Group by: recipe",
                "/s0/bf16",
                "/s0/bf16_null-r1",
                "Gap to BF16",
                "pair/gap_percent",
            ):
                assert words in text, words
            assert "fp8.verdict: " in text
            picture(page, "charts")
            page.open("about:blank")
            page.open(table)
            page.until(lambda: "fp8.verdict" in page.text())
            assert page.until(lambda: "WORSE" in page.text() or "INCONCLUSIVE" in page.text())
            picture(page, "verdicts")

    ui.show(out, port=None, browser=False, say=said.append, wait=look)
    address = said[1].split(": ", 1)[1].split("/#")[0]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=2)


def test_taken_port_is_an_error_in_words(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(Fp8ParityError, match=f"port {port}: .*give another --port"),
            ui.server(tmp_path, f"sqlite:///{tmp_path}/x.db", port),
        ):
            pass


def test_ui_of_no_study_is_64(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8parity", "ui", str(tmp_path), "--no-browser"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (64, 1)
    assert "study.json: cannot be read" in done.stderr


def test_compose_file_serves_this_projects_image_on_loopback() -> None:
    import yaml

    root = Path(__file__).parents[2]
    services = yaml.safe_load((root / "docker-compose.yaml").read_text(encoding="utf-8"))["services"]
    (service,) = services.values()
    assert service["build"] == "."
    assert service["entrypoint"] == ["mlflow", "server"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "--allowed-hosts" in service["command"]
    (mounted,) = [volume.partition(":")[2] for volume in service["volumes"]]
    assert mounted in (root / "Dockerfile").read_text()  # made there, so that the volume belongs to the user
