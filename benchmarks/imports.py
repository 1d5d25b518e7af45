"""What a worker imports, and what the garbage collector costs it meanwhile.

    python benchmarks/imports.py [--pairs 5] [--json FILE]

Starts processes in pairs, alternately one that imports as a worker does (`fp8parity.process.importing`) and one that
leaves the collector on, and prints the median of the ratios. One more of each warms the disk's cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

IMPORTS = "import fp8parity.runner; from fp8parity import precision; precision.import_code_generation()"
COMMANDS = {
    "collector on": f"{IMPORTS}",
    "collector off": f"from fp8parity.process import importing\nwith importing(): {IMPORTS}",
}


def seconds(command: str) -> float:
    """Return what a process takes from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", command], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(pairs: int) -> dict[str, object]:
    """Return the seconds of every process, by kind, and the median ratio of off to on."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for pair in range(pairs + 1):
        for name, command in COMMANDS.items():
            taken = round(seconds(command), 2)
            if pair:
                found[name].append(taken)
    ratios = [off / on for on, off in zip(*found.values(), strict=True)]
    return {"seconds": found, "off_over_on": round(median(ratios), 3)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = json.dumps(measure(options.pairs))
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
