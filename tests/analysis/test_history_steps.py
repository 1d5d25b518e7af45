"""Step detection: exact cases by hand, the stated false-alarm rate and the power on simulated nights."""

from __future__ import annotations

import nights as sim
import numpy as np
import pytest
from scipy import stats

from fp8parity_analysis.history_prior import pooled
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


def test_a_repeated_night_is_no_new_evidence_and_the_nulls_degrees_of_freedom_count() -> None:
    same = [0.123456789] * 9
    options = {"predicted": np.full((1, 13, 1), 0.01), "df": np.full((1, 13, 1), 3.0)}
    found = replay(
        np.array([*same, 0.15, 0.15, 0.15, 0.15])[None, :, None],
        np.full((13, 1), 0.01),
        np.ones(1),
        np.zeros(1),
        **options,
    )
    # one draw against one draw, however often each was repeated; one window holds five nights before it
    expected = 2 * stats.t.sf((0.15 - same[0]) / (0.01 * np.sqrt(2)), 3)
    assert found.p[0, 9:, 0] == pytest.approx([expected] * 4, rel=1e-9)
    assert set(found.state[0, 5:, 0]) == {State.GOOD}


def test_a_sample_sd_is_held_against_one_before_it_by_f() -> None:
    plain = np.array([1.0] * 6 + [40.0])
    options = {"df": np.full((1, 7, 1), 3.0), "variance": np.ones(1, dtype=bool)}
    values = (plain ** (2 / 3))[None, :, None]
    found = replay(values, np.full((7, 1), 0.01), np.ones(1), np.zeros(1), **options)
    assert found.p[0, -1, 0] == pytest.approx(2 * stats.f.sf(1600.0, 3, 3), rel=1e-6)
    assert found.state[0, -1, 0] == State.NEW


def test_predictions_are_pooled_over_draws_and_a_night_without_a_size_takes_the_next_ones() -> None:
    sd = np.array([[np.nan], [3.0], [3.0], [4.0]])
    df = np.array([[np.nan], [np.nan], [2.0], [2.0]])
    got_sd, got_df = pooled(sd, df)
    assert got_sd[1:, 0] == pytest.approx([3.0, 3.0, np.sqrt((2 * 9 + 2 * 16) / 4)])
    assert got_df[:, 0].tolist() == [2.0, 2.0, 2.0, 4.0]


def test_a_step_below_a_share_of_the_baseline_is_not_told() -> None:
    shares = {"relative_floor": np.array([0.1])}
    assert states([2.0] * 9 + [2.0 + 1e-7], **shares)[-1] == State.GOOD
    assert states([2.0] * 9 + [2.3], **shares)[-1] == State.NEW
    assert Series("tensor/r/w/amax").relative_floor == 0.1
    assert Series("tensor/r/w/sqnr_db_min").relative_floor == 0.0
    assert Series("noise/g").relative_floor == pytest.approx(1.1 ** (2 / 3) - 1)


def test_coarse_numbers_that_no_null_pair_explains_count_by_night() -> None:
    coarse = [0.012, 0.012, 0.013, 0.012, 0.012, 0.012]
    assert states([*coarse, 0.014], floor=0.001)[-1] == State.GOOD
    assert states([*coarse, 0.050], floor=0.001)[-1] == State.NEW


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


@pytest.mark.parametrize("redraws", [(9,), (8, 10, 12)])
def test_new_noise_on_a_device_that_repeats_itself_alarms_at_no_more_than_the_stated_rate(
    redraws: tuple[int, ...],
) -> None:
    simulated = sim.simulate(np.random.default_rng(23), 400, sim.World(nights=14)).repeated(redraws)
    quiet = [j for j, name in enumerate(simulated.names) if not name.startswith("speed")]
    alarm = np.isin(sim.replayed(simulated).state[..., quiet], ALARMS).any(-1)
    high = stats.binom.ppf(0.9995, 400, FALSE_ALARMS_PER_NIGHT)
    for redraw in redraws:  # up to the next redraw: a repeated night must not add to the evidence
        until = min((r - 1 for r in redraws if r > redraw), default=14)
        assert alarm[:, redraw - 1 : until].any(1).sum() <= high


@pytest.mark.parametrize(
    ("name", "by", "times", "least"),
    [
        ("gap/rowwise", 0.01, 1.0, 0.95),
        ("noise/25m", 0.0, 20.0, 0.90),
        ("tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db", -3.0, 1.0, 0.99),
    ],
)
def test_a_fault_on_a_device_that_repeats_itself_is_found(
    name: str, by: float, times: float, least: float
) -> None:
    simulated = sim.simulate(np.random.default_rng(24), 200, sim.World(seeds=5, nights=10)).repeated((10,))
    told = sim.replayed(simulated.shifted(name, 10, by, times=times))
    assert (told.state[:, 9, simulated.column(name)] == State.NEW).mean() >= least


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
