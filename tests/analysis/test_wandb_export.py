"""W&B exports: which columns are the loss, runs of one name, and runs whose cells end early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.verdict import Criteria, judge

STEPS = np.arange(10, 1001, 10)


def export(metric: str = "eval/loss", seeds: int = 3) -> pd.DataFrame:
    """A panel of bf16 and rowwise runs that agree within the margin."""
    rng = np.random.default_rng(0)
    wide = pd.DataFrame({"Step": STEPS})
    for seed in range(seeds):
        for arm in ("bf16", "rowwise"):
            noise = np.exp(0.004 * seed + 1e-4 * rng.standard_normal(len(STEPS)))
            wide[f"{arm}_seed{seed} - {metric}"] = (2 + 8 * (1 + STEPS / 15) ** -0.45) * noise
    return wide


def read(tmp_path: Path, wide: pd.DataFrame, **settings: dict[str, str]) -> CurveSet:
    wide.to_csv(tmp_path / "w.csv", index=False)
    return read_curves([tmp_path / "w.csv"], ImportSettings(**settings))


def outcome(curves: CurveSet) -> tuple[Outcome, str]:
    told = judge(curves, Criteria()).verdicts[0]
    return told.outcome, " | ".join(told.reasons)


def test_a_metric_that_is_no_loss_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"w\.csv: holds no loss .* it logged eval/accuracy; .*--tag"):
        read(tmp_path, export("eval/accuracy"))


def test_a_tag_chooses_and_the_rest_is_left(tmp_path: Path) -> None:
    wide = export("train/grad_norm").merge(export()).merge(export("eval/nll"))
    for curves in (read(tmp_path, wide), read(tmp_path, wide, tags={"eval/nll": "held_out"})):
        assert all(run.train is None and len(run.evals) == 1 for run in curves.runs)
        assert outcome(curves)[0] is Outcome.EQUIVALENT


def test_interval_is_no_validation(tmp_path: Path) -> None:
    curves = read(tmp_path, export("train/interval_loss"))
    assert all(run.train is not None and not run.evals for run in curves.runs)


def test_two_runs_of_one_display_name_are_refused_by_name(tmp_path: Path) -> None:
    lines = [f"{line},{line.split(',')[1]}" for line in export().to_csv(index=False).splitlines()]
    (tmp_path / "w.csv").write_text("\n".join(lines))
    with pytest.raises(BadInputError, match=r"several runs have the display name 'bf16_seed0'; rename"):
        read_curves([tmp_path / "w.csv"])


def test_two_names_of_one_run_are_refused(tmp_path: Path) -> None:
    wide = export().assign(**{"bf16-s0 - eval/loss": 2.0})
    with pytest.raises(BadInputError, match=r"'bf16_seed0' and 'bf16-s0' are both bf16 seed 0 replica 0"):
        read(tmp_path, wide)


def test_a_cell_that_is_no_number_is_told_with_file_column_and_row(tmp_path: Path) -> None:
    wide = export().astype(object)
    wide.iloc[4, 2] = "2,5"
    with pytest.raises(BadInputError, match=r"w\.csv: rowwise_seed0 - eval/loss: row 5 holds '2,5'.*decimal"):
        read(tmp_path, wide)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (500, "rowwise seed 1 ends at step 490 of 1000"),
        (
            990,
            "rowwise seed 1: no held_out loss in its rows after step 980, bf16 seed 1 has one up to step 1000",
        ),
    ],
)
def test_nan_that_pandas_wrote_as_empty_cells_does_not_pass(tmp_path: Path, first: int, message: str) -> None:
    wide = export()
    wide.loc[wide["Step"] >= first, "rowwise_seed1 - eval/loss"] = np.nan
    told, why = outcome(read(tmp_path, wide))
    assert told is Outcome.INVALID
    assert message in why


def test_evaluations_that_end_while_the_run_goes_on_are_invalid(tmp_path: Path) -> None:
    wide = export("train/grad_norm").merge(export())
    wide.loc[wide["Step"] >= 500, [name for name in wide if name.endswith("eval/loss")]] = np.nan
    told, why = outcome(read(tmp_path, wide))
    assert told is Outcome.INVALID
    assert "bf16 seed 0 ends at step 490 of 1000" in why


def test_rows_of_a_longer_arm_do_not_shorten_the_others(tmp_path: Path) -> None:
    longer = pd.DataFrame({"Step": np.arange(10, 2001, 10), "long_seed0 - eval/loss": 2.0})
    curves = read(tmp_path, export().merge(longer, how="outer"))
    by_arm = {item.recipe: item for item in judge(curves, Criteria()).verdicts}
    assert by_arm["rowwise"].outcome is Outcome.EQUIVALENT
    assert by_arm["long"].outcome is Outcome.INVALID


def test_a_run_without_a_single_loss_does_not_vanish(tmp_path: Path) -> None:
    wide = export()
    wide["rowwise_seed2 - eval/loss"] = np.nan
    told, why = outcome(read(tmp_path, wide))
    assert told is Outcome.INVALID
    assert "in: rowwise seed 2" in why
