"""The golden cases: how each is drawn. Run as a script, it freezes one draw of each in tests/gold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import simulate

GOLD = Path(__file__).parent.parent / "gold"
STEPS = simulate.BASE.steps


def _study(
    rng: np.random.Generator, n: int, kind: str = "none", size: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Losses of control [n, 1, K] and test [n, K]."""
    drawn = simulate.studies(rng, 1, n, kind, size)
    return np.exp(drawn.control[0]), np.exp(drawn.test[0])


def _plain(rng: np.random.Generator, n: int, kind: str = "none", size: float = 0.0) -> pd.DataFrame:
    return simulate.table(*_study(rng, n, kind, size), STEPS)


def _nulls(rng: np.random.Generator, m: int, scale: float = 1.0) -> np.ndarray:
    """Losses of null pairs [m, 2, K], their differences shrunk by `scale`."""
    logs = simulate.runs(rng, 1, m, 2)[0]
    middle = logs.mean(axis=1, keepdims=True)
    return np.exp(middle + scale * (logs - middle))


def _after(losses: np.ndarray, step: int, value: float) -> np.ndarray:
    changed = losses.copy()
    changed[step < STEPS] = value
    return changed


def g01(rng):
    return _plain(rng, 5)


def g02(rng):
    return _plain(rng, 3, "const", 0.01)


def g03(rng):
    return simulate.table(*_study(rng, 1, "const", 0.01), STEPS, null=_nulls(rng, 8))


def g04(rng):
    return _plain(rng, 1, "const", 0.01)


def g05(rng):
    return _plain(rng, 3, "late", 0.04)


def g06(rng):
    control, test = _study(rng, 3)
    test[1] = _after(test[1], 1200, np.nan)
    return simulate.table(control, test, STEPS)


def g07(rng):
    control, test = _study(rng, 5)
    test[0, 20] *= 1.6
    test[2, 28] = np.inf
    return simulate.table(control, test, STEPS)


def g08(rng):
    control, _ = _study(rng, 5)
    return simulate.table(control, control[:, 0], STEPS)


def g09(rng):
    table = _plain(rng, 5)
    return table[~((table.arm == "fp8") & (table.seed == 2) & (table.step > 1500))]


def g10(rng):
    control, test = _study(rng, 5)
    control[3, 0] = _after(control[3, 0], 1500, np.nan)
    return simulate.table(control, test, STEPS)


def g11(rng):
    control, _ = _study(rng, 2)
    gaps = np.array([0.0002, 0.0028])[:, None] + 1e-5 * rng.standard_normal((2, len(STEPS)))
    return simulate.table(control, control[:, 0] * np.exp(gaps), STEPS)


def g12(rng):
    table = _plain(rng, 5)
    return table[(table.arm == "bf16") | (table.step % 100 == 0)]


def g13(rng):
    return _plain(rng, 5, "const", -0.007)


def g14(rng):
    control, test = _study(rng, 3)
    test[2] = _after(test[2], 1399, 7.5)
    return simulate.table(control, test, STEPS)


def g15(rng):
    return simulate.table(*_study(rng, 1, "const", 0.0025), STEPS, null=_nulls(rng, 8, scale=0.1))


def same_gap(rng):
    control, _ = _study(rng, 4)
    return simulate.table(control, control[:, 0] * 1.002, STEPS)


def two_sets(rng):
    control, test = _study(rng, 5, "const", -0.004)
    other = _study(rng, 5, "const", 0.004)
    primary = simulate.table(control, test, STEPS).assign(split="held_out")
    return pd.concat([primary, simulate.table(*other, STEPS).assign(split="code")], ignore_index=True)


def both_nan(rng):
    control, test = _study(rng, 3)
    control[1, 0] = _after(control[1, 0], 1600, np.nan)
    test[1] = _after(test[1], 1500, np.nan)
    return simulate.table(control, test, STEPS)


def shrinks(rng):
    return _plain(rng, 5, "shrink", 0.01)


def flat_then_nan(rng):
    control, test = _study(rng, 3)
    test[0, STEPS > 600] = test[0, STEPS == 600]  # the loss stops moving, a little above its control at first
    test[0] = _after(np.minimum(test[0], control[0, 0] * 1.03), 1700, np.nan)
    return simulate.table(control, test, STEPS)


def outlier(rng):
    control, test = _study(rng, 5)
    test[3] *= np.exp(0.02)
    return simulate.table(control, test, STEPS)


DRAWN = {
    **{f"g{number:02d}": globals()[f"g{number:02d}"] for number in range(1, 16)},
    **{
        function.__name__: function
        for function in (same_gap, two_sets, both_nan, shrinks, flat_then_nan, outlier)
    },
}


def draw(name: str, seed: int = 0) -> pd.DataFrame:
    """One draw of a case."""
    return DRAWN[name](np.random.default_rng([seed, sorted(DRAWN).index(name)]))


def freeze() -> None:
    GOLD.mkdir(exist_ok=True)
    for name in DRAWN:
        digits = "%.17g" if name == "same_gap" else "%.9g"
        draw(name).to_csv(GOLD / f"{name}.csv", index=False, float_format=digits, na_rep="nan")


if __name__ == "__main__":
    freeze()
