"""Short names of arms and cells: what varies in the matrix, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8parity.own_spec import written_by_users
from fp8parity.spec import AnyModelSpec, ModelSpec, RunSpec

_LONG_LABEL, _LONG_VALUE = 100, 32
"""Characters from which a label, and then a value in it, is cut: a directory is named by two labels, a seed, a replica
and a hash, within the 255 bytes that file systems take. Shorter labels stay as they always were."""


def varying(specs: Iterable[RunSpec], *, precision: bool) -> list[tuple[str, str]]:
    """Return the (section, key) whose value differs between the specs, precision's or all others."""
    return _varying([spec.canonical() for spec in specs], precision=precision)


def _varying(documents: Iterable[Mapping[str, Any]], *, precision: bool) -> list[tuple[str, str]]:
    cells = [
        {
            (section, key): repr(value)
            for section, values in document.items()
            if isinstance(values, dict) and section != "parent" and (section == "precision") == precision
            for key, value in values.items()
        }
        for document in documents
    ]
    paths = dict.fromkeys(path for cell in cells for path in cell)
    return [path for path in paths if len({cell.get(path) for cell in cells}) > 1]


def varying_within_recipes(cells: Sequence[RunSpec]) -> list[tuple[str, str]]:
    """Return the precision keys that tell two arms of one recipe apart; a backend of its own needs no mention."""
    return _varying_within_recipes([spec.canonical() for spec in cells])


def _varying_within_recipes(documents: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    by_recipe: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        by_recipe.setdefault(document["precision"]["recipe"], []).append(document)
    found = [path for same in by_recipe.values() for path in _varying(same, precision=True)]
    return list(dict.fromkeys(found))


def told_within_presets(cells: Sequence[RunSpec]) -> frozenset[str]:
    """Return the model keys that tell two decoders of one preset apart, which the preset's name cannot."""
    presets = {spec.model.preset for spec in cells if isinstance(spec.model, ModelSpec)} - {"custom"}
    same = [[s for s in cells if isinstance(s.model, ModelSpec) and s.model.preset == p] for p in presets]
    return frozenset(
        key for specs in same for section, key in varying(specs, precision=False) if section == "model"
    )


def named_settings(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the `section.key` that the labels of runs with these canonical specifications speak of."""
    found = [*_varying_within_recipes(documents), *_varying(documents, precision=False)]
    return [f"{section}.{key}" for section, key in found]


def arm_label(spec: RunSpec, varying: Sequence[tuple[str, str]]) -> str:
    """Name an FP8 arm: the recipe, `nN` for N GEMMs kept at both ends, any other key that varies, a BF16 tail."""
    values = spec.canonical()["precision"]
    parts = [values["recipe"]]
    keys = [key for _, key in varying if key not in ("recipe", "switch_at")]
    if values.get("switch_at"):  # an arm that ends in BF16 is never called by the recipe alone
        keys.append("switch_at")
    if {"keep_first", "keep_last"} & set(keys):
        first, last = values["keep_first"], values["keep_last"]
        parts.append(f"n{first}" if first == last else f"n{first}_{last}")
    others = [key for key in keys if key not in ("keep_first", "keep_last")]
    return _joined(parts, [(key, values.get(key)) for key in others])


def group_label(spec: RunSpec, varying: Sequence[tuple[str, str]], within_presets: frozenset[str]) -> str:
    """Name a cell without its precision: the model, and any other key that varies (`told_within_presets`)."""
    values = spec.canonical()
    users = set(written_by_users(type(spec.data)))
    extra = [
        (s, k)
        for s, k in varying
        if not (s == "model" and _follows(spec.model, k, within_presets)) and (s != "data" or k in users)
    ]
    return _joined([spec.model.label], [(k, values.get(s, {}).get(k)) for s, k in extra])


def _follows(model: AnyModelSpec, key: str, within_presets: frozenset[str]) -> bool:
    """Whether a key of the model need not be named: a preset stands for it, or it was found out from the others."""
    if isinstance(model, ModelSpec):
        return model.preset != "custom" and key not in within_presets
    return key not in written_by_users(type(model))


def _joined(parts: Sequence[str], settings: Sequence[tuple[str, Any]]) -> str:
    """Return the label; where it would be too long, its long values are cut and told apart by a digest."""
    label = "-".join([*parts, *(f"{key}={_short(value)}" for key, value in settings)])
    if len(label) <= _LONG_LABEL:
        return label
    return "-".join([*parts, *(f"{key}={_cut(value)}" for key, value in settings)])


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(value: Any) -> str:
    """Return a value fit for a directory name; what had to be replaced is told apart by a digest of the original."""
    text = _text(value)
    plain = "".join(c if c.isalnum() or c in "._,-" else "_" for c in text)
    return (
        plain
        if plain == text and text
        else f"{plain or 'none'}-{hashlib.sha256(text.encode()).hexdigest()[:4]}"
    )


def _cut(value: Any) -> str:
    short = _short(value)
    if len(short) <= _LONG_VALUE:
        return short
    return f"{short[:_LONG_VALUE]}-{hashlib.sha256(_text(value).encode()).hexdigest()[:8]}"
