from __future__ import annotations

import pytest

from fp8parity.devices import default_slots, visible_gpus


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        ("0,3", ["0", "3"]),
        (" 1 , 0", ["1", "0"]),
        ("GPU-8932f937,MIG-GPU-1/2/3", ["GPU-8932f937", "MIG-GPU-1/2/3"]),
        ("", []),
        ("-1", []),
        ("0,1,-1,2", ["0", "1"]),
        ("NoDevFiles", []),
        ("2,,3", ["2"]),
    ],
)
def test_the_variable_means_what_it_means_to_cuda(
    monkeypatch: pytest.MonkeyPatch, variable: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == seen


def test_hidden_gpus_make_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert default_slots("auto", threads=2, per_gpu=4) == 3
