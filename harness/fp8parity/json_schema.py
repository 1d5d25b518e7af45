"""The JSON Schema of recipe files, generated from the models, for editors."""

from __future__ import annotations

from typing import Any

from fp8parity.own_spec import written_by_users
from fp8parity.recipe_file import SECTIONS, RecipeFile, records_of
from fp8parity.spec import Frozen


def _add_kind(section: dict[str, Any], kind: str, record: type[Frozen]) -> None:
    """Add what a kind of model or data has beside the first one's keys, all in one flat list for editors."""
    if not kind:
        return
    schema = record.model_json_schema()
    section.setdefault("description", schema.get("description", ""))
    kinds = section["properties"].setdefault("kind", {"enum": [], "description": "What is described."})
    kinds["enum"].append(kind)
    for key in written_by_users(record):
        if key != "kind":
            section["properties"].setdefault(key, schema["properties"][key])


def _section(name: str) -> dict[str, Any]:
    """Return a section's schema with nothing required, since axes may give any key."""
    section = SECTIONS[name].model_json_schema()
    section.pop("required", None)
    for kind, record in records_of(name).items():
        _add_kind(section, kind, record)
    if name == "precision":
        section["properties"]["keep"] = {
            "type": "integer",
            "minimum": 0,
            "description": "Short for keep_first and keep_last.",
        }
    return section


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe file (JSON Schema 2020-12)."""
    schema = RecipeFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "fp8parity recipe file"
    schema["properties"]["base"] = {
        "type": "object",
        "description": RecipeFile.model_fields["base"].description,
        "properties": {name: _section(name) for name in SECTIONS},
        "additionalProperties": False,
    }
    schema["required"] = [name for name in schema["required"] if name != "name"]
    return schema
