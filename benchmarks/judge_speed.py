"""How fast are verdicts? On one core, against the limits in seconds.

    OMP_NUM_THREADS=1 python benchmarks/judge_speed.py [--json FILE]

What is in memory is timed many times in processor time and the least counts, as in `timeit`: more than that is
other programs on the machine. Files are read once, by the clock. Exit status 1 above a limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

from typing import TYPE_CHECKING

import simulate

from fp8parity_analysis import gap as gaps
from fp8parity_analysis import trajectory
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.importers import read_curves
from fp8parity_analysis.verdict import Criteria, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Timing:
    """Median and least seconds of `repeats` runs against a limit."""

    name: str
    seconds: float
    least: float
    limit: float
    repeats: int

    @property
    def ok(self) -> bool:
        """Whether the least time keeps the limit."""
        return self.least <= self.limit


def timed(name: str, limit: float, repeats: int, work: Callable[[], object]) -> Timing:
    """Run `work` several times after one warm-up (none for a single run)."""
    clock = time.process_time if repeats > 1 else time.perf_counter
    if repeats > 1:
        work()
    taken = []
    for _ in range(repeats):
        started = clock()
        work()
        taken.append(clock() - started)
    return Timing(name, float(np.median(taken)), min(taken), limit, repeats)


def one_verdict(rng: np.random.Generator) -> Timing:
    """Judge 8 seeds x 40 evaluations, already in memory."""
    study = simulate.studies(rng, 1, 8)
    curves = simulate.curve_set(study, 0)
    return timed("verdict, 8 seeds x 40 evaluations", 0.005, 100, lambda: judge(curves, Criteria()))


def one_trajectory_test(rng: np.random.Generator) -> Timing:
    """Draw 999 labellings of 16 pairs x 40 evaluations."""
    test, null = rng.standard_normal((8, 40)), rng.standard_normal((8, 40))
    return timed(
        "trajectory test, B = 999, 16 pairs x 40",
        0.002,
        100,
        lambda: trajectory.label_permutation(test, null, np.random.default_rng(0)),
    )


def spike_scan(rng: np.random.Generator) -> Timing:
    """Scan 8 seeds x 100 000 training steps for spikes."""
    loss = 3.0 + 0.05 * rng.standard_normal((8, 100_000))
    return timed("spike scan, 8 x 100 000 steps", 0.5, 5, lambda: gaps.spikes(loss))


def _long_table(rng: np.random.Generator, n_seeds: int, n_steps: int) -> pd.DataFrame:
    """Return control and test of `n_seeds` seeds, one row per step and run."""
    steps = np.arange(1, n_steps + 1)
    base = 2.0 + 8.5 * (1.0 + steps / 15.0) ** -0.45
    loss = base * np.exp(
        0.002 * rng.standard_normal((2, n_seeds, 1)) + 0.001 * rng.standard_normal((2, n_seeds, n_steps))
    )
    return pd.DataFrame(
        {
            "seed": np.tile(np.repeat(np.arange(n_seeds), n_steps), 2),
            "arm": np.repeat(["bf16", "fp8"], n_seeds * n_steps),
            "step": np.tile(steps, 2 * n_seeds),
            "loss": loss.ravel(),
        }
    )


def thousand_pairs(rng: np.random.Generator, folder: Path) -> Timing:
    """Read and judge 1000 pairs x 2000 steps from Parquet."""
    path = folder / "pairs.parquet"
    _long_table(rng, 1000, 2000).to_parquet(path, index=False)
    return timed(
        "1000 pairs x 2000 steps from Parquet, judged",
        10.0,
        1,
        lambda: judge(read_curves([path]), Criteria()),
    )


def big_csv(rng: np.random.Generator, folder: Path) -> Timing:
    """Read and judge a CSV of 5 million rows: 25 seeds, two arms, 100 000 steps."""
    path = folder / "rows.csv"
    _long_table(rng, 25, 100_000).to_csv(path, index=False, float_format="%.6f")
    return timed("CSV of 5 million rows, judged", 15.0, 1, lambda: judge(read_curves([path]), Criteria()))


def ingest(rng: np.random.Generator) -> Timing:
    """Turn a table of 8 pairs x 100 000 training steps into curves and judge them with the spike scan."""
    table = _long_table(rng, 8, 100_000).assign(split="train")
    criteria = Criteria(endpoint="train")
    return timed(
        "ingest and judge 8 pairs x 100 000 training steps",
        5.0,
        3,
        lambda: judge(CurveSet.from_table(table), criteria),
    )


def timings() -> Iterator[Timing]:
    """Time everything in turn."""
    rng = np.random.default_rng(0)
    for measure in (one_verdict, one_trajectory_test, spike_scan, ingest):
        yield measure(rng)
    with tempfile.TemporaryDirectory() as folder:
        yield thousand_pairs(rng, Path(folder))
        yield big_csv(rng, Path(folder))


def main() -> int:
    """Print every timing with its limit; 1 when one lies above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    options = parser.parse_args()
    measured = []
    for timing in timings():
        measured.append(timing)
        mark = "ok  " if timing.ok else "FAIL"
        print(
            f"{mark} {timing.name}: {timing.seconds:.4g} s (least {timing.least:.4g}), limit {timing.limit:g} s",
            flush=True,
        )
    if options.json:
        document = [{**asdict(timing), "ok": timing.ok} for timing in measured]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(timing.ok for timing in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
