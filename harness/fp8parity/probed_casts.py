"""What the probes of a plain loop say about its arm: which linears cast to FP8, and whether the arm's name agrees.

Our own runner proves before the first step what a run executes. A loop of somebody else's has only its probes for that.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fp8parity.spec import RecipeName
from fp8parity_analysis import schema
from fp8parity_analysis.tensor_schema import TRAINED

RECIPES = frozenset(get_args(RecipeName)) - {schema.CONTROL_ARM}
_SHOWN = 3


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


@dataclass
class ProbedCasts:
    """The casts that training made, by all probes so far of one run of `arm`."""

    arm: str
    probes: int = 0
    linears: dict[str, None] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)
    """FQN of each linear that casts to FP8, and the recipe whose casts these are."""
    formats: dict[str, dict[str, str]] = field(default_factory=dict)
    """Format of each operand, by GEMM."""

    def add(self, linears: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Add one probe of a model's `linears`, by its rows of `tensor_schema.CAST_COLUMNS`."""
        self.probes += 1
        self.linears |= dict.fromkeys(linears)
        for row in rows:
            if row["kind"] == TRAINED:
                self.recipes[row["fqn"]] = row["recipe"]
                self.formats.setdefault(row["gemm"], {})[row["operand"]] = row["format"]

    def difference(self) -> str:
        """Return what speaks against the arm's name; empty before the first probe, and for a name of one's own."""
        name = self.arm.lower()
        if not self.probes:
            return ""
        if name == schema.CONTROL_ARM and self.recipes:
            return (
                f"arm {self.arm} is the control, and {_listed(self.recipes)} cast to FP8; train it unconverted, or "
                "give the arm the recipe's name"
            )
        if name not in RECIPES:
            return ""
        if not self.recipes:
            return (
                f"arm {self.arm}: none of the {len(self.linears)} linears casts to FP8, so this trains in BF16; "
                "convert the model first and make the probe after that, or name the arm for what it is"
            )
        other = {fqn: recipe for fqn, recipe in self.recipes.items() if recipe in RECIPES - {name}}
        if not other:
            return ""
        named = " and ".join(sorted(set(other.values())))
        return (
            f"arm {self.arm}: the casts of {_listed(other)} are those of {named}; convert with {name}, or name the "
            "arm for what it is"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's `probed`."""
        by_recipe: dict[str, list[str]] = {}
        for fqn, recipe in self.recipes.items():
            by_recipe.setdefault(recipe, []).append(fqn)
        return {"probes": self.probes, "linears": len(self.linears), "fp8": by_recipe, "bf16": self._others()}

    def conversion(self) -> dict[str, Any] | None:
        """Return the manifest's `conversion` as far as probes know it; None where nothing casts to FP8."""
        if not self.recipes:
            return None
        return {
            "recipe": self.arm,
            "converted": list(self.recipes),
            "skipped": [{"fqn": fqn, "reason": "no FP8 cast seen by a probe"} for fqn in self._others()],
            "gemm_dtypes": {gemm: " x ".join(operands.values()) for gemm, operands in self.formats.items()},
        }

    def _others(self) -> list[str]:
        return [fqn for fqn in self.linears if fqn not in self.recipes]
