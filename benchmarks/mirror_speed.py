"""How long 50 runs of 2000 steps and 20 metrics take into a sqlite file, and that a second copy adds nothing.

python benchmarks/mirror_speed.py [--runs 50] [--steps 2000] [--metrics 20] [--api] [--json FILE]

Two million points took 60 s of processor time (user and system) on one core of a loaded machine; see docs/mlflow.md.
"""

from __future__ import annotations

import argparse
import json
import os
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


def measure(database: Path, options: argparse.Namespace) -> dict[str, float]:
    """Copy all runs and return points written, seconds on the clock, and processor seconds."""
    runs = [content(number, options.steps, options.metrics) for number in range(options.runs)]
    began, used = time.perf_counter(), processor_seconds()
    sink = Sink.open(f"sqlite:///{database}", "benchmark", "one")
    if options.api:
        sink.engine = None
    for run in runs:
        mirror_run(sink, run)
    return {
        "points": sink.points_written,
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
    }


def processor_seconds() -> float:
    """Return what this process has used, in user and system mode."""
    return time.process_time()


def main() -> None:
    """Measure and print; write JSON when asked."""
    parser = argparse.ArgumentParser()
    defaults = {"runs": 50, "steps": 2000, "metrics": 20}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--api", action="store_true", help="all points through MLflow's API, for comparison")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        first, again = measure(database, options), measure(database, options)
        mib = database.stat().st_size / 2**20
    load = os.getloadavg()[1]
    for words, row in (("first", first), ("again", again)):
        print(
            f"{words}: {row['points']:,} points in {row['seconds']} s "
            f"({row['processor_seconds']} s of processor time)"
        )
    print(f"{mib:.0f} MiB; load average {load:.1f} on {os.cpu_count()} cores")
    if options.json:
        found = {"first": first, "again": again, "mib": round(mib), "api": options.api, "load": load}
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
