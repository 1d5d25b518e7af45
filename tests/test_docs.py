"""The documents: links lead somewhere, commands exist, nothing names a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8parity.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    known = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    known |= {group.name for group in app.registered_groups if group.name}
    for command in re.findall(r"^fp8parity ([a-z]+)", page.read_text(), flags=re.M):
        assert command in known, command


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_path_of_a_machine(page: Path) -> None:
    assert not re.findall(r"(?<![\w.$:/])/(?:home|root|tmp|work|Users)/\S*", page.read_text())
