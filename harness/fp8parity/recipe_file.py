"""The recipe file: what a user writes. Parsed and checked in one pass; every error has a place and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from fp8parity.own_spec import OWN_DATA, OWN_MODELS, kind_of, untagged, written_by_users
from fp8parity.probe_spec import ProbeSpec
from fp8parity.problems import Problems, explain, nearest
from fp8parity.spec import (
    DECODER,
    TOKENS,
    DataSpec,
    ForkSpec,
    Frozen,
    ModelSpec,
    NonNegativeInt,
    OptimSpec,
    PositiveInt,
    PrecisionSpec,
    ReplicaKind,
    RunSpec,
    TrainSpec,
)
from fp8parity.yaml_marks import KeyPath, MarkedYaml

KINDS: dict[str, tuple[str, dict[str, type[Frozen]]]] = {
    "model": (DECODER, {DECODER: ModelSpec, **OWN_MODELS}),
    "data": (TOKENS, {TOKENS: DataSpec, **OWN_DATA}),
}
"""Of the sections that come in kinds: the kind meant without `kind`, and each kind's record."""

SECTIONS: dict[str, type[Frozen]] = {
    "model": ModelSpec,
    "data": DataSpec,
    "optim": OptimSpec,
    "train": TrainSpec,
    "precision": PrecisionSpec,
    "fork_from": ForkSpec,
}


def parse_fraction(value: Any) -> Any:
    """Turn '0.25%' into 0.0025; other values pass through for the field's own check."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError as error:
            raise ValueError(
                f"expected a fraction such as 0.0025 or a percentage such as 0.25%, got {value!r}"
            ) from error
    return value


Fraction = Annotated[float, BeforeValidator(parse_fraction), Field(gt=0, lt=1)]


def _within_generators(seeds: tuple[int, ...]) -> tuple[int, ...]:
    large = [seed for seed in seeds if seed >= 2**32]
    if large:
        raise ValueError(f"seeds {large} are beyond 2^32 - 1, the largest that every generator takes")
    return seeds


class NullArm(Frozen):
    """Replicas of an arm under the same seed and data: the measured noise floor."""

    kind: Literal["rerun", "reorder", "jitter"] = Field(
        description="rerun: the same again (a null only where the device does not repeat itself). reorder: the rows "
        "of each batch permuted. jitter: the FP8 rounding grid shifted (arm: test, backend: reference)."
    )
    arm: Literal["control", "test"] = Field("control", description="Which arm is repeated.")
    replicas: PositiveInt = Field(1, description="Replicas per seed.")
    seeds: tuple[NonNegativeInt, ...] | None = Field(None, description="Default: the study's seeds.")

    @field_validator("seeds")
    @classmethod
    def _not_too_large(cls, seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if seeds is None else _within_generators(seeds)

    @model_validator(mode="after")
    def _jitter_needs_casts(self) -> NullArm:
        if self.kind == "jitter" and self.arm == "control":
            raise ValueError(
                "kind: jitter shifts the grid of FP8 casts, and the control has none; write arm: test"
            )
        return self


class CriteriaSpec(Frozen):
    """What is called equal, fixed before the run and digested apart from the runs."""

    margin: Fraction = Field(
        0.0025, description="Largest gap called equal, as a fraction of the loss, or '0.25%'."
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(
        0.90, description="Confidence of the two-sided interval; 0.90 means two one-sided 5 % tests."
    )
    endpoint: Literal["held_out", "train", "final"] = Field(
        "held_out", description="The per-seed summary judged."
    )
    eval_precision: Literal["bf16", "arm"] = Field(
        "bf16", description="Held-out forward: bf16 in every arm, or each arm's own."
    )
    null_matched: bool = Field(
        False,
        description="Declare the null pairs to have the FP8 pair's own noise, so that they may be pooled.",
    )
    noise_sd: Fraction | None = Field(
        None, description="Run-to-run sd known from elsewhere; verdicts are provisional."
    )
    looks: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (), description="Numbers of seeds at which one looks."
    )
    spending: Literal["bonferroni", "obrien_fleming"] = Field(
        "bonferroni", description="Error rate over the looks."
    )
    anytime: bool = Field(
        False, description="Intervals valid at any number of seeds, instead of declared looks."
    )
    early_stop: Literal["fail"] | None = Field(
        None,
        description="fail: an arm that has failed at a declared look gets no further seeds. Default: all are trained.",
    )
    correction: Literal["per_comparison", "holm"] = Field(
        "per_comparison", description="holm: verdicts corrected over the recipes of the study too."
    )
    speedup: Annotated[float, Field(gt=0)] | None = Field(
        None, description="FP8's measured throughput over BF16's; a gap's token cost is weighed against it."
    )


class RuntimeSpec(Frozen):
    """What cannot change a number: not part of a run's identity."""

    checkpoint_every: PositiveInt | None = Field(
        None,
        description="Optimizer steps; default: a tenth of the steps, fewer checkpoints where they would take more than "
        "1 % of the time.",
    )
    keep_checkpoints: tuple[PositiveInt, ...] = Field(
        (),
        description="Steps of which every BF16 control run keeps its checkpoint for good, the last one included, so "
        "that forks can start there (docs/fork.md).",
    )
    slots: PositiveInt | None = Field(
        None,
        description="Runs at a time; default: cores / train.threads, or GPUs x slots_per_gpu, within memory.",
    )
    slots_per_gpu: PositiveInt = Field(
        1, description="Runs at a time on each GPU, as far as its memory holds their estimates."
    )
    hang_after_s: Annotated[float, Field(gt=0)] = Field(
        900.0,
        description="Seconds without a sign of life after which a worker is killed and tried again; more than "
        "compiling, or one evaluation, takes.",
    )
    standby: bool | None = Field(
        None,
        description="Start the next run's worker while the run before it trains; it waits for its slot. true: with "
        "its model on the device, proven and compiled. Default: true for several runs on each GPU; up to the model "
        "on the host where a run has its GPU to itself, or where slots are given; false on a CPU.",
    )
    tokens_per_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Throughput of one run, for the hours that `plan` states."
    )


class RecipeFile(Frozen):
    """A recipe file: one base configuration, the axes varied, seeds, null arms and criteria."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = Field(
        "", description="Name of the study; default: the file's name."
    )
    description: str = Field("", description="One sentence for the report.")
    base: dict[str, dict[str, Any]] = Field(
        description="Sections model, data, optim, train, precision; fork_from where runs start from a checkpoint."
    )
    axes: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="Dotted key to a list of values; the matrix is their product."
    )
    exclude: tuple[dict[str, Any], ...] = Field(
        (), description="Cells whose dotted keys all have these values: out."
    )
    include: tuple[dict[str, Any], ...] = Field((), description="Further cells: dotted keys over the base.")
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = Field(
        description="Each seed is one pair."
    )
    control: dict[str, Any] = Field(
        default_factory=lambda: {"precision.recipe": "bf16"},
        description="Dotted precision keys of the control arm.",
    )
    null: tuple[NullArm, ...] = Field((), description="Replicas of the control.")
    criteria: CriteriaSpec = Field(default_factory=CriteriaSpec, description="How the curves are judged.")
    probe: ProbeSpec = Field(
        default_factory=ProbeSpec, description="When tensor statistics are taken; no number changes."
    )
    runtime: RuntimeSpec = Field(
        default_factory=RuntimeSpec, description="Cadence and slots; no number changes."
    )

    @field_validator("axes")
    @classmethod
    def _no_empty_axis(cls, axes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in axes.items():
            if not values:
                raise ValueError(f"axis {key} is empty; give it at least one value or leave it out")
        return axes

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        repeated = sorted({s for s in seeds if seeds.count(s) > 1})
        if repeated:
            raise ValueError(f"seeds {repeated} stand twice; a repeated seed is no new evidence")
        return _within_generators(seeds)


def parse(marked: MarkedYaml) -> tuple[RecipeFile | None, Problems]:
    """Check the file's own structure; the cells of the matrix are checked by `matrix.expand`."""
    problems = Problems(marked)
    values = {"name": marked.path.stem, **marked.values}
    recipe = None
    try:
        recipe = RecipeFile.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            problems.add(tuple(item["loc"]), explain(item, RecipeFile))
    _check_keys(marked.values, problems)
    if problems:
        _check_base(marked.values.get("base"), problems)
    return (recipe if not problems else None), problems


def _check_keys(values: Mapping[str, Any], problems: Problems) -> None:
    """Check the names of sections and of dotted keys, which pydantic sees as plain strings."""
    base = values.get("base")
    if isinstance(base, Mapping):
        for section in base:
            if section not in SECTIONS:
                problems.add(("base", section), f"unknown section; {nearest(str(section), SECTIONS)}")
    for path, entry in _dotted_entries(values):
        _check_dotted(entry, path, problems)
    control = values.get("control")
    for key in control if isinstance(control, Mapping) else ():
        if not str(key).startswith("precision."):
            problems.add(
                ("control", key), "the control differs from its pair in precision only; vary it in axes"
            )


def _dotted_entries(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[Any, Any]]]:
    """Yield every mapping of dotted keys in the file with its path."""
    for name in ("axes", "control"):
        if isinstance(values.get(name), Mapping):
            yield (name,), values[name]
    for name in ("exclude", "include"):
        entries = values.get(name)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping):
                yield (name, index), entry


def _check_base(base: Any, problems: Problems) -> None:
    """Check the base by itself when no matrix can be expanded, so that one pass still finds its errors."""
    for section in SECTIONS:
        values = base.get(section) if isinstance(base, Mapping) else None
        model = record_of(section, values)
        if not isinstance(values, Mapping) or model is None:
            continue
        try:
            model.model_validate({key: value for key, value in values.items() if key != "keep"})
        except ValidationError as error:
            for item in error.errors():
                if item["type"] != "missing":  # an axis may give it
                    problems.add(("base", section, *item["loc"]), explain(item, model))


def record_of(section: str, values: Any) -> type[Frozen] | None:
    """Return the record of a section's values, by their kind; None for a kind that does not exist."""
    if section not in KINDS:
        return SECTIONS[section]
    default, records = KINDS[section]
    return records.get(kind_of(values, default))


def records_of(section: str) -> dict[str, type[Frozen]]:
    """Return the records of a section by kind; one without kinds has the kind ''."""
    return KINDS[section][1] if section in KINDS else {"": SECTIONS[section]}


def run_error(item: Mapping[str, Any]) -> tuple[KeyPath, str]:
    """Return the place in a run, and the explanation, of one pydantic error of a `RunSpec`."""
    loc = tuple(item["loc"])
    place = untagged(loc)
    if item["type"] == "union_tag_invalid":
        return (*place, "kind"), explain(item, RunSpec)
    if place == loc:
        return place, explain(item, RunSpec)
    return place, explain({**item, "loc": place[1:]}, KINDS[str(loc[0])][1][str(loc[1])])


def dotted_keys() -> list[str]:
    """Return every key that an axis may name."""
    keys = [
        f"{name}.{field}"
        for name in SECTIONS
        for record in records_of(name).values()
        for field in written_by_users(record)
    ]
    return [*dict.fromkeys(keys), "precision.keep"]


def _check_dotted(entry: Mapping[Any, Any], path: KeyPath, problems: Problems) -> None:
    known = dotted_keys()
    for key in entry:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.add((*path, key), f"is no section.key of a run{hint} (such as precision.recipe)")


def set_dotted(sections: dict[str, dict[str, Any]], key: str, value: Any) -> None:
    """Set `section.key` in place; `precision.keep: N` is short for keep_first and keep_last."""
    section, _, name = key.partition(".")
    target = sections.setdefault(section, {})
    if key == "precision.keep":
        target["keep_first"] = target["keep_last"] = value
    else:
        target[name] = value


def base_sections(recipe: RecipeFile) -> dict[str, dict[str, Any]]:
    """Return a fresh copy of the base with `precision.keep` written out."""
    sections = {name: dict(values) for name, values in recipe.base.items()}
    precision = sections.setdefault("precision", {})
    if "keep" in precision:
        keep = precision.pop("keep")
        precision.setdefault("keep_first", keep)
        precision.setdefault("keep_last", keep)
    return sections


def run_spec(
    sections: Mapping[str, Mapping[str, Any]], seed: int, replica: int, kind: ReplicaKind
) -> RunSpec:
    """Build one run's specification; raises pydantic's `ValidationError`."""
    present = {name: sections.get(name, {}) for name in SECTIONS if name != "fork_from" or name in sections}
    return RunSpec.model_validate({**present, "seed": seed, "replica": replica, "replica_kind": kind})
