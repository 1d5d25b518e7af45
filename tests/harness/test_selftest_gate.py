"""`run` tests the arithmetic first: once per machine and packages, and refuses on a named fault."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fp8parity import matrix, selftest_gate, study_run
from fp8parity.cli import main
from fp8parity.errors import Fp8ParityError, KernelFaultError, UsageError
from fp8parity.selftest_gate import SELFTEST_FILE, require_sound_arithmetic, subjects_of
from fp8parity.spec import RunSpec

from .conftest import WriteRecipe

FAULT = {
    "name": "k-tail",
    "gemm": "output",
    "case": "M 144 K 2064 N 272",
    "words": "w",
    "text": "GEMM output: k-tail: the last, incomplete tile of the sum is skipped or undefined",
}


@pytest.fixture
def specs(write_recipe: WriteRecipe) -> list[RunSpec]:
    return [run.spec for run in matrix.read(write_recipe()).runs]


class Selftest:
    """Stands in for the process: answers with what is planted, and counts."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environment: dict[str, str] = {}
        self.code, self.stderr = 0, ""
        self.bad_gpu: str | None = None
        self.crashing_gpu: str | None = None
        self.poor_gpu: str | None = None
        self.gpus: list[str | None] = []
        self.subject: dict[str, Any] = {"status": "right", "reason": "", "faults": []}

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.environment = options["env"]
        gpu = self.environment.get("CUDA_VISIBLE_DEVICES")
        self.gpus.append(gpu)
        if self.bad_gpu is not None:
            bad = gpu == self.bad_gpu
            self.code = 12 if bad else -9 if gpu == self.crashing_gpu else 0
            self.subject = {"status": "fault" if bad else "right", "reason": "", "faults": [FAULT] * bad}
            if gpu == self.poor_gpu:
                self.subject = {"status": "not_run", "reason": "needs Hopper", "faults": []}
        labels = [command[i + 1] for i, part in enumerate(command) if part == "--recipe"]
        subjects = [{"label": label, **self.subject} for label in labels]
        document = {"right": self.code == 0, "seconds": 1.0, "subjects": subjects}
        return subprocess.CompletedProcess(command, self.code, json.dumps(document), self.stderr)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Selftest:
    process = Selftest()
    monkeypatch.setattr(selftest_gate.subprocess, "run", process)
    return process


def test_subjects_are_the_fp8_arms(specs: list[RunSpec]) -> None:
    assert subjects_of(specs) == ["rowwise/torchao_float8", "tensorwise/torchao_float8"]
    master = specs[-1].model_copy(
        update={"precision": specs[-1].precision.model_copy(update={"weight_cast_source": "master"})}
    )
    assert subjects_of([specs[0], master]) == [f"{master.precision.recipe}/torchao_float8/master"]
    assert subjects_of([s for s in specs if s.precision.is_bf16]) == []


def test_once_per_machine_packages_and_recipes(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for _ in range(2):
        require_sound_arithmetic(tmp_path, specs, said.append)
    assert len(planted.commands) == 1
    assert Path(planted.environment["TRITON_CACHE_DIR"]).parent.parent == tmp_path
    assert said == ["selftest: rowwise/torchao_float8, tensorwise/torchao_float8 right in 1 s"]
    assert json.loads((tmp_path / SELFTEST_FILE).read_text())["key"]["device"] == "cpu"
    require_sound_arithmetic(tmp_path, [*specs[:-1], specs[0]], said.append)
    monkeypatch.setattr(selftest_gate, "package_versions", lambda: {"torch": "9.9"})
    require_sound_arithmetic(tmp_path, specs, said.append)
    assert len(planted.commands) == 2


def test_no_selftest_without_an_fp8_arm(specs: list[RunSpec], tmp_path: Path, planted: Selftest) -> None:
    require_sound_arithmetic(tmp_path, [s for s in specs if s.precision.is_bf16], print)
    assert planted.commands == []


def test_a_fault_is_named_and_tested_again_next_time(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest
) -> None:
    planted.code, planted.subject = 12, {"status": "fault", "reason": "", "faults": [FAULT]}
    for _ in range(2):
        with pytest.raises(KernelFaultError, match="rowwise/torchao_float8: GEMM output: k-tail") as caught:
            require_sound_arithmetic(tmp_path, specs, print)
        assert caught.value.exit_code == 12
    assert len(planted.commands) == 2


def test_what_cannot_run_and_what_crashes_is_said(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest
) -> None:
    planted.subject = {"status": "not_run", "reason": "needs a GPU", "faults": []}
    with pytest.raises(UsageError, match="rowwise/torchao_float8: needs a GPU"):
        require_sound_arithmetic(tmp_path, specs, print)
    planted.code, planted.stderr = 64, "noise\nfp8parity: --device: no such thing\n"
    with pytest.raises(UsageError, match=r"^--device: no such thing$"):
        require_sound_arithmetic(tmp_path, specs, print)
    planted.code, planted.stderr = -11, "Segmentation fault\n"
    with pytest.raises(Fp8ParityError, match=r"crashed with exit code -11 before any training: Segmentation"):
        require_sound_arithmetic(tmp_path, specs, print)


def on_gpus(specs: list[RunSpec], monkeypatch: pytest.MonkeyPatch, visible: str) -> list[RunSpec]:
    """Return the specs for CUDA; tests at the same time would share the stand-in, so one at a time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(selftest_gate, "ThreadPoolExecutor", lambda n: ThreadPoolExecutor(1))
    monkeypatch.setattr(selftest_gate, "query_gpus", lambda fields, gpus: [f"GPU-{gpu}" for gpu in gpus])
    return [s.model_copy(update={"train": s.train.model_copy(update={"device": "cuda"})}) for s in specs]


def test_every_visible_gpu_is_tested(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, said = on_gpus(specs, monkeypatch, "0,3,5"), []
    planted.bad_gpu = "3"
    with pytest.raises(KernelFaultError) as caught:
        require_sound_arithmetic(tmp_path, specs, print)
    assert planted.gpus == ["0", "3", "5"]
    told = str(caught.value).splitlines()
    assert told[0] == f"selftest: GPU 3: rowwise/torchao_float8: {FAULT['text']}"
    assert all("GPU 3: " in line for line in told[:-1])
    stored = json.loads((tmp_path / SELFTEST_FILE).read_text())
    assert [(entry["gpu"], entry["right"]) for entry in stored["by_gpu"]] == [
        ("0", True),
        ("3", False),
        ("5", True),
    ]
    assert stored["right"] is False  # so it is tested again
    planted.bad_gpu = "none"
    for _ in range(2):
        require_sound_arithmetic(tmp_path, specs, said.append)
    assert said == ["selftest: rowwise/torchao_float8, tensorwise/torchao_float8 right on 3 GPUs in 1 s"]
    assert len(planted.gpus) == 6
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,6")  # what passed was another set of GPUs
    require_sound_arithmetic(tmp_path, specs, said.append)
    assert len(planted.gpus) == 9


def test_a_fault_comes_before_a_crash_elsewhere(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = on_gpus(specs, monkeypatch, "0,1,2")
    planted.crashing_gpu, planted.bad_gpu = "0", "2"
    with pytest.raises(KernelFaultError, match="GPU 2: rowwise"):
        require_sound_arithmetic(tmp_path, specs, print)
    stored = json.loads((tmp_path / SELFTEST_FILE).read_text())
    assert [entry["right"] for entry in stored["by_gpu"]] == [None, True, False]
    (tmp_path / SELFTEST_FILE).unlink()
    planted.bad_gpu = "none"
    with pytest.raises(
        Fp8ParityError,
        match="GPU 0: crashed with exit code -9 .*run CUDA_VISIBLE_DEVICES=0 fp8parity selftest",
    ):
        require_sound_arithmetic(tmp_path, specs, print)
    assert not (tmp_path / SELFTEST_FILE).exists()
    planted.crashing_gpu, planted.poor_gpu = None, "1"
    with pytest.raises(UsageError, match="^GPU 1: rowwise/torchao_float8: needs Hopper"):
        require_sound_arithmetic(tmp_path, specs, print)


def test_gpus_that_no_run_uses_are_left_alone(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = on_gpus(specs, monkeypatch, "0,1,2,3")
    planted.bad_gpu = "2"
    require_sound_arithmetic(tmp_path, specs, print, slots=2)
    assert planted.gpus == ["0", "1"]


def test_one_gpu_has_no_number(
    specs: list[RunSpec], tmp_path: Path, planted: Selftest, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = on_gpus(specs, monkeypatch, "3")
    planted.bad_gpu = "3"
    with pytest.raises(KernelFaultError, match="^selftest: rowwise/torchao_float8: GEMM output"):
        require_sound_arithmetic(tmp_path, specs, print)
    assert "by_gpu" not in json.loads((tmp_path / SELFTEST_FILE).read_text())


def test_run_refuses_with_12_before_anything_trains(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    planted: Selftest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted.code, planted.subject = 12, {"status": "fault", "reason": "", "faults": [FAULT]}
    monkeypatch.setattr(study_run, "require_sound_arithmetic", require_sound_arithmetic)
    monkeypatch.setattr(study_run, "launch", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(SystemExit) as caught:
        main(["run", str(write_recipe()), "--out", str(tmp_path / "out")])
    assert caught.value.code == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("fp8parity: selftest: rowwise/torchao_float8: GEMM output: k-tail")
    assert "nothing was trained" in lines[-1]


def test_a_real_selftest_in_its_own_process(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    changes = {"axes": {"precision.recipe": ["rowwise"]}, "null": None, "seeds": [0]}
    specs = [run.spec for run in matrix.read(write_recipe(changes)).runs]
    said: list[str] = []
    require_sound_arithmetic(tmp_path, specs, said.append)
    stored = json.loads((tmp_path / SELFTEST_FILE).read_text())
    assert stored["right"] is True
    assert [s["label"] for s in stored["subjects"]] == ["rowwise/torchao_float8"]
    assert stored["environment"]["device_type"] == "cpu"
    assert said[0].startswith("selftest: rowwise/torchao_float8 right in")
