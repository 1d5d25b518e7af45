"""The calibration benchmark at a tenth of its size, and planted faults that it must notice."""

import sys

import numpy as np
import pytest

from fp8parity_analysis import paired, trajectory


@pytest.fixture(scope="module")
def calibration(load_benchmark):
    return load_benchmark("calibration")


def test_every_line_lies_within_its_limits(calibration):
    measured = list(calibration.lines(replicates=400, draws=20))
    assert [line.name for line in measured if not line.ok] == []
    assert {line.name.split()[0] for line in measured} >= {f"C{number}" for number in range(1, 11)} | {"P"}
    assert len({line.name for line in measured}) == len(measured)


def test_limits_are_the_binomial_ones(calibration):
    assert calibration.limits(0.05, 4000) == (156, 247)
    assert calibration.limits(0.90, 4000)[1] == 3661


def test_a_normal_quantile_instead_of_students_is_noticed(calibration, monkeypatch):
    monkeypatch.setattr(paired, "stdtrit", lambda df, p: 1.6448536269514722)
    assert not any(
        line.ok for line in calibration.c4_coverage(400) if "n=8" not in line.name and "n=5" not in line.name
    )


def test_steps_as_replicates_are_noticed(calibration, monkeypatch):
    def by_step(gap, alpha):
        return paired.stated_noise(gap, float(gap.std()) / 40, alpha)

    monkeypatch.setattr("fp8parity_analysis.core.paired_t", by_step)
    assert not any(line.ok for line in calibration.c1_size(400))


def test_a_missing_burn_in_is_noticed(calibration, monkeypatch):
    monkeypatch.setattr(trajectory, "burn_in", lambda null: 0)
    lines = list(calibration.c5_trajectory(400))
    assert not all(line.ok for line in lines if "from the start" in line.name)


def test_an_uncorrected_look_is_noticed(calibration, monkeypatch):
    monkeypatch.setattr(
        "fp8parity_analysis.sequential.look_alphas", lambda looks, alpha, spending: (alpha,) * len(looks)
    )
    line = next(iter(calibration.c6_sequential(2000)))
    assert not line.ok


def test_the_exit_status_tells(calibration, monkeypatch, tmp_path, capsys):
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["calibration.py", "--json", str(report)])
    for high, status in ((1.0, 0), (-1.0, 1)):
        monkeypatch.setattr(
            calibration,
            "lines",
            lambda replicates, draws, high=high: iter([calibration.Line("x", 0.5, 0, high, 10)]),
        )
        assert calibration.main() == status
    assert '"ok": false' in report.read_text()
    assert "FAIL x" in capsys.readouterr().out
    assert np.isfinite(report.stat().st_size)
