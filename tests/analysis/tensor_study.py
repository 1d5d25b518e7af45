"""Stored runs with tensor statistics of a known shape: healthy ones from a model of the noise, faults from real casts.

Test support. A healthy tensor's statistics are those of a Gaussian, moved by the luck of its seed and of its run. A
faulty tensor is really cast, element by element (`ml_dtypes`), and measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import report_study
from report_study import Shape

from fp8parity_analysis import schema
from fp8parity_analysis import tensor_schema as ts
from fp8parity_analysis.store import RunRecord, read_runs
from fp8parity_analysis.tensor_arm import ArmTensors, arm_of
from fp8parity_analysis.tensor_health import TensorHealth, arm_health
from fp8parity_analysis.tensor_panel import Panel, Tensor, panel_of
from fp8parity_analysis.tensor_pictures import MAX_TRAJECTORIES, ArmPictures, Trajectory
from fp8parity_analysis.tensor_signals import signals_of
from fp8parity_analysis.tensor_store import TensorTables

E4M3, E5M2 = "e4m3fn", "e5m2"
MAXIMUM = {E4M3: 448.0, E5M2: 57344.0}
SUBNORMAL = {E4M3: 2.0**-6, E5M2: 2.0**-14}
DTYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
GEMMS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GRAIN = {"tensorwise": "tensor", "rowwise": "row"}
ROWS, WIDTH = 32, 256


def format_of(recipe: str, operand: str) -> str:
    return E5M2 if recipe == "tensorwise" and operand == "grad_output" else E4M3


def cast_row(
    x: np.ndarray, format: str, grain: str, scale: np.ndarray | None = None, batches: int = 1
) -> dict[str, float]:
    """The statistics of one cast of `x` [R, C], by enumeration; `scale` replaces the one of the present tensor.

    `batches` micro-batches of R / `batches` rows each have a cast of their own, merged as the probe merges them.
    """
    top = MAXIMUM[format]
    finite = np.isfinite(x)
    size = np.where(finite, np.abs(x), 0.0)
    groups = size if grain == "row" else size.reshape(batches, -1)
    amax = groups.max(axis=1, keepdims=True)
    own = top / np.maximum(amax, 1e-12)
    used = own if scale is None else np.broadcast_to(scale, own.shape)
    used = np.repeat(used, len(x) // len(used), axis=0)
    scaled = size * used
    codes = np.minimum(scaled, top).astype(DTYPES[format]).astype(np.float64)
    back = np.sign(np.where(finite, x, 0.0)) * codes / used
    nonzero = finite & (x != 0)
    lost = nonzero & (codes == 0)
    saturated = scaled > top * (1 + 1e-6)
    n = max(1, int(nonzero.sum()))
    error = np.linalg.norm(np.where(finite, x, 0.0) - back)
    norm = float(np.linalg.norm(size))
    rms = norm / np.sqrt(x.size)
    counts = {
        "element_count": x.size,
        "group_count": amax.size,
        "zero_count": int((x == 0).sum()),
        "nonfinite_count": int((~finite).sum()),
        "underflow_count": int(lost.sum()),
        "subnormal_count": int((nonzero & ~lost & (scaled < SUBNORMAL[format])).sum()),
        "saturated_count": int(saturated.sum()),
        "zero_amax_groups": int((amax == 0).sum()),
    }
    values = {
        "amax": float(amax.max()),
        "group_amax_min": float(amax.min()),
        "group_amax_median": float(np.median(amax)),
        "scale_min": float(used.min()),
        "scale_max": float(used.max()),
        "zero_frac": counts["zero_count"] / x.size,
        "underflow_frac": counts["underflow_count"] / n,
        "subnormal_frac": counts["subnormal_count"] / n,
        "saturated_frac": counts["saturated_count"] / n,
        "relative_error": error / norm if norm else np.nan,
        "sqnr_db": 20 * np.log10(norm / error) if norm and error else np.nan,
        "lost_l1_frac": float(size[lost].sum() / size.sum()) if norm else np.nan,
        "lost_l2_frac": float(np.sqrt((size[lost] ** 2).sum()) / norm) if norm else np.nan,
        "dynamic_range_bits": float(np.log2(size.max() / size[nonzero].min())) if n > 1 else np.nan,
        "rms": rms,
        "amax_over_rms": float(amax.max()) / rms if rms else np.nan,
    }
    return {**counts, **values}


@dataclass(frozen=True)
class Fault:
    """A fault of one operand: `change` turns (tensor [R, C], steps since it began) into the faulty tensor.

    It begins at `step`. `in_control` plants it in the BF16 runs too. `format` casts in another format, `frozen`
    keeps the scale that was right when it began. `batches` micro-batches make up a step.
    """

    fqn: str
    operand: str
    step: int
    change: Callable[[np.ndarray, int], np.ndarray] = field(default=lambda x, since: x)
    in_control: bool = False
    format: str | None = None
    frozen: bool = False
    batches: int = 1


@dataclass(frozen=True)
class SignalFault:
    """A signal of one module of the arm that is multiplied by `factor` to the number of steps since `step`."""

    fqn: str
    signal: str
    step: int
    factor: float
    in_control: bool = False


@dataclass(frozen=True)
class TensorShape:
    """How large the statistics are. `common` is the sd of a seed's and run's shared luck, `own` of a tensor's own."""

    blocks: int = 3
    linears: tuple[str, ...] = ("attn.qkv_proj", "attn.o_proj", "ffn.gate_up_proj", "ffn.down_proj")
    steps: tuple[int, ...] = (1, 2, 5, *range(10, 301, 10))
    common: float = 0.02
    own: float = 0.02
    faults: tuple[Fault, ...] = ()
    arm: str = "tensorwise"
    what_if: tuple[str, ...] = ("tensorwise", "rowwise")
    signal_faults: tuple[SignalFault, ...] = ()

    @property
    def signals(self) -> list[tuple[str, str]]:
        blocks = [f"blocks.{block}" for block in range(self.blocks)]
        linears = [f"{block}.{linear}" for block in blocks for linear in self.linears]
        return [
            ("head_logits_max", "head"),
            ("head_logsumexp_mean", "head"),
            *(("attention_logits_max", f"{block}.attn") for block in blocks),
            *(("block_output_rms", block) for block in blocks),
            *(("grad_norm", linear) for linear in linears),
        ]

    @property
    def names(self) -> list[tuple[str, str, str]]:
        fqns = [f"blocks.{block}.{linear}" for block in range(self.blocks) for linear in self.linears]
        return [(fqn, gemm, operand) for fqn in fqns for gemm, pair in GEMMS.items() for operand in pair]


def _key(*parts: object) -> list[int]:
    return [zlib.crc32(repr(part).encode()) for part in parts]


def healthy(shape: TensorShape, recipe: str, seed: int, run: object) -> pd.DataFrame:
    """Casts of one run without a fault: Gaussians whose size wanders with the seed, the run and the tensor."""
    names, steps = shape.names, np.array(shape.steps)
    rng = np.random.default_rng(_key("run", seed, run))
    size = np.random.default_rng(_key("seed", seed)).normal(0, shape.common)
    luck = rng.normal(0, shape.common, (1, 2)) + rng.normal(0, shape.own, (len(names), 2))
    wander = rng.normal(0, shape.own, (2, len(names), len(steps)))
    base = np.array([np.random.default_rng(_key("tensor", *name)).normal(0, 0.5) for name in names])
    log_rms = base[:, None] + size + luck[:, :1] + wander[0] + 0.2 * np.log(steps)[None, :]
    log_spread = np.log(4.5) + 0.5 * (luck[:, 1:] + wander[1])
    rms, spread = np.exp(log_rms), np.exp(log_spread)
    formats = np.array([format_of(recipe, operand) for _, _, operand in names])
    top = np.array([MAXIMUM[name] for name in formats])[:, None]
    best = np.where(formats == E4M3, 31.5, 25.5)[:, None]
    n = ROWS * WIDTH
    under = rng.binomial(n, 2e-4, rms.shape)
    columns: dict[str, Any] = {name: np.zeros(rms.shape) for name in (*ts.COUNT_COLUMNS, *ts.VALUE_COLUMNS)}
    columns |= {
        "element_count": np.full(rms.shape, n),
        "group_count": np.full(rms.shape, 1 if GRAIN[recipe] == "tensor" else ROWS),
        "underflow_count": under,
        "amax": rms * spread,
        "group_amax_min": rms * spread * 0.6,
        "group_amax_median": rms * spread * 0.8,
        "scale_min": top / (rms * spread),
        "scale_max": top / (rms * spread) / (1.0 if GRAIN[recipe] == "tensor" else 0.6),
        "underflow_frac": under / n,
        "sqnr_db": best - 2.0 * (luck[:, 1:] + wander[1]),
        "rms": rms,
        "amax_over_rms": spread,
    }
    table = pd.DataFrame({name: np.asarray(values).ravel() for name, values in columns.items()})
    table["step"] = np.tile(steps, len(names))
    table["tokens"] = table["step"] * 512
    for place, column in enumerate(("fqn", "gemm", "operand")):
        table[column] = np.repeat([name[place] for name in names], len(steps))
    table["format"] = np.repeat(formats, len(steps))
    return table.assign(recipe=recipe, granularity=GRAIN[recipe])


def signals_of_run(shape: TensorShape, arm: str, role: str, seed: int, replica: object) -> pd.DataFrame:
    """The signals of one run: each grows with the step as in any run, and wanders with seed, run and module."""
    names, steps = shape.signals, np.array(shape.steps)
    rng = np.random.default_rng(_key("signals", seed, role, arm, replica))
    common = np.random.default_rng(_key("signals of", seed)).normal(0, shape.common, (len(names), 1))
    luck, wander = (
        rng.normal(0, shape.own, (len(names), 1)),
        rng.normal(0, shape.own, (len(names), len(steps))),
    )
    values = 0.5 * steps[None, :] ** 0.4 * np.exp(common + luck + wander)
    for fault in shape.signal_faults:
        if fault.in_control or (role == "test" and arm == shape.arm):
            row = names.index((fault.signal, fault.fqn))
            values[row] *= fault.factor ** np.maximum(0, steps - fault.step)
    table = pd.DataFrame({"value": values.ravel(), "step": np.tile(steps, len(names))})
    table["tokens"] = table["step"] * 512
    table["signal"] = np.repeat([signal for signal, _ in names], len(steps))
    table["fqn"] = np.repeat([fqn for _, fqn in names], len(steps))
    return table


def with_fault(table: pd.DataFrame, fault: Fault, recipe: str, seed: int, run: object) -> pd.DataFrame:
    """The same casts with the faulty operand really cast from the step on at which the fault begins."""
    frozen: dict[str, np.ndarray] = {}
    hit = (table["fqn"] == fault.fqn) & (table["operand"] == fault.operand) & (table["step"] >= fault.step)
    rows = []
    for row in table[hit].to_dict("records"):
        rng = np.random.default_rng(_key("x", seed, run, row["step"]))
        x = fault.change(rng.normal(0, row["rms"], (ROWS, WIDTH)), row["step"] - fault.step)
        format = fault.format or format_of(recipe, fault.operand)
        scale = None
        if fault.frozen:
            axis = 1 if row["granularity"] == "row" else None
            own = MAXIMUM[format] / np.abs(x).max(axis=axis, keepdims=True)
            scale = frozen.setdefault(str(row["gemm"]), own)
        rows.append(
            {**row, **cast_row(x, format, row["granularity"], scale, fault.batches), "format": format}
        )
    return pd.concat([table[~hit], pd.DataFrame(rows)], ignore_index=True)


def write_parts(
    run_dir: Path, table: pd.DataFrame, signals: pd.DataFrame | None = None, *, per_part: int = 10
) -> None:
    """Write casts and signals as the probe does: parts of a few steps each, the version in the metadata."""
    folder = run_dir / schema.TENSOR_STATS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    steps = sorted(table["step"].unique())
    for part, first in enumerate(range(0, len(steps), per_part)):
        at = steps[first : first + per_part]
        write_part(folder / f"part-{part:05d}.parquet", table[table["step"].isin(at)])
        if signals is not None:
            rows = signals[signals["step"].isin(at)]
            write_part(folder / f"signals-{part:05d}.parquet", rows, columns=ts.SIGNAL_COLUMNS)


def write_part(
    path: Path, rows: pd.DataFrame, version: bytes | None = None, columns: Sequence[str] = ts.CAST_COLUMNS
) -> None:
    table = pa.Table.from_pandas(
        rows[list(columns)], ts.arrow_schema(columns), preserve_index=False, safe=False
    )
    stated = str(ts.TENSOR_SCHEMA_VERSION).encode() if version is None else version
    pq.write_table(table.replace_schema_metadata({ts.METADATA_KEY: stated}), path)


def casts_of_run(shape: TensorShape, arm: str, role: str, seed: int, replica: object) -> pd.DataFrame:
    """All casts that one run records: its own as trained, what-if casts of the other recipes."""
    tables = []
    for recipe in shape.what_if:
        table = healthy(shape, recipe, seed, (role, arm, replica))
        for fault in shape.faults:
            if (role == "test" and (arm == shape.arm or fault.in_control)) or fault.in_control:
                kept = fault if role == "test" and recipe == arm else _as_cast_right(fault)
                table = with_fault(table, kept, recipe, seed, (role, arm, replica))
        kind = ts.TRAINED if role == "test" and recipe == arm else ts.WHAT_IF
        tables.append(table.assign(kind=kind))
    return pd.concat(tables, ignore_index=True)


def arm_in_memory(shape: TensorShape, *, seeds: int = 3, matched: bool = False, idle: int = 0) -> ArmTensors:
    """The arm as `read_arm` would give it, with one control and one further BF16 run per seed, without a disk.

    `idle` further seeds have these BF16 runs and no run of the arm.
    """
    own = replace(shape, what_if=(shape.arm,))

    def panels(arm: str, role: str, count: int) -> dict[int, list[Panel]]:
        found = {}
        for seed in range(count):
            place = (arm, role, seed, int(role == "null"))
            casts, signals = casts_of_run(own, *place), signals_of_run(own, *place)
            found[seed] = [replace(panel_of(TensorTables(casts, signals)), signals=signals_of(signals))]
        return found

    return arm_of(
        shape.arm,
        panels(shape.arm, "test", seeds),
        panels("bf16", "control", seeds + idle),
        panels("bf16_null", "null", seeds + idle),
        matched=matched,
    )


def noisy_health(recipes: Sequence[str]) -> TensorHealth:
    """Health of arms whose every tensor is a candidate, and every cell of every heat map another colour.

    Larger than any study's: 300 tensors of 50 linears and 100 probes per arm.
    """
    shape = TensorShape(10, ("attn.qkv_proj", "attn.o_proj", "ffn.gate", "ffn.up", "ffn.down"))
    rng = np.random.default_rng(0)
    tensors = tuple(Tensor(*name) for name in shape.names)
    size = (len(tensors), 100)
    zero = Fault("blocks.0.ffn.down", "input", 1, lambda x, since: 0.0 * x)
    small = TensorShape(1, ("ffn.down",), tuple(range(10, 101, 10)), faults=(zero,))
    arm = arm_health("x", arm_in_memory(small), (0, 100), {})
    (first, *_), steps = arm.candidates, np.arange(10, 1001, 10)
    curves = tuple(
        Trajectory(tensor, *np.exp(rng.normal(0, 1, (2, 5, 100))))
        for tensor in tensors[: 2 * MAX_TRAJECTORIES : 2]
    )
    pictures = ArmPictures(tensors, steps, 10 ** rng.uniform(-6, 0, size), rng.uniform(0, 15, size), curves)
    candidates = tuple(replace(first, tensor=tensor) for tensor in tensors)
    levels = {name: np.ones(len(tensors)) for name in arm.levels}
    found = replace(arm, tensors=tensors, candidates=candidates, levels=levels, pictures=pictures)
    return TensorHealth(tuple(replace(found, recipe=recipe) for recipe in recipes))


def _as_cast_right(fault: Fault) -> Fault:
    """The tensor of a fault under a cast that is as declared."""
    return Fault(fault.fqn, fault.operand, fault.step, fault.change, fault.in_control, batches=fault.batches)


def write_tensor_study(
    root: Path,
    shape: TensorShape,
    study: Shape | None = None,
    *,
    effects: Mapping[str, float] | None = None,
    per_part: int = 10,
) -> list[RunRecord]:
    """Write a whole study with curves and tensor statistics and read it back."""
    study = study or Shape(effects=effects if effects is not None else {shape.arm: 0.0056})
    for record in report_study.write_study(root, study):
        spec = record.spec
        place = (spec["arm"], spec["role"], spec["seed"], spec["replica"])
        write_parts(
            record.path, casts_of_run(shape, *place), signals_of_run(shape, *place), per_part=per_part
        )
    return read_runs(root)
