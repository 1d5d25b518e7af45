"""Fixtures for models of the user's: their module beside a recipe, and preflight in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8parity import model_preflight


@pytest.fixture
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with `own_models.py`, as a recipe's; importing from it leaves nothing behind."""
    shutil.copy(Path(__file__).with_name("own_models.py"), tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def own_request(own_root: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a request to the inventory."""

    def make(target: str, **kwargs: Any) -> dict[str, Any]:
        model = {"kind": "import", "target": target, "kwargs": kwargs}
        return {"model": model, "root": str(own_root), "context": 8}

    return make


@pytest.fixture
def preflight_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answer preflight requests in this process, which has torch already; returns the requests that were made."""
    from fp8parity.model_inventory import respond

    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return respond(request)

    monkeypatch.setenv(model_preflight.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(model_preflight, "_ask", answer)
    model_preflight._asked.cache_clear()
    return asked
