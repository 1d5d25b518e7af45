"""The throughput benchmark: its arithmetic, and every section once on a CPU. Never a timing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def timing(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("gpu_timing")


@pytest.fixture(scope="module")
def arms(load_benchmark: Callable[[str], ModuleType], timing: ModuleType) -> ModuleType:
    return load_benchmark("throughput_arms")


@pytest.fixture(scope="module")
def throughput_runner(load_benchmark: Callable[[str], ModuleType], arms: ModuleType) -> ModuleType:
    return load_benchmark("throughput_runner")


@pytest.fixture(scope="module")
def throughput(load_benchmark: Callable[[str], ModuleType], throughput_runner: ModuleType) -> ModuleType:
    return load_benchmark("throughput")


def test_ratio_is_the_median_over_rounds(timing: ModuleType) -> None:
    assert timing.ratio([2.0, 6.0, 5.0], [1.0, 2.0, 5.0]) == 2.0


def test_both_sides_are_timed_in_turns(timing: ModuleType) -> None:
    calls: list[str] = []
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = timing.interleaved(works, torch.device("cpu"), rounds=3, calls=2)
    assert "".join(calls) == "aabb" * 3
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("kernel", "is_gemm"),
    [
        ("nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", True),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", True),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", True),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", True),
        ("triton_poi_fused__scaled_mm__to_copy_abs_clamp_gemm_mm_0", False),
        ("triton_fp8_blockwise_act_quant_lhs_kernel", False),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", False),
        ("Memset (Device)", False),
    ],
)
def test_matrix_kernels_are_told_from_casts(timing: ModuleType, kernel: str, is_gemm: bool) -> None:
    assert timing.is_gemm_kernel(kernel) is is_gemm


def test_amdahl_exchanges_the_converted_linears_alone(arms: ModuleType) -> None:
    square, wide = (4, 4), (4, 8)
    control, test = {square: 2.0, wide: 4.0}, {square: 1.0, wide: 2.5}
    assert arms.amdahl_ms(100.0, {square: 3, wide: 2}, control, test) == 100.0 - 3 * 1.0 - 2 * 1.5
    assert arms.amdahl_ms(100.0, {}, control, test) == 100.0


def test_a_linears_time_is_the_devices_where_it_can_be_seen(arms: ModuleType, timing: ModuleType) -> None:
    kernels = timing.KernelTimes(gemm_ms=1.0, other_ms=0.5)
    assert arms.LinearTime(2.0, kernels).ms == 1.5
    assert arms.LinearTime(2.0, None).ms == 2.0


def test_flops_of_a_step(arms: ModuleType) -> None:
    setting = arms.full()
    case = setting.cases["8b"]
    spec = arms.spec_of(case, "rowwise_with_gw_hp", arms.tiny())
    block = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    fqns = tuple(s.fqn for s in arms.linear_shapes(spec.model, case.vocab) if not s.is_head)
    flops = arms.model_flops(spec, case.vocab, fqns)
    linears = 6 * 16384 * (4 * block + 4096 * 32000)
    attention = 3 * 4 * 2 * (2 * 2 * 8192**2 * 4096 / 2)  # layers, batch; QK and PV; causal half
    assert flops.total == linears + attention
    assert flops.fp8 == pytest.approx(6 * 16384 * 4 * block * 2 / 3)  # grad_weight stays in BF16


def test_share_of_the_ceiling_counts_each_format_at_its_own(arms: ModuleType) -> None:
    flops = arms.Flops(bf16=500e12, fp8=1000e12)  # at 500 and 1000 TFLOP/s: one second each
    assert flops.share_of_ceiling(4000.0, {"bf16": 500.0, "fp8": 1000.0}) == pytest.approx(0.5)


def test_runner_segments_are_compared_with_their_neighbours(
    arms: ModuleType, throughput_runner: ModuleType
) -> None:
    setting = arms.tiny()
    turns = throughput_runner.Turns(setting.cases["1b"], setting, 0.0)
    turns.ms = {"bare": [9.0, 1.0, 3.0, 5.0], "runner": [9.0, 4.0, 4.0]}  # the first of each is warm-up
    assert turns.share() == pytest.approx((2 / 4 + 4 / 4) / 2)


def test_figures_short_of_their_target_are_kept_and_printed(
    throughput: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = throughput.Report(tmp_path / "rows.json")
    report.target("good", 1.0, 0.97)
    report.target("bad", 0.5, 0.97)
    assert json.loads((tmp_path / "rows.json").read_text())["shortfalls"] == ["bad is 0.500, target 0.97"]
    assert "FALLS SHORT: bad is 0.500" in capsys.readouterr().out


def rows(document: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["section"] == section]


def test_every_section_runs_and_leaves_its_rows(
    throughput: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--tiny", "--rounds", "1", "--recipes", "tensorwise,blockwise", "--runner", "bf16"]
    code = throughput.main([*arguments, "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["errors"] == []
    assert code == (1 if document["shortfalls"] else 0)
    names = ["bf16", "tensorwise", "blockwise"]
    assert [(r["width"], r["recipe"]) for r in rows(document, "linear")] == [
        (w, a) for w in (64, 128) for a in names
    ]
    for name, converted in (("1b", 7), ("8b", 7)):  # one of three blocks; one of one
        model = rows(document, name)
        assert [r["recipe"] for r in model] == names
        assert [r["converted"] for r in model] == [0, converted, converted]
        assert model[0]["speedup"] == 1.0
        assert model[0]["fp8_flop_share"] == 0 < model[1]["fp8_flop_share"] < 1
        for row in rows(document, name + "-amdahl"):
            assert row["share_of_prediction"] == pytest.approx(
                row["reached_speedup"] / row["predicted_speedup"]
            )
            assert sum(linear["count"] for linear in row["linears"]) == converted
    (ours,) = rows(document, "1b-runner")
    assert ours["share_of_bare"] > 0
    # What the run itself recorded is its own speed, the bare loop's turns left out.
    assert ours["recorded_tokens_per_s"] is None or ours["recorded_tokens_per_s"] > 0
    capsys.readouterr()
    assert throughput.main(["--markdown", str(out)]) == 0
    assert "| width | recipe | ms |" in capsys.readouterr().out


def test_what_time_did_not_allow_is_named(throughput: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert throughput.main(["--tiny", "--seconds", "0", "--out", str(out), "--only", "linear,8b"]) == 0
    document = json.loads(out.read_text())
    assert document["rows"] == []
    assert [line.split(":")[0] for line in document["not_run"]] == [
        "ceilings",
        *(f"linear {w} {r}" for w in (64, 128) for r in ("bf16", *throughput.RECIPES)),
        *(f"8b {r}" for r in ("bf16", *throughput.RECIPES)),
    ]


def test_an_item_that_fails_does_not_cost_the_others(
    throughput: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = throughput.linear_row

    def row(report: Any, linears: Any, ceilings: Any, recipe: str, width: int) -> None:
        if recipe == "tensorwise":
            raise torch.OutOfMemoryError("no memory left")
        real(report, linears, ceilings, recipe, width)

    monkeypatch.setattr(throughput, "linear_row", row)
    out = tmp_path / "rows.json"
    arguments = ["--tiny", "--rounds", "1", "--only", "linear", "--recipes", "tensorwise,rowwise"]
    assert throughput.main([*arguments, "--out", str(out)]) == 1
    document = json.loads(out.read_text())
    assert [(r["width"], r["recipe"]) for r in rows(document, "linear")] == [
        (64, "bf16"), (64, "rowwise"), (128, "bf16"), (128, "rowwise"),
    ]  # fmt: skip
    assert document["errors"] == [
        f"linear {w} tensorwise: OutOfMemoryError: no memory left" for w in (64, 128)
    ]
