"""How long does the tensor health of a study take on one core? 300 tensors, 100 probes, 16 runs, from the disk.

    OMP_NUM_THREADS=1 python benchmarks/tensor_speed.py [--json FILE]

Reading, testing, ranking and drawing are timed in processor time: more than that is other programs on the machine.
Exit status 1 above the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

from report_study import Shape, judged
from tensor_study import TensorShape, write_tensor_study

from fp8parity_analysis.report_tensor import section_of
from fp8parity_analysis.report_tensor_figures import figures_of
from fp8parity_analysis.study_runs import StudyRuns
from fp8parity_analysis.tensor_health import examine

LIMIT_SECONDS = 10.0
SEEDS = (0, 1, 2, 3)
ARMS = {"tensorwise": 0.0, "rowwise": 0.0}


def main() -> int:
    """Time one study; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = tuple(range(3, 301, 3))
    shape = TensorShape(blocks=10, linears=("q", "o", "gate", "up", "down"), steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        records = write_tensor_study(Path(folder), shape, Shape(effects=ARMS, seeds=SEEDS), per_part=1)
        judgement, runs = judged(records), StudyRuns.of(records)
        begin = time.process_time()
        health = examine(judgement, runs)
        examined = time.process_time() - begin
        section_of(health)
        pictures = figures_of(health)
        drawn = time.process_time() - begin - examined
    figures = [
        figure for arm in pictures.values() for part in (arm.amax, arm.underflow, arm.sqnr) for figure in part
    ]
    document = {
        "runs": len(records),
        "tensors": len(health.arms[0].tensors),
        "probes": health.arms[0].n_probes,
        "examine_seconds": round(examined, 2),
        "draw_seconds": round(drawn, 2),
        "svg_bytes": sum(len(figure.svg) for figure in figures),
        "limit_seconds": LIMIT_SECONDS,
    }
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if examined + drawn > LIMIT_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
