"""The documents: links lead somewhere, commands exist, nothing names a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8parity import matrix
from fp8parity.cli import app
from fp8parity.plan import plan_document
from fp8parity.status import RunStatus, study_status

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


def json_block(command: str) -> set[str]:
    """The keys that docs/run-directory.md gives for `command --json`."""
    page = (ROOT / "docs/run-directory.md").read_text()
    block = page.split(f"`{command} --json`")[1].split("```")[1]
    return set(re.findall(r'"(\w+)"', block))


def test_documented_keys_of_plan_are_its_keys() -> None:
    document = plan_document(matrix.read(ROOT / "recipes/demo_cpu.yaml"))
    inner = set(document["arms"][0]) | set(document["detection"])
    assert json_block("plan") == set(document) | inner


def test_documented_keys_of_status_are_its_keys(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"name": "s", "runs": []}')
    document = study_status(tmp_path)
    assert json_block("status") == set(document) | set(document["launcher"]) | set(RunStatus.__annotations__)
