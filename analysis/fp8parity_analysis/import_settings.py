"""How the names of other programs map to ours: columns, metrics, runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_RUN_PATTERN = (
    r"^(?P<arm>.+?)[-_/. ]*(?:seed|s)[-_=]?(?P<seed>\d+)"
    r"(?:[-_/. ]*(?:replica|rep|r)[-_=]?(?P<replica>\d+))?$"
)
"""How a run's folder, file or display name gives its arm, seed and replica: `bf16_seed0`, `rowwise/seed3_r1`."""

PRESETS: dict[str, dict[str, str]] = {
    "torchtitan": {
        "validation_metrics/loss": schema.HELD_OUT,
        "loss_metrics/global_avg_loss": schema.TRAIN,
    },
    "megatron": {"lm loss validation": schema.HELD_OUT, "lm loss": schema.TRAIN},
    "nemo": {"val_loss": schema.HELD_OUT, "reduced_train_loss": schema.TRAIN},
}
"""Tags of the held-out and the training loss in the logs of known trainers."""

KNOWN = (*schema.EXTERNAL_COLUMNS, *schema.EXTERNAL_OPTIONAL_COLUMNS)
"""Columns of ours that a table may have."""

MIRRORED = f"{schema.HELD_OUT}/{schema.EVAL_BF16}"
"""Metric of the held-out loss in what `fp8parity mlflow` writes; its name does not say that it is a loss."""

_HELD_OUT_WORDS = frozenset(
    ("val", "valid", "validation", "eval", "evaluation", "test", "held", "heldout", "dev")
)
_TRAIN_WORDS = frozenset(("train", "training"))


def words_of(tag: str) -> tuple[str, ...]:
    """Return the lower-case words of a metric's name, split at `/ _ - .` and space."""
    return tuple(word for word in re.split(r"[/_\-. ]+", tag.lower()) if word)


def is_loss(tag: str) -> bool:
    """Whether a metric's name ends in the word loss, or is the one that `fp8parity mlflow` gives the held-out loss."""
    return words_of(tag)[-1:] == ("loss",) or tag == MIRRORED


def is_usual(tag: str) -> bool:
    """Whether a metric has the usual name of its split's loss: `loss`, `train/loss`, `eval_loss`, `val/loss`."""
    *words, last = words_of(tag) or ("",)
    return last == "loss" and (not words or tuple(words) == ("held", "out") or _is_split(words))


def _is_split(words: list[str]) -> bool:
    return len(words) == 1 and words[0] in _HELD_OUT_WORDS | _TRAIN_WORDS


@dataclass(frozen=True)
class ImportSettings:
    """How other people's names map to ours.

    `columns` maps our column to theirs; `tags` maps their metric or tag to a split (`held_out`, `train`, or
    the name of another held-out set); `preset` is a set of tags by trainer; `run_pattern` has the groups
    `arm`, `seed` and optionally `replica`; `tracking_uri` is MLflow's, None for its own default.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    preset: str | None = None
    run_pattern: str = DEFAULT_RUN_PATTERN
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise BadInputError(f"preset: {self.preset!r} is not known; write one of {', '.join(PRESETS)}")
        unknown = [name for name in self.columns if name not in KNOWN]
        if unknown:
            raise BadInputError(f"column: {unknown[0]!r} is not one of {', '.join(KNOWN)}")
        try:
            groups = re.compile(self.run_pattern).groupindex
        except re.error as error:
            raise BadInputError(
                f"run pattern: {self.run_pattern!r} is no regular expression ({error})"
            ) from error
        if not {"arm", "seed"} <= set(groups):
            raise BadInputError(
                f"run pattern: {self.run_pattern!r} needs the groups (?P<arm>...) and (?P<seed>...)"
            )

    @property
    def splits(self) -> dict[str, str]:
        """Their tags with our splits: the preset's, where no tag was given for the split, and those given."""
        given = set(self.tags.values())
        preset = PRESETS.get(self.preset or "", {})
        return {**{tag: split for tag, split in preset.items() if split not in given}, **self.tags}

    def run_named(self, name: str) -> dict[str, Any] | None:
        """Return arm, seed and replica that a run's name gives, or None."""
        match = re.search(self.run_pattern, name)
        if match is None:
            return None
        found = match.groupdict()
        return {"arm": found["arm"], "seed": int(found["seed"]), "replica": int(found.get("replica") or 0)}

    def is_candidate(self, tag: str) -> bool:
        """Whether a metric may be a loss: it is declared or, where nothing is, its name ends in the word loss."""
        declared = self.splits
        return tag in declared if declared else is_loss(tag)

    def split_of(self, tag: str) -> str:
        """Return the split of a tag: as declared, else by the whole words in its name."""
        declared = self.splits
        if tag in declared:
            return declared[tag]
        return schema.HELD_OUT if _HELD_OUT_WORDS.intersection(words_of(tag)) else schema.TRAIN
