"""Are the verdicts calibrated? Error rates and power on synthetic curves with a known truth.

    python benchmarks/calibration.py [--replicates 4000] [--draws 300] [--json FILE]

Every line is a count of hits with its limits, binomial at 99.9 %, so a correct build fails one line in a
thousand. Each line has a generator of its own, seeded by its name. Exit status 1 when a line lies outside its
limits. The vectorised core is measured; `public` lines check that `judge` says the same on the same curves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "analysis"))

from typing import TYPE_CHECKING

import simulate
from scipy.stats import binom, false_discovery_control

from fp8parity_analysis import core, paired, sequential, trajectory
from fp8parity_analysis.contrasts import contrast_of
from fp8parity_analysis.schema import Outcome
from fp8parity_analysis.verdict import Criteria, judge

if TYPE_CHECKING:
    from collections.abc import Iterator

ALPHA = 0.05
MARGIN = 0.0025
SEEDS = (2, 3, 5, 8)
BAND = 0.999


@dataclass(frozen=True)
class Line:
    """One measured quantity: `value` must lie in [low, high]."""

    name: str
    value: float
    low: float
    high: float
    replicates: int

    @property
    def ok(self) -> bool:
        """Whether the value lies within its limits."""
        return bool(self.low <= self.value <= self.high)


def generator(name: str) -> np.random.Generator:
    """Return the generator of a line, fixed by the line's name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def limits(rate: float, replicates: int) -> tuple[int, int]:
    """Return two-sided binomial limits at 99.9 % for `rate`."""
    tail = (1.0 - BAND) / 2.0
    return int(binom.ppf(tail, replicates, rate)), int(binom.ppf(1.0 - tail, replicates, rate))


def counted(name: str, hits: np.ndarray, rate: float, *, only_above: bool = False) -> Line:
    """Return a line that counts hits against the nominal `rate`."""
    low, high = limits(rate, len(hits))
    return Line(name, int(np.count_nonzero(hits)), 0 if only_above else low, high, len(hits))


def floor_line(name: str, hits: np.ndarray, floor: float) -> Line:
    """Return a line whose share of hits must reach `floor`, with room when replicates are few."""
    slack = (
        4.0 * np.sqrt(max(floor * (1.0 - floor), 1e-4) * (1.0 / len(hits) - 1.0 / 4000))
        if len(hits) < 4000
        else 0.0
    )
    return Line(name, float(np.mean(hits)), round(floor - slack, 4), 1.0, len(hits))


def judged(name: str, replicates: int, n: int, kind: str = "none", size: float = 0.0, **options: object):
    """Return studies drawn for a line, and what the core says of them."""
    world = replace(simulate.BASE, **options.pop("world", {}))
    margin = options.pop("margin", MARGIN)
    drawn = simulate.studies(generator(name), replicates, n, kind, size, world=world)
    return drawn, core.judge_gaps(drawn.gap, world.progress, margin=margin, alpha=ALPHA)


def c1_size(replicates: int) -> Iterator[Line]:
    """Measure the size of the primary test."""
    for n in SEEDS:
        name = f"C1 false alarms, n={n}"
        yield counted(name, judged(name, replicates, n)[1].estimate.p_greater() < ALPHA, ALPHA)


def c2_interaction(replicates: int) -> Iterator[Line]:
    """Measure its size when the effect varies between seeds."""
    for n in SEEDS:
        name = f"C2 false alarms with interaction 0.2 %, n={n}"
        _, result = judged(name, replicates, n, world={"interaction_sd": 0.002})
        yield counted(name, result.estimate.p_greater() < ALPHA, ALPHA, only_above=True)


def c3_equivalence(replicates: int) -> Iterator[Line]:
    """Measure the size of TOST at either margin."""
    for n in SEEDS:
        for sign in (1.0, -1.0):
            name = f"C3 equivalent at a true gap of {'+' if sign > 0 else '-'}margin, n={n}"
            _, result = judged(name, replicates, n, "const", sign * MARGIN)
            yield counted(name, result.estimate.p_equivalent(MARGIN) < ALPHA, ALPHA, only_above=n < 5)


def c4_coverage(replicates: int) -> Iterator[Line]:
    """Measure the coverage of the interval."""
    for n in SEEDS:
        for size in (0.0, 0.0025):
            name = f"C4 coverage of the 90 % interval at {100 * size:g} %, n={n}"
            _, result = judged(name, replicates, n, "const", size)
            inside = (result.estimate.lo <= size) & (size <= result.estimate.hi)
            yield counted(name, inside, 0.90)


def trajectory_rejects(
    name: str, replicates: int, n: int, m: int, kind: str = "none", size: float = 0.0, **world: bool
) -> np.ndarray:
    """Return whether the label permutation rejects, one study after the other."""
    rng = generator(name)
    setting = replace(simulate.BASE, **world)
    test = simulate.studies(rng, replicates, n, kind, size, world=setting).gap
    null = simulate.null_gaps(rng, replicates, m, simulate.BASE)
    hits = np.zeros(replicates, dtype=bool)
    for study in range(replicates):
        start = trajectory.burn_in(null[study])
        result = trajectory.label_permutation(
            test[study][:, start:], null[study][:, start:], rng, alpha=ALPHA
        )
        hits[study] = result.p <= ALPHA
    return hits


def c5_trajectory(replicates: int) -> Iterator[Line]:
    """Measure the size of the trajectory test, also when the noise of FP8 saturates at once."""
    half = max(1, replicates // 2)
    for n, m in ((1, 19), (2, 8), (3, 8), (5, 8)):
        for fast in (False, True):
            name = f"C5 trajectory test under the null, n={n}, m={m}" + (
                ", FP8 noise from the start" if fast else ""
            )
            rate = float(np.mean(trajectory_rejects(name, half, n, m, fast_test=fast)))
            yield Line(name, rate, 0.0, ALPHA + 3.3 * np.sqrt(ALPHA * (1 - ALPHA) / half), half)


def c6_sequential(replicates: int) -> Iterator[Line]:
    """Measure the size over all declared looks, and at any number of seeds."""
    looks = (3, 5, 8)
    for spending in ("bonferroni", "obrien_fleming"):
        name = f"C6 any look of 3, 5, 8 rejects, {spending}"
        ends = judged(name, replicates, looks[-1])[1].endpoints
        hits = np.zeros(replicates, dtype=bool)
        for look, alpha in zip(looks, sequential.look_alphas(looks, ALPHA, spending), strict=True):
            hits |= paired.paired_t(ends[:, :look], alpha).lo > 0
        yield counted(name, hits, ALPHA, only_above=True)
    name = "C6 any number of seeds from 2 to 10 rejects, e-process"
    ends = judged(name, replicates, 10)[1].endpoints
    hits = np.zeros(replicates, dtype=bool)
    for n in range(2, 11):
        hits |= sequential.anytime_t(ends[:, :n], ALPHA).lo > 0
    yield counted(name, hits, ALPHA, only_above=True)
    yield from c6_contrasts(replicates)


def c6_contrasts(replicates: int) -> Iterator[Line]:
    """Measure how often any look at all finds two equal recipes different: p below 5 %, adjusted for the looks.

    The control cancels in a contrast, so the difference of two recipes is drawn as a gap is.
    """
    ways = (
        ("look of 3, 5, 8, bonferroni", (3, 5, 8), Criteria(looks=(3, 5, 8))),
        ("look of 3, 5, 8, obrien_fleming", (3, 5, 8), Criteria(looks=(3, 5, 8), spending="obrien_fleming")),
        ("number of seeds from 2 to 10, e-process", range(2, 11), Criteria(anytime=True)),
    )
    for label, sizes, criteria in ways:
        name = f"C6 contrast of equal recipes at any {label}"
        studies = max(1, replicates // 2) if criteria.anytime else replicates  # nine looks take their time
        ends = judged(name, studies, max(sizes))[1].endpoints
        p = [[contrast_of("a", "b", row[:n], criteria).p for n in sizes] for row in ends]
        yield counted(name, np.array(p).min(axis=1) < ALPHA, ALPHA, only_above=True)


def c7_undeclared_nulls(replicates: int, draws: int) -> Iterator[Line]:
    """Measure quiet nulls that nobody declared as matched: the plain paired t must decide, also in `judge`."""
    for ratio in (0.1, 0.3, 1.0):
        name = f"C7 undeclared nulls with sd ratio {ratio:g}, n=3"
        drawn, result = judged(name, replicates, 3)
        yield counted(name, result.estimate.p_greater() < ALPHA, ALPHA, only_above=True)
        logs = simulate.runs(generator(name + " nulls"), draws, 8, 2)
        middle = logs.mean(axis=2, keepdims=True)
        wrong = 0
        for study in range(min(draws, replicates)):
            quiet = middle[study] + ratio * (logs[study] - middle[study])
            verdict = judge(simulate.curve_set(drawn, study, null_logs=quiet), Criteria()).verdicts[0]
            wrong += differs(verdict, result, study)
        yield Line(f"C7 judge pools undeclared nulls of ratio {ratio:g}", wrong, 0, 0, draws)


def c7_declared_nulls(draws: int) -> Iterator[Line]:
    """Measure `judge` itself with matched nulls of the same seeds: control replicas averaged, pooled, with veto."""
    for n, replicas in ((3, 2), (4, 4)):
        name = f"C7 declared nulls, {replicas} control runs a seed, n={n}"
        drawn = simulate.studies(generator(name), draws, n, replicas=replicas)
        criteria = Criteria(null_matched=True)
        judged_by = [judge(simulate.curve_set(drawn, study), criteria) for study in range(draws)]
        worse = np.array([item.evidence[0].p_values["worse"] < ALPHA for item in judged_by])
        yield counted(f"{name}: false alarms", worse, ALPHA, only_above=True)
        apart = np.array([(item.verdicts[0].trajectory_p or 1.0) <= ALPHA for item in judged_by])
        yield counted(f"{name}: trajectory alarms", apart, ALPHA, only_above=True)


def c8_layers(replicates: int) -> Iterator[Line]:
    """Measure 288 tensors with a common seed factor; 5 seeds, 8 matched null pairs; BH at q = 0.1."""
    quarter = max(1, replicates // 4)
    for bad in (0, 6):
        name = f"C8 false discoveries among 288 tensors, {bad} bad"
        rng = generator(name)
        shares = np.empty(quarter)
        for study in range(quarter):
            values = _correlated(rng, 288, 5)
            values[:bad] += 4.0
            null_ss = (_correlated(rng, 288, 8) ** 2).sum(axis=1)
            p = paired.pooled_t(values, null_ss, 8, ALPHA).p_greater()
            found = false_discovery_control(p, method="bh") < 0.1
            shares[study] = np.count_nonzero(found[bad:]) / max(1, np.count_nonzero(found))
        slack = 3.3 * float(np.std(shares)) / np.sqrt(quarter) if quarter < 1000 else 0.0
        yield Line(name, float(np.mean(shares)), 0.0, 0.13 + slack, quarter)


def _correlated(rng: np.random.Generator, tensors: int, n: int) -> np.ndarray:
    common = rng.standard_normal((1, n))
    return np.sqrt(0.3) * common + np.sqrt(0.7) * rng.standard_normal((tensors, n))


def c9_heavy_tails(replicates: int) -> Iterator[Line]:
    """Measure the size with outlier pairs."""
    for n in (3, 5, 8):
        name = f"C9 false alarms, 5 % of pairs five times as noisy, n={n}"
        _, result = judged(name, replicates, n, world={"heavy_frac": 0.05})
        hits = result.estimate.p_greater() < ALPHA
        high = 280 if replicates == 4000 else limits(0.06, replicates)[1]
        yield Line(name, int(hits.sum()), 0, high, replicates)


def c10_symmetry(replicates: int) -> Iterator[Line]:
    """Count studies that change when they must not."""
    name = "C10 studies that change when arms are swapped, seeds permuted or losses scaled"
    drawn, result = judged(name, replicates, 5)
    rng = generator(name + " order")
    order = rng.permuted(np.tile(np.arange(5), (replicates, 1)), axis=1)
    shuffled = core.judge_gaps(
        np.take_along_axis(drawn.gap, order[:, :, None], axis=1), drawn.world.progress, margin=MARGIN
    ).estimate
    swapped = core.judge_gaps(-drawn.gap, drawn.world.progress, margin=MARGIN).estimate
    factor = np.log(rng.uniform(0.1, 10.0, (replicates, 5, 1)))
    scaled = (drawn.test + factor) - (drawn.control[:, :, 0] + factor)
    moved = core.judge_gaps(scaled, drawn.world.progress, margin=MARGIN).estimate
    first = result.estimate
    wrong = (shuffled.gap != first.gap) | (shuffled.lo != first.lo) | (shuffled.hi != first.hi)
    wrong |= (swapped.gap != -first.gap) | (swapped.lo != -first.hi) | (swapped.hi != -first.lo)
    wrong |= np.abs(moved.gap - first.gap) > 1e-12
    yield Line(name, int(wrong.sum()), 0, 0, replicates)


POWER = (
    # effect, test, floors at n = 3, 5, 8
    ("0.25 % worse than 0", "const", 0.0025, MARGIN, "worse", (0.49, 0.84, 0.97)),
    ("0.5 % worse than 0", "const", 0.005, MARGIN, "worse", (0.90, 0.99, 0.999)),
    ("0.5 % beyond the margin of 0.25 %", "const", 0.005, MARGIN, "beyond", (0.48, 0.83, 0.96)),
    ("equivalent at 0, margin 0.25 %", "none", 0.0, 0.0025, "equivalent", (0.29, 0.70, 0.94)),
    ("equivalent at 0, margin 0.5 %", "none", 0.0, 0.005, "equivalent", (0.86, 0.99, 0.999)),
)


def power_endpoint(replicates: int) -> Iterator[Line]:
    """Measure the power of the endpoint."""
    for label, kind, size, margin, test, floors in POWER:
        for n, floor in zip((3, 5, 8), floors, strict=True):
            name = f"P {label}, n={n}"
            estimate = judged(name, replicates, n, kind, size, margin=margin)[1].estimate
            hits = {
                "worse": estimate.lo > 0,
                "beyond": estimate.lo > margin,
                "equivalent": (estimate.lo > -margin) & (estimate.hi < margin),
            }[test]
            yield floor_line(name, hits, floor)


def power_trajectory(replicates: int) -> Iterator[Line]:
    """Measure the power of the trajectory test against a transient."""
    quarter = max(1, replicates // 4)
    for n, floor in ((3, 0.99), (5, 0.999), (8, 0.999)):
        name = f"P transient of 1 %, trajectory test, n={n}, m=8"
        yield floor_line(name, trajectory_rejects(name, quarter, n, 8, "bump", 0.01), floor)


def power_late(replicates: int) -> Iterator[Line]:
    """Measure how often a late rise is a soft divergence with the right onset."""
    for n, floor in ((3, 0.97), (5, 0.999), (8, 0.999)):
        name = f"P late to 2 %: DIVERGED (soft), onset within 5 % of the run, n={n}"
        drawn, result = judged(name, replicates, n, "late", 0.02)
        onset = drawn.world.progress[result.growth.onset]
        hits = (result.outcomes == Outcome.DIVERGED) & (np.abs(onset - 0.7) <= 0.05 + 1e-9)
        yield floor_line(name, hits, floor)


def differs(verdict: object, result: core.CoreResult, study: int) -> bool:
    """Return whether `judge` and the core disagree on outcome, gap or interval (beyond 1e-12) of one study."""
    measured = result.estimate
    numbers = (measured.gap[study], measured.lo[study], measured.hi[study])
    told = (verdict.gap, *verdict.interval)
    near = all(abs(a - b) <= 1e-12 for a, b in zip(told, numbers, strict=True))
    return verdict.outcome is not result.outcomes[study] or not near


PUBLIC = (
    ("C1", 2, "none", 0.0, {}),
    ("C1", 5, "none", 0.0, {}),
    ("C1", 8, "none", 0.0, {}),
    ("C2", 3, "none", 0.0, {"interaction_sd": 0.002}),
    ("C3", 5, "const", 0.0025, {}),
    ("C4", 3, "const", 0.0025, {}),
    ("C9", 5, "none", 0.0, {"heavy_frac": 0.05}),
    ("P 0.5 %", 3, "const", 0.005, {}),
    ("P late", 3, "late", 0.02, {}),
)


def public_agrees(draws: int) -> Iterator[Line]:
    """Count studies that `judge` and the core see differently."""
    for label, n, kind, size, world in PUBLIC:
        name = f"public judge differs from the core, {label}, n={n}"
        drawn, result = judged(name, draws, n, kind, size, world=world)
        verdicts = (judge(simulate.curve_set(drawn, study), Criteria()).verdicts[0] for study in range(draws))
        wrong = sum(differs(verdict, result, study) for study, verdict in enumerate(verdicts))
        yield Line(name, wrong, 0, 0, draws)
    yield from _public_looks(draws)


def _public_looks(draws: int) -> Iterator[Line]:
    name = "public judge differs from the core, C6 at the look of 5 of 3, 5, 8"
    drawn, _ = judged(name, draws, 5)
    alpha = sequential.look_alphas((3, 5, 8), ALPHA, "bonferroni")[1]
    result = core.judge_gaps(drawn.gap, drawn.world.progress, margin=MARGIN, alpha=alpha)
    criteria = Criteria(looks=(3, 5, 8))
    verdicts = (judge(simulate.curve_set(drawn, study), criteria).verdicts[0] for study in range(draws))
    yield Line(name, sum(differs(verdict, result, at) for at, verdict in enumerate(verdicts)), 0, 0, draws)


def lines(replicates: int, draws: int) -> Iterator[Line]:
    """Measure every line in turn."""
    for measure in (c1_size, c2_interaction, c3_equivalence, c4_coverage, c5_trajectory, c6_sequential):
        yield from measure(replicates)
    yield from c7_undeclared_nulls(replicates, draws)
    yield from c7_declared_nulls(draws)
    for measure in (c8_layers, c9_heavy_tails, c10_symmetry, power_endpoint, power_trajectory, power_late):
        yield from measure(replicates)
    yield from public_agrees(draws)


def main() -> int:
    """Print every line with its limits; 1 when one lies outside."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=4000)
    parser.add_argument("--draws", type=int, default=300, help="studies per line given to the public judge")
    parser.add_argument("--json", type=Path, help="write the lines to this file")
    options = parser.parse_args()
    started, processor = time.perf_counter(), time.process_time()
    measured = []
    for line in lines(options.replicates, options.draws):
        measured.append(line)
        mark = "ok  " if line.ok else "FAIL"
        print(f"{mark} {line.name}: {line.value:g} in [{line.low:.4g}, {line.high:.4g}]", flush=True)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    failed = [line.name for line in measured if not line.ok]
    kept = len(measured) - len(failed)
    print(
        f"{kept}/{len(measured)} lines within their limits, {seconds:.0f} s ({processor:.0f} s of processor)"
    )
    if options.json:
        document = {
            "seconds": seconds,
            "processor_seconds": processor,
            "lines": [{**asdict(line), "ok": line.ok} for line in measured],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
