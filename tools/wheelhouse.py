"""Collect the wheels that fp8parity needs on a machine without a network, for that machine's Python and platform.

    python tools/wheelhouse.py [--python 3.12] [--arch x86_64] [--extras train] [--with-torch] [--out wheelhouse]

pip itself resolves the versions, under constraints.txt and for the target, so nothing is listed by hand. torch is left
out unless asked for: GPU machines have a build that fits their driver, and its CUDA libraries are gigabytes. To the
resolver it is shown as an empty wheel of the constrained version, which is removed afterwards; what other packages
need is still collected. pip takes requirements that depend on the Python version as for the Python it runs on, so every
wheel's requirements are checked again for the target, and what is missing is fetched. docs/offline-install.md says how
to install from the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
SUMS = "SHA256SUMS"

GLIBC = range(39, 16, -1)
"""manylinux_2_39 down to 2_17; pip takes a wheel only of a platform that it is told."""

STUB_LABEL = "provided"
"""Local version of the empty torch: any release of the same number sorts below it, so the resolver prefers it."""


def platforms(arch: str, newest_glibc: int) -> list[str]:
    """Return the platform tags of a Linux machine with glibc 2.`newest_glibc`, best first."""
    tags = [f"manylinux_2_{minor}_{arch}" for minor in GLIBC if minor <= newest_glibc]
    return [*tags, f"manylinux2014_{arch}", f"linux_{arch}"]


def constrained(name: str, constraints: str) -> str:
    """Return the version that the text of a constraints file pins `name` to; `SystemExit` when it does not."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", constraints, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{CONSTRAINTS.name} pins no {name}")
    return found.group(1)


def write_stub(folder: Path, name: str, version: str) -> Path:
    """Write an empty wheel of `name` without requirements and return its path."""
    full = f"{version}+{STUB_LABEL}"
    info = f"{name}-{full}.dist-info"
    path = folder / f"{name}-{full}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {full}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def target_environment(python: str, arch: str) -> dict[str, str]:
    """Return the values of environment markers on the target."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": arch,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
    }


def requirements_of(wheel: Path) -> list[Requirement]:
    """Return what a wheel requires, optional requirements included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        message = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in message.get_all("Requires-Dist", [])]


def unmet(folder: Path, root: Requirement, environment: dict[str, str], have: set[str]) -> list[Requirement]:
    """Return what `root` needs on the target, directly or not, that neither `folder` nor `have` holds."""
    wheels = {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}
    queue, seen, missing = [root], set(), []
    while queue:
        wanted = queue.pop()
        name = canonicalize_name(wanted.name)
        extras = {"", *wanted.extras}
        if name in have or (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        if name not in wheels:
            missing.append(wanted)
            continue
        queue += [
            r
            for r in requirements_of(wheels[name])
            if r.marker is None or any(r.marker.evaluate({**environment, "extra": e}) for e in extras)
        ]
    return missing


def pip(*arguments: str) -> None:
    """Run pip of this interpreter; its own messages say what failed."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("wheelhouse: pip failed, see above; nothing was removed, run it again")


def build_own(out: Path) -> Path:
    """Build fp8parity's wheel into `out`; returns its path."""
    with tempfile.TemporaryDirectory() as folder:
        # hatchling is in the development environment, so building needs no network of its own
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, str(ROOT))
        (built,) = Path(folder).glob("fp8parity-*.whl")
        return Path(built.replace(out / built.name))


def collect(out: Path, options: argparse.Namespace) -> None:
    """Resolve and download everything into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()  # two versions of a package in one folder make an install ambiguous
    own = build_own(out)
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    for tag in platforms(options.arch, options.glibc):
        target += ["--platform", tag]
    extras = f"[{options.extras}]" if options.extras else ""
    wanted, have = [f"{own}{extras}"], set() if options.with_torch else {"torch"}
    with tempfile.TemporaryDirectory() as folder:
        if not options.with_torch:
            version = constrained("torch", CONSTRAINTS.read_text(encoding="utf-8"))
            target += ["--find-links", str(write_stub(Path(folder), "torch", version).parent)]
        while True:
            pip("download", *target, "--constraint", str(CONSTRAINTS), "--dest", str(out), *wanted)
            for stub in out.glob(f"torch-*+{STUB_LABEL}-*.whl"):
                stub.unlink()
            environment = target_environment(options.python, options.arch)
            missing = [str(r) for r in unmet(out, Requirement(f"fp8parity{extras}"), environment, have)]
            if not missing:
                return
            if set(missing) <= set(wanted):
                raise SystemExit(f"wheelhouse: pip did not bring {', '.join(missing)}")
            wanted += missing


def write_sums(out: Path) -> list[Path]:
    """Write the checksums of all wheels, in the format of sha256sum; returns the wheels."""
    wheels = sorted(out.glob("*.whl"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in wheels]
    (out / SUMS).write_text("".join(lines), encoding="utf-8")
    return wheels


def main(argv: list[str] | None = None) -> int:
    """Collect and say what is there."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=own, help="Python of the target machine (default: this one)")
    parser.add_argument("--arch", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument("--glibc", type=int, default=35, help="minor version of its glibc 2.x: ldd --version")
    parser.add_argument("--extras", default="train", help="comma-separated; empty for judging only")
    parser.add_argument("--with-torch", action="store_true", help="collect torch and its CUDA libraries too")
    parser.add_argument("--out", type=Path, default=ROOT / "wheelhouse")
    options = parser.parse_args(argv)
    collect(options.out, options)
    wheels = write_sums(options.out)
    size = sum(path.stat().st_size for path in wheels) / 2**20
    extras = f"[{options.extras}]" if options.extras else ""
    print(
        f"{len(wheels)} wheels, {size:.0f} MiB, for Python {options.python} on Linux {options.arch}: {options.out}"
    )
    print(
        f"there: python{options.python} -m pip install --no-index --find-links {options.out.name} 'fp8parity{extras}'"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
