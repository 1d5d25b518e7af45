"""A browser for tests: headless Chromium driven by chromedriver over the WebDriver protocol, standard library only."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str:
    """Return which program is not installed, or nothing."""
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


@dataclass(frozen=True)
class Browser:
    """One session of chromedriver."""

    address: str

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._call("/url", {"url": url})

    def script(self, text: str) -> Any:
        return self._call("/execute/sync", {"script": text, "args": []})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("/screenshot")))

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int) -> None:
        """Give the page a window of exactly this size; Chromium's own has a least width."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def theme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._cdp("Emulation.setEmulatedMedia", features=features)

    def until(self, condition: Callable[[], Any], seconds: float = 300.0) -> Any:
        """Return the first true value of `condition`; fail with the page's text when time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                if found := condition():
                    return found
            time.sleep(0.25)
        raise AssertionError(f"not in {seconds} s; the page says: {self.text()[:2000]}")

    def text(self) -> str:
        return str(self.script("return document.body ? document.body.innerText : ''"))


@contextlib.contextmanager
def browser(profile: Path, width: int, height: int) -> Iterator[Browser]:
    """Start a browser with a fresh profile; everything it started ends with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        session = Browser(address)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if session._call("/status")["ready"]:
                    break
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.1)
        options = {"args": [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        made = session._call("/session", {"capabilities": {"alwaysMatch": wanted}})
        live = Browser(f"{address}/session/{made['sessionId']}")
        try:
            yield live
        finally:
            urllib.request.urlopen(urllib.request.Request(live.address, method="DELETE"), timeout=30).close()
    finally:
        driver.terminate()
        driver.wait(30)
