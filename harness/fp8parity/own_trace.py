"""What a forward pass of a user's model must leave as it was: buffers, attributes, and every generator.

Anything else would make a number depend on more than seed and step: on how often one looked, on where a run resumed, or
on which copy of the model ran (the held-out loss of an FP8 arm is computed by a copy, `own_model.plain_twin`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8parity.errors import UsageError

_TORCHS_OWN = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""Attributes that every module has; parameters, buffers and members are looked at as such."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, collections.deque)


class Trace:
    """A model's attributes and the host's generators (Python's `random`, numpy's global one) at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # kept, so that no new object can take the place, and the id, of one that is gone
        self._kept: list[Any] = []
        self._attributes = self._read()
        self._generators = _host_generators()

    def check(self) -> None:
        """Raise `UsageError`, naming it, when an attribute of a module changed or a generator was drawn from."""
        name = type(self.model).__name__
        drawn = [key for key, state in _host_generators().items() if state != self._generators[key]]
        if drawn:
            raise UsageError(
                f"{name}: its forward pass draws random numbers from {' and '.join(drawn)} (LayerDrop?); a number "
                "would depend on more than seed and step; build it without"
            )
        after = self._read()
        keys = dict.fromkeys([*self._attributes, *after])
        changed = [key for key in keys if self._attributes.get(key) != after.get(key)]
        if changed:
            raise UsageError(
                f"{name}: its forward pass changes the attributes {', '.join(changed[:3])}; a pass must leave the "
                "model as it was: use local variables, and set in __init__ what stays the same (no counters, nothing "
                "kept from pass to pass)"
            )

    def _read(self) -> dict[str, Any]:
        return {
            f"{path}.{key}".lstrip("."): self._frozen(value)
            for path, module in self.model.named_modules()
            for key, value in vars(module).items()
            if key not in _TORCHS_OWN
        }

    def _frozen(self, value: Any) -> Any:
        """Return what is equal exactly as long as `value` holds the same: plain data by value, the rest by identity."""
        if isinstance(value, _SCALARS):
            return type(value), repr(value)
        if isinstance(value, _LISTS):
            return type(value), tuple(self._frozen(item) for item in value)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self._frozen(item) for item in value)
        if isinstance(value, Mapping):
            return type(value), tuple((self._frozen(k), self._frozen(v)) for k, v in value.items())
        if _is_record(value):
            return type(value), self._frozen(dict(vars(value)))
        self._kept.append(value)
        return id(value), _inside(value)


def _is_record(value: Any) -> bool:
    if isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value)


def _inside(value: Any) -> Any:
    """Return what changes with an object that stays the same one: a tensor's version, an array, a generator's state."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return pickle.dumps(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return None


def _host_generators() -> dict[str, Any]:
    return {
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),  # noqa: NPY002 -- a model may draw from the global one
    }


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Raise `UsageError` when what runs inside draws random numbers, or changes a buffer or an attribute."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = _generator_states(model)
    trace = Trace(model)
    yield
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name not in buffers or not torch.equal(buffers[name], buffer)
    ]
    if changed:
        raise UsageError(
            f"{type(model).__name__}: its forward pass changes the buffers {', '.join(changed[:3])}; a pass must leave "
            "the model as it was (no running statistics, no counters)"
        )
    if any(not torch.equal(a, b) for a, b in zip(states, _generator_states(model), strict=True)):
        raise UsageError(
            f"{type(model).__name__}: its forward pass draws random numbers (dropout?); set them to 0, so that every "
            "number follows from seed and step"
        )
    trace.check()


def _generator_states(model: nn.Module) -> list[Tensor]:
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]
