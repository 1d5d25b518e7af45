"""CSV and Parquet files of other programs: empty cells, columns, and one line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.schema import Outcome, Status
from fp8parity_analysis.verdict import Criteria, judge

STEPS = np.arange(10, 1001, 10)
PLAIN = "seed,arm,step,loss\n0,bf16,1,2.0\n0,rowwise,1,2.1\n"


def curves(**columns: object) -> pd.DataFrame:
    """Three seeds of bf16 and rowwise that agree within the margin."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(3):
        for arm in ("bf16", "rowwise"):
            loss = (2 + 8 * (1 + STEPS / 15) ** -0.45) * np.exp(
                0.004 * seed + 1e-4 * rng.standard_normal(len(STEPS))
            )
            rows.append(pd.DataFrame({"seed": seed, "arm": arm, "step": STEPS, "loss": loss}))
    return pd.concat(rows, ignore_index=True).assign(**columns)


def diverging(first: int) -> pd.DataFrame:
    table = curves()
    table.loc[(table["arm"] == "rowwise") & (table["step"] >= first), "loss"] = np.nan
    return table


def mapped(**columns: str) -> ImportSettings:
    return ImportSettings(columns=columns)


def verdict(read: CurveSet) -> tuple[Outcome, str]:
    told = judge(read, Criteria()).verdicts[0]
    return told.outcome, " | ".join(told.reasons)


def written(tmp_path: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestEmptyCells:
    @pytest.mark.parametrize("first", [500, 990])
    def test_what_pandas_writes_for_nan_is_nan(self, tmp_path: Path, first: int) -> None:
        table = diverging(first)
        table.to_csv(tmp_path / "empty.csv", index=False)
        table.to_csv(tmp_path / "spelled.csv", index=False, na_rep="nan")
        table.to_parquet(tmp_path / "null.parquet")
        table.assign(lr=1e-3, tokens=table["step"] * 100).to_csv(tmp_path / "more.csv", index=False)
        told = [verdict(read_curves([path])) for path in sorted(tmp_path.iterdir())]
        assert told[0][0] is Outcome.DIVERGED
        assert f"3/3 seeds diverged (hard): seed 0 from step {first}" in told[0][1]
        assert told == [told[0]] * 4

    def test_a_control_that_diverged_is_no_baseline(self, tmp_path: Path) -> None:
        table = diverging(990)
        table["arm"] = table["arm"].map({"bf16": "rowwise", "rowwise": "bf16"})
        table.to_csv(tmp_path / "a.csv", index=False)
        told, why = verdict(read_curves([tmp_path / "a.csv"]))
        assert (told, "the baseline diverged" in why) == (Outcome.INVALID, True)

    def sparse(self) -> pd.DataFrame:
        """Rows of training every 5 steps, `val_loss` every 10."""
        table = curves().rename(columns={"loss": "val_loss"})
        rows = table.loc[table.index.repeat(2)].reset_index(drop=True)
        rows["step"] -= np.tile([5, 0], len(table))
        rows["train_loss"] = rows["val_loss"] * 1.01
        rows.loc[rows["step"] % 10 != 0, "val_loss"] = np.nan
        return rows

    def test_rows_of_training_are_no_evaluations(self, tmp_path: Path) -> None:
        self.sparse().to_csv(tmp_path / "a.csv", index=False)
        read = read_curves([tmp_path / "a.csv"], mapped(loss="val_loss"))
        assert all(len(run.evals[("held_out", "unstated")].steps) == len(STEPS) for run in read.runs)
        assert verdict(read)[0] is Outcome.EQUIVALENT

    def test_rows_for_another_column_that_takes_turns_are_no_evaluations(self, tmp_path: Path) -> None:
        table = self.sparse().rename(columns={"train_loss": "lr"})
        table.loc[table["val_loss"].notna(), "lr"] = np.nan
        table.to_csv(tmp_path / "a.csv", index=False)
        assert verdict(read_curves([tmp_path / "a.csv"], mapped(loss="val_loss")))[0] is Outcome.EQUIVALENT

    @pytest.mark.parametrize(
        ("first", "message"),
        [
            (500, "rowwise seed 0 ends at step 490 of 1000"),
            (
                995,
                "rowwise seed 0: no held_out loss in its rows after step 990, bf16 seed 0 has one up to step 1000",
            ),
        ],
    )
    def test_evaluations_that_turned_empty_never_pass(self, tmp_path: Path, first: int, message: str) -> None:
        table = self.sparse()
        table.loc[(table["arm"] == "rowwise") & (table["step"] >= first), "val_loss"] = np.nan
        table.to_csv(tmp_path / "a.csv", index=False)
        told, why = verdict(read_curves([tmp_path / "a.csv"], mapped(loss="val_loss")))
        assert told is Outcome.INVALID
        assert message in why

    def test_evaluations_that_turned_empty_in_all_runs_never_pass(self, tmp_path: Path) -> None:
        table = self.sparse()
        table.loc[table["step"] >= 500, "val_loss"] = np.nan
        table.to_csv(tmp_path / "a.csv", index=False)
        told, why = verdict(read_curves([tmp_path / "a.csv"], mapped(loss="val_loss")))
        assert (told, "bf16 seed 0 ends at step 490 of 1000" in why) == (Outcome.INVALID, True)

    def test_rows_in_which_every_metric_is_empty_are_nan(self, tmp_path: Path) -> None:
        table = self.sparse()
        table.loc[(table["arm"] == "rowwise") & (table["step"] >= 990), ["val_loss", "train_loss"]] = np.nan
        table.to_csv(tmp_path / "a.csv", index=False)
        assert verdict(read_curves([tmp_path / "a.csv"], mapped(loss="val_loss")))[0] is Outcome.DIVERGED

    def test_blank_rows_at_the_end_are_no_rows(self, tmp_path: Path) -> None:
        read = read_curves([written(tmp_path, PLAIN + ",,,\n,,,\n")])
        assert [run.last_step for run in read.runs] == [1, 1]


class TestColumns:
    def test_a_mapped_column_wins_over_one_of_our_name(self, tmp_path: Path) -> None:
        path = written(tmp_path, "seed,arm,step,val_loss,loss\n0,bf16,1,2.0,9.0\n0,rowwise,1,2.1,9.0\n")
        first, second = read_curves([path], mapped(loss="val_loss")).runs
        assert [run.evals[("held_out", "unstated")].loss[0] for run in (first, second)] == [2.0, 2.1]
        assert read_curves([path]).runs[0].evals[("held_out", "unstated")].loss[0] == 9.0

    @pytest.mark.parametrize(
        ("text", "columns", "message"),
        [
            ("seed,arm,step,step\n0,bf16,1,2.0\n", {}, r"a\.csv: 2 columns are called 'step'"),
            ("seed,arm,step,a,a\n0,bf16,1,2.0,3.0\n", {"loss": "a"}, r"a\.csv: 2 columns are called 'a'"),
            (
                "seed,arm,step,val_loss\n0,bf16,1,2.0\n",
                {},
                r"a\.csv: .*lacks the columns loss; it has .*, val_loss",
            ),
            ("x,y\n1,2\n", {}, r"a\.csv: .*lacks the columns seed, arm, step, loss; it has x, y"),
            (PLAIN, {"loss": "vall"}, r"a\.csv: column loss=vall: .*the table has seed, arm, step, loss"),
            ("seed,arm,step,loss\n", {}, r"a\.csv: the table has no rows"),
            (PLAIN + "0,rowwise,2.5,2.0\n", {}, r"a\.csv: step: row 3 holds 2\.5, not a whole number"),
            (PLAIN + "0,,2,2.0\n", {}, r"a\.csv: arm: empty in row 3"),
            (PLAIN + ",rowwise,2,2.0\n", {}, r"a\.csv: seed: row 3 holds nothing"),
        ],
    )
    def test_what_is_wrong_is_told_with_file_and_row(
        self, tmp_path: Path, text: str, columns: dict[str, str], message: str
    ) -> None:
        with pytest.raises(BadInputError, match=message):
            read_curves([written(tmp_path, text)], mapped(**columns))

    def test_rows_are_those_of_their_own_file(self, tmp_path: Path) -> None:
        good = written(tmp_path, PLAIN, "good.csv")
        text = "seed,arm,step,loss,train_loss\n1,bf16,1,,3\n1,bf16,2,2.0,3\n1,bf16,x,2.0,3\n"
        bad = written(tmp_path, text, "bad.csv")
        with pytest.raises(BadInputError, match=r"bad\.csv: step: row 3 holds 'x'"):
            read_curves([good, bad])


class TestReplicas:
    def test_an_empty_or_absent_replica_is_0(self, tmp_path: Path) -> None:
        null = "0,bf16_null,1,2.05"
        without = written(tmp_path, PLAIN, "without.csv")
        having = written(tmp_path, f"seed,arm,step,loss,replica\n{null},1\n", "with.csv")
        mixed = written(
            tmp_path, f"seed,arm,step,loss,replica\n0,bf16,1,2.0,\n0,rowwise,1,2.1,\n{null},1\n", "mixed.csv"
        )
        pd.read_csv(mixed).to_parquet(tmp_path / "mixed.parquet")
        for paths in ([without, having], [mixed], [tmp_path / "mixed.parquet"]):
            replicas = {run.arm: run.replica for run in read_curves(paths).runs}
            assert replicas == {"bf16": 0, "rowwise": 0, "bf16_null": 1}

    def test_a_replica_that_is_no_number_is_named(self, tmp_path: Path) -> None:
        path = written(tmp_path, "seed,arm,step,loss,replica\n0,bf16,1,2.0,\n0,bf16,1,2.0,b\n")
        with pytest.raises(BadInputError, match=r"a\.csv: replica: row 2 holds 'b', not a whole number"):
            read_curves([path])


class TestForm:
    @pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
    def test_tabs_separate_too(self, tmp_path: Path, name: str) -> None:
        read = read_curves([written(tmp_path, PLAIN.replace(",", "\t"), name)])
        assert [run.arm for run in read.runs] == ["bf16", "rowwise"]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "the file is empty"),
            (b"\n \n", "the file is empty"),
            (PLAIN.replace(",", ";").encode(), "separated by semicolons"),
            (PLAIN.encode("utf-16"), "not UTF-8 text"),
            (b"seed,arm,step,loss,\xe9t\xe9\n0,bf16,1,2.0,3\n", "its header is not UTF-8"),
            (
                PLAIN.replace("2.1", '"2,1"').encode(),
                "loss: row 2 holds '2,1', not a number; write a decimal point",
            ),
            (PLAIN.replace("2.1", "oops").encode(), "loss: row 2 holds 'oops', not a number"),
            ((PLAIN + "0,bf16\n").encode(), "a row has 2 cells, the header 4"),
        ],
    )
    def test_what_is_read_is_told_in_one_line(self, tmp_path: Path, data: bytes, message: str) -> None:
        with pytest.raises(BadInputError, match=message) as caught:
            read_curves([written(tmp_path, data)])
        assert str(caught.value).startswith(f"{tmp_path / 'a.csv'}: ")
        assert str(caught.value).endswith("in UTF-8, with a header and decimal points")
        assert "\n" not in str(caught.value)

    @given(st.text(alphabet='seedarmtplo,;\t\n"019.-nNaif ', max_size=60), st.booleans())
    @settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_text_is_read_or_refused_by_the_file(self, tmp_path: Path, text: str, header: bool) -> None:
        path = written(tmp_path, PLAIN + text if header else text)
        try:
            told = [run.label for run in read_curves([path]).runs]
        except BadInputError as error:
            told = [str(error)]
        assert told


class TestStatus:
    def test_a_table_may_say_that_a_run_still_trains(self, tmp_path: Path) -> None:
        table = curves(status="finished")
        table.loc[(table["arm"] == "rowwise") & (table["seed"] == 1), "status"] = "unfinished"
        table.to_csv(tmp_path / "a.csv", index=False)
        read = read_curves([tmp_path / "a.csv"])
        assert [run.status for run in read.runs] == [Status.FINISHED] * 3 + [None] + [Status.FINISHED] * 2
        told, why = verdict(read)
        assert (told, "unfinished runs: rowwise seed 1" in why) == (Outcome.INVALID, True)
