"""Whether `criteria.early_stop: fail` leaves the error rates as declared, and what it saves.

    python benchmarks/early_stopping.py [--replicates 4000] [--json FILE]

Synthetic studies of 8 seeds with looks at 3, 5 and 8 (pair sd 0.16 % of the loss), judged by the vectorised core as
`judge` does: with the rule an arm ends at the first look at which it has failed, without it at the last. In per cent:

    false fail   failed at a true gap of exactly the margin, or below; nominal 5
    false pass   passed at a true gap of exactly the margin, or above; nominal 5
    seeds        mean number of seeds trained

The rule may not add to either: limits are binomial at 99.9 %. Exit status 1 when a rate lies above its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

import simulate

from fp8parity_analysis import core, sequential
from fp8parity_analysis.schema import Gate, Outcome, gate_of

ALPHA, MARGIN, LOOKS = 0.05, 0.0025, (3, 5, 8)
GAPS = (0.0, 0.0025, 0.005, 0.01)
FAILS = [outcome for outcome in Outcome if gate_of(outcome) is Gate.FAIL]
PASSES = [outcome for outcome in Outcome if gate_of(outcome) is Gate.PASS]


@dataclass(frozen=True)
class Row:
    """Shares of studies that fail and pass, and mean seeds, with the rule and without it, at one true gap."""

    gap: float
    spending: str
    replicates: int
    fail: float
    fail_without: float
    passed: float
    passed_without: float
    seeds: float

    def excess(self) -> list[str]:
        """Return which error rate lies above what chance allows at the nominal one."""
        limit = float(binom.ppf(0.999, self.replicates, ALPHA)) / self.replicates
        found = []
        if self.gap <= MARGIN and self.fail > limit:
            found.append(f"false fails {self.fail:.4f} > {limit:.4f}")
        if self.gap >= MARGIN and self.passed > limit:
            found.append(f"false passes {self.passed:.4f} > {limit:.4f}")
        if self.passed > self.passed_without:
            found.append("stopping at a fail made a pass")
        return found


def outcomes_by_look(gap: float, spending: str, replicates: int) -> np.ndarray:
    """Return the outcomes [looks, R] that `judge` would give at each look of the same studies."""
    rng = np.random.default_rng(zlib.crc32(f"{gap} {spending}".encode()))
    drawn = simulate.studies(rng, replicates, LOOKS[-1], "const" if gap else "none", gap)
    alphas = sequential.look_alphas(LOOKS, ALPHA, spending)
    return np.array(
        [
            core.judge_gaps(drawn.gap[:, :look], drawn.world.progress, margin=MARGIN, alpha=alpha).outcomes
            for look, alpha in zip(LOOKS, alphas, strict=True)
        ]
    )


def row(gap: float, spending: str, replicates: int) -> Row:
    """Return the rates at one true gap; the rule is the one of `early_stop.EarlyStop`."""
    outcomes = outcomes_by_look(gap, spending, replicates)
    fails = np.isin(outcomes, FAILS)
    ended = np.where(fails[:-1].any(axis=0), fails[:-1].argmax(axis=0), len(LOOKS) - 1)
    final = outcomes[ended, np.arange(replicates)]

    def share(found: np.ndarray, wanted: list[Outcome]) -> float:
        return float(np.isin(found, wanted).mean())

    return Row(
        gap, spending, replicates,
        share(final, FAILS), share(outcomes[-1], FAILS), share(final, PASSES), share(outcomes[-1], PASSES),
        float(np.array(LOOKS)[ended].mean()),
    )  # fmt: skip


def main() -> None:
    """Print one row per gap and spending."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row(gap, s, options.replicates) for s in ("bonferroni", "obrien_fleming") for gap in GAPS]
    print("spending         gap  fail  without  pass  without  seeds")
    for one in rows:
        shares = [100 * share for share in (one.fail, one.fail_without, one.passed, one.passed_without)]
        print(
            f"{one.spending:14} {100 * one.gap:.2f} {shares[0]:5.1f} {shares[1]:8.1f} {shares[2]:5.1f} {shares[3]:8.1f}"
            f" {one.seeds:6.2f}",
            *one.excess(),
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any(one.excess() for one in rows) else 0)


if __name__ == "__main__":
    main()
