"""When tensor statistics are taken, and of which casts: a section of the recipe file that changes no number.

The probe is a pass of its own beside training (`probe.py`), so its cadence is no part of a run's identity: it stands in
`spec.json` outside the hashed RunSpec, like the cadence of checkpoints. Imports no torch.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import Field, field_validator

from fp8parity.spec import Frozen, NonNegativeInt, PositiveInt, RecipeName

EVERY = 1000
"""Default cadence: with the dense beginning 0.15 % of 10 000 steps, which is 1 % of the training time at 6.7 steps a
probe. Measured on an H200 it was 3 to 6.6 steps, the most with three what-if recipes on a small model
(`docs/tensor-statistics.md`): an uncompiled forward and backward pass, and the statistics."""

DENSE_EVERY = 100
DENSE_SHARE = 20
DENSE_LIMIT = 500
"""By default the first 1/20 of a run, at most 500 steps, is probed every 100 steps: scales and gradients move most
there. It adds at most one probe per 2000 steps trained. A run shorter than 1000 steps has none unless it asks."""


class ProbeSpec(Frozen):
    """The section `probe` of a recipe file."""

    every: NonNegativeInt = Field(EVERY, description="Optimizer steps between probes; 0: no probe.")
    dense_until: NonNegativeInt | None = Field(
        None, description="Probe more often up to this step; default: a 20th of the steps, at most 500."
    )
    dense_every: PositiveInt = Field(
        DENSE_EVERY, description="Optimizer steps between probes up to dense_until."
    )
    what_if: tuple[RecipeName, ...] | None = Field(
        None,
        description="FP8 recipes whose casts are tried on every arm's operands; default: in BF16 arms the recipes of "
        "the FP8 arms they are compared with, in FP8 arms none beside their own.",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        # YAML 1.1 turns a bare `off` into False.
        return 0 if value is False or value == "off" else value

    @field_validator("what_if")
    @classmethod
    def _casts(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and "bf16" in names:
            known = [name for name in get_args(RecipeName) if name != "bf16"]
            raise ValueError(f"bf16 casts nothing; write FP8 recipes: {', '.join(known)}")
        return names


class ProbePlan(Frozen):
    """The probe of one run, with every default written out; `spec.json` holds it under `probe`.

    `weight_cast_source` is what the weights of what-if casts are read from.
    """

    every: NonNegativeInt = 0
    dense_until: NonNegativeInt = 0
    dense_every: PositiveInt = DENSE_EVERY
    what_if: tuple[RecipeName, ...] = ()
    weight_cast_source: str = "compute"

    def is_due(self, step: int) -> bool:
        """Whether to probe after this many optimizer steps."""
        if self.every == 0 or step < 1:
            return False
        return step % self.every == 0 or (step <= self.dense_until and step % self.dense_every == 0)

    def due_steps(self, steps: int) -> tuple[int, ...]:
        """Return every probed step of a run of this length."""
        return tuple(step for step in range(1, steps + 1) if self.is_due(step))


def resolve(spec: ProbeSpec, steps: int, arms: tuple[RecipeName, ...], source: str) -> ProbePlan:
    """Return the plan of a run of `steps` steps.

    `arms` are the recipes to try by default, `source` the weight cast source of what-if casts.
    """
    dense = min(steps // DENSE_SHARE, DENSE_LIMIT) if spec.dense_until is None else spec.dense_until
    return ProbePlan(
        every=spec.every,
        dense_until=dense if spec.every else 0,
        dense_every=spec.dense_every,
        what_if=arms if spec.what_if is None else spec.what_if,
        weight_cast_source=source,
    )
