"""What one training run is: frozen, fully resolved, and hashed into its name. Imports no torch.

Two runs with equal `RunSpec` are the same run; two runs that differ only in `precision` (and in `replica`) are a
pair. Everything that can change a number belongs here; what cannot (checkpoint cadence, slots) does not.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from fp8parity.frozen import Frozen as Frozen
from fp8parity.own_spec import HfDataSpec, HfModelSpec, ImportDataSpec, ImportModelSpec, kind_of
from fp8parity.presets import PRESETS, preset_fields

SPEC_VERSION = 1
"""Part of the hash; raised by hand when a field's meaning changes."""

FP8_DIM_MULTIPLE = 16
"""`torch._scaled_mm` needs both sides of the second operand and the contraction to be multiples of 16
(torch/_meta_registrations.py, `_check_scaled_mm_sizes`)."""


def _no_bool(value: Any) -> Any:
    # YAML 1.1 reads on/off/yes/no as booleans, and a boolean would silently count as 0 or 1.
    if isinstance(value, bool):
        raise ValueError(
            f"expected a number, got the boolean {str(value).lower()} (YAML reads on/off/yes/no so)"
        )
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
PositiveInt = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
NonNegativeInt = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
PositiveFloat = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]

Compute = Literal["bf16-mixed", "bf16-true"]
Compile = Literal["off", "blocks"]
Device = Literal["auto", "cpu", "cuda"]
RecipeName = Literal["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "blockwise_requant"]
Backend = Literal["torchao_float8", "torchao_blockwise", "reference"]
ReplicaKind = Literal["none", "rerun", "reorder", "jitter"]


DECODER, TOKENS = "decoder", "tokens"
"""The kinds of model and data that a section without `kind` means."""


def _without_kind(values: Any, default: str) -> Any:
    # the default may be written out, and is no part of the record, so that no stored run is renamed by it
    if isinstance(values, dict) and values.get("kind") == default:
        return {key: value for key, value in values.items() if key != "kind"}
    return values


class ModelSpec(Frozen):
    """A Llama-style decoder. `preset` fills the sizes; any size given beside it wins."""

    preset: str = Field("custom", description="Named sizes: " + ", ".join(PRESETS) + "; or custom.")
    dim: PositiveInt = Field(description="Width of the residual stream.")
    n_layers: PositiveInt = Field(description="Number of decoder blocks.")
    n_heads: PositiveInt = Field(description="Query heads; `dim` must be divisible by it.")
    n_kv_heads: PositiveInt = Field(description="Key/value heads (grouped-query attention); divides n_heads.")
    ffn_dim: PositiveInt = Field(description="Inner width of the SwiGLU feed-forward.")
    vocab_size: PositiveInt | None = Field(
        None,
        description="Rows of the embedding; default: the data's vocabulary rounded up to a multiple of 16.",
    )
    tied_head: bool = Field(False, description="Use the embedding as output head.")
    fused_qkv: bool = Field(False, description="One linear for q, k and v instead of three.")
    fused_gate_up: bool = Field(False, description="One linear for gate and up instead of two.")
    rope_theta: PositiveFloat = Field(10_000.0, description="Base of the rotary position embedding.")
    norm_eps: PositiveFloat = Field(1e-5, description="Epsilon of RMSNorm.")
    init_std: PositiveFloat = Field(
        0.02,
        description="Standard deviation of the initial weights; residual projections get init_std/sqrt(2 L).",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        values = _without_kind(values, DECODER)
        if isinstance(values, dict) and values.get("preset", "custom") != "custom":
            return {**preset_fields(str(values["preset"])), **values}
        return values

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSpec:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        if (self.dim // self.n_heads) % 2:
            raise ValueError(
                f"head width {self.dim // self.n_heads} is odd; rotary embedding needs an even one"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        return self

    @property
    def label(self) -> str:
        """Short name for run names and reports."""
        return self.preset if self.preset != "custom" else f"d{self.dim}l{self.n_layers}"

    def resolve_vocab(self, data_vocab: int) -> int:
        """Return the number of embedding rows for data with `data_vocab` token ids; `ValueError` if too few."""
        if self.vocab_size is None:
            return -(-data_vocab // FP8_DIM_MULTIPLE) * FP8_DIM_MULTIPLE
        if self.vocab_size < data_vocab:
            raise ValueError(
                f"vocab_size {self.vocab_size} is smaller than the data's vocabulary {data_vocab}; "
                f"write vocab_size: {-(-data_vocab // FP8_DIM_MULTIPLE) * FP8_DIM_MULTIPLE} or leave it out"
            )
        return self.vocab_size


class DataSpec(Frozen):
    """Where tokens come from: the interpreter's own Python sources, or a packed token file."""

    source: Literal["python-sources", "bin"] = Field("python-sources", description="Kind of token source.")
    path: str | None = Field(None, description="The .bin file (source: bin), relative to the recipe file.")
    sha256: str | None = Field(None, description="Expected digest of the .bin file; checked before training.")
    scope: Literal["stdlib", "environment"] = Field(
        "stdlib", description="python-sources: the standard library, or every installed package as well."
    )
    max_mib: PositiveFloat | None = Field(None, description="python-sources: stop after about this many MiB.")
    held_out_fraction: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, lt=0.5)] = Field(
        0.05,
        description="python-sources: share of the files held out; a .bin brings its own split.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, values: Any) -> Any:
        return _without_kind(values, TOKENS)

    @model_validator(mode="after")
    def _path_when_needed(self) -> DataSpec:
        if self.source == "bin" and self.path is None:
            raise ValueError("source: bin needs path: FILE.bin (make one with `fp8parity data pack`)")
        if self.source == "python-sources" and (self.path is not None or self.sha256 is not None):
            raise ValueError("path and sha256 belong to source: bin")
        if self.source == "bin":
            self._nothing_without_effect()
        return self

    def _nothing_without_effect(self) -> None:
        """Refuse what packing decided: a .bin is read as it is. A stored run states the defaults, so these pass."""
        for key in ("scope", "max_mib", "held_out_fraction"):
            if getattr(self, key) != type(self).model_fields[key].default:
                remedy = (
                    "pack it again with --held-out-fraction" if key == "held_out_fraction" else "leave it out"
                )
                raise ValueError(
                    f"{key} has no effect on source: bin, which is read as it was packed; {remedy}"
                )


class OptimSpec(Frozen):
    """AdamW with clipping and a schedule, equal in both arms."""

    lr: PositiveFloat = Field(description="Peak learning rate.")
    beta1: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)] = Field(
        0.9, description="AdamW beta1."
    )
    beta2: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)] = Field(
        0.95, description="AdamW beta2."
    )
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of the matrices; norms are not decayed.")
    clip_norm: PositiveFloat | None = Field(
        1.0, description="Global gradient norm is clipped to this; null: off."
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="Shape after the warm-up.")
    warmup_steps: NonNegativeInt = Field(0, description="Linear warm-up, in optimizer steps.")
    min_lr_ratio: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)] = Field(
        0.1, description="Final learning rate as a share of the peak."
    )
    decay_fraction: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1)] = Field(
        0.2, description="wsd: share of the steps that the final linear decay takes."
    )
    fused: bool = Field(True, description="Fused optimizer kernels.")


class TrainSpec(Frozen):
    """Steps, batch, compute dtype and evaluation, equal in both arms."""

    steps: PositiveInt = Field(description="Optimizer steps.")
    batch_size: PositiveInt = Field(description="Sequences per optimizer step.")
    accumulate: PositiveInt = Field(1, description="Micro-batches per optimizer step; divides batch_size.")
    context: PositiveInt = Field(description="Tokens per sequence.")
    compute: Compute = Field(
        "bf16-mixed", description="bf16-mixed: fp32 master weights, bf16 compute. bf16-true: bf16 weights."
    )
    bf16_gemm: Literal["native", "fp32_accumulate"] = Field(
        "native",
        description="native: torch's bf16 kernels. fp32_accumulate: bf16 operands summed in fp32, rounded once; for "
        "CPUs without bf16 instructions, where it is many times faster.",
    )
    compile: Compile = Field("off", description="off, or blocks: torch.compile each decoder block.")
    activation_checkpointing: bool = Field(False, description="Recompute each block in the backward pass.")
    eval_every: PositiveInt = Field(
        description="Optimizer steps between held-out evaluations; the last step too."
    )
    eval_sequences: PositiveInt = Field(64, description="Sequences of the fixed held-out set.")
    device: Device = Field("auto", description="auto: cuda where there is one, else cpu.")
    threads: PositiveInt = Field(
        1, description="CPU threads of one run; changes the order of sums, so it is hashed."
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        # YAML 1.1 turns a bare `off` into False.
        return {False: "off", True: "on"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _accumulate_divides(self) -> TrainSpec:
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}")
        if self.eval_every > self.steps:
            raise ValueError(
                f"eval_every {self.eval_every} is larger than steps {self.steps}: nothing to compare"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.context

    @property
    def tokens_per_micro_batch(self) -> int:
        """Rows M of each linear's GEMM."""
        return self.batch_size // self.accumulate * self.context


class PrecisionSpec(Frozen):
    """How the linears compute: the only section in which the two arms of a pair differ."""

    recipe: RecipeName = Field(description="bf16, or the FP8 precision recipe (torchao's names).")
    backend: Backend = Field(
        "torchao_float8", description="What executes the FP8 GEMMs; never chosen silently."
    )
    weight_cast_source: Literal["compute", "master"] = Field(
        "compute",
        description="The FP8 weight cast reads the bf16 copy (as FSDP2, Megatron, TE) or the fp32 master.",
    )
    unit: Literal["gemm", "linear", "block"] = Field(
        "gemm", description="What keep_first/keep_last count; linears that read the same input are one gemm."
    )
    keep_first: NonNegativeInt = Field(0, description="How many units at the start stay in BF16.")
    keep_last: NonNegativeInt = Field(0, description="How many units at the end stay in BF16.")
    include: tuple[str, ...] = Field(
        (), description="Only these FQNs may be FP8: globs, or re:REGEX. Empty: all."
    )
    exclude: tuple[str, ...] = Field((), description="These FQNs stay in BF16: globs, or re:REGEX.")
    convert_head: bool = Field(False, description="Let the output head be FP8 too, and count it.")
    switch_at: PositiveInt | None = Field(
        None,
        description="FP8 for this many optimizer steps of the run, BF16 from then on (docs/fork.md); default: FP8 to "
        "the end.",
    )

    @model_validator(mode="after")
    def _has_fp8_to_leave(self) -> PrecisionSpec:
        if self.is_bf16 and self.switch_at is not None:
            raise ValueError(
                f"switch_at {self.switch_at} with recipe bf16, which has no FP8 to leave; take switch_at out, or name "
                "an FP8 recipe (the control ignores the base's switch_at by itself)"
            )
        return self

    @property
    def is_bf16(self) -> bool:
        """Whether this is the control's precision."""
        return self.recipe == "bf16"


OwnModelSpec = ImportModelSpec | HfModelSpec
OwnDataSpec = ImportDataSpec | HfDataSpec
AnyModelSpec = ModelSpec | OwnModelSpec

_Model = Annotated[
    Annotated[ModelSpec, Tag(DECODER)]
    | Annotated[ImportModelSpec, Tag("import")]
    | Annotated[HfModelSpec, Tag("hf")],
    Discriminator(lambda values: kind_of(values, DECODER)),
]
_Data = Annotated[
    Annotated[DataSpec, Tag(TOKENS)]
    | Annotated[ImportDataSpec, Tag("import")]
    | Annotated[HfDataSpec, Tag("hf")],
    Discriminator(lambda values: kind_of(values, TOKENS)),
]


class ForkSpec(Frozen):
    """Start from a BF16 checkpoint of another run instead of from drawn weights (docs/fork.md)."""

    run: str = Field(
        min_length=1,
        description="Directory of the BF16 run to start from, relative to the recipe file. `{seed}` stands for the "
        "seed; a pattern with * must match one control run.",
    )
    step: PositiveInt = Field(
        description="The step of that run; it must be among its runtime.keep_checkpoints."
    )
    schedule: Literal["restart", "continue"] = Field(
        "restart",
        description="restart: optim's schedule runs over this run's own train.steps. continue: it goes on where the "
        "parent's stood, over the parent's steps and train.steps together.",
    )


class ParentState(Frozen):
    """The state that a fork starts from, found by `fork.Parents`: hashed, so that another state is another run.

    `batches` and `schedule_steps` say how many batches of its seed's order, and steps of its schedule, lie behind it.
    """

    run_id: str
    spec_hash: str
    data_sha256: str
    weights_sha256: str
    optimizer_sha256: str
    batches: NonNegativeInt
    schedule_steps: NonNegativeInt


_ABSENT_WHEN_UNSET = (("fork_from",), ("parent",), ("precision", "switch_at"))
"""Settings that came later: left out of the canonical form while unset, so that no run is renamed by them."""


class RunSpec(Frozen):
    """One training run, complete: what `run_id` hashes."""

    model: _Model
    data: _Data
    optim: OptimSpec
    train: TrainSpec
    precision: PrecisionSpec
    seed: NonNegativeInt
    replica: NonNegativeInt = 0
    replica_kind: ReplicaKind = "none"
    fork_from: ForkSpec | None = None
    parent: ParentState | None = None

    @model_validator(mode="after")
    def _warmup_fits(self) -> RunSpec:
        if self.fork_from is not None and self.fork_from.schedule == "continue":
            return self  # the parent's steps count too
        if self.optim.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optim.warmup_steps {self.optim.warmup_steps} is not below train.steps {self.train.steps}"
            )
        return self

    def canonical(self) -> dict[str, Any]:
        """Return the spec as plain JSON values with every default written out, without what follows from the rest."""
        document = self.model_dump(mode="json", exclude={"model": {"inventory"}})
        for *sections, key in _ABSENT_WHEN_UNSET:
            place = document
            for section in sections:
                place = place[section]
            if place[key] is None:
                del place[key]
        return document

    @property
    def batches_before(self) -> int:
        """Batches of the data order that lie behind the first step: 0 unless the run is a fork."""
        return 0 if self.parent is None else self.parent.batches

    @property
    def schedule_before(self) -> int:
        """Steps of the schedule that lie behind the first step: 0 unless a fork continues its parent's."""
        continues = self.fork_from is not None and self.fork_from.schedule == "continue"
        return self.parent.schedule_steps if self.parent is not None and continues else 0

    def hash(self) -> str:
        """Return the sha256 of the canonical JSON and the spec version, in hex; where a parent lies is left out."""
        document = self.canonical()
        if self.fork_from is not None:
            del document["fork_from"]["run"]
        text = json.dumps({"spec_version": SPEC_VERSION, **document}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
