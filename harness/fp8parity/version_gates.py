"""Pairs of versions that are known to go wrong, refused by name before anything trains. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from fp8parity.spec import PrecisionSpec, RunSpec

CPU_ROWWISE_TORCH = Version("2.13")
"""First tested torch whose CPU `_scaled_mm` takes one scale per row; 2.11 was tried and takes one per tensor only."""

MISCOMPILING_TORCH = Version("2.13")
"""First torch whose Inductor emits the min/max form that makes compiled FP8 kernels produce NaN on a GPU now and then
(torchao issue 4652); torchao patches it from `PATCHED_TORCHAO` on."""

PATCHED_TORCHAO = Version("0.18")

EMULATED_TWICE = "blockwise_requant"
"""Its reference backend casts an operand a second time, from the FP8 copy: many elements then lie on a tie, where the
2 ulp that a compiled fp32 division may be off on CUDA decide. On an H200 0.2 % of a weight gradient's entries were
beyond what the exact arithmetic allows; with a float64 division Inductor of torch 2.11 compiles nothing."""

AMD_REFUSED = (
    "precision.backend: {backend} is not supported on AMD GPUs (ROCm): MI300 multiplies float8_e4m3fnuz, whose casts "
    "are not those of any recipe here; write backend: reference, which emulates e4m3fn and e5m2 on any device"
)

_ROWWISE = ("rowwise", "rowwise_with_gw_hp")


def _version(versions: Mapping[str, str], name: str) -> Version | None:
    text = versions.get(name, "none")
    return None if text == "none" else Version(Version(text).public)


def version_problems(versions: Mapping[str, str], spec: RunSpec, device_type: str) -> list[str]:
    """Return why this run cannot be trusted with these packages on `device_type` (cpu or cuda); empty: no known reason.

    `versions` is `environment.package_versions()`.
    """
    return precision_problems(versions, spec.precision, device_type, compiled=spec.train.compile != "off")


def precision_problems(
    versions: Mapping[str, str], precision: PrecisionSpec, device_type: str, *, compiled: bool
) -> list[str]:
    """Return why this precision cannot be trusted, compiled or not; otherwise as `version_problems`."""
    torch, torchao = _version(versions, "torch"), _version(versions, "torchao")
    problems: list[str] = []
    if precision.is_bf16 or torch is None:
        return problems
    rowwise_kernel = precision.backend == "torchao_float8" and precision.recipe in _ROWWISE
    if rowwise_kernel and device_type == "cpu" and torch < CPU_ROWWISE_TORCH:
        problems.append(
            f"precision.recipe: {precision.recipe} with backend torchao_float8 on a CPU needs torch >= "
            f"{CPU_ROWWISE_TORCH}, this is {torch}; write backend: reference, or upgrade torch"
        )
    if (
        device_type == "cuda"
        and compiled
        and (precision.backend, precision.recipe) == ("reference", EMULATED_TWICE)
    ):
        problems.append(
            f"train.compile: blocks with precision.recipe {EMULATED_TWICE} on the reference backend is not exact "
            "on CUDA: a compiled division is off by up to 2 ulp, and elements cast twice lie on ties; "
            "write compile: off"
        )
    if device_type == "cuda" and precision.backend != "reference" and "rocm" in versions["torch"]:
        problems.append(AMD_REFUSED.format(backend=precision.backend))
    miscompiles = device_type == "cuda" and compiled
    if miscompiles and torch >= MISCOMPILING_TORCH and torchao is not None and torchao < PATCHED_TORCHAO:
        problems.append(
            f"train.compile: blocks with torch {torch} needs torchao >= {PATCHED_TORCHAO}, this is "
            f"{torchao}: compiled FP8 kernels would produce NaN now and then; upgrade torchao, or compile: off"
        )
    return problems
