"""The environment fingerprint: everything outside the specification that can change a number."""

from __future__ import annotations

import os
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

_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE", "TORCH_BLAS_PREFER_CUBLASLT", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_MULTI_KERNEL",
    "TORCHINDUCTOR_NATIVE_MATMUL", "TORCHINDUCTOR_DETERMINISTIC", "TORCHINDUCTOR_BATCH_INVARIANT",
    "TORCHINDUCTOR_SHAPE_PADDING", "TORCHINDUCTOR_USE_FAST_MATH", "TORCHINDUCTOR_ONLINE_SOFTMAX",
    "TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG",
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG", "TORCHINDUCTOR_SPLIT_REDUCTIONS",
    "TORCHINDUCTOR_PERSISTENT_REDUCTIONS", "TORCHINDUCTOR_COOPERATIVE_REDUCTIONS",
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION",
)  # fmt: skip
"""Environment variables by which cuBLAS, MKL, oneDNN and torch's compiler choose other kernels or other sums."""


def variables() -> dict[str, str]:
    """Return the environment variables that change arithmetic and are set; usually there is none."""
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


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
    return {**found, **variables()}


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
    """Raise `UsageError` before any process is started when packages or variables are not the study's."""
    path = study_dir / schema.ENVIRONMENT_FILE
    if not path.exists():
        return
    here = {**package_versions(), **variables()}
    recorded = {key: value for key, value in read_json(path).items() if key in here or key in _VARIABLES}
    different = differences(recorded, here)
    if different:
        raise UsageError(
            f"{path}: this study was begun with other packages or environment variables ({'; '.join(different)}); "
            "set or install those, or use another --out directory"
        )
