"""What ships: the image's steps, the wheel's contents, the constraints."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def dockerfile() -> list[tuple[str, str]]:
    """Return (instruction, argument) of each step, continuation lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    steps = []
    for line in lines:
        instruction, _, argument = line.partition(" ")
        assert instruction in {"FROM", "ARG", "ENV", "RUN", "USER", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}, (
            line
        )
        steps.append((instruction, argument))
    return steps


def test_image_is_pinned_and_runs_as_nobody_special() -> None:
    steps = dockerfile()
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", steps[0][1])
    users = [i for i, (name, _) in enumerate(steps) if name == "USER"]
    assert steps[users[-1]][1] not in ("root", "0")
    assert [name for name, _ in steps[users[-1] + 1 :]] == ["ENTRYPOINT", "CMD"]
    assert ("ENTRYPOINT", '["fp8parity"]') in steps
    assert any(name == "ARG" and argument.startswith("TORCH_INDEX") for name, argument in steps)


def test_image_copies_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [part for name, argument in dockerfile() if name == "COPY" for part in argument.split()[:-1]]
    assert {"harness", "analysis", "recipes", "constraints.txt"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name not in ignored


def test_image_installs_a_torch_that_the_project_allows_and_tested() -> None:
    (spec,) = [
        a.partition("=")[2].strip('"') for n, a in dockerfile() if n == "ARG" and a.startswith("TORCH_SPEC")
    ]
    assert spec in (ROOT / "constraints.txt").read_text().split()


def test_constraints_are_exact_and_inside_the_declared_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.version import Version

    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][^ ]*)", line)
        assert match, line
        pins[match[1].lower().replace("_", "-")] = Version(match[2])
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for text in [item for group in groups for item in group]:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        assert name in pins, f"{name} is declared and not pinned"
        assert pins[name] in requirement.specifier, text


def test_ranges_hold_on_a_gpu_node_with_torch_2_11() -> None:
    from packaging.requirements import Requirement

    torch = next(
        Requirement(r) for r in PROJECT["project"]["optional-dependencies"]["train"] if r.startswith("torch>")
    )
    assert all(torch.specifier.contains(v) for v in ("2.11.0", "2.12.0", "2.13.0"))
    assert not torch.specifier.contains("2.14.0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="the build backend is not installed beside the tests")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True
    )
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_two_packages_and_no_torch_requirement(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {n.split("/")[0] for n in names if not n.startswith("fp8parity-")} == {
        "fp8parity",
        "fp8parity_analysis",
    }
    assert "fp8parity_analysis/templates/report.html.j2" in names
    assert "fp8parity/py.typed" in names
    metadata = wheel.read(next(n for n in names if n.endswith("METADATA"))).decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert required
    assert not [line for line in required if "torch" in line or "lightning" in line]
