"""YAML with line numbers: the values, and where each of them stands in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8parity.errors import UsageError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class MarkedYaml:
    """A parsed file: its values, and the line (from 1) of every key and list element by its path."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its closest parent that stands in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader whose every error has a line, of values that look like a date or number and are none too."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except ValueError as error:
            words = _TOO_LARGE if node.tag.endswith(":int") else f"{error}; put it in quotes if it is a text"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise yaml.constructor.ConstructorError(None, None, _TOO_LARGE, node.start_mark)
        return value


_INT_BITS = 64
"""Far beyond what any setting takes, and what every later computation with it can hold."""

_TOO_LARGE = (
    f"the number is beyond 2^{_INT_BITS} - 1, the largest that is taken; put it in quotes if it is a text"
)


def _refuse_loops(node: yaml.Node, path: Path, above: tuple[yaml.Node, ...] = ()) -> None:
    """Raise `UsageError` where an alias stands inside what it names."""
    if node in above:
        raise UsageError(
            f"{path}:{node.start_mark.line + 1}: this value contains itself through an alias (*name); write it out"
        )
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    items = node.value if isinstance(node, yaml.SequenceNode) else (part for pair in pairs for part in pair)
    for child in items:
        _refuse_loops(child, path, (*above, node))


def _walk(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], duplicates: list[tuple[int, str]]
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*path, key.value)
            if child in lines:
                duplicates.append((key.start_mark.line + 1, ".".join(map(str, child))))
            lines[child] = key.start_mark.line + 1
            _walk(value, child, lines, duplicates)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _walk(value, (*path, index), lines, duplicates)


def _named_keys(value: Any) -> Any:
    # YAML reads the bare key `null:` as None; here it is the name of the null arms.
    if isinstance(value, dict):
        return {"null" if key is None else key: _named_keys(child) for key, child in value.items()}
    return [_named_keys(child) for child in value] if isinstance(value, list) else value


def load(path: Path) -> MarkedYaml:
    """Parse a YAML file whose top level is a mapping; `UsageError` names file, line and remedy.

    A key written twice is an error here, while plain YAML would silently keep the last.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); give the path of a recipe file"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text ({error.reason})") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _refuse_loops(node, path)
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{path}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise UsageError(f"{path}:1: is nested too deeply for a recipe file; see docs/recipes.md") from error
    if node is None or not isinstance(values, dict):
        raise UsageError(
            f"{path}:1: a recipe file is a mapping with base, axes, seeds and criteria; see docs/recipes.md"
        )
    values = _named_keys(values)
    lines: dict[KeyPath, int] = {}
    duplicates: list[tuple[int, str]] = []
    _walk(node, (), lines, duplicates)
    if duplicates:
        raise UsageError(
            "\n".join(f"{path}:{line}: {key}: written twice; keep one" for line, key in duplicates)
        )
    return MarkedYaml(path, values, lines)
