"""Models and data that are not fp8parity's own: what a recipe file says of them. Imports no torch.

`kind` chooses the record: a model is a `decoder` (spec.ModelSpec) unless it says `import` or `hf`, data are `tokens`
(spec.DataSpec) unless they say `import` or `hf`. What was found out about them before training (digests of sources,
versions, the full configuration) is written into the record by `model_preflight.resolve` and is part of a run's
identity; the inventory of a model's linears follows from these and is not hashed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from fp8parity.frozen import Frozen

TARGET = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_.]*$"

_FOUND: dict[str, Any] = {"found": True}
"""Marks fields that are found out before training and never written by a user."""

Target = Annotated[str, Field(pattern=TARGET)]


class LinearFacts(Frozen):
    """One `nn.Linear` of a model, weight [n, k], as a forward pass met it.

    `order` counts first executions; linears that read the same tensor one after the other share a `group`; `block` is
    the place among the model's module-list members, None outside them. `runs` is false for a linear whose own forward
    is never called; `refusal` says why it cannot become FP8, empty if it can.
    """

    fqn: str
    k: int
    n: int
    order: int
    group: int
    block: int | None
    head: bool = False
    runs: bool = True
    bias: bool = False
    refusal: str = ""


class Inventory(Frozen):
    """What a model is made of, found by building it without memory and running one forward pass."""

    linears: tuple[LinearFacts, ...]
    parameters: int
    vocab_size: int
    blocks: tuple[str, ...]
    float_buffers: tuple[str, ...]
    can_checkpoint: bool
    notes: tuple[str, ...] = ()

    @property
    def head(self) -> str | None:
        """FQN of the output head, None when the logits are not made by an `nn.Linear`."""
        return next((linear.fqn for linear in self.linears if linear.head), None)


class _Own(Frozen):
    """A record with mappings inside: hashed by its JSON, since a dict has no hash."""

    sources: dict[str, str] = Field(
        default_factory=dict, description="sha256 of each module's file.", json_schema_extra=_FOUND
    )
    packages: dict[str, str] = Field(
        default_factory=dict, description="Versions of the packages imported.", json_schema_extra=_FOUND
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """Require what JSON can hold: the record is hashed and stored."""
    try:
        same: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; write numbers, texts, lists and mappings only") from error
    return same


class _OwnModel(_Own):
    inventory: Inventory | None = Field(
        None, description="The model's linears and blocks; not hashed.", json_schema_extra=_FOUND
    )

    @property
    def found(self) -> Inventory:
        """The inventory; present once the recipe file is read."""
        assert self.inventory is not None
        return self.inventory

    def resolve_vocab(self, data_vocab: int) -> int:
        """Return the last size of the logits; `ValueError` when the data has more token ids."""
        rows = self.found.vocab_size
        if rows < data_vocab:
            raise ValueError(
                f"vocab_size: the model gives logits for {rows} tokens, the data has {data_vocab}; build the model "
                f"with at least {data_vocab}"
            )
        return rows


class ImportModelSpec(_OwnModel):
    """Anybody's `nn.Module`: a function of yours builds it."""

    kind: Literal["import"] = Field(description="import: an nn.Module that a function of yours returns.")
    target: Target = Field(
        description="package.module:function, called with kwargs; returns an nn.Module that maps tokens "
        "[batch, context] to logits [batch, context, vocabulary], or to an object with them as .logits. Modules "
        "beside the recipe file are found."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    _json = field_validator("kwargs")(_plain_json)

    @property
    def label(self) -> str:
        """Short name for run names and reports."""
        module, _, name = self.target.partition(":")
        return f"{module.rpartition('.')[2]}.{name}"


class HfModelSpec(_OwnModel):
    """A causal language model of Hugging Face transformers; nothing is ever downloaded."""

    kind: Literal["hf"] = Field(description="hf: a causal language model of transformers (extra hf).")
    config: str | None = Field(
        None, description="Folder with a config.json, or the file, relative to the recipe file."
    )
    model_type: str | None = Field(
        None, description="Architecture by transformers' name, such as gpt2 or llama; instead of config."
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Configuration values that win, by transformers' names."
    )
    weights: str | None = Field(
        None,
        description="Folder that save_pretrained wrote: initial weights of every seed. Default: random ones.",
    )
    resolved_config: dict[str, Any] = Field(
        default_factory=dict, description="The whole configuration.", json_schema_extra=_FOUND
    )
    weights_sha256: str | None = Field(
        None, description="Digest of the weight files.", json_schema_extra=_FOUND
    )

    _json = field_validator("overrides")(_plain_json)

    @model_validator(mode="after")
    def _one_origin(self) -> HfModelSpec:
        given = [name for name in ("config", "model_type", "weights") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give one of config, model_type and weights (got {', '.join(given) or 'none'}); weights bring their "
                "own config.json"
            )
        return self

    @property
    def label(self) -> str:
        """Short name for run names and reports."""
        return str(self.resolved_config.get("model_type") or self.model_type or "hf")


_VOCAB = "Token ids are below this; the tokenizer's size."
_TAIL = "Share of the tokens held out, from the end, when no held-out part is given."
_SHA = "Expected sha256 of the packed tokens, as `data/*.json` of a study states it."


class _OwnData(_Own):
    vocab_size: Annotated[int, Field(ge=1)] = Field(description=_VOCAB)
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description=_TAIL)
    sha256: str | None = Field(None, description=_SHA)


class ImportDataSpec(_OwnData):
    """Anybody's tokens: a function of yours returns them, and they are packed into the study once."""

    kind: Literal["import"] = Field(description="import: tokens that a function of yours returns.")
    target: Target = Field(
        description="package.module:function, called with kwargs; returns a 1-D integer array, an iterable of such "
        "arrays, or a mapping with `train` and `held_out` of either. Must return the same at every call."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    _json = field_validator("kwargs")(_plain_json)


class HfDataSpec(_OwnData):
    """A Hugging Face dataset on disk, as `save_to_disk` wrote it, with a column of token ids."""

    kind: Literal["hf"] = Field(description="hf: a dataset that save_to_disk of the package datasets wrote.")
    path: str = Field(description="Its folder, relative to the recipe file.")
    column: str = Field("input_ids", description="Column of token ids: whole numbers, or lists of them.")
    split: str | None = Field(None, description="Split to train on; needed where the folder holds several.")
    held_out_split: str | None = Field(
        None, description="Split to evaluate on; default: the end of the training split."
    )
    separator: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Token id put after each row; default: rows are joined as they are."
    )
    fingerprint: str | None = Field(
        None, description="Digest of the dataset's state and file sizes.", json_schema_extra=_FOUND
    )

    @model_validator(mode="after")
    def _separator_is_a_token(self) -> HfDataSpec:
        if self.separator is not None and self.separator >= self.vocab_size:
            raise ValueError(f"separator {self.separator} is not below vocab_size {self.vocab_size}")
        return self


def own_part(model: ImportModelSpec | HfModelSpec, recipe_dir: str) -> dict[str, Any]:
    """Return what `spec.json` holds of a model beside its specification: where from, and its inventory."""
    return {"recipe_dir": recipe_dir, "inventory": model.found.model_dump(mode="json")}


def origin_of(model: ImportModelSpec | HfModelSpec) -> dict[str, Any]:
    """Return what a manifest says of a model beside sizes: digests and versions, blocks, and what is worth knowing."""
    own = {"kind", "target", "kwargs", "sources", "packages", "resolved_config", "weights_sha256"}
    return {
        **model.model_dump(mode="json", include=own),
        "blocks": list(model.found.blocks),
        "notes": list(model.found.notes),
    }


def with_own_part(spec: dict[str, Any], part: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a stored specification with the inventory put back into its model, where there is one."""
    if part is None:
        return spec
    return {**spec, "model": {**spec["model"], "inventory": part["inventory"]}}


OWN_MODELS: dict[str, type[Frozen]] = {"import": ImportModelSpec, "hf": HfModelSpec}
OWN_DATA: dict[str, type[Frozen]] = {"import": ImportDataSpec, "hf": HfDataSpec}


KINDS = ("decoder", "tokens", *OWN_MODELS)


def kind_of(values: Any, default: str) -> str:
    """Return the kind that a section's values, or an already checked record, name."""
    if isinstance(values, Mapping):
        return str(values.get("kind", default))
    return str(getattr(values, "kind", default))


def untagged(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return a field's place without the kind that pydantic puts into it: model.import.target is model.target."""
    tagged = len(loc) > 1 and loc[0] in ("model", "data") and loc[1] in KINDS
    return (loc[0], *loc[2:]) if tagged else tuple(loc)


def written_by_users(record: type[BaseModel]) -> list[str]:
    """Return the fields that belong into a recipe file: all but those found out before training."""
    return [name for name, field in record.model_fields.items() if field.json_schema_extra != _FOUND]
