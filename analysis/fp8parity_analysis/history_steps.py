"""Has a monitored number stepped? Tonight and the last few nights against the good nights before them.

One code path for one history and for thousands of simulated ones: arrays [R, N, S] of R histories, N nights and S
series go in, the state of every series on every night comes out. For a window of the last k good nights

    T_k = (mean of the window - mean of the baseline) / (s sqrt(1/k + 1/n))

with mean, s and n those of the good nights before the window (the last 37 good nights are kept, tonight included):
the two-sample t with the variance of the baseline alone, so a step inside the window cannot hide itself. Under normal
nights T_k is Student t with n - 1 degrees of freedom. The windows share the level of the series by Bonferroni, the
series share the level of the night (`history_series.levels`): whatever the dependence between series, a night in
which nothing changed raises an alarm with at most the stated probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

WINDOWS = (1, 2, 4, 7)
"""Numbers of last nights that are held against the nights before them."""
BASELINE_MOST = 30
BASELINE_LEAST = 5
ADOPT_AFTER = 7
"""A step for the better is the new normal after so many nights; a step for the worse never is by itself."""
REPEATS_ITSELF = 0.1
"""Nights that vary less than this share of what the null pairs predict come from a device that repeats itself."""

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
        return n, self.origin + mean, sd


def _p_value(step: FloatArray, sd: FloatArray, n: FloatArray, k: int, predicted: FloatArray) -> FloatArray:
    """Return the two-sided p of a step; `predicted` stands in for an sd that a repeating device makes useless."""
    sd = np.where(sd < REPEATS_ITSELF * np.nan_to_num(predicted), predicted, sd)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(step) / (sd * np.sqrt(1.0 / k + 1.0 / n))
    t = np.where((step == 0) & (sd == 0), 0.0, t)
    return np.asarray(2.0 * stdtr(np.maximum(n - 1, 1), -t), dtype=np.float64)


def _scan(buffer: FloatArray, predicted: FloatArray) -> _Test:
    """Test every window of `buffer` [R, S, L], whose last value is tonight's."""
    shape = buffer.shape[:-1]
    best = np.full(shape, np.inf)
    k_best, windows = np.ones(shape, dtype=np.int64), np.zeros(shape)
    base, level = np.full(shape, np.nan), np.full(shape, np.nan)
    sums = _Sums.of(buffer)
    for k in WINDOWS:
        n, mean, sd = sums.before(k)
        usable = n >= BASELINE_LEAST
        windows += usable
        window = sums.origin + (buffer[..., _LENGTH - k :] - sums.origin[..., None]).mean(-1)
        p = _p_value(window - mean, sd, n, k, predicted)
        wins = usable & (p < best)
        best, k_best = np.where(wins, p, best), np.where(wins, k, k_best)
        base, level = np.where(wins, mean, base), np.where(wins, window, level)
    tested = windows > 0
    p_all = np.where(tested, np.minimum(1.0, np.where(tested, best, 0.0) * windows), np.nan)
    return _Test(p_all, k_best, base, level, tested)


class _Replayer:
    """The running state of all series; `night` moves it one night on."""

    def __init__(self, replicates: int, series: int, direction: FloatArray, floor: FloatArray) -> None:
        shape = (replicates, series)
        self.buffer = np.full((*shape, _LENGTH), np.nan)
        self.nights = np.full((*shape, _LENGTH), -1, dtype=np.int32)
        self.episode = np.full((*shape, ADOPT_AFTER), np.nan)
        self.side = np.zeros(shape, dtype=np.int64)  # 0 no episode, 1 for the worse, -1 for the better
        self.onset = np.full(shape, -1, dtype=np.int64)
        self.base = np.full(shape, np.nan)
        self.direction, self.floor = direction, floor

    def restart(self, where: BoolArray) -> None:
        """Forget the past of some series: their level was accepted."""
        self.buffer[:, where] = np.nan
        self.nights[:, where] = -1
        self.side[:, where] = 0

    def _push(self, where: BoolArray, values: FloatArray, night: int) -> None:
        self.buffer[where, :-1] = self.buffer[where, 1:]
        self.buffer[where, -1] = values[where]
        self.nights[where, :-1] = self.nights[where, 1:]
        self.nights[where, -1] = night

    def _drop(self, where: BoolArray, k: int) -> None:
        """Take the last `k` nights out of the baseline and into the episode."""
        self.episode[where] = np.nan
        self.episode[where, -k:] = self.buffer[where, -k:]
        self.buffer[where, k:] = self.buffer[where, :-k]
        self.buffer[where, :k] = np.nan
        self.nights[where, k:] = self.nights[where, :-k]
        self.nights[where, :k] = -1

    def night(self, t: int, x: FloatArray, alpha: FloatArray, predicted: FloatArray) -> Replay:
        """Take in night `t`: values `x`, levels `alpha` and predicted sds, all [R, S]."""
        seen = np.isfinite(x)
        inside = seen & (self.side != 0)
        outside = seen & (self.side == 0)
        state = np.where(seen, int(State.LEARNING), int(State.MISSING))
        onset = np.full(x.shape, -1, dtype=np.int64)
        nothing = np.full(x.shape, np.nan)
        found = Replay(state, onset, nothing.copy(), nothing.copy(), nothing.copy())
        if outside.any():
            self._look(t, x, outside, alpha, predicted, found)
        if inside.any():
            self._follow(t, x, inside, alpha, predicted, found)
        return found

    def _look(
        self, t: int, x: FloatArray, who: BoolArray, alpha: FloatArray, predicted: FloatArray, found: Replay
    ) -> None:
        """Test the series that are in no episode, and open one where a test rejects."""
        self._push(who, x, t)
        test = _scan(self.buffer, predicted)
        step = test.level - test.base
        alarm = who & test.tested & (test.p <= alpha) & (np.abs(step) >= self.floor)
        worse = (step * self.direction > 0) | (self.direction == 0)
        found.state[who & test.tested] = State.GOOD
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
        self, t: int, x: FloatArray, who: BoolArray, alpha: FloatArray, predicted: FloatArray, found: Replay
    ) -> None:
        """Say of open episodes whether tonight is back at the baseline, nearer to it than to the episode."""
        n, mean, sd = _Sums.of(self.buffer).before(0)
        level = np.full(x.shape, np.nan)
        level[who] = np.nanmean(self.episode[who], axis=-1)
        step = x - mean
        p = _p_value(step, sd, n, 1, predicted)
        inconspicuous = (p > alpha) | (np.abs(step) < self.floor)
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
            self.buffer[adopted] = np.nan
            self.buffer[adopted, -ADOPT_AFTER:] = self.episode[adopted]
            self.nights[adopted] = t  # only ever read as "some night of the new normal"
            self.side[adopted] = 0


def replay(
    values: FloatArray,
    alpha: FloatArray,
    direction: FloatArray,
    floor: FloatArray,
    *,
    predicted: FloatArray | None = None,
    restart: BoolArray | None = None,
) -> Replay:
    """Return the state of every series on every night of `values` [R, N, S], NaN being no value that night.

    `alpha` [N, S] is the level of each test; `direction` [S] is 1 where a rise is worse, -1 where a fall is, 0 where
    both are; steps below `floor` [S] are never reported; `predicted` [R, N, S] is the night-to-night sd that the null
    pairs predict, used where the nights repeat themselves; `restart` [N, S] marks where a level was accepted.
    """
    replicates, nights, series = values.shape
    known = np.full(values.shape, np.nan) if predicted is None else predicted
    running = _Replayer(replicates, series, direction, floor)
    told = []
    for t in range(nights):
        if restart is not None and restart[t].any():
            running.restart(restart[t])
        told.append(running.night(t, values[:, t], alpha[t][None, :], known[:, t]))
    empty = np.zeros((replicates, 0, series))

    def stack(name: str) -> npt.NDArray[np.generic]:
        parts = [getattr(item, name) for item in told]
        return np.stack(parts, axis=1) if parts else empty

    return Replay(**{name: stack(name) for name in ("state", "onset", "base", "level", "p")})  # type: ignore[arg-type]
