from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from fp8parity import callbacks, runner
from fp8parity.errors import ExecutionMismatchError
from fp8parity.precision.torchao_float8 import ComputeCastFloat8Linear
from fp8parity.proof import ExecutionProof
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run

from .test_checkpointing import interrupt_at

LayOut = Callable[..., dict[str, Path]]
SHORT = {"base": {"train": {"steps": 6, "accumulate": 2, "activation_checkpointing": True}}}


def test_counts_are_in_the_manifest(lay_out: LayOut) -> None:
    dirs = lay_out(SHORT)
    expected = {
        "bf16": (0, 0),
        "rowwise": (28, 7),
    }  # 7 linears: output twice (recomputed), grad_input, grad_weight
    for arm, (train, evaluation) in expected.items():
        runner.train(dirs[f"{arm}-0"])
        manifest = read_run(dirs[f"{arm}-0"]).manifest
        assert manifest is not None
        assert manifest["execution"] == {
            "train": train, "eval": evaluation, "as_trained": train, "differences": [], "proven": True,
            "compiled_regions": 0,
        }  # fmt: skip


@pytest.mark.parametrize("arm", ["bf16", "tensorwise"])
def test_proving_changes_no_number(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    with_proof, without = lay_out(SHORT, "a")[f"{arm}-0"], lay_out(SHORT, "b")[f"{arm}-0"]
    runner.train(with_proof)
    monkeypatch.setattr(callbacks, "prove", lambda *args: ExecutionProof(0, 0, 0, ()))
    runner.train(without)
    a, b = (read_run(path) for path in (with_proof, without))
    pd.testing.assert_frame_equal(
        a.curve.drop(columns="step_time"), b.curve.drop(columns="step_time"), check_exact=True
    )
    pd.testing.assert_frame_equal(a.evals, b.evals, check_exact=True)


def test_an_fp8_run_that_is_not_fp8_never_trains(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out(SHORT)["rowwise-0"]
    monkeypatch.setattr(
        ComputeCastFloat8Linear,
        "forward",
        lambda self, x: F.linear(x.bfloat16(), self.weight.bfloat16()),
    )
    with pytest.raises(
        ExecutionMismatchError, match="no FP8 GEMM ran in training: recipe rowwise is declared"
    ) as caught:
        runner.train(run_dir)
    assert caught.value.exit_code == 12
    assert len(read_run(run_dir).curve) == 0
    assert not (run_dir / schema.MANIFEST_FILE).exists()


def test_a_control_that_runs_fp8_never_trains(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out(SHORT)["bf16-0"]
    from fp8parity.precision.bf16 import Fp32AccumulateLinear

    def secret_fp8(self: Fp32AccumulateLinear, x: torch.Tensor) -> torch.Tensor:
        one = torch.ones(())
        codes = (
            x.detach().flatten(0, -2).to(torch.float8_e4m3fn),
            self.weight.detach().to(torch.float8_e4m3fn),
        )
        torch._scaled_mm(codes[0], codes[1].t(), one, one, out_dtype=torch.bfloat16)
        return F.linear(x.bfloat16(), self.weight.bfloat16())

    monkeypatch.setattr(Fp32AccumulateLinear, "forward", secret_fp8)
    with pytest.raises(ExecutionMismatchError, match=r"blocks.0.attn.q_proj"):
        runner.train(run_dir)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile blocks without making code of their graphs."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.usefixtures("compiling")
def test_what_is_in_force_is_what_was_seen(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out({"base": {"train": {"steps": 4, "compile": "blocks"}}})["bf16-0"]
    interrupt_at(run_dir, 2, monkeypatch)
    assert runner.train(run_dir) == 0
    manifest = read_run(run_dir).manifest
    assert manifest is not None
    assert manifest["resumes"] == 1
    assert manifest["effective"]["compile"] == "blocks"
    blocks = runner.read_order(run_dir).spec.model.n_layers
    assert manifest["execution"]["compiled_regions"] == blocks


@pytest.mark.usefixtures("compiling")
def test_a_run_that_is_not_compiled_as_declared_never_trains(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run_dir = lay_out({"base": {"train": {"steps": 6, "compile": "blocks"}}})["bf16-0"]
    with pytest.raises(
        ExecutionMismatchError, match=r"train\.compile: blocks is declared, but no compiled code ran"
    ):
        runner.train(run_dir)
    assert not (run_dir / schema.MANIFEST_FILE).exists()


def test_a_run_with_other_threads_than_declared_never_trains(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.raises(
        ExecutionMismatchError, match=r"train\.threads: 1 is declared, and torch computes with 8"
    ):
        runner.train(lay_out(SHORT)["bf16-0"])
