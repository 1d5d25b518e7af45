"""Which source files a function of the user's consists of, and their digests: read as text, nothing is executed.

Of `package.module:function` it is the module's file, and every module that it imports, directly or not, that is the
user's own: beside the recipe file, elsewhere on the path outside the installed packages, or of the target's own
package. Installed packages count by their version. What is imported under a computed name is not seen.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from fp8parity.errors import UsageError

_OURS = ("fp8parity", "fp8parity_analysis")

IN_FINGERPRINT = ("torch", "torchao", "lightning", "triton")
"""Packages whose versions the environment's fingerprint holds already."""


FOR_USERS_CODE = {"PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
"""Environment of every process that may import the user's code: `python -m` would also look in the current folder,
which the command `fp8parity` does not, so what one finds the other might not. And a set of names, from which a model
may register its layers, has one order everywhere: else arms begin with other weights, and a resumed optimizer, which
knows parameters by their place, gives the moments of one to another."""


@dataclass(frozen=True)
class Sources:
    """`files`: sha256 by module name; `packages`: version by name of what they import beside the standard library."""

    files: dict[str, str]
    packages: dict[str, str]


def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple(Path(paths[name]).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib"))


def _is_installed(path: Path) -> bool:
    resolved = path.resolve()
    return "site-packages" in resolved.parts or any(
        resolved.is_relative_to(root) for root in _installed_roots()
    )


def _found_elsewhere(module: str) -> ModuleSpec | None:
    """Ask the finders beside the path's own about a top-level module: some editable installs bring one."""
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_spec"):
            try:
                spec = finder.find_spec(module, None)
            except (ImportError, ValueError):
                continue
            if spec is not None:
                return spec
    return None


def _shadows(module: str, root: Path) -> bool:
    """Whether a module beside the recipe file has the name of a standard one; a mere folder does not come first."""
    spec = PathFinder.find_spec(module, [str(root)])
    return spec is not None and spec.origin is not None


def locate(module: str, paths: Sequence[str]) -> Path | None:
    """Return the file of a module, its `__init__.py` for a package, without importing it; None if there is none."""
    search: Sequence[str] | None = paths
    origin: str | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None and depth == 0:
            spec = _found_elsewhere(parts[0])
        if spec is None:
            return None
        origin, search = spec.origin, list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None and Path(origin).is_file() else None


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the names that a file may import, `from` names included, since these may be modules."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")
                up = up[: len(up) - node.level + is_package]
                base = ".".join([*up, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: {error.msg}; this file cannot be imported") from error


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def search_path(root: Path) -> list[str]:
    """Return where modules are looked for: beside the recipe file first, and never the current folder as such."""
    return [str(root), *(entry for entry in sys.path if entry)]


def sources_of(target: str, root: Path) -> Sources:
    """Return the sources of `package.module:function`; `UsageError` when there is no such module.

    `root` is the recipe file's folder.
    """
    module = target.partition(":")[0]
    paths = search_path(root)
    if locate(module, paths) is None:
        raise UsageError(
            f"there is no module {module!r} in {root}, nor on Python's path; write package.module:function, "
            "with the module beside the recipe file or installed"
        )
    family = module.partition(".")[0]
    files: dict[str, str] = {}
    foreign: set[str] = set()
    queue, seen = _with_parents(module), set[str]()
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if name in seen or top in _OURS or (top in sys.stdlib_module_names and not _shadows(top, root)):
            continue
        seen.add(name)
        path = locate(name, paths)
        if top != family and (path is None or _is_installed(path)):
            foreign.add(top)
        elif path is not None:
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".py":
                queue += [one for found in _imports(path, name) for one in _with_parents(found)]
    return Sources(dict(sorted(files.items())), _versions(foreign | {family}))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _versions(modules: set[str]) -> dict[str, str]:
    names = {name for module in modules for name in _distributions().get(module, ())}
    return {name: metadata.version(name) for name in sorted(names) if name not in IN_FINGERPRINT + _OURS}


def import_target(target: str, root: Path) -> Any:
    """Import `package.module:function`, looking beside the recipe file first, and return the function.

    `UsageError` when there is none, or when another module of the same name was imported before.
    """
    module_name, _, attribute = target.partition(":")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    found: Any = importlib.import_module(module_name)
    wanted, loaded = locate(module_name, search_path(root)), Path(str(found.__file__))
    if wanted is not None and wanted.read_bytes() != loaded.read_bytes():
        raise UsageError(
            f"target: another module {module_name!r} is in use ({loaded.name} of {loaded.parent.name}); give yours "
            "another name"
        )
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"target: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"target: {target} is no function but a {type(found).__name__}")
    return found


def transformers_version() -> dict[str, str]:
    """Return the installed version of transformers, which decides a model's arithmetic; `UsageError` without one."""
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError as error:
        raise UsageError(
            "kind: hf needs the package transformers; install fp8parity with the extra hf"
        ) from error


def check_unchanged(target: str, root: Path, files: Mapping[str, str], packages: Mapping[str, str]) -> None:
    """Raise `UsageError` naming what is not as it was when the study was laid out."""
    now = sources_of(target, root)
    changed = sorted(name for name in {*files, *now.files} if files.get(name) != now.files.get(name))
    changed += [
        f"{name} ({packages.get(name, 'absent')}, now {now.packages.get(name, 'absent')})"
        for name in sorted({*packages, *now.packages})
        if packages.get(name) != now.packages.get(name)
    ]
    if changed:
        raise UsageError(
            f"{target}: {', '.join(changed)} changed since the study was laid out, so this would be another run; put "
            "it back, or run the recipe file with another --out directory"
        )
