"""How fast is a run? Against a bare PyTorch loop, and each FP8 recipe against BF16.

    python benchmarks/throughput.py [--only linear,1b,8b] [--recipes tensorwise,rowwise] [--runner bf16,tensorwise]
                                    [--seconds N] [--out FILE] [--tiny]
    python benchmarks/throughput.py --markdown FILE

One process on one GPU: fp32 master weights, bf16-mixed, blocks compiled, no activation checkpointing, cold compile
caches. Ratios are medians over rounds in which both sides take turns (ABAB). Sections:

linear  one linear's three GEMMs, 16384 tokens, 4096 and 8192 wide
1b      a decoder of 16 layers; first and last block and head in BF16. First our runner (Lightning, recorder, guard,
        clipping, schedule) against a bare loop of the same model and optimizer, then each recipe against BF16
8b      four layers of an 8 B Llama, head in BF16: each recipe against BF16

TFLOP/s count 6 M K N per linear and causal attention. The share of the ceiling is the time that the same FLOPs would
take at the measured rate of one large GEMM (bf16 or fp8), over the time they took. The Amdahl prediction takes the
control's step, and exchanges each converted linear's measured time for the recipe's (GEMMs and casts, the linear
alone); casts that the compiler shares or fuses with their neighbours can make a step faster than that.

Rows go to FILE as they are measured. Exit status 1 when a figure falls short of its target.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_timing as timing
import throughput_runner
from fp8parity import environment
from fp8parity.shapes import parameter_count
from throughput_arms import (
    BareArm,
    Flops,
    LinearArm,
    Linears,
    ModelCase,
    Setting,
    amdahl_ms,
    fp8_gemm_share,
    free,
    full,
    linear_flops,
    model_flops,
    shape_counts,
    tiny,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")

RUNNER_TARGET = 0.97
AMDAHL_TARGET = 0.9
LINEAR_TARGETS = {("tensorwise", 4096): 1.45}


# --- what is written ---------------------------------------------------------------------------------------


@dataclass
class Report:
    """Rows, what was not run, and what fell short; on the disk after every row."""

    path: Path | None
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document |= {"rows": [], "shortfalls": [], "errors": [], "not_run": []}

    def add(self, line: str, **row: Any) -> None:
        """Print one row and keep it."""
        print(line, flush=True)
        self.document["rows"].append(row)
        self._write()

    def target(self, what: str, value: float, least: float) -> None:
        """Check a figure against its target; one that falls short is printed as such."""
        if value < least:
            line = f"{what} is {value:.3f}, target {least}"
            print(f"    FALLS SHORT: {line}", flush=True)
            self.document["shortfalls"].append(line)
            self._write()

    def note(self, kind: str, line: str) -> None:
        """Keep and print one line about what was not measured (`errors`, `not_run`)."""
        print(f"{kind.replace('_', ' ')}: {line}", flush=True)
        self.document[kind].append(line)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


# --- one linear -------------------------------------------------------------------------------------------


def _kernel_text(kernels: timing.KernelTimes | None) -> str:
    return f" = GEMMs {kernels.gemm_ms:.3f} + casts {kernels.other_ms:.3f}" if kernels else ""


def linear_row(
    report: Report, linears: Linears, ceilings: Mapping[str, float], recipe: str, width: int
) -> None:
    """Measure one width under one recipe against BF16."""
    setting = linears.setting
    shape = (width, width)
    arms = {name: LinearArm(name, shape, setting.tokens, setting) for name in dict.fromkeys(("bf16", recipe))}
    works = {name: arm.step for name, arm in arms.items()}
    timing.interleaved(works, setting.device, rounds=1, calls=setting.linear_calls)  # warm-up
    times = timing.interleaved(works, setting.device, rounds=setting.rounds, calls=setting.linear_calls)
    for name, arm in arms.items():
        linears.known.setdefault((name, shape, setting.tokens), linears.of_arm(arm, times[name]))
    measured = linears.known[recipe, shape, setting.tokens]
    ms, speedup = statistics.median(times[recipe]), timing.ratio(times["bf16"], times[recipe])
    total = linear_flops(width, width, setting.tokens)
    fp8 = total * fp8_gemm_share(recipe)
    tflops, share = total / ms / 1e9, Flops(total - fp8, fp8).share_of_ceiling(ms, ceilings)
    report.add(
        f"linear {width:>5} {recipe:<19} {ms:7.3f} ms{_kernel_text(measured.kernels)}  {tflops:6.0f} TFLOP/s "
        f"({share:4.0%} of ceiling)  {speedup:5.2f}x BF16  first step {arms[recipe].first_step_s:5.1f} s",
        section="linear",
        width=width,
        tokens=setting.tokens,
        recipe=recipe,
        ms=ms,
        gemm_ms=measured.kernels.gemm_ms if measured.kernels else None,
        cast_ms=measured.kernels.other_ms if measured.kernels else None,
        tflops=tflops,
        share_of_ceiling=share,
        speedup=speedup,
        first_step_s=arms[recipe].first_step_s,
        rounds_ms=times,
    )
    if (recipe, width) in LINEAR_TARGETS:
        report.target(f"{recipe} on a {width}-wide linear", speedup, LINEAR_TARGETS[recipe, width])


# --- a model ----------------------------------------------------------------------------------------------


class ModelSection:
    """One model: the control stays while each recipe is measured beside it."""

    def __init__(
        self, case: ModelCase, report: Report, linears: Linears, ceilings: Mapping[str, float]
    ) -> None:
        self.case = case
        self.report = report
        self.linears = linears
        self.ceilings = ceilings
        self.control: BareArm | None = None

    def close(self) -> None:
        """Drop the control, and the code compiled for its sizes: other sizes would compile for all sizes at once."""
        self.control = None
        torch._dynamo.reset()
        free()

    def bf16(self) -> None:
        """Build the control and report it."""
        self.control = BareArm(self.case, "bf16", self.linears.setting)
        memory = self.control.warm()
        setting = self.linears.setting
        times = timing.interleaved(
            {"bf16": self.control.step}, setting.device, rounds=setting.rounds, calls=setting.model_calls
        )
        self._row("bf16", self.control, times, memory, {})

    def recipe(self, recipe: str) -> None:
        """Measure one recipe against the control, in turns, and against its prediction."""
        if self.control is None:
            raise RuntimeError("the BF16 control was not measured")
        setting = self.linears.setting
        arm = BareArm(self.case, recipe, setting)
        try:
            memory = arm.warm()
            works = {"bf16": self.control.step, recipe: arm.step}
            times = timing.interleaved(
                works, setting.device, rounds=setting.rounds, calls=setting.model_calls
            )
            self._row(recipe, arm, times, memory, {})
            predicted = self._prediction(recipe, arm, statistics.median(times["bf16"]))
        finally:
            del arm
            free()
        self._prediction_row(recipe, times, predicted)

    def _row(
        self,
        recipe: str,
        arm: BareArm,
        times: dict[str, list[float]],
        memory: float | None,
        extra: dict[str, Any],
    ) -> None:
        ms, speedup = statistics.median(times[recipe]), timing.ratio(times["bf16"], times[recipe])
        flops = model_flops(arm.spec, self.case.vocab, arm.converted)
        share, rate = flops.share_of_ceiling(ms, self.ceilings), self.case.tokens / ms * 1e3
        gib = "" if memory is None else f"  peak {memory:5.1f} GiB"
        self.report.add(
            f"{self.case.name} {recipe:<19} {ms:8.2f} ms  {rate:10,.0f} tokens/s  "
            f"{flops.total / ms / 1e9:5.0f} TFLOP/s ({share:4.0%} of ceiling)  "
            f"{speedup:5.3f}x BF16{gib}  first step {arm.first_step_s:5.1f} s",
            section=self.case.name,
            recipe=recipe,
            ms=ms,
            tokens_per_s=rate,
            tflops=flops.total / ms / 1e9,
            fp8_flop_share=flops.fp8 / flops.total,
            share_of_ceiling=share,
            speedup=speedup,
            peak_gib=memory,
            first_step_s=arm.first_step_s,
            parameters=parameter_count(arm.spec.model, self.case.vocab),
            converted=len(arm.converted),
            last_loss=float(arm.loss),
            rounds_ms=times,
            **extra,
        )

    def _prediction(self, recipe: str, arm: BareArm, control_ms: float) -> dict[str, Any]:
        """Measure each linear's size alone and return the prediction, with casts and without."""
        counts = shape_counts(arm.spec, self.case.vocab, arm.converted)
        pairs = {
            s: (
                self.linears.time("bf16", s, self.case.tokens),
                self.linears.time(recipe, s, self.case.tokens),
            )
            for s in counts
        }
        control = {s: pair[0].ms for s, pair in pairs.items()}
        test = {s: pair[1].ms for s, pair in pairs.items()}
        gemms = {s: p[1].kernels.gemm_ms if p[1].kernels else p[1].ms for s, p in pairs.items()}
        return {
            "ms": amdahl_ms(control_ms, counts, control, test),
            "casts_free_ms": amdahl_ms(control_ms, counts, control, gemms),
            "linears": [
                {
                    "k": k,
                    "n": n,
                    "count": count,
                    "bf16": asdict(pairs[k, n][0]),
                    "recipe": asdict(pairs[k, n][1]),
                }
                for (k, n), count in counts.items()
            ],
        }

    def _prediction_row(self, recipe: str, times: dict[str, list[float]], predicted: dict[str, Any]) -> None:
        control_ms = statistics.median(times["bf16"])
        reached = timing.ratio(times["bf16"], times[recipe])
        speedup, free_casts = control_ms / predicted["ms"], control_ms / predicted["casts_free_ms"]
        self.report.add(
            f"{self.case.name} {recipe:<19} Amdahl {speedup:.3f}x (casts free {free_casts:.3f}x), "
            f"reached {reached:.3f}x = {reached / speedup:.3f} of it",
            section=self.case.name + "-amdahl",
            recipe=recipe,
            predicted_speedup=speedup,
            casts_free_speedup=free_casts,
            reached_speedup=reached,
            share_of_prediction=reached / speedup,
            linears=predicted["linears"],
        )
        self.report.target(
            f"{self.case.name} {recipe}, share of the Amdahl prediction", reached / speedup, AMDAHL_TARGET
        )


# --- our runner -------------------------------------------------------------------------------------------


def runner_row(report: Report, case: ModelCase, recipe: str, setting: Setting) -> None:
    """Measure our runner against a bare loop of the same model and optimizer."""
    found = throughput_runner.measure(case, recipe, setting)
    rate, recorded = case.tokens / found.runner_ms * 1e3, found.recorded_tokens_per_s or 0.0
    gib = ""
    if setting.device.type == "cuda":
        gib = f"  peak {found.peak_gib['runner']:.1f} against {found.peak_gib['bare']:.1f} GiB"
    report.add(
        f"{case.name} runner {recipe:<12} {found.runner_ms:8.2f} ms, bare loop {found.bare_ms:8.2f} ms: "
        f"{found.share_of_bare:.3f} of its speed{gib}  records {recorded:,.0f} of {rate:,.0f} tokens/s  "
        f"first step {found.first_step_s:5.1f} s (proof included)",
        section=case.name + "-runner",
        recipe=recipe,
        tokens_per_s=rate,
        **asdict(found),
    )
    report.target(
        f"{case.name} {recipe}, our runner's share of the bare loop's speed",
        found.share_of_bare,
        RUNNER_TARGET,
    )


# --- all of it ---------------------------------------------------------------------------------------------

Item = tuple[str, "Callable[[], None]", bool]
"""Label, what to do, and whether it must run even when time is up (closing)."""


def items(options: argparse.Namespace, setting: Setting, report: Report) -> Iterator[Item]:
    """Yield what is to be measured, in order."""
    linears, ceilings = Linears(setting), dict.fromkeys(("bf16", "fp8"), 1.0)

    def measure_ceilings() -> None:
        for kind in ceilings:
            ceilings[kind] = timing.gemm_ceiling(
                kind, setting.device, setting.ceiling_shapes, setting.linear_calls
            )
        line = f"ceiling of one GEMM: bf16 {ceilings['bf16']:.0f}, fp8 {ceilings['fp8']:.0f} TFLOP/s"
        report.add(line, section="ceiling", **ceilings)

    yield "ceilings", measure_ceilings, False
    recipes = options.recipes
    if "linear" in options.only:
        for width, recipe in itertools.product(setting.widths, ("bf16", *recipes)):
            yield (
                f"linear {width} {recipe}",
                lambda w=width, r=recipe: (linear_row(report, linears, ceilings, r, w), free())[0],
                False,
            )
        yield "linear end", torch._dynamo.reset, True
    for name, case in setting.cases.items():
        if name not in options.only:
            continue
        section = ModelSection(case, report, linears, ceilings)
        for recipe in options.runner if case.runner else ():
            yield f"{name} runner {recipe}", lambda c=case, r=recipe: runner_row(report, c, r, setting), False
        yield f"{name} bf16", section.bf16, False
        for recipe in recipes:
            yield f"{name} {recipe}", lambda s=section, r=recipe: s.recipe(r), False
        yield f"{name} end", section.close, True


def _shortened(text: str) -> str:
    """Return begin and end of a long message: compilers say what went wrong at the end."""
    return text if len(text) <= 1500 else f"{text[:500]} [...] {text[-1000:]}"


def run(options: argparse.Namespace, setting: Setting, report: Report) -> None:
    """Measure item by item until done or out of time; one that fails does not end the others."""
    started = time.monotonic()
    for label, work, always in items(options, setting, report):
        late = options.seconds is not None and time.monotonic() - started > options.seconds
        if late and not always:
            report.note("not_run", f"{label}: {options.seconds:.0f} s are over")
            continue
        begun = time.monotonic()
        try:
            work()
        except Exception as error:  # an out-of-memory case must not cost the remaining rows
            report.note("errors", f"{label}: {type(error).__name__}: {_shortened(str(error).strip())}")
        finally:
            free()
        if not always:
            print(
                f"    ({label}: {time.monotonic() - begun:.0f} s, {time.monotonic() - started:.0f} s so far)",
                flush=True,
            )


def markdown(document: dict[str, Any]) -> str:
    """Return the rows as tables, one per section."""
    columns = {
        "ms": ("ms", ".2f"), "gemm_ms": ("GEMMs", ".2f"), "cast_ms": ("casts", ".2f"),
        "runner_ms": ("runner ms", ".2f"), "bare_ms": ("bare ms", ".2f"), "share_of_bare": ("runner / bare", ".3f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "tflops": ("TFLOP/s", ".0f"), "share_of_ceiling": ("of ceiling", ".0%"), "speedup": ("vs BF16", ".2f"),
        "predicted_speedup": ("Amdahl", ".3f"), "casts_free_speedup": ("casts free", ".3f"),
        "reached_speedup": ("reached", ".3f"), "share_of_prediction": ("of prediction", ".3f"),
        "peak_gib": ("peak GiB", ".1f"), "first_step_s": ("first step s", ".0f"), "bf16": ("bf16 TFLOP/s", ".0f"),
        "fp8": ("fp8 TFLOP/s", ".0f"),
    }  # fmt: skip
    lines: list[str] = []
    for section, group in itertools.groupby(document["rows"], key=lambda row: row["section"]):
        rows = list(group)
        names = [n for n in ("width", "recipe") if n in rows[0]]
        shown = [c for c in columns if isinstance(rows[0].get(c), int | float)]
        lines += [
            "",
            f"**{section}**",
            "",
            "| " + " | ".join([*names, *(columns[c][0] for c in shown)]) + " |",
        ]
        lines.append("| " + " | ".join(["---"] * (len(names) + len(shown))) + " |")
        for row in rows:
            cells = [str(row[n]) for n in names] + [format(row[c], columns[c][1]) for c in shown]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [f"* falls short: {line}" for line in document["shortfalls"]]
    lines += [
        f"* {kind.replace('_', ' ')}: {line}" for kind in ("not_run", "errors") for line in document[kind]
    ]
    return "\n".join(lines).strip()


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_list, default=["linear", "1b", "8b"], help="sections")
    parser.add_argument("--recipes", type=_list, default=list(RECIPES), help="recipes to compare with BF16")
    parser.add_argument(
        "--runner", type=_list, default=["bf16", "tensorwise"], help="recipes that our runner trains"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--seconds", type=float, help="start nothing more after this long")
    parser.add_argument("--out", type=Path, help="write rows to this JSON file as they come")
    parser.add_argument(
        "--tiny", action="store_true", help="a few seconds on a CPU; the figures mean nothing"
    )
    parser.add_argument("--warm-caches", action="store_true", help="use the machine's compile caches")
    parser.add_argument(
        "--markdown", type=Path, help="print the rows of this JSON file as tables, measure nothing"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def cold_caches(wanted: bool) -> Iterator[None]:
    """Compile into an empty folder, so that the time to the first step is what a first run waits."""
    if not wanted:
        yield
        return
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {name: str(Path(folder) / name.split("_")[0].lower()) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when a figure falls short or an item failed."""
    options = _options(argv)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))))
        return 0
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    setting = tiny() if options.tiny else full()
    if setting.device.type == "cuda" and not torch.cuda.is_available():
        print("throughput.py needs a CUDA device; --tiny runs on a CPU", file=sys.stderr)
        return 64
    setting = replace(setting, rounds=options.rounds or setting.rounds)
    torch._dynamo.config.recompile_limit = 64
    report = Report(
        options.out, {"environment": environment.fingerprint(setting.device.type), "tiny": options.tiny}
    )
    print("  ".join(f"{k} {v}" for k, v in report.document["environment"].items()), flush=True)
    with cold_caches(not options.warm_caches):
        run(options, setting, report)
    found = report.document
    print(f"\n{len(found['rows'])} rows, {len(found['shortfalls'])} short of target, {len(found['errors'])} errors, "
          f"{len(found['not_run'])} not run")  # fmt: skip
    for line in (*found["shortfalls"], *found["errors"]):
        print(f"  {line}")
    return 1 if found["shortfalls"] or found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
