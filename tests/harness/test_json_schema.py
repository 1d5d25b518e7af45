from __future__ import annotations

import json
from pathlib import Path

from fp8parity.json_schema import recipe_schema
from fp8parity.recipe_file import SECTIONS, RecipeFile

STORED = Path(__file__).parents[2] / "recipes" / "recipe.schema.json"


def test_stored_schema_is_current() -> None:
    assert json.loads(STORED.read_text()) == recipe_schema(), (
        "run: fp8parity schema > recipes/recipe.schema.json"
    )


def test_schema_describes_every_key() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == set(RecipeFile.model_fields)
    for name, section in SECTIONS.items():
        properties = schema["properties"]["base"]["properties"][name]["properties"]
        assert set(properties) >= set(section.model_fields)
        assert all("description" in value for value in properties.values())
