"""Early-warning rules: false alarms as rare as theory says, and every planted fault seen where and when it must be."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import binom

from fp8parity_analysis import tensor_moves as moves
from fp8parity_analysis.tensor_arm import ArmTensors, SeedPanels
from fp8parity_analysis.tensor_panel import COLUMNS, ONE_SCALE, Panel, Tensor
from fp8parity_analysis.tensor_signal_pairs import GROWTH_RULES, PairedSignal, growth_score
from fp8parity_analysis.tensor_signals import SIGNAL_STATISTICS, Signal

ARMS, BF16_RUNS, STEPS = 150, 4, np.arange(10, 251, 10)
LIMIT = int(binom.ppf(0.999, ARMS, 1 / (BF16_RUNS + 1)))
"""Arms in which a further healthy run may lie beyond the largest of `BF16_RUNS` others, by exchangeability."""
TENSORS = tuple(Tensor(f"blocks.{block}.a", "output", "input") for block in range(4))


def restless(rng: np.random.Generator) -> Panel:
    """Casts of a healthy run that move far more than the conventional limits allow."""
    walk = rng.normal(0, 1, (3, len(TENSORS), len(STEPS))).cumsum(axis=-1)
    shape = walk[0].shape
    columns = {name: np.zeros(shape) for name in COLUMNS}
    count = 10_000
    under = np.round(count / (1 + np.exp(3 - walk[0])))
    columns |= {
        "element_count": np.full(shape, float(count)),
        "underflow_count": under,
        "underflow_frac": under / count,
        "saturated_frac": np.maximum(0.0, walk[1]) * 1e-3,
        "sqnr_db": 30 + 2 * walk[0],
        "scale_min": np.exp(walk[1]),
        "amax_over_rms": np.exp(2 + walk[2]),
    }
    return Panel(TENSORS, STEPS, columns, np.full(shape, "e4m3fn", dtype=object), (ONE_SCALE,) * len(TENSORS))


def test_a_healthy_run_is_seldom_beyond_the_limit_by_bf16_runs() -> None:
    rng = np.random.default_rng(0)
    beyond = dict.fromkeys((rule.name for rule in moves.RULES), 0)
    conventional = dict(beyond)
    for _ in range(ARMS):
        one, control, null, *idle = (restless(rng) for _ in range(1 + BF16_RUNS))
        arm = ArmTensors(
            "x", TENSORS, STEPS, (SeedPanels(0, (one,), (control,), (null,)),), False, (), (tuple(idle),)
        )
        for score in moves.warnings_of(arm, warmup=20, horizon=300, loss_onsets={})[0]:
            assert (score.n_control, score.false_alarms) == (BF16_RUNS, 1 / (BF16_RUNS + 1))
            beyond[score.rule.name] += score.calibrated_hits
            conventional[score.rule.name] += score.hits
    assert max(beyond.values()) <= LIMIT, beyond
    # the conventional limits bound nothing: each rule speaks in more healthy runs than that
    assert min(conventional[name] for name in beyond if name != "scale_changes") > LIMIT, conventional


@pytest.mark.parametrize("name", SIGNAL_STATISTICS)
def test_growth_over_bf16s_is_seldom_beyond_the_limit_by_null_pairs(name: str) -> None:
    rng = np.random.default_rng(1)
    places = tuple(Signal(f"blocks.{block}", name) for block in range(4))
    beyond = hits = 0
    for _ in range(ARMS):
        walks = 0.4 * rng.normal(0, 1, (1 + BF16_RUNS, len(places), len(STEPS))).cumsum(axis=-1)
        zero = np.zeros((1, len(places), len(STEPS)))
        item = PairedSignal(
            SIGNAL_STATISTICS[name], places, STEPS, (0,), False, 1.0,
            {name: walks[:1]}, {name: zero}, {name: walks[1:]}, zero, zero,
        )  # fmt: skip
        score = growth_score(item, 20, {})
        assert score is not None
        assert score.rule is GROWTH_RULES[name]
        beyond, hits = beyond + score.calibrated_hits, hits + score.hits
    assert beyond <= LIMIT < hits


def test_a_pair_that_was_never_measured_has_no_score() -> None:
    blank = np.full((1, 1, len(STEPS)), np.nan)
    name = "grad_norm"
    item = PairedSignal(
        SIGNAL_STATISTICS[name], (Signal("a", name),), STEPS, (0,), False, 1.0,
        {name: blank}, {name: blank}, {name: blank[:0]}, blank, blank,
    )  # fmt: skip
    assert growth_score(item, 20, {}) is None


@pytest.fixture(scope="module")
def benchmark(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("fp8parity.tensor_alerts")
    return load_benchmark("early_warning")


SEEN_AT_ONCE = {
    "one outlier x 2^20": "alert scale_jump",
    "e5m2 for e4m3": "alert sqnr_drop",
    "an infinity": "alert nonfinite",
}
"""Faults whose first probe must speak: a scale 2^20 smaller; 6 dB lost where 3 are allowed; any infinity."""


@pytest.mark.parametrize("name", SEEN_AT_ONCE)
def test_a_fault_that_no_noise_hides_is_seen_at_its_first_probe(benchmark: ModuleType, name: str) -> None:
    found = benchmark.fault_rates(name, 1, 7)
    assert found["rules"][SEEN_AT_ONCE[name]]["latency"][0] == 0
    assert benchmark.problems({}, {name: found}) == []


def test_a_growing_signal_is_seen_when_it_has_doubled(benchmark: ModuleType) -> None:
    (name,) = (name for name, fault in benchmark.FAULTS.items() if fault.attention > 1)
    found = benchmark.fault_rates(name, 1, 7)["rules"]["attention_logits_max_growth"]
    # ln 2 / ln 1.01 = 70 steps, and three probes of 20 must show it; the noise of a pair is some 4 %
    assert 60 <= found["latency"][0] <= 160


def test_healthy_runs_of_current_scales_never_saturate(benchmark: ModuleType) -> None:
    rates = benchmark.healthy_rates([benchmark.run_of(3, index)[1] for index in range(2)])
    for rule in ("alert saturation", "alert nonfinite", "alert zero_amax", "saturation"):
        assert rates[rule]["alarms_per_run"] == 0, rule
