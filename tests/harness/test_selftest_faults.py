"""Planted faulty backends: the selftest catches each of them and names it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8parity.casts import GEMMS, Gemm, GemmPlan, recipe_plan
from fp8parity.selftest import SubjectReport
from fp8parity.selftest.session import check_subject

from . import planted
from .planted import Multiply, Planted

CPU = torch.device("cpu")
TENSORWISE_ROWWISE_BLOCKWISE = ["tensorwise", "rowwise", "blockwise"]


def examine(subject: Planted) -> SubjectReport:
    return check_subject(subject, CPU, quick=True)


def names(report: SubjectReport) -> dict[str, set[str]]:
    """Return the fault names of every GEMM."""
    found: dict[str, set[str]] = {}
    for fault in report.faults:
        found.setdefault(fault.gemm, set()).add(fault.name)
    return found


def assert_named(report: SubjectReport, name: str, gemms: tuple[Gemm, ...] = GEMMS) -> None:
    assert report.status == "fault"
    assert names(report) == {gemm: {name} for gemm in gemms}, [f.text for f in report.faults]


@pytest.mark.parametrize("recipe", [*TENSORWISE_ROWWISE_BLOCKWISE, "rowwise_with_gw_hp"])
def test_a_sound_backend_is_right(recipe: str) -> None:
    report = examine(Planted(recipe))
    assert (report.status, report.faults) == ("right", ())
    assert all(row.outcome != "fault" for row in report.rows)


@pytest.mark.parametrize("how", ["up", "down"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_scale_rounded_to_a_power_of_two_in_the_kernel_but_not_in_the_quantiser(
    recipe: str, how: str
) -> None:
    assert_named(examine(Planted(recipe, partial(planted.scale_rounded, how=how))), "scale-rounded")


def test_scale_rounding_is_no_fault_where_the_quantiser_rounds_too() -> None:
    assert examine(Planted("rowwise", planted.scale_rounded)).status == "right"


def test_row_scales_of_the_two_operands_exchanged() -> None:
    assert_named(examine(Planted("rowwise", planted.scales_exchanged)), "scales-transposed")


def test_block_scales_transposed() -> None:
    gemms: tuple[Gemm, ...] = ("output", "grad_input")
    report = examine(Planted("blockwise", planted.block_scales_transposed, gemms))
    assert_named(report, "scales-transposed", gemms)


@pytest.mark.parametrize(
    ("recipe", "tile"), [("tensorwise", 128), ("rowwise", 32), ("blockwise", 128), ("rowwise_with_gw_hp", 64)]
)
def test_k_tail_skipped(recipe: str, tile: int) -> None:
    assert_named(examine(Planted(recipe, partial(planted.tail_skipped, tile=tile))), "k-tail")


@pytest.mark.parametrize(
    ("recipe", "mistake"),
    [
        ("tensorwise", planted.tail_garbage),
        ("blockwise", planted.tail_garbage),
        ("rowwise", planted.tail_nan),
    ],
)
def test_k_tail_undefined(recipe: str, mistake: Multiply) -> None:
    assert_named(examine(Planted(recipe, mistake)), "k-tail")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_stale_weight_cast_after_an_optimizer_update(recipe: str) -> None:
    report = examine(Planted(recipe, keeps_first_weight=True))
    assert "stale-weight-cast" in names(report)["output"]
    assert set(names(report)) == {"output"}
    assert names(report)["output"] <= {"stale-weight-cast", "resume-differs"}  # loading is an update too


@pytest.mark.parametrize("recipe", ["rowwise"])
def test_weight_gradient_of_the_last_micro_batch_only(recipe: str) -> None:
    report = examine(Planted(recipe, overwrites_gradient=True))
    assert_named(report, "lost-micro-batch", ("grad_weight",))
    assert "it is the gradient of micro-batch 4 alone, norm ratio 0.5" in report.faults[0].words


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_e4m3_and_e5m2_mixed_up(recipe: str) -> None:
    assert_named(examine(Planted(recipe, planted.formats_exchanged)), "format-mixed-up")


@pytest.mark.parametrize("recipe", TENSORWISE_ROWWISE_BLOCKWISE)
def test_saturation_missing(recipe: str) -> None:
    excess = 2.0 if recipe == "rowwise" else 1.0
    report = examine(Planted(recipe, partial(planted.not_clamped, excess=excess)))
    assert_named(report, "saturation-missing")
    assert "not finite: those that read the largest scaled elements" in report.faults[0].words


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_nan_that_becomes_a_finite_number(recipe: str) -> None:
    report = examine(Planted(recipe, planted.nan_lost, ("output", "grad_weight")))
    assert_named(report, "nan-lost", ("output", "grad_weight"))
    assert "of the results are finite; case: one nan: input" in report.faults[0].text


def test_a_nan_that_reaches_more_than_its_group() -> None:
    report = examine(Planted("rowwise", planted.nan_spread, ("grad_input",)))
    assert_named(report, "nan-spread", ("grad_input",))


@pytest.mark.parametrize("recipe", ["rowwise"])
def test_a_gemm_that_is_not_quantised(recipe: str) -> None:
    assert_named(
        examine(Planted(recipe, planted.unquantised, ("grad_input",))), "not-quantised", ("grad_input",)
    )


def test_a_recipe_executed_as_another() -> None:
    def as_rowwise(gemm: GemmPlan, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return planted.sound(recipe_plan("rowwise").gemm(gemm.gemm), left, right)

    report = examine(Planted("tensorwise", as_rowwise))
    assert_named(report, "other-granularity")
    assert "e4m3fn, row, power-of-two scale" in report.faults[0].words


def test_a_scale_that_is_never_divided_out() -> None:
    report = examine(Planted("tensorwise", planted.scale_forgotten, ("output",)))
    assert_named(report, "scale-not-applied", ("output",))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_zero_groups_become_nan(recipe: str) -> None:
    assert_named(examine(Planted(recipe, planted.no_amax_floor)), "zero-group")


def test_one_wrong_row_among_many() -> None:
    report = examine(Planted("rowwise", planted.one_wrong_row, ("output",)))
    assert report.status == "fault"
    assert {f.gemm for f in report.faults} == {"output"}


def test_a_kernel_that_raises_is_a_fault() -> None:
    def raises(gemm: object, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nlong story")

    report = examine(Planted("tensorwise", raises))
    assert_named(report, "does-not-run", ("output",))
    assert "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED" in report.faults[0].words
