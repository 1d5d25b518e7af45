"""Did the curves part anywhere? Exact permutation tests of the maximum over the evaluation grid.

Label permutation among test pairs and matched null pairs (Nichols and Holmes 2002), or sign flips of the test
pairs where there is no null. One-sided: a test arm that is worse somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from fp8parity_analysis.paired import all_signs

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8parity_analysis.gap import FloatArray

DRAWS = 999
SATURATION = 0.7
"""Share of its plateau that the null's spread must have reached before the test uses an evaluation."""
SIGN_FLIP_MIN_SEEDS = 5
_TIE = 1e-10
_SORT_KEYS = 64
_PART = 4_000_000


@dataclass(frozen=True)
class TrajectoryTest:
    """`p` of the maximum over the grid.

    `first` is the first grid index above the critical value at `alpha`, or None; `smallest_p` is the least that
    so few labellings can give.
    """

    p: float
    first: int | None
    kind: str
    n_units: int
    smallest_p: float


def burn_in(null: FloatArray) -> int:
    """Return the first index at which the spread of `null` [u, K] reaches 70 % of its plateau.

    The plateau is the median spread over the second half. Before that, rounding noise that saturates faster
    than the null's would be taken for an effect.
    """
    spread = np.sqrt(np.mean(null**2, axis=0))
    plateau = float(np.median(spread[len(spread) // 2 :]))
    return int(np.argmax(spread >= SATURATION * plateau))


def label_permutation(
    test: FloatArray, null: FloatArray, rng: np.random.Generator, *, alpha: float = 0.05, draws: int = DRAWS
) -> TrajectoryTest:
    """Test `test` [n, K] against `null` [m, K], both on the grid after burn-in, without NaN.

    Under the null hypothesis the pairs are exchangeable and sign-symmetric. Statistic: max over k of the
    signed sum over the labelled units of d / rms, rms over all units. All labellings when they are few,
    else `draws`.
    """
    units = np.concatenate([_in_canonical_order(test), _in_canonical_order(null)])
    rms = np.sqrt(np.mean(units**2, axis=0))
    scaled = units / np.where(rms > 0, rms, 1.0)
    labels = _labellings(len(test), len(units), rng, draws)
    exact = _is_exact(len(test), len(units), draws)
    return _maximum_test(scaled, lambda part: labels @ part, labels, alpha, "label permutation", exact=exact)


def sign_flip(
    test: FloatArray, rng: np.random.Generator, *, alpha: float = 0.05, draws: int = DRAWS
) -> TrajectoryTest:
    """Test `test` [n, K], n >= 5, without NaN, by the maximum over k of the one-sample t under sign flips."""
    ordered = _in_canonical_order(test)
    n = len(ordered)
    exact = 2**n <= draws + 1
    signs = all_signs(n) if exact else _random_signs(n, rng, draws)

    def t_statistics(part: FloatArray) -> FloatArray:
        squares = (part**2).sum(axis=0)
        means = signs @ part / n
        variance = np.maximum(squares - n * means**2, 1e-24 * squares) / (n - 1)
        return np.where(squares > 0, means / np.sqrt(np.where(squares > 0, variance, 1.0) / n), 0.0)

    return _maximum_test(ordered, t_statistics, signs, alpha, "sign flip", exact=exact)


def _in_canonical_order(units: FloatArray) -> FloatArray:
    """Sort the units by their last values, so that renaming seeds cannot change a sampled p-value."""
    return units[np.lexsort(units[:, -_SORT_KEYS:].T)]


def _maximum_test(
    units: FloatArray,
    statistic: Callable[[FloatArray], FloatArray],
    labels: FloatArray,
    alpha: float,
    kind: str,
    *,
    exact: bool,
) -> TrajectoryTest:
    """Compare the maximum of `statistic` [B, k] over the grid under all labellings with row 0, the observed one.

    The grid is walked in parts, so that long ones fit in memory.
    """
    width = max(1, _PART // len(labels))
    reduced = [
        (part.max(axis=1), part[0].copy())
        for start in range(0, units.shape[1], width)
        for part in (statistic(units[:, start : start + width]),)
    ]
    maxima = np.max([highest for highest, _ in reduced], axis=0)
    observed = np.concatenate([first_row for _, first_row in reduced])
    slack = _TIE * max(1.0, abs(float(maxima[0])))
    others = maxima if exact else maxima[1:]
    hits = int(np.count_nonzero(others >= maxima[0] - slack))
    p = hits / len(maxima) if exact else (1 + hits) / len(maxima)
    critical = np.sort(maxima)[::-1][min(len(maxima) - 1, int(alpha * len(maxima)))]
    above = np.flatnonzero(observed > critical + slack)
    first = int(above[0]) if p <= alpha and len(above) else None
    return TrajectoryTest(p=p, first=first, kind=kind, n_units=len(units), smallest_p=1 / len(maxima))


def _is_exact(n: int, n_units: int, draws: int) -> bool:
    return comb(n_units, n) * (1 << n) <= draws + 1


def _labellings(n: int, n_units: int, rng: np.random.Generator, draws: int) -> FloatArray:
    """Return signed labels [B, n_units], the observed one first: n entries of +-1, the rest 0."""
    if _is_exact(n, n_units, draws):
        rows = []
        for chosen in combinations(range(n_units), n):
            for signs in product((1.0, -1.0), repeat=n):
                row = np.zeros(n_units)
                row[list(chosen)] = signs
                rows.append(row)
        return np.array(rows)
    keys = rng.random((draws + 1, n_units))
    limit = np.partition(keys, n - 1, axis=1)[:, n - 1 : n]
    labels = np.where(keys <= limit, _random_signs(n_units, rng, draws), 0.0)
    labels[0] = np.arange(n_units) < n
    return np.asarray(labels, dtype=np.float64)


def _random_signs(n: int, rng: np.random.Generator, draws: int) -> FloatArray:
    signs = 2.0 * rng.integers(0, 2, size=(draws + 1, n)) - 1.0
    signs[0] = 1.0
    return np.asarray(signs, dtype=np.float64)
