from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8parity import environment
from fp8parity.errors import UsageError


def test_versions_are_the_imported_ones() -> None:
    import lightning

    found = environment.package_versions()
    assert found["torch"] == torch.__version__
    assert found["lightning"] == lightning.__version__
    assert found["numerics"] == str(environment.NUMERICS_VERSION)


def test_fingerprint_holds_what_changes_numbers() -> None:
    found = environment.fingerprint("cpu")
    assert set(found) >= {
        "torch",
        "torchao",
        "lightning",
        "triton",
        "numerics",
        "device",
        "device_type",
        "machine",
    }
    assert "python" not in found
    assert "python" in environment.provenance()


def test_a_study_belongs_to_the_environment_that_began_it(tmp_path: Path) -> None:
    here = environment.fingerprint("cpu")
    environment.claim(tmp_path, here)
    environment.claim(tmp_path, here)
    with pytest.raises(UsageError, match=r"torch: .* != 9.9; torchao: .* != absent"):
        environment.claim(tmp_path, {**{k: v for k, v in here.items() if k != "torchao"}, "torch": "9.9"})


def test_variables_that_change_sums_are_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.variables():
        monkeypatch.delenv(name)
    plain = environment.fingerprint("cpu")
    monkeypatch.setenv("MKL_CBWR", "")
    assert (
        environment.fingerprint("cpu") == plain
    )  # what is not set leaves no mark: stored runs compare equal
    environment.claim(tmp_path, plain)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here = environment.fingerprint("cpu")
    assert here == {**plain, "MKL_CBWR": "COMPATIBLE", "NVIDIA_TF32_OVERRIDE": "1"}
    with pytest.raises(
        UsageError, match=r"another environment \(MKL_CBWR: absent != COMPATIBLE; NVIDIA_TF32"
    ):
        environment.claim(tmp_path, here)
    with pytest.raises(UsageError, match=r"MKL_CBWR: absent != COMPATIBLE; .*set or install those"):
        environment.check_packages(tmp_path)


def test_differences_name_both_values() -> None:
    assert environment.differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == [
        "b: 2 != 3",
        "c: absent != 4",
    ]
