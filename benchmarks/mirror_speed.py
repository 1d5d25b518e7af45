"""How long 50 runs of 2000 steps and 20 metrics take into a sqlite file, and that a second copy adds nothing.

python benchmarks/mirror_speed.py [--runs 50] [--steps 2000] [--metrics 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from fp8parity_analysis.mlflow_content import Points, RunContent
from fp8parity_analysis.mlflow_mirror import mirror_run
from fp8parity_analysis.mlflow_sink import Sink


def content(number: int, steps: int, metrics: int) -> RunContent:
    """Return one run of random curves."""
    rng = np.random.default_rng(number)
    at = np.arange(1, steps + 1, dtype=np.int64)
    series = {f"train/m{i}": Points(at, rng.normal(size=steps), at * 100) for i in range(metrics)}
    params = {"recipe": f"arm{number % 5}", "seed": str(number // 5)}
    return RunContent(f"run{number}", f"25m/s{number // 5}/arm", "FINISHED", 0, 1, params, {}, series)


def main() -> None:
    """Measure and print; write JSON when asked."""
    parser = argparse.ArgumentParser()
    for name, value in (("runs", 50), ("steps", 2000), ("metrics", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        seconds, points = [], []
        for _ in range(2):
            began = time.perf_counter()
            sink = Sink.open(f"sqlite:///{database}", "benchmark", "one")
            for number in range(options.runs):
                mirror_run(sink, content(number, options.steps, options.metrics))
            seconds.append(round(time.perf_counter() - began, 1))
            points.append(sink.points_written)
        mib = database.stat().st_size / 2**20
    found = {"points": points[0], "seconds": seconds[0], "database_mib": round(mib)}
    found |= {"again_points": points[1], "again_seconds": seconds[1]}
    print(
        f"{points[0]:,} points in {seconds[0]} s ({points[0] / seconds[0]:,.0f}/s), {mib:.0f} MiB; "
        f"again: {points[1]} points in {seconds[1]} s"
    )
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
