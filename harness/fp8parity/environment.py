"""The environment fingerprint: everything outside the specification that can change a number."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8parity.errors import UsageError
from fp8parity_analysis import schema
from fp8parity_analysis.json_files import read_json, write_json

NUMERICS_VERSION = 1
"""Raised by hand when a change to this program changes the numbers of a run with an unchanged specification."""

_PACKAGES = ("torch", "torchao", "lightning", "triton")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute, without importing them; a missing one is 'none'."""
    versions = {"numerics": str(NUMERICS_VERSION)}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def fingerprint(device_type: str) -> dict[str, str]:
    """Return the flat fingerprint of this process on `device_type` (cpu or cuda); imports torch."""
    import torch

    found = {**package_versions(), "machine": platform.machine(), "device_type": device_type}
    if device_type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    else:
        found["device"] = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return found


def provenance() -> dict[str, str]:
    """Return what is worth knowing but cannot change a number: Python and the operating system."""
    return {"python": platform.python_version(), "system": platform.platform()}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return `key: a != b` for every key whose value differs; a key one side lacks counts."""
    return [
        f"{key}: {a.get(key, 'absent')} != {b.get(key, 'absent')}"
        for key in sorted(set(a) | set(b))
        if a.get(key) != b.get(key)
    ]


def claim(study_dir: Path, environment: dict[str, str]) -> None:
    """Record the environment of a study, or raise `UsageError` when the study belongs to another one."""
    path = study_dir / schema.ENVIRONMENT_FILE
    if not path.exists():
        write_json(path, environment)
        return
    different = differences(read_json(path), environment)
    if different:
        raise UsageError(
            f"{path}: this study was begun in another environment ({'; '.join(different)}); runs of two environments "
            "are not comparable: use another --out directory"
        )


def check_packages(study_dir: Path) -> None:
    """Raise `UsageError` before any process is started when the installed packages are not the study's."""
    path = study_dir / schema.ENVIRONMENT_FILE
    if not path.exists():
        return
    recorded = read_json(path)
    installed = package_versions()
    different = differences({key: recorded.get(key) for key in installed}, installed)
    if different:
        raise UsageError(
            f"{path}: this study was begun with other packages ({'; '.join(different)}); "
            "install those, or use another --out directory"
        )
