"""Which of the metrics that runs logged is the loss of a split."""

from __future__ import annotations

import numpy as np
import pytest

from fp8parity_analysis.curves import runs_of_table
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.import_settings import ImportSettings, is_usual
from fp8parity_analysis.run_logs import Read, RunLog, read_of


def log(seed: int, **points: int) -> RunLog:
    """A run that logged so many points of each metric; `__` stands for a slash."""
    names = [name.replace("__", "/") for name in points]
    settings = ImportSettings()
    metrics = {
        name: (np.arange(1, count + 1), np.full(count, float(at + 1)))
        for at, (name, count) in enumerate(zip(names, points.values(), strict=True))
        if settings.is_candidate(name)
    }
    return RunLog(f"run {seed}", {"arm": "bf16", "seed": seed, "replica": 0}, names, metrics)


def read(*logs: RunLog, **tags: str) -> Read:
    return read_of(logs, ImportSettings(tags=tags), "here")


def test_a_metric_that_is_no_loss_needs_a_tag_and_the_error_names_those_found() -> None:
    with pytest.raises(BadInputError, match=r"here: .* it logged eval/accuracy, lr; .*--tag NAME=held_out"):
        read(log(0, eval__accuracy=3, lr=3))


@pytest.mark.parametrize("others", [{"eval__aux_loss": 9}, {"eval__total_loss": 1}, {"eval__lm_loss": 3}])
def test_the_usual_name_is_the_loss_and_the_others_are_named(others: dict[str, int]) -> None:
    name = next(iter(others)).replace("__", "/")
    found = read(log(0, **others, eval__loss=3), log(1, **others, eval__loss=3))
    assert found.table["loss"].unique().tolist() == [2.0]
    assert found.notes == (f"here: the held_out loss is eval/loss; {name} is left out",)


def test_a_summary_of_one_point_is_no_curve() -> None:
    found = read(log(0, val_loss=1, val_lm_loss=7))
    assert len(found.table) == 7
    assert found.notes == ("here: the held_out loss is val_lm_loss; val_loss is left out",)


@pytest.mark.parametrize(
    ("points", "named"),
    [
        ({"val__loss": 5, "test__loss": 5}, r"val/loss, test/loss; choose one with --tag val/loss=held_out"),
        (
            {"train__z_loss": 5, "train__ce_loss": 9},
            r"train/z_loss, train/ce_loss; .* --tag train/z_loss=train",
        ),
    ],
)
def test_metrics_that_compete_are_named_with_the_remedy(points: dict[str, int], named: str) -> None:
    with pytest.raises(BadInputError, match=f"here: run 1 has several metrics .*{named}"):
        read(log(0, **dict(list(points.items())[:1])), log(1, **points))


def test_a_run_without_the_chosen_metric_does_not_vanish() -> None:
    found = read(log(0, eval__loss=3, eval__aux_loss=3), log(1, eval__aux_loss=3))
    assert found.table.loc[found.table["seed"] == 1, "loss"].isna().all()
    runs, _ = runs_of_table(found.table)
    assert [(run.seed, len(run.evals), run.train) for run in runs] == [(0, 1, None), (1, 0, None)]


def test_every_run_may_have_its_own_name_for_the_loss() -> None:
    found = read(log(0, val__loss=2), log(1, eval__loss=2))
    assert found.notes == ()
    assert found.table["seed"].tolist() == [0, 0, 1, 1]


def test_declared_tags_are_the_only_ones() -> None:
    settings = ImportSettings(tags={"eval/nll": "held_out"})
    metrics = {"eval/nll": (np.array([1]), np.array([3.0]))}
    found = read_of(
        [RunLog("a", {"arm": "bf16", "seed": 0}, ["eval/nll", "loss"], metrics)], settings, "here"
    )
    assert found.table[["loss", "split"]].to_numpy().tolist() == [[3.0, "held_out"]]
    assert [settings.is_candidate(name) for name in ("eval/nll", "loss", "eval/loss")] == [True, False, False]


def test_a_tag_replaces_the_preset_for_its_split() -> None:
    settings = ImportSettings(preset="nemo", tags={"val_loss_wiki": "held_out"})
    assert settings.splits == {"val_loss_wiki": "held_out", "reduced_train_loss": "train"}


@pytest.mark.parametrize(
    ("tag", "split"),
    [
        ("train/interval_loss", "train"),
        ("latest_loss", "train"),
        ("loss", "train"),
        ("eval/loss", "held_out"),
        ("val-loss", "held_out"),
        ("lm loss validation", "held_out"),
        ("held_out.loss", "held_out"),
        ("Validation_metrics/loss", "held_out"),
    ],
)
def test_splits_follow_whole_words(tag: str, split: str) -> None:
    assert ImportSettings().split_of(tag) == split


def test_usual_names() -> None:
    usual = ("loss", "train/loss", "train_loss", "eval_loss", "validation/loss", "held_out/loss")
    assert all(is_usual(tag) for tag in usual)
    assert not any(is_usual(tag) for tag in ("train/train_loss", "aux_loss", "val_ce_loss", "val", ""))
