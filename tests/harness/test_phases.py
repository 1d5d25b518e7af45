"""FP8 with a BF16 tail: the steps after the switch are those of a BF16 run that was handed the very state."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8parity import matrix, module, runner, study
from fp8parity.errors import ExecutionMismatchError, UsageError
from fp8parity.module import LMModule
from fp8parity.phases import phase_after
from fp8parity.precision.torchao_float8 import convert
from fp8parity.spec import PrecisionSpec
from fp8parity_analysis import schema
from fp8parity_analysis.store import read_run

from .conftest import TINY, WriteRecipe, merged
from .test_checkpointing import interrupt_at
from .test_fork import assert_equal_numbers, hand_over, numbers
from .test_runner import LayOut

SWITCH = 6
ARM = f"tensorwise-switch_at={SWITCH}-0"
TAIL: dict[str, Any] = {
    "base": {"train": {"steps": 10}, "precision": {"switch_at": SWITCH}},
    "axes": {"precision.recipe": ["tensorwise"]},
    "null": None,
    "seeds": [0],
    "runtime": {"checkpoint_every": 4},
    "probe": {"every": 5},
}


class Killed(BaseException):
    """Leaves the disk as SIGKILL at this place would."""


def kill_between_the_phases(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(runner.gc, "collect", killed)
        with pytest.raises(Killed):
            runner.train(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Return a run with a tail that nothing disturbed."""
    folder = tmp_path_factory.mktemp("tail")
    recipe = merged(TINY, merged({"base": {"data": {"path": str(corpus)}}}, TAIL))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
    plan = matrix.read(folder / "recipe.yaml")
    dirs = dict(zip((run.arm for run in plan.runs), study.lay_out(plan, folder / "out"), strict=True))
    run_dir = dirs[ARM.removesuffix("-0")]
    assert runner.train(run_dir) == 0
    return run_dir


def test_a_tail_is_a_bf16_continuation_and_kills_change_nothing(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    killed = lay_out(TAIL, "killed")[ARM]
    interrupt_at(killed, 3, monkeypatch)  # in the FP8 phase
    kill_between_the_phases(killed, monkeypatch)
    at_the_switch = killed / schema.CHECKPOINT_DIR / f"step-{SWITCH:09d}.ckpt"
    control = lay_out(TAIL, "oracle")["bf16-0"]
    hand_over(at_the_switch, control)
    assert runner.train(control) == 0
    assert_equal_numbers(numbers(whole, since=SWITCH), numbers(control, since=SWITCH))
    interrupt_at(killed, SWITCH + 2, monkeypatch)  # in the tail
    assert runner.train(killed) == 0
    assert_equal_numbers(numbers(whole), numbers(killed))
    ends = [read_run(path).manifest or {} for path in (whole, killed)]
    assert [end["resumes"] for end in ends] == [0, 1]
    assert ends[0]["phases"] == ends[1]["phases"]


def test_every_step_says_its_precision_and_both_phases_are_proven(lay_out: LayOut, whole: Path) -> None:
    dirs = lay_out(TAIL)
    plain = lay_out({**TAIL, "base": {"train": {"steps": 10}}}, "plain")
    assert (
        dirs["bf16-0"].name == plain["bf16-0"].name
    )  # the control is the same run with and without the switch
    assert whole.name != plain["tensorwise-0"].name
    assert runner.train(plain["tensorwise-0"]) == 0
    run, fp8 = read_run(whole), read_run(plain["tensorwise-0"])
    assert list(run.curve["precision"]) == ["tensorwise"] * SWITCH + ["bf16"] * (10 - SWITCH)
    assert run.curve["train_loss"].iloc[:SWITCH].equals(fp8.curve["train_loss"].iloc[:SWITCH])
    # the step after the switch is the first whose forward pass differs
    assert run.curve["train_loss"].iloc[SWITCH] != fp8.curve["train_loss"].iloc[SWITCH]
    assert run.manifest is not None
    assert fp8.manifest is not None
    assert run.manifest["conversion"] == fp8.manifest["conversion"]
    assert run.manifest["execution"] == fp8.manifest["execution"]
    phases = run.manifest["phases"]
    assert [(p["first_step"], p["last_step"], p["recipe"]) for p in phases] == [
        (1, SWITCH, "tensorwise"), (SWITCH + 1, 10, "bf16"),
    ]  # fmt: skip
    ran = [(phase["execution"]["train"] > 0, phase["execution"]["proven"]) for phase in phases]
    assert ran == [(True, True), (False, True)]
    assert "phases" not in fp8.manifest
    assert "precision" not in fp8.curve
    own = run.evals.pivot_table(index="step", columns="eval_precision", values="loss")
    equal = own[schema.EVAL_ARM] == own[schema.EVAL_BF16]
    assert list(equal) == [step > SWITCH for step in own.index]


def test_a_tail_that_stays_fp8_never_trains(lay_out: LayOut, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lay_out(TAIL)[ARM]
    build = module.build_model
    models: list[weakref.ref[Any]] = []

    def stays_fp8(spec: Any, *args: Any) -> Any:
        assert all(model() is None for model in models)  # no two phases' models at a time: they may not fit
        built = build(spec, *args)
        models.append(weakref.ref(built.model))
        if spec.precision.is_bf16:
            ffn = built.model.blocks[1].ffn
            ffn.up_proj.__class__ = module.torch.nn.Linear
            ffn.up_proj = convert(ffn.up_proj, PrecisionSpec(recipe="tensorwise"))
        return built

    monkeypatch.setattr(module, "build_model", stays_fp8)
    with pytest.raises(
        ExecutionMismatchError, match=r"blocks.1.ffn.up_proj: declared BF16, but 3 FP8 GEMMs ran"
    ):
        runner.train(run_dir)
    assert list(read_run(run_dir).curve["step"]) == list(range(1, SWITCH + 1))
    assert not (run_dir / schema.MANIFEST_FILE).exists()


def test_a_divergence_before_the_switch_ends_the_run(
    lay_out: LayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = lay_out({**TAIL, "base": {"train": {"steps": 30}, "precision": {"switch_at": 20}}})[
        "tensorwise-switch_at=20-0"
    ]
    step_of = LMModule.training_step

    def planted(self: LMModule, batch: Any, batch_idx: int) -> Any:
        loss = step_of(self, batch, batch_idx)
        self.last_loss = loss.detach() * float("nan")
        return loss

    monkeypatch.setattr(LMModule, "training_step", planted)
    assert runner.train(run_dir) == 20
    manifest = read_run(run_dir).manifest
    assert manifest is not None
    assert [phase["recipe"] for phase in manifest["phases"]] == ["tensorwise"]


def test_phases_of_a_run(lay_out: LayOut) -> None:
    dirs = lay_out(TAIL)
    spec, control = (runner.read_order(dirs[name]).spec for name in (ARM, "bf16-0"))
    for done in (0, 5, 10):
        assert phase_after(control, done) == phase_after(control, 0)
    assert [phase_after(spec, done).last_step for done in (0, 5, 6, 9)] == [6, 6, 10, 10]
    assert phase_after(spec, 6).spec == control  # the tail is the control's own specification


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"base": {"precision": {"switch_at": 24}}},
            "base.precision.switch_at: .*24 is not below train.steps 24",
        ),
        ({"base": {"precision": {"switch_at": 0}}}, "base.precision.switch_at: .*greater than or equal to 1"),
        ({"base": {"precision": {"switch_at": 0.5}}}, "base.precision.switch_at: .*integer"),
        (
            {"axes": {"precision.switch_at": [4, 99]}},
            "axes.precision.switch_at.1: .*99 is not below train.steps 24",
        ),
        (
            {"axes": None, "base": {"precision": {"recipe": "bf16", "switch_at": 4}}},
            "base.precision: switch_at 4 with recipe bf16, which has no FP8 to leave",
        ),
        (
            {"control": {"precision.recipe": "bf16", "precision.switch_at": 4}},
            "control.precision.switch_at: .*has no FP8 to leave",
        ),
    ],
)
def test_switches_that_cannot_be(write_recipe: WriteRecipe, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=rf":\d+: {said}"):
        matrix.read(write_recipe(changes))


def test_arms_are_told_apart_by_their_switch(write_recipe: WriteRecipe) -> None:
    changes = {"axes": {"precision.recipe": ["rowwise"], "precision.switch_at": [4, None]}, "seeds": [0]}
    arms = {run.arm for run in matrix.read(write_recipe(changes)).runs if run.role == "test"}
    assert arms == {"rowwise-switch_at=4", "rowwise"}
