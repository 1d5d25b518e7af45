"""What is said of runs of a loop that is not ours: whether FP8 ran there is known by its probes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fp8parity_analysis.arms import Arm

_SHOWN = 4


def probed_words(arm: str, probed: Mapping[str, Any]) -> str:
    """Return what a verdict must say of a run by the manifest's `probed`; empty where every linear casts as `arm`."""
    if not probed.get("probes"):
        return "that FP8 ran is not proven: no probe was recorded"
    linears, fp8, others = (probed.get(key) for key in ("linears", "fp8", "bf16"))
    found = fp8.items() if isinstance(fp8, Mapping) else ()
    by_recipe = {str(key): names for key, names in found if isinstance(names, list)}
    count = sum(map(len, by_recipe.values()))
    if not count:
        return f"that FP8 ran is not proven: of {linears} linears probed none casts to FP8"
    if count == linears and list(by_recipe) == [arm]:
        return ""
    rest = [str(name) for name in others] if isinstance(others, list) else []
    more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    without = f"; not in {', '.join(rest[:_SHOWN])}{more}" if rest else ""
    return f"FP8 in {count} of {linears} linears probed (casts of {' and '.join(by_recipe)}){without}"


def probed_remarks(arm: Arm, seeds: Sequence[int]) -> Iterator[str]:
    """Yield what a verdict must say about what ran in its arm's runs, once, naming the runs where not all share it."""
    if arm.null_arm:
        return
    runs = [run for seed in seeds for run in arm.test[seed]]
    said: dict[str, list[str]] = {}
    for run in runs:
        if run.probed is not None:
            said.setdefault(probed_words(run.arm, run.probed), []).append(run.label)
    said.pop("", None)
    for words, labels in said.items():
        more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
        yield words if len(labels) == len(runs) else f"{words}: {', '.join(labels[:_SHOWN])}{more}"
