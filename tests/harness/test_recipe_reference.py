from __future__ import annotations

import re
from pathlib import Path

from fp8parity.recipe_file import SECTIONS
from fp8parity.recipe_reference import reference, with_reference

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_page_is_current() -> None:
    page = PAGE.read_text()
    assert with_reference(page) == page, "run: python -m fp8parity.recipe_reference docs/recipes.md"


def test_every_key_stands_once_with_a_meaning() -> None:
    text = reference()
    for name, section in SECTIONS.items():
        table = text.partition(f"### base.{name}\n")[2].partition("\n###")[0]
        for key in section.model_fields:
            rows = re.findall(rf"^\| `{key}` \| .* \| (.+) \|$", table, flags=re.M)
            assert len(rows) == 1, key
            assert rows[0].strip()
