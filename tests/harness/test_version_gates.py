from __future__ import annotations

from typing import Any

import pytest

from fp8parity.spec import RunSpec
from fp8parity.version_gates import version_problems


def spec(recipe: str = "rowwise", backend: str = "torchao_float8", compile_mode: str = "off") -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": "0.7m"},
            "data": {},
            "optim": {"lr": 1e-3},
            "train": {"steps": 10, "batch_size": 4, "context": 16, "eval_every": 5, "compile": compile_mode},
            "precision": {"recipe": recipe, "backend": backend},
            "seed": 0,
        }
    )


@pytest.mark.parametrize(
    ("versions", "run", "device", "expected"),
    [
        (
            ("2.11.0+cu130", "0.18.0"),
            {"recipe": "rowwise"},
            "cpu",
            "on a CPU needs torch >= 2.13, this is 2.11.0",
        ),
        (("2.11.0+cu130", "0.18.0"), {"recipe": "rowwise"}, "cuda", None),
        (("2.11.0", "0.18.0"), {"recipe": "rowwise", "backend": "reference"}, "cpu", None),
        (("2.11.0", "0.18.0"), {"recipe": "tensorwise"}, "cpu", None),
        (("2.13.0+cpu", "0.18.0"), {"recipe": "rowwise"}, "cpu", None),
        (("2.13.0", "0.17.0"), {"compile_mode": "blocks"}, "cuda", "needs torchao >= 0.18, this is 0.17.0"),
        (("2.13.0", "0.17.0"), {"compile_mode": "off"}, "cuda", None),
        (
            ("2.13.0+rocm6.4", "0.18.0"),
            {"recipe": "tensorwise"},
            "cuda",
            "not supported on AMD GPUs",
        ),
        (("2.13.0+rocm6.4", "0.18.0"), {"recipe": "rowwise", "backend": "reference"}, "cuda", None),
        (("2.13.0+rocm6.4", "0.18.0"), {"recipe": "rowwise"}, "cpu", None),
        (("2.12.0", "0.17.0"), {"compile_mode": "blocks"}, "cuda", None),
        (("2.13.0", "0.17.0"), {"recipe": "bf16", "compile_mode": "blocks"}, "cuda", None),
        (
            ("2.11.0", "0.18.0"),
            {"recipe": "blockwise_requant", "backend": "reference", "compile_mode": "blocks"},
            "cuda",
            "elements cast twice lie on ties; write compile: off",
        ),
        (("2.11.0", "0.18.0"), {"recipe": "blockwise_requant", "backend": "reference"}, "cuda", None),
        (
            ("2.11.0", "0.18.0"),
            {"recipe": "blockwise_requant", "backend": "reference", "compile_mode": "blocks"},
            "cpu",
            None,
        ),
        (("none", "none"), {}, "cpu", None),
    ],
)
def test_known_bad_pairs(
    versions: tuple[str, str], run: dict[str, Any], device: str, expected: str | None
) -> None:
    problems = version_problems({"torch": versions[0], "torchao": versions[1]}, spec(**run), device)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert expected in problems[0]
