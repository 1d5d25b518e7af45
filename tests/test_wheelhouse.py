"""The wheelhouse without a network: target tags, the empty torch, what is still missing, and the make target."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheelhouse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheelhouse", ROOT / "tools" / "wheelhouse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_platforms_run_from_the_targets_glibc_down(wheelhouse: ModuleType) -> None:
    tags = wheelhouse.platforms("aarch64", 28)
    assert tags[0] == "manylinux_2_28_aarch64"
    assert tags[-3:] == ["manylinux_2_17_aarch64", "manylinux2014_aarch64", "linux_aarch64"]
    assert "manylinux_2_34_aarch64" not in tags


def test_the_empty_torch_satisfies_the_constraint_and_sorts_above_the_real_one(
    wheelhouse: ModuleType, tmp_path: Path
) -> None:
    constraints = wheelhouse.CONSTRAINTS.read_text()
    version = wheelhouse.constrained("torch", constraints)
    stub = wheelhouse.write_stub(tmp_path, "torch", version)
    name, stub_version, _, _ = parse_wheel_filename(stub.name)
    assert name == "torch"
    assert stub_version > Version(version)
    assert SpecifierSet(f"=={version}").contains(stub_version)
    metadata = PathDistribution(zipfile.Path(stub, f"torch-{stub_version}.dist-info/"))
    assert metadata.version == str(stub_version)
    assert metadata.requires is None
    with pytest.raises(SystemExit, match="pins no nothing"):
        wheelhouse.constrained("nothing", constraints)


def wheel(folder: Path, name: str, *requires: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        text = "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n"
        archive.writestr(f"{name}-1.0.dist-info/METADATA", text)


def test_requirements_are_read_for_the_target_not_for_this_python(
    wheelhouse: ModuleType, tmp_path: Path
) -> None:
    wheel(tmp_path, "root", "a[fast]", "torch", 'unwanted; extra == "never"', 'b; extra == "more"')
    wheel(
        tmp_path, "a", 'old; python_version < "3.10"', 'new; python_version >= "3.14"', 'c_c; extra == "fast"'
    )
    wheel(tmp_path, "b", 'arm; platform_machine == "aarch64"', "root")  # a ring ends too

    def missing(requirement: str, python: str, arch: str = "x86_64") -> list[str]:
        environment = wheelhouse.target_environment(python, arch)
        return sorted(map(str, wheelhouse.unmet(tmp_path, Requirement(requirement), environment, {"torch"})))

    assert missing("root", "3.12") == ['c_c; extra == "fast"']
    wheel(tmp_path, "c_c")
    assert missing("root", "3.12") == []
    assert missing("root", "3.14") == ['new; python_version >= "3.14"']
    assert missing("root[more]", "3.12", "aarch64") == ['arm; platform_machine == "aarch64"']


def test_python_of_the_make_target_is_the_target_machines() -> None:
    arguments = ["PYTHON=3.12", "EXTRAS=train,mlflow", "WITH_TORCH=1", "GLIBC=28"]
    # the tests themselves run under make, whose level and flags would show in what this one prints
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(
        ["make", "-n", "wheelhouse", *arguments],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "3.12 -m venv" not in shown
    words = shown[shown.index("tools/wheelhouse.py") :].replace("\\\n", " ").split()
    assert words[1:] == ["--extras", "'train,mlflow'", "--python", "3.12", "--glibc", "28", "--with-torch"]
