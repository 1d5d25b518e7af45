"""Applying a recipe to a model: every legal cell trains and is proven, every other is refused by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchao
from torch import Tensor, nn

from fp8parity import precision
from fp8parity.casts import GEMMS, RECIPES
from fp8parity.errors import UsageError
from fp8parity.layer_policy import LayerDecision, LayerPlan, resolve
from fp8parity.model import DecoderLM, initialise
from fp8parity.precision import table, torchao_blockwise, torchao_float8
from fp8parity.precision.comparison import compare
from fp8parity.precision.execution import observe
from fp8parity.precision.reference import ReferenceLinear
from fp8parity.precision_rules import BACKEND_RECIPES, FP8_GEMMS, jitter_of, rule_problems
from fp8parity.shapes import linear_shapes
from fp8parity.spec import ModelSpec, PrecisionSpec, RunSpec, TrainSpec

VOCAB = 64
MODEL = ModelSpec.model_validate(
    {
        "dim": 64,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "ffn_dim": 64,
        "fused_qkv": True,
        "fused_gate_up": True,
    }
)
CELLS = list(table.cells())


def cell_id(cell: Any) -> str:
    if isinstance(cell, PrecisionSpec):
        return f"{cell.recipe}-{cell.backend}-{cell.weight_cast_source}"
    return cell.compute if isinstance(cell, TrainSpec) else str(cell)


def spec(recipe: str, **kwargs: Any) -> PrecisionSpec:
    return PrecisionSpec.model_validate({"recipe": recipe, "backend": "reference", **kwargs})


def built(p: PrecisionSpec, *, compute: str, checkpointing: bool) -> tuple[DecoderLM, LayerPlan]:
    model = DecoderLM(MODEL, VOCAB, activation_checkpointing=checkpointing)
    initialise(model, seed=0)
    plan = resolve(linear_shapes(MODEL, VOCAB), p)
    precision.apply(model, plan, p)
    return (model.bfloat16() if compute == "bf16-true" else model), plan


def rows(step: int) -> Tensor:
    """Four rows of a rule that a model can learn: each token is 5 times the last plus 3."""
    start = torch.randint(0, VOCAB, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = [start]
    for _ in range(16):
        tokens.append((tokens[-1] * 5 + 3) % VOCAB)
    return torch.cat(tokens, 1)


def backward(model: nn.Module, batch: Tensor, accumulate: int, *, mixed: bool) -> float:
    total = 0.0
    for part in batch.chunk(accumulate):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            logits = model(part[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) / accumulate
        loss.backward()
        total += loss.item()
    return total


@cache
def curve(p: PrecisionSpec, compute: str, accumulate: int, checkpointing: bool) -> tuple[float, ...]:
    """Losses of 20 steps of AdamW; with accumulation the first is also observed and compared."""
    model, plan = built(p, compute=compute, checkpointing=checkpointing)
    mixed = compute == "bf16-mixed"
    if not p.is_bf16 and accumulate > 1:
        record = observe(model, lambda: backward(model, rows(0), accumulate, mixed=mixed))
        assert compare(record, plan, p.recipe, checkpointing=checkpointing) == []
        model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        losses.append(backward(model, rows(step), accumulate, mixed=mixed))
        optimizer.step()
        optimizer.zero_grad()
    return tuple(losses)


LEGAL = [(p, t) for p, t in CELLS if table.refusal(p, t) is None]
ILLEGAL = [(p, t) for p, t in CELLS if table.refusal(p, t) is not None]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("p", "train"), [(p, t) for p, t in LEGAL if p.weight_cast_source == "compute"], ids=cell_id
)
def test_every_legal_cell_trains_and_checkpointing_changes_no_bit(
    p: PrecisionSpec, train: TrainSpec, accumulate: int
) -> None:
    losses = curve(p, train.compute, accumulate, False)
    assert_learns(losses, curve(spec("bf16"), train.compute, accumulate, False))
    assert curve(p, train.compute, accumulate, True) == losses


@pytest.mark.parametrize(
    ("p", "train"), [(p, t) for p, t in LEGAL if p.weight_cast_source == "master"], ids=cell_id
)
def test_every_legal_cell_with_a_cast_of_the_master_weight_trains(p: PrecisionSpec, train: TrainSpec) -> None:
    losses = curve(p, train.compute, 2, True)
    assert_learns(losses, curve(spec("bf16"), train.compute, 2, False))
    assert losses != curve(p.model_copy(update={"weight_cast_source": "compute"}), train.compute, 2, True)


def assert_learns(losses: tuple[float, ...], control: tuple[float, ...]) -> None:
    """The rule is learnt, and as fast as in BF16: FP8 rounds operands by at most 2^-4, no step is far off."""
    assert losses[-1] < 0.5 * losses[0]
    assert losses != control
    assert sum(losses) == pytest.approx(sum(control), rel=2**-4)


@pytest.mark.parametrize(("p", "train"), ILLEGAL, ids=cell_id)
def test_every_other_cell_is_refused_by_name_before_training(p: PrecisionSpec, train: TrainSpec) -> None:
    run = RunSpec.model_validate(
        {
            "model": MODEL, "data": {}, "optim": {"lr": 1e-3}, "train": train, "precision": p, "seed": 0
        }
    )  # fmt: skip
    problems = rule_problems(run)
    assert problems
    for (section, key), message in problems:
        assert message.startswith(f"{section}.{key}: ")
        assert "; write " in message
    if p.recipe not in BACKEND_RECIPES[p.backend]:
        with pytest.raises(UsageError, match=rf"{p.backend} has no recipe {p.recipe} .*; write backend: "):
            built(p, compute=train.compute, checkpointing=False)


def test_there_are_as_many_cells_as_the_tables_say() -> None:
    assert (len(CELLS), len(LEGAL)) == (5 * 3 * 2 * 2, 3 * (3 + 5))


def test_the_documents_tables_are_current() -> None:
    document = Path(__file__).parents[2] / "docs" / "precision-recipes.md"
    text = document.read_text(encoding="utf-8")
    assert table.rewritten(text) == text, "run: python -m fp8parity.precision.table docs/precision-recipes.md"
    with pytest.raises(ValueError, match="lacks the markers"):
        table.rewritten("# nothing generated")


def test_the_rules_import_no_torch() -> None:
    code = "import sys, fp8parity.precision_rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the record --------------------------------------------------------------------------------------------


def test_the_record_says_what_was_done() -> None:
    model = DecoderLM(MODEL, VOCAB)
    p = spec("rowwise_with_gw_hp", keep_first=2)
    record = precision.apply(model, resolve(linear_shapes(MODEL, VOCAB), p), p)
    assert record.converted == ("blocks.0.ffn.gate_up_proj", "blocks.0.ffn.down_proj")
    assert dict(record.skipped)["head"] == "output head"
    assert dict(record.gemm_dtypes) == {
        "output": "e4m3 x e4m3",
        "grad_input": "e4m3 x e4m3",
        "grad_weight": "high precision",
    }
    assert record.notes == ("emulated: exact casts, products summed in float32",)
    assert isinstance(model.get_submodule("blocks.0.ffn.down_proj"), ReferenceLinear)
    assert precision.gemm_dtypes("tensorwise")[1] == ("grad_input", "e5m2 x e4m3")


def test_a_jittered_replica_is_converted_with_its_own_grid() -> None:
    run = RunSpec.model_validate(
        {
            "model": MODEL, "data": {}, "optim": {"lr": 1e-3}, "precision": spec("rowwise"), "seed": 3,
            "train": {"steps": 1, "batch_size": 4, "context": 32, "eval_every": 1},
            "replica": 2, "replica_kind": "jitter",
        }
    )  # fmt: skip
    assert rule_problems(run) == []
    jitter = jitter_of(run)
    assert 0.85 <= jitter < 1
    assert jitter_of(run.model_copy(update={"replica_kind": "rerun"})) == 1.0
    model = DecoderLM(MODEL, VOCAB)
    plan = resolve(linear_shapes(MODEL, VOCAB), run.precision)
    record = precision.apply(model, plan, run.precision, jitter=jitter)
    assert record.notes[-1] == f"rounding grid shifted by {jitter!r}"
    layer = model.get_submodule(record.converted[0])
    assert isinstance(layer, ReferenceLinear)
    assert layer.plan.output.left is not None
    assert layer.plan.output.left.jitter == jitter


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (spec("rowwise", backend="torchao_float8"), "backend torchao_float8 has kernels"),
        (spec("bf16"), "bf16 has no cast"),
    ],
)
def test_jitter_without_emulated_casts_is_refused(changed: PrecisionSpec, named: str) -> None:
    run = RunSpec.model_validate(
        {
            "model": MODEL, "data": {}, "optim": {"lr": 1e-3}, "precision": changed, "seed": 3,
            "train": {"steps": 1, "batch_size": 4, "context": 32, "eval_every": 1},
            "replica": 1, "replica_kind": "jitter",
        }
    )  # fmt: skip
    (_, message), *_ = rule_problems(run)
    assert named in message
    assert "write backend: reference" in message
    if not changed.is_bf16:
        plan = resolve(linear_shapes(MODEL, VOCAB), changed)
        with pytest.raises(
            UsageError, match="jitter needs emulated casts, backend torchao_float8 has kernels"
        ):
            precision.apply(DecoderLM(MODEL, VOCAB), plan, changed, jitter=0.9)


# --- refusals ----------------------------------------------------------------------------------------------


class LoraLinear(nn.Linear):
    """A linear with its own forward."""


def plan_of(*fqns: str) -> LayerPlan:
    return LayerPlan(tuple(LayerDecision(f, True, "") for f in fqns), 1.0)


@pytest.mark.parametrize("backend", ["reference", "torchao_float8"])
def test_what_cannot_be_converted_honestly_is_refused_and_nothing_is_touched(backend: str) -> None:
    p = spec("rowwise", backend=backend)
    lora = nn.Sequential(nn.Linear(16, 16), LoraLinear(16, 16))
    with pytest.raises(
        UsageError, match=r"1 is a LoraLinear with its own forward, which would be lost\. Keep it"
    ):
        precision.apply(lora, plan_of("0", "1"), p)
    assert type(lora[0]) is nn.Linear
    attention = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(UsageError, match=r"0\.out_proj is a NonDynamicallyQuantizableLinear"):
        precision.apply(attention, plan_of("0.out_proj"), p)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    plan = LayerPlan(
        (LayerDecision("self_attn.out_proj", False, ""), *plan_of("linear1", "linear2").decisions), 1.0
    )
    with pytest.raises(UsageError, match=r"linear1 belongs to nn\.TransformerEncoderLayer, whose evaluation"):
        precision.apply(encoder, plan, p)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert precision.apply(encoder, plan, p).converted == ("linear1", "linear2")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("backend", ["reference", "torchao_float8"])
def test_hooks_training_flag_and_tied_weights_survive(backend: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    precision.apply(model, plan_of("0", "1"), spec("rowwise", backend=backend))
    assert model[0].weight is model[1].weight
    assert not model[0].training
    model(torch.ones(16, 16))
    assert calls == [1]


def test_the_blockwise_prototype_says_what_it_needs() -> None:
    p = spec("blockwise", backend="torchao_blockwise")
    with pytest.raises(UsageError, match=r"needs no bias and out_features a multiple of 128, got Linear"):
        torchao_blockwise.convert(nn.Linear(128, 64), p)
    with pytest.raises(UsageError, match="torchao_blockwise has no recipe rowwise"):
        torchao_blockwise.convert(nn.Linear(128, 128), spec("rowwise", backend="torchao_blockwise"))
    if not torch.cuda.is_available():
        model = nn.Sequential(nn.Linear(128, 128, bias=False))
        with pytest.raises(UsageError, match=r"found no CUDA device; write backend: reference .*\(layer 0\)"):
            precision.apply(model, plan_of("0"), p)


def test_amd_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    on_gpu: Any = SimpleNamespace(weight=SimpleNamespace(is_cuda=True))
    with pytest.raises(UsageError, match="torchao_float8 is not supported on AMD GPUs"):
        torchao_float8.convert(on_gpu, spec("tensorwise", backend="torchao_float8"))
    with pytest.raises(UsageError, match="torchao_blockwise is not supported on AMD GPUs"):
        torchao_blockwise._import_linear()


def kernels_like_torchaos() -> SimpleNamespace:
    """The five autotuned kernels of torchao 0.18, with the tiles it tunes over; their module needs triton."""
    groups = [
        SimpleNamespace(kwargs={"NUM_GROUPS": g}, num_warps=w, num_stages=s)
        for g in (2, 16, 32, 64, 128) for w in (2, 4, 8) for s in (2, 4, 6)
    ]  # fmt: skip
    plain = [SimpleNamespace(kwargs={}, num_warps=w, num_stages=s) for w in (4, 8) for s in (2, 4)]
    return SimpleNamespace(
        **{
            name: SimpleNamespace(configs=plain if "weight" in name else groups)
            for name in torchao_blockwise.TILES
        }
    )


def test_each_blockwise_quantiser_is_left_one_of_torchaos_own_tiles() -> None:
    kernels = kernels_like_torchaos()
    offered = {name: list(kernel.configs) for name, kernel in vars(kernels).items()}
    for _ in range(2):  # every converted layer asks for it
        torchao_blockwise.fix_tiles(kernels)
        for name, (kwargs, warps, stages) in torchao_blockwise.TILES.items():
            (kept,) = getattr(kernels, name).configs
            assert (kept.kwargs, kept.num_warps, kept.num_stages) == (kwargs, warps, stages)
            assert any(kept is tile for tile in offered[name])


def test_a_torchao_without_the_expected_tile_is_refused_by_name() -> None:
    name = "triton_fp8_blockwise_act_quant_rhs_kernel"
    kernels = kernels_like_torchaos()
    getattr(kernels, name).configs = []
    with pytest.raises(UsageError, match=f"{name} with the tile .*install torchao 0.18"):
        torchao_blockwise.fix_tiles(kernels)
    delattr(kernels, name)
    with pytest.raises(UsageError, match=name):
        torchao_blockwise.fix_tiles(kernels)


class KernelSource:
    """What a Triton JIT function offers of its source."""

    def __init__(self, src: str) -> None:
        self.src = src

    def _unsafe_update_src(self, src: str) -> None:
        self.src = src


def installed_kernels() -> SimpleNamespace:
    """The sources of the installed torchao's quantisation kernels; their module needs triton to be imported."""
    path = Path(torchao.__file__).parent / "prototype/blockwise_fp8_training/kernels.py"
    text = path.read_text(encoding="utf-8")
    functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    sources = {n: ast.get_source_segment(text, functions[n]) or "" for n in torchao_blockwise.TILES}
    return SimpleNamespace(**{n: SimpleNamespace(fn=KernelSource(src)) for n, src in sources.items()})


def test_each_blockwise_quantiser_gives_a_group_with_a_nan_a_nan_scale() -> None:
    kernels = installed_kernels()
    before = {name: kernel.fn.src for name, kernel in vars(kernels).items()}
    for _ in range(2):  # every converted layer asks for it
        torchao_blockwise.pass_on_non_finite(kernels)
    for name, kernel in vars(kernels).items():
        old, new = before[name].splitlines(), kernel.fn.src.splitlines()
        added, taken = [line for line in new if line not in old], [line for line in old if line not in new]
        assert (len(added), len(taken)) == (3, 1), name
        axis = "" if "weight" in name else ", axis=1" if name.endswith("act_quant_lhs_kernel") else ", axis=0"
        assert f"tl.abs(x){axis})" in taken[0]
        assert f"bitcast=True){axis})" in new[new.index(added[0])]
        assert "float('nan')" in new[new.index(added[0]) + 2]  # after the clamp, which loses a NaN
        assert "scale = (FP8_MAX / amax)" in new[new.index(added[0]) + 3]
        ast.parse(kernel.fn.src)


def test_a_torchao_that_takes_the_amax_in_another_way_is_refused_by_name() -> None:
    kernels = installed_kernels()
    name = "triton_fp8_blockwise_weight_quant_rhs_kernel"
    source = getattr(kernels, name).fn
    source.src = source.src.replace("tl.max(tl.abs(x))", "tl.max(x)")
    with pytest.raises(UsageError, match=f"{name}, this torchao takes .*install torchao 0.18"):
        torchao_blockwise.pass_on_non_finite(kernels)


def test_the_fp8_gemms_of_each_recipe_are_counted_as_it_casts() -> None:
    counted = {name: sum(plan.gemm(g).is_fp8 for g in GEMMS) for name, plan in RECIPES.items()}
    assert {"bf16": 0, **counted} == FP8_GEMMS


def test_every_recipe_has_the_reference_backend() -> None:
    assert set(RECIPES) == set(BACKEND_RECIPES["reference"])
