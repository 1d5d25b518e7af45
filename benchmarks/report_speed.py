"""How long the four report files of a 100-run study take, and how large the page is.

OMP_NUM_THREADS=1 python benchmarks/report_speed.py [--json FILE]

Synthetic runs (`tests/analysis/report_study.py`): 4 models x 5 arms x 5 seeds x 1200 steps. Judging is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

import report_study

from fp8parity_analysis import report

SHAPE = report_study.Shape(
    groups=("25m", "125m", "350m", "1b"),
    effects={f"rowwise-n{n}": 0.002 / (n + 1) for n in (0, 2, 4)},
    seeds=(0, 1, 2, 3, 4),
    steps=1200,
)


def main() -> None:
    """Measure and print; write JSON when asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = report_study.records_of(SHAPE)
        judgement = report_study.judged(records)
        began, used = time.perf_counter(), time.process_time()
        paths = report.write(Path(folder), judgement, records, report_study.STUDY, reproduce="fp8parity run")
        found = {
            "runs": len(records),
            "seconds": round(time.perf_counter() - began, 1),
            "processor_seconds": round(time.process_time() - used, 1),
            "megabytes": round(
                next(path for path in paths if path.suffix == ".html").stat().st_size / 1e6, 2
            ),
            "load": round(os.getloadavg()[0], 1),
        }
    print(
        f"{found['runs']} runs: {found['seconds']} s, {found['processor_seconds']} s of processor time, report.html "
        f"{found['megabytes']} MB; load average {found['load']} on {os.cpu_count()} cores"
    )
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
