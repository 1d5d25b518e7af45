"""Curves from files that other libraries wrote, judged like the plain table of the same curves."""

import numpy as np
import pandas as pd
import pytest
import simulate

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import PRESETS, ImportSettings
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.verdict import Criteria, judge

STEPS = simulate.BASE.steps
DRAWN = simulate.studies(np.random.default_rng(0), 1, 3, "const", 0.01)
TABLE = simulate.table(np.exp(DRAWN.control[0]), np.exp(DRAWN.test[0]), STEPS)
PLAIN = judge(CurveSet.from_table(TABLE), Criteria()).verdicts[0]


def agrees(curves, **criteria):
    told = judge(curves, Criteria(**criteria)).verdicts[0]
    single = 1e-6  # event files keep float32
    return (
        told.outcome is PLAIN.outcome
        and told.n_seeds == PLAIN.n_seeds
        and told.gap == pytest.approx(PLAIN.gap, abs=single)
        and told.interval == pytest.approx(PLAIN.interval, abs=single)
    )


def runs():
    for (arm, seed), rows in TABLE.groupby(["arm", "seed"]):
        yield arm, seed, rows.step.to_numpy(), rows.loss.to_numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder written by TensorBoard's own writer: one run a folder, tags as torchtitan names them."""
    root = tmp_path_factory.mktemp("tb")
    for arm, seed, steps, losses in runs():
        write_events(
            root / f"{arm}_seed{seed}",
            {
                "validation_metrics/loss": (steps, losses),
                "loss_metrics/global_avg_loss": (steps, losses * 1.01),
            },
        )
    return root


class TestTables:
    def test_csv_and_parquet(self, tmp_path):
        TABLE.to_csv(tmp_path / "a.csv", index=False)
        TABLE.to_parquet(tmp_path / "a.parquet", index=False)
        assert agrees(read_curves([tmp_path / "a.csv"]))
        assert agrees(read_curves([str(tmp_path / "a.parquet")]))

    def test_several_files_are_one_study(self, tmp_path):
        for arm, rows in TABLE.groupby("arm"):
            rows.to_csv(tmp_path / f"{arm}.csv", index=False)
        assert agrees(read_curves([tmp_path / "bf16.csv", tmp_path / "fp8.csv"]))

    def test_a_file_per_run_is_named_by_its_file(self, tmp_path):
        paths = []
        for arm, seed, steps, losses in runs():
            paths.append(tmp_path / f"{arm}_seed{seed}.csv")
            pd.DataFrame({"step": steps, "loss": losses}).to_csv(paths[-1], index=False)
        assert agrees(read_curves(paths))

    def test_columns_are_mapped(self, tmp_path):
        TABLE.rename(columns={"loss": "val", "arm": "recipe"}).to_csv(tmp_path / "a.csv", index=False)
        settings = ImportSettings(columns={"loss": "val", "arm": "recipe"})
        assert agrees(read_curves([tmp_path / "a.csv"], settings))

    def test_an_empty_cell_is_a_loss_that_is_not_finite(self, tmp_path):
        (tmp_path / "a.csv").write_text(
            "seed,arm,step,loss\n0,bf16,1,2.0\n0,bf16,2,\n0,fp8,1,2.1\n0,fp8,2,\n0,fp8,3,NaN\n0,bf16,3,-inf\n"
        )
        control, test = read_curves([tmp_path / "a.csv"]).runs
        assert test.evals[("held_out", "unstated")].steps.tolist() == [1, 2, 3]
        assert np.isnan(test.evals[("held_out", "unstated")].loss[1:]).all()
        assert np.isnan(control.evals[("held_out", "unstated")].loss[1])
        assert control.evals[("held_out", "unstated")].loss[2] == -np.inf

    def test_a_csv_without_the_columns_says_what_it_has(self, tmp_path):
        (tmp_path / "a.csv").write_text("x,y\n1,2\n")
        with pytest.raises(BadInputError, match="lacks the columns seed, arm, step, loss"):
            read_curves([tmp_path / "a.csv"])

    def test_wandb_export(self, tmp_path):
        wide = pd.DataFrame({"Step": STEPS})
        for arm, seed, _, losses in runs():
            wide[f"{arm}-seed{seed} - val/loss"] = losses
            wide[f"{arm}-seed{seed} - val/loss__MIN"] = losses
            wide[f"{arm}-seed{seed} - val/loss__MAX"] = losses
        gaps = pd.DataFrame({"Step": [10]})  # a step that only another metric logged: empty cells
        pd.concat([wide, gaps]).to_csv(tmp_path / "w.csv", index=False)
        assert agrees(read_curves([tmp_path / "w.csv"]))

    def test_wandb_export_over_time_is_refused(self, tmp_path):
        (tmp_path / "w.csv").write_text('"Relative Time","bf16-seed0 - loss"\n0,1\n')
        with pytest.raises(BadInputError, match="Step column"):
            read_curves([tmp_path / "w.csv"])

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_garbage_is_a_clear_error(self, tmp_path, seed, suffix):
        path = tmp_path / f"garbage{suffix}"
        path.write_bytes(np.random.default_rng(seed).bytes(int(seed) * 97))
        with pytest.raises(BadInputError):
            read_curves([path])

    def test_half_a_parquet_file_is_a_clear_error(self, tmp_path):
        TABLE.to_parquet(tmp_path / "a.parquet")
        whole = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(BadInputError, match=r"b\.parquet: cannot be read as Parquet"):
            read_curves([tmp_path / "b.parquet"])

    @pytest.mark.parametrize(
        ("sources", "message"),
        [([], "no source given"), (["missing.csv"], "missing.csv: does not exist"), (["."], "holds no run")],
    )
    def test_bad_sources(self, tmp_path, monkeypatch, sources, message):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadInputError, match=message):
            read_curves(sources)

    def test_a_number_that_is_none_is_refused_with_the_file(self, tmp_path):
        (tmp_path / "a.csv").write_text("seed,arm,step,loss\n0,bf16,1,2.0\n0,fp8,1,oops\n")
        with pytest.raises(BadInputError, match=r"a\.csv: .*oops"):
            read_curves([tmp_path / "a.csv"])


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("bf16_seed0", ("bf16", 0, 0)),
            ("rowwise-n4-seed12-r3", ("rowwise-n4", 12, 3)),
            ("tensorwise/s7", ("tensorwise", 7, 0)),
            ("bf16/seed=3/replica=1", ("bf16", 3, 1)),
            ("nightly", None),
        ],
    )
    def test_names_of_runs(self, name, found):
        named = ImportSettings().run_named(name)
        assert (named and (named["arm"], named["seed"], named["replica"])) == found

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"preset": "other"}, "preset: 'other' is not known; write one of torchtitan"),
            ({"run_pattern": "("}, "no regular expression"),
            ({"run_pattern": "(?P<arm>.*)"}, "needs the groups"),
            ({"columns": {"lass": "loss"}}, "column: 'lass'"),
        ],
    )
    def test_bad_settings(self, settings, message):
        with pytest.raises(BadInputError, match=message):
            ImportSettings(**settings)


class TestTensorBoard:
    def test_preset(self, folder):
        curves = read_curves([folder], ImportSettings(preset="torchtitan"))
        assert agrees(curves)
        assert all(run.train is not None for run in curves.runs)

    def test_mapped_tags(self, folder):
        assert agrees(read_curves([folder], ImportSettings(tags={"validation_metrics/loss": "held_out"})))

    def test_loss_like_tags_without_any_mapping(self, folder):
        assert agrees(read_curves([folder]))

    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_preset_reads_its_own_tags(self, tmp_path, preset):
        for arm, seed, steps, losses in runs():
            scalars = dict.fromkeys(PRESETS[preset], (steps, losses))
            write_events(tmp_path / f"{arm}_seed{seed}", scalars)
        assert agrees(read_curves([tmp_path], ImportSettings(preset=preset)))

    def test_a_resumed_run_keeps_its_later_record(self, tmp_path):
        for arm, seed, steps, losses in runs():
            wrong = losses[20:] * (3.0 if arm == "fp8" else 1.0)
            write_events(tmp_path / f"{arm}_seed{seed}", {"val_loss": (steps[20:], wrong)}, wall_time=1.0)
            write_events(
                tmp_path / f"{arm}_seed{seed}", {"val_loss": (steps, losses)}, wall_time=100.0, name="later"
            )
        assert agrees(read_curves([tmp_path], ImportSettings(tags={"val_loss": "held_out"})))

    def test_unknown_tags_and_names_are_refused(self, folder, tmp_path):
        with pytest.raises(BadInputError, match="no loss under the known tags"):
            read_curves([folder], ImportSettings(preset="megatron"))
        write_events(tmp_path / "whatever", {"loss": (np.array([1]), np.array([1.0]))})
        with pytest.raises(BadInputError, match="does not name its arm and seed"):
            read_curves([tmp_path])

    def test_the_average_that_hugging_face_logs_once_is_left_out_and_named(self, tmp_path):
        for arm, seed, steps, losses in runs():
            scalars = {
                "train/train_loss": (steps[-1:], losses[-1:] * 1.2),
                "eval/loss": (steps, losses),
                "train/loss": (steps, losses * 1.01),
            }
            write_events(tmp_path / f"{arm}_seed{seed}", scalars)
        curves = read_curves([tmp_path])
        assert agrees(curves)
        assert all(len(run.train.steps) == len(STEPS) for run in curves.runs)
        note = f"{tmp_path}: the train loss is train/loss; train/train_loss is left out"
        assert curves.notes == (note,)
        assert note in judge(curves, Criteria()).verdicts[0].warnings

    def test_a_damaged_event_file_is_a_clear_error(self, tmp_path):
        path = tmp_path / "bf16_seed0" / "events.out.tfevents.1.host"
        path.parent.mkdir()
        path.write_bytes(np.random.default_rng(0).bytes(2000))
        with pytest.raises(BadInputError):
            read_curves([tmp_path])


def write_events(folder, scalars, *, wall_time=10.0, name="first"):
    """Write scalars with TensorBoard's writer, as summary values like PyTorch's SummaryWriter."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=f".{name}")
    for tag, (steps, values) in scalars.items():
        for at, (step, value) in enumerate(zip(steps, values, strict=True)):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.add_event(Event(wall_time=wall_time + at * 1e-3, step=int(step), summary=summary))
    writer.close()
