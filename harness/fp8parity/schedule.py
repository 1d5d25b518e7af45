"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from fp8parity.spec import OptimSpec, RunSpec


def lr_factor(step: int, steps: int, optim: OptimSpec) -> float:
    """Return the share of the peak rate that optimizer step `step` (from 0) of `steps` uses.

    After a linear warm-up: `cosine` decays to min_lr_ratio at the last step (Loshchilov and Hutter 2017), `wsd`
    stays at the peak and decays linearly over the last decay_fraction (warm-up, stable, decay: Hu et al. 2024,
    MiniCPM), `constant` stays.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    last = max(steps - 1, optim.warmup_steps + 1)
    low = optim.min_lr_ratio
    if optim.schedule == "cosine":
        done = (step - optim.warmup_steps) / (last - optim.warmup_steps)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    decay_start = max(optim.warmup_steps, round(steps * (1 - optim.decay_fraction)))
    done = (step - decay_start) / max(1, last - decay_start)
    return 1.0 - (1 - low) * min(1.0, max(0.0, done))


def run_lr_factor(step: int, spec: RunSpec) -> float:
    """Return `lr_factor` of a run's optimizer step `step` (from 0); a fork may go on in its parent's schedule."""
    before = spec.schedule_before
    return lr_factor(before + step, before + spec.train.steps, spec.optim)
