"""The state that a fork starts from: weights and optimizer moments of a parent's checkpoint, known by their digests."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8parity.errors import UsageError
from fp8parity.spec import ParentState

_WEIGHTS = "model."
"""Prefix of the decoder's parameters in a checkpoint: the name under which the training module holds it."""


@dataclass(frozen=True)
class StartState:
    """Weights by FQN, and the optimizer's state per parameter in the order of its groups, all on the CPU."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[int, Mapping[str, Any]]


def tensors_digest(named: Iterable[tuple[str, Any]]) -> str:
    """Return the sha256 over every name, shape, dtype and byte; a plain number counts by its text."""
    digest = hashlib.sha256()
    for name, value in named:
        if isinstance(value, Tensor):
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name}={value!r}".encode())
    return digest.hexdigest()


def state_of(document: Mapping[str, Any]) -> StartState:
    """Return weights and optimizer state of a checkpoint's document."""
    weights = {
        name.removeprefix(_WEIGHTS): value
        for name, value in document["state_dict"].items()
        if name.startswith(_WEIGHTS)
    }
    return StartState(weights, document["optimizer_states"][0]["state"])


def digests(state: StartState) -> tuple[str, str]:
    """Return the digests of weights and optimizer state."""
    moments = (
        (f"{index}.{key}", state.optimizer[index][key])
        for index in sorted(state.optimizer)
        for key in sorted(state.optimizer[index])
    )
    return tensors_digest(sorted(state.weights.items())), tensors_digest(moments)


def read_state(path: Path) -> StartState:
    """Map a checkpoint's tensors into memory; `UsageError` when it is missing or no checkpoint of ours."""
    try:
        # tensors and plain values only: a parent may be somebody else's file, and a pickle runs what it likes
        return state_of(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (OSError, RuntimeError, KeyError, IndexError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"fork_from.step: {path} cannot be read ({reason}); take another kept step, or train the parent again"
        ) from error


def load_start(path: Path, parent: ParentState) -> StartState:
    """Return the state that a fork's specification names; `UsageError` when the checkpoint holds another one."""
    state = read_state(path)
    for what, found, wanted in zip(
        ("weights", "optimizer state"),
        digests(state),
        (parent.weights_sha256, parent.optimizer_sha256),
        strict=True,
    ):
        if found != wanted:
            raise UsageError(
                f"fork_from.step: {path} holds other {what} than this fork was planned with (sha256 {found[:16]}..., "
                f"planned {wanted[:16]}...); the parent was trained again: plan the fork anew, in another --out"
            )
    return state


@torch.no_grad()
def load_weights(model: torch.nn.Module, state: StartState) -> None:
    """Copy a parent's weights into a model of the same parameters; `UsageError` names what does not fit."""
    try:
        model.load_state_dict(dict(state.weights), strict=True)
    except RuntimeError as error:
        raise UsageError(f"fork_from.run: the parent's weights do not fit this model ({error})") from error


def load_moments(optimizer: torch.optim.Optimizer, state: StartState) -> None:
    """Give a fresh optimizer its parent's moments and step count; its own hyperparameters stay.

    Parameters are matched by their place in the groups, which model and optimizer build in the same order in every
    run; one that never had a gradient has no moments, in the parent as here. `UsageError` when the moments' shapes are
    not the parameters'.
    """
    own = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        moments = state.optimizer.get(index, {})
        if any(
            isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape
            for value in moments.values()
        ):
            raise UsageError(
                f"fork_from.run: the parent's optimizer state does not fit parameter {index} of shape "
                f"{tuple(parameter.shape)}; the parent has another model"
            )
    # load_state_dict copies what it moves or casts, but keeps tensors that already fit: those must not be shared
    copied = {
        index: {key: value.clone() if isinstance(value, Tensor) else value for key, value in moments.items()}
        for index, moments in state.optimizer.items()
    }
    optimizer.load_state_dict({"state": copied, "param_groups": own["param_groups"]})
