"""What the terminal shows of a judgement, a plan and running runs; names of others are shown as they are."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from rich.table import Table

from fp8parity import cli, screen, status_screen
from fp8parity.jobs import RunState
from fp8parity.selftest.report import GEMM_NAMES, Row, SelftestReport, SubjectReport
from fp8parity.selftest.screen import show_selftest
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.verdict import Contrast, Judgement, judge

STEPS = np.arange(100, 2001, 100)
NAMES = ["rowwise[gw_hp]", "fp8[/e4m3]", "[bold]x", "[red", "back\\", "a:fire:b", "[link=file:///x]y[/link]"]
"""Markup that swallows a name, markup that has no beginning, and an emoji's code."""


def table(n: int, *arms: str) -> pd.DataFrame:
    draws = np.random.default_rng(5)
    frames = []
    for seed in range(n):
        for arm in ("bf16", *arms):
            own = 0.0005 * draws.standard_normal() + 0.0001 * draws.standard_normal(len(STEPS))
            loss = np.exp(1 + 8 * (1 + STEPS / 15) ** -0.45 + own)
            frames.append(pd.DataFrame({"seed": seed, "arm": arm, "step": STEPS, "loss": loss}))
    return pd.concat(frames, ignore_index=True)


def judged(n: int, *arms: str, **settings: object) -> Judgement:
    return judge(CurveSet.from_table(table(n, *arms)), Criteria(**settings))


def terminal() -> Console:
    return Console(file=io.StringIO(), width=160, color_system=None)


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def shown(judgement: Judgement) -> str:
    console = terminal()
    screen.show_judgement(console, judgement)
    return printed(console)


def rendered(content: Table) -> str:
    console = terminal()
    console.print(content)
    return printed(console)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_named_as_it_is(name: str) -> None:
    lines = [line.strip() for line in shown(judged(4, name, "other")).splitlines()]
    assert [line.split("  ")[0] for line in lines if "EQUIVALENT" in line] == [name, "other"]
    assert name in lines  # the heading of its words
    assert any(line.startswith(f"{name} against other: ") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_plans_are_named_as_they_are(name: str) -> None:
    state = RunState(name, "running", 3, 9, None, None)
    assert name in rendered(screen.runs_table([state], 0))
    arm = {
        "group": f"g{name}",
        "arm": name,
        "runs": 1,
        "steps": 2,
        "tokens_per_run": 3,
        "fp8_flop_share": 0.5,
    }
    plan = rendered(screen.plan_table({"study": f"s{name}", "runs": 1, "pairs": 1, "arms": [arm]}))
    assert f"s{name}: 1 runs, 1 pairs" in plan
    assert plan.count(name) == 3
    ended = replace(state, state="failed", reason=f"because of {name}")
    console = terminal()
    with screen.live_runs(console, 0) as on_change:
        on_change([ended])
    screen.show_unfinished(console, [ended])
    assert printed(console) == (
        f"[1/1] {name} failed: because of {name}\nfailed: {name}: because of {name}\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_status_and_selftest_name_things_as_they_are(name: str) -> None:
    run = dict.fromkeys(("train_loss", "held_out_loss", "tokens_per_s", "eta_s", "reason")) | {
        "group": f"g{name}",
        "arm": f"a{name}",
        "run_id": f"r{name}",
        "state": "running",
        "stage": f"t{name}",
        "step": 1,
        "steps": 2,
        "alerts": [f"w{name}"],
    }
    launcher = {"alive": True, "slots": 1, "preparing": False}
    document = {"study": f"s{name}", "launcher": launcher, "counts": {}, "eta_s": None, "runs": [run]}
    console = terminal()
    console.print(status_screen.status_view(document))
    assert all(f"{kind}{name}" in printed(console) for kind in "garstw")

    rows = tuple(Row("reference", "gaussian", gemm, 55.5, 52.9, "dB", "right") for gemm in GEMM_NAMES)
    subject = SubjectReport(name, f"b{name}", "master", "right", f"y{name}", 1.0, rows, ())
    console = terminal()
    show_selftest(console, SelftestReport("cuda", {"device": f"d{name}"}, False, 3.0, (subject,)))
    assert all(f"{kind}{name}" in printed(console) for kind in ("arithmetic of d", "b", "y", ""))


def test_judge_prints_a_name_with_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curves.csv"
    table(3, "fp8[/e4m3]").to_csv(path, index=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["judge", str(path)])
    assert ended.value.code == 0
    assert "fp8[/e4m3]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["judge", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["recipe"] == "fp8[/e4m3]"


@pytest.mark.parametrize(
    ("n", "settings", "heading"),
    [
        (4, {}, "90 % interval"),
        (4, {"confidence": 0.95}, "95 % interval"),
        (4, {"looks": (3, 5, 8)}, "96.67 % interval"),
        (5, {"looks": (3, 5), "spending": "obrien_fleming"}, "92.28 % interval"),
        (6, {"anytime": True}, "90 % interval"),
    ],
)
def test_the_heading_states_the_level_that_was_used(n: int, settings: dict, heading: str) -> None:
    told = judged(n, "a", "b", **settings)
    lines = shown(told).splitlines()
    assert heading in next(line for line in lines if "outcome" in line)
    assert heading in lines[-1]  # of the contrast too
    assert all(heading in item.reasons[1] for item in told.verdicts)


def test_levels_that_differ_are_named_below_the_table() -> None:
    told = judged(4, "a", "b", looks=(3, 5))
    first, second = told.verdicts
    text = rendered(screen.verdict_table(replace(told, verdicts=(first, replace(second, alpha=0.05)))))
    assert " interval " in text
    assert "% interval" not in text
    assert "intervals of 90 % and 95 %: each recipe's is below" in text


def test_without_an_interval_no_level_is_stated() -> None:
    text = rendered(screen.verdict_table(judged(1, "a")))
    assert "interval" in text
    assert "% interval" not in text


@pytest.mark.parametrize(
    ("contrast", "settings", "said"),
    [
        ((None, None, 3), {"looks": (5, 8)}, "+0.10 %, no interval before the look at 5 seeds, 3 seeds"),
        ((None, None, 1), {}, "+0.10 %, no interval, 1 seed"),
        ((0.0, 0.002, 5), {"looks": (5, 8)}, "+0.10 %, 95 % interval [0.00, +0.20], 5 seeds"),
    ],
)
def test_contrasts_in_words(contrast: tuple, settings: dict, said: str) -> None:
    lo, hi, seeds = contrast
    found = Contrast("a", "b", 0.001, (lo, hi), None, seeds)
    told = replace(judged(4, "a"), criteria=Criteria(**settings), contrasts=(found,))
    assert shown(told).splitlines()[-1] == f"a against b: {said}"


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert [screen.percent(value, 2) for value in (-1e-6, 1e-6, -0.0004)] == ["0.00 %", "0.00 %", "-0.04 %"]
    assert screen.interval_text((-1e-6, 0.001), 2) == "[0.00, +0.10]"


@pytest.mark.parametrize(("margin", "title", "digits"), [(0.00125, "±0.125 %", 2), (0.00004, "±0.004 %", 4)])
def test_numbers_resolve_the_margin(margin: float, title: str, digits: int) -> None:
    told = judged(4, "a", "b", margin=margin)
    lines = shown(told).splitlines()
    assert lines[0].rstrip().endswith(f"margin {title}")
    verdict, contrast = told.verdicts[0], told.contrasts[0]
    low, high = verdict.interval
    assert low is not None
    assert high is not None
    row = next(line for line in lines if line.strip().startswith("a ") and "against" not in line)
    assert f" {100 * verdict.gap:+.{digits}f} % " in row
    assert f"[{100 * low:+.{digits}f}, {100 * high:+.{digits}f}]" in row
    assert f"a against b: {100 * contrast.gap:+.{digits}f} %" in lines[-1]


def test_a_null_arm_off_zero_is_not_called_worse() -> None:
    rows = table(4, "bf16_null")
    rows.loc[rows["arm"] == "bf16_null", "loss"] *= 1.004
    (beyond,) = judge(CurveSet.from_table(rows), Criteria(margin=0.001)).verdicts
    assert beyond.outcome is Outcome.WORSE
    assert beyond.reasons[0].startswith("off zero by more than the margin: by chance ")
    assert not [reason for reason in beyond.reasons if "layers" in reason]
    told = judge(CurveSet.from_table(rows), Criteria(margin=0.005))
    (verdict,) = told.verdicts
    assert verdict.outcome is Outcome.WORSE_MARGIN_UNRESOLVED
    assert verdict.reasons[0].startswith("off zero: by chance (about 1 null in 20 ")
    assert "worse" not in shown(replace(told, verdicts=(replace(verdict, warnings=()),))).split("off zero")[0]


def test_a_note_is_no_warning() -> None:
    judgement = judged(4, "rowwise")
    note = "described only: gap +0.100 % on code (bf16 forward) from 4 seeds"
    noted = replace(judgement.verdicts[0], warnings=("look out", note))
    lines = shown(replace(judgement, verdicts=(noted,))).splitlines()
    said = [line.strip(" •") for line in lines]
    assert note in said
    assert "warning: look out" in said


def test_plan_rows_are_told_apart_at_80_columns() -> None:
    def arm(name: str, step: int) -> dict[str, object]:
        return {
            "group": f"d128l3-step={step}-schedule=restart",
            "arm": name,
            "runs": 3,
            "steps": 20000,
            "tokens_per_run": 65_536_000,
            "fp8_flop_share": 0.33,
        }

    arms = [
        arm(name, step) for step in (100, 200) for name in ("rowwise_with_gw_hp", "rowwise-switch_at=15000")
    ]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(screen.plan_table({"study": "s", "runs": 12, "pairs": 12, "arms": arms}))
    text = printed(console)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(text.count(part) == 2 for part in ("step=100", "step=200", "gw_hp", "15000"))
