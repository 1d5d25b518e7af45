"""Has a monitored number stepped? Tonight and the last few nights against the good nights before them.

One code path for one history and for thousands of simulated ones: arrays [R, N, S] of R histories, N nights and S
series go in, the state of every series on every night comes out. For a window of the last k good nights

    T_k = (mean of the window - mean of the baseline) / (s sqrt(1/k + 1/n))

with mean, s and n those of the good nights before the window (the last 37 good nights are kept, tonight included):
the two-sample t with the variance of the baseline alone, so a step inside the window cannot hide itself. Under normal
nights T_k is Student t with n - 1 degrees of freedom. The windows share the level of the series by Bonferroni, the
series share the level of the night (`history_series.levels`): whatever the dependence between series, a night in
which nothing changed raises an alarm with at most the stated probability.

Where null pairs predict the noise (`history_prior`), a night that repeats the last one bit for bit is the same draw of
it, not another one: n and k count draws, and only the first five nights, which teach, count nights. Below five draws
the spread is the predicted one, not that of the draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fp8parity_analysis.history_prior import BASELINE_LEAST, BoolArray, FloatArray, Prior, p_value

IntArray = npt.NDArray[np.int64]

WINDOWS = (1, 2, 4, 7)
"""Numbers of last nights that are held against the nights before them."""
BASELINE_MOST = 30
ADOPT_AFTER = 7
"""A step for the better is the new normal after so many nights; a step for the worse never is by itself."""

_LENGTH = BASELINE_MOST + max(WINDOWS)


class State(IntEnum):
    """What one series did on one night."""

    MISSING = 0
    LEARNING = 1
    GOOD = 2
    NEW = 3
    STILL = 4
    FIXED = 5
    BETTER = 6
    STILL_BETTER = 7
    ADOPTED = 8


BAD_STATES = (State.NEW, State.STILL)


@dataclass(frozen=True)
class Replay:
    """Every series on every night, arrays [R, N, S].

    `onset`: index of the first night of the episode that is open or has just ended, -1 without one; `base` and
    `level`: mean of the baseline and of the window or episode, NaN where nothing was tested; `p`: the smallest
    p-value over the windows, times their number.
    """

    state: IntArray
    onset: IntArray
    base: FloatArray
    level: FloatArray
    p: FloatArray


@dataclass(frozen=True)
class _Test:
    """The best window of each series [R, S]: p times the number of windows, its length, the two means."""

    p: FloatArray
    k: IntArray
    base: FloatArray
    level: FloatArray
    tested: BoolArray


@dataclass(frozen=True)
class _Sums:
    """Running count, sum and sum of squares of a buffer along its nights, taken from one of its own values.

    From a value of its own, so that equal values have a spread of exactly zero and large ones lose no digits.
    """

    origin: FloatArray
    count: FloatArray
    total: FloatArray
    squares: FloatArray

    @staticmethod
    def of(buffer: FloatArray) -> _Sums:
        """Sum `buffer` [R, S, L], whose empty places are NaN and come first."""
        known = np.isfinite(buffer)
        inner = _LENGTH - max(WINDOWS) - 1  # a place that every baseline holds, once there are so many nights
        oldest = np.minimum(_LENGTH - known.sum(-1), _LENGTH - 1)
        place = np.maximum(inner, oldest)[..., None]
        origin = np.nan_to_num(np.take_along_axis(buffer, place, -1))
        centred = np.where(known, buffer - origin, 0.0)
        return _Sums(
            origin[..., 0],
            np.cumsum(known, -1, dtype=float),
            np.cumsum(centred, -1),
            np.cumsum(centred**2, -1),
        )

    def before(self, k: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return count, mean and sd of all values but the last `k`."""
        last = _LENGTH - k - 1
        n, total = self.count[..., last], self.total[..., last]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / n
            sd = np.sqrt(np.maximum(self.squares[..., last] - total * mean, 0.0) / (n - 1))
        return n, self.origin + mean, np.where(n > 1, sd, 0.0)


def _scan(buffer: FloatArray, times: IntArray, prior: Prior) -> _Test:
    """Test every window of `buffer` [R, S, L], the last draw tonight's; `times`: nights that each draw stood for."""
    shape = buffer.shape[:-1]
    best = np.full(shape, np.inf)
    k_best, windows = np.ones(shape, dtype=np.int64), np.zeros(shape)
    base, level = np.full(shape, np.nan), np.full(shape, np.nan)
    sums, until = _Sums.of(buffer), np.cumsum(times, -1)
    for k in WINDOWS:
        n, mean, sd = sums.before(k)
        usable = until[..., _LENGTH - k - 1] >= BASELINE_LEAST
        windows += usable
        window = sums.origin + (buffer[..., _LENGTH - k :] - sums.origin[..., None]).mean(-1)
        p = p_value(window, mean, sd, n, k, prior)
        wins = usable & (p < best)
        best, k_best = np.where(wins, p, best), np.where(wins, k, k_best)
        base, level = np.where(wins, mean, base), np.where(wins, window, level)
    tested = windows > 0
    p_all = np.where(tested, np.minimum(1.0, np.where(tested, best, 0.0) * windows), np.nan)
    return _Test(p_all, k_best, base, level, tested)


class _Replayer:
    """The running state of all series; `night` moves it one night on."""

    def __init__(
        self,
        replicates: int,
        series: int,
        direction: FloatArray,
        floor: FloatArray,
        relative_floor: FloatArray,
    ) -> None:
        shape = (replicates, series)
        self.buffer = np.full((*shape, _LENGTH), np.nan)
        self.nights = np.full((*shape, _LENGTH), -1, dtype=np.int32)  # the first night of each draw
        self.times = np.zeros((*shape, _LENGTH), dtype=np.int64)
        self.episode = np.full((*shape, ADOPT_AFTER), np.nan)
        self.side = np.zeros(shape, dtype=np.int64)  # 0 no episode, 1 for the worse, -1 for the better
        self.onset = np.full(shape, -1, dtype=np.int64)
        self.base = np.full(shape, np.nan)
        self.known = np.zeros(shape, dtype=bool)  # whether tonight's prior says anything
        self.direction, self.floor, self.relative_floor = direction, floor, relative_floor

    def restart(self, where: BoolArray) -> None:
        """Forget the past of some series: their level was accepted."""
        self.buffer[:, where] = np.nan
        self.nights[:, where] = -1
        self.times[:, where] = 0
        self.side[:, where] = 0

    def _push(self, where: BoolArray, values: FloatArray, night: int) -> None:
        """Take tonight's values in; one that repeats the last draw is that draw once more.

        Only where the nulls predict the spread of draws: numbers that are rounded coarsely repeat by chance.
        """
        again = where & self.known & (values == self.buffer[..., -1])
        self.times[again, -1] += 1
        fresh = where & ~again
        for store, value in ((self.buffer, values[fresh]), (self.nights, night), (self.times, 1)):
            store[fresh, :-1] = store[fresh, 1:]
            store[fresh, -1] = value

    def _drop(self, where: BoolArray, k: int) -> None:
        """Take the last `k` draws out of the baseline and into the episode."""
        self.episode[where] = np.nan
        self.episode[where, -k:] = self.buffer[where, -k:]
        for store, nothing in ((self.buffer, np.nan), (self.nights, -1), (self.times, 0)):
            store[where, k:] = store[where, :-k]
            store[where, :k] = nothing

    def _told(self, step: FloatArray, base: FloatArray) -> BoolArray:
        """Return which steps from `base` are large enough to be worth a word."""
        return np.asarray(np.abs(step) >= np.maximum(self.floor, self.relative_floor * np.abs(base)))

    def night(self, t: int, x: FloatArray, alpha: FloatArray, prior: Prior) -> Replay:
        """Take in night `t`: values `x` and levels `alpha`, both [R, S], and what is known beforehand."""
        self.known = np.isfinite(prior.sd) | prior.variance
        seen = np.isfinite(x)
        inside = seen & (self.side != 0)
        outside = seen & (self.side == 0)
        state = np.where(seen, int(State.LEARNING), int(State.MISSING))
        onset = np.full(x.shape, -1, dtype=np.int64)
        nothing = np.full(x.shape, np.nan)
        found = Replay(state, onset, nothing.copy(), nothing.copy(), nothing.copy())
        if outside.any():
            self._look(t, x, outside, alpha, prior, found)
        if inside.any():
            self._follow(t, x, inside, alpha, prior, found)
        return found

    def _look(
        self, t: int, x: FloatArray, who: BoolArray, alpha: FloatArray, prior: Prior, found: Replay
    ) -> None:
        """Test the series that are in no episode, and open one where a test rejects."""
        self._push(who, x, t)
        test = _scan(self.buffer, self.times, prior)
        step = test.level - test.base
        alarm = who & test.tested & (test.p <= alpha) & self._told(step, test.base)
        worse = (step * self.direction > 0) | (self.direction == 0)
        repeated = (self.times[..., -1] > 1) & (self.times.sum(-1) > BASELINE_LEAST)
        found.state[who & (test.tested | repeated)] = State.GOOD
        found.state[alarm & worse] = State.NEW
        found.state[alarm & ~worse] = State.BETTER
        for target, source in ((found.base, test.base), (found.level, test.level), (found.p, test.p)):
            target[who] = source[who]
        for k in WINDOWS:
            these = alarm & (test.k == k)
            if these.any():
                self.onset[these] = self.nights[these, _LENGTH - k]
                self._drop(these, k)
        self.side[alarm] = np.where(worse, 1, -1)[alarm]
        self.base[alarm] = test.base[alarm]
        found.onset[alarm] = self.onset[alarm]

    def _follow(
        self, t: int, x: FloatArray, who: BoolArray, alpha: FloatArray, prior: Prior, found: Replay
    ) -> None:
        """Say of open episodes whether tonight is back at the baseline, nearer to it than to the episode."""
        n, mean, sd = _Sums.of(self.buffer).before(0)
        level = np.full(x.shape, np.nan)
        level[who] = np.nanmean(self.episode[who], axis=-1)
        step = x - mean
        p = p_value(x, mean, sd, n, 1, prior)
        inconspicuous = (p > alpha) | ~self._told(step, mean)
        back = who & inconspicuous & (np.abs(step) < np.abs(x - level))
        stays = who & ~back
        found.onset[who] = self.onset[who]
        found.base[who], found.p[who] = mean[who], p[who]
        found.state[back] = State.FIXED
        found.state[stays & (self.side > 0)] = State.STILL
        found.state[stays & (self.side < 0)] = State.STILL_BETTER
        self.episode[stays, :-1] = self.episode[stays, 1:]
        self.episode[stays, -1] = x[stays]
        found.level[back] = x[back]
        found.level[stays] = np.nanmean(self.episode[stays], axis=-1) if stays.any() else np.nan
        self._push(back, x, t)
        self.side[back] = 0
        adopted = stays & (self.side < 0) & np.isfinite(self.episode).all(-1)
        if adopted.any():
            found.state[adopted] = State.ADOPTED
            self.buffer[adopted], self.times[adopted] = np.nan, 0
            self.nights[adopted] = t  # only ever read as "some night of the new normal"
            for place in range(ADOPT_AFTER):
                self._push(adopted, self.episode[..., place], t)
            self.side[adopted] = 0


def replay(
    values: FloatArray,
    alpha: FloatArray,
    direction: FloatArray,
    floor: FloatArray,
    *,
    relative_floor: FloatArray | None = None,
    predicted: FloatArray | None = None,
    df: FloatArray | None = None,
    variance: BoolArray | None = None,
    restart: BoolArray | None = None,
) -> Replay:
    """Return the state of every series on every night of `values` [R, N, S], NaN being no value that night.

    `alpha` [N, S] is the level of each test; `direction` [S] is 1 where a rise is worse, -1 where a fall is, 0 where
    both are; steps below `floor` [S], or below the share `relative_floor` [S] of the baseline, are never reported;
    `predicted` and `df` [R, N, S] are the sd of a draw that the null pairs predict and its degrees of freedom, used
    where the nights repeat themselves; `variance` [S] marks what is itself the cube root of a variance with `df`
    degrees of freedom; `restart` [N, S] marks where a level was accepted.
    """
    replicates, nights, series = values.shape
    nothing = np.full(values.shape, np.nan)
    known = nothing if predicted is None else predicted
    sizes = np.where(np.isfinite(known), np.inf, np.nan) if df is None else df
    kinds = np.zeros(series, dtype=bool) if variance is None else variance
    shares = np.zeros(series) if relative_floor is None else relative_floor
    running = _Replayer(replicates, series, direction, floor, shares)
    told = []
    for t in range(nights):
        if restart is not None and restart[t].any():
            running.restart(restart[t])
        told.append(running.night(t, values[:, t], alpha[t][None, :], Prior(known[:, t], sizes[:, t], kinds)))
    empty = np.zeros((replicates, 0, series))

    def stack(name: str) -> npt.NDArray[np.generic]:
        parts = [getattr(item, name) for item in told]
        return np.stack(parts, axis=1) if parts else empty

    return Replay(**{name: stack(name) for name in ("state", "onset", "base", "level", "p")})  # type: ignore[arg-type]
