"""Step detection: exact cases by hand, the stated false-alarm rate and the power on simulated nights."""

from __future__ import annotations

import nights as sim
import numpy as np
import pytest
from scipy import stats

from fp8parity_analysis.history_series import FALSE_ALARMS_PER_NIGHT, Series, levels
from fp8parity_analysis.history_steps import ADOPT_AFTER, WINDOWS, State, replay

ALARMS = (State.NEW, State.BETTER)


def states(
    values: list[float], *, direction: float = 1.0, floor: float = 0.0, **options: object
) -> list[State]:
    array = np.array(values, dtype=float)[None, :, None]
    found = replay(
        array, np.full((len(values), 1), 0.01), np.array([direction]), np.array([floor]), **options
    )
    return [State(int(state)) for state in found.state[0, :, 0]]


NOISE = [0.1, -0.2, 0.05, 0.15, -0.1, 0.0, 0.12, -0.07]


def test_p_is_the_t_test_with_the_variance_of_the_baseline() -> None:
    values = np.array([*NOISE, 0.3])
    found = replay(values[None, :, None], np.full((9, 1), 1e-9), np.ones(1), np.zeros(1))
    p = []
    for k in WINDOWS:
        base, window = values[:-k], values[-k:]
        if len(base) >= 5:
            t = (window.mean() - base.mean()) / (base.std(ddof=1) * np.sqrt(1 / k + 1 / len(base)))
            p.append(2 * stats.t.sf(abs(t), len(base) - 1))
    assert found.p[0, -1, 0] == pytest.approx(len(p) * min(p), rel=1e-9)


def test_learning_then_good_then_new_then_still_then_fixed() -> None:
    found = states([*NOISE, 3.0, 3.1, 2.9, 0.05, -0.1])
    assert found[:5] == [State.LEARNING] * 5
    assert found[5:8] == [State.GOOD] * 3
    assert found[8:] == [State.NEW, State.STILL, State.STILL, State.FIXED, State.GOOD]


def test_a_fall_of_what_should_not_rise_is_for_the_better_and_adopted_in_time() -> None:
    found = states([*NOISE, *(-3.0 + 0.1 * np.array(NOISE * 2))])
    assert found[8] == State.BETTER
    assert found[8 + ADOPT_AFTER - 1] == State.ADOPTED
    assert set(found[8 + ADOPT_AFTER :]) == {State.GOOD}
    assert states([*NOISE, -3.0], direction=0.0)[-1] == State.NEW


def test_nights_that_repeat_themselves_alarm_for_any_step_unless_the_nulls_explain_it() -> None:
    same = [0.123456789] * 9
    assert set(states(same)[5:]) == {State.GOOD}
    assert states([*same, 0.13])[-1] == State.NEW
    predicted = np.full((1, 10, 1), 0.01)
    assert states([*same, 0.13], predicted=predicted)[-1] == State.GOOD
    assert states([*same, 0.23], predicted=predicted)[-1] == State.NEW
    assert states([*same, 0.13], floor=0.05)[-1] == State.GOOD


def test_missing_nights_are_skipped_and_an_accepted_level_starts_anew() -> None:
    found = states([*NOISE, np.nan, 3.0])
    assert found[-2:] == [State.MISSING, State.NEW]
    restart = np.zeros((10, 1), dtype=bool)
    restart[9] = True
    assert states([*NOISE, 3.0, 3.1], restart=restart)[-1] == State.LEARNING


def test_the_levels_of_a_night_add_up_and_layers_do_not_cost_the_gap_its_power() -> None:
    few = ["gap/a", "loss/g", "tensor/a/x/sqnr_db"]
    many = [*few, *(f"tensor/a/{i}/sqnr_db" for i in range(200))]
    for names in (few, many, ["odd"]):
        assert sum(levels(names).values()) == pytest.approx(FALSE_ALARMS_PER_NIGHT)
    assert levels(few)["gap/a"] == levels(many)["gap/a"]


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("gap/r", 1),
        ("speedup/r", -1),
        ("tensor/r/w/sqnr_db", -1),
        ("tensor/r/w/underflow", 1),
        ("tensor/r/w/amax", 0),
    ],
)
def test_which_way_is_worse(name: str, direction: int) -> None:
    assert Series(name).direction == direction


@pytest.fixture(scope="module")
def thousand() -> sim.Simulated:
    return sim.simulate(np.random.default_rng(20), 1000, sim.World(nights=25))


def test_false_alarms_come_at_the_stated_rate(thousand: sim.Simulated) -> None:
    alarm = np.isin(sim.replayed(thousand, floors=False).state, ALARMS).any(-1)
    low, high = stats.binom.ppf([0.0005, 0.9995], 1000, FALSE_ALARMS_PER_NIGHT)
    for night in (10, 20, 25):  # one night of each history: independent draws
        assert low <= alarm[:, night - 1].sum() <= high
    per_history = alarm[:, 9:].mean(1)
    se = per_history.std(ddof=1) / np.sqrt(1000)
    assert per_history.mean() <= FALSE_ALARMS_PER_NIGHT + 3.29 * se
    assert per_history.mean() >= 0.6 * FALSE_ALARMS_PER_NIGHT


@pytest.mark.parametrize(
    ("name", "by", "times", "within", "least"),
    [
        ("gap/rowwise", 0.005, 1.0, 2, 0.80),
        ("gap/rowwise", 0.0025, 1.0, 7, 0.80),
        ("speedup/rowwise", 0.0, 0.9, 1, 0.95),
        ("tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db", -3.0, 1.0, 1, 0.99),
    ],
)
def test_a_step_on_night_20_is_found(name: str, by: float, times: float, within: int, least: float) -> None:
    simulated = sim.simulate(np.random.default_rng(21), 200, sim.World(nights=26))
    told = sim.replayed(simulated.shifted(name, 20, by, times=times))
    alarm = np.isin(told.state[:, 19 : 19 + within, simulated.column(name)], (State.NEW, State.STILL))
    assert alarm.any(1).mean() >= least
