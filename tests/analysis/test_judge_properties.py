"""What must hold for any curves at all."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import simulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.verdict import Criteria, judge

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LOSS = st.floats(0.5, 12.0).map(lambda value: round(value, 6))


@st.composite
def studies(draw, min_seeds=1):
    n, k = draw(st.integers(min_seeds, 6)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    control = np.exp(0.9 + 0.1 * rng.standard_normal((n, 1, k)))
    test = control[:, 0] * np.exp(draw(st.floats(-0.03, 0.03)) + 0.002 * rng.standard_normal((n, k)))
    return simulate.table(control, test, np.arange(1, k + 1) * 10)


def verdict(table, **criteria):
    return judge(CurveSet.from_table(table), Criteria(**criteria)).verdicts[0]


def swapped(table):
    return table.assign(arm=table.arm.map({"bf16": "fp8", "fp8": "bf16"}))


@SLOW
@given(studies())
def test_swapping_the_arms_flips_gap_and_interval_exactly(table):
    plain, other = verdict(table), verdict(swapped(table))
    assert other.gap == -plain.gap
    assert other.interval == tuple(None if bound is None else -bound for bound in plain.interval[::-1])


@SLOW
@given(studies(min_seeds=2), st.randoms(use_true_random=False))
def test_permuting_the_seeds_changes_nothing(table, random):
    seeds = sorted(table.seed.unique())
    names = seeds.copy()
    random.shuffle(names)
    renamed = table.assign(seed=table.seed.map(dict(zip(seeds, names, strict=True))))
    plain, other = verdict(table), verdict(renamed.sample(frac=1.0, random_state=0))
    for name in ("outcome", "gap", "interval", "trajectory_p", "onset_step", "need_seeds", "basis"):
        assert getattr(plain, name) == getattr(other, name), name


@SLOW
@given(studies(min_seeds=2), st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6))
def test_scaling_both_losses_of_a_seed_changes_nothing(table, factors):
    scaled = table.assign(loss=table.loss * table.seed.map(dict(enumerate(factors))))
    plain, other = verdict(table), verdict(scaled)
    assert other.gap == pytest.approx(plain.gap, abs=1e-12)
    assert other.interval == pytest.approx(plain.interval, abs=1e-11)
    assert other.outcome is plain.outcome


ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -0.0, 1e308, 5e-324, 2.5])
ROW = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["bf16", "fp8", "other", "bf16_null"]),
    st.integers(0, 1),
    st.sampled_from(["held_out", "train", "code"]),
    st.integers(-2, 12),
    ANY_FLOAT,
    st.sampled_from(["", "finished", "diverged", "stopped"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROW, max_size=60), st.sampled_from(["held_out", "train", "final"]), st.booleans())
def test_any_table_is_judged_or_refused_in_words(rows, endpoint, matched):
    columns = ["seed", "arm", "replica", "split", "step", "loss", "status"]
    table = pd.DataFrame(rows, columns=columns)
    criteria = Criteria(endpoint=endpoint, null_matched=matched, noise_sd=0.001, allow_prefix=matched)
    try:
        document = judge(CurveSet.from_table(table), criteria).to_json()
    except BadInputError:
        return
    text = json.dumps(document, allow_nan=False)
    assert "Infinity" not in text
    assert all(item["reasons"] for item in document["verdicts"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 4),
    st.lists(LOSS, min_size=1, max_size=15),
    st.lists(st.sampled_from(["nan", "inf", "drop", "twice", "huge", "tiny"]), max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_damaged_studies_never_crash(n, losses, damages, seed):
    rng = np.random.default_rng(seed)
    base = np.array(losses)[None, None] * (1 + 0.001 * rng.standard_normal((n, 2, len(losses))))
    table = simulate.table(base[:, :1], base[:, 1], np.arange(1, len(losses) + 1))
    for damage in damages:
        row = int(rng.integers(len(table)))
        if damage == "drop":
            table = table.drop(index=table.index[row]).reset_index(drop=True)
        elif damage == "twice":
            table = pd.concat([table, table.iloc[[row]]], ignore_index=True)
        else:
            value = {"nan": np.nan, "inf": np.inf, "huge": 1e300, "tiny": 1e-300}[damage]
            table.loc[row, "loss"] = value
        if table.empty or "bf16" not in set(table.arm) or "fp8" not in set(table.arm):
            return
    told = verdict(table)
    assert told.reasons
    assert told.gap is None or math.isfinite(told.gap)
