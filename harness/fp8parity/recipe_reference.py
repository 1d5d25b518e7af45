"""The key tables of docs/recipes.md, from the models: `python -m fp8parity.recipe_reference docs/recipes.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fp8parity.own_spec import written_by_users
from fp8parity.probe_spec import ProbeSpec
from fp8parity.recipe_file import KINDS, SECTIONS, CriteriaSpec, NullArm, RecipeFile, RuntimeSpec, records_of

BEGIN, END = "<!-- generated: keys -->", "<!-- end of generated keys -->"


def _kind(section: str, kind: str) -> str:
    """Return what a title says of a kind; the one that is meant without `kind` has the section's own."""
    return "" if not kind or kind == KINDS[section][0] else f", kind: {kind}"


_TITLES: dict[str, type[BaseModel]] = {
    "Top level": RecipeFile,
    **{
        f"base.{name}{_kind(name, kind)}": record
        for name in SECTIONS
        for kind, record in records_of(name).items()
    },
    "null[]": NullArm,
    "criteria": CriteriaSpec,
    "probe": ProbeSpec,
    "runtime": RuntimeSpec,
}


def _values(field: FieldInfo) -> str:
    """Return the allowed names of a choice, or the kind of value."""
    parts = [field.annotation, *get_args(field.annotation)]
    choices = [str(a) for part in parts for a in get_args(part) if isinstance(a, str)] or [
        str(a) for a in get_args(field.annotation) if isinstance(a, str)
    ]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(choices))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=False)
    if value is PydanticUndefined or value is None or value in ((), "", {}):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(model: type[BaseModel]) -> list[str]:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name in written_by_users(model):
        field = model.model_fields[name]
        choices = _values(field)
        meaning = (field.description or "").replace("|", "\\|") + (f" One of {choices}." if choices else "")
        rows.append(f"| `{name}` | {_default(field)} | {meaning} |")
    return rows


def reference() -> str:
    """Return the Markdown of every key, each once."""
    lines = [BEGIN, ""]
    for title, model in _TITLES.items():
        lines += [f"### {title}", "", *_table(model), ""]
    return "\n".join([*lines, END])


def with_reference(page: str) -> str:
    """Return `page` with its generated part renewed."""
    before, _, rest = page.partition(BEGIN)
    return before + reference() + rest.partition(END)[2]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_reference(target.read_text(encoding="utf-8")), encoding="utf-8")
