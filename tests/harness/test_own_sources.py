from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from fp8parity.errors import UsageError
from fp8parity.own_sources import check_unchanged, import_target, locate, sources_of


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = write(
        tmp_path,
        net__model="import numpy\nfrom . import blocks\nfrom ..shared_bits import scale\n",
        net__blocks="import json\nimport helper_bits\n",
        shared_bits="scale = 1\n",
        helper_bits="def f():\n    import yaml\n",
        unrelated_bits="",
    )
    (root / "net" / "__init__.py").write_text("")
    (root / "net" / "model.py").write_text("import numpy\nfrom . import blocks\nimport shared_bits\n")
    return root


def test_everything_of_the_users_that_is_imported_counts_and_nothing_else(package: Path) -> None:
    found = sources_of("net.model:build", package)
    assert set(found.files) == {"net", "net.model", "net.blocks", "helper_bits", "shared_bits"}
    # imported inside a function, too; the standard library and the fingerprint's packages are not listed
    assert set(found.packages) == {"numpy", "PyYAML"}


def test_nothing_is_executed(tmp_path: Path) -> None:
    write(tmp_path, exploding_bits="raise SystemExit('executed')\n")
    assert set(sources_of("exploding_bits:build", tmp_path).files) == {"exploding_bits"}


def test_an_installed_target_brings_its_whole_package_and_version() -> None:
    found = sources_of("packaging.version:Version", Path())
    assert {"packaging", "packaging.version"} <= set(found.files)
    assert all(name.startswith("packaging") for name in found.files)
    assert "packaging" in found.packages


def test_the_same_content_elsewhere_is_the_same_source(package: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    for path in list(package.rglob("*.py")):
        copy = other / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert sources_of("net.model:build", other) == sources_of("net.model:build", package)


def test_a_change_in_an_imported_file_is_named(package: Path) -> None:
    before = sources_of("net.model:build", package)
    check_unchanged("net.model:build", package, before.files, before.packages)
    (package / "helper_bits.py").write_text("x = 2\n")
    with pytest.raises(UsageError, match=r"net\.model:build: helper_bits, PyYAML \(.*, now absent\) changed"):
        check_unchanged("net.model:build", package, before.files, before.packages)


def test_a_module_named_like_a_standard_one_counts_when_it_is_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, shadowing_bits="import code\nimport profile\nimport json\n", code="x = 1\n", json__a="")
    assert set(sources_of("shadowing_bits:build", tmp_path).files) == {"shadowing_bits", "code"}


def test_a_module_that_only_a_finder_knows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:  # as setuptools writes one for an editable install
        @classmethod
        def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
            return PathFinder.find_spec(name, [str(tmp_path / "src")]) if name == "editable_bits" else None

    write(tmp_path, using_bits="import editable_bits.inner\n", src__editable_bits__inner="x = 1\n")
    (tmp_path / "src" / "editable_bits" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    found = sources_of("using_bits:build", tmp_path)
    assert set(found.files) == {"using_bits", "editable_bits", "editable_bits.inner"}


def test_the_current_folder_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, here__current_bits="", recipe__beside_bits="")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(UsageError, match="there is no module 'current_bits'"):
        sources_of("current_bits:build", tmp_path / "recipe")


def test_a_missing_module_and_one_that_is_no_python_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no module 'nowhere_bits'"):
        sources_of("nowhere_bits:build", tmp_path)
    write(tmp_path, broken_bits="def f(:\n")
    with pytest.raises(UsageError, match=r"broken_bits\.py:1: .*cannot be imported"):
        sources_of("broken_bits:build", tmp_path)


def test_the_recipes_folder_comes_first_on_the_path(tmp_path: Path) -> None:
    write(tmp_path, packaging="x = 1\n")
    assert locate("packaging", [str(tmp_path), *sys.path]) == tmp_path / "packaging.py"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("target_bits:nothing", "target_bits has no 'nothing'"),
        ("target_bits:number", "is no function but a int"),
        ("json:dumps", "another module 'json' is in use"),
    ],
)
def test_a_target_that_cannot_be_called_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, target_bits="number = 1\n", json="dumps = print\n")
    with pytest.raises(UsageError, match=reason):
        import_target(target, tmp_path)
