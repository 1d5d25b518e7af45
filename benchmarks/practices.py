"""Show how often today's practice calls a difference between curves that differ by noise only.

    python benchmarks/practices.py [--studies 4000] [--json FILE]

Held-out curves of BF16 against an FP8 arm with the same expectation (the generator of tests/analysis/simulate.py,
pair sd 0.16 % of the loss), judged by the rules people use and by the paired interval. Rates in per cent, and beside
each the rate at which the rule notices a constant gap of 2 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

import simulate

Rule = Callable[[simulate.Studies], np.ndarray]


def final_gap_beyond(threshold: float) -> Rule:
    """One pair, |gap at the last evaluation| above a threshold."""
    return lambda s: np.abs(s.gap[:, 0, -1]) > threshold


def pooled_over_evaluations(s: simulate.Studies) -> np.ndarray:
    """Flag by a two-sided 5 % t-test that takes every evaluation of the last half of every pair for a replicate."""
    half = s.gap[:, :, s.gap.shape[2] // 2 :].reshape(len(s.gap), -1)
    return stats.ttest_1samp(half, 0.0, axis=1).pvalue < 0.05


def within_five_percent(s: simulate.Studies) -> np.ndarray:
    """One pair, more than 1 % of the evaluations further apart than 5 % of the loss."""
    return (np.abs(np.expm1(s.gap[:, 0])) > 0.05).mean(axis=1) > 0.01


def correlation_below(threshold: float) -> Rule:
    """One pair, Pearson correlation of the two loss curves below a threshold."""

    def rule(s: simulate.Studies) -> np.ndarray:
        a, b = np.exp(s.control[:, 0, 0]), np.exp(s.test[:, 0])
        a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
        r = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
        return r < threshold

    return rule


def paired_t(s: simulate.Studies) -> np.ndarray:
    """Flag by a one-sided 5 % paired t over the seeds, on the mean of the last tenth per seed."""
    tail = s.gap[:, :, -max(1, round(0.1 * s.gap.shape[2])) :].mean(axis=2)
    return stats.ttest_1samp(tail, 0.0, axis=1, alternative="greater").pvalue < 0.05


RULES: dict[str, tuple[int, Rule]] = {
    "one pair, final gap beyond 0.1 %": (1, final_gap_beyond(0.001)),
    "one pair, final gap beyond 0.25 %": (1, final_gap_beyond(0.0025)),
    "three pairs, t-test over their evaluations": (3, pooled_over_evaluations),
    "one pair, correlation below 0.95": (1, correlation_below(0.95)),
    "one pair, 5 % apart at more than 1 % of the evaluations": (1, within_five_percent),
    "three seeds, paired t over seeds (fp8parity)": (3, paired_t),
    "eight seeds, paired t over seeds (fp8parity)": (8, paired_t),
}


def rates(studies: int) -> list[dict[str, object]]:
    """Return, per rule, the share of studies it flags with no difference and with a constant gap of 2 %."""
    rows = []
    for index, (name, (n_seeds, rule)) in enumerate(RULES.items()):
        rng = np.random.default_rng([2026, index])
        null = rule(simulate.studies(rng, studies, n_seeds)).mean()
        real = rule(simulate.studies(rng, studies, n_seeds, "const", 0.02)).mean()
        rows.append(
            {"rule": name, "no_difference": float(null), "gap_of_2_percent": float(real), "studies": studies}
        )
    return rows


def main() -> None:
    """Print the table; write it as JSON when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = rates(options.studies)
    for row in rows:
        print(f"{100 * row['no_difference']:6.1f} {100 * row['gap_of_2_percent']:6.1f}  {row['rule']}")  # type: ignore[operator]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
