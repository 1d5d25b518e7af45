"""Does the screen of tensors keep its false discovery rate, and what does it find? Against the stated rates.

    OMP_NUM_THREADS=1 python benchmarks/tensor_fdr.py [--screens 2000] [--json FILE]

A screen is one study: 288 tensors, n seeds, one paired difference each. All tensors of a seed share half a standard
deviation of its luck; 6 are bad by 4 standard deviations of a tensor's own noise. `tensor_tests.screen` flags them,
with the plain t and with the variance of 8 matched null pairs. Exit status 1 when a rate is outside its limits:
the false discovery proportion lies in [0, 1], so the mean of R screens with mean f has a standard error of at most
sqrt(f (1 - f) / R); Benjamini and Hochberg bound f by q for tensors whose noise depends positively; rates found are
compared with the stated ones at 4 standard errors of a share that varies wholly between screens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fp8parity_analysis.tensor_tests import FDR, screen

TENSORS, BAD, SHIFT, COMMON, NULLS = 288, 6, 4.0, 0.5, 8
STATED_FOUND = {(3, 0): 0.05, (5, 0): 0.85, (8, 0): 1.00, (3, 8): 0.98, (5, 8): 1.00, (8, 8): 1.00}
STATED_BONFERRONI = {3: 0.02, 5: 0.28, 8: 0.97}
ROUNDING = 0.01
"""The stated rates are whole per cents of a simulation of their own."""


@dataclass(frozen=True)
class Rates:
    """Rates of one setting over `screens` screens: FDR, share of the bad found, the same by Bonferroni at 5 %.

    `uncorrected` is the number of healthy tensors that p < 5 % flags in a screen.
    """

    seeds: int
    nulls: int
    screens: int
    fdr: float
    found: float
    bonferroni: float
    uncorrected: float

    def problems(self) -> list[str]:
        """Return which rates are outside their limits."""
        texts = []
        se = math.sqrt(FDR * (1 - FDR) / self.screens)
        if self.fdr > FDR + 4 * se:
            texts.append(f"FDR {self.fdr:.3f} above {FDR} + 4 se {se:.4f}")
        texts += self._compare("found", self.found, STATED_FOUND[(self.seeds, self.nulls)])
        if not self.nulls:
            texts += self._compare("Bonferroni", self.bonferroni, STATED_BONFERRONI[self.seeds])
        return texts

    def _compare(self, name: str, value: float, stated: float) -> list[str]:
        share = min(max(stated, 1.0 / self.screens), 1.0 - 1.0 / self.screens)
        limit = 4 * math.sqrt(share * (1 - share) / self.screens) + ROUNDING
        return (
            [f"{name} {value:.3f}, stated {stated:.2f} +- {limit:.3f}"] if abs(value - stated) > limit else []
        )


def simulate(rng: np.random.Generator, units: int, *, bad: bool) -> np.ndarray:
    """Return differences [units, TENSORS] in units of a tensor's own noise."""
    values = rng.standard_normal((units, TENSORS)) + COMMON * rng.standard_normal((units, 1))
    if bad:
        values[:, :BAD] += SHIFT
    return values


def rates(seeds: int, nulls: int, screens: int, seed: int = 0) -> Rates:
    """Measure one setting."""
    rng = np.random.default_rng([seed, seeds, nulls])
    counted = np.zeros(4)
    for _ in range(screens):
        values = simulate(rng, seeds, bad=True)
        result = screen(values, harm=1, nulls=simulate(rng, nulls, bad=False) if nulls else None)
        flagged, strict, plain = result.flagged(), result.p < 0.05 / TENSORS, result.p < 0.05
        false = flagged[BAD:].sum()
        counted += (
            false / max(1, flagged.sum()),
            flagged[:BAD].mean(),
            strict[:BAD].mean(),
            plain[BAD:].sum(),
        )
    return Rates(seeds, nulls, screens, *(counted / screens).tolist())


def main() -> int:
    """Measure every setting; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--screens", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [rates(n, m, options.screens) for n, m in STATED_FOUND]
    print("seeds nulls   FDR  found  Bonferroni  false at p < 5 %")
    for item in found:
        print(
            f"{item.seeds:5} {item.nulls:5} {item.fdr:5.3f} {item.found:6.3f} {item.bonferroni:11.3f} "
            f"{item.uncorrected:17.1f}  {'; '.join(item.problems())}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(item) for item in found], indent=1) + "\n")
    return 1 if any(item.problems() for item in found) else 0


if __name__ == "__main__":
    sys.exit(main())
