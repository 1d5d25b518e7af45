"""A stored study with a known shape, written through the public writer; test support."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.curves import CurveSet
from fp8parity_analysis.schema import Outcome, gate_of
from fp8parity_analysis.store import RunRecord, RunWriter, read_runs
from fp8parity_analysis.verdict import Contrast, Evidence, Judgement, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Shape:
    """How large the study is. `effects` maps a recipe arm to the gap that it ends with."""

    name: str = "granularity"
    groups: tuple[str, ...] = ("d128l3",)
    effects: Mapping[str, float] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 300
    eval_every: int = 10
    noise: float = 0.0004
    nan_from: Mapping[str, int] | None = None
    null_arm: bool = True


EFFECTS = {"tensorwise": 0.0056, "rowwise": 0.0002}
STUDY = {
    "schema_version": 1,
    "name": "granularity",
    "description": "Tensorwise against rowwise scaling on the standard library's sources.",
    "recipe_file": "granularity.yaml",
    "recipe_sha256": "0f" * 32,
    "criteria": {},
    "criteria_digest": "",
    "created_at": "2025-01-02T03:04:05+00:00",
}


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def write_study(root: Path, shape: Shape | None = None) -> list[RunRecord]:
    """Write every run of the study below `root` through the public writer and read them back."""
    for record in records_of(shape):
        run_dir = root / digest(record.run_id)[:16]
        writer = RunWriter(run_dir)
        (run_dir / schema.SPEC_FILE).write_text(json.dumps(record.spec))
        writer.append_curve(record.curve.to_dict("records"))
        writer.append_evals(record.evals.to_dict("records"))
        manifest = record.manifest or {}
        writer.finish({key: manifest[key] for key in schema.MANIFEST_KEYS})
    return read_runs(root)


def records_of(shape: Shape | None = None) -> list[RunRecord]:
    """Every run of the study, without a disk."""
    shape = shape or Shape()
    effects = EFFECTS if shape.effects is None else shape.effects
    arms = [(schema.CONTROL_ARM, "control", 0.0), *((name, "test", size) for name, size in effects.items())]
    if shape.null_arm:
        arms.insert(1, (schema.NULL_ARM, "null", 0.0))
    return [
        _run(shape, group, (arm, role, index), seed, size)
        for group in shape.groups
        for seed in shape.seeds
        for index, (arm, role, size) in enumerate(arms)
    ]


def _run(shape: Shape, group: str, place: tuple[str, str, int], seed: int, size: float) -> RunRecord:
    arm, role, index = place
    rng = np.random.default_rng([seed, index, len(group)])
    run_id = f"{group}-s{seed}-{arm}-{digest(group, arm, seed)[:8]}"
    steps = np.arange(1, shape.steps + 1)
    progress = steps / shape.steps
    offset = np.random.default_rng(seed).normal(0, 0.004)
    grown = np.minimum(1.0, 4 * progress)
    own = 0.0 if role == "control" else shape.noise * grown * (rng.normal() + _wander(rng, shape.steps))
    log_loss = np.log(1.9 + 3.7 * (1 + steps / 12) ** -0.6) + offset + own + size * grown
    loss = np.exp(log_loss)
    broken = (shape.nan_from or {}).get(arm)
    if broken is not None and seed == shape.seeds[-1]:
        loss = np.where(steps >= broken, np.nan, loss)
    batch = np.exp(np.random.default_rng([seed, 7]).normal(0, 0.03, shape.steps))
    curve = {
        "step": steps,
        "tokens": steps * 512,
        "train_loss": loss * batch,
        "grad_norm": 1.0,
        "lr": 0.003,
        "step_time": 0.16,
        "batch_digest": [f"{seed}-{step}" for step in steps],
    }
    return RunRecord(
        path=Path(run_id),
        spec=_spec(shape, group, arm, role, seed, run_id),
        manifest=_manifest(shape, group, arm, role, seed, run_id, broken),
        curve=pd.DataFrame(curve),
        evals=pd.DataFrame.from_records(_evals(shape, role, loss), columns=list(schema.EVAL_COLUMNS)),
    )


def _wander(rng: np.random.Generator, n: int, memory: float = 0.98) -> np.ndarray:
    """Slow noise of unit sd [n]."""
    shocks = rng.standard_normal(n) * np.sqrt(1 - memory**2)
    return lfilter([1.0], [1.0, -memory], shocks)


def _evals(shape: Shape, role: str, loss: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for step in range(shape.eval_every, shape.steps + 1, shape.eval_every):
        rows.append(_eval(step, "bf16", loss[step - 1]))
        if role == "test":
            rows.append(_eval(step, "arm", loss[step - 1] * 1.0001))
    return rows


def _eval(step: int, precision: str, loss: float) -> dict[str, Any]:
    return {"step": step, "split": schema.HELD_OUT, "eval_precision": precision, "loss": float(loss)}


def _spec(shape: Shape, group: str, arm: str, role: str, seed: int, run_id: str) -> dict[str, Any]:
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": run_id,
        "study": shape.name,
        "group": group,
        "arm": arm,
        "role": role,
        "seed": seed,
        "replica": int(role == "null"),
        "replica_kind": "reorder" if role == "null" else "none",
        "data_path": "../data/tokens.bin",
        "checkpoint_every": 100,
        "spec": {
            "model": {"preset": group, "dim": 128, "n_layers": 3},
            "optim": {"lr": 0.003},
            "train": {"steps": shape.steps, "batch_size": 8, "context": 64},
            "precision": {"recipe": "bf16" if role != "test" else arm},
            "seed": seed,
            "replica": int(role == "null"),
            "replica_kind": "reorder" if role == "null" else "none",
        },
    }


_LINEARS = [
    f"blocks.{block}.{name}"
    for block in range(3)
    for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "ffn.gate_proj", "ffn.down_proj")
]


def _conversion(arm: str, role: str) -> dict[str, Any]:
    kept = {"0": "among the first 4 (gemm)", "2": "among the last 4 (gemm)"}
    skipped = [{"fqn": "head", "reason": "output head"}]
    converted = []
    for name in _LINEARS:
        reason = kept.get(name.split(".")[1]) if role == "test" else "the control"
        if reason:
            skipped.append({"fqn": name, "reason": reason})
        else:
            converted.append(name)
    operands = {"output": "e4m3 x e4m3", "grad_input": "e5m2 x e4m3", "grad_weight": "e5m2 x e4m3"}
    return {
        "recipe": "bf16" if role != "test" else arm,
        "backend": "torchao_float8" if role == "test" else "none",
        "weight_cast_source": "compute",
        "converted": converted,
        "skipped": skipped,
        "fp8_flop_share": 0.309 if role == "test" else 0.0,
        "gemm_dtypes": operands if role == "test" else {},
        "notes": [],
    }


def _manifest(
    shape: Shape, group: str, arm: str, role: str, seed: int, run_id: str, broken: int | None
) -> dict[str, Any]:
    diverged = broken is not None and seed == shape.seeds[-1]
    known = {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": run_id,
        "spec_hash": digest(run_id),
        "status": "diverged" if diverged else "finished",
        "steps_done": shape.steps,
        "first_nonfinite_step": broken if diverged else None,
        "tokens": shape.steps * 512,
        "data_sha256": digest("data"),
        "init_digest": digest("init", group, seed),
        "environment": {
            "torch": "2.13.0+cpu",
            "torchao": "0.18.0",
            "device_type": "cpu",
            "device": "cpu AVX2",
        },
        "conversion": _conversion(arm, role),
        "effective": {"compute": "bf16-mixed", "compile": "off", "data_source": "python-sources"},
        "started_at": "2025-01-02T03:04:05+00:00",
        "finished_at": "2025-01-02T03:05:05+00:00",
        "wall_seconds": 50.8,
        "resumes": 0,
        "throughput_tokens_per_s": 3000.0 + (400.0 if role == "test" else 0.0),
        "model": {"label": group, "parameters": 512_896, "vocab_rows": 272},
        "execution": {"train": 18, "eval": 6, "as_trained": 18 * (role == "test"), "differences": []},
    }
    return {**dict.fromkeys(schema.MANIFEST_KEYS), **known}


def judged(
    records: list[RunRecord], *, criteria: Criteria | None = None, post_hoc: bool = False
) -> Judgement:
    return judge(CurveSet.from_runs(records), criteria or Criteria(), post_hoc=post_hoc)


def hand_judgement(
    *, names: tuple[str, str] = ("tensorwise", "rowwise"), post_hoc: bool = False
) -> Judgement:
    """A judgement written by hand, so that the report's own tests do not depend on the statistics."""
    worse, fine = names
    verdicts = (
        verdict(
            worse, Outcome.WORSE, 0.0058, (0.0042, 0.0073), reasons=("worse: above the margin", "next: look")
        ),
        verdict(
            fine, Outcome.EQUIVALENT, 0.0004, (-0.0005, 0.0013), warnings=("described only: gap +0.05 %",)
        ),
        verdict("bf16_null", Outcome.INCONCLUSIVE, -0.0002, (-0.0031, 0.0027), need_seeds=5),
    )
    return Judgement(
        criteria=Criteria(),
        verdicts=verdicts,
        contrasts=(Contrast(worse, fine, 0.0054, (0.0041, 0.0067), 0.0068, 3),),
        evidence=tuple(evidence(item) for item in verdicts),
        post_hoc=post_hoc,
        null_recipes=frozenset({"bf16_null"}),
    )


def verdict(
    recipe: str,
    outcome: Outcome,
    gap: float | None = None,
    interval: tuple[float | None, float | None] = (None, None),
    **changes: Any,
) -> Verdict:
    """A verdict with plausible values where a test does not care."""
    spread = {
        "sd": 0.0009,
        "interval": [0.0005, 0.0041],
        "df": 2,
        "estimator": "sample sd of the gap over seeds",
    }
    values: dict[str, Any] = {
        "recipe": recipe,
        "outcome": outcome,
        "gate": gate_of(outcome),
        "gap": gap,
        "interval": interval,
        "margin": 0.0025,
        "provisional": False,
        "basis": "paired t over 3 seeds, 2 df",
        "endpoint": "held_out",
        "eval_precision": "bf16",
        "alpha": 0.05,
        "horizon_tokens": 153_600,
        "n_seeds": 3,
        "n_null_pairs": 3,
        "token_cost": {
            "extra_tokens_frac": 0.043,
            "interval": (0.032, 0.056),
            "method": "slope of the control's own loss over the last third of its run",
            "speedup": 1.13,
            "worth_it": "yes",
            "net_gain": 0.086,
            "net_gain_interval": (0.074, 0.099),
        },
        "trajectory_p": None,
        "onset_step": None,
        "diverged_seeds": (),
        "need_seeds": None,
        "noise_floor": {
            "pair_gap": spread,
            "control_run": spread | {"df": 3},
            "variance_ratio": {"ratio": 3.4, "interval": [0.36, 66.0]},
            "detectable_gap": 0.0021,
        },
        "reasons": ("a reason",),
        "warnings": (),
    }
    return Verdict(**(values | changes))


def evidence(item: Verdict, seeds: tuple[int, ...] = (0, 1, 2), n: int = 30) -> Evidence:
    """Gap curves that grow to the verdict's gap, one per seed."""
    steps = np.arange(1, n + 1) * 10
    end = item.gap or 0.0
    rows = [tuple((end * steps / steps[-1] + 0.0002 * (seed - 1)).tolist()) for seed in seeds]
    return Evidence(
        item.recipe, seeds, tuple(steps.tolist()), tuple(rows), tuple(row[-1] for row in rows), 280
    )
