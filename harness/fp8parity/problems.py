"""Mistakes in a recipe file, each with its place and its remedy, collected in one pass."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from fp8parity.yaml_marks import KeyPath, MarkedYaml


class Problems:
    """Collects `file:line: key: message` once each, in order of appearance."""

    def __init__(self, marked: MarkedYaml) -> None:
        self._marked = marked
        self._seen: dict[tuple[int, str], None] = {}

    def add(self, path: KeyPath, message: str) -> None:
        """Add a problem at a key path of the file."""
        line = self._marked.line(path)
        key = ".".join(str(part) for part in path)
        self._seen.setdefault((line, f"{self._marked.path}:{line}: {key}: {message}" if key else message))

    def __bool__(self) -> bool:
        return bool(self._seen)

    def __str__(self) -> str:
        """Return all problems, one per line, in file order."""
        return "\n".join(text for _, text in sorted(self._seen, key=lambda item: item[0]))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return 'did you mean X? known: ...' for a misspelt name."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def _fields_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the field names of the record that `path` (without its last part) leads to."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        current = next(
            (a for a in _flatten(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None
        )
        if current is None:
            return []
    return list(current.model_fields)


def _flatten(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation] if not arguments else [a for part in arguments for a in _flatten(part)]


def explain(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    """Turn one pydantic error into one sentence with the value and the remedy."""
    kind, path = error["type"], tuple(error["loc"])
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(path[-1]), _fields_at(model, path[:-1]))}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "union_tag_invalid":
        known = re.findall(r"'([^']*)'", error["ctx"]["expected_tags"])
        return f"got {error['ctx']['tag']!r}; {nearest(error['ctx']['tag'], known)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = repr(error.get("input"))
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"got {shown}; {nearest(str(error.get('input')), expected)}"
    return message if kind == "value_error" or len(shown) > 60 else f"{message} (got {shown})"
