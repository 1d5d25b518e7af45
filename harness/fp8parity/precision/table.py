"""The generated parts of docs/precision-recipes.md: what each recipe casts, and which combinations are legal.

`python -m fp8parity.precision.table docs/precision-recipes.md` rewrites them between their markers.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fp8parity.casts import GEMMS, OPERANDS, RECIPES, Gemm, GemmPlan
from fp8parity.precision_rules import BACKEND_RECIPES, backend_problem, compute_problems
from fp8parity.spec import Compute, PrecisionSpec, TrainSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

_EQUATIONS: dict[Gemm, str] = {
    "output": "input [M, K] · weight [N, K]ᵀ",
    "grad_input": "grad_output [M, N] · weight [N, K]",
    "grad_weight": "grad_output [M, N]ᵀ · input [M, K]",
}
_REDUCED: dict[Gemm, str] = {"output": "K", "grad_input": "N", "grad_weight": "M"}


def cast_table() -> str:
    """Return one Markdown row per recipe and GEMM: equation, and both operands' casts."""
    lines = [
        "| recipe | GEMM | reduced over | left operand | right operand |",
        "| --- | --- | --- | --- | --- |",
    ]
    for recipe, plan in RECIPES.items():
        for gemm in GEMMS:
            left, right = _operands(plan.gemm(gemm))
            lines.append(
                f"| `{recipe}` | {gemm} = {_EQUATIONS[gemm]} | {_REDUCED[gemm]} | {left} | {right} |"
            )
    return "\n".join(lines)


def _operands(plan: GemmPlan) -> tuple[str, str]:
    left, right = OPERANDS[plan.gemm]
    if not plan.is_fp8:
        return f"{left}: high precision", f"{right}: high precision"
    return f"{left}: {plan.left}", f"{right}: {plan.right}"


def cells() -> Iterator[tuple[PrecisionSpec, TrainSpec]]:
    """Yield every recipe x backend x compute mode x weight cast source, on a CPU."""
    sources = ("compute", "master")
    for recipe, backend, compute, source in product(RECIPES, BACKEND_RECIPES, get_args(Compute), sources):
        precision = {"recipe": recipe, "backend": backend, "weight_cast_source": source}
        train = {"steps": 20, "batch_size": 4, "context": 32, "compute": compute, "eval_every": 20}
        yield PrecisionSpec.model_validate(precision), TrainSpec.model_validate({**train, "device": "cpu"})


def refusal(precision: PrecisionSpec, train: TrainSpec) -> str | None:
    """Return why a cell is refused, or None if it trains."""
    problem = backend_problem(precision)
    if problem is not None:
        return problem[1]
    others = compute_problems(precision, train)
    return others[0][1] if others else None


def legality_table() -> str:
    """Return one Markdown row per recipe and backend, a column per compute mode and weight cast source."""
    columns: list[str] = []
    rows: dict[tuple[str, str], list[str]] = {}
    for precision, train in cells():
        column = f"{train.compute}, {precision.weight_cast_source}"
        columns += [] if column in columns else [column]
        reason = refusal(precision, train)
        words = "trains" if reason is None else f"refused: {_short(reason)}"
        rows.setdefault((precision.recipe, precision.backend), []).append(words)
    lines = [f"| recipe | backend | {' | '.join(columns)} |", "| --- | --- |" + " --- |" * len(columns)]
    lines += [f"| `{r}` | `{b}` | {' | '.join(words)} |" for (r, b), words in rows.items()]
    return "\n".join(lines)


def _short(reason: str) -> str:
    if " has no recipe " in reason:
        return "backend lacks it"
    return "no fp32 master" if "no fp32 master" in reason else "needs Hopper"


def rewritten(text: str) -> str:
    """Return the document with the text between each pair of markers replaced by its table."""
    for name, table in (("casts", cast_table()), ("legality", legality_table())):
        start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the document lacks the markers {start} and {end}")
        text = f"{before}{start}\n{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(rewritten(document.read_text(encoding="utf-8")), encoding="utf-8")
