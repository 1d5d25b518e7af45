"""The nightly: how often it alarms for nothing, and how soon it finds a step.

    OMP_NUM_THREADS=1 python benchmarks/nightly_alarms.py [--histories 1000] [--json FILE]

Simulated nights with the noise measured on an H200 (`tests/analysis/nights.py`). Exit status 1 when the false-alarm
rate exceeds the stated one beyond the binomial 99.9 % limit, or a 0.5 % gap is found within two nights in under 80 %.
The same for a device that repeats itself bit for bit until a change of the software draws new noise on night 10.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

import nights

from fp8parity_analysis.history_series import FALSE_ALARMS_PER_NIGHT
from fp8parity_analysis.history_steps import State

ONSET = 20
REDRAW = 10
SQNR = "tensor/rowwise/blocks.1.mlp.down/weight/sqnr_db"
FAULTS: tuple[dict[str, tuple[str, float, float]], ...] = (
    {
        "gap +0.5 %": ("gap/rowwise", 0.005, 1.0),
        "gap +1 %": ("gap/tensorwise", 0.01, 1.0),
        "noise floor x 10": ("noise/25m", 0.0, 10.0),
        "SQNR of a layer -3 dB": (SQNR, -3.0, 1.0),
    },
    {"gap +2 %": ("gap/rowwise", 0.02, 1.0), "noise floor x 20": ("noise/25m", 0.0, 20.0)},
)
"""Faults that come with new noise on a device that repeats itself: series, addend, factor; a replay each."""
WITHIN = (1, 2, 3, 5, 7, 10)
ALARMS = (State.NEW, State.BETTER)


def false_alarms(simulated: nights.Simulated, *, floors: bool) -> tuple[float, int]:
    """Return the rate over nights 10 to 30 and the number of histories that alarm on night `ONSET`."""
    alarm = np.isin(nights.replayed(simulated, floors=floors).state, ALARMS).any(-1)
    return float(alarm[:, 9:].mean()), int(alarm[:, ONSET - 1].sum())


def found(simulated: nights.Simulated, name: str, by: float, times: float = 1.0) -> list[float]:
    """Return the share of histories in which a step from night `ONSET` on is found within `WITHIN` nights."""
    told = nights.replayed(simulated.shifted(name, ONSET, by, times=times))
    alarm = np.isin(told.state[:, ONSET - 1 :, simulated.column(name)], (State.NEW, State.STILL))
    return [float(alarm[:, :k].any(1).mean()) for k in WITHIN]


def repeating(seeds: int, histories: int) -> dict[str, Any]:
    """Return, for a device that repeats itself, how often a harmless redraw alarms and faults are told.

    Counted from the redraw to the last night, so that what repeated nights add would show.
    """
    world = nights.World(seeds=seeds, nights=REDRAW + 4)
    simulated = nights.simulate(np.random.default_rng(10 + seeds), histories, world).repeated((REDRAW,))

    noise = [name for name in simulated.names if not name.startswith("speed")]
    rates: dict[str, Any] = {
        "harmless": round(_told(simulated, nights.replayed(simulated).state, noise) * histories)
    }
    for faults in FAULTS:  # those of one replay are on different series, which do not touch each other
        shifted = simulated
        for name, by, times in faults.values():
            shifted = shifted.shifted(name, REDRAW, by, times=times)
        state = nights.replayed(shifted).state
        rates |= {words: _told(shifted, state, [name]) for words, (name, _, _) in faults.items()}
    return rates


def _told(simulated: nights.Simulated, state: np.ndarray, names: list[str]) -> float:
    """Return the share of histories in which one of `names` steps on night `REDRAW` or later."""
    seen = state[:, REDRAW - 1 :, [simulated.column(name) for name in names]]
    return float(np.isin(seen, ALARMS).any((1, 2)).mean())


def measure(histories: int) -> list[dict[str, Any]]:
    """Return one row per number of seeds."""
    rows = []
    for seeds in (3, 4, 5):
        simulated = nights.simulate(np.random.default_rng(seeds), histories, nights.World(seeds=seeds))
        rate, hits = false_alarms(simulated, floors=False)
        rows.append(
            {
                "seeds": seeds,
                "rate_all_nights": rate,
                "alarms_night_20": hits,
                "rate_all_nights_with_floors": false_alarms(simulated, floors=True)[0],
                "gap_0.25%": found(simulated, "gap/rowwise", 0.0025),
                "gap_0.5%": found(simulated, "gap/rowwise", 0.005),
                "throughput_-10%": found(simulated, "speedup/rowwise", 0.0, 0.9),
                "repeating": repeating(seeds, histories),
            }
        )
    return rows


def main() -> int:
    """Print the rates; 1 when one is outside its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the rates to this file")
    options = parser.parse_args()
    limit = int(binom.ppf(0.9995, options.histories, FALSE_ALARMS_PER_NIGHT))
    rows = measure(options.histories)
    bad = False
    for row in rows:
        repeats = row["repeating"]
        bad |= row["alarms_night_20"] > limit or row["gap_0.5%"][1] < 0.8 or repeats["harmless"] > limit
        print(
            f"{row['seeds']} seeds: false alarms {100 * row['rate_all_nights']:.2f} % of nights "
            f"({row['alarms_night_20']} of {options.histories} on night {ONSET}, limit {limit}), "
            f"with the smallest steps in force {100 * row['rate_all_nights_with_floors']:.2f} %"
        )
        for name in ("gap_0.25%", "gap_0.5%", "throughput_-10%"):
            shares = ", ".join(
                f"{k}: {100 * share:.0f} %" for k, share in zip(WITHIN, row[name], strict=True)
            )
            print(f"    {name} found within nights {shares}", flush=True)
        shares = ", ".join(f"{k} {100 * v:.0f} %" for k, v in repeats.items() if k != "harmless")
        print(
            f"    on a device that repeats itself: harmless redraw told in {repeats['harmless']} of "
            f"{options.histories} (limit {limit}); told beside a redraw: {shares}",
            flush=True,
        )
    if options.json:
        document = {
            "histories": options.histories,
            "stated": FALSE_ALARMS_PER_NIGHT,
            "within": WITHIN,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
